"""A target, a draft that fits it, and their tokenizer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from sequoia_plan.artifacts import ArgumentError
from sequoia_plan.runtime.draft.file import load_draft, save_as_folder
from sequoia_plan.runtime.draft.load_tapped import load_tapped, remarks
from sequoia_plan.runtime.draft.published import find_checkpoint
from sequoia_plan.runtime.draft.self_draft import INT8, self_draft
from sequoia_plan.runtime.generation import end_tokens
from sequoia_plan.runtime.models.load import dtype_name, load_model, model_facts, name_of, resolve_dtype
from sequoia_plan.runtime.models.memory import as_bytes, cache_bytes, own_bytes, split_memory
from sequoia_plan.runtime.models.offload import Offloaded
from sequoia_plan.runtime.models.repack import can_repack, repack
from sequoia_plan.runtime.models.vocabulary import shared_vocabulary, vocabulary_size

PLACEMENTS = ("resident", "repacked")
"""Where weights in memory are: as transformers loads them, or with linear layers repacked for the processor."""
LINKS = ("host", "disk")
"""From where the layers of a target that does not fit are streamed: from the host's memory to a CUDA device, or from a file."""
DEFAULT_DRAFT, LANGUAGE_MODEL = "smollm2-135m-eagle3", "smollm2-135m-draft"
EMBEDDED = {DEFAULT_DRAFT: Path(__file__).with_name(DEFAULT_DRAFT), LANGUAGE_MODEL: Path(__file__).with_name(f"{LANGUAGE_MODEL}.safetensors")}
"""The drafts of the embedded target by the names that load them: one reads the target's hidden states, the other is a model of its own."""


@dataclass(frozen=True)
class Pair:
    """A target, its draft and their tokenizer.

    Args:
        facts: name, digest, dtype, parameters and placement of both models, for profiles and trees.
        placement: where the weights are: one of `PLACEMENTS`, or "streamed from LINK".
        remarks: what a person should know of them, a sentence each.
    """

    target: Any
    draft: Any
    tokenizer: Any
    facts: dict[str, dict[str, Any]]
    placement: str = "resident"
    remarks: tuple[str, ...] = ()

    @property
    def end_tokens(self) -> list[int]:
        """The tokens that end a text: those of the target's generation config, else the tokenizer's."""
        return sorted(end_tokens(None, self.target, self.tokenizer))


