"""A tree's plan: what it was solved for and from. Checked when written and when read, so that its users can rely on it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from sequoia_plan.artifacts.errors import SequoiaPlanError
from sequoia_plan.artifacts.facts import check_facts, is_count, is_number
from sequoia_plan.artifacts.profile import Profile, check_acceptance


def _is_curve(points: Any) -> bool:
    return isinstance(points, list) and all(isinstance(p, list) and len(p) == 2 and is_count(p[0], 1) and is_number(p[1]) and p[1] > 0 for p in points)


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(is_number(v) and v >= 0 for v in value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


KNOWN: dict[str, tuple[Callable[[Any], bool], str]] = {
    "budget": (lambda v: is_count(v, 1), "a whole number >= 1"),
    "depth": (lambda v: is_count(v, 1), "a whole number >= 1"),
    "branching": (lambda v: is_count(v, 1), "a whole number >= 1"),
    "trials": (is_count, "a whole number >= 0"),
    "objective": (_is_text, "text"),
    "solver": (_is_text, "text"),
    "tool": (_is_text, "text"),
    "profile_sha256": (lambda v: _is_text(v) and bool(re.fullmatch(r"[0-9a-f]{64}", v)), "64 hexadecimal digits"),
    "expected_tokens": (lambda v: is_number(v) and v >= 1, "a number >= 1"),
    "upper_bound": (lambda v: is_number(v) and v >= 1, "a number >= 1"),
    "speedup_bound": (lambda v: is_number(v) and v > 0, "a number > 0"),
    "interval": (lambda v: isinstance(v, Mapping), "a mapping"),
    "interval.level": (lambda v: is_number(v) and 0 < v < 1, "a number > 0 and < 1"),
    "interval.expected_tokens": (_is_pair, "two numbers >= 0"),
    "interval.predicted_speedup": (_is_pair, "two numbers >= 0"),
    "interval.lost": (_is_pair, "two numbers >= 0"),
    "step_seconds": (lambda v: is_number(v) and v > 0, "a number > 0"),
    "predicted_speedup": (lambda v: is_number(v) and v > 0, "a number > 0"),
    "settings": (lambda v: isinstance(v, Mapping), "a mapping"),
    "settings.temperature": (lambda v: is_number(v) and v >= 0, "a number >= 0"),
    "settings.top_p": (lambda v: is_number(v) and 0 < v <= 1, "a number > 0 and <= 1"),
    "models": (lambda v: isinstance(v, Mapping) and all(isinstance(m, Mapping) for m in v.values()), "a mapping of mappings"),
    "hardware": (lambda v: isinstance(v, Mapping), "a mapping"),
    "latency": (lambda v: isinstance(v, Mapping), "a mapping"),
    "latency.target": (_is_curve, "a list of [tokens, seconds]"),
    "latency.draft": (_is_curve, "a list of [tokens, seconds]"),
    "latency.overhead": (lambda v: is_number(v) and v >= 0, "a number >= 0"),
    "latency.context": (is_count, "a whole number >= 0"),
}
"""Keys with a meaning; each may be missing or null. `acceptance` is checked besides, and other keys may hold any facts."""


def check_plan(plan: Any) -> None:
    """Refuse a plan whose known keys do not hold what they should.

    Raises:
        SequoiaPlanError: naming the key, what was found and what was expected.
    """
    if not isinstance(plan, Mapping):
        raise SequoiaPlanError(f"plan: found {plan!r:.60}, expected a mapping")
    check_facts(plan, "plan")
    for name, (holds, expected) in KNOWN.items():
        key, _, below = name.partition(".")
        value = (plan.get(key) or {}).get(below) if below else plan.get(key)
        if value is not None and not holds(value):
            raise SequoiaPlanError(f"plan.{name}: found {value!r:.60}, expected {expected}")
    if plan.get("predicted_speedup") is not None and plan.get("step_seconds") is None:
        raise SequoiaPlanError("plan.predicted_speedup: found without step_seconds, expected both or neither")
    acceptance = plan.get("acceptance")
    if isinstance(acceptance, list) and acceptance and isinstance(acceptance[0], list):
        for level, row in enumerate(acceptance):
            check_acceptance(row, f"plan.acceptance[{level}]")
            if len(row) != len(acceptance[0]):
                raise SequoiaPlanError(f"plan.acceptance[{level}]: found {len(row)} ranks, expected {len(acceptance[0])} as in the first row")
    elif acceptance is not None:
        check_acceptance(acceptance, "plan.acceptance")


def provenance(profile: Profile | None) -> dict[str, Any]:
    """The part of a plan that says by what tool and from which measurements the tree was made."""
    plan: dict[str, Any] = {"tool": f"sequoia-plan {_version()}"}
    if profile is None:
        return plan
    plan |= {"profile_sha256": profile.sha256, "trials": profile.trials}
    plan |= {"settings": dict(profile.settings), "models": dict(profile.models), "hardware": dict(profile.hardware)}
    if latency := profile.latency:
        curves = {"target": [[n, latency.target[n]] for n in sorted(latency.target)], "draft": [[n, latency.draft[n]] for n in sorted(latency.draft)]}
        plan["latency"] = {"context": latency.context, "overhead": latency.overhead, **curves}
    return plan


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # here, because it is slow to import

    try:
        return version("sequoia-plan")
    except PackageNotFoundError:
        return "unknown"
