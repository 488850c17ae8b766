"""The cost model: expected tokens of a tree, seconds of its step, and the speed-up that follows."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sequoia_plan.artifacts.bench_result import Prediction
from sequoia_plan.artifacts.drafting import LANGUAGE_MODEL, Drafting
from sequoia_plan.artifacts.errors import SequoiaPlanError
from sequoia_plan.artifacts.latency import Latency
from sequoia_plan.artifacts.plan import Plan
from sequoia_plan.artifacts.profile import Profile
from sequoia_plan.artifacts.tree import TokenTree

Floats = NDArray[np.float64]
SAME = 1e-9
"""Relative: figures that differ by less are the same, computed on another machine."""
Acceptance = Sequence[float] | Sequence[Sequence[float]] | Sequence[Sequence[Sequence[float]]] | Sequence[float | tuple[float | tuple[float, ...], ...]]
"""p[rank], p[level][rank] or p[level][class][rank], see `acceptance_rows`."""


def by_class(acceptance: Acceptance | Floats) -> Floats:
    """float64 [levels, classes, ranks]: the given levels, one for a vector, and the given classes, one where none are told apart."""
    given = np.asarray(acceptance, np.float64)
    return given if given.ndim == 3 else np.atleast_2d(given)[:, None]


def acceptance_rows(acceptance: Acceptance | Floats, depth: int, branching: int | None = None) -> Floats:
    """float64 [depth - 1, classes, ranks]: p[level][class][rank] of the children of nodes on each level.

    There is one class, or two: nodes on the spine (every rank on their path from the root is 1; the root is one) and nodes off it. One vector holds
    for all levels; the last of the given levels holds for all deeper ones.
    """
    rows = by_class(acceptance)
    levels = np.minimum(np.arange(depth - 1), len(rows) - 1)
    return np.ascontiguousarray(rows[levels, :, :branching])


def child_probabilities(tree: TokenTree, rows: Floats) -> Floats:
    """float64 [size - 1]: of each node but the root, the probability that it is the one accepted, its parent being accepted.

    A rank beyond the rows' end has the probability 0.

    Args:
        rows: float64 [levels, classes, ranks]; the last level holds for all deeper ones.
    """
    level, kind = parents_rows(tree, rows)
    rank = tree.ranks[1:] - 1
    return np.where(rank < rows.shape[2], rows[level, kind, np.minimum(rank, rows.shape[2] - 1)], 0.0)


def parents_rows(tree: TokenTree, rows: Floats) -> tuple[Any, Any]:
    """Level and class in `rows` of the parent of each node but the root."""
    parents = tree.parents[1:]
    return np.minimum(tree.position_ids[parents], len(rows) - 1), np.minimum(tree.classes[parents], rows.shape[1] - 1)


def node_values(tree: TokenTree, acceptance: Acceptance | Floats) -> Floats:
    """float64 [size]: the probability that each node is accepted, the product of p along its path, from the tree alone.

    A rank beyond the vector's end has the probability 0.
    """
    parents, offsets = tree.parents, tree.level_offsets.tolist()
    value = np.append(1.0, child_probabilities(tree, by_class(acceptance)))
    for level in range(2, tree.depth):
        nodes = slice(offsets[level], offsets[level + 1])
        value[nodes] *= value[parents[nodes]]
    return value


def expected_tokens(tree: TokenTree, acceptance: Acceptance | Floats) -> float:
    """F(T) of Sequoia, arXiv 2402.12374, section 3.1: the sum of the node values."""
    return math.fsum(node_values(tree, acceptance))  # exactly rounded: the same bits on every machine


def most_expected_tokens(acceptance: Acceptance | Floats, size: int) -> float:
    """No tree of `size` nodes has more expected tokens: the sum of the largest node values of the endless tree."""
    rows = by_class(acceptance).tolist()
    total, candidates, last = 0.0, [(-1.0, 0, 0)], len(rows[0]) - 1
    for _ in range(size):
        if not candidates:
            break
        value, level, kind = heapq.heappop(candidates)
        total -= value
        for rank, p in enumerate(rows[min(level, len(rows) - 1)][kind]):
            if p > 0:
                heapq.heappush(candidates, (value * p, level + 1, kind if rank == 0 else last))
    return total


@dataclass(frozen=True)
class StepTime:
    """Seconds of one decoding step, from measured latencies.

    A pass that was not measured costs what the cheapest measured pass of at least its size costs: it can be padded up to that one.
    So the curves never decrease, and nothing is interpolated. Beyond the largest measurement the time is inf: nothing is
    known there, and such trees are not considered.

    Args:
        acceptance: what is accepted; verification that walks down the accepted path takes as long as that lets expect. None: the longest walk.
    """

    latency: Latency
    drafting: Drafting = LANGUAGE_MODEL
    acceptance: Acceptance | Floats | None = None

    @classmethod
    def of(cls, measured: Profile | Plan) -> StepTime | None:
        """From the latencies and the acceptance that a profile or a plan records; None without latencies."""
        acceptance = getattr(measured, "by_level", None) or measured.acceptance
        return cls(measured.latency, measured.drafting, acceptance) if measured.latency else None

    @cached_property
    def _target(self) -> tuple[Floats, Floats]:
        return _steps(self.latency.target)

    @cached_property
    def _draft(self) -> tuple[Floats, Floats]:
        return _steps(self.latency.draft)

    def targets(self, sizes: NDArray[np.integer]) -> Floats:
        """The target's pass over each number of nodes."""
        return _look_up(self._target, sizes)

    def drafts(self, widths: NDArray[np.integer]) -> Floats:
        """A draft pass of each number of nodes."""
        return _look_up(self._draft, widths)

    def target(self, size: int) -> float:
        """The target's pass over `size` nodes."""
        return float(self.targets(np.array([size]))[0])

    def draft(self, width: int) -> float:
        """One draft pass of `width` nodes."""
        return float(self.drafts(np.array([width]))[0])

    def largest(self) -> int:
        """The largest tree a step time is known for."""
        return max(self.latency.target)

    @property
    def least(self) -> float:
        """No step is shorter: a streamed target's weights must arrive. 0 if all weights are in memory."""
        return self.latency.stream.seconds if self.latency.stream else 0.0

    def step(self, tree: TokenTree) -> float:
        """One step with `tree`. A streamed target's weights arrive while the step's own work is done: the longer of the two counts."""
        return max(self.least, self.work(tree))

    def work(self, tree: TokenTree) -> float:
        """What a step with `tree` does: every draft pass at its width, the target's pass, verification, and what is beyond them."""
        passes = self.drafts(np.array(self.drafting.widths(tree.parents_by_level), int))
        return math.fsum([self.target(tree.size), *passes, self.verification(tree), self.latency.overhead])

    def verification(self, tree: TokenTree) -> float:
        """Judging `tree` and keeping what is accepted; 0 where the target's curve holds it."""
        known = self.latency.verification
        if known is None:
            return 0.0
        base, by_round, by_parent, by_child = terms(tree, known.rounds, self.acceptance)
        return known.base * base + known.by_round * by_round + known.by_parent * by_parent + known.by_child * by_child

    def steps_at_least(self, sizes: NDArray[np.integer], depth: int) -> Floats:
        """No tree of that size and depth takes less: its draft passes are as narrow, and its rounds as few, as they can be."""
        narrow = self.drafts(np.array(self.drafting.narrowest(depth), int)).sum()
        known = self.latency.verification
        judged: Any = 0.0
        if known is not None:
            fewest = {"level": depth - 1, "path": depth - 1, "tree": min(depth - 1, 1), "walk": 0}[known.rounds]
            parents = 1 if known.rounds == "walk" else depth - 1
            judged = known.base + known.by_round * fewest + known.by_parent * parents + known.by_child * (sizes - 1)
        return np.maximum(self.least, self.targets(sizes) + narrow + judged + self.latency.overhead)

    def plain(self) -> float:
        """Seconds a token without speculation, by the same engine."""
        return self.step(TokenTree.chain(1))


