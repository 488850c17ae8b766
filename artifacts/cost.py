"""The cost model: the expected tokens of a tree, the seconds of its step, and its speed-up."""

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
from sequoia_plan.artifacts.latency import Latency, RoundOrder
from sequoia_plan.artifacts.plan import MatchPlan, Plan
from sequoia_plan.artifacts.profile import Profile
from sequoia_plan.artifacts.tree import TokenTree

Floats = NDArray[np.float64]
ROUNDING_TOLERANCE = 1e-9
"""Relative difference below which two figures are equal: computed on different machines."""
AcceptanceProbs = (
    Sequence[float]
    | Sequence[Sequence[float]]
    | Sequence[Sequence[Sequence[float]]]
    | Sequence[float | tuple[float | tuple[float, ...], ...]]
)
"""p[rank], p[level][rank] or p[level][class][rank]; `acceptance_rows` explains them."""


def acceptance_table(acceptance: AcceptanceProbs | Floats) -> Floats:
    """The acceptance probabilities as float64 [levels, classes, ranks].

    The class of a node is 0 on the spine (the root, its first child, that node's first child, ...)
    and 1 off it. A single vector has one level, and rows without classes have one class.
    """
    table = np.asarray(acceptance, np.float64)
    return table if table.ndim == 3 else np.atleast_2d(table)[:, None]


def acceptance_rows(
    acceptance: AcceptanceProbs | Floats, depth: int, branching: int | None = None
) -> Floats:
    """The acceptance probabilities for each level of trees with `depth` levels.

    `acceptance` [rank]; returns float64 [depth - 1, classes, ranks].
    """
    table = acceptance_table(acceptance)
    levels = np.minimum(np.arange(depth - 1), len(table) - 1)
    return np.ascontiguousarray(table[levels, :, :branching])


def child_probabilities(tree: TokenTree, rows: Floats) -> Floats:
    """Probability that each node but the root is accepted, given that its parent is accepted.

    A rank beyond the end of the rows has the probability 0. `rows` float64 [levels, classes,
    ranks]; returns float64 [size - 1].
    """
    num_ranks = rows.shape[2]
    parent_level, parent_class = parent_rows(tree, rows)
    rank = tree.ranks[1:] - 1
    probability = rows[parent_level, parent_class, np.minimum(rank, num_ranks - 1)]
    return np.where(rank < num_ranks, probability, 0.0)


def parent_rows(tree: TokenTree, rows: Floats) -> tuple[Any, Any]:
    """Level and class in `rows` of the parent of each node but the root, int [size - 1] each.

    `rows` float64 [levels, classes, ranks].
    """
    parents = tree.parents[1:]
    level = np.minimum(tree.position_ids[parents], len(rows) - 1)
    parent_class = np.minimum(tree.classes[parents], rows.shape[1] - 1)
    return level, parent_class


def node_values(tree: TokenTree, acceptance: AcceptanceProbs | Floats) -> Floats:
    """Probability that each node is accepted: the product of the probabilities along its path.

    It follows from the tree and the acceptance alone. A rank beyond the vector's end has the
    probability 0. Returns float64 [size].
    """
    parents, offsets = tree.parents, tree.level_offsets.tolist()
    values = np.append(1.0, child_probabilities(tree, acceptance_table(acceptance)))
    for level in range(2, tree.depth):
        nodes = slice(offsets[level], offsets[level + 1])
        values[nodes] *= values[parents[nodes]]
    return values


def expected_tokens(tree: TokenTree, acceptance: AcceptanceProbs | Floats) -> float:
    """Expected tokens a step (mean acceptance length): the sum of the node values.

    This is F(T) of Sequoia, arXiv 2402.12374, section 3.1.
    """
    return math.fsum(node_values(tree, acceptance))  # exactly rounded: equal on every machine


def max_expected_tokens(acceptance: AcceptanceProbs | Floats, size: int) -> float:
    """Upper bound on the expected tokens of all trees of `size` nodes.

    It is the sum of the `size` largest node values of the infinite tree. A child's value is at most
    its parent's, so a heap that starts with the root yields the values in decreasing order.
    """
    table = acceptance_table(acceptance).tolist()
    off_spine = len(table[0]) - 1
    total = 0.0
    # Entries are -value, level and class of the nodes whose parent is counted already. The class is
    # 0 on the spine (the root, its first child, that node's first child, ...), else the last one.
    heap = [(-1.0, 0, 0)]
    for _ in range(size):
        if not heap:
            break
        negative_value, level, node_class = heapq.heappop(heap)
        total -= negative_value
        vector = table[min(level, len(table) - 1)][node_class]
        for rank, p in enumerate(vector):
            if p > 0:
                child_class = node_class if rank == 0 else off_spine
                heapq.heappush(heap, (negative_value * p, level + 1, child_class))
    return total


