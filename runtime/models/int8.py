"""Linear layers whose weights are 8-bit integers, with one scale for each row of the matrix."""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

MAX_KERNEL_ROWS = 64
"""With up to so many rows of input, PyTorch's 8-bit CPU kernel is faster than converting the matrix
to bfloat16 and multiplying by it."""
KERNEL_COLUMNS = 16
"""The kernel reads so many columns at a time, also past the end of a matrix whose number of columns
is not a multiple of them."""
ROWS_AT_A_TIME = 4096
"""Rows that are quantised at once: an output head in float32 takes more memory than a layer."""


def rows_in_8_bits(weight: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Quantise a matrix row by row. Every weight is off by at most half the scale of its row.

    `weight` float [out, in]; returns int8 [out, in].
    """
    integers = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(len(weight), dtype=dtype, device=weight.device)
    for start in range(0, len(weight), ROWS_AT_A_TIME):
        rows = slice(start, start + ROWS_AT_A_TIME)
        exact = weight[rows].detach().float()
        # 127 is the largest int8; the clamp avoids a division by 0 for a row of zeros
        scales[rows] = exact.abs().amax(1).clamp(min=1e-12) / 127
        integers[rows] = (exact / scales[rows].float()[:, None]).round_().to(torch.int8)
    return integers, scales


class Int8Linear(nn.Module):
    """y = x W^T + b with W in 8 bits. The matrix that it was made from is not kept.

    `weight` float [out, in]; `bias` float [out].
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        integers, scales = rows_in_8_bits(weight, torch.bfloat16)
        self.weight = nn.Parameter(integers, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.bias: nn.Parameter | None = None
        if bias is not None:
            self.bias = nn.Parameter(bias.detach().to(dtype, copy=True), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """float [..., in] -> float [..., out]."""
        rows = x.reshape(-1, self.in_features)
        if not self._can_use_kernel(rows):
            weight = self.weight.to(x.dtype) * self.scales.to(x.dtype)[:, None]
            return linear(x, weight, self.bias)
        product = torch._weight_int8pack_mm(rows, self.weight, self.scales)
        product = product.view(*x.shape[:-1], self.out_features)
        return product if self.bias is None else product + self.bias

    def _can_use_kernel(self, rows: Tensor) -> bool:
        """Is PyTorch's 8-bit CPU kernel correct, and the faster way, for this input [rows, in]?"""
        return (
            rows.is_cpu
            and rows.dtype == torch.bfloat16
            and rows.shape[0] <= MAX_KERNEL_ROWS
            and self.in_features % KERNEL_COLUMNS == 0
        )
