"""Make a draft for a target: `python -m sequoia_plan.profiler.distill text|train|eagle3|dflash --help`. docs/draft.md tells the story."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

import torch

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.profiler.distill.block import BlockRecipe, train_dflash
from sequoia_plan.profiler.distill.feature import FeatureRecipe, train_eagle3
from sequoia_plan.profiler.distill.text import write_text
from sequoia_plan.profiler.distill.train import Recipe, train
from sequoia_plan.profiler.distill.training import Text
from sequoia_plan.runtime.models.load import load_model


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(prog="python -m sequoia_plan.profiler.distill", description=__doc__)
    commands = parser.add_subparsers(required=True, dest="command")
    text = commands.add_parser("text", help="let the target write training text")
    text.add_argument("--tokens", type=int, default=1_000_000, help="answer tokens to write (default: %(default)s)")
    text.add_argument("--rows", type=int, default=224, help="conversations written side by side (default: %(default)s)")
    text.add_argument("--taps", type=int, nargs="*", default=(), help="hidden states to keep for a feature draft: 0 the embedding, k what layer k puts out")
    learn = commands.add_parser("train", help="train a small Llama as draft")
    learn.add_argument("--layers", type=int, nargs="+", default=list(Recipe.layers), help="the target's layers to start from (default: %(default)s)")
    features = commands.add_parser("eagle3", help="train a draft that reads the target's hidden states")
    features.add_argument("--chain", type=int, default=FeatureRecipe.chain, help="tokens of a chain that are learnt together (default: %(default)s)")
    features.add_argument("--start", help="folder of a trained draft to go on from, with a head for the same tokens (default: a new one)")
    blocks = commands.add_parser("dflash", help="train a draft that reads the target's hidden states and says a block at once")
    blocks.add_argument("--layers", type=int, nargs="+", default=list(BlockRecipe.layers), help="the target's layers to start from (default: %(default)s)")
    blocks.add_argument("--size", type=int, default=BlockRecipe.size, help="tokens of a block, the last token before it included (default: %(default)s)")
    for command, recipe in ((learn, Recipe), (features, FeatureRecipe), (blocks, BlockRecipe)):
        command.add_argument("--text", type=Path, nargs="+", required=True, help="folders that `text` wrote; the last conversations are held out")
        for name in ("covered", "steps", "batch", "held_out"):
            command.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(recipe, name), help="(default: %(default)s)")
        command.add_argument("--learning-rate", type=float, default=recipe.learning_rate, help="(default: %(default)s)")
    for command in (text, learn, features, blocks):
        command.add_argument("--target", help="folder, hub ID or .gguf file (default: the embedded target)")
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    target, tokenizer, name = load_model(options.target, "cpu", torch.float32)
    if options.command == "text":
        write_text(target, tokenizer, options.tokens, options.seed, options.output, options.rows, options.taps)
        return
    shared = {name: getattr(options, name) for name in ("covered", "steps", "batch", "learning_rate", "held_out", "seed")}
    text_of, say = Text(options.text), partial(print, flush=True)
    if options.command == "train":
        train(target, text_of, Recipe(layers=tuple(options.layers), **shared), options.output, name, say)
    elif options.command == "dflash":
        train_dflash(target, text_of, BlockRecipe(layers=tuple(options.layers), size=options.size, **shared), options.output, name, say)
    else:
        train_eagle3(target, text_of, FeatureRecipe(chain=options.chain, start=options.start, **shared), options.output, name, say)


try:
    main()
except SequoiaPlanError as error:
    sys.exit(f"Error: {error}")