@dataclass(frozen=True)
class StepTime:
    """Seconds of one decoding step, from measured latencies."""

    latency: Latency
    drafting: Drafting = LANGUAGE_MODEL
    acceptance: AcceptanceProbs | Floats | None = None

    @classmethod
    def from_measured(cls, measured: Profile | Plan) -> StepTime | None:
        """The step time that a profile or plan records; None if it has no latencies."""
        if not measured.latency:
            return None
        acceptance = getattr(measured, "acceptance_by_level", None) or measured.acceptance
        return cls(measured.latency, measured.drafting, acceptance)

    @cached_property
    def _target_steps(self) -> tuple[Floats, Floats]:
        """The measured sizes of the target's pass, and the seconds up to each of them."""
        return _step_function(self.latency.target)

    @cached_property
    def _draft_steps(self) -> tuple[Floats, Floats]:
        """The measured widths of a draft pass, and the seconds up to each of them."""
        return _step_function(self.latency.draft)

    def target_seconds(self, sizes: int | NDArray[np.integer]) -> Any:
        """Seconds of the target's pass over each number of nodes."""
        return _evaluate(self._target_steps, sizes)

    def draft_seconds(self, widths: int | NDArray[np.integer]) -> Any:
        """Seconds of a draft pass over each number of nodes."""
        return _evaluate(self._draft_steps, widths)

    def largest_size(self) -> int:
        """Nodes of the largest tree whose step time is known."""
        return max(self.latency.target)

    @property
    def stream_seconds(self) -> float:
        """Seconds in which a streamed target's weights arrive; 0 if all of them are in memory."""
        return self.latency.stream.seconds if self.latency.stream else 0.0

    def step_seconds(self, tree: TokenTree) -> float:
        """Seconds of a step with `tree`.

        The weights of a streamed target arrive while the step does its work, so the longer of the
        two counts.
        """
        return max(self.stream_seconds, self.work_seconds(tree))

    def work_seconds(self, tree: TokenTree) -> float:
        """Seconds of a step's passes, its verification and its overhead."""
        widths = self.drafting.pass_widths(tree.num_parents_by_level)
        draft_passes = self.draft_seconds(np.array(widths, int))
        target_pass = float(self.target_seconds(tree.size))
        verification = self.verification_seconds(tree)
        return math.fsum([target_pass, *draft_passes, verification, self.latency.overhead])

    def verification_seconds(self, tree: TokenTree) -> float:
        """Seconds of verification and of committing; 0 where the target's times include them."""
        cost = self.latency.verification
        if cost is None:
            return 0.0
        _, rounds, parents, children = verification_terms(tree, cost.round_order, self.acceptance)
        return (
            cost.base + cost.by_round * rounds + cost.by_parent * parents + cost.by_child * children
        )

    def min_step_seconds(self, sizes: NDArray[np.integer], depth: int) -> Floats:
        """Lower bound on the step times of all trees of these sizes and this depth.

        It assumes the narrowest draft passes and the fewest rounds that the depth allows. Returns
        float64 [len(sizes)].
        """
        widths = self.drafting.narrowest_widths(depth)
        draft_passes = self.draft_seconds(np.array(widths, int)).sum()
        cost = self.latency.verification
        verification: Any = 0.0
        if cost is not None:
            min_rounds_by_order = {
                "level": depth - 1,
                "path": depth - 1,
                "tree": min(depth - 1, 1),
                "walk": 0,
            }
            min_rounds = min_rounds_by_order[cost.round_order]
            min_parents = 1 if cost.round_order == "walk" else depth - 1
            verification = (
                cost.base
                + cost.by_round * min_rounds
                + cost.by_parent * min_parents
                + cost.by_child * (sizes - 1)
            )
        work = self.target_seconds(sizes) + draft_passes + verification + self.latency.overhead
        return np.maximum(self.stream_seconds, work)

    def num_unread(self, tree: TokenTree) -> int:
        """How many of the last tokens the draft may not have read after a step with `tree`."""
        return self.drafting.num_unread(tree.depth, tree.num_drafted_levels)

    def catch_up_seconds(self, num_unread: int, tree: TokenTree) -> float:
        """Seconds in which the draft reads unread tokens before a step with `tree`, if it must."""
        width = self.drafting.catch_up_width(num_unread, tree.num_drafted_levels)
        return float(self.draft_seconds(min(width, max(self.latency.draft)))) if width else 0.0

    def plain_seconds(self) -> float:
        """Seconds a token of decoding without speculation, with the same engine."""
        return self.step_seconds(TokenTree.chain(1))


