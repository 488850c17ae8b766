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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.artifacts.cost import expected_tokens
from sequoia_plan.artifacts.files import write_atomically
from sequoia_plan.artifacts.prompts import BUILT_IN, load
from sequoia_plan.artifacts.rates import rates
from sequoia_plan.planner import solve
from sequoia_plan.profiler.acceptance import RANKS
from sequoia_plan.profiler.draft_passes import logits_over_text
from sequoia_plan.profiler.hardware import fingerprint
from sequoia_plan.profiler.journal import Journal, discard, journal_of
from sequoia_plan.profiler.methods import POSITIONS_AT_ONCE, expected_acceptance, pieces
from sequoia_plan.profiler.observed import LEVELS, TREE
from sequoia_plan.profiler.prompts import encode
from sequoia_plan.runtime import Pair, Sampling, SequoiaDecoder, load_pair
from sequoia_plan.runtime.base.masks import additive_mask
from sequoia_plan.runtime.models.load import dtype_name

Floats = NDArray[np.float64]
SIZES = (3, 8, 16, 64, 128)
WRITER_SIZES = (32, 64)
"""Sizes of the further trees at whose nodes acceptance is counted."""
DEPTH = 10
NUM_SPLITS = 20
"""Random splits of the prompts into halves."""
MAX_RANK = 64
"""Children that the draft is asked for at a position."""
EXTRA_TOKENS = 16
"""Tokens read beyond those that are counted, for the steps that begin before."""
GREEDY = Sampling()
RankedText = list[int]
"""The rank of each next token; 0 if it is none of the first `MAX_RANK`."""


@torch.inference_mode()
def ranks_of_text(
    pair: Pair, decoder: SequoiaDecoder, prompt: list[int], tokens: int
) -> RankedText:
    """The ranks that the draft gives to the tokens of the target's greedy text after `prompt`.

    At an end token the text ends with that one.
    """
    step = decoder.step
    assert step.drafter is not None
    text, levels = greedy_text(pair, decoder, prompt, tokens)
    ids = torch.tensor(text)
    columns = torch.arange(ids.numel())
    first = len(prompt) - 1
    ranks: RankedText = []
    for start, end in pieces(levels, POSITIONS_AT_ONCE):
        slots = columns[first + start : first + end]
        mask = additive_mask(columns <= slots[:, None], step.target.model.dtype)
        output = step.target(step.sequence.target, ids[slots], slots, slots, mask)
        draft_logits = logits_over_text(
            step.drafter, step.sequence, slots, levels[start:end], output.hidden_states
        )
        is_accepted = expected_acceptance(
            output.logits, draft_logits, GREEDY, MAX_RANK, torch.Generator(), step.drafter.d2t
        )
        ranks += torch.where(is_accepted.any(1), is_accepted.argmax(1) + 1, 0).tolist()
    return ranks


def greedy_text(
    pair: Pair, decoder: SequoiaDecoder, prompt: list[int], tokens: int
) -> tuple[list[int], list[int]]:
    """Decode after `prompt`, up to an end token or until there are `tokens` tokens.

    Returns:
        Prompt and text, without the end token; and the level of each position from the prompt's
        last token on.
    """
    text, levels = list(prompt), [0]
    for step in decoder.steps(torch.tensor(prompt), tokens, GREEDY, 0):
        text += step.tokens
        levels += [*range(1, len(step.tokens)), 0]
        num_tokens = len(text) - len(prompt)
        if num_tokens >= tokens or set(pair.end_tokens).intersection(step.tokens):
            break
    new_tokens = text[len(prompt) :]
    ends = [place for place, token in enumerate(new_tokens) if token in pair.end_tokens]
    if ends:
        text = text[: len(prompt) + ends[0]]
    return text, levels[: len(text) - (len(prompt) - 1)]


def steps_over_text(
    tree: TokenTree, text: RankedText, tokens: int
) -> Iterator[tuple[int, list[int]]]:
    """The steps of a tree over a text, until there are `tokens` tokens or the text ends.

    Yields:
        The place of the step's root in the text, and the accepted nodes, the root first.
    """
    first_child, child_count = tree.first_child, tree.child_count
    place = 0
    while place < len(text) and place < tokens:
        path = [0]
        while place + len(path) <= len(text):
            rank = text[place + len(path) - 1]
            if not 0 < rank <= child_count[path[-1]]:
                break
            path.append(int(first_child[path[-1]]) + rank - 1)
        yield place, path
        place += len(path)


