"""Options that several commands share, and what they mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from sequoia_plan.runtime import Sampling


VERIFIERS = ["sequoia", "traversal", "specinfer", "spectr", "topk"]  # a test compares these two with the runtime's
LINKS = ["host", "disk"]


def options(*each: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Several decorators as one."""

    def decorate(command: Any) -> Any:
        for option in reversed(each):
            command = option(command)
        return command

    return decorate


seed_option = click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Makes sampling repeatable.")
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, nothing else there.")


DTYPE_HELP = "Of the weights; auto takes bfloat16 where the processor computes in it, else float32."

OFFLOAD_HELP = "Stream the target's layers that do not fit, from the host's memory to a CUDA device or from a file. [default: all in memory]"
MEMORY_HELP = "With --offload: what the target's weights, the draft and both KV caches may take, as 300MB or 24GB. [default: what is free]"
DRAFT_HELP = (
    "Draft model; or a folder of an EAGLE or DFlash draft as published, which its config.json tells; or a draft .safetensors made for the "
    "target; or int8: a copy of the target in 8 bits (a folder of that name is ./int8); or smollm2-135m-draft: the embedded language model of "
    "two layers. [default: smollm2-135m-eagle3, the embedded draft that reads the target's hidden states]"
)

tree_option = click.option("--tree", "tree_file", type=click.Path(), default="tree.safetensors", show_default=True, help="A tree file, or a catalog name.")

model_options = options(
    click.option("--target", metavar="ID|DIR|FILE.gguf", help="Target model. [default: the embedded SmolLM2-135M-Instruct]"),
    click.option("--draft", metavar="ID|DIR|FILE|int8", help=DRAFT_HELP),
    click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Where both models run. [default: cuda if there is one]"),
    click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16"]), default="auto", show_default=True, help=DTYPE_HELP),
    click.option("--offload", type=click.Choice(LINKS), help=OFFLOAD_HELP),
    click.option("--memory", metavar="SIZE", help=MEMORY_HELP),
)


def verifier_option(default: str) -> Callable[[Any], Any]:
    """`--verifier`; None where not given."""
    return click.option("--verifier", type=click.Choice(VERIFIERS), help=f"The rule that accepts drafted tokens; see docs/verifiers.md. [default: {default}]")


def sampling_options(default: str | None = None, verifier: str = "") -> Callable[[Any], Any]:
    """Options named as the fields of `Sampling`; None where not given. `default` says in the help what holds then, `verifier` for that one."""

    def option(name: str, type_: Any, value: str, text: str) -> Any:
        return click.option(name, type=type_, help=f"{text} [default: {default or value}]")

    return options(
        option("--temperature", float, "0", "Temperature of the target's sampling; 0 is greedy."),
        option("--top-p", float, "1", "Sample from the most probable tokens whose probabilities add up to this."),
        option("--top-k", int, "0", "Sample from so many of the most probable tokens; 0 takes all."),
        option("--min-p", float, "0", "Sample from tokens at least this fraction as probable as the most probable one."),
        option("--draft-temperature", float, "the target's", "Temperature of the distribution that a node's children are drawn from."),
        verifier_option(default or verifier),
    )


def read_sampling(given: dict[str, Any], made_for: Any = None) -> Sampling:
    """What was given on the command line, else what the tree was made for, else the defaults."""
    from sequoia_plan.runtime.sampling import Sampling

    names = Sampling().settings().keys()
    chosen = {name: (made_for or {}).get(name) if given.get(name) is None else given[name] for name in names}
    return Sampling(**{name: value for name, value in chosen.items() if value is not None})
