"""Options that several commands share."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from sequoia_plan.runtime import Sampling

# The runtime imports torch, so its names are repeated here; a test compares the two.
VERIFIERS = ["sequoia", "traversal", "specinfer", "spectr", "topk"]
LINKS = ["host", "disk"]
RARE_SETTINGS = {"top_k": int, "min_p": float, "draft_temperature": float}
"""Fields of `Sampling` that --sampling takes -> what reads them."""

Decorator = Callable[[Any], Any]


class Text(click.types.StringParamType):
    """A name or a path; empty text, as of a shell's unset variable, is none."""

    def __init__(self, name: str) -> None:
        self.name = name

    def convert(
        self, value: Any, parameter: click.Parameter | None, context: click.Context | None
    ) -> str:
        """The text as it is, unless it is empty."""
        text = super().convert(value, parameter, context)
        if not text.strip():
            self.fail(f"found {text!r}, expected a {self.name}", parameter, context)
        return text


NAME, PATH = Text("name"), Text("path")


def options(*decorators: Decorator) -> Decorator:
    """Combine option decorators into one; they are listed in the help in this order."""

    def decorate(command: Any) -> Any:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


def bundle(parameter: str, **decorators: Decorator) -> Decorator:
    """Options by name, whose values a command takes as one mapping called `parameter`."""

    def decorate(command: Any) -> Any:
        @functools.wraps(command)
        def command_with_mapping(**values: Any) -> Any:
            return command(**{parameter: {name: values.pop(name) for name in decorators}}, **values)

        return options(*decorators.values())(command_with_mapping)

    return decorate


def set_threads(context: click.Context, parameter: click.Parameter, value: int | None) -> None:
    """A callback that lets torch compute with so many threads; None leaves its own number."""
    if value is not None:
        import torch

        torch.set_num_threads(value)


def read_rare_settings(text: str) -> dict[str, Any]:
    """Read "top_k=40,min_p=0.1"; "top-k" is read as "top_k"."""
    values: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        name = name.replace("-", "_")
        try:
            values[name] = RARE_SETTINGS[name](value)
        except (KeyError, ValueError):
            names = ", ".join(RARE_SETTINGS)
            raise click.BadParameter(
                f"found {part.strip()!r}, expected NAME=VALUE with a NAME of {names}"
            ) from None
    return values


def sizes_option(name: str, parameter: str, maximum: int, text: str, **settings: Any) -> Decorator:
    """An option that takes whole numbers with commas between: "4,1,16" gives [1, 4, 16]."""

    def parse(value: str) -> list[int]:
        """The numbers, each once."""
        try:
            sizes = sorted({int(part) for part in value.split(",")})
        except ValueError:
            sizes = [0]
        if not 0 < sizes[0] <= sizes[-1] <= maximum:
            raise click.BadParameter(
                f"found {value!r}, expected numbers from 1 to {maximum} with commas between"
            )
        return sizes

    return click.option(name, parameter, metavar="N,N,...", type=parse, help=text, **settings)


def count_option(
    *names: str, default: int | None, text: str, least: int = 1, most: int | None = None
) -> Decorator:
    """An option that takes a whole number."""
    return click.option(
        *names, type=click.IntRange(least, most), default=default, show_default=True, help=text
    )


def name_option(*names: str, text: str, **settings: Any) -> Decorator:
    """An option that takes a name."""
    return click.option(*names, type=NAME, help=text, **settings)


def file_option(*names: str, text: str, metavar: str = "FILE", **settings: Any) -> Decorator:
    """An option that takes a path."""
    return click.option(*names, metavar=metavar, type=PATH, help=text, **settings)


def output_option(default: str, what: str) -> Decorator:
    """`-o`, the file that a command writes."""
    text = f"Write the {what} there."
    return file_option("-o", "--output", text=text, default=default, show_default=True)


