"""A tree's plan: what it was solved for, from which measurements, predictions and proofs."""

from typing import Annotated, Any

from msgspec import Meta

from sequoia_plan.artifacts.acceptance import Acceptance
from sequoia_plan.artifacts.counts import PromptKind
from sequoia_plan.artifacts.drafting import LANGUAGE_MODEL, Drafting
from sequoia_plan.artifacts.latency import Latency
from sequoia_plan.artifacts.profile import Profile
from sequoia_plan.artifacts.schema import Artifact, Count, Metadata, Number, Seconds, Size

TokensPerStep = Annotated[float, Meta(ge=1)]
SpeedupFactor = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
ConfidenceLevel = Annotated[float, Meta(gt=0, lt=1)]
Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
IntervalEnds = tuple[Number, Number]
OPTIMALITY_TOLERANCE = 1e-9
"""A tree is called the fastest if no other can be faster by more, relative: less is rounding."""


class Interval(Artifact, frozen=True):
    """What the noise of the measurements leaves open."""

    level: Annotated[ConfidenceLevel | None, "how often the interval holds the truth"] = None
    expected_tokens: Annotated[IntervalEnds | None, "expected tokens at its ends"] = None
    predicted_speedup: Annotated[IntervalEnds | None, "predicted speed-up at its ends"] = None


class MatchPlan(Artifact, frozen=True):
    """The part of a plan for steps whose match has a length in one range (artifacts/lookup.py)."""

    match_length: Annotated[Count, "the shortest match of the class, in tokens; 0 for none"]
    share: Annotated[Share, "the share of steps that are in this class"]
    acceptance: Annotated[Acceptance, "as `plan.acceptance`, of this class and of its tree"]
    expected_tokens: Annotated[TokensPerStep, "tokens that such a step yields on average"]
    step_seconds: Annotated[
        Seconds,
        "predicted duration of such a step, with what the draft then takes, on average, to read "
        "tokens that it left unread",
    ]