def _step_function(points: Mapping[int, float]) -> tuple[Floats, Floats]:
    """The cheapest measured time at each measured size or above, with inf beyond the largest.

    Returns float64 [n].
    """
    sizes = sorted(points)
    seconds_from_largest = [points[size] for size in sizes][::-1]
    seconds = np.minimum.accumulate(seconds_from_largest)[::-1]
    return np.array(sizes, float), np.append(seconds, np.inf)


def _evaluate(step_function: tuple[Floats, Floats], sizes: int | NDArray[np.integer]) -> Any:
    """The seconds of passes over `sizes` nodes, taken from the next measured size."""
    measured_sizes, seconds = step_function
    return seconds[np.searchsorted(measured_sizes, sizes)]


class MemoryGain(NamedTuple):
    """By how many seconds a step could be shorter at most if more layers stayed in memory."""

    bytes: float
    seconds: float


def memory_gain(plan: Plan) -> MemoryGain | None:
    """The gain from a further GB of the target's device, or a tenth of the streamed bytes if less.

    Weights that stay on the device need not be streamed to it in each pass, which is then shorter
    by the seconds that they take. The gain is smaller if the step then waits for something else.
    None if nothing is streamed.
    """
    stream = plan.latency.stream if plan.latency else None
    if stream is None:
        return None
    more_bytes = min(1e9, stream.bytes / 10)
    return MemoryGain(more_bytes, stream.seconds * more_bytes / stream.bytes)


def verification_terms(
    tree: TokenTree, order: RoundOrder, acceptance: AcceptanceProbs | Floats | None = None
) -> tuple[float, float, float, float]:
    """The counts that the costs of `VerificationCost` are multiplied by, in their order."""
    if order == "walk":
        rejected_children, path_nodes = expected_walk(tree, acceptance)
        return 1.0, rejected_children, path_nodes, tree.size - 1
    num_parents = int(np.count_nonzero(tree.child_count))
    return 1.0, num_rounds(tree, order), num_parents, tree.size - 1


def num_rounds(tree: TokenTree, order: RoundOrder) -> int:
    """Number of rounds in which a tree is verified."""
    if order == "tree":
        return tree.branching
    offsets = tree.level_offsets
    if order == "level":
        return int(np.maximum.reduceat(tree.child_count, offsets[:-1]).sum())
    round_of_node = np.zeros(tree.size, np.int64)  # the sum of ranks along its path
    for start, stop in itertools.pairwise(offsets[1:].tolist()):
        parents = tree.parents[start:stop]
        round_of_node[start:stop] = round_of_node[parents] + tree.ranks[start:stop]
    return int(round_of_node.max())


def expected_walk(
    tree: TokenTree, acceptance: AcceptanceProbs | Floats | None
) -> tuple[float, float]:
    """Expected number of children rejected on the accepted path, and of nodes on that path.

    Without an acceptance these are their largest possible values.
    """
    if acceptance is None:
        return float(num_rounds(tree, "path")), float(tree.depth)
    values, parents = node_values(tree, acceptance), tree.parents[1:]
    cumulative = np.cumsum(values)
    # Probability that the path goes to a node or to one of its earlier siblings: these are
    # adjacent, so it is the sum of the values from its parent's first child up to the node.
    accepted_so_far = cumulative[1:] - cumulative[tree.first_child[parents] - 1]
    rejected = np.maximum(0.0, values[parents] - accepted_so_far)
    return math.fsum(rejected), math.fsum(values)


class TreePrediction(NamedTuple):
    """Predictions for a tree, named like the fields of its plan. None: the measurements lack it."""

    expected_tokens: float | None = None
    step_seconds: float | None = None
    predicted_speedup: float | None = None


def predict(
    tree: TokenTree, acceptance: AcceptanceProbs | Floats | None, times: StepTime | None
) -> TreePrediction:
    """Predict expected tokens, step time and speed-up.

    `acceptance` [rank].
    """
    tokens = expected_tokens(tree, acceptance) if acceptance is not None else None
    if times is None:
        return TreePrediction(tokens)
    step = replace(times, acceptance=acceptance).step_seconds(tree)
    if not math.isfinite(step):
        return TreePrediction(tokens)
    speedup = tokens * times.plain_seconds() / step if tokens is not None else None
    return TreePrediction(tokens, step, speedup)


