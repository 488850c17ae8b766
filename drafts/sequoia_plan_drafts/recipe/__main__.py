"""Make a draft for a target: `python -m sequoia_plan_drafts.recipe COMMAND --help`.

The commands are text, train, eagle3 and dflash. docs/draft.md has the whole way.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.artifacts.files import refuse_to_replace
from sequoia_plan.runtime.models.dtype import dtype_name, resolve_dtype
from sequoia_plan.runtime.models.pretrained import load_model
from sequoia_plan_drafts.recipe.dflash import DFlashRecipe, train_dflash
from sequoia_plan_drafts.recipe.eagle3 import Eagle3Recipe, train_eagle3
from sequoia_plan_drafts.recipe.language_model import LanguageModelRecipe, train_language_model
from sequoia_plan_drafts.recipe.text import check_empty, write_text
from sequoia_plan_drafts.recipe.training import TrainingSettings, TrainingText

SHARED_SETTINGS = (
    "draft_vocabulary",
    "steps",
    "batch",
    "learning_rate",
    "held_out",
    "seed",
    "dtype",
)
"""Fields of `TrainingSettings` that every recipe's command sets."""
DEFAULT = "(default: %(default)s)"


def main() -> None:
    """Parse the command line and run the command."""
    options = make_parser().parse_args()
    # what is cheap to refuse is refused before the target is loaded
    if options.command == "text":
        check_empty(options.output)
    else:
        refuse_to_replace(options.output, *options.text, options.target)
        text, report = TrainingText(options.text), partial(print, flush=True)
    dtype = resolve_dtype(options.dtype, "cpu")
    options.dtype = dtype_name(dtype)
    # what is trained starts as the target's layers, in float32
    target_dtype = dtype if options.command == "text" else torch.float32
    target, tokenizer, name = load_model(options.target, "cpu", target_dtype)
    if options.command == "text":
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
    shared = {setting: getattr(options, setting) for setting in SHARED_SETTINGS}
    if options.command == "train":
        recipe = LanguageModelRecipe(layers=tuple(options.layers), **shared)
        train_language_model(target, text, recipe, options.output, name, report)
    elif options.command == "dflash":
        dflash = DFlashRecipe(layers=tuple(options.layers), size=options.size, **shared)
        train_dflash(target, text, dflash, options.output, name, report)
    else:
        eagle3 = Eagle3Recipe(chain=options.chain, start=options.start, **shared)
        train_eagle3(target, text, eagle3, options.output, name, report)


def make_parser() -> argparse.ArgumentParser:
    """The command line's parser."""
    parser = argparse.ArgumentParser(
        prog="python -m sequoia_plan_drafts.recipe", description=__doc__
    )
    commands = parser.add_subparsers(required=True, dest="command")

    text = commands.add_parser("text", help="let the target write training text")
    text.add_argument(
        "--tokens", type=_count, default=1_000_000, help=f"answer tokens to write {DEFAULT}"
    )
    text.add_argument(
        "--rows", type=_count, default=224, help=f"conversations written side by side {DEFAULT}"
    )
    text.add_argument(
        "--hidden-states",
        type=int,
        nargs="*",
        default=(),
        metavar="LAYER",
        help="hidden states to keep for an EAGLE or a DFlash draft: 0 is the embedding, k is the "
        "output of layer k, counted from 1",
    )

    language_model = commands.add_parser("train", help="train a small Llama as draft")
    _add_layers(language_model, LanguageModelRecipe.layers)

    eagle3 = commands.add_parser(
        "eagle3", help="train an EAGLE-3 draft, which reads the target's hidden states"
    )
    eagle3.add_argument(
        "--chain",
        type=_count,
        default=Eagle3Recipe.chain,
        help=f"tokens of a chain that are trained together {DEFAULT}",
    )
    eagle3.add_argument(
        "--start",
        help="folder of a trained draft to continue from, with a head for the same tokens "
        "(default: a new one)",
    )

    dflash = commands.add_parser(
        "dflash",
        help="train a DFlash draft, which reads the target's hidden states and drafts a whole "
        "block in one pass",
    )
    _add_layers(dflash, DFlashRecipe.layers)
    dflash.add_argument(
        "--size",
        type=_count,
        default=DFlashRecipe.size,
        help=f"tokens of a block, the last token before it included {DEFAULT}",
    )

    _add_training_options(language_model, LanguageModelRecipe)
    _add_training_options(eagle3, Eagle3Recipe)
    _add_training_options(dflash, DFlashRecipe)
    for command in (text, language_model, eagle3, dflash):
        command.add_argument(
            "--target", help="folder, hub ID or .gguf file (default: the embedded target)"
        )
        command.add_argument(
            "--dtype",
            choices=("auto", "float32", "bfloat16"),
            default="auto",
            help="of the target that writes text, and of products in training, whose weights are "
            "float32; auto is bfloat16 where the processor computes in it (default: auto)",
        )
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("-o", "--output", type=Path, required=True)
    return parser


def _count(text: str) -> int:
    """An option's value as a whole number of at least 1."""
    number = int(text) if text.isascii() and text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"found {text!r:.40}, expected a whole number, 1 or more")
    return number


def _positive_number(text: str) -> float:
    """An option's value as a finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"found {text!r:.40}, expected a number above 0")
    return number


def _add_layers(command: argparse.ArgumentParser, layers: tuple[int, ...]) -> None:
    """Add the option `--layers`, with the default `layers`."""
    command.add_argument(
        "--layers",
        type=int,
        nargs="+",
        default=list(layers),
        help=f"the target's layers to start from {DEFAULT}",
    )


def _add_training_options(command: argparse.ArgumentParser, recipe: type[TrainingSettings]) -> None:
    """Add the options of `TrainingSettings`, with the defaults of `recipe`."""
    command.add_argument(
        "--text",
        type=Path,
        nargs="+",
        required=True,
        help="folders that `text` wrote; the last conversations are held out",
    )
    options: dict[str, tuple[Callable[[str], Any], Any]] = {
        "--draft-vocabulary": (_count, recipe.draft_vocabulary),
        "--steps": (_count, recipe.steps),
        "--batch": (_count, recipe.batch),
        "--held-out": (_count, recipe.held_out),
        "--learning-rate": (_positive_number, recipe.learning_rate),
    }
    for name, (option_type, default) in options.items():
        command.add_argument(name, type=option_type, default=default, help=DEFAULT)


try:
    main()
except SequoiaPlanError as error:
    print(f"Error: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
except KeyboardInterrupt:
    sys.exit("Aborted!")
