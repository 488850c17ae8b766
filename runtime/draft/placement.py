"""Which backend runs a draft with hidden states."""

from sequoia_plan.models.backends import COMPILED, FUSED, RESIDENT, fused
from sequoia_plan.runtime.draft.hidden_state_draft import HiddenStateDraft, ModuleDraft


def run_draft_as(draft: HiddenStateDraft, placement: str) -> tuple[str, ...]:
    """Let a draft run as `placement` says; returns a sentence if its pass is not compiled."""
    remarks: tuple[str, ...] = ()
    if placement == COMPILED:
        from sequoia_plan.runtime.draft.packed_eagle import PackedEagle, why_not

        if not (reason := why_not(draft)):
            draft.backend = PackedEagle(draft)
            return ()
        remarks = (f"draft: PyTorch runs it, its pass is not compiled: {reason}",)
    if placement != RESIDENT:
        draft.backend = ModuleDraft(draft, fused(draft, FUSED))
    return remarks
