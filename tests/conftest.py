"""Fixtures shared by all tests: the real pair, loaded once."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def pair():
    """The embedded default pair in float32, as `sequoia-plan` loads it."""
    from sequoia_plan.runtime import load_pair

    return load_pair(dtype="float32")


@pytest.fixture(scope="session")
def plain_target():
    """The same target as transformers loads it, nothing repacked."""
    from sequoia_plan.runtime.models import load_target

    return load_target(None, "cpu", torch.float32)[0]
