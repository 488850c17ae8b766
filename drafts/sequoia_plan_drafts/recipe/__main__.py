"""Make a draft for a target: `python -m sequoia_plan_drafts.recipe COMMAND --help`.

`text` lets the target write training text; `train` trains a small Llama on it, and `eagle3` a draft
that reads the target's hidden states. docs/draft.md has the whole way.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.artifacts.files import refuse_to_replace
from sequoia_plan.models.backends import COMPILED, load_model
from sequoia_plan.models.base.dtype import dtype_name
from sequoia_plan.models.base.loading import Loading
from sequoia_plan.models.files.pretrained import find_model
from sequoia_plan_drafts.recipe.eagle3 import Eagle3Recipe, train_eagle3
from sequoia_plan_drafts.recipe.language_model import train_language_model
from sequoia_plan_drafts.recipe.text import TextRecipe, count_written, write_text
from sequoia_plan_drafts.recipe.training import TrainingSettings
from sequoia_plan_drafts.recipe.training_text import TrainingText


def positive_integer(text: str) -> int:
    """An option's value as a whole number above 0; argparse words the error."""
    number = int(text)
    if number < 1:
        raise ValueError
    return number


RECIPES: dict[str, tuple[Any, Callable[..., None]]] = {
    "text": (TextRecipe, write_text),
    "train": (TrainingSettings, train_language_model),
    "eagle3": (Eagle3Recipe, train_eagle3),
}
OPTION_TYPES: dict[type, Callable[[str], Any]] = {
    int: positive_integer,
    float: float,
    str: str,
    tuple: int,
    type(None): str,
}
"""By the type of a setting's default."""
HELP = {
    "tokens": "to write",
    "rows": "conversations written side by side",
    "context": "the most tokens of a conversation",
    "questions": "chat, or code with a third of chat",
    "hidden_states": "layers whose hidden states are kept for eagle3: 0 is the embedding, k is the "
    "output of layer k, counted from 1",
    "draft_vocabulary": "tokens that the draft can propose, those that the target uses most",
    "batch": "conversations in a step",
    "held_out": "conversations, the last ones, to evaluate on",
    "chain": "tokens of a chain that are trained together",
    "induction_heads": "of the draft's, with --start: those that say least are made to continue "
    "what repeats itself, and what compares tokens is not trained",
    "inner": "inner width of the draft's layer, at most the target's",
    "bits": "of the matrices in the file, 16 or 8",
    "start": "folder of a trained draft to continue from, with a head for the same tokens",
}


def main() -> None:
    """Parse the command line and run the command."""
    options = make_parser().parse_args()
    # what is cheap to refuse is refused before the target is loaded
    if options.command != "text":
        refuse_to_replace(options.output, *options.text, options.target)
        text = TrainingText(options.text)
    how = Loading(COMPILED, dtype=options.dtype)
    options.dtype = dtype_name(how.torch_dtype)
    recipe, run = RECIPES[options.command]
    settings = recipe(**{field.name: getattr(options, field.name) for field in fields(recipe)})
    if options.command == "text":
        count_written(options.output, settings.metadata)
        run(load_model(options.target, how), settings, options.output)
        return
    torch.set_flush_denormal(True)  # gradients of attention are; Intel multiplies them slowly
    # what is trained starts as the target's layers, in float32
    files = find_model(options.target)
    target = files.module(torch.float32).requires_grad_(False)
    del target.model.layers[2:]  # nothing starts as these, which take the most memory
    run(target, text, settings, options.output, files.name)


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
    for command, (recipe, _) in RECIPES.items():
        parser_of_command = commands.add_parser(
            command, parents=[shared], formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        if command != "text":
            parser_of_command.add_argument(
                "--text", type=Path, nargs="+", required=True, help="folders that `text` wrote"
            )
        for field in fields(recipe):
            if field.name in ("seed", "dtype"):
                continue
            parser_of_command.add_argument(
                f"--{field.name.replace('_', '-')}",
                type=OPTION_TYPES[type(field.default)],
                nargs="+" if isinstance(field.default, tuple) else None,
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
finally:  # a process may go on after it
    torch.set_flush_denormal(False)
