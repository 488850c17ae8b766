"""Which backend runs a draft with hidden states."""

from sequoia_plan.models.backends import COMPILED, FUSED, RESIDENT, fused
from sequoia_plan.runtime.draft.hidden_state_draft import HiddenStateDraft, ModuleDraft


def run_draft_as(draft: HiddenStateDraft, placement: str) -> str:
    """Let a draft with hidden states run as `placement` says; returns why it is not compiled."""
    reason = ""
    if placement == COMPILED:
        from sequoia_plan.runtime.draft.packed_eagle import PackedEagle, why_not

        if not (reason := why_not(draft)):
            draft.backend = PackedEagle(draft)
            return ""
    if placement != RESIDENT:
        draft.backend = ModuleDraft(draft, fused(draft, FUSED))
    return reason
