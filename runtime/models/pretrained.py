"""Loading a model from a folder, a hub ID or a GGUF file; the embedded target by default."""

from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.runtime.base.errors import first_line
from sequoia_plan.runtime.models.gguf import converted_gguf, embedded_gguf
from sequoia_plan.runtime.models.loading import load_whole

DEFAULT_TARGET = "SmolLM2-135M-Instruct"
DOWNLOADED_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
"""Files of a hub repository that a model is loaded from; older ones have `TORCH_FILES` as well."""
TORCH_FILES = "pytorch_model*.bin"


def load_model(source: str | None, device: str, dtype: torch.dtype) -> tuple[Any, Any, str]:
    """Load a model in eval mode, with its tokenizer and its name."""
    transformers_logging.disable_progress_bar()
    folder = local_folder(source, dtype)
    model = load_whole(folder, dtype).to(device)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:
        raise SequoiaPlanError(f"{folder}: no tokenizer found ({first_line(error)})") from error
    return model, tokenizer, name_of(source)


def local_folder(source: str | None, dtype: torch.dtype) -> Path:
    """The folder that holds a model's files; those of a GGUF file are in `dtype`."""
    if source is None or source.endswith(".gguf"):
        return converted_gguf(Path(source) if source else embedded_gguf(), dtype)
    return downloaded_folder(source)


def downloaded_folder(source: str) -> Path:
    """A folder, or that of a hub ID, whose files are downloaded first."""
    if Path(source).exists():
        return Path(source)
    try:
        return _download(source)
    except Exception as error:  # a network may fail in any way
        raise SequoiaPlanError(
            f"{source}: no such folder, and it cannot be downloaded ({first_line(error)}); name a "
            f"folder, or run `hf download {source}` where there is a network and set "
            "HF_HUB_OFFLINE=1"
        ) from error


def _download(hub_id: str) -> Path:
    """Download what is new in a hub repository; without a network, its folder in the cache."""
    folder = Path(snapshot_download(hub_id, allow_patterns=DOWNLOADED_FILES, ignore_patterns="*/*"))
    if not list(folder.glob("*.safetensors")):
        snapshot_download(hub_id, allow_patterns=TORCH_FILES, ignore_patterns="*/*")
    return folder


def name_of(source: str | None) -> str:
    """A model's name, without the path that it is loaded from."""
    if source is None:
        return DEFAULT_TARGET
    return Path(source).name if Path(source).exists() else source
