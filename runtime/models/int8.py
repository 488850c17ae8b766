"""Linear layers in 8 bits: integers, and one scale for each row of the matrix."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

NARROW = 64
"""Up to so many rows PyTorch's 8-bit CPU kernel is faster than making the matrix anew and multiplying in bfloat16."""
STEP = 16
"""The kernel reads so many columns at a time, and past the end of a matrix that has not a multiple of them."""
ROWS_AT_A_TIME = 4096


def rows_in_8_bits(weight: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """A matrix as integers and scales: every weight is off by at most half the scale of its row.

    Args:
        weight: float [out, in].
        dtype: of the scales. The integers are made for the scales as they are in that dtype.

    Returns:
        int8 [out, in] from -127 to 127, and the scales [out].
    """
    integers, scales = torch.empty(weight.shape, dtype=torch.int8, device=weight.device), torch.empty(len(weight), dtype=dtype, device=weight.device)
    for first in range(0, len(weight), ROWS_AT_A_TIME):  # a whole head in float32 takes more memory than a layer
        few = slice(first, first + ROWS_AT_A_TIME)
        exact = weight[few].detach().float()
        scales[few] = exact.abs().amax(1).clamp(min=1e-12) / 127
        integers[few] = (exact / scales[few].float()[:, None]).round_().to(torch.int8)
    return integers, scales


class Int8Linear(nn.Module):
    """y = x W^T + b with W in 8 bits. Nothing of the matrix that it was made from is kept.

    Args:
        weight: float [out, in].
        bias: float [out], or None.
        dtype: the bias', which that of x should be.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        integers, scales = rows_in_8_bits(weight, torch.bfloat16)
        self.weight, self.scales = nn.Parameter(integers, requires_grad=False), nn.Parameter(scales, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach().to(dtype, copy=True), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """float [..., in] -> float [..., out]."""
        rows = x.reshape(-1, self.in_features)
        if not (x.is_cpu and x.dtype == torch.bfloat16 and rows.shape[0] <= NARROW and self.in_features % STEP == 0):
            return linear(x, self.weight.to(x.dtype) * self.scales.to(x.dtype)[:, None], self.bias)
        result = torch._weight_int8pack_mm(rows, self.weight, self.scales).view(*x.shape[:-1], self.out_features)
        return result if self.bias is None else result + self.bias
