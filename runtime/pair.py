"""Loading a target, a draft that fits it, and their tokenizer."""

import importlib.util
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from sequoia_plan.artifacts import ArgumentError, SequoiaPlanError
from sequoia_plan.artifacts.processor import usable_cores
from sequoia_plan.artifacts.prompts import BUILT_IN, load
from sequoia_plan.models import backends
from sequoia_plan.models.backends import COMPILED, FUSED, PLACEMENTS, RESIDENT
from sequoia_plan.models.base.architecture import context_length, rope_reason
from sequoia_plan.models.base.kernel_launch import HAS_NUMBA
from sequoia_plan.models.base.loading import Loading, OnBytes
from sequoia_plan.models.files.gguf import is_gguf
from sequoia_plan.models.files.pretrained import find_model, name_of
from sequoia_plan.models.loaded_model import NOT_CUT, LoadedModel
from sequoia_plan.models.vocabulary import common_tokens, shared_vocabulary
from sequoia_plan.runtime.draft.checkpoint import find_checkpoint
from sequoia_plan.runtime.draft.draft_file import load_draft, save_as_folder
from sequoia_plan.runtime.draft.from_checkpoint import d2t_of, length_remarks, load_checkpoint
from sequoia_plan.runtime.draft.mtp import MTP, load_mtp
from sequoia_plan.runtime.generation import end_tokens
from sequoia_plan.runtime.sampling.sampling import not_followed
from sequoia_plan.runtime.text import text_ids

LINKS = ("host", "disk")
"""Where streamed layers come from: the host's memory, to a CUDA device, or a file."""

DEFAULT_DRAFT, LANGUAGE_MODEL = "smollm2-135m-eagle3", "smollm2-135m-draft"
CODER_DRAFT = "qwen2.5-coder-1.5b-eagle3"
EMBEDDED_DRAFTS = (DEFAULT_DRAFT, LANGUAGE_MODEL, CODER_DRAFT)
"""Of the embedded target an EAGLE-3 draft and a language model of two layers, and an EAGLE-3 draft
of Qwen2.5-Coder-1.5B-Instruct."""
DRAFT_OF_FILE = {"cc324af070c2ecbfd324a30884d2f951": CODER_DRAFT}
"""By the begin of the SHA-256 of a target's file: Qwen's own in Q4_K_M."""
INT8 = "int8"
"""As a draft's name: the target's own files once more, rounded to 8 bits."""
NO_DRAFT = "none"
"""As a draft's name: decode with trees whose spine is looked up, and that draft nothing."""
NAME_A_DRAFT = (
    f"name a draft for it with --draft, or use --draft {INT8} (the embedded drafts serve other "
    "targets)"
)
WEIGHTS_PACKAGE = "sequoia-plan-drafts"
ROUNDING_TEXTS = 8
"""Built-in prompts on which the cost of `bits` is measured."""


