"""What `sequoia-plan bench` measured: contenders side by side, as a JSON file."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from sequoia_plan.artifacts.errors import SequoiaPlanError
from sequoia_plan.artifacts.files import read_bytes, write_atomically
from sequoia_plan.artifacts.profile import Settings
from sequoia_plan.artifacts.schema import Artifact, Facts, Number, Size, field


class Spread(Artifact, frozen=True):
    """A figure over prompts."""

    median: Annotated[Number, field("the median over prompts")]
    low: Annotated[Number, field("the first quartile")]
    high: Annotated[Number, field("the third quartile")]


class Ratio(Spread, frozen=True):
    """A ratio of speeds, taken prompt by prompt, so that drift of the machine cancels."""

    interval_low: Annotated[Number, field("the lower end of the median's 95 % bootstrap interval over prompts")]
    interval_high: Annotated[Number, field("its upper end")]


class Prediction(Artifact, frozen=True):
    """What a tree's plan promises; None where it does not apply."""

    tokens_per_step: Annotated[Number | None, field("expected tokens a step")] = None
    speedup: Annotated[Number | None, field("over plain decoding by the same engine")] = None
    interval: Annotated[tuple[Number, Number] | None, field("the 95 % interval of `speedup` on prompts like the profiled ones, for the tree under test")] = None
    interval_new_kind: Annotated[tuple[Number, Number] | None, field("the same for prompts of a kind that was not profiled")] = None


class Contender(Artifact, frozen=True):
    """One way to decode."""

    ORDER: ClassVar[tuple[str, ...]] = ("title", "tokens_per_second", "first_token_seconds", "tokens_per_step", "each_prompt", "speedup", "predicted")

    title: Annotated[str, field("its name for people")]
    tokens_per_second: Annotated[Spread, field("new tokens over wall time, the prompt's prefill included")]
    first_token_seconds: Annotated[Spread, field("time to the first new tokens")]
    each_prompt: Annotated[tuple[Number, ...], field("tokens/s after the first tokens, prompt by prompt")]
    speedup: Annotated[dict[str, Ratio], field("over other contenders, by name")]
    tokens_per_step: Annotated[Number | None, field("new tokens over the target's passes; null where it does not say", always=True)] = None
    predicted: Annotated[Prediction | None, field("what the plan promises; null without a tree", always=True)] = None


class BenchSettings(Artifact, frozen=True):
    """What was decoded, and how."""

    sampling: Annotated[Facts, field("every sampling setting by name", keys=Settings)]
    dtype: Annotated[str, field("of the target's weights")]
    prompts: Annotated[Size, field("how many")]
    tokens: Annotated[Size, field("new tokens for each prompt, at most")]


class Shape(Artifact, frozen=True):
    """The tree under test."""

    size: Annotated[Size, field("nodes, the root included")]
    depth: Annotated[Size, field("levels, the root's included")]
    level_widths: Annotated[tuple[Size, ...], field("nodes of each level")] = ()


class Breakdown(Artifact, frozen=True):
    """Median seconds of a step of the tree and of its parts, which add up to it."""

    step: Annotated[float, field("a whole step")]
    draft: Annotated[float, field("all draft passes and the drawing of children")]
    target: Annotated[float, field("the target's pass over the tree")]
    verify: Annotated[float, field("which path is accepted, and the bonus token")]
    keep: Annotated[float, field("KV cache and tokens compacted")]
    host: Annotated[float, field("what is left: mask, random numbers, launch, read-back; noise can make it negative")]
    draw: Annotated[float, field("the drawing of children within `draft`")]
    share_not_model: Annotated[float, field("(verify + keep + host) / step")]


class BenchResult(Artifact, frozen=True):
    """Settings, machine and every contender's figures."""

    settings: Annotated[BenchSettings, field("what was decoded, and how")]
    models: Annotated[dict[str, Facts], field("as in the profile")]
    hardware: Annotated[Facts, field("as in the profile")]
    contenders: Annotated[Annotated[dict[str, Contender], Meta(min_length=1, title="a mapping of contenders")], field("figures by contender")]
    tree: Annotated[Shape, field("the tree under test")]
    breakdown: Annotated[Breakdown | None, field("where the time of a step of the tree goes")] = None

    def save(self, path: str | Path) -> None:
        """Write as JSON, atomically."""
        write_atomically(path, (json.dumps(self.facts(), indent=1) + "\n").encode())

    @classmethod
    def load(cls, path: str | Path) -> BenchResult:
        """Read and validate.

        Raises:
            SequoiaPlanError: if the file is missing, or not what bench writes.
        """
        document: Any = None
        with suppress(ValueError, RecursionError):
            document = json.loads(read_bytes(path, "figures written by sequoia-plan bench -o"))
        if not isinstance(document, dict) or "contenders" not in document:
            raise SequoiaPlanError(f"{path}: not figures of bench; expected what sequoia-plan bench -o wrote")
        try:
            return cls.read(document, "")
        except SequoiaPlanError as error:
            raise SequoiaPlanError(f"{path}: not figures of bench: {error}") from error