class Memory(NamedTuple):
    """What more memory for a streamed target's layers is worth: `bytes` more, and by how many seconds a step could be shorter at most."""

    bytes: float
    seconds: float


def worth_of_memory(plan: Plan) -> Memory | None:
    """What a further GB, or a tenth of the streamed bytes if that is less, is worth: bytes that stay in memory need not arrive in each pass.

    A step that then waits for something else gains less. None if nothing is streamed.
    """
    stream = plan.latency.stream if plan.latency else None
    if stream is None:
        return None
    more = min(1e9, stream.bytes / 10)
    return Memory(more, stream.seconds * more / stream.bytes)


def terms(tree: TokenTree, order: str, acceptance: Acceptance | Floats | None = None) -> tuple[float, float, float, float]:
    """What the costs of `Verification` are multiplied by, in the order of its fields.

    Args:
        order: `Verification.rounds`.
        acceptance: for "walk", see `StepTime`.
    """
    if order == "walk":
        rejected, visited = walk(tree, acceptance)
        return 1.0, rejected, visited, tree.size - 1
    return 1.0, rounds(tree, order), int(np.count_nonzero(tree.child_count)), tree.size - 1


def rounds(tree: TokenTree, order: str) -> int:
    """How many times children are judged side by side: `order` is `Verification.rounds`, but for "walk"."""
    if order == "tree":
        return tree.branching
    if order == "level":
        return int(np.maximum.reduceat(tree.child_count, tree.level_offsets[:-1]).sum())
    offsets = tree.level_offsets.tolist()
    judged = np.zeros(tree.size, np.int64)  # the round in which each node was
    for start, end in itertools.pairwise(offsets[1:]):
        judged[start:end] = judged[tree.parents[start:end]] + tree.ranks[start:end]
    return int(judged.max())


