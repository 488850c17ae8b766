"""Linear layers repacked for the processor.

A tree pass multiplies a few rows by every weight. PyTorch's default CPU kernel is built for one row or for many: in
float32 two rows cost it nearly twice as much as one. oneDNN's blocked weights cost the same from one row to eight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class RepackedLinear(nn.Module):
    """y = x W^T + b with W in oneDNN's blocked layout. The dense weight is not kept."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """float [..., in] -> float [..., out]."""
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return result


def can_repack(dtype: torch.dtype, device: torch.device | str) -> bool:
    """Does this build of PyTorch have the kernels, and does the processor compute in `dtype`?"""
    native = dtype == torch.float32 or (dtype == torch.bfloat16 and torch.cpu._is_avx512_bf16_supported())
    return torch.device(device).type == "cpu" and native and torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def repack(model: Any) -> Any:
    """Replace every linear layer of `model` by a repacked one, in place."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, RepackedLinear(child))
    return model
