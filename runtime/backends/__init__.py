"""What runs the passes of models: PyTorch's modules, or the packed pass of a CPU.

The rest of the runtime asks for a `LoadedModel`, and never which backend it has.
"""

from sequoia_plan.runtime.backends.loading import (
    CAN_COMPILE,
    COMPILED,
    FUSED,
    PLACEMENTS,
    RESIDENT,
    OffloadedModel,
    keep_loaded,
    load_model,
    loaded,
    pack_draft,
    place,
)
from sequoia_plan.runtime.backends.modules.self_draft import INT8
from sequoia_plan.runtime.backends.modules.self_draft import self_draft as copy_in_8_bits

__all__ = [
    "CAN_COMPILE", "COMPILED", "FUSED", "INT8", "PLACEMENTS", "RESIDENT", "OffloadedModel",
    "copy_in_8_bits", "keep_loaded", "load_model", "loaded", "pack_draft", "place",
]  # fmt: skip