def walk(tree: TokenTree, acceptance: Acceptance | Floats | None) -> tuple[float, float]:
    """Children rejected, and nodes visited, on the way down the accepted path: as expected, or the most of both without an acceptance."""
    if acceptance is None:
        return float(rounds(tree, "path")), float(tree.depth)
    values, parents = node_values(tree, acceptance), tree.parents[1:]
    up_to = np.cumsum(values)
    taken = up_to[1:] - up_to[tree.first_child[parents] - 1]  # by a node and its earlier siblings
    return math.fsum(np.maximum(0.0, values[parents] - taken)), math.fsum(values)


def _steps(points: Mapping[int, float]) -> tuple[Floats, Floats]:
    measured = sorted(points)
    seconds = np.minimum.accumulate([points[n] for n in measured][::-1])[::-1]
    return np.array(measured, float), np.append(seconds, np.inf)


def _look_up(curve: tuple[Floats, Floats], tokens: NDArray[np.integer]) -> Floats:
    return curve[1][np.searchsorted(curve[0], tokens)]


class Promise(NamedTuple):
    """What measurements promise of a tree, by the keys of its plan; None is what they do not give."""

    expected_tokens: float | None = None
    step_seconds: float | None = None
    predicted_speedup: float | None = None


def promise(tree: TokenTree, acceptance: Acceptance | Floats | None, times: StepTime | None) -> Promise:
    """Expected tokens by the acceptance, the step by the latencies if they reach so far, and the speed-up by both."""
    tokens = expected_tokens(tree, acceptance) if acceptance is not None else None
    step = replace(times, acceptance=acceptance).step(tree) if times else math.inf
    if times is None or not math.isfinite(step):
        return Promise(tokens)
    return Promise(tokens, step, tokens * times.plain() / step if tokens is not None else None)


def predicted(tree: TokenTree, verifier: str, plan: Plan, sampling: Mapping[str, Any] | None = None) -> Prediction:
    """What the measurements in a plan promise of `tree` and `verifier`, which need not be those it was solved for.

    Nothing where they do not apply: they were taken with one temperature and filters (`sampling` is what is decoded with, None for
    the same) and with one verifier. What `sequoia` yields, `traversal` yields at least; with greedy decoding all verifiers are one.
    """
    settings = dict(plan.settings)
    measured = settings.pop("verifier", "sequoia")
    alike = settings.get("temperature") == 0 or verifier == measured or (verifier, measured) == ("traversal", "sequoia")
    alike &= sampling is None or all(sampling.get(name, value) == value for name, value in settings.items())
    alike |= tree.size == 1
    if not plan.acceptance or not alike:
        return Prediction()
    tokens, _, speedup = promise(tree, plan.acceptance, StepTime.of(plan))
    return Prediction(tokens, speedup)


def check_promise(tree: TokenTree) -> None:
    """Refuse a tree whose plan promises something else than its acceptance and latencies give for it.

    Raises:
        SequoiaPlanError: naming the key, what was found and what follows from the tree.
    """
    plan = tree.plan
    given = promise(tree, plan.acceptance, StepTime.of(plan))
    for name, follows in given._asdict().items():
        found = getattr(plan, name)
        if found is not None and (follows is None or not math.isclose(found, follows, rel_tol=SAME)):
            gives = f"its tree, acceptance and latencies give {follows:.6g}" if follows else "nothing in the plan gives one"
            raise SequoiaPlanError(f"plan.{name}: found {found:.6g}, {gives}; solve again")
    for name, bound, value in (("upper_bound", plan.upper_bound, given.expected_tokens), ("speedup_bound", plan.speedup_bound, given.predicted_speedup)):
        if bound is not None and value is not None and bound < value * (1 - SAME):
            raise SequoiaPlanError(f"plan.{name}: found {bound:.6g}, the tree itself has {value:.6g}; solve again")
