"""How often the child of each rank is the one accepted, by level, through the decoder's own sampling and verifiers.

Two methods. `decoding` counts, as Sequoia does (arXiv 2402.12374, App. F.1): decode with a one-level tree and count which of the root's
children is accepted. `forced` computes: decode with a small tree, then run target and draft once more over the text they
wrote; at every position draw children afresh and ask the verifier for the probability that each is the one accepted. The
position's level is where it stood in that tree, and its class is whether every child accepted on the way there was a first one (on the spine)
or not. One position is one trial, whatever it decided, so the same text says more.

What `traversal` accepts depends on what hangs below a node. With `forced`, the small tree that writes the text is judged by
both rules at every step, and the acceptance of its ranks on each level is multiplied by how much more often `traversal` gets
past that level. `decoding` sees one level only, where the two rules are the same.
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

from sequoia_plan.artifacts import ArgumentError, LevelCounts, SequoiaPlanError, TokenTree
from sequoia_plan.artifacts.profile import MOST_KINDS, Counts
from sequoia_plan.artifacts.uncertainty import Z95, gradient, jackknife
from sequoia_plan.profiler.journal import Journal
from sequoia_plan.runtime import Pair, Sampling, SequoiaDecoder
from sequoia_plan.runtime.models.forward import additive
from sequoia_plan.runtime.models.vocabulary import shared_vocabulary
from sequoia_plan.runtime.verify import VERIFIERS, Laws, TreeIndex, Verdict, Verifier

RANKS, LEVELS = 16, 4
"""Children drawn at a node; levels told apart, the last one with all below it."""
METHODS = ("forced", "decoding")
TREE = TokenTree.from_parents([-1, 0, 0, 0, 1, 1, 2, 4, 4, 7])
"""Decodes the text of `forced`, and stands for any tree where precision is asked for."""
WIDEST = np.array([TREE.child_count[TREE.position_ids == level].max() for level in range(LEVELS)])
"""The most children a node of `TREE` has on each level."""
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
        off: the part of both that belongs to accepted nodes off the spine; None if nobody told them apart.
    """

    trials: NDArray[np.int64]
    counts: NDArray[np.float64]
    off: Acceptance | None = None

    def levels(self) -> tuple[LevelCounts, ...]:
        """Totals of each level, down to the last one seen."""
        return self._totals(np.ones(len(self.trials), bool))

    def part(self, chosen: NDArray[np.bool_]) -> Acceptance:
        """What was observed on some of the prompts, bool [prompts]."""
        return Acceptance(self.trials[chosen], self.counts[chosen], self.off and self.off.part(chosen))

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

    Settings that differ in verifier or draft temperature alone share the target's text and both models' logits.

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
        self.decoder = SequoiaDecoder(pair.target, pair.draft, TREE, captured=False if compared else None)
        self.compared = compared
        assert self.decoder.drafter is not None
        self.drafter = self.decoder.drafter
        self.ranks = min(ranks, self.drafter.vocabulary)
        self.ends = set(pair.end_tokens)

    @torch.inference_mode()
    def __call__(self, prompt: Tensor, samplings: Sequence[Sampling], tokens: int, seed: int) -> list[dict[str, Any]]:
        """For each setting: trials [levels][classes] and counts [levels][classes][ranks]; `reached` of `_BothRules`, None if nobody asked."""
        decoder = self.decoder
        text, places = prompt.tolist(), [0]  # of each position from the prompt's last token on: twice its level, and its class
        both = _BothRules(**samplings[0].settings()) if self.compared and not samplings[0].greedy else None
        for step in decoder.steps(prompt, tokens, both or samplings[0], seed):
            text += step.tokens
            places += [*(2 * min(level, LEVELS - 1) + TREE.classes[node] for level, node in enumerate(step.path[1:], 1)), 0]
            if len(text) - prompt.numel() >= tokens or self.ends.intersection(step.tokens):
                break
        ends = [at for at, token in enumerate(text[prompt.numel() :]) if token in self.ends]
        ids = torch.tensor(text[: prompt.numel() + ends[0]] if ends else text, device=decoder.device)
        place = torch.tensor(places[: ids.numel() - prompt.numel() + 1])
        trials = torch.bincount(place, minlength=2 * LEVELS).reshape(LEVELS, 2).tolist()
        sums = [torch.zeros(2 * LEVELS, self.ranks, dtype=torch.float64) for _ in samplings]
        generator = torch.Generator(decoder.device).manual_seed(seed)
        columns = torch.arange(ids.numel(), device=decoder.device)
        for here in columns[prompt.numel() - 1 :].split(POSITIONS):  # the prompt before is in both caches
            mask = additive(columns <= here[:, None], decoder.target.model.dtype)
            target = decoder.target(decoder.sequence.target, ids[here], here, here, mask).logits
            draft = self.drafter.read_text(decoder.sequence.draft, ids[here], here, mask).logits
            for sampling, total in zip(samplings, sums, strict=True):
                found = expected_acceptance(target, draft, sampling, self.ranks, generator, self.drafter.covered)
                total.index_add_(0, place[(here - (prompt.numel() - 1)).cpu()], found.cpu())
        reached = both.reached.tolist() if both else None
        return [
            {"trials": trials, "counts": total.reshape(LEVELS, 2, -1).tolist(), "reached": reached if s.verifier == "traversal" else None}
            for s, total in zip(samplings, sums, strict=True)
        ]


