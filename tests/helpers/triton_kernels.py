"""Tests of Triton kernels import this: they are skipped without Triton, and run on `DEVICE`."""

import pytest
import torch

pytest.importorskip(
    "triton",
    reason="Triton is not installed, which compiles or interprets the kernels",
    exc_type=ImportError,
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Without a CUDA device, Triton's interpreter runs the kernels on the CPU."""
interpreted = pytest.mark.skipif(DEVICE == "cuda", reason="is about a CPU that stands for a GPU")
