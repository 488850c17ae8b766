"""How often the child of each rank is the one accepted, by level, through the decoder's own sampling and verifiers.

Two methods. `decoding` counts, as Sequoia does (arXiv 2402.12374, App. F.1): decode with a one-level tree and count which of the root's
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

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sequoia_plan.artifacts import ArgumentError, LevelCounts, Lift, SequoiaPlanError, TokenTree
from sequoia_plan.artifacts.profile import MOST_KINDS, Counts
from sequoia_plan.artifacts.uncertainty import Z95, gradient, jackknife
from sequoia_plan.profiler.journal import Journal
from sequoia_plan.runtime import Pair, Sampling, SequoiaDecoder
from sequoia_plan.runtime.models.forward import additive
from sequoia_plan.runtime.models.vocabulary import shared_vocabulary
from sequoia_plan.runtime.verify import VERIFIERS, Laws, TreeIndex, Verdict, Verifier, traversal

RANKS, LEVELS = 16, 4
"""Children drawn at a node; levels told apart, the last one with all below it."""
METHODS = ("forced", "decoding")
TREE = TokenTree.from_parents([-1, 0, 0, 0, 1, 1, 2, 4, 4, 7])
"""Decodes the text of `forced`, and stands for any tree where precision is asked for."""
WIDEST = np.array([TREE.child_count[TREE.position_ids == level].max() for level in range(LEVELS)])
"""The most children a node of `TREE` has on each level."""
BOTH = ("sequoia", "traversal")
"""The verifiers whose acceptance is computed from the same draws."""
POSITIONS = 64
"""Judged at a time: bounds the memory for probabilities."""
LEAST_PROMPTS = 8
"""Fewer say nothing about how prompts differ."""


@dataclass(frozen=True)
class Acceptance:
    """What was observed under one setting, prompt by prompt.

    Args:
        trials: int64 [prompts, levels], accepted nodes observed.
        counts: float64 [prompts, levels, ranks], how many of their children of each rank were accepted, or were expected to be.
        reached: of `traversal`, float64 [prompts, 2, levels of `TREE`]: what `_BothRules` adds up.
        off: the part of trials and counts that belongs to accepted nodes off the spine; None if nobody told them apart.
    """

    trials: NDArray[np.int64]
    counts: NDArray[np.float64]
    reached: NDArray[np.float64] | None = None
    off: Acceptance | None = None

    def lift(self) -> Lift | None:
        """How much more often `traversal` accepts, level by level, and how sure that is: a jackknife over prompts."""
        if self.reached is None:
            return None
        depth = min(LEVELS, int(np.flatnonzero(self.trials.sum(0))[-1]) + 1)
        ratio = _lift(self.reached.sum(0))[:depth]
        covariance: tuple[tuple[float, ...], ...] = ()
        groups = len(self.reached)
        if groups >= LEAST_PROMPTS:
            off = np.log(np.maximum([_lift(self.reached.sum(0) - one)[:depth] for one in self.reached], 1e-9))
            off -= off.mean(0)
            covariance = tuple(map(tuple, (off.T @ off * (groups - 1) / groups).round(9).tolist()))
        return Lift(tuple(ratio.round(6).tolist()), tuple(WIDEST[:depth].tolist()), covariance)

    def levels(self) -> tuple[LevelCounts, ...]:
        """Totals of each level, down to the last one seen."""
        return self._totals(np.ones(len(self.trials), bool))

    def part(self, chosen: NDArray[np.bool_]) -> Acceptance:
        """What was observed on some of the prompts, bool [prompts]."""
        reached = None if self.reached is None else self.reached[chosen]
        return Acceptance(self.trials[chosen], self.counts[chosen], reached, self.off and self.off.part(chosen))

    def by_kind(self, kinds: Sequence[str | None]) -> dict[str, tuple[LevelCounts, ...]]:
        """`levels` of each kind of prompts; none if a prompt has no kind, or there are more kinds than a profile holds.

        Args:
            kinds: of the prompts in turn; those of further rounds follow from the start again.
        """
        named = np.array([kinds[i % len(kinds)] or "" for i in range(len(self.trials))])
        names = list(dict.fromkeys(named.tolist()))
        return {} if "" in names or len(names) > MOST_KINDS else {name: self._totals(named == name) for name in names}

    def _totals(self, chosen: NDArray[np.bool_]) -> tuple[LevelCounts, ...]:
        trials, counts = self.trials[chosen].sum(0), self.counts[chosen].sum(0)
        seen = int(np.flatnonzero(self.trials.sum(0))[-1]) + 1
        off: list[Counts | None] = [None] * seen
        if self.off is not None:
            of_them = self.off.trials[chosen].sum(0)
            apart = _within(self.off.counts[chosen].sum(0), counts, of_them, trials - of_them).round(4).tolist()
            off[1:] = [Counts(int(n), tuple(row)) for n, row in zip(of_them[1:seen], apart[1:seen], strict=True)]
        return tuple(LevelCounts(int(n), tuple(row), part) for n, row, part in zip(trials[:seen], counts[:seen].round(4).tolist(), off, strict=True))

    def precision(self) -> float:
        """Half the 95 % interval of a tree's expected tokens (`TREE`), relative: of its predicted speed-up too, step times given.

        Jackknife over prompts, whose texts differ more than positions within one; inf for fewer than eight.
        """
        error, mean = self._error()
        return Z95 * error / mean

    def effective_trials(self) -> int:
        """The effective sample size: independent trials that would leave the same interval. Fewer than there were, as positions of one text
        resemble each other."""
        p = self.counts.sum((0, 1)) / self.trials.sum()
        slope = gradient(TREE, p[None])[0]
        error, _ = self._error()
        return int(min(self.trials.sum(), np.ceil((p @ slope**2 - (p @ slope) ** 2) / max(error, 1e-9) ** 2) if np.isfinite(error) else np.inf))

    def _error(self) -> tuple[float, float]:
        """Standard error of F(`TREE`), and F."""
        if len(self.trials) < LEAST_PROMPTS:
            return float("inf"), 1.0
        return jackknife(TREE, self.trials.sum(1, keepdims=True), self.counts.sum(1, keepdims=True))


@dataclass(frozen=True)
class Progress:
    """How far a measurement is after a prompt.

    Args:
        done, most: prompts so far, and how many there may be.
        latest: what was found under the setting at hand.
        found: by index, what was found under every setting so far.
    """

    done: int
    most: int
    latest: Acceptance
    found: Mapping[int, Acceptance]


def measure_acceptance(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[Sampling],
    *,
    on_prompt: Callable[[int, int, Acceptance], None] = lambda done, most, found: None,
    **options: Any,
) -> list[Acceptance]:
    """Measure every setting, in the order given, to the end; see `finished_prompts`.

    Args:
        on_prompt: called after each prompt with how many there were, how many there may be, and what was found so far.

    Raises:
        SequoiaPlanError: if nothing could be measured.
    """
    found: Mapping[int, Acceptance] = {}
    for now in finished_prompts(pair, prompts, samplings, **options):
        on_prompt(now.done, now.most, now.latest)
        found = now.found
    return results(found)


def results(found: Mapping[int, Acceptance]) -> list[Acceptance]:
    """What was found under every setting, in their order.

    Raises:
        SequoiaPlanError: if nothing could be measured.
    """
    if not found or not all(each.trials.sum() for each in found.values()):
        raise SequoiaPlanError("acceptance: no step was decoded; the prompts leave no room in the model's context")
    return [found[i] for i in range(len(found))]


def finished_prompts(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[Sampling],
    *,
    method: str = METHODS[0],
    precision: float = 0.07,
    tokens_per_prompt: int = 32,
    rounds: int = 1,
    seed: int = 0,
    ranks: int = RANKS,
    journal: Path | None = None,
) -> Iterator[Progress]:
    """Measure prompt by prompt. The same arguments give the same result, whatever the machine's speed.

    Settings that differ in verifier or draft temperature alone share the target's text and both models' logits; `sequoia` and `traversal` under
    the same setting share the drawn children, too.

    Args:
        prompts: token ids, taken in order; once more with other seeds in each further round (greedy takes one round).
        method: "forced" or "decoding".
        precision: stop once `Acceptance.precision` of each setting is at most this; 0 uses all prompts and rounds.
        journal: a file that keeps finished prompts until all is done, so that an interrupted run goes on where it was.

    Raises:
        ArgumentError: for another method.
    """
    if method not in METHODS:
        raise ArgumentError(f"method: found {method!r}, expected {' or '.join(METHODS)}")
    facts = [pair.facts, [list(map(int, prompt)) for prompt in prompts], [s.settings() for s in samplings], method, tokens_per_prompt, seed, ranks, "classes"]
    groups = _groups(samplings, method)
    most = sum(len(prompts) * (1 if samplings[group[0]].greedy else rounds) for group in groups)
    compared = any(s.verifier == "traversal" and not s.greedy for s in samplings)
    found: dict[int, Acceptance] = {}
    done = 0
    with Journal(journal, facts) as kept:
        measure = _Forced(pair, ranks, compared) if method == "forced" else _Counted(pair, ranks)
        for number, group in enumerate(groups):
            mine = [samplings[i] for i in group]
            tallies: list[Any] = []
            for used in range(len(prompts) * (1 if mine[0].greedy else rounds)):
                prompt = torch.tensor(prompts[used % len(prompts)])
                tallies.append(kept.get(f"{number}.{used}", lambda p=prompt, m=mine, s=seed + used: measure(p, m, tokens_per_prompt, s)))  # type: ignore[misc]
                done += 1
                found |= {i: _collect(tallies, place) for place, i in enumerate(group)}
                yield Progress(done, most, found[group[0]], dict(found))
                if max(found[i].precision() for i in group) <= precision:
                    break


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


class _Forced:
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
        """For each setting: trials [levels][classes] and counts [levels][classes][ranks]; `reached` of `_BothRules`, None if nobody asked."""
        decoder = self.decoder
        text, levels, classes = prompt.tolist(), [0], [0]  # of each position from the prompt's last token on
        writer, both = samplings[0], None
        if any(each.verifier == "traversal" for each in samplings) and not writer.greedy:
            both = writer = _BothRules(**next(each for each in samplings if each.verifier in BOTH).settings())
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
class _BothRules(Sampling):
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


class _Counted:
    """Counts while decoding with a one-level tree."""

    def __init__(self, pair: Pair, ranks: int) -> None:
        self.decoder = SequoiaDecoder(pair.target, pair.draft, TokenTree.star(min(ranks, shared_vocabulary(pair.target, pair.draft)[0])))
        self.ends = set(pair.end_tokens)

    def __call__(self, prompt: Tensor, samplings: Sequence[Sampling], tokens: int, seed: int) -> list[dict[str, Any]]:
        """As `_Forced`; only the first level is seen."""
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


def _groups(samplings: Sequence[Sampling], method: str) -> list[list[int]]:
    """Which settings can share text: those under which the target writes the same."""

    def law(i: int) -> str:
        mine = samplings[i]
        # by what the text's own draws say, or compared with what is
        lifted = mine.verifier in BOTH and not mine.greedy and replace(mine, verifier="traversal") in samplings
        return repr(replace(mine, verifier="sequoia", draft_temperature=mine.draft_temperature if lifted else None) if method == "forced" else mine)

    order = sorted(range(len(samplings)), key=law)
    return [list(group) for _, group in itertools.groupby(order, law)]


def _collect(tallies: Sequence[Any], place: int) -> Acceptance:
    mine = [tally[place] for tally in tallies]
    trials, counts = np.array([t["trials"] for t in mine], np.int64), np.array([t["counts"] for t in mine], np.float64)
    total, off = counts.sum(2), counts[:, :, 1]
    reached = np.array([t["reached"] for t in mine]) if mine[0]["reached"] else None
    if reached is not None:
        plain, total = total, _lifted(total, trials.sum(2), reached.sum(0))
        off = off * total / np.maximum(plain, 1e-300)  # of one level, the classes are lifted alike
    return Acceptance(trials.sum(2), total, reached, Acceptance(trials[:, :, 1], off))


def _within(off: NDArray[np.float64], total: NDArray[np.float64], trials: NDArray[np.int64], others: NDArray[np.int64]) -> NDArray[np.float64]:
    """Counts [levels, ranks] off the spine, moved so that they are at most their `trials`, and the rest of `total` at most the `others`."""
    off = off * np.minimum(1, trials / np.maximum(off.sum(-1), 1e-300))[:, None]
    rest = total - off
    moved: NDArray[np.float64] = total - rest * np.minimum(1, others / np.maximum(rest.sum(-1), 1e-300))[:, None]
    return moved


def _lift(reached: NDArray[np.float64]) -> NDArray[np.float64]:
    """float64 [levels]: how many times as often the second rule gets past each level, from `_BothRules.reached`."""
    past = reached[:, 1:] / np.maximum(reached[:, :-1], 1e-9)
    lift: NDArray[np.float64] = np.where(past[0] > 0, past[1] / np.maximum(past[0], 1e-9), 1.0)
    return lift[:LEVELS]


def _lifted(counts: NDArray[np.float64], trials: NDArray[np.int64], reached: NDArray[np.float64]) -> NDArray[np.float64]:
    """`counts` of the first rule as the second one accepts: ranks that `TREE` has on a level in proportion, the others as they are, or what
    those leave."""
    known = np.arange(counts.shape[2]) < WIDEST[:, None]
    inside = np.where(known, counts * _lift(reached)[:, None], 0.0)
    inside *= np.minimum(1, trials / np.maximum(inside.sum(-1), 1e-9))[..., None]
    outside = np.where(known, 0.0, counts)
    room = (trials - inside.sum(-1)) / np.maximum(outside.sum(-1), 1e-9)
    return inside + outside * np.clip(room, 0, 1)[..., None]
