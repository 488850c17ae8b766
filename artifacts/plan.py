"""A tree's plan: what it was solved for, from which measurements, and what is promised and proven of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from msgspec import Meta
from msgspec.structs import replace

from sequoia_plan.artifacts.drafting import LANGUAGE_MODEL, Drafting
from sequoia_plan.artifacts.errors import SequoiaPlanError
from sequoia_plan.artifacts.latency import Latency
from sequoia_plan.artifacts.profile import Profile, Settings, Verifier, check_acceptance
from sequoia_plan.artifacts.schema import Artifact, Count, Facts, Number, Seconds, Size, field

Tokens = Annotated[float, Meta(ge=1, title="a number >= 1")]
Times = Annotated[float, Meta(gt=0, title="a number > 0")]
Ends = tuple[Number, Number]
OPTIMAL = 1e-9
"""A tree is called the fastest if no other one can be faster by more than this, relative: less is rounding."""


class Interval(Artifact, frozen=True):
    """What the noise of the measurements leaves open."""

    PREFIX: ClassVar[str] = "interval"

    level: Annotated[Annotated[float, Meta(gt=0, lt=1, title="a number > 0 and < 1")] | None, field("how often the interval holds the truth")] = None
    expected_tokens: Annotated[Ends | None, field("expected tokens at its ends")] = None
    predicted_speedup: Annotated[Ends | None, field("predicted speed-up at its ends")] = None
    lost: Annotated[Ends | None, field("the share of speed (or of tokens) this tree loses at either end against the one that would be chosen there")] = None


CLASSES = ("on the spine", "off the spine")
"""Of a node: whether every rank on its path from the root is 1."""


def check_rows(acceptance: Any, name: str) -> None:
    """Refuse what is neither an acceptance vector, nor a list of such vectors, one a level, nor a list of pairs of them, one for each of CLASSES.

    Raises:
        SequoiaPlanError: naming the level, the class and the rank.
    """
    if not _is_list(acceptance) or not acceptance or not _is_list(acceptance[0]):
        check_acceptance(acceptance, name)
        return
    pairs = bool(acceptance[0]) and _is_list(acceptance[0][0])
    rows: list[tuple[str, Any]] = []
    for level, given in enumerate(acceptance):
        here = f"{name}, level {level}"
        if pairs and (not _is_list(given) or len(given) != len(CLASSES) or not all(map(_is_list, given))):
            raise SequoiaPlanError(f"{here}: found {given!r:.60}, expected two vectors as on level 0: for parents {' and '.join(CLASSES)}")
        rows += [(f"{here}, {kind}", row) for kind, row in zip(CLASSES, given, strict=True)] if pairs else [(here, given)]
    for where, row in rows:
        check_acceptance(row, where)
        if len(row) != len(rows[0][1]):
            raise SequoiaPlanError(f"{where}: found {len(row)} ranks, expected equal lengths: {len(rows[0][1])} (pad with zeros)")


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


class Alternative(Artifact, frozen=True):
    """The best tree with a verifier that was measured and not taken."""

    PREFIX: ClassVar[str] = "alternatives"

    size: Annotated[Size, field("its nodes, the root included")]
    depth: Annotated[Size, field("its levels, the root's included")]
    expected_tokens: Annotated[Tokens, field("tokens a step yields on average")]
    advantage: Annotated[
        Annotated[float, Meta(ge=1, title="a number >= 1")],
        field("how many times its predicted speed (expected tokens for the objective `tokens` or without latencies) the tree that was taken has"),
    ]
    step_seconds: Annotated[Seconds | None, field("predicted duration of a step")] = None
    interval: Annotated[
        Ends | None,
        field("the 95 % interval of `advantage`; where it holds 1 the two are within the noise of the measurements. Missing if the noise is not known"),
    ] = None


class Plan(Artifact, frozen=True, kw_only=True):
    """Every key may be missing (None): a tree that was not solved has no plan. A reader that only decodes needs none of it."""

    PREFIX: ClassVar[str] = "plan"

    acceptance: Annotated[
        Annotated[tuple[float | tuple[float | tuple[float, ...], ...], ...], Meta(title="a list of numbers, or a list of such lists or of pairs of them")]
        | None,
        field(
            "p[1], p[2], ... of the profile: the probability that of an accepted node's children the one of that rank is accepted. Each from 0 "
            "to 1, sum at most 1 + 1e-6. With lists, the first is for the root's children, and so on; the last holds for all deeper levels. With pairs "
            "of lists, the first of a pair is for children of a node on the spine (all ranks on its path from the root are 1; the root is on it, "
            "too), the second for all others",
            check=check_rows,
        ),
    ] = None
    trials: Annotated[Count | None, field("the effective sample size of the vector, as in the profile")] = None
    settings: Annotated[Facts, field("as in the profile", keys=Settings)] = {}
    models: Annotated[dict[str, Facts], field("as in the profile")] = {}
    hardware: Annotated[Facts, field("as in the profile")] = {}
    drafting: Annotated[Drafting, field("as in the profile")] = LANGUAGE_MODEL
    latency: Annotated[
        Latency | None,
        field("the latencies used: `context`, `overhead`, `verification`, `stream` as in the profile, `target` and `draft` as lists of [tokens, seconds]"),
    ] = None
    profile_sha256: Annotated[
        Annotated[str, Meta(pattern="^[0-9a-f]{64}$", title="64 hexadecimal digits")] | None, field("SHA-256 of the profile's text as `sequoia-plan` writes it")
    ] = None
    tool: Annotated[str | None, field("what solved, as `sequoia-plan 0.1.0`")] = None
    budget: Annotated[Size | None, field("the limit given: nodes")] = None
    depth: Annotated[Size | None, field("the limit given: levels")] = None
    branching: Annotated[Size | None, field("the limit given: children of a node")] = None
    objective: Annotated[
        str | None,
        field(
            "`tokens` (most expected tokens with exactly `budget` nodes), `speed` (most expected tokens a second with at most as many), or "
            "`paper` (the same with Sequoia's own step time, t(n) + d c)"
        ),
    ] = None
    solver: Annotated[str | None, field("`best-first`, `hull`, `dp` or `branch and bound` (for `speed`), or `baseline NAME`")] = None
    expected_tokens: Annotated[Tokens | None, field("tokens a step yields on average: the sum over all nodes of the product of p along their path")] = None
    upper_bound: Annotated[Tokens | None, field("proven: no tree of this size within the limits `depth` and `branching` has more expected tokens")] = None
    step_seconds: Annotated[Seconds | None, field("predicted duration of a step")] = None
    predicted_speedup: Annotated[Times | None, field("over plain decoding on the same engine; only with `step_seconds`")] = None
    speedup_bound: Annotated[
        Times | None, field("proven for these measurements: no tree within the limits has a higher predicted speed-up; only for the objective `speed`")
    ] = None
    alternatives: Annotated[
        dict[Verifier, Alternative],
        field("by name: verifiers that were measured as well and whose best tree is not faster; the one taken is in `settings`"),
    ] = {}
    interval: Annotated[
        Interval | None,
        field(
            "for prompts like the profiled ones: what the noise of the measurements leaves open at `level`: `expected_tokens`, "
            "`predicted_speedup`, `lost`, each [low, high]"
        ),
    ] = None
    interval_new_kind: Annotated[
        Interval | None,
        field("the same for prompts of a kind that the profile did not measure; missing where its prompts named too few kinds"),
    ] = None
    other: Facts = {}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.predicted_speedup is not None and self.step_seconds is None:
            raise SequoiaPlanError("plan.predicted_speedup: found without step_seconds, expected both or neither")

    @classmethod
    def read(cls, document: Any, name: str = "plan") -> Plan:
        """The plan in a tree file's header. Raises SequoiaPlanError, naming the key, what was found and what was expected."""
        latency = document.get("latency") if isinstance(document, Mapping) else None
        if isinstance(latency, Mapping):
            curves = {curve: _curve(latency.get(curve), f"{name}.latency.{curve}") for curve in ("target", "draft")}
            document = {**document, "latency": {**latency, **curves}}
        return super().read(document, name)

    def facts(self) -> dict[str, Any]:
        """The plan as a JSON object."""
        document = super().facts()
        if self.latency is not None:
            curves = {name: [[size, curve[size]] for size in sorted(curve)] for name, curve in (("target", self.latency.target), ("draft", self.latency.draft))}
            document["latency"] |= curves
        return document

    @property
    def gap(self) -> float | None:
        """How much faster any tree within the limits could be at most, relative to the bound: 0 if this one is proven to be the fastest.

        None where no bound on the speed-up is known.
        """
        if self.speedup_bound is None or self.predicted_speedup is None:
            return None
        return max(0.0, 1 - self.predicted_speedup / self.speedup_bound)


