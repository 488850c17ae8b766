"""Which drafter makes a draft's passes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sequoia_plan.runtime.draft.block import BlockDrafter
from sequoia_plan.runtime.draft.block_model import BlockModel
from sequoia_plan.runtime.draft.drafter import Drafter
from sequoia_plan.runtime.draft.feature import FeatureDrafter
from sequoia_plan.runtime.draft.feature_model import FeatureModel
from sequoia_plan.runtime.draft.language_model import LanguageModelDrafter


def drafter_of(draft: Any, vocabulary: int, covered: Tensor | None = None, backend: Any = None) -> Drafter:
    """The drafter for a draft, by what it is; arguments as for `LanguageModelDrafter`."""
    if isinstance(draft, FeatureModel):
        return FeatureDrafter(draft, vocabulary, covered, backend)
    if isinstance(draft, BlockModel):
        return BlockDrafter(draft, vocabulary, covered, backend)
    return LanguageModelDrafter(draft, vocabulary, covered, backend)
