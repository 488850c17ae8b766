"""Matrices as 8-bit integers, with one scale for each row."""

import torch
from torch import Tensor

ROWS_AT_A_TIME = 4096
"""Rows that are quantised at once: an output head in float32 takes more memory than a layer."""


def rows_in_8_bits(weight: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Quantise a matrix row by row. Every weight is off by at most half the scale of its row.

    `weight` float [out, in]; returns int8 [out, in], and the scales of rows, `dtype` [out].
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
