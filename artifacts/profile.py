"""What was measured: acceptance and latency of one target, draft and machine, as a YAML file people can read and edit."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sequoia_plan.artifacts.errors import SequoiaPlanError
from sequoia_plan.artifacts.facts import DEEPEST, check_facts, is_count, is_number
from sequoia_plan.artifacts.files import read_bytes, write_atomically

FORMAT, VERSION = "sequoia-plan-profile", 1
LARGEST_FILE = 1 << 18
"""Bytes; a measured profile has two or three thousand."""
SUM_TOLERANCE = 1e-6
COUNT_TOLERANCE = 0.01
"""Counts are written to four digits; there may be many of them."""
LARGEST_COUNT = 1 << 53


@dataclass(frozen=True)
class Verification:
    """Seconds that a step spends on judging a drawn tree and keeping what is accepted:
    base + by_round x rounds + by_parent x nodes with children + by_child x (size - 1).

    Args:
        rounds: what counts as a round, because children of one rank are judged side by side: "level" if a level is judged after
            the one below it (the sum over levels of the most children a node of the level has), "tree" if all nodes are judged at
            once (the most children any node has).
    """

    base: float
    by_round: float
    by_parent: float
    by_child: float
    rounds: str = "tree"


@dataclass(frozen=True)
class Latency:
    """Median seconds on this machine.

    Args:
        target: tree nodes -> seconds of the target's pass over them; without `verification`, of judging and keeping, too.
        draft: pass width -> seconds of one draft pass and the drawing of its children.
        overhead: seconds a step spends beyond the passes and verification: mask, random numbers, launch, read-back.
        context: tokens in the KV cache when it was measured.
        samples: size -> how often it was timed; empty if not known.
        quartiles: "target" and "draft" -> size -> first and third quartile of its times, drift taken out; empty if not known.
        out_of_memory: the smallest size that did not fit; None if all did.
        verification: what judging and keeping take, for any tree; None if `target` holds that of a ternary tree of each size.
    """

    target: Mapping[int, float]
    draft: Mapping[int, float]
    overhead: float
    context: int
    samples: Mapping[int, int] = field(default_factory=dict)
    quartiles: Mapping[str, Mapping[int, tuple[float, float]]] = field(default_factory=dict)
    out_of_memory: int | None = None
    verification: Verification | None = None


@dataclass(frozen=True)
class LevelCounts:
    """Acceptance on one level, as counts: they add up over runs, and tell how sure a probability is.

    Args:
        trials: accepted nodes of the level that were observed.
        counts: of rank 1, 2, ...: how often that child was accepted, or was expected to be (the sum of probabilities).
    """

    trials: int
    counts: tuple[float, ...]


@dataclass(frozen=True)
class Profile:
    """Acceptance and, where measured, latency.

    Args:
        acceptance: p[1..B], p[k] = probability that of an accepted node's children the one of rank k is accepted.
        trials: how many independent observations of an accepted node the vector is worth; 0 if it was not measured.
        latency: None if only acceptance is known.
        settings: temperature, filters, verifier: what acceptance was measured under.
        models: target and draft, each with a name, a digest or revision, and the dtype.
        hardware: the machine's fingerprint.
        levels: the counts behind `acceptance`, the root's level first, the last one with all below it; empty if not known.
    """

    acceptance: tuple[float, ...]
    trials: int = 0
    latency: Latency | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    models: Mapping[str, Any] = field(default_factory=dict)
    hardware: Mapping[str, Any] = field(default_factory=dict)
    levels: tuple[LevelCounts, ...] = ()

    def __post_init__(self) -> None:
        check_acceptance(self.acceptance, "acceptance.vector")
        if not is_count(self.trials):
            raise SequoiaPlanError(f"acceptance.trials: found {self.trials!r:.60}, expected a whole number >= 0")
        _check_levels(self.levels)
        for name in ("settings", "models", "hardware"):
            facts = getattr(self, name)
            if not isinstance(facts, Mapping):
                raise SequoiaPlanError(f"{name}: found {facts!r:.60}, expected a mapping")
            check_facts(facts, name)
        if self.latency:
            _check_curve(self.latency.target, "latency.target")
            _check_curve(self.latency.draft, "latency.draft")
            if 1 not in self.latency.target:
                raise SequoiaPlanError("latency.target: no measurement at 1 token, the plain decoding that speed-ups are relative to")
            if not is_number(self.latency.overhead) or self.latency.overhead < 0:
                raise SequoiaPlanError(f"latency.overhead: found {self.latency.overhead!r:.60}, expected seconds >= 0")
            if not is_count(self.latency.context):
                raise SequoiaPlanError(f"latency.context: found {self.latency.context!r:.60}, expected a whole number of tokens >= 0")
            _check_spread(self.latency)

    @property
    def by_level(self) -> tuple[tuple[float, ...], ...]:
        """p[level][rank] from the counts; a level without trials is as the one above it. Empty if there are no counts."""
        rows: list[tuple[float, ...]] = []
        for level in self.levels:
            rows.append(tuple(count / level.trials for count in level.counts) if level.trials else rows[-1] if rows else self.acceptance)
        return tuple(rows)

    @property
    def sha256(self) -> str:
        """Of the profile as `save` writes it: comments and layout do not count."""
        return hashlib.sha256(self.to_yaml().encode()).hexdigest()

    def save(self, path: str | Path) -> None:
        """Write as YAML, atomically; same profile, same bytes."""
        write_atomically(path, self.to_yaml().encode())

    def to_yaml(self) -> str:
        """The file's text."""
        import yaml  # here, because the runtime never needs it

        document: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "settings": dict(self.settings),
            "models": {k: dict(v) if isinstance(v, Mapping) else v for k, v in self.models.items()},
            "hardware": dict(self.hardware),
            "acceptance": {"trials": self.trials, "vector": list(self.acceptance)},
        }
        if self.levels:
            document["acceptance"]["levels"] = [{"trials": level.trials, "counts": list(level.counts)} for level in self.levels]
        if self.latency:
            document["latency"] = {
                "context": self.latency.context,
                "overhead": self.latency.overhead,
                "target": dict(self.latency.target),
                "draft": dict(self.latency.draft),
            } | _spread_document(self.latency)
        dumper = type("Dumper", (yaml.SafeDumper,), {"ignore_aliases": lambda *_: True})  # equal content, equal text
        return yaml.dump(document, Dumper=dumper, sort_keys=False, default_flow_style=None, width=100)

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read and validate.

        Raises:
            SequoiaPlanError: if the file is missing, not a profile, of another version, or holds impossible numbers.
        """
        return cls.from_bytes(read_bytes(path, "a profile written by sequoia-plan profile", LARGEST_FILE), str(path))

    @classmethod
    def from_bytes(cls, data: bytes, name: str) -> Profile:
        """The profile in a file's content; `name` says which file in errors. Raises as `load` does."""
        import yaml

        try:
            _check_layout(data, name)
            document = yaml.safe_load(data)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            where = f" at line {error.problem_mark.line + 1}" if getattr(error, "problem_mark", None) else ""  # type: ignore[union-attr]
            raise SequoiaPlanError(f"{name}: not YAML{where}; expected a profile written by sequoia-plan profile") from error
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise SequoiaPlanError(f"{name}: not a profile (expected `format: {FORMAT}`)")
        if document.get("version") != VERSION or isinstance(document["version"], bool):
            raise SequoiaPlanError(f"{name}: profile version {document.get('version')!r:.60}, expected {VERSION}; profile again with this sequoia-plan")
        try:
            return cls._from_document(document)
        except SequoiaPlanError as error:
            raise SequoiaPlanError(f"{name}: {error}") from error

    @classmethod
    def _from_document(cls, document: dict[str, Any]) -> Profile:
        acceptance = _section(document, "acceptance")
        latency = None
        if document.get("latency") is not None:
            section = _section(document, "latency")
            latency = Latency(
                target=_section(section, "target", "latency.target"),
                draft=_section(section, "draft", "latency.draft"),
                overhead=section.get("overhead", 0.0),
                context=section.get("context", 0),
                samples=section.get("samples") or {},
                quartiles=_quartiles(section.get("quartiles")),
                out_of_memory=section.get("out_of_memory"),
            )
        vector = acceptance.get("vector")
        return cls(
            acceptance=tuple(vector) if isinstance(vector, list) else vector,  # type: ignore[arg-type]
            trials=acceptance.get("trials", 0),
            latency=latency,
            levels=_levels(acceptance.get("levels")),
            **{name: document[name] for name in ("settings", "models", "hardware") if document.get(name) is not None},
        )