def tokens_per_step(tree: TokenTree, texts: Sequence[RankedText], tokens: int) -> float:
    """The tree's tokens a step over texts; a step that ends with the text has no bonus token."""
    step_tokens = [
        min(place + len(path), len(text)) - place
        for text in texts
        for place, path in steps_over_text(tree, text, tokens)
    ]
    return sum(step_tokens) / len(step_tokens)


def count_acceptance(tree: TokenTree, text: RankedText, tokens: int) -> tuple[Floats, Floats]:
    """Count acceptance of one text at the nodes that `tree` accepts.

    Returns:
        Trials [levels, classes], and counts [levels, classes, ranks].
    """
    trials, counts = np.zeros((LEVELS, 2)), np.zeros((LEVELS, 2, RANKS))
    for place, path in steps_over_text(tree, text, tokens):
        for level, node in enumerate(path[: len(text) - place]):
            row = min(level, LEVELS - 1), int(tree.classes[node])
            rank = text[place + level]
            trials[row] += 1
            if 0 < rank <= RANKS:
                counts[(*row, rank - 1)] += 1
    return trials, counts


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


def counts_over_texts(
    tree: TokenTree, texts: Sequence[RankedText], tokens: int
) -> tuple[Floats, Floats]:
    """Trials [texts, levels, classes], and counts [texts, levels, classes, ranks]."""
    trials, counts = zip(*(count_acceptance(tree, text, tokens) for text in texts), strict=True)
    return np.array(trials), np.array(counts)


def random_splits(num_texts: int) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Random halves of the texts: a part to predict from and the rest, each split both ways."""
    splits = []
    for seed in range(NUM_SPLITS):
        order = np.random.default_rng(seed).permutation(num_texts)
        first, second = np.array_split(order, 2)
        splits += [(first, second), (second, first)]
    return splits


def relative_errors(
    trees: Sequence[TokenTree], probs: Floats, measured: Sequence[float]
) -> list[float]:
    """For each tree, its expected tokens over its measured tokens a step, less 1."""
    return [
        expected_tokens(tree, probs) / tokens - 1
        for tree, tokens in zip(trees, measured, strict=True)
    ]


def check_steps(
    pair: Pair, prompts: Sequence[list[int]], texts: Sequence[RankedText], tokens: int
) -> int:
    """Decode some prompts with a tree, and compare every step with the one over the text.

    Returns:
        The number of steps that were compared.

    Raises:
        SystemExit: if a step differs.
    """
    tree = solve([0.4, 0.13, 0.06, 0.04], 16, 8).tree
    decoder = SequoiaDecoder(pair.target, pair.draft, tree)
    num_compared = 0
    for prompt, text in zip(prompts, texts, strict=True):
        decoded_steps = decoder.steps(torch.tensor(prompt), tokens, GREEDY, 0)
        text_steps = steps_over_text(tree, text, tokens)
        for step, (_, path) in zip(decoded_steps, text_steps, strict=False):
            if step.path != path:
                raise SystemExit(f"a step accepted {step.path}, expected {path} from the text")
            num_compared += 1
    return num_compared


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
    decoder = SequoiaDecoder(pair.target, pair.draft, TREE)
    journal_path = journal_of(options.output)
    texts = []
    with Journal(journal_path, [pair.metadata, prompts, options.tokens]) as journal:
        for number, prompt in enumerate(prompts):

            def read_text(prompt: list[int] = prompt) -> RankedText:
                return ranks_of_text(pair, decoder, prompt, options.tokens + EXTRA_TOKENS)

            texts.append(journal.get(str(number), read_text))
    num_checked = check_steps(
        pair, prompts[: options.check], texts[: options.check], options.tokens
    )
    discard(journal_path)
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
    result = compare(report["texts"], report["settings"]["tokens"])
    write_atomically(options.output, (json.dumps(report | {"result": result}) + "\n").encode())
    print_tables(result, Console(width=140))


if __name__ == "__main__":
    main()
