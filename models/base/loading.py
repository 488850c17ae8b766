"""How models are loaded: what `load_pair` is asked for of both."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sequoia_plan.models.base.dtype import resolve_dtype

OnBytes = Callable[[int, int], None]
"""Called while weights are written, with the bytes so far and all."""


@dataclass(frozen=True)
class Loading:
    """How a model is loaded; the fields are arguments of `load_pair`."""

    placement: str
    device: str = "cpu"
    dtype: str = "auto"
    bits: int | None = None
    on_bytes: OnBytes = lambda done, total: None

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of its name."""
        return resolve_dtype(self.dtype, self.device)
