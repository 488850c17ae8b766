"""Loading a target, a draft that fits it, and their tokenizer."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sequoia_plan.artifacts import ArgumentError, SequoiaPlanError
from sequoia_plan.runtime.draft.checkpoint import find_checkpoint
from sequoia_plan.runtime.draft.draft_file import load_draft, save_as_folder
from sequoia_plan.runtime.draft.from_checkpoint import load_checkpoint, remarks
from sequoia_plan.runtime.draft.hidden_state_draft import HiddenStateDraft
from sequoia_plan.runtime.draft.self_draft import (
    INT8,
    copy_bytes,
    copy_can_share,
    self_draft,
    share_layers,
    shares_cache,
)
from sequoia_plan.runtime.generation import end_tokens
from sequoia_plan.runtime.models.architecture import context_length, rope_reason, text_config
from sequoia_plan.runtime.models.compiled_passes import compiled_pass
from sequoia_plan.runtime.models.dtype import resolve_dtype
from sequoia_plan.runtime.models.fuse import fuse, num_fused_layers
from sequoia_plan.runtime.models.fused_layer import plain_linear
from sequoia_plan.runtime.models.gguf import embedded_gguf
from sequoia_plan.runtime.models.metadata import model_metadata
from sequoia_plan.runtime.models.pretrained import load_model, name_of
from sequoia_plan.runtime.models.vocabulary import shared_vocabulary, vocabulary_size

if TYPE_CHECKING:
    from sequoia_plan.runtime.offload.memory import MemorySplit
    from sequoia_plan.runtime.offload.offloaded_target import OffloadedTarget

RESIDENT, FUSED, COMPILED = "resident", "fused", "compiled"
"""How passes run: by the modules that transformers loads; by fused layers, where those compute the
same; or on a CPU as one compiled function, with the weights packed for it (`runtime.compiled`)."""
PLACEMENTS = (RESIDENT, FUSED, COMPILED)
LINKS = ("host", "disk")
"""Where streamed layers come from: the host's memory, to a CUDA device, or a file."""

DEFAULT_DRAFT, LANGUAGE_MODEL = "smollm2-135m-eagle3", "smollm2-135m-draft"
EMBEDDED_DRAFTS = (DEFAULT_DRAFT, LANGUAGE_MODEL)
"""Drafts of the embedded target: an EAGLE-3 draft, and a language model of two layers."""
NO_DRAFT = "none"
"""As a draft's name: decode with trees whose spine is looked up, and that draft nothing."""
WEIGHTS_PACKAGE = "sequoia-plan-drafts"


