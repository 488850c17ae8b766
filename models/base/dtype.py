"""The dtypes that models compute in, by name."""

import numpy as np
import torch
from numpy.typing import NDArray

from sequoia_plan.artifacts import ArgumentError

Bytes = NDArray[np.uint8]
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]
Shape = tuple[int, ...]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_dtype(dtype: str, device: str) -> torch.dtype:
    """The dtype of a name. "auto" is bfloat16 where the device computes in it, else float32."""
    if dtype == "auto":
        computes_in_bfloat16 = device.startswith("cuda") or torch.cpu._is_avx512_bf16_supported()
        return torch.bfloat16 if computes_in_bfloat16 else torch.float32
    if dtype not in DTYPES:
        raise ArgumentError(f"dtype: found {dtype}, expected auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def dtype_name(dtype: torch.dtype) -> str:
    """torch.bfloat16 -> bfloat16"""
    return str(dtype).removeprefix("torch.")