NO_PLAN = Plan()
"""Of a tree that was not solved."""


def tool() -> str:
    """What made a file: sequoia-plan 0.1.0"""
    from importlib.metadata import PackageNotFoundError, version  # here, because it is slow to import

    try:
        return f"sequoia-plan {version('sequoia-plan')}"
    except PackageNotFoundError:
        return "sequoia-plan unknown"


def provenance(profile: Profile | None) -> Plan:
    """The part of a plan that says by what tool and from which measurements the tree was made."""
    if profile is None:
        return Plan(tool=tool())
    used = {name: getattr(profile, name) for name in ("trials", "settings", "models", "hardware", "drafting")}
    latency = profile.latency and replace(profile.latency, samples={}, quartiles={}, out_of_memory=None)
    return Plan(tool=tool(), profile_sha256=profile.sha256, latency=latency, **used)


def _curve(points: Any, name: str) -> Any:
    """[[tokens, seconds], ...] as a mapping."""
    if not isinstance(points, list) or not all(isinstance(point, list) and len(point) == 2 and isinstance(point[0], int) for point in points):
        raise SequoiaPlanError(f"{name}: found {points!r:.60}, expected a list of [tokens, seconds]")
    if len({point[0] for point in points}) < len(points):
        raise SequoiaPlanError(f"{name}: found {points!r:.60}, expected each size once")
    return dict(points)
