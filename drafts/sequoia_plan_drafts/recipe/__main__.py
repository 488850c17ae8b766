"""Make a draft for a target: `python -m sequoia_plan_drafts.recipe COMMAND --help`.

`text` lets the target write training text; `train` trains a small Llama on it, and `eagle3` a draft
that reads the target's hidden states. docs/draft.md has the whole way.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.artifacts.files import refuse_to_replace
from sequoia_plan.runtime.models.dtype import dtype_name, resolve_dtype
from sequoia_plan.runtime.models.pretrained import load_model
from sequoia_plan_drafts.recipe.eagle3 import Eagle3Recipe, train_eagle3
from sequoia_plan_drafts.recipe.language_model import LanguageModelRecipe, train_language_model
from sequoia_plan_drafts.recipe.text import check_empty, write_text
from sequoia_plan_drafts.recipe.training_text import TrainingText


def positive_integer(text: str) -> int:
    """An option's value as a whole number above 0; argparse words the error."""
    number = int(text)
    if number < 1:
        raise ValueError
    return number


RECIPES: dict[str, tuple[Any, Callable[..., None]]] = {
    "train": (LanguageModelRecipe, train_language_model),
    "eagle3": (Eagle3Recipe, train_eagle3),
}
OPTION_TYPES: dict[type, Callable[[str], Any]] = {
    int: positive_integer,
    float: float,
    tuple: int,
    type(None): str,
}
"""By the type of a setting's default."""
HELP = {
    "draft_vocabulary": "tokens that the draft can propose, those that the target uses most",
    "batch": "conversations in a step",
    "held_out": "conversations, the last ones, to evaluate on",
    "layers": "the target's layers to start from",
    "chain": "tokens of a chain that are trained together",
    "start": "folder of a trained draft to continue from, with a head for the same tokens",
}


def main() -> None:
    """Parse the command line and run the command."""
    options = make_parser().parse_args()
    # what is cheap to refuse is refused before the target is loaded
    if options.command == "text":
        check_empty(options.output)
    else:
        refuse_to_replace(options.output, *options.text, options.target)
        text = TrainingText(options.text)
    dtype = resolve_dtype(options.dtype, "cpu")
    if options.command == "text":
        target, tokenizer, _ = load_model(options.target, "cpu", dtype)
        write_text(
            target,
            tokenizer,
            options.tokens,
            options.seed,
            options.output,
            options.rows,
            options.hidden_states,
        )
        return
    # what is trained starts as the target's layers, in float32
    target, _, name = load_model(options.target, "cpu", torch.float32)
    options.dtype = dtype_name(dtype)
    recipe, train = RECIPES[options.command]
    settings = recipe(**{field.name: getattr(options, field.name) for field in fields(recipe)})
    train(target, text, settings, options.output, name, partial(print, flush=True))


def make_parser() -> argparse.ArgumentParser:
    """The command line's parser."""
    parser = argparse.ArgumentParser(
        prog="python -m sequoia_plan_drafts.recipe",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, dest="command")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--target", help="folder, hub ID or .gguf file (default: the embedded one)")
    shared.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="of the target that writes text, and of products in training, whose weights are "
        "float32; auto is bfloat16 where the processor computes in it",
    )
    shared.add_argument("--seed", type=int, default=0)
    shared.add_argument("-o", "--output", type=Path, required=True)
    new_command = partial(
        commands.add_parser,
        parents=[shared],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )

    text = new_command("text")
    text.add_argument("--tokens", type=positive_integer, default=1_000_000, help="to write")
    text.add_argument(
        "--rows", type=positive_integer, default=224, help="conversations written side by side"
    )
    text.add_argument(
        "--hidden-states",
        type=int,
        nargs="*",
        default=(),
        metavar="LAYER",
        help="hidden states to keep for an EAGLE draft: 0 is the embedding, k is the output of "
        "layer k, counted from 1",
    )
    for command, (recipe, _) in RECIPES.items():
        training = new_command(command)
        training.add_argument(
            "--text", type=Path, nargs="+", required=True, help="folders that `text` wrote"
        )
        for field in fields(recipe):
            if field.name in ("seed", "dtype"):
                continue
            training.add_argument(
                f"--{field.name.replace('_', '-')}",
                type=OPTION_TYPES[type(field.default)],
                nargs="+" if field.name == "layers" else None,
                default=field.default,
                help=HELP.get(field.name, " "),
            )
    return parser


try:
    main()
except SequoiaPlanError as error:
    print(f"Error: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
except KeyboardInterrupt:
    sys.exit("Aborted!")
