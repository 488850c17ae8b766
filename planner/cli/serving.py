"""The command that serves: the endpoint for editors and chat clients."""

from contextlib import suppress
from typing import Any

import click

from sequoia_plan.planner.cli.decoding import optional_tree_option, tree_for
from sequoia_plan.planner.cli.options import (
    count_option,
    model_options,
    name_option,
    read_sampling,
    sampling_options,
)
from sequoia_plan.planner.cli.pair import load_pair, warn_if_foreign


@click.command()
@optional_tree_option
@model_options
@name_option("--host", default="127.0.0.1", show_default=True, text="The address to listen on.")
@count_option("--port", default=8080, text="0 takes a free one.", least=0, most=65535)
@name_option(
    "--api-key", "key", text="What clients must send. [default: none]", envvar="SEQUOIA_PLAN_KEY"
)
@name_option("--cors", metavar="ORIGIN", text="Pages of this origin may ask from a browser.")
@count_option("--max-tokens", default=2048, text="New tokens of a request that names no number.")
@count_option("--cache-mb", default=1024, text="Megabytes for the caches of the last texts.")
@sampling_options
def serve(
    tree_file: str | None,
    models: dict[str, Any],
    host: str,
    port: int,
    key: str | None,
    cors: str | None,
    max_tokens: int,
    cache_mb: int,
    sampling: dict[str, Any],
) -> None:
    """Answer editors and chat clients, as OpenAI's API and llama-server do."""
    from sequoia_plan.server import serve as run
    from sequoia_plan.server.worker import Worker

    tree, remark = tree_for(tree_file, models)
    settings = read_sampling(sampling, tree.plan.settings)

    def load() -> Worker:
        """The models, with what decodes."""
        pair = load_pair(**models)
        if remark:
            click.echo(remark, err=True)
        else:
            warn_if_foreign(tree.plan, pair)
        return Worker(pair, tree, settings, cache_mb * 10**6)

    with suppress(KeyboardInterrupt):
        run(
            load, host, port, key=key, cors=cors, max_tokens=max_tokens,
            on_ready=lambda url: click.echo(f"ready at {url}"),
        )  # fmt: skip
