"""What does the class of a parent (on the spine or off it) add to the promise of a tree? At temperature 0, on the embedded pair.

    python benchmarks/classes.py -o build/classes.json
    python benchmarks/classes.py --texts build/classes.json -o build/again.json      # computes anew from the texts in a result
    python benchmarks/classes.py --prompts 2 --check 2 -o build/quick.json           # to see that it runs

The target's text does not depend on the tree at temperature 0, and a step accepts a child exactly if it is the text's next token. So the draft is
asked once, at every position of the text, for the rank it gives the next token; which steps any tree makes of the text follows without decoding
it (--check decodes some prompts with a tree and compares step by step). For each size, the tree of most tokens is solved by level; what one vector, the
rows by level, and rows by level and class promise of it is compared with its tokens a step on the same prompts, and on the other half of them,
in random halves. "counted" takes the classes' own rows as they are, "kept" the part of their difference that is more than noise, as profiles do.
Acceptance is counted at the nodes of the tree that writes a profile's text, and at those of larger trees.
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
from sequoia_plan.artifacts.rates import rates
from sequoia_plan.planner import solve
from sequoia_plan.profiler.acceptance import RANKS
from sequoia_plan.profiler.hardware import fingerprint
from sequoia_plan.profiler.journal import Journal, discard, journal_of
from sequoia_plan.profiler.methods import expected_acceptance, pieces
from sequoia_plan.profiler.observed import LEVELS, TREE
from sequoia_plan.profiler.prompts import BUILT_IN, encode, load
from sequoia_plan.runtime import Pair, Sampling, SequoiaDecoder, load_pair
from sequoia_plan.runtime.models.forward import additive
from sequoia_plan.runtime.models.load import dtype_name

Floats = NDArray[np.float64]
SIZES, WRITERS, DEPTH, HALVES = (3, 8, 16, 64, 128), (32, 64), 10, 20
RANKED, ROOM = 64, 16
"""Children asked for at a position; tokens beyond those that are counted, for the steps that begin before."""
Text = list[int]
"""The rank of each next token, 0 if it is none of the first `RANKED`."""


@torch.inference_mode()
def ranks_of_text(pair: Pair, decoder: SequoiaDecoder, prompt: list[int], tokens: int) -> Text:
    """The target's greedy text after `prompt`, as the ranks that the draft gives its tokens; at an end token it ends with that one."""
    assert decoder.drafter is not None
    text, levels = list(prompt), [0]
    for step in decoder.steps(torch.tensor(prompt), tokens, Sampling(), 0):
        text += step.tokens
        levels += [*range(1, len(step.tokens)), 0]
        if len(text) - len(prompt) >= tokens or set(pair.end_tokens).intersection(step.tokens):
            break
    ends = [at for at, token in enumerate(text[len(prompt) :]) if token in pair.end_tokens]
    ids = torch.tensor(text[: len(prompt) + ends[0]] if ends else text)
    columns, found, first = torch.arange(ids.numel()), Text(), len(prompt) - 1
    for start, end in pieces(levels[: ids.numel() - first], 64):
        here = columns[first + start : first + end]
        read = decoder.target(decoder.sequence.target, ids[here], here, here, additive(columns <= here[:, None], decoder.target.model.dtype))
        draft = decoder.drafter.read_text(decoder.sequence, here, levels[start:end], read.features)
        right = expected_acceptance(read.logits, draft, Sampling(), RANKED, torch.Generator(), decoder.drafter.covered)
        found += torch.where(right.any(1), right.argmax(1) + 1, 0).tolist()
    return found


def steps(tree: TokenTree, text: Text, tokens: int) -> Iterator[tuple[int, list[int]]]:
    """Of each step until `tokens` are made or the text ends: where its root stands in the text, and the accepted nodes, the root first."""
    first, count = tree.first_child, tree.child_count
    at = made = 0
    while at < len(text) and made < tokens:
        path = [0]
        while at + len(path) <= len(text) and 0 < (rank := text[at + len(path) - 1]) <= count[path[-1]]:
            path.append(int(first[path[-1]]) + rank - 1)
        yield at, path
        made += len(path)
        at += len(path)


def tokens_per_step(tree: TokenTree, texts: Sequence[Text], tokens: int) -> float:
    """Measured: a step that ends with the text has no bonus token."""
    every = [min(at + len(path), len(text)) - at for text in texts for at, path in steps(tree, text, tokens)]
    return sum(every) / len(every)


def counted(tree: TokenTree, text: Text, tokens: int) -> tuple[Floats, Floats]:
    """Trials [levels, classes], and counts [levels, classes, ranks], of one text at the nodes that `tree` accepts."""
    trials, counts = np.zeros((LEVELS, 2)), np.zeros((LEVELS, 2, RANKS))
    for at, path in steps(tree, text, tokens):
        for level, node in enumerate(path[: len(text) - at]):
            place = min(level, LEVELS - 1), int(tree.classes[node])
            trials[place] += 1
            if 0 < (rank := text[at + level]) <= RANKS:
                counts[(*place, rank - 1)] += 1
    return trials, counts


def promises(trials: Floats, counts: Floats) -> dict[str, Floats]:
    """Acceptance by the name of its model."""
    by_level = rates(trials.sum(1), counts.sum(1))[0]
    own = np.where(trials[..., None] > 0, counts / np.maximum(trials, 1)[..., None], by_level[:, None])
    return {"one vector": counts.sum((0, 1)) / trials.sum(), "by level": by_level, "classes counted": own, "classes kept": rates(trials, counts)[0]}