json_option = click.option(
    "--json", "as_json", is_flag=True, help="One JSON object on stdout, nothing else there."
)
tree_option = file_option(
    "--tree",
    "tree_file",
    text="A tree file, or a catalog name.",
    metavar="TREE",
    default="tree.safetensors",
    show_default=True,
)
target_option = name_option(
    "--target",
    metavar="ID|DIR|FILE.gguf",
    text="Target model. [default: the embedded SmolLM2-135M-Instruct]",
)
model_options = options(
    bundle(
        "models",
        target=target_option,
        draft=name_option(
            "--draft",
            metavar="ID|DIR|FILE|int8|mtp|none",
            text="Draft model; or a folder of an EAGLE or DFlash draft as published (its "
            "config.json says which); or a draft .safetensors made for the target; or int8: a "
            "copy of the target in 8 bits (a folder of that name is ./int8); or mtp: the "
            "multi-token-prediction head in the target's checkpoint; or none, for trees that only "
            "look up; or smollm2-135m-draft: the embedded language model of two layers. "
            "[default: the embedded EAGLE-3 draft of the target: smollm2-135m-eagle3, or "
            "qwen2.5-coder-1.5b-eagle3 for Qwen's file in Q4_K_M]",
        ),
        device=click.option(
            "--device",
            type=click.Choice(["cpu", "cuda"]),
            help="Where both models run. [default: cuda if there is one]",
        ),
        dtype=click.option(
            "--dtype",
            type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
            default="auto",
            show_default=True,
            help="Of the weights; auto takes bfloat16 where the processor computes in it, else "
            "float32.",
        ),
        bits=click.option(
            "--bits",
            type=click.Choice(["8", "4"]),
            callback=lambda context, parameter, value: value and int(value),
            help="On a CPU: round the target's matrices to so many bits; says what that costs. "
            "[default: as they are]",
        ),
        draft_vocabulary=name_option(
            "--draft-vocabulary",
            metavar="ID|DIR",
            text="An EAGLE-3 draft: the tokens that it covers are all that a compiled language "
            "model as draft proposes, so that its passes take less time. [default: all tokens]",
        ),
        offload=click.option(
            "--offload",
            type=click.Choice(LINKS),
            help="Stream the target's layers that do not fit, from the host's memory to a CUDA "
            "device or from a file. [default: all in memory]",
        ),
        memory=name_option(
            "--memory",
            metavar="SIZE",
            text="With --offload: what the target's weights, the draft and both KV caches may "
            "take, as 300MB or 24GB. [default: what is free]",
        ),
    ),
    click.option(
        "--threads",
        type=click.IntRange(1, 1024),
        callback=set_threads,
        help="Threads that compute on the CPU: no more than there are idle cores. "
        "[default: one a core, of those that affinity and control groups leave]",
        expose_value=False,
    ),
)


_OF_TREE = "[default: what the tree was made for, else"
sampling_options = bundle(
    "sampling",
    temperature=click.option(
        "--temperature", type=float, help=f"Temperature of the target; 0 is greedy. {_OF_TREE} 0]"
    ),
    top_p=click.option(
        "--top-p",
        type=float,
        help=f"Sample from the most probable tokens that add up to this probability. {_OF_TREE} 1]",
    ),
    verifier=click.option(
        "--verifier",
        type=click.Choice(VERIFIERS),
        help="The rule that accepts drafted tokens; see docs/verifiers.md. "
        f"{_OF_TREE} traversal; at temperature 0, where both are equal, sequoia]",
    ),
    rare_settings=click.option(
        "--sampling",
        "rare_settings",
        metavar="NAME=VALUE,...",
        type=read_rare_settings,
        help="Further settings: top_k=N, min_p=P (sample from tokens at least this fraction as "
        "probable as the most probable one), draft_temperature=T (of the distribution that a "
        "node's children are drawn from).",
    ),
)


def read_sampling(values: Mapping[str, Any], tree_settings: Mapping[str, Any] = {}) -> Sampling:
    """Sampling settings: those on the command line, else the tree's, else the defaults."""
    from sequoia_plan.runtime import Sampling

    names = Sampling.__dataclass_fields__
    settings = {name: value for name, value in tree_settings.items() if name in names}
    given = {name: value for name, value in values.items() if value is not None}
    return Sampling(**(settings | given.pop("rare_settings", {}) | given))


def check_outputs(output: str | None, report: str | None, *inputs: str | None) -> None:
    """Raise, before anything is measured, if an output cannot be written or is an input."""
    from sequoia_plan.artifacts.files import check_writable, refuse_to_replace

    for path in filter(None, (output, report)):
        check_writable(path)
        refuse_to_replace(path, *inputs)
    if output and report and os.path.realpath(output) == os.path.realpath(report):
        raise click.UsageError(f"--report {report}: is the file of -o as well; name another one")
