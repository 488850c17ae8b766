"""Loading a target, a draft that fits it, and their tokenizer."""

import importlib.util
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from sequoia_plan.artifacts import ArgumentError, SequoiaPlanError
from sequoia_plan.artifacts.prompts import BUILT_IN, load
from sequoia_plan.runtime.base.sampling import not_followed
from sequoia_plan.runtime.draft.checkpoint import find_checkpoint
from sequoia_plan.runtime.draft.draft_file import load_draft, save_as_folder
from sequoia_plan.runtime.draft.from_checkpoint import length_remarks, load_checkpoint
from sequoia_plan.runtime.draft.hidden_state_draft import HiddenStateDraft
from sequoia_plan.runtime.draft.mtp import MTP, load_mtp
from sequoia_plan.runtime.draft.self_draft import INT8, self_draft, share_layers
from sequoia_plan.runtime.generation import end_tokens
from sequoia_plan.runtime.models.architecture import context_length, rope_reason, text_config
from sequoia_plan.runtime.models.compiled_passes import CAN_COMPILE, compiled_pass, passes
from sequoia_plan.runtime.models.dtype import resolve_dtype
from sequoia_plan.runtime.models.fuse import fuse, num_fused_layers
from sequoia_plan.runtime.models.gguf import embedded_gguf
from sequoia_plan.runtime.models.metadata import model_metadata
from sequoia_plan.runtime.models.pretrained import load_model, name_of
from sequoia_plan.runtime.models.vocabulary import shared_vocabulary, vocabulary_size

RESIDENT, FUSED, COMPILED = "resident", "fused", "compiled"
"""How passes run: by the modules that transformers loads; by fused layers, where those compute the
same; or on a CPU as one compiled function, with the weights packed for it (`runtime.backends.packed`)."""
PLACEMENTS = (RESIDENT, FUSED, COMPILED)
LINKS = ("host", "disk")
"""Where streamed layers come from: the host's memory, to a CUDA device, or a file."""

DEFAULT_DRAFT, LANGUAGE_MODEL = "smollm2-135m-eagle3", "smollm2-135m-draft"
EMBEDDED_DRAFTS = (DEFAULT_DRAFT, LANGUAGE_MODEL)
"""Drafts of the embedded target: an EAGLE-3 draft, and a language model of two layers."""
NO_DRAFT = "none"
"""As a draft's name: decode with trees whose spine is looked up, and that draft nothing."""
WEIGHTS_PACKAGE = "sequoia-plan-drafts"
ROUNDING_TEXTS = 8
"""Built-in prompts on which the cost of `bits` is measured."""


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
    bits: int | None = None,
) -> Pair:
    """Load a target and a draft that share a vocabulary.

    Args:
        target: folder, hub ID or .gguf file; None for the embedded SmolLM2-135M-Instruct.
        draft: the same; or a folder or hub ID of an EAGLE or DFlash draft (see `draft.checkpoint`);
            or a draft .safetensors file made for the target; or "int8" for a copy of the target in
            8 bits (see `self_draft`; a folder of that name is "./int8"); or "mtp" for the head that
            its checkpoint has for this (see `draft.mtp`); or "none" for no draft;
            or a name in `EMBEDDED_DRAFTS`. None for `DEFAULT_DRAFT`.
        device: "cpu" or "cuda".
        dtype: "float32", "bfloat16", "float16", or "auto": bfloat16 where the processor computes in
            it, else float32.
        placement: one of `PLACEMENTS`, or "auto": compiled on a CPU, else fused. A model that
            cannot be compiled, is offloaded, or shares its cache with an int8 draft, is fused. With
            dtype "auto", a GGUF file's matrices keep their own bits, else weights are in `dtype`.
        offload: one of `LINKS`: layers of the target that do not fit into `memory` are streamed
            from there in every pass.
        memory: what the target's weights, both KV caches and the draft may take on the device, as
            "300MB", "24GB" or bytes; None for what is free. See `runtime.offload.memory`.
        bits: 8 or 4: the target's matrices are rounded to so many bits, in groups of 32 inputs (the
            output head to 8), and a remark says what that costs. The target is then this rounded
            model. Only for a target that is compiled, and is not a GGUF file in its own bits.

    Raises:
        SequoiaPlanError: if a model cannot be found or loaded, the vocabularies differ, or memory
            is short.
    """
    _check_arguments(target, draft, device, offload, memory)
    torch_dtype = resolve_dtype(dtype, device)
    placement = _resolve_placement(placement, draft, device)
    gguf = _gguf_file(target) if dtype == "auto" else None
    if bits and (bits not in (8, 4) or gguf or offload or placement != COMPILED):
        raise ArgumentError(
            f"bits: found {bits} for {gguf or placement}, expected 8 or 4 for a target that is "
            'compiled on a CPU; a GGUF file has bits of its own, unless dtype is not "auto"'
        )
    if offload:
        pair = _load_offloaded_pair(target, draft, device, torch_dtype, placement, offload, memory)
        passes[pair.target] = None
    else:
        model, tokenizer, name = load_model(target, device, torch_dtype)
        metadata = {"target": {"name": name}}
        pair = Pair(model, None, tokenizer, metadata, placement, context_remarks(model))
        pair = add_draft(pair, draft)
        # afterwards, because the draft may be a copy of it
        reason = _place(pair, "target", placement, gguf, bits)
        if reason and bits:
            raise SequoiaPlanError(f"bits {bits}: the target cannot be compiled: {reason}")
        if reason:
            remark = f"target: PyTorch runs it, its pass is not compiled: {reason}"
            pair = replace(pair, placement=FUSED, remarks=(*pair.remarks, remark))
        if bits:
            pair = replace(pair, remarks=(*pair.remarks, _cost_of_rounding(pair, bits)))
    if pair.draft is not None:
        _place(pair, "draft", RESIDENT if draft == INT8 else placement)
    return pair