@dataclass(frozen=True)
class Pair:
    """A target, its draft and their tokenizer.

    Args:
        draft: None if nothing is drafted.
        metadata: name, digest, dtype, parameters and placement of both models, as profiles and
            trees record them.
        placement: where the weights are: one of `PLACEMENTS`, or "streamed from LINK".
        remarks: what a user should know about the models, a sentence each.
    """

    target: Any
    draft: Any
    tokenizer: Any
    metadata: dict[str, dict[str, Any]]
    placement: str = "resident"
    remarks: tuple[str, ...] = ()

    @property
    def end_tokens(self) -> list[int]:
        """Tokens that end a text: the target's generation config's, else the tokenizer's."""
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
        draft: the same; or a folder or hub ID of an EAGLE or DFlash draft (see `draft.checkpoint`);
            or a draft .safetensors file made for the target; or "int8" for a copy of the target in
            8 bits (see `self_draft`; a folder of that name is "./int8"); or "none" for no draft;
            or a name in `EMBEDDED_DRAFTS`. None for `DEFAULT_DRAFT`.
        device: "cpu" or "cuda".
        dtype: "float32", "bfloat16", "float16", or "auto": bfloat16 where the processor computes in
            it, else float32.
        placement: one of `PLACEMENTS`, or "auto": compiled on a CPU, else fused. A model that
            cannot be compiled, is offloaded, or shares its cache with an int8 draft, is fused. With
            dtype "auto", a GGUF file is compiled with its own bits, else with weights in `dtype`.
        offload: one of `LINKS`: layers of the target that do not fit into `memory` are streamed
            from there in every pass.
        memory: what the target's weights, both KV caches and the draft may take on the device, as
            "300MB", "24GB" or bytes; None for what is free. See `runtime.offload.memory`.

    Raises:
        SequoiaPlanError: if a model cannot be found or loaded, the vocabularies differ, or memory
            is short.
    """
    _check_arguments(device, placement, offload, memory)
    torch_dtype = resolve_dtype(dtype, device)
    placement = _resolve_placement(placement, draft, device)
    if offload:
        return _load_offloaded_pair(target, draft, device, torch_dtype, placement, offload, memory)
    model, tokenizer, target_name = load_model(target, device, torch_dtype)
    _require_draft(target, draft)
    metadata = {"target": model_metadata(target_name, model)}
    draft_model, draft_name, draft_remarks = _make_draft(
        draft, model, tokenizer, target_name, device, torch_dtype
    )
    if draft_model is not None:
        metadata["draft"] = _place_draft(draft, draft_model, draft_name, placement)
    gguf = _gguf_file(target) if dtype == "auto" else None
    placed, reason = _place(model, placement, gguf)
    metadata["target"] |= placed
    placement = placed["placement"]
    not_compiled = (f"target: PyTorch runs it, its pass is not compiled: {reason}",)
    remarks = (*_context_remarks(model), *draft_remarks, *(not_compiled if reason else ()))
    return Pair(model, draft_model, tokenizer, metadata, placement, remarks)


def with_draft(pair: Pair, draft: str) -> Pair:
    """The same target with another draft, which PyTorch runs."""
    target = pair.target
    draft_model, draft_name, draft_remarks = _load_draft(
        draft, target, pair.tokenizer, str(target.device), target.dtype
    )
    draft_metadata = model_metadata(draft_name, draft_model) | {"placement": RESIDENT}
    metadata = pair.metadata | {"draft": draft_metadata}
    return replace(pair, draft=draft_model, metadata=metadata, remarks=draft_remarks)


def save_model(pair: Pair, role: str, folder: str | Path) -> None:
    """Write a model as a folder that transformers and other engines load, with the tokenizer.

    The pair must have been loaded with placement="resident".
    """
    if role == "draft":
        save_as_folder(pair.draft, pair.tokenizer, folder)
        return
    pair.target.save_pretrained(folder)
    pair.tokenizer.save_pretrained(folder)


def embedded_draft(name: str) -> Path:
    """The folder or file of one of `EMBEDDED_DRAFTS`."""
    spec = importlib.util.find_spec(WEIGHTS_PACKAGE.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        raise SequoiaPlanError(
            f"draft {name}: the embedded drafts need the package {WEIGHTS_PACKAGE}, which is not "
            "installed: pip install ./drafts in a clone of sequoia-plan"
        )
    folder = Path(next(iter(spec.submodule_search_locations)))
    return folder / (name if name == DEFAULT_DRAFT else f"{name}.safetensors")


def _check_arguments(
    device: str, placement: str, offload: str | None, memory: str | int | None
) -> None:
    """Raise ArgumentError for arguments of `load_pair` that are invalid or contradictory."""
    if placement not in ("auto", *PLACEMENTS):
        names = ", ".join(PLACEMENTS)
        raise ArgumentError(f"placement: found {placement!r}, expected auto, {names}")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ArgumentError(
            "device cuda: PyTorch finds no CUDA device; use --device cpu or a CUDA build of torch"
        )
    links = " or ".join(LINKS)
    if offload not in (None, *LINKS):
        raise ArgumentError(f"offload: found {offload!r}, expected {links}")
    if offload == "host" and not device.startswith("cuda"):
        raise ArgumentError(
            "offload host: the target would be streamed from the host's memory to a CUDA device, "
            "found --device cpu; use --offload disk"
        )
    if memory is not None and offload is None:
        raise ArgumentError(
            f"memory {memory}: found without a link to stream from; add --offload {links}"
        )


def _resolve_placement(placement: str, draft: str | None, device: str) -> str:
    """The placement that "auto" stands for."""
    can_compile = device == "cpu" and draft != INT8
    if placement == "auto":
        return COMPILED if can_compile else FUSED
    if placement == COMPILED and not can_compile:
        raise ArgumentError(
            f"placement {COMPILED}: found device {device} and draft {draft}, expected cpu and a "
            f"draft other than {INT8}; use {FUSED}"
        )
    return placement


def _gguf_file(target: str | None) -> Path | None:
    """The GGUF file that a target is loaded from, if it is one."""
    if target is None:
        return embedded_gguf()
    return Path(target) if target.endswith(".gguf") else None


def _place(model: Any, placement: str, gguf: Path | None = None) -> tuple[dict[str, Any], str]:
    """Let a model's passes run as `placement` says.

    Returns what files record of that, and why the model was not compiled, or "".
    """
    reason = ""
    if placement == COMPILED:
        # decoding on a GPU does not need numba
        from sequoia_plan.runtime.compiled.eagle import compile_eagle
        from sequoia_plan.runtime.compiled.target import compile_target

        is_draft = isinstance(model, HiddenStateDraft)
        reason = compile_eagle(model) if is_draft else compile_target(model, gguf)
        if not reason:
            return {"placement": COMPILED, "weights": compiled_pass(model).formats}, ""
        placement = FUSED
    if placement == FUSED:
        return {"placement": placement, "fused_layers": fuse(model, plain_linear)}, reason
    num_fused = num_fused_layers(model)  # an int8 draft is made of fused layers
    return {"placement": placement} | ({"fused_layers": num_fused} if num_fused else {}), reason


def _place_draft(draft: str | None, model: Any, model_name: str, placement: str) -> dict[str, Any]:
    """Bring a draft's weights into `placement`, and return its metadata. An int8 copy stays."""
    placed, _ = _place(model, RESIDENT if draft == INT8 else placement)
    return model_metadata(model_name, model) | placed


