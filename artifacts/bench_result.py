"""The results of `sequoia-plan bench`: methods of decoding side by side, as a JSON file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from sequoia_plan.artifacts.counts import PromptKind
from sequoia_plan.artifacts.files import read_json, write_atomically
from sequoia_plan.artifacts.schema import Artifact, Metadata, Number, Size

EXPECTED = "figures written by sequoia-plan bench -o"


class Spread(Artifact, frozen=True):
    """Median and quartiles of a figure over prompts."""

    median: Annotated[Number, "the median over prompts"]
    low: Annotated[Number, "the first quartile"]
    high: Annotated[Number, "the third quartile"]


class Ratio(Spread, frozen=True):
    """Ratio of two methods' speeds, taken for each prompt, so that drift of the machine cancels."""

    interval_low: Annotated[
        Number, "the lower end of the median's 95 % bootstrap interval over prompts"
    ]
    interval_high: Annotated[Number, "the upper end of that interval"]


class Prediction(Artifact, frozen=True):
    """What a tree's plan predicts; None where the plan does not apply."""

    tokens_per_step: Annotated[Number | None, "expected tokens a step"] = None
    speedup: Annotated[
        Number | None, "predicted speed-up over plain decoding with the same engine"
    ] = None
    interval: Annotated[
        tuple[Number, Number] | None,
        "95 % interval of `speedup` on as many prompts of these kinds, for the tree under test",
    ] = None
    interval_new_kind: Annotated[
        tuple[Number, Number] | None, "the same for prompts of a kind that was not profiled"
    ] = None


class KindResult(Artifact, frozen=True, rename={"prediction": "predicted"}):
    """The figures of one method of decoding on the prompts of one kind."""

    prompts: Annotated[Size, "number of prompts of the kind"]
    tokens_per_step: Annotated[Number | None, "new tokens over passes of the target"] = None
    speedup: Annotated[
        Ratio | None, "speed-up over plain decoding, with the keys of `speedup.OTHER`"
    ] = None
    prediction: Annotated[Prediction | None, "what the plan predicts for the kind"] = None


class MethodResult(
    Artifact,
    frozen=True,
    rename={"tokens_per_second_by_prompt": "each_prompt", "prediction": "predicted"},
):
    """The figures of one method of decoding."""

    title: Annotated[str, "the method's name for people"]
    tokens_per_second: Annotated[Spread, "new tokens over wall time, the prompt's prefill included"]
    first_token_seconds: Annotated[Spread, "seconds until the first new tokens"]
    tokens_per_second_by_prompt: Annotated[
        tuple[Number, ...], "tokens a second after the first tokens, for each prompt"
    ]
    speedup: Annotated[dict[str, Ratio], "speed-up over other methods, by their name"]
    tokens_per_step: Annotated[
        Number | None, "new tokens over passes of the target; missing where these are unknown"
    ] = None
    prediction: Annotated[
        Prediction | None,
        "what the plan predicts; missing without a tree",
    ] = None
    by_kind: Annotated[
        dict[PromptKind, KindResult],
        "figures by kind of prompts, `new kinds` for those that the plan has no figures for",
    ] = {}


class BenchSettings(Artifact, frozen=True):
    """What was decoded, and how."""

    sampling: Annotated[Metadata, "every sampling setting by name"]
    dtype: Annotated[str, "dtype of the target's weights"]
    prompts: Annotated[Size, "number of prompts"]
    tokens: Annotated[Size, "largest number of new tokens for each prompt"]


class TreeShape(Artifact, frozen=True):
    """The shape of the tree under test."""

    size: Annotated[Size, "number of nodes, including the root"]
    depth: Annotated[Size, "number of levels, including the root's"]
    level_widths: Annotated[tuple[Size, ...], "number of nodes on each level"] = ()


class Breakdown(Artifact, frozen=True):
    """Median seconds of a step with the tree, and of its parts, which add up to the step."""

    step: Annotated[float, "a whole step"]
    draft: Annotated[float, "all draft passes, and the drawing of children"]
    target: Annotated[float, "the target's pass over the tree"]
    verify: Annotated[float, "choosing the accepted path and the bonus token, and committing them"]
    host: Annotated[
        float,
        "the rest: mask, random numbers, launches, transfer to the host; noise can make it "
        "negative",
    ]
    share_not_model: Annotated[float, "(verify + host) / step"]


class BenchResult(Artifact, frozen=True, rename={"methods": "contenders"}):
    """Settings, machine and the figures of every method."""

    settings: Annotated[BenchSettings, "what was decoded, and how"]
    models: Annotated[dict[str, Metadata], "as in the profile"]
    hardware: Annotated[Metadata, "as in the profile"]
    methods: Annotated[dict[str, MethodResult], "figures by method"]
    tree: Annotated[TreeShape, "the shape of the tree under test"]
    breakdown: Annotated[Breakdown | None, "seconds of the parts of a step with the tree"] = None

    def save(self, path: str | Path) -> None:
        """Write as JSON, atomically."""
        write_atomically(path, (json.dumps(self.to_dict(), indent=1) + "\n").encode())

    @classmethod
    def load(cls, path: str | Path) -> BenchResult:
        """Read and check a file.

        Raises:
            SequoiaPlanError: if the file is missing, or not what bench writes.
        """
        return cls.from_dict(read_json(path, EXPECTED), str(path))