def with_draft(pair: Pair, draft: str) -> Pair:
    """The same target with another draft, as transformers loads it."""
    pair = add_draft(pair, draft)
    _place(pair, "draft", RESIDENT)
    return pair


def add_draft(
    pair: Pair,
    draft: str | None,
    load_layer: Callable[[int], Any] | None = None,
    shared_layers: Collection[int] | None = None,
) -> Pair:
    """Load the draft of a pair, which is still to be placed; the rest is for `self_draft`."""
    if draft == NO_DRAFT:
        return pair
    remarks: tuple[str, ...] = ()
    if draft == INT8:
        model = self_draft(pair.target, load_layer, shared_layers)
        name = f"{pair.metadata['target']['name']} {INT8}"
    else:
        model, name, remarks = _load_draft(draft or DEFAULT_DRAFT, pair.target, pair.tokenizer)
    metadata = pair.metadata | {"draft": {"name": name}}
    return replace(pair, draft=model, metadata=metadata, remarks=(*pair.remarks, *remarks))


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
    target: str | None,
    draft: str | None,
    device: str,
    offload: str | None,
    memory: str | int | None,
) -> None:
    """Raise ArgumentError for arguments of `load_pair` that are invalid or contradictory."""
    links = " or ".join(LINKS)
    if draft is None and target is not None:
        raise ArgumentError(
            f"target {target}: name a draft for it with --draft, or use --draft {INT8} (the "
            "embedded draft serves only the embedded target)"
        )
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ArgumentError(
            "device cuda: PyTorch finds no CUDA device; use --device cpu or a CUDA build of torch"
        )
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
    """One of `PLACEMENTS`; ArgumentError for any other, and where passes cannot be compiled."""
    can_compile = CAN_COMPILE and device == "cpu" and draft != INT8
    if placement == "auto":
        return COMPILED if can_compile else FUSED
    if placement not in PLACEMENTS:
        names = ", ".join(PLACEMENTS)
        raise ArgumentError(f"placement: found {placement!r}, expected auto, {names}")
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


def _cost_of_rounding(pair: Pair, bits: int) -> str:
    """A sentence on what rounding the target costs on the first built-in prompts."""
    texts = [prompt.text for prompt in load(BUILT_IN)[:ROUNDING_TEXTS]]
    tokens = [torch.tensor(pair.tokenizer(str(text))["input_ids"]) for text in texts]
    divergence, agreement = compiled_pass(pair.target).cost_of_rounding(pair.target, tokens)
    return (
        f"target: rounded to {bits} bits: a mean KL divergence of {divergence:.2g} a token, and "
        f"the same most probable token at {agreement:.1%} of {sum(map(len, tokens))} places of "
        "the built-in prompts"
    )