def _context_remarks(target: Any) -> tuple[str, ...]:
    """What a person should know about the target's context: one sentence, or none."""
    config = text_config(target)
    reason = rope_reason(config)
    return (f"target: texts end at {context_length(config)} tokens{reason}",) if reason else ()


def _require_draft(target: str | None, draft: str | None) -> None:
    """Raise ArgumentError if no draft is named for a target other than the embedded one."""
    if draft is None and target is not None:
        raise ArgumentError(
            f"target {target}: name a draft for it with --draft, or use --draft {INT8} (the "
            "embedded draft serves only the embedded target)"
        )


def _make_draft(
    draft: str | None,
    target: Any,
    tokenizer: Any,
    target_name: str,
    device: str,
    dtype: torch.dtype,
    layers: Iterable[Any] | None = None,
    shared_layers: Collection[int] | None = None,
) -> tuple[Any, str, tuple[str, ...]]:
    """The draft that `load_pair` was asked for, its name, and remarks; None for no draft."""
    if draft == INT8:
        return self_draft(target, layers, shared_layers), f"{target_name} {INT8}", ()
    if draft == NO_DRAFT:
        return None, "", ()
    return _load_draft(draft, target, tokenizer, device, dtype)


def _load_draft(
    draft: str | None, target: Any, tokenizer: Any, device: str, dtype: torch.dtype
) -> tuple[Any, str, tuple[str, ...]]:
    """A draft that fits the target, its name, and remarks for the user."""
    name = draft or DEFAULT_DRAFT
    source = str(embedded_draft(name)) if name in EMBEDDED_DRAFTS else name
    if source.endswith(".safetensors"):
        return load_draft(source, target).to(device), Path(source).stem, ()
    if checkpoint := find_checkpoint(source):
        model = load_checkpoint(checkpoint, target, dtype)
        return model, name_of(source), tuple(remarks(checkpoint, model, target))
    model, draft_tokenizer, model_name = load_model(source, device, dtype)
    vocabulary, d2t = shared_vocabulary(target, model, tokenizer, draft_tokenizer)
    if vocabulary_size(model) != vocabulary_size(target):  # the decoder compares no tokenizers
        model.d2t = torch.arange(vocabulary, device=model.device) if d2t is None else d2t
    return model, model_name, ()


