"""Small drafts as one file: 8-bit weights that share the target's embeddings and cover part of its vocabulary.

A draft is a Llama of a few layers. Its input embeddings are the target's (nothing to ship), its output head has rows
for `covered_tokens` only (most of a small draft's time is its head). Matrices are stored as int8 with one float32 scale
a row, and decoded with in the target's dtype.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from sequoia_plan.artifacts import ArgumentError, SequoiaPlanError
from sequoia_plan.artifacts.files import write_atomically
from sequoia_plan.runtime.models.int8 import rows_in_8_bits

FORMAT, VERSION = "sequoia-plan-draft", 1
METADATA_KEY = "sequoia_plan"
ROWS, ROW_TEXT, ROW_TEXTS = 4, 64, 32
"""`uncovered_row`: of how many rows it is the mean, and how many texts of how many tokens tell which."""


def build_draft(config: LlamaConfig, embeddings: nn.Embedding, covered_tokens: Tensor) -> LlamaForCausalLM:
    """A draft with fresh layers over the target's embeddings and a head for `covered_tokens` (int64 [draft vocabulary])."""
    with torch.device("meta"):
        draft = LlamaForCausalLM(config)
    draft.to_empty(device=embeddings.weight.device)
    draft.to(embeddings.weight.dtype)
    draft.model.rotary_emb = type(draft.model.rotary_emb)(config).to(embeddings.weight.device)
    draft.model.embed_tokens = embeddings
    draft.lm_head = nn.Linear(config.hidden_size, covered_tokens.numel(), bias=False, device=embeddings.weight.device, dtype=embeddings.weight.dtype)
    draft.register_buffer("covered_tokens", covered_tokens.to(embeddings.weight.device), persistent=False)
    return draft


def save_draft(draft: LlamaForCausalLM, path: str | Path, facts: dict[str, Any]) -> None:
    """Write a draft that `build_draft` made; `facts` (JSON) say how it was made."""
    tensors: dict[str, Tensor] = {"covered_tokens": draft.covered_tokens.to(torch.int32)}
    for name, value in draft.state_dict().items():
        if name == "model.embed_tokens.weight":
            continue
        if value.ndim == 2:
            tensors[name], tensors[f"{name}.scale"] = rows_in_8_bits(value)
        else:
            tensors[name] = value.float()
    config = {k: v for k, v in draft.config.to_diff_dict().items() if k not in ("transformers_version", "_name_or_path", "dtype")}
    header = {"format": FORMAT, "version": VERSION, "config": config, "facts": facts}
    write_atomically(path, save(tensors, {METADATA_KEY: json.dumps(header, sort_keys=True)}))


def save_as_folder(draft: LlamaForCausalLM, tokenizer: Any, folder: str | Path) -> None:
    """Write a draft that `build_draft` made as transformers writes models, for engines that know no draft files.

    The folder has embeddings of its own, and a head over the target's whole vocabulary. It is larger than the file by both. Tokens
    that the draft does not cover share one row, see `uncovered_row`.

    Raises:
        SequoiaPlanError: if it is another draft, or its layers were repacked, and its weights are no longer there.
    """
    if not isinstance(draft, LlamaForCausalLM) or "covered_tokens" not in dict(draft.named_buffers()):
        raise ArgumentError(
            f"draft: found a {type(draft).__name__} that is not from a draft .safetensors file, expected one that is; give other engines the folder that "
            "it was loaded from, or the target that an int8 draft is a copy of"
        )
    weights = draft.state_dict()
    if "lm_head.weight" not in weights:
        raise SequoiaPlanError("draft: its linear layers are repacked for this processor; load it with placement='resident' to write it")
    head = uncovered_row(draft).repeat(len(weights["model.embed_tokens.weight"]), 1)
    head[draft.covered_tokens] = weights["lm_head.weight"]
    whole = LlamaForCausalLM(LlamaConfig(**draft.config.to_dict() | {"tie_word_embeddings": False})).to(draft.dtype)
    whole.load_state_dict(weights | {"lm_head.weight": head})
    whole.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def uncovered_row(draft: LlamaForCausalLM) -> Tensor:
    """The head's row for tokens that a draft does not cover, [hidden], where a head must have one for every token.

    It is the mean of the covered rows whose logits are lowest. A mean of rows gives the mean of their logits, so it never exceeds the
    highest covered logit: a greedy draft never proposes an uncovered token. That the rows are those of unlikely tokens keeps all
    uncovered tokens together improbable, too. A row of zeros does neither: its logit is 0, and covered ones may all be lower.
    """
    tokens = draft.covered_tokens[: draft.covered_tokens.numel() // ROW_TEXT * ROW_TEXT][: ROW_TEXTS * ROW_TEXT]
    texts = tokens.reshape(-1, ROW_TEXT) if tokens.numel() else draft.covered_tokens[None]
    lowest = draft(texts).logits.flatten(0, 1).float().mean(0).argsort()[:ROWS]
    return draft.lm_head.weight[lowest].mean(0)


def load_draft(path: str | Path, target: Any) -> LlamaForCausalLM:
    """Read a draft made for `target`, in its dtype and on its device.

    Raises:
        SequoiaPlanError: if the file is not a draft, is damaged, or was made for a target of another shape.
    """
    header, tensors = _read(path)
    embeddings = target.get_input_embeddings()
    config = LlamaConfig(**header["config"])
    if (config.vocab_size, config.hidden_size) != tuple(embeddings.weight.shape):
        raise SequoiaPlanError(
            f"{path}: a draft for embeddings of {config.vocab_size} x {config.hidden_size}, the target's are "
            f"{' x '.join(map(str, embeddings.weight.shape))}; use a draft made for this target"
        )
    draft = build_draft(config, embeddings, tensors.pop("covered_tokens").long())
    weights = {
        name: value.float() * tensors[f"{name}.scale"][:, None] if value.dtype == torch.int8 else value
        for name, value in tensors.items()
        if not name.endswith(".scale")
    }
    missing, unexpected = draft.load_state_dict(weights, strict=False)
    if unexpected or missing != ["model.embed_tokens.weight"]:
        raise SequoiaPlanError(f"{path}: tensors do not fit its config ({[*unexpected, *missing][0]}); get the draft again")
    return draft.eval()


def _read(path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if not Path(path).is_file():
        raise SequoiaPlanError(f"{path}: no such file; expected a draft written by sequoia-plan")
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get(METADATA_KEY, "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise SequoiaPlanError(f"{path}: not a readable safetensors file ({error})") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise SequoiaPlanError(f"{path}: not a draft (expected safetensors of format {FORMAT}); give --draft a folder for other models")
    if header.get("version") != VERSION:
        raise SequoiaPlanError(f"{path}: draft version {header.get('version')!r}, expected {VERSION}")
    return header, tensors