def _place(
    pair: Pair, role: str, placement: str, gguf: Path | None = None, bits: int | None = None
) -> str:
    """Let a model's passes run as `placement` says, and write its metadata.

    Returns why the model was not compiled, or "".
    """
    model, metadata = getattr(pair, role), pair.metadata[role]
    metadata |= model_metadata(metadata["name"], model) | {"placement": placement}
    reason, passes[model] = "", None
    if placement == COMPILED:
        # decoding on a GPU does not need numba
        from sequoia_plan.runtime.backends.packed.eagle import compile_eagle
        from sequoia_plan.runtime.backends.packed.target import compile_target

        is_draft = isinstance(model, HiddenStateDraft)
        reason = compile_eagle(model) if is_draft else compile_target(model, gguf, bits)
        if not reason:
            metadata["weights"] = compiled_pass(model).formats
            return ""
        metadata["placement"] = FUSED
    if placement != RESIDENT:
        metadata["fused_layers"] = fuse(model)
    elif num_fused := num_fused_layers(model):  # an int8 draft is made of fused layers
        metadata["fused_layers"] = num_fused
    return reason


def context_remarks(target: Any) -> tuple[str, ...]:
    """What a person should know about the target's configurations, a sentence each."""
    config, remarks = text_config(target), []
    if reason := rope_reason(config):
        remarks.append(f"target: texts end at {context_length(config)} tokens{reason}")
    for name in not_followed(target.generation_config):
        value = getattr(target.generation_config, name)
        remarks.append(
            f"target: its generation config has {name} {value!r:.60}, which is left out in all "
            "methods"
        )
    return tuple(remarks)


def _load_draft(draft: str, target: Any, tokenizer: Any) -> tuple[Any, str, tuple[str, ...]]:
    """A draft that fits the target, its name, and remarks for the user."""
    if draft == MTP:
        return load_mtp(target), MTP, ()
    source = str(embedded_draft(draft)) if draft in EMBEDDED_DRAFTS else draft
    if source.endswith(".safetensors"):
        return load_draft(source, target), Path(source).stem, ()
    if checkpoint := find_checkpoint(source):
        model = load_checkpoint(checkpoint, target, target.dtype)
        return model, name_of(source), length_remarks(checkpoint, model, target)
    model, draft_tokenizer, name = load_model(source, str(target.device), target.dtype)
    vocabulary, d2t = shared_vocabulary(target, model, tokenizer, draft_tokenizer)
    if vocabulary_size(model) != vocabulary_size(target):  # the decoder compares no tokenizers
        model.d2t = torch.arange(vocabulary, device=model.device) if d2t is None else d2t
    return model, name, ()


def _load_offloaded_pair(
    target: str | None,
    draft: str | None,
    device: str,
    dtype: torch.dtype,
    placement: str,
    link: str,
    memory: str | int | None,
) -> Pair:
    """Load the pair; the draft is not placed yet. Arguments: `load_pair`."""
    # decoding without offloading does not need these
    from sequoia_plan.runtime.offload.memory import as_bytes
    from sequoia_plan.runtime.offload.offloaded_target import OffloadedTarget
    from sequoia_plan.runtime.offload_split import split_beside, split_with_copy

    offloaded = OffloadedTarget(target, device, dtype)
    model, num_layers = offloaded.model, len(offloaded.layers)
    budget = as_bytes(memory, offloaded.device)
    split = split_with_copy(offloaded, budget) if draft == INT8 else None
    shared_layers = split.resident_layers if split else None
    metadata = {"target": model_metadata(offloaded.name, model, offloaded.weight_samples())}
    remarks = context_remarks(model)
    pair = Pair(model, None, offloaded.tokenizer, metadata, f"streamed from {link}", remarks)
    pair = add_draft(pair, draft, offloaded.layer, shared_layers)
    split = split or split_beside(offloaded, pair.draft, budget, link)
    is_fused = placement != RESIDENT
    num_fused = offloaded.place(split, link, is_fused)
    metadata["target"].update(split.to_metadata(link, num_layers))
    if is_fused:
        metadata["target"]["fused_layers"] = num_fused
    share_layers(pair.draft, model, shared_layers or ())
    return pair