def compare(texts: Sequence[Text], tokens: int) -> dict[str, Any]:
    """For every writer, model and size: how much more is promised than measured, on the same prompts and on others."""
    trials, counts = (sum(each) for each in zip(*(counted(TREE, text, tokens) for text in texts), strict=True))
    by_level = rates(trials.sum(1), counts.sum(1))[0]
    trees = {size: solve(by_level.round(6).tolist(), size, DEPTH, objective="tokens").tree for size in SIZES}
    writers = {"the profile's, 10 nodes": TREE} | {f"{size} nodes": solve(by_level.round(6).tolist(), size, DEPTH, objective="tokens").tree for size in WRITERS}
    measured = {size: tokens_per_step(tree, texts, tokens) for size, tree in trees.items()}
    halves = [np.array_split(np.random.default_rng(seed).permutation(len(texts)), 2) for seed in range(HALVES)]
    cuts = [cut for half in halves for cut in (half, half[::-1])]
    found_there = [{size: tokens_per_step(tree, [texts[i] for i in there], tokens) for size, tree in trees.items()} for _, there in cuts]
    result: dict[str, Any] = {"trials": trials.tolist(), "first_rank": (counts[..., 0] / np.maximum(trials, 1)).round(4).tolist(), "writers": {}}
    for name, writer in writers.items():
        each = [counted(writer, text, tokens) for text in texts]
        n, c = np.array([one[0] for one in each]), np.array([one[1] for one in each])
        same = {model: [expected_tokens(tree, p) / measured[size] - 1 for size, tree in trees.items()] for model, p in promises(n.sum(0), c.sum(0)).items()}
        errors: dict[str, list[list[float]]] = {model: [] for model in same}
        for (here, _), there in zip(cuts, found_there, strict=True):
            for model, p in promises(n[here].sum(0), c[here].sum(0)).items():
                errors[model].append([expected_tokens(tree, p) / there[size] - 1 for size, tree in trees.items()])
        rms = {model: np.sqrt(np.mean(np.square(error), 0)).round(5).tolist() for model, error in errors.items()}
        result["writers"][name] = {"same_prompts": {model: np.round(error, 5).tolist() for model, error in same.items()}, "other_prompts_rms": rms}
    return {"sizes": list(SIZES), "measured": [round(value, 4) for value in measured.values()], "halves": HALVES} | result


def check(pair: Pair, ids: Sequence[list[int]], texts: Sequence[Text], tokens: int) -> int:
    """Decode some prompts with a tree; every step must be the one that follows from the text. How many steps were compared."""
    tree, compared = solve([0.4, 0.13, 0.06, 0.04], 16, 8).tree, 0
    decoder = SequoiaDecoder(pair.target, pair.draft, tree)
    for prompt, text in zip(ids, texts, strict=True):
        for step, (_, path) in zip(decoder.steps(torch.tensor(prompt), tokens, Sampling(), 0), steps(tree, text, tokens), strict=False):
            if step.path != path:
                raise SystemExit(f"a step accepted {step.path}, expected {path} from the text")
            compared += 1
    return compared


def show(result: dict[str, Any], console: Console) -> None:
    for part, title in (("same_prompts", "promised / measured - 1, same prompts"), ("other_prompts_rms", "root mean square of it, other prompts")):
        table = Table("counted at the nodes of", "model", *(f"{size} nodes" for size in result["sizes"]), box=None, title=title)
        for writer, each in result["writers"].items():
            for model, errors in each[part].items():
                table.add_row(writer, model, *(f"{error:+.1%}" if part == "same_prompts" else f"{error:.1%}" for error in errors))
        console.print(table)


def main() -> None:
    """Read, compare and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", help="as for sequoia-plan profile")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompts", type=int, default=160, help="of the built-in ones, at most")
    parser.add_argument("--tokens", type=int, default=48, help="of each prompt")
    parser.add_argument("--check", type=int, default=4, help="prompts that are decoded, too")
    parser.add_argument("--texts", type=Path, help="a result, whose texts are taken")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    if options.texts:
        known = json.loads(options.texts.read_text())
    else:
        pair = load_pair(draft=options.draft, dtype=options.dtype)
        ids = [encode(pair.tokenizer, prompt.text) for prompt in load(BUILT_IN)[: options.prompts]]
        decoder = SequoiaDecoder(pair.target, pair.draft, TREE)
        journal = journal_of(options.output)
        with Journal(journal, [pair.facts, ids, options.tokens]) as kept:
            reading = options.tokens + ROOM
            texts = [kept.get(str(i), lambda p=prompt: ranks_of_text(pair, decoder, p, reading)) for i, prompt in enumerate(ids)]  # type: ignore[misc]
        compared = check(pair, ids[: options.check], texts[: options.check], options.tokens)
        known = {"settings": {"dtype": dtype_name(pair.target.dtype), "tokens": options.tokens, "steps_checked": compared}, "models": pair.facts}
        known |= {"hardware": fingerprint(pair.target.device), "texts": texts}
        discard(journal)
    result = compare(known["texts"], known["settings"]["tokens"])
    write_atomically(options.output, (json.dumps(known | {"result": result}) + "\n").encode())
    show(result, Console(width=140))


if __name__ == "__main__":
    main()
