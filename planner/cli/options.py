"""Options that several commands share."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from sequoia_plan.runtime import Sampling

# The runtime imports torch, so its names are repeated here; a test compares the two.
VERIFIERS = ["sequoia", "traversal", "specinfer", "spectr", "topk"]
LINKS = ["host", "disk"]

Decorator = Callable[[Any], Any]


def options(*decorators: Decorator) -> Decorator:
    """Combine option decorators into one; they are listed in the help in this order."""

    def decorate(command: Any) -> Any:
        """Apply the decorators to a command, the last one first."""
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


DTYPE_HELP = "Of the weights; auto takes bfloat16 where the processor computes in it, else float32."
THREADS_HELP = (
    "Threads that compute on the CPU: no more than there are idle cores. [default: one a core]"
)
OFFLOAD_HELP = (
    "Stream the target's layers that do not fit, from the host's memory to a CUDA device or from "
    "a file. [default: all in memory]"
)
MEMORY_HELP = (
    "With --offload: what the target's weights, the draft and both KV caches may take, as 300MB "
    "or 24GB. [default: what is free]"
)
DRAFT_HELP = (
    "Draft model; or a folder of an EAGLE or DFlash draft as published (its config.json says "
    "which); or a draft .safetensors made for the target; or int8: a copy of the target in 8 bits "
    "(a folder of that name is ./int8); or none, for trees that only look up; or "
    "smollm2-135m-draft: the embedded language model of two layers. [default: smollm2-135m-eagle3, "
    "the embedded draft that reads the target's hidden states]"
)
TARGET_HELP = "Target model. [default: the embedded SmolLM2-135M-Instruct]"


def whole_text(
    context: click.Context, parameter: click.Parameter, value: str | tuple[str, ...] | None
) -> Any:
    """A callback that refuses an option's text if it holds bytes that are no UTF-8."""
    for text in (value,) if isinstance(value, str) else value or ():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            name = parameter.opts[0]
            raise click.UsageError(
                f"{name} {text!a:.60}: character {error.start + 1} is no whole one; expected UTF-8"
            ) from error
    return value


def set_threads(context: click.Context, parameter: click.Parameter, value: int | None) -> None:
    """A callback that lets torch compute with so many threads; None leaves its own number."""
    if value is not None:
        import torch

        torch.set_num_threads(value)


seed_option = click.option(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    default=0,
    show_default=True,
    help="Makes sampling repeatable.",
)
json_option = click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="One JSON object on stdout, nothing else there.",
)
verbose_option = click.option(
    "-v", "--verbose", is_flag=True, help="Print all that was measured or predicted."
)
tree_option = click.option(
    "--tree",
    "tree_file",
    type=click.Path(),
    default="tree.safetensors",
    show_default=True,
    help="A tree file, or a catalog name.",
)
model_options = options(
    click.option("--target", metavar="ID|DIR|FILE.gguf", help=TARGET_HELP),
    click.option("--draft", metavar="ID|DIR|FILE|int8|none", help=DRAFT_HELP),
    click.option(
        "--device",
        type=click.Choice(["cpu", "cuda"]),
        help="Where both models run. [default: cuda if there is one]",
    ),
    click.option(
        "--dtype",
        type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
        default="auto",
        show_default=True,
        help=DTYPE_HELP,
    ),
    click.option(
        "--threads",
        type=click.IntRange(1, 1024),
        callback=set_threads,
        expose_value=False,
        help=THREADS_HELP,
    ),
    click.option("--offload", type=click.Choice(LINKS), help=OFFLOAD_HELP),
    click.option("--memory", metavar="SIZE", help=MEMORY_HELP),
)


def check_outputs(output: str | None, report: str | None, *inputs: str | None) -> None:
    """Raises, before anything is measured, if an output cannot be written or is an input."""
    from sequoia_plan.artifacts.files import check_writable, refuse_to_replace

    for path in filter(None, (output, report)):
        check_writable(path)
        refuse_to_replace(path, *inputs)
    if output and report and os.path.realpath(output) == os.path.realpath(report):
        raise click.UsageError(f"--report {report}: is the file of -o as well; name another one")


def parse_contexts(text: str | None) -> list[int] | None:
    """Parses the value of --context."""
    return parse_sizes("--context", text, "numbers of tokens", 1 << 20, "512,4096")


def parse_sizes(
    option: str, text: str | None, what: str, maximum: int, example: str
) -> list[int] | None:
    """Parses an option's whole numbers: "4,1,16" gives [1, 4, 16], and None gives None."""
    from sequoia_plan.artifacts import ArgumentError

    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    # isdecimal: isdigit also takes superscripts, which int does not
    if not all(part.isdecimal() and len(part) < 9 and 0 < int(part) <= maximum for part in parts):
        raise ArgumentError(
            f"{option} {text}: expected {what} from 1 to {maximum} with commas between, "
            f"as {example}"
        )
    return sorted({int(part) for part in parts})


def verifier_option(default: str) -> Decorator:
    """`--verifier`, None where it is not given; the help says that `default` holds then."""
    text = "The rule that accepts drafted tokens; see docs/verifiers.md."
    return click.option(
        "--verifier", type=click.Choice(VERIFIERS), help=f"{text} [default: {default}]"
    )


def sampling_options(default: str | None = None, verifier_default: str = "") -> Decorator:
    """The options named as the fields of `Sampling`; each is None where it is not given."""

    def option(name: str, value_type: Any, own_default: str, text: str) -> Decorator:
        """An option whose help is `text` and its default."""
        help_text = f"{text} [default: {default or own_default}]"
        return click.option(name, type=value_type, help=help_text)

    return options(
        option("--temperature", float, "0", "Temperature of the target's sampling; 0 is greedy."),
        option(
            "--top-p",
            float,
            "1",
            "Sample from the most probable tokens whose probabilities add up to this.",
        ),
        option(
            "--top-k", int, "0", "Sample from so many of the most probable tokens; 0 takes all."
        ),
        option(
            "--min-p",
            float,
            "0",
            "Sample from tokens at least this fraction as probable as the most probable one.",
        ),
        option(
            "--draft-temperature",
            float,
            "the target's",
            "Temperature of the distribution that a node's children are drawn from.",
        ),
        verifier_option(default or verifier_default),
    )


def read_sampling(options: dict[str, Any], tree_settings: Any = None) -> Sampling:
    """Sampling settings: those on the command line, else the tree's, else the defaults."""
    from sequoia_plan.runtime import Sampling

    values = {}
    for name in Sampling().settings():
        value = options.get(name)
        if value is None:
            value = (tree_settings or {}).get(name)
        if value is not None:
            values[name] = value
    return Sampling(**values)