def load_pair(
    target: str | None = None,
    draft: str | None = None,
    device: str = "cpu",
    dtype: str = "auto",
    placement: str = "auto",
    offload: str | None = None,
    memory: str | int | None = None,
) -> Pair:
    """Load a target and a draft that share a vocabulary.

    Args:
        target: folder, hub ID or .gguf file; None for the embedded SmolLM2-135M-Instruct.
        draft: the same, or a folder or hub ID of a draft that reads the target's hidden states (see `draft.published`), or a draft
            .safetensors file made for the target, or "int8" for a copy of the target in 8 bits (see `self_draft`; a folder of that
            name is "./int8"), or a name in `EMBEDDED`; None for `DEFAULT_DRAFT`.
        device: "cpu" or "cuda".
        dtype: "float32", "bfloat16", "float16", or "auto": bfloat16 where the processor computes in it, else float32.
        placement: one of `PLACEMENTS`, or "auto": "repacked" where the processor has kernels for it, else "resident". The layers of an
            offloaded target are never repacked.
        offload: one of `LINKS`: the target's layers that do not fit into `memory` are streamed from there in every pass.
        memory: what the target's weights, both KV caches and the draft may take on the device, as "300MB", "24GB" or bytes; None for
            what is free. See `runtime.models.memory.Split`.

    Raises:
        SequoiaPlanError: if a model cannot be found or loaded, the vocabularies differ, or the memory does not suffice.
    """
    if placement not in ("auto", *PLACEMENTS):
        raise ArgumentError(f"placement: found {placement!r}, expected auto, {', '.join(PLACEMENTS)}")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ArgumentError("device cuda: PyTorch finds no CUDA device; use --device cpu or a CUDA build of torch")
    if offload not in (None, *LINKS):
        raise ArgumentError(f"offload: found {offload!r}, expected {' or '.join(LINKS)}")
    if offload == "host" and not device.startswith("cuda"):
        raise ArgumentError("offload host: the target would be streamed from the host's memory to a CUDA device, found --device cpu; use --offload disk")
    if memory is not None and offload is None:
        raise ArgumentError(f"memory {memory}: found without a link to stream from; add --offload {' or '.join(LINKS)}")
    torch_dtype = resolve_dtype(dtype, device)
    if placement == "auto":
        placement = "repacked" if can_repack(torch_dtype, device) else "resident"
    elif placement == "repacked" and not can_repack(torch_dtype, device):
        raise ArgumentError(f"placement repacked: no kernels for {dtype_name(torch_dtype)} on {device}; use resident")
    offloaded = Offloaded(target, device, torch_dtype) if offload else None
    if offloaded:
        model, tokenizer, target_name, heads = offloaded.model, offloaded.tokenizer, offloaded.name, offloaded.heads()
    else:
        (model, tokenizer, target_name), heads = load_model(target, device, torch_dtype), None
    if draft is None and target is not None:
        raise ArgumentError(f"target {target}: name a draft for it with --draft, or use --draft {INT8} (the embedded draft serves only the embedded target)")
    said: list[str] = []
    if draft == INT8:
        layers = (offloaded.layer(number) for number in range(len(offloaded.layers))) if offloaded else None
        draft_model, draft_name, draft_placement = self_draft(model, layers), f"{target_name} {INT8}", "resident"
    else:
        draft_model, draft_name, said = _load_draft(draft, model, tokenizer, device, torch_dtype)
        draft_placement = placement
    facts = {
        "target": model_facts(target_name, model, heads) | {"placement": placement},
        "draft": model_facts(draft_name, draft_model) | {"placement": draft_placement},
    }
    if offloaded and offload:
        caches = cache_bytes(model) + cache_bytes(draft_model)
        split = split_memory(as_bytes(memory, offloaded.device), offloaded.outside, own_bytes(draft_model, model), caches, offloaded.sizes())
        offloaded.place(split, offload)
        facts["target"] |= split.facts(offload, len(offloaded.layers))
    if placement == "repacked":
        draft_model = repack(draft_model)  # a copy in 8 bits has nothing to repack
        if not offloaded:
            model = repack(model)
    return Pair(model, draft_model, tokenizer, facts, placement if not offloaded else f"streamed from {offload}", tuple(said))


def with_draft(pair: Pair, draft: str) -> Pair:
    """The same target with another draft, not repacked; `draft` is as for `load_pair`, but not "int8".

    Raises:
        SequoiaPlanError: if it cannot be found or loaded, or the vocabularies differ.
    """
    model, name, said = _load_draft(draft, pair.target, pair.tokenizer, str(pair.target.device), pair.target.dtype)
    facts = pair.facts | {"draft": model_facts(name, model) | {"placement": "resident"}}
    return replace(pair, draft=model, facts=facts, remarks=tuple(said))


def save_model(pair: Pair, role: str, folder: str | Path) -> None:
    """Write the "target" or the "draft" as a folder that transformers and other engines load, with the tokenizer.

    The pair must have been loaded with placement="resident".
    """
    if role == "draft":
        save_as_folder(pair.draft, pair.tokenizer, folder)
        return
    pair.target.save_pretrained(folder)
    pair.tokenizer.save_pretrained(folder)


def _load_draft(draft: str | None, target: Any, tokenizer: Any, device: str, dtype: torch.dtype) -> tuple[Any, str, list[str]]:
    """A draft that fits the target, its name, and what is to be said of it."""
    source = str(EMBEDDED.get(draft or DEFAULT_DRAFT, draft))
    if source.endswith(".safetensors"):
        return load_draft(source, target).to(device), Path(source).stem, []
    if published := find_checkpoint(source):
        model = load_tapped(published, target, dtype)
        return model, name_of(source), remarks(published, model, target)
    model, draft_tokenizer, name = load_model(source, device, dtype)
    shared, covered = shared_vocabulary(target, model, tokenizer, draft_tokenizer)
    if vocabulary_size(model) != vocabulary_size(target):  # the decoder sees no tokenizers
        model.covered_tokens = torch.arange(shared, device=model.device) if covered is None else covered
    return model, name, []
