"""Fixtures shared by all tests, among them the real pair, loaded once."""

import ctypes
import gc
import importlib.util
import os
import re
import sys
import time

import pytest
from hypothesis import settings

settings.register_profile("no deadline", deadline=None)  # no test asserts a time
settings.load_profile("no deadline")

HAS_TORCH = importlib.util.find_spec("torch") is not None
if HAS_TORCH:
    import psutil
    import torch

    torch.set_num_threads(1)  # tensors of tiny models are too small to share
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # Triton looks when it is first imported


LONGEST = [
    "test_compiled_step", "test_static_step", "test_recurrent", "test_layer_kernels", "test_docs",
    "test_recipe", "test_real_pair", "test_offload", "test_gpu_benchmark", "test_packed_model",
    "test_changed_models", "test_careless_input", "test_acceptance", "test_vocabulary_loops",
    "test_portfolio", "test_verify",
]  # fmt: skip
"""Files that take long. The first one compiles what later ones find on disk."""


def pytest_collection_modifyitems(items):
    """The longest files come first: one of them would be the last worker's alone at the end."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


def pytest_ignore_collect(collection_path):
    """Tests that name what is not here do not run: torch, or what Windows lacks."""
    missing = [] if HAS_TORCH else [r"import torch|sequoia_plan.(models|runtime|profiler)"]
    if not hasattr(os, "fork"):
        missing.append(r"os\.fork|from (forking|sessions) |import resource")
    if not missing or collection_path.suffix != ".py":
        return None
    return True if re.search("|".join(missing), collection_path.read_text("utf-8")) else None


@pytest.fixture(autouse=HAS_TORCH and sys.platform == "linux")
def memory_goes_back():
    """Large models are cycles, which Python finds late, and C's allocator keeps what they had."""
    memory = psutil.Process().memory_info
    before = memory().rss
    yield
    if memory().rss > before + 3e8:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(scope="session")
def pair():
    """The embedded default pair in float32, as `sequoia-plan` loads it."""
    from sequoia_plan.runtime import load_pair

    return load_pair(dtype="float32")


@pytest.fixture(scope="session")
def plain_target():
    """The same target as transformers loads it."""
    from sequoia_plan.models.files.pretrained import find_model

    return find_model(None).module(torch.float32)


@pytest.fixture(scope="module")
def target():
    """A tiny Llama."""
    from architectures import tiny

    return tiny("Llama")


@pytest.fixture(scope="module")
def draft(target):
    """A model that resembles it."""
    from architectures import resembling

    return resembling(target, 0.05)


@pytest.fixture(scope="module")
def model():
    """A tiny Llama whose pass is compiled, also from a GGUF file."""
    from architectures import tiny
    from gguf_files import SIZES

    return tiny("Llama", **SIZES)


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """Weight files of tiny models go with the test."""
    monkeypatch.setenv("SEQUOIA_PLAN_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama of eight layers and a draft, as transformers saves them."""
    from streamed import save_models

    return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def slow_disk(monkeypatch):
    """Reads take longer than a layer computes, as on a real disk."""
    from sequoia_plan.models.offload.weight_file import WeightFile

    right = WeightFile.read

    def read(self, offset, memory):
        time.sleep(0.002)
        right(self, offset, memory)

    monkeypatch.setattr(WeightFile, "read", read)


@pytest.fixture
def run_briefly(monkeypatch):
    """A function that runs a command with brief measurements, and returns its output."""
    from importlib import import_module

    from commands import succeed

    monkeypatch.setattr("sequoia_plan.profiler.latency.SIZES", (1, 2, 4))
    monkeypatch.setattr("sequoia_plan.planner.cli.profiling.LATENCY_SECONDS", 0)
    monkeypatch.setattr(import_module("sequoia_plan.profiler.measure"), "MIN_PROMPTS", 1)

    return lambda *words: succeed(*words).output
