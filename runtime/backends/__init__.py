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
    integer_products,
    keep_loaded,
    load_model,
    loaded,
    pack_draft,
    place,
)

__all__ = [
    "CAN_COMPILE", "COMPILED", "FUSED", "PLACEMENTS", "RESIDENT", "OffloadedModel",
    "integer_products", "keep_loaded", "load_model", "loaded", "pack_draft", "place",
]  # fmt: skip
