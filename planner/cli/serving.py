"""The command that serves: the endpoint for editors and chat clients."""

from contextlib import suppress
from typing import Any

import click

from sequoia_plan.planner.cli import options
from sequoia_plan.planner.cli.decoding import optional_tree_option, pair_for, tree_for


@click.command()
@optional_tree_option
@options.model_options
@options.sampling_options
@options.name_option("--host", default="127.0.0.1", show_default=True, text="Where to listen.")
@options.count_option("--port", default=8080, text="0 takes a free one.", least=0, most=65535)
@options.name_option("--api-key", "key", text="What clients must send. [default: nothing]")
@options.name_option("--cors", metavar="ORIGIN", text="Pages from there may ask, in a browser.")
@options.count_option(
    "--max-tokens", default=2048, text="New tokens of a request that names no number."
)
@options.count_option(
    "--cache-tokens",
    default=32768,
    text="Tokens that are kept of the last texts, so that a text "
    "that begins as one of them is read from there on.",
)
def serve(
    tree_file: str | None, models: dict[str, Any], sampling: Any, cache_tokens: int, **endpoint: Any
) -> None:
    """Answer editors and chat clients, as OpenAI's API and llama-server do."""
    from sequoia_plan.server import Worker, serve

    tree, tree_remark = tree_for(tree_file, models)
    settings = options.read_sampling(sampling, tree.plan.settings)

    def load() -> Worker:
        """The models, with what decodes."""
        return Worker(pair_for(tree, tree_remark, models), tree, settings, cache_tokens)

    with suppress(KeyboardInterrupt):
        serve(load, **endpoint, on_ready=lambda url: click.echo(f"ready at {url}"))