def _load_offloaded_pair(
    target: str | None,
    draft: str | None,
    device: str,
    dtype: torch.dtype,
    placement: str,
    link: str,
    memory: str | int | None,
) -> Pair:
    """A pair whose target keeps in memory what fits, and streams the other layers."""
    # decoding without offloading does not need this package
    from sequoia_plan.runtime.offload.memory import as_bytes
    from sequoia_plan.runtime.offload.offloaded_target import OffloadedTarget

    offloaded = OffloadedTarget(target, device, dtype)
    _require_draft(target, draft)
    model, tokenizer = offloaded.model, offloaded.tokenizer
    budget = as_bytes(memory, offloaded.device)
    split = _split_with_copy(offloaded, budget) if draft == INT8 else None
    shared_layers = split.resident_layers if split else None
    copied_layers = (
        offloaded.layer(number)
        for number in range(len(offloaded.layers))
        if number not in (shared_layers or ())
    )
    draft_model, draft_name, draft_remarks = _make_draft(
        draft, model, tokenizer, offloaded.name, device, dtype, copied_layers, shared_layers
    )
    split = split or _split_beside(offloaded, draft_model, budget)
    target_metadata = model_metadata(offloaded.name, model, offloaded.weight_samples())
    fused = placement != RESIDENT
    metadata = {"target": target_metadata | {"placement": FUSED if fused else RESIDENT}}
    num_fused = offloaded.place(split, link, fused)
    metadata["target"] |= split.to_metadata(link, len(offloaded.layers))
    metadata["target"] |= {"fused_layers": num_fused} if fused else {}
    if draft_model is not None:
        share_layers(draft_model, model, shared_layers or ())
        metadata["draft"] = _place_draft(draft, draft_model, draft_name, placement)
    link_placement = f"streamed from {link}"
    remarks = (*_context_remarks(model), *draft_remarks)
    return Pair(model, draft_model, tokenizer, metadata, link_placement, remarks)


def _split_with_copy(offloaded: OffloadedTarget, budget: int) -> MemorySplit | None:
    """What fits into `budget` bytes where the draft has a copy of the streamed layers alone."""
    from sequoia_plan.runtime.offload.memory import cache_bytes, split_memory

    target = offloaded.model
    if not copy_can_share(target):
        return None
    copy_size = max(copy_bytes(layer.parameters(), target.dtype) for layer in offloaded.layers)
    # the norm after the last layer and the rotary embeddings
    outside = [
        tensor
        for name, tensor in (*target.named_parameters(), *target.named_buffers())
        if tensor.ndim < 2 and not name.startswith(offloaded.layers_name)
    ]
    split = split_memory(
        budget,
        offloaded.outside_bytes,
        copy_bytes(outside, torch.float32),
        cache_bytes(target),
        offloaded.layer_sizes(),
        copy_size,
    )
    return split if split.streamed_bytes else None


def _split_beside(offloaded: OffloadedTarget, draft: Any, budget: int) -> MemorySplit:
    """What fits into `budget` bytes beside a draft, which may be None."""
    from sequoia_plan.runtime.offload.memory import cache_bytes, own_bytes, split_memory

    target = offloaded.model
    caches, draft_bytes = cache_bytes(target), 0
    if draft is not None:
        draft_bytes = own_bytes(draft, target)
        if not shares_cache(draft, target):
            caches += cache_bytes(draft)
    return split_memory(
        budget, offloaded.outside_bytes, draft_bytes, caches, offloaded.layer_sizes()
    )
