"""A target, a draft that fits it, and their tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sequoia_plan.artifacts import ArgumentError
from sequoia_plan.runtime.draft.file import DEFAULT_DRAFT, load_draft
from sequoia_plan.runtime.draft.self_draft import INT8, self_draft
from sequoia_plan.runtime.generation import end_tokens
from sequoia_plan.runtime.models.load import dtype_name, load_model, model_facts, resolve_dtype
from sequoia_plan.runtime.models.repack import can_repack, repack
from sequoia_plan.runtime.models.vocabulary import shared_vocabulary, vocabulary_size

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
        draft: the same, or a draft .safetensors file made for the target, or "int8" for a copy of the target in 8 bits (see
            `self_draft`; a folder of that name is "./int8"); None for the embedded draft.
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
    model, tokenizer, target_name = load_model(target, device, torch_dtype)
    if draft is None and target is not None:
        raise ArgumentError(f"target {target}: name a draft for it with --draft, or use --draft {INT8} (the embedded draft serves only the embedded target)")
    source = str(DEFAULT_DRAFT) if draft is None else draft
    if source == INT8:
        draft_model, draft_name = self_draft(model), f"{target_name} {INT8}"
    elif source.endswith(".safetensors"):
        draft_model, draft_name = load_draft(source, model).to(device), Path(source).stem
    else:
        draft_model, draft_tokenizer, draft_name = load_model(source, device, torch_dtype)
        shared, covered = shared_vocabulary(model, draft_model, tokenizer, draft_tokenizer)
        if vocabulary_size(draft_model) != vocabulary_size(model):  # the decoder sees no tokenizers
            draft_model.covered_tokens = torch.arange(shared, device=draft_model.device) if covered is None else covered
    facts = {
        "target": model_facts(target_name, model) | {"placement": placement},
        "draft": model_facts(draft_name, draft_model) | {"placement": "resident" if source == INT8 else placement},
    }
    if placement == "repacked":
        model, draft_model = repack(model), repack(draft_model)  # a copy in 8 bits has nothing to repack
    return Pair(model, draft_model, tokenizer, facts, placement)
