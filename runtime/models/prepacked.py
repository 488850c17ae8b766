"""Linear layers whose weights are prepacked for the processor (oneDNN's blocked layout).

A tree pass multiplies a few rows by every weight. PyTorch's default CPU kernel is built for one row
or for many: in float32, two rows take it nearly twice as long as one. With oneDNN's blocked
weights, one row takes as long as eight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class PrepackedLinear(nn.Module):
    """y = x W^T + b with W in oneDNN's blocked layout. The dense weight is not kept.

    `weight` float [out, in]; `bias` float [out].
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        self.bias: nn.Parameter | None = None
        if bias is not None:
            self.bias = nn.Parameter(bias.detach(), requires_grad=False)

    def __getstate__(self) -> dict[str, Any]:
        """The state for pickle and copies, with a dense weight: a blocked one has no storage."""
        return self.__dict__ | {"packed": self.packed.to_dense()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over the state of another such layer, and prepack its weight."""
        super().__setstate__(state)
        self.packed = torch.ops.mkldnn._reorder_linear_weight(state["packed"])

    def forward(self, x: Tensor) -> Tensor:
        """float [..., in] -> float [..., out]."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self.packed, self.bias, "none", [], ""
        )
        return product


def can_prepack(dtype: torch.dtype, device: torch.device | str) -> bool:
    """Does this build of PyTorch have the kernels, and does the processor compute in `dtype`?"""
    if torch.device(device).type != "cpu":
        return False
    is_native = dtype == torch.float32 or (
        dtype == torch.bfloat16 and torch.cpu._is_avx512_bf16_supported()
    )
    return (
        is_native
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )
