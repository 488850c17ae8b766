"""Fixtures shared by all tests: the real pair, loaded once, and a single thread for tiny models."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton looks when it is first imported


@pytest.fixture(scope="session")
def pair():
    """The embedded default pair in float32, as `sequoia-plan` loads it."""
    from sequoia_plan.runtime import load_pair

    return load_pair(dtype="float32")


@pytest.fixture(scope="session")
def plain_target():
    """The same target as transformers loads it, nothing repacked."""
    from sequoia_plan.runtime.models.load import load_model

    return load_model(None, "cpu", torch.float32)[0]


@pytest.fixture(scope="module")
def one_thread():
    """Tensors of tiny models are too small to share between threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