class Plan(Artifact, frozen=True, kw_only=True):
    """The record of how a tree was solved.

    Every key may be missing (None): a tree that was not solved has no plan. A reader that only
    decodes needs none of it.
    """

    acceptance: Annotated[
        Acceptance | None,
        "the rates of the profile, p[1], p[2], ...: the probability that, of an accepted "
        "node's children, the one of that rank is accepted. Each from 0 to 1, sum at most "
        "1 + 1e-6. With lists, the first is for the root's children, and so on; the last holds "
        "for all deeper levels. With pairs of lists, the first of a pair is for children of a "
        "node on the spine (all ranks on its path from the root are 1; the root is on it, "
        "too), the second for all others",
    ] = None
    settings: Annotated[Metadata, "as in the profile"] = {}
    models: Annotated[dict[str, Metadata], "as in the profile"] = {}
    hardware: Annotated[Metadata, "as in the profile"] = {}
    drafting: Annotated[Drafting, "as in the profile"] = LANGUAGE_MODEL
    latency: Annotated[
        Latency | None,
        "the latencies used: `context`, `overhead`, `target`, `draft`, `verification`, "
        "`stream` as in the profile",
    ] = None
    profile_sha256: Annotated[
        Sha256 | None, "SHA-256 of the profile's text as `sequoia-plan` writes it"
    ] = None
    tool: Annotated[str | None, "the program that solved, as `sequoia-plan 0.1.0`"] = None
    budget: Annotated[Size | None, "the requested limit: nodes"] = None
    depth: Annotated[Size | None, "the requested limit: levels"] = None
    branching: Annotated[Size | None, "the requested limit: children of a node"] = None
    objective: Annotated[
        str | None,
        "`tokens` (most expected tokens with exactly `budget` nodes) or `speed` (most expected "
        "tokens a second with at most as many)",
    ] = None
    solver: Annotated[
        str | None, "`best-first`, `dynamic program` or `branch and bound` (for `speed`)"
    ] = None
    expected_tokens: Annotated[
        TokensPerStep | None,
        "tokens a step yields on average: the sum over all nodes of the product of p along "
        "their path",
    ] = None
    upper_bound: Annotated[
        TokensPerStep | None,
        "proven: no tree of this size within the limits `depth` and `branching` has more "
        "expected tokens",
    ] = None
    step_seconds: Annotated[Seconds | None, "predicted duration of a step"] = None
    predicted_speedup: Annotated[
        SpeedupFactor | None, "over plain decoding on the same engine; only with `step_seconds`"
    ] = None
    speedup_bound: Annotated[
        SpeedupFactor | None,
        "proven for these measurements: no tree within the limits has a higher predicted "
        "speed-up; only for the objective `speed`",
    ] = None
    by_match: Annotated[
        tuple[MatchPlan, ...],
        "for a plan with prompt lookup, one entry for each match class. The plan's "
        "`expected_tokens`, `step_seconds`, `predicted_speedup` and `speedup_bound` are then "
        "those of all classes together, each with its share of steps; the bound holds for "
        "these shares",
    ] = ()
    tree_speedup: Annotated[
        SpeedupFactor | None,
        "with `by_match`: the predicted speed-up, on the same texts, of the fastest single "
        "tree without prompt lookup",
    ] = None
    text_speedups: Annotated[
        dict[PromptKind, tuple[SpeedupFactor, ...]],
        "the predicted speed-up of each profiled prompt, in ascending order, by kind (`all` where "
        "prompts name none)",
    ] = {}
    median_speedup: Annotated[
        SpeedupFactor | None,
        "the median of `text_speedups`, as bench measures it; `predicted_speedup` is that of all "
        "tokens together",
    ] = None
    speedup_by_kind: Annotated[
        dict[PromptKind, SpeedupFactor], "the median of each kind of prompts"
    ] = {}
    interval_by_kind: Annotated[
        dict[PromptKind, IntervalEnds],
        "95 % interval of the median of as many other prompts of the kind",
    ] = {}
    tokens_by_kind: Annotated[
        dict[PromptKind, TokensPerStep],
        "with `by_match`: tokens a step when the recorded texts of a kind are decoded again on "
        "paper",
    ] = {}
    interval: Annotated[
        Interval | None,
        "for as many other prompts like the profiled ones, at `level`, each [low, high]: "
        "`expected_tokens`, and `predicted_speedup` around `median_speedup`, if there is one",
    ] = None
    interval_new_kind: Annotated[
        Interval | None,
        "the same for prompts of a kind that the profile did not measure; missing where its "
        "prompts named too few kinds",
    ] = None

    @property
    def plain_seconds(self) -> float | None:
        """Planned duration of a step without a tree; None where the plan predicts no times."""
        if not (self.predicted_speedup and self.step_seconds and self.expected_tokens):
            return None
        return self.predicted_speedup * self.step_seconds / self.expected_tokens

    @property
    def gap(self) -> float | None:
        """How much faster any tree within the limits could be at most, relative to the bound.

        0 if this tree is proven to be the fastest; None where no bound on the speed-up is known.
        """
        if self.speedup_bound is None or self.predicted_speedup is None:
            return None
        return max(0.0, 1 - self.predicted_speedup / self.speedup_bound)


NO_PLAN = Plan()
"""The plan of a tree that was not solved."""


def tool_version() -> str:
    """Name and version of this program, as files record it: sequoia-plan 0.1.0"""
    from importlib import metadata  # imported here, because it is slow

    try:
        return f"sequoia-plan {metadata.version('sequoia-plan')}"
    except metadata.PackageNotFoundError:
        return "sequoia-plan unknown"


def provenance(profile: Profile) -> dict[str, Any]:
    """The fields of a plan that name the tool and the measurements that the tree comes from."""
    return {
        "tool": tool_version(),
        "profile_sha256": profile.sha256,
        "settings": profile.settings,
        "models": profile.models,
        "hardware": profile.hardware,
        "drafting": profile.drafting,
    }