def predict_portfolio(tree: TokenTree, plan: Plan, times: StepTime) -> TreePrediction:
    """Predict the figures of a tree and of the trees that take its place by match.

    A step of class c is the share w_c of all steps. In the long run a step yields sum of w_c F(T_c)
    tokens and takes sum of w_c t(T_c) seconds, in which the draft may have to catch up with tokens
    that it has not read.
    """
    tokens, seconds = [], []
    for match_plan in plan.by_match:
        class_tree = tree.for_match(match_plan.match_length)
        class_tokens, class_seconds = predict_class(class_tree, match_plan, times)
        if class_tokens is None or class_seconds is None:
            return TreePrediction()
        tokens.append(match_plan.share * class_tokens)
        seconds.append(match_plan.share * class_seconds)
    total_share = math.fsum(match_plan.share for match_plan in plan.by_match)
    step_tokens, step_seconds = math.fsum(tokens) / total_share, math.fsum(seconds) / total_share
    speedup = step_tokens * times.plain_seconds() / step_seconds
    return TreePrediction(step_tokens, step_seconds, speedup)


def predict_class(
    class_tree: TokenTree, match_plan: MatchPlan, times: StepTime | None
) -> tuple[float | None, float | None]:
    """Expected tokens and seconds of a step in one class of match; None where times lack them."""
    tokens, seconds, _ = predict(class_tree, match_plan.acceptance, times)
    if seconds is not None:
        seconds += match_plan.catch_up_seconds
    return tokens, seconds


def prediction_for(
    tree: TokenTree, verifier: str, plan: Plan, sampling: Mapping[str, Any] | None = None
) -> Prediction:
    """Predict a tree's figures in bench from the measurements in a plan."""
    settings = dict(plan.settings)
    measured_verifier = settings.pop("verifier", "sequoia")
    is_same_acceptance = (
        settings.get("temperature") == 0
        or verifier == measured_verifier
        or (verifier, measured_verifier) == ("traversal", "sequoia")
    )
    is_same_sampling = sampling is None or all(
        sampling.get(name, value) == value for name, value in settings.items()
    )
    applies = (is_same_acceptance and is_same_sampling) or tree.size == 1
    if not plan.acceptance or not applies:
        return Prediction()
    times = StepTime.from_measured(plan)
    if not plan.by_match or times is None or (tree.size == 1 and not tree.by_match):
        tokens, _, speedup = predict(tree, plan.acceptance, times)
    elif tree.by_match:
        tokens, _, speedup = predict_portfolio(tree, plan, times)
    else:  # its acceptance is known for texts without a match only
        return Prediction()
    return Prediction(tokens, speedup)


def check_prediction(tree: TokenTree) -> None:
    """Refuse a tree whose plan contradicts its own acceptance and latencies."""
    plan = tree.plan
    times = StepTime.from_measured(plan)
    if plan.by_match and times:
        prediction = predict_portfolio(tree, plan, times)
    else:
        prediction = predict(tree, plan.acceptance, times)
    _check_figures("plan", plan, prediction)
    _check_by_match(tree, times)
    _check_bound("upper_bound", plan.upper_bound, prediction.expected_tokens)
    _check_bound("speedup_bound", plan.speedup_bound, prediction.predicted_speedup)


def _check_figures(place: str, recorded_in: Plan | MatchPlan, prediction: TreePrediction) -> None:
    """Refuse recorded figures that differ from those predicted."""
    for name, predicted in prediction._asdict().items():
        recorded = getattr(recorded_in, name, None)
        if recorded is None:
            continue
        if predicted is None or not math.isclose(recorded, predicted, rel_tol=ROUNDING_TOLERANCE):
            consequence = "nothing in the plan gives one"
            if predicted:
                consequence = f"its tree, acceptance and latencies give {predicted:.6g}"
            raise SequoiaPlanError(
                f"{place}.{name}: found {recorded:.6g}, {consequence}; solve again"
            )


def _check_by_match(tree: TokenTree, times: StepTime | None) -> None:
    """Refuse classes of match whose figures do not follow from their trees, and trees of none."""
    parts = tree.plan.by_match
    unknown_lengths = set(tree.by_match) - {part.match_length for part in parts}
    if parts and unknown_lengths:
        raise SequoiaPlanError(
            f"plan.by_match: found no entry for matches of {min(unknown_lengths)} tokens, which "
            "have a tree of their own; solve again"
        )
    for number, part in enumerate(parts):
        class_tree = tree.for_match(part.match_length)
        prediction = TreePrediction(*predict_class(class_tree, part, times))
        _check_figures(f"plan.by_match[{number}]", part, prediction)


def _check_bound(name: str, bound: float | None, predicted: float | None) -> None:
    """Refuse an upper bound that the tree itself exceeds."""
    if bound is None or predicted is None:
        return
    if bound < predicted * (1 - ROUNDING_TOLERANCE):
        raise SequoiaPlanError(
            f"plan.{name}: found {bound:.6g}, the tree itself has {predicted:.6g}; solve again"
        )
