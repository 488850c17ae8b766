"""Norms of Llama's kind with fewer operations, also computed along with the sum that they read."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from sequoia_plan.models.layers.layer_operations import by_kernel, rms_norm


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + epsilon) * weight (arXiv 1910.07467), computed in float32.

    The root is the length of the vector (|x / sqrt(width)|, sqrt(epsilon)), which takes few
    operations, and the result is rounded once. PyTorch's and transformers' norms are more. `weight`
    float [width].
    """

    root_of_epsilon: Tensor

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.epsilon = epsilon
        root = torch.tensor(math.sqrt(epsilon), dtype=torch.float32, device=weight.device)
        self.register_buffer("root_of_epsilon", root, persistent=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """float [..., width] -> the same; at once if a sum before has computed it for this norm."""
        norm, normed = getattr(hidden_states, "normed", (None, None))
        if norm is self and normed is not None:
            return normed
        return by_kernel(
            "norm",
            hidden_states,
            lambda: rms_norm(hidden_states, self.weight, self.epsilon)[1],
            lambda: self._normed(hidden_states),
        )

    def _normed(self, hidden_states: Tensor) -> Tensor:
        """`forward` by tensor operations."""
        x = hidden_states.float()
        root = torch.linalg.vector_norm(x, 2, -1, True).mul_(x.shape[-1] ** -0.5)
        scaled = torch.div(x, root.hypot_(self.root_of_epsilon)).mul_(self.weight)
        return scaled.to(hidden_states.dtype)


def add_before(norm: nn.Module | None, x: Tensor, addend: Tensor) -> Tensor:
    """x + addend. Where kernels run, `norm`, which reads the sum next, is computed along with it.

    The result then has it as its attribute `normed`.
    """
    if not isinstance(norm, RMSNorm):
        return x + addend

    def add_and_norm() -> Tensor:
        """The sum with the normed one."""
        total, normed = rms_norm(x, norm.weight, norm.epsilon, addend)
        total.normed = norm, normed  # type: ignore[attr-defined]
        return total

    return by_kernel("norm", x, add_and_norm, lambda: x + addend)


def fused_norm(norm: Any, weight: Tensor) -> RMSNorm:
    """What takes the place of a norm of transformers, with a copy of `weight`."""
    return RMSNorm(weight.detach().clone(), norm.variance_epsilon).eval()
