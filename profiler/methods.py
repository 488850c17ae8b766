"""Two methods to observe acceptance on one prompt, through the decoder's own sampling and verifiers.

`decoding` counts, as Sequoia does (arXiv 2402.12374, App. F.1): decode with a one-level tree and count which of the root's
children is accepted. `forced` computes: decode with a small tree, then run target and draft once more over the text they
wrote; at every position draw children afresh and ask the verifier for the probability that each is the one accepted. The
position's level is where it stood in that tree, and its class is whether every child accepted on the way there was a first one (on the spine)
or not. One position is one trial, whatever it decided, so the same text says more.

What `traversal` accepts at a node depends on the path down to it. With `forced`, the small tree that writes the text is judged by
both rules at every step, and the acceptance of its ranks on each level is multiplied by how much more often `traversal` gets
past that level. `decoding` sees one level only, where the two rules are the same.

Where both are measured, they judge the same draws over the same text: their figures differ by that ratio alone, and so does their noise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.profiler.observed import LEVELS, TREE
from sequoia_plan.runtime import Pair, Sampling, SequoiaDecoder
from sequoia_plan.runtime.models.forward import additive
from sequoia_plan.runtime.models.vocabulary import shared_vocabulary
from sequoia_plan.runtime.verify import VERIFIERS, Laws, TreeIndex, Verdict, Verifier, traversal

BOTH = ("sequoia", "traversal")
"""The verifiers whose acceptance is computed from the same draws."""
POSITIONS = 64
"""Judged at a time: bounds the memory for probabilities."""


def expected_acceptance(target: Tensor, draft: Tensor, sampling: Sampling, ranks: int, generator: torch.Generator, covered: Tensor | None = None) -> Tensor:
    """float64 [positions, ranks]: at each position, the probability that the child of each rank is the one accepted, children drawn once.

    Args:
        target, draft: logits [positions, vocabulary] and [positions, draft vocabulary].
        covered: int64 [draft vocabulary], the target's token for each of the draft's; None if they are the same.
    """
    q = sampling.draft(draft)
    picks = sampling.drawing(q, ranks, generator)
    if sampling.greedy:
        tokens = picks if covered is None else covered[picks]
        return (tokens == target.argmax(-1, keepdim=True)).double()
    p = sampling.target(target)
    rule = VERIFIERS["sequoia"] if sampling.verifier == "traversal" else sampling.rule  # the same at a root's children
    stars = TreeIndex.stars(len(p), ranks, p.device)
    return rule.judge(lambda nodes: p[nodes], q, picks, stars, covered).ends[len(p) :].reshape(len(p), ranks)


class Forced:
    """Measures by one more pass over text that the target wrote.

    Args:
        compared: judge each step of the text by both rules.
    """

    def __init__(self, pair: Pair, ranks: int, compared: bool) -> None:
        decoder = SequoiaDecoder(pair.target, pair.draft, TokenTree.chain(2), captured=False if compared else None)
        assert decoder.drafter is not None
        self.drafter = decoder.drafter
        self.decoder = decoder.with_tree(as_deep(TREE, self.drafter.drafting.deepest))
        self.ranks = min(ranks, self.drafter.vocabulary)
        self.ends = set(pair.end_tokens)

    @torch.inference_mode()
    def __call__(self, prompt: Tensor, samplings: Sequence[Sampling], tokens: int, seed: int) -> list[dict[str, Any]]:
        """For each setting: trials [levels][classes] and counts [levels][classes][ranks]; `reached` of `BothRules`, None if nobody asked."""
        decoder = self.decoder
        text, levels, classes = prompt.tolist(), [0], [0]  # of each position from the prompt's last token on
        writer, both = samplings[0], None
        if any(each.verifier == "traversal" for each in samplings) and not writer.greedy:
            both = writer = BothRules(**next(each for each in samplings if each.verifier in BOTH).settings())
        for step in decoder.steps(prompt, tokens, writer, seed):
            text += step.tokens
            levels += [*range(1, len(step.tokens)), 0]
            classes += [*decoder.tree.classes[step.path[1:]].tolist(), 0]
            if len(text) - prompt.numel() >= tokens or self.ends.intersection(step.tokens):
                break
        ends = [at for at, token in enumerate(text[prompt.numel() :]) if token in self.ends]
        ids = torch.tensor(text[: prompt.numel() + ends[0]] if ends else text, device=decoder.device)
        first = prompt.numel() - 1
        levels, classes = levels[: ids.numel() - first], classes[: ids.numel() - first]
        deepest = self.drafter.drafting.deepest or len(levels) + 2
        places = [2 * min(level, LEVELS - 1) + kind for level, kind in zip(levels, classes, strict=True)]  # of the sums
        known = [place for place, level in zip(places, levels, strict=True) if level < deepest - 1]
        trials = torch.bincount(torch.tensor(known), minlength=2 * LEVELS).reshape(LEVELS, 2).tolist()
        sums = [torch.zeros(2 * LEVELS, self.ranks, dtype=torch.float64) for _ in samplings]
        generator = torch.Generator(decoder.device).manual_seed(seed)
        columns = torch.arange(ids.numel(), device=decoder.device)
        again = min(first, TREE.depth) if self.drafter.taps else 0  # before them, the prompt is in both caches
        levels, places = [-1] * again + levels, [-1] * again + places
        for start, end in pieces(levels, POSITIONS):
            here, mine = columns[first - again + start : first - again + end], levels[start:end]
            read = decoder.target(decoder.sequence.target, ids[here], here, here, additive(columns <= here[:, None], decoder.target.model.dtype))
            target, draft = read.logits, self.drafter.read_text(decoder.sequence, here, mine, read.features)
            counted = torch.tensor([at for at, level in enumerate(mine) if 0 <= level < deepest - 1], dtype=torch.long)
            if len(counted) < len(mine):
                target, draft = target[counted], draft[counted]
            place = torch.tensor(places[start:end])[counted]
            judged: dict[Sampling, Tensor] = {}  # by the rule that is applied to a node's own children
            for sampling, total in zip(samplings, sums, strict=True):
                alone = replace(sampling, verifier="sequoia") if sampling.verifier == "traversal" else sampling
                if alone not in judged:
                    judged[alone] = expected_acceptance(target, draft, alone, self.ranks, generator, self.drafter.covered).cpu()
                total.index_add_(0, place, judged[alone])
        reached = both.reached.tolist() if both else None
        return [
            {"trials": trials, "counts": total.reshape(LEVELS, 2, -1).tolist(), "reached": reached if s.verifier == "traversal" else None}
            for s, total in zip(samplings, sums, strict=True)
        ]


@dataclass(frozen=True)
class BothRules(Sampling):
    """A sampling whose every step is judged by `sequoia` and by `traversal`; it goes on with its own.

    Args:
        reached: float64 [2, depth], the sum over steps of the probability to get to each level, by either rule, given what was drawn on the way
            there: so on the first level, where the two rules accept alike, they are the same numbers.
    """

    reached: Tensor = field(default_factory=lambda: torch.zeros(2, TREE.depth, dtype=torch.float64), hash=False, compare=False)

    @property
    def rule(self) -> Verifier:
        def judge(target: Laws, draft: Tensor, drawn: Tensor, index: TreeIndex, covered: Tensor | None) -> Verdict:
            verdicts = {name: VERIFIERS[name].judge(target, draft, drawn, index, covered) for name in BOTH}
            of = traversal.of_subtrees(traversal.judged(target, draft, drawn, index, covered), index).double().cpu()
            ends = torch.zeros_like(self.reached[0]).index_add_(0, index.offsets.cpu(), verdicts["sequoia"].ends.cpu())
            self.reached[0] += ends.flip(0).cumsum(0).flip(0)
            self.reached[1].index_add_(0, index.offsets.cpu(), through(of, index))
            return verdicts[self.verifier]

        return Verifier(judge, VERIFIERS[self.verifier].drawing)


def through(of_subtrees: Tensor, index: TreeIndex) -> Tensor:
    """float64 [size]: the probability that the path goes through each node with `traversal`, on average over what is drawn below it.

    Args:
        of_subtrees: float64 [size], see `traversal.of_subtrees`.
    """
    passed_by = torch.ones_like(of_subtrees)  # no earlier sibling's subtree holds the path's end
    parents = index.parents.tolist()
    for node in range(2, index.size):
        if parents[node - 1] == parents[node - 2]:
            passed_by[node] = passed_by[node - 1] * (1 - of_subtrees[node - 1])
    return of_subtrees * passed_by[index.paths.cpu()].prod(-1)


def as_deep(tree: TokenTree, deepest: int | None) -> TokenTree:
    """The tree without its levels beyond `deepest`, if that is a limit."""
    return tree if deepest is None or tree.depth <= deepest else TokenTree(tree.parents[: int(tree.level_offsets[deepest])])


def pieces(levels: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Ranges of at most `most` positions, cut where a step begins, if no step is longer."""
    start = 0
    while start < len(levels):
        end = min(start + most, len(levels))
        cut = end
        while start < cut < len(levels) and levels[cut] > 0:
            cut -= 1
        end = cut if cut > start else end
        yield start, end
        start = end


class Counted:
    """Counts while decoding with a one-level tree."""

    def __init__(self, pair: Pair, ranks: int) -> None:
        self.decoder = SequoiaDecoder(pair.target, pair.draft, TokenTree.star(min(ranks, shared_vocabulary(pair.target, pair.draft)[0])))
        self.ends = set(pair.end_tokens)

    def __call__(self, prompt: Tensor, samplings: Sequence[Sampling], tokens: int, seed: int) -> list[dict[str, Any]]:
        """As `Forced`; only the first level is seen."""
        counts, trials, made = [0] * self.decoder.tree.size, 0, 0
        for step in self.decoder.steps(prompt, tokens, samplings[0], seed):
            counts[step.path[1] if len(step.path) > 1 else 0] += 1
            trials += 1
            made += len(step.tokens)
            if made >= tokens or self.ends.intersection(step.tokens):
                break
        nothing = [0.0] * (len(counts) - 1)
        below = [[nothing, nothing]] * (LEVELS - 1)
        return [{"trials": [[trials, 0], *[[0, 0]] * (LEVELS - 1)], "counts": [[list(map(float, counts[1:])), nothing], *below], "reached": None}]