@dataclass(frozen=True)
class _BothRules(Sampling):
    """A sampling whose every step is judged by `sequoia` and by `traversal`; it goes on with its own.

    Args:
        reached: float64 [2, depth], the sum over steps of the probability to get to each level, by either rule, given what was drawn.
    """

    reached: Tensor = field(default_factory=lambda: torch.zeros(2, TREE.depth, dtype=torch.float64), hash=False, compare=False)

    @property
    def rule(self) -> Verifier:
        def judge(target: Laws, draft: Tensor, drawn: Tensor, index: TreeIndex, covered: Tensor | None) -> Verdict:
            verdicts = {name: VERIFIERS[name].judge(target, draft, drawn, index, covered) for name in ("sequoia", "traversal")}
            for row, verdict in zip(self.reached, verdicts.values(), strict=True):
                ends = torch.zeros_like(row).index_add_(0, index.offsets.cpu(), verdict.ends.cpu())
                row += ends.flip(0).cumsum(0).flip(0)
            return verdicts[self.verifier]

        return Verifier(judge, VERIFIERS[self.verifier].drawing)


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
        lifted = mine.verifier == "traversal" and not mine.greedy  # by what the text's own draws say
        return repr(replace(mine, verifier="sequoia", draft_temperature=mine.draft_temperature if lifted else None) if method == "forced" else mine)

    order = sorted(range(len(samplings)), key=law)
    return [list(group) for _, group in itertools.groupby(order, law)]


def _collect(tallies: Sequence[Any], place: int) -> Acceptance:
    mine = [tally[place] for tally in tallies]
    trials, counts = np.array([t["trials"] for t in mine], np.int64), np.array([t["counts"] for t in mine], np.float64)
    total, off = counts.sum(2), counts[:, :, 1]
    if mine[0]["reached"]:
        plain, total = total, _lifted(total, trials.sum(2), np.sum([t["reached"] for t in mine], axis=0))
        off = off * total / np.maximum(plain, 1e-300)  # of one level, the classes are lifted alike
    return Acceptance(trials.sum(2), total, Acceptance(trials[:, :, 1], off))


def _within(off: NDArray[np.float64], total: NDArray[np.float64], trials: NDArray[np.int64], others: NDArray[np.int64]) -> NDArray[np.float64]:
    """Counts [levels, ranks] off the spine, moved so that they are at most their `trials`, and the rest of `total` at most the `others`."""
    off = off * np.minimum(1, trials / np.maximum(off.sum(-1), 1e-300))[:, None]
    rest = total - off
    moved: NDArray[np.float64] = total - rest * np.minimum(1, others / np.maximum(rest.sum(-1), 1e-300))[:, None]
    return moved


def _lifted(counts: NDArray[np.float64], trials: NDArray[np.int64], reached: NDArray[np.float64]) -> NDArray[np.float64]:
    """`counts` of the first rule as the second one accepts: ranks that `TREE` has on a level in proportion, the others as they are, or what
    those leave."""
    past = reached[:, 1:] / np.maximum(reached[:, :-1], 1e-9)
    lift = np.where(past[0] > 0, past[1] / np.maximum(past[0], 1e-9), 1.0)
    known = np.arange(counts.shape[2]) < WIDEST[:, None]
    inside = np.where(known, counts * lift[:LEVELS, None], 0.0)
    inside *= np.minimum(1, trials / np.maximum(inside.sum(-1), 1e-9))[..., None]
    outside = np.where(known, 0.0, counts)
    room = (trials - inside.sum(-1)) / np.maximum(outside.sum(-1), 1e-9)
    return inside + outside * np.clip(room, 0, 1)[..., None]