def _check_layout(data: bytes, name: str) -> None:
    """Refuse YAML that takes ages or grows without end when loaded, while it is only being scanned: nesting and aliases."""
    import yaml

    nested = 0
    for token in yaml.scan(data, Loader=yaml.SafeLoader):
        nested += type(token).__name__.endswith(("SequenceStartToken", "MappingStartToken"))
        nested -= isinstance(token, (yaml.FlowSequenceEndToken, yaml.FlowMappingEndToken, yaml.BlockEndToken))
        if nested > 2 * DEEPEST:
            raise SequoiaPlanError(f"{name}: not a profile (nested deeper than {2 * DEEPEST} levels)")
        if isinstance(token, yaml.AliasToken):
            raise SequoiaPlanError(f"{name}: holds the YAML alias *{token.value}; write the value itself")


def check_acceptance(vector: Any, name: str) -> None:
    """Refuse what cannot be an acceptance vector.

    Raises:
        SequoiaPlanError: if `vector` is empty, holds anything but numbers in [0, 1], or sums to more than 1 + 1e-6.
    """
    if not isinstance(vector, (list, tuple)) or not vector:
        raise SequoiaPlanError(f"{name}: found {vector!r:.60}, expected a non-empty list of probabilities p[1], p[2], ...")
    for rank, p in enumerate(vector, 1):
        if not is_number(p) or not 0 <= p <= 1:
            raise SequoiaPlanError(f"{name}: p[{rank}] is {p!r:.60}, expected a probability from 0 to 1")
    if sum(vector) > 1 + SUM_TOLERANCE:
        raise SequoiaPlanError(f"{name}: sums to {sum(vector):.6g}, expected at most 1 (at most one child is accepted)")


