"""The effect of the parent's class (on the spine or off it) on predicted tokens, at temperature 0.

    python benchmarks/classes.py -o build/classes.json
    python benchmarks/classes.py --texts build/classes.json -o build/again.json
    python benchmarks/classes.py --prompts 2 --check 2 -o build/quick.json   # to see that it runs

The second command computes anew from the texts in a result. The models are the embedded pair.

At temperature 0 the target's text does not depend on the tree, and a step accepts a child exactly
if it is the text's next token. So the draft is asked once, at every position of the text, for the
rank that it gives to the next token; the steps of any tree follow without decoding (--check decodes
some prompts with a tree and compares step by step).

For each size, the tree of most expected tokens is solved by level. The predictions of one vector,
of rows by level, and of rows by level and class are compared with the tree's tokens a step: on the
same prompts, and on the other half of them, in random halves. The model "classes counted" takes the
rows of each class as counted, "classes kept" only the part of their difference that is more than
noise, as profiles do. Acceptance is counted at the nodes of the tree that writes a profile's text,
and at those of larger trees.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from ranked_texts import (
    NUM_SPLITS,
    RankedText,
    counts_over_texts,
    random_splits,
    ranked_texts,
    record_texts,
    tokens_per_step,
)
from rich.console import Console
from rich.table import Table

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.artifacts.cost import expected_tokens
from sequoia_plan.artifacts.files import write_atomically
from sequoia_plan.artifacts.prompts import BUILT_IN, load
from sequoia_plan.artifacts.rates import rates
from sequoia_plan.planner import solve
from sequoia_plan.profiler.hardware import fingerprint
from sequoia_plan.profiler.journal import journal_of
from sequoia_plan.profiler.observed import TREE
from sequoia_plan.profiler.prompts import encode
from sequoia_plan.runtime import load_pair
from sequoia_plan.runtime.models.load import dtype_name

Floats = NDArray[np.float64]
SIZES = (3, 8, 16, 64, 128)
WRITER_SIZES = (32, 64)
"""Sizes of the further trees at whose nodes acceptance is counted."""
DEPTH = 10


def acceptance_models(trials: Floats, counts: Floats) -> dict[str, Floats]:
    """The acceptance by each model's name, as `expected_tokens` takes it."""
    by_level = rates(trials.sum(1), counts.sum(1))[0]
    shares = counts / np.maximum(trials, 1)[..., None]
    return {
        "one vector": counts.sum((0, 1)) / trials.sum(),
        "by level": by_level,
        "classes counted": np.where(trials[..., None] > 0, shares, by_level[:, None]),
        "classes kept": rates(trials, counts)[0],
    }


def compare(texts: Sequence[RankedText], tokens: int) -> dict[str, Any]:
    """The errors of each model's predictions, for trees of each size.

    Errors are predicted over measured tokens a step less 1, on the same prompts and on others.
    """
    trials, counts = counts_over_texts(TREE, texts, tokens)
    trials, counts = trials.sum(0), counts.sum(0)
    acceptance = rates(trials.sum(1), counts.sum(1))[0].round(6).tolist()

    def best_tree(size: int) -> TokenTree:
        return solve(acceptance, size, DEPTH, objective="tokens").tree

    trees = [best_tree(size) for size in SIZES]
    writers = {"the profile's, 10 nodes": TREE}
    writers |= {f"{size} nodes": best_tree(size) for size in WRITER_SIZES}

    def measure(places: Sequence[int]) -> list[float]:
        chosen_texts = [texts[i] for i in places]
        return [tokens_per_step(tree, chosen_texts, tokens) for tree in trees]

    measured = measure(range(len(texts)))
    splits = random_splits(len(texts))
    measured_on_rest = [measure(rest) for _, rest in splits]
    results: dict[str, Any] = {}
    for name, writer in writers.items():
        trials_of_text, counts_of_text = counts_over_texts(writer, texts, tokens)
        models = acceptance_models(trials_of_text.sum(0), counts_of_text.sum(0))
        same_errors = {
            model: relative_errors(trees, probs, measured) for model, probs in models.items()
        }
        rest_errors: dict[str, list[list[float]]] = {model: [] for model in models}
        for (part, _), measured_tokens in zip(splits, measured_on_rest, strict=True):
            part_models = acceptance_models(
                trials_of_text[part].sum(0), counts_of_text[part].sum(0)
            )
            for model, probs in part_models.items():
                rest_errors[model].append(relative_errors(trees, probs, measured_tokens))
        results[name] = {
            "same_prompts": {
                model: np.round(errors, 5).tolist() for model, errors in same_errors.items()
            },
            "other_prompts_rms": {
                model: np.sqrt(np.mean(np.square(errors), 0)).round(5).tolist()
                for model, errors in rest_errors.items()
            },
        }
    return {
        "sizes": list(SIZES),
        "measured": [round(value, 4) for value in measured],
        "halves": NUM_SPLITS,
        "trials": trials.tolist(),
        "first_rank": (counts[..., 0] / np.maximum(trials, 1)).round(4).tolist(),
        "writers": results,
    }


def relative_errors(
    trees: Sequence[TokenTree], probs: Floats, measured: Sequence[float]
) -> list[float]:
    """For each tree, its expected tokens over its measured tokens a step, less 1."""
    return [
        expected_tokens(tree, probs) / tokens - 1
        for tree, tokens in zip(trees, measured, strict=True)
    ]


def print_tables(result: dict[str, Any], console: Console) -> None:
    """Print the errors on the same prompts, and on others."""
    titles = {
        "same_prompts": "predicted / measured - 1, same prompts",
        "other_prompts_rms": "root mean square of it, other prompts",
    }
    sizes = [f"{size} nodes" for size in result["sizes"]]
    for part, title in titles.items():
        number_format = "+.1%" if part == "same_prompts" else ".1%"
        table = Table("counted at the nodes of", "model", *sizes, box=None, title=title)
        for writer, errors_by_part in result["writers"].items():
            for model, errors in errors_by_part[part].items():
                table.add_row(writer, model, *(format(error, number_format) for error in errors))
        console.print(table)


def read_texts(options: argparse.Namespace) -> dict[str, Any]:
    """Read the texts with the draft: settings, models, hardware and ranked texts."""
    pair = load_pair(draft=options.draft, dtype=options.dtype)
    built_in = load(BUILT_IN)[: options.prompts]
    prompts = [encode(pair.tokenizer, prompt.text) for prompt in built_in]
    texts, num_checked = record_texts(
        pair, prompts, options.tokens, options.check, journal_of(options.output)
    )
    return {
        "settings": {
            "dtype": dtype_name(pair.target.dtype),
            "tokens": options.tokens,
            "steps_checked": num_checked,
        },
        "models": pair.metadata,
        "hardware": fingerprint(pair.target.device),
        "texts": texts,
    }


def main() -> None:
    """Read, compare and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draft", help="as for sequoia-plan profile")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompts", type=int, default=184, help="of the built-in ones, at most")
    parser.add_argument("--tokens", type=int, default=48, help="of each prompt")
    parser.add_argument("--check", type=int, default=4, help="prompts that are decoded, too")
    parser.add_argument("--texts", type=Path, help="a result, whose texts are taken")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    report = json.loads(options.texts.read_text()) if options.texts else read_texts(options)
    result = compare(ranked_texts(report["texts"]), report["settings"]["tokens"])
    write_atomically(options.output, (json.dumps(report | {"result": result}) + "\n").encode())
    print_tables(result, Console(width=140))


if __name__ == "__main__":
    main()
