"""Which drafter drafts with which draft."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sequoia_plan.runtime.draft.dflash import DFlashDrafter
from sequoia_plan.runtime.draft.dflash_model import DFlashModel
from sequoia_plan.runtime.draft.drafter import Drafter
from sequoia_plan.runtime.draft.eagle import EagleDrafter
from sequoia_plan.runtime.draft.eagle_model import Eagle1, Eagle3
from sequoia_plan.runtime.draft.language_model import LanguageModelDrafter, SelfDrafter
from sequoia_plan.runtime.draft.self_draft import shares_cache


def make_drafter(target: Any, draft: Any, vocabulary: int, d2t: Tensor | None) -> Drafter:
    """The drafter for a draft of `target`. `d2t` int64 [vocabulary]."""
    drafter: Any = LanguageModelDrafter
    if isinstance(draft, (Eagle1, Eagle3)):
        drafter = EagleDrafter
    elif isinstance(draft, DFlashModel):
        drafter = DFlashDrafter
    elif shares_cache(draft, target):
        drafter = SelfDrafter
    return drafter(draft, vocabulary, d2t)