@dataclass(frozen=True)
class Pair:
    """A target, its draft and their tokenizer.

    Args:
        target: a `LoadedModel`.
        draft: another one, or one that reads the target's hidden states; None if nothing is
            drafted.
        metadata: name, digest, dtype, parameters and placement of both models, as profiles and
            trees record them.
        placement: how the target's passes run: one of `PLACEMENTS`, or "streamed from LINK".
        remarks: what a user should know about the models, a sentence each.
    """

    target: LoadedModel
    draft: Any
    tokenizer: PreTrainedTokenizerBase
    metadata: dict[str, dict[str, Any]] = field(default_factory=dict)
    placement: str = RESIDENT
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
    draft_vocabulary: str | None = None,
    on_bytes: OnBytes = lambda done, total: None,
) -> Pair:
    """Load a target and a draft that share a vocabulary.

    On a CPU, the weights of Llama-like models are packed once, in a file of the cache that is as
    large as they are. Later loads map it into memory, which processes share.

    Args:
        target: folder, hub ID or .gguf file; None for the embedded SmolLM2-135M-Instruct.
        draft: the same; or a folder or hub ID of an EAGLE or DFlash draft (see `draft.checkpoint`);
            or a draft .safetensors file made for the target; or "int8" for a copy of a target that
            is compiled, in 8 bits (a folder of that name is "./int8"); or "mtp" for the head that
            its checkpoint has for this (see `draft.mtp`); or "none" for no draft;
            or a name in `EMBEDDED_DRAFTS`. None for the embedded draft of the target.
        device: "cpu" or "cuda".
        dtype: "float32", "bfloat16", "float16", or "auto": bfloat16 where the processor computes in
            it, else float32.
        placement: one of `PLACEMENTS`, or "auto": compiled on a CPU, else fused. A model that
            cannot be compiled is fused. With dtype "auto", a GGUF file's matrices keep their own
            bits, else weights are in `dtype`.
        offload: one of `LINKS`: layers of the target that do not fit into `memory` are streamed
            from there in every pass.
        memory: what the target's weights, both KV caches and the draft may take on the device, as
            "300MB", "24GB" or bytes; None for what is free. See `models.offload.memory`.
        bits: 8 or 4: the target's matrices are rounded to so many bits, in groups of 32 inputs (the
            output head to 8), and a remark says what that costs. The target is then this rounded
            model. Only for a target that is compiled, and is not a GGUF file in its own bits.
        draft_vocabulary: an EAGLE-3 draft, as `draft` names it: the tokens that it covers are all
            that `draft`, a compiled language model, proposes. The head is a third of a small one.
        on_bytes: called while weights are packed, with the bytes so far and all.

    Raises:
        SequoiaPlanError: if a model cannot be found or loaded, the vocabularies differ, or memory
            is short.
    """
    _check_arguments(target, draft, device, offload, memory)
    how = Loading(_resolve_placement(placement, device), device, dtype, bits, on_bytes)
    if bits and (
        bits not in (8, 4) or offload or how.placement != COMPILED
        or (is_gguf(target) and dtype == "auto")
    ):  # fmt: skip
        raise ArgumentError(
            f"bits: found {bits} for {target or how.placement}, expected 8 or 4 for a target that "
            'is compiled on a CPU; a GGUF file has bits of its own, unless dtype is not "auto"'
        )
    if offload:
        offloaded = backends.OffloadedModel(target, how, offload, memory)
        model, placement = offloaded.model, f"streamed from {offload}"
    else:
        model = backends.load_model(target, how)
        placement = model.metadata()["placement"]
    pair = Pair(model, None, model.tokenizer, {}, placement, _remarks(model))
    pair = add_draft(pair, draft, how, target)
    if draft_vocabulary:
        if not isinstance(pair.draft, LoadedModel):
            raise ArgumentError(f"draft vocabulary {draft_vocabulary}: {NOT_CUT}")
        pair.draft.cut_vocabulary(_tokens_of(draft_vocabulary, pair.target))
        tokens = f"{pair.draft.vocabulary} tokens of {name_of(draft_vocabulary)}"
        pair.metadata["draft"]["vocabulary"] = tokens
    if offload:
        offloaded.load_beside(pair.draft)
    elif bits:
        pair = replace(pair, remarks=(*pair.remarks, _cost_of_rounding(pair, target, how)))
    pair.metadata["target"] = pair.target.metadata()
    if pair.draft is not None:
        pair.metadata["draft"] |= pair.draft.metadata()
        sizes = [pair.metadata[role].get("parameters", 0) for role in ("target", "draft")]
        if sizes[1] > sizes[0]:
            remark = f"the draft has {sizes[1]:,} parameters, the target {sizes[0]:,}: swap them?"
            pair = replace(pair, remarks=(*pair.remarks, remark))
    return pair


def add_draft(
    pair: Pair, draft: str | None, how: Loading, target_source: str | None = None
) -> Pair:
    """The pair with a draft loaded as `load_pair` describes; its metadata has the draft's name.

    `target_source`: the `target` of `load_pair`, of which "int8" is a copy.
    """
    if draft == NO_DRAFT:
        return pair
    target, remarks = pair.target, pair.remarks
    source = draft or _draft_of(target, target_source)
    source = str(embedded_draft(source)) if source in EMBEDDED_DRAFTS else source
    name = name_of(source)
    model: Any
    if draft == INT8:
        if how.placement != COMPILED or target.module is not None:
            raise ArgumentError(
                f"draft {INT8}: {target.name} is run by PyTorch, expected a target that a CPU's "
                "compiled pass runs from its file; name another draft, or none to look tokens up"
            )
        model = backends.load_model(target_source, replace(how, bits=8))
        name = model.name = f"{target.name} {INT8}"
    elif source.endswith(".safetensors"):
        model = backends.loaded_as(load_draft(source, target), how.placement)
        name = model.name = Path(source).stem
    elif draft == MTP:
        model, name = load_mtp(target), MTP
        remarks += model.run_as(how.placement)
    elif checkpoint := find_checkpoint(source):
        model = load_checkpoint(checkpoint, target, target.dtype)
        remarks += length_remarks(checkpoint, model, target) + model.run_as(how.placement)
    else:
        keeps_bits = how.placement == COMPILED and is_gguf(source)
        dtype = "auto" if keeps_bits else how.dtype  # no text depends on a draft's bits
        model = backends.load_model(source, replace(how, dtype=dtype, bits=None))
        vocabulary, d2t = shared_vocabulary(target, model, common_tokens(target, model))
        # the decoder gets no draft tokenizer to compare, so the tokens in common are noted here
        if model.vocabulary != target.vocabulary:
            model.d2t = torch.arange(vocabulary, device=model.device) if d2t is None else d2t
        remarks += model.remarks
    return replace(
        pair, draft=model, metadata=pair.metadata | {"draft": {"name": name}}, remarks=remarks
    )