def _levels(found: Any) -> Any:
    if found is None:
        return ()
    if not isinstance(found, list) or not all(isinstance(level, dict) and isinstance(level.get("counts"), list) for level in found):
        raise SequoiaPlanError(f"acceptance.levels: found {found!r:.60}, expected a list of mappings, each with trials and counts")
    return tuple(LevelCounts(level.get("trials"), tuple(level["counts"])) for level in found)


def _check_levels(levels: Any) -> None:
    for number, level in enumerate(levels):
        name = f"acceptance.levels[{number}]"
        if not is_count(level.trials) or level.trials >= LARGEST_COUNT:
            raise SequoiaPlanError(f"{name}.trials: found {level.trials!r:.60}, expected a whole number >= 0")
        if not level.counts or not all(is_number(count) and 0 <= count < LARGEST_COUNT for count in level.counts):
            raise SequoiaPlanError(f"{name}.counts: found {level.counts!r:.60}, expected numbers >= 0")
        if len(level.counts) != len(levels[0].counts):
            raise SequoiaPlanError(f"{name}.counts: found {len(level.counts)} ranks, expected {len(levels[0].counts)} as on the first level")
        if sum(level.counts) > level.trials * (1 + SUM_TOLERANCE) + COUNT_TOLERANCE:
            raise SequoiaPlanError(f"{name}.counts: sum to {sum(level.counts):.6g}, expected at most {level.trials} trials (at most one child is accepted)")


def _check_curve(curve: Any, name: str) -> None:
    if not curve:
        raise SequoiaPlanError(f"{name}: empty, expected tokens: seconds")
    for tokens, seconds in curve.items():
        if not is_count(tokens, 1):
            raise SequoiaPlanError(f"{name}: found {tokens!r:.60} tokens, expected a count >= 1")
        if not is_number(seconds) or seconds <= 0:
            raise SequoiaPlanError(f"{name}[{tokens}]: found {seconds!r:.60}, expected seconds > 0")


def _spread_document(latency: Latency) -> dict[str, Any]:
    """The optional keys, where they say something."""
    found: dict[str, Any] = {"samples": dict(latency.samples)} if latency.samples else {}
    if latency.quartiles:
        found["quartiles"] = {name: {size: list(pair) for size, pair in curve.items()} for name, curve in latency.quartiles.items()}
    return found | ({"out_of_memory": latency.out_of_memory} if latency.out_of_memory is not None else {})


def _quartiles(found: Any) -> Any:
    """Lists as tuples; `_check_spread` says what is wrong."""
    if not isinstance(found, dict) or not all(isinstance(curve, dict) for curve in found.values()):
        return {} if found is None else found
    return {name: {n: tuple(pair) if isinstance(pair, list) else pair for n, pair in curve.items()} for name, curve in found.items()}


def _check_spread(latency: Latency) -> None:
    for size, samples in latency.samples.items() if isinstance(latency.samples, Mapping) else [(latency.samples, None)]:
        if not is_count(size) or size not in {*latency.target, *latency.draft} or not is_count(samples, 1):
            raise SequoiaPlanError(f"latency.samples: found {size!r:.30}: {samples!r:.30}, expected a measured size: a whole number >= 1")
    if latency.out_of_memory is not None and not is_count(latency.out_of_memory, 1):
        raise SequoiaPlanError(f"latency.out_of_memory: found {latency.out_of_memory!r:.60}, expected a size >= 1")
    if not isinstance(latency.quartiles, Mapping) or not set(latency.quartiles) <= {"target", "draft"}:
        raise SequoiaPlanError(f"latency.quartiles: found {latency.quartiles!r:.60}, expected a mapping of target and draft")
    for name, curve in latency.quartiles.items():
        measured = getattr(latency, name)
        for size, pair in curve.items() if isinstance(curve, Mapping) else [(curve, None)]:
            whole = isinstance(pair, tuple) and len(pair) == 2 and all(is_number(t) and t > 0 for t in pair) and pair[0] <= pair[1]
            if not whole or not is_count(size, 1) or size not in measured:
                raise SequoiaPlanError(
                    f"latency.quartiles.{name}: found {size!r:.30}: {pair!r:.60}, expected a measured size: [first quartile, third quartile]"
                )


def _section(document: Mapping[str, Any], key: str, name: str | None = None) -> dict[Any, Any]:
    section = document.get(key)
    if not isinstance(section, dict):
        raise SequoiaPlanError(f"{name or key}: found {section!r:.60}, expected a mapping")
    return section
