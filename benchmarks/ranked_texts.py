"""The target's greedy texts as ranks of the draft, from which the steps of any tree follow.

At temperature 0 the target's text does not depend on the tree, and a step accepts a child exactly
if it is the text's next token. So the draft is asked once, for a step that begins at any position
of the text, for the rank that it gives to each token that follows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.planner import solve
from sequoia_plan.profiler.acceptance import RANKS
from sequoia_plan.profiler.draft_passes import logits_over_text
from sequoia_plan.profiler.journal import Journal, discard
from sequoia_plan.profiler.methods import POSITIONS_AT_ONCE, expected_acceptance, pieces
from sequoia_plan.profiler.observed import TREE, num_counted_levels
from sequoia_plan.runtime import Pair, Sampling, SequoiaDecoder
from sequoia_plan.runtime.base.masks import additive_mask
from sequoia_plan.runtime.base.tree_tensors import TreeTensors
from sequoia_plan.runtime.draft.eagle import EagleCache, EagleDrafter
from sequoia_plan.runtime.models.forward import ForwardOutput
from sequoia_plan.runtime.step import TreeStep

Floats = NDArray[np.float64]
MAX_DEPTH = 16
"""Levels of the deepest tree whose steps are known."""
MAX_RANK = 64
"""Children that the draft is asked for at a position."""
EXTRA_TOKENS = 16
"""Tokens read beyond those that are counted, for the steps that begin before."""
NUM_SPLITS = 20
"""Random splits of the prompts into halves."""
GREEDY = Sampling()
RecordedText = list[int] | list[list[int]]
"""A text as results hold it: the rank of each next token, or for an EAGLE draft a `RankedText`."""
RankedText = list[list[int]]
"""For a step that begins at each position of a text, the ranks of the tokens after it, one by one:
up to the first that is none of the first `MAX_RANK`, which is 0, or for `MAX_DEPTH` levels."""


@torch.inference_mode()
def ranks_of_text(
    pair: Pair, decoder: SequoiaDecoder, prompt: list[int], tokens: int
) -> RecordedText:
    """The ranks that the draft gives to the tokens of the target's greedy text after `prompt`.

    At an end token the text ends with that one.
    """
    step = decoder.step
    assert step.drafter is not None
    text, levels = greedy_text(pair, decoder, prompt, tokens)
    if isinstance(step.drafter, EagleDrafter):
        return _ranks_by_step(step, torch.tensor(text), len(prompt) - 1)
    target_logits, draft_logits = [], []
    for slots, start, end, output in _target_passes(step, torch.tensor(text), len(prompt) - 1):
        draft_logits.append(
            logits_over_text(
                step.drafter, step.sequence, slots, levels[start:end], output.hidden_states
            )
        )
        target_logits.append(output.logits)
    return _ranks(torch.cat(target_logits), torch.cat(draft_logits), step.drafter.d2t)


def ranked_texts(recorded_texts: Sequence[Any]) -> list[RankedText]:
    """The texts of a result, by the positions at which steps may begin.

    Args:
        recorded_texts: each a `RecordedText`.
    """
    texts: list[RankedText] = []
    for text in recorded_texts:
        if text and isinstance(text[0], list):
            texts.append(text)
            continue
        chains = [text[place : place + MAX_DEPTH] for place in range(len(text))]
        texts.append([chain[: chain.index(0) + 1] if 0 in chain else chain for chain in chains])
    return texts


def _ranks(target_logits: Tensor, draft_logits: Tensor, d2t: Tensor | None) -> list[int]:
    """The draft's rank of the target's most probable token at each position; 0 beyond MAX_RANK."""
    is_accepted = expected_acceptance(
        target_logits, draft_logits, GREEDY, MAX_RANK, torch.Generator(), d2t
    )
    return torch.where(is_accepted.any(1), is_accepted.argmax(1) + 1, 0).tolist()


def _target_passes(
    step: TreeStep, text: Tensor, first: int
) -> Iterator[tuple[Tensor, int, int, ForwardOutput]]:
    """Run the target over a text from the slot `first` on, piece by piece.

    Yields:
        The slots of a piece, its first position and the one after its last, counted from `first`,
        and the target's output.
    """
    columns = torch.arange(text.numel())
    for start, end in pieces([0] * (text.numel() - first), POSITIONS_AT_ONCE):
        slots = columns[first + start : first + end]
        mask = additive_mask(columns <= slots[:, None], step.target.model.dtype)
        yield slots, start, end, step.target(step.sequence.target, text[slots], slots, slots, mask)


def _ranks_by_step(step: TreeStep, text: Tensor, first: int) -> RankedText:
    """The ranks of an EAGLE draft, whose probabilities depend on where the step began.

    A step's chain of known tokens is drafted from every position, up to a token beyond `MAX_RANK`.

    Args:
        text: int64 [n], prompt and text; the prompt is in the caches.
        first: the slot of the first root.
    """
    drafter, sequence, cache = step.drafter, step.sequence, step.sequence.draft
    assert isinstance(drafter, EagleDrafter) and isinstance(cache, EagleCache)
    chain = TokenTree.chain(MAX_DEPTH + 1)
    tensors = TreeTensors.of(chain, text.device, drafter.model.dtype)
    passes = drafter.passes(chain, tensors)
    # a root pass reads as many tokens before the root again as the chain has levels
    num_repeated = min(first, MAX_DEPTH + 1)
    ranks: RankedText = []
    target_logits, features = [], []
    for _, _, _, output in _target_passes(step, text, first - num_repeated):
        assert output.hidden_states is not None
        target_logits.append(output.logits)
        features.append(drafter.model.fuse(output.hidden_states))
    all_logits, all_features = torch.cat(target_logits), torch.cat(features)
    for place, slot in enumerate(range(first - num_repeated, text.numel())):
        if slot >= first:
            sequence.length.fill_(slot)
            columns = tensors.columns(sequence.length, sequence.tokens.numel())
            drafted, chain_ranks = None, []
            for level, draft_pass in enumerate(passes[: text.numel() - slot]):
                drafted = drafter.forward(draft_pass, sequence, columns, drafted)
                logits = all_logits[place + level : place + level + 1]
                chain_ranks += _ranks(logits, drafted.logits.float(), drafter.d2t)
                if not chain_ranks[-1]:
                    break
            ranks.append(chain_ranks)
        slots = torch.tensor([slot])
        drafter.keep_features(cache, slots, all_features[place : place + 1])
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
        for rank in text[place]:
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


def counts_over_texts(
    tree: TokenTree, texts: Sequence[RankedText], tokens: int
) -> tuple[Floats, Floats]:
    """Trials [texts, levels, classes], and counts [texts, levels, classes, ranks]."""
    trials, counts = zip(*(count_acceptance(tree, text, tokens) for text in texts), strict=True)
    return np.array(trials), np.array(counts)


def count_acceptance(tree: TokenTree, text: RankedText, tokens: int) -> tuple[Floats, Floats]:
    """Count acceptance of one text at the nodes that `tree` accepts, as the profiler does.

    Returns:
        Trials [levels, classes], and counts [levels, classes, ranks].
    """
    num_levels = num_counted_levels(tree)
    trials, counts = np.zeros((num_levels, 2)), np.zeros((num_levels, 2, RANKS))
    for place, path in steps_over_text(tree, text, tokens):
        for level, node in enumerate(path[: len(text[place])]):
            row = min(level, num_levels - 1), int(tree.classes[node])
            rank = text[place][level]
            trials[row] += 1
            if 0 < rank <= RANKS:
                counts[(*row, rank - 1)] += 1
    return trials, counts


def record_texts(
    pair: Pair, prompts: Sequence[list[int]], tokens: int, num_checked: int, journal_path: Path
) -> tuple[list[RecordedText], int]:
    """Read a greedy text after each prompt; finished ones are kept in a journal.

    Args:
        tokens: the tokens of a text that are counted.
        num_checked: prompts of which every step of a tree of 24 nodes is compared with decoding.

    Returns:
        The texts, and the number of steps that were compared.
    """
    decoder = SequoiaDecoder(pair.target, pair.draft, TREE)
    texts: list[RecordedText] = []
    with Journal(journal_path, [pair.metadata, list(prompts), tokens, MAX_DEPTH]) as journal:
        for number, prompt in enumerate(prompts):

            def read_text(prompt: list[int] = prompt) -> RecordedText:
                return ranks_of_text(pair, decoder, prompt, tokens + EXTRA_TOKENS)

            texts.append(journal.get(str(number), read_text))
    checked_texts = ranked_texts(texts[:num_checked])
    tree = solve([0.4, 0.13, 0.06, 0.04], 24, 8).tree
    num_steps = check_steps(pair, tree, prompts[:num_checked], checked_texts, tokens)
    discard(journal_path)
    return texts, num_steps


def check_steps(
    pair: Pair,
    tree: TokenTree,
    prompts: Sequence[list[int]],
    texts: Sequence[RankedText],
    tokens: int,
) -> int:
    """Decode some prompts with a tree, and compare every step with the one over the text.

    Returns:
        The number of steps that were compared.

    Raises:
        SystemExit: if a step differs.
    """
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


def random_splits(num_texts: int) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Random halves of the texts: a part to predict from and the rest, each split both ways."""
    splits = []
    for seed in range(NUM_SPLITS):
        order = np.random.default_rng(seed).permutation(num_texts)
        first, second = np.array_split(order, 2)
        splits += [(first, second), (second, first)]
    return splits