def save_model(pair: Pair, role: str, folder: str | Path) -> None:
    """Write a model as a folder that transformers and other engines load, with the tokenizer.

    The pair must have been loaded with placement="resident".
    """
    if role == "draft":
        save_as_folder(getattr(pair.draft, "module", pair.draft), pair.tokenizer, folder)
        return
    pair.target.module.save_pretrained(folder)
    pair.tokenizer.save_pretrained(folder)


def _draft_of(target: LoadedModel, source: str | None) -> str:
    """The name of the embedded draft that was made for a target; ArgumentError without any."""
    metadata = target.metadata() if source else {}
    draft = DRAFT_OF_FILE.get(f"{metadata.get('digest')}{metadata.get('content')}")
    if source and draft is None:
        raise ArgumentError(f"target {source}: {NAME_A_DRAFT}")
    return draft or DEFAULT_DRAFT


def _tokens_of(draft: str, target: LoadedModel) -> Tensor:
    """int64 [n]: the target's tokens that an EAGLE-3 draft covers."""
    checkpoint = find_checkpoint(str(embedded_draft(draft)) if draft in EMBEDDED_DRAFTS else draft)
    d2t = d2t_of(checkpoint, target) if checkpoint else None
    if d2t is None:
        raise ArgumentError(
            f"draft vocabulary {draft}: expected an EAGLE-3 draft that covers a part of its "
            "target's vocabulary (its file has a tensor d2t)"
        )
    return d2t


def embedded_draft(name: str) -> Path:
    """The folder or file of one of `EMBEDDED_DRAFTS`."""
    spec = importlib.util.find_spec(WEIGHTS_PACKAGE.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        raise SequoiaPlanError(
            f"draft {name}: the embedded drafts need the package {WEIGHTS_PACKAGE}, which is not "
            "installed: pip install ./drafts in a clone of sequoia-plan"
        )
    folder = Path(next(iter(spec.submodule_search_locations)))
    return folder / (f"{name}.safetensors" if name == LANGUAGE_MODEL else name)


def _check_arguments(
    target: str | None,
    draft: str | None,
    device: str,
    offload: str | None,
    memory: str | int | None,
) -> None:
    """Raise ArgumentError for arguments of `load_pair` that are invalid or contradictory."""
    links = " or ".join(LINKS)
    if draft is None and target is not None and not is_gguf(target):
        raise ArgumentError(f"target {target}: {NAME_A_DRAFT}")
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


def _resolve_placement(placement: str, device: str) -> str:
    """One of `PLACEMENTS`; ArgumentError for any other, and where passes cannot be compiled."""
    can_compile = HAS_NUMBA and device == "cpu"
    if placement == "auto":
        return COMPILED if can_compile else FUSED
    if placement not in PLACEMENTS:
        names = ", ".join(PLACEMENTS)
        raise ArgumentError(f"placement: found {placement!r}, expected auto, {names}")
    if placement == COMPILED and not can_compile:
        raise ArgumentError(
            f"placement {COMPILED}: found device {device}, expected cpu, with numba installed; use "
            f"{FUSED}"
        )
    return placement


@torch.inference_mode()
def _cost_of_rounding(pair: Pair, target: str | None, how: Loading) -> str:
    """A sentence on what rounding the target costs on the first built-in prompts."""
    exact = find_model(target).module(how.torch_dtype)
    divergences, agreements = [], []
    for prompt in load(BUILT_IN)[:ROUNDING_TEXTS]:
        tokens = torch.tensor(text_ids(pair.tokenizer, str(prompt.text)))
        slots, cache = torch.arange(len(tokens)), pair.target.new_cache(len(tokens))
        logits = pair.target.read_text(cache, tokens, slots, len(tokens)).logits
        rounded = logits.double().log_softmax(-1)
        expected = exact(tokens[None]).logits[0].double().log_softmax(-1)
        divergences.append((expected.exp() * (expected - rounded)).sum(-1))
        agreements.append(expected.argmax(-1) == rounded.argmax(-1))
    agreement = torch.cat(agreements).double()
    return (
        f"target: rounded to {how.bits} bits: a mean KL divergence of "
        f"{float(torch.cat(divergences).mean()):.2g} a token, and the same most probable token at "
        f"{float(agreement.mean()):.1%} of {len(agreement)} places of the built-in prompts"
    )


def _remarks(target: LoadedModel) -> tuple[str, ...]:
    """What a person should know about the target and its settings, a sentence each."""
    config, remarks = target.config, list(target.remarks)
    threads, cores = torch.get_num_threads(), usable_cores()
    if target.device.type == "cpu" and threads > cores:
        remarks.append(
            f"threads: found {threads} (--threads, torch.set_num_threads), expected no more than "
            f"cores that affinity and control groups leave; compiled passes take {cores}"
        )
    if reason := rope_reason(config):
        remarks.append(f"target: texts end at {context_length(config)} tokens{reason}")
    for name in not_followed(target.generation_config):
        value = getattr(target.generation_config, name)
        remarks.append(
            f"target: its generation config has {name} {value!r:.60}, which is left out in all "
            "methods"
        )
    return tuple(remarks)
