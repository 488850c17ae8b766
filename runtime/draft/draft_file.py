"""Small drafts as one file: a language model in 8 bits that borrows the target's embeddings."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from sequoia_plan.artifacts import ArgumentError, SequoiaPlanError
from sequoia_plan.artifacts.files import write_atomically
from sequoia_plan.models.layers.int8 import rows_in_8_bits
from sequoia_plan.models.loaded_model import LoadedModel
from sequoia_plan.models.vocabulary import check_d2t
from sequoia_plan.runtime.draft.checkpoint import errors_of, load_weights

FORMAT, VERSION = "sequoia-plan-draft", 1
METADATA_KEY = "sequoia_plan"
D2T_KEY = "covered_tokens"
"""The tensor int32 [draft vocabulary] that holds `d2t`: token numbers, not offsets."""
EMBEDDINGS_KEY = "model.embed_tokens.weight"
NUM_UNLIKELY_ROWS = 4
"""`unlikely_row` is the mean of so many rows of the head."""
SAMPLE_TEXTS, SAMPLE_TEXT_TOKENS = 32, 64
"""`unlikely_row` ranks rows by their logits over so many texts, of so many tokens each."""


def build_draft(config: LlamaConfig, embeddings: nn.Embedding, d2t: Tensor) -> LlamaForCausalLM:
    """A draft, uninitialised but for the target's embeddings; `d2t` int64 [draft vocabulary]."""
    device, dtype = embeddings.weight.device, embeddings.weight.dtype
    with torch.device("meta"):
        draft = LlamaForCausalLM(config)
    draft.to_empty(device=device)
    draft.to(dtype)
    draft.model.rotary_emb = type(draft.model.rotary_emb)(config).to(device)  # to_empty emptied it
    draft.model.embed_tokens = embeddings
    draft.lm_head = nn.Linear(
        config.hidden_size, d2t.numel(), bias=False, device=device, dtype=dtype
    )
    draft.register_buffer("d2t", d2t.to(device), persistent=False)
    return draft


def save_draft(draft: LlamaForCausalLM, path: str | Path, metadata: dict[str, object]) -> None:
    """Write a draft of `build_draft`, in 8 bits; `metadata` (JSON) says how it was made."""
    tensors = {D2T_KEY: draft.d2t.to(torch.int32)}
    for name, weight in draft.state_dict().items():
        if name == EMBEDDINGS_KEY:
            continue
        if weight.ndim == 2:
            tensors[name], tensors[f"{name}.scale"] = rows_in_8_bits(weight)
        else:
            tensors[name] = weight.float()
    unused = ("transformers_version", "_name_or_path", "dtype")
    config = {
        name: value for name, value in draft.config.to_diff_dict().items() if name not in unused
    }
    header = {"format": FORMAT, "version": VERSION, "config": config, "facts": metadata}
    write_atomically(path, save(tensors, {METADATA_KEY: json.dumps(header, sort_keys=True)}))


def save_as_folder(
    draft: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, folder: str | Path
) -> None:
    """Write a draft of `build_draft` as transformers writes models, for other engines.

    The folder is larger than the file by embeddings of its own and by a head over the target's
    whole vocabulary. Tokens that the draft lacks share one row of it, `unlikely_row`.
    """
    if not isinstance(draft, LlamaForCausalLM) or "d2t" not in dict(draft.named_buffers()):
        raise ArgumentError(
            f"draft: found a {type(draft).__name__} that is not from a draft .safetensors file, "
            "expected one that is; give other engines the folder that it was loaded from, or the "
            "target that an int8 draft is a copy of"
        )
    weights = draft.state_dict()
    head = unlikely_row(draft).repeat(len(weights[EMBEDDINGS_KEY]), 1)
    head[draft.d2t] = weights["lm_head.weight"]
    config = LlamaConfig(**draft.config.to_dict() | {"tie_word_embeddings": False})
    model = LlamaForCausalLM(config).to(draft.dtype)
    model.load_state_dict(weights | {"lm_head.weight": head})
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def unlikely_row(draft: LlamaForCausalLM) -> Tensor:
    """A head's row for tokens that the draft lacks, where a head must have rows for all tokens.

    The mean of the rows that are least likely on average, so it is almost never drawn. The draft's
    own tokens, in their order, serve as text. float [width].
    """
    num_texts = min(draft.d2t.numel() // SAMPLE_TEXT_TOKENS, SAMPLE_TEXTS)
    sample = draft.d2t[: num_texts * SAMPLE_TEXT_TOKENS]
    texts = sample.reshape(-1, SAMPLE_TEXT_TOKENS) if num_texts else draft.d2t[None]
    mean_logits = draft(texts).logits.flatten(0, 1).float().mean(0)
    return draft.lm_head.weight[mean_logits.argsort()[:NUM_UNLIKELY_ROWS]].mean(0)


def load_draft(path: str | Path, target: LoadedModel) -> LlamaForCausalLM:
    """Read a draft made for `target`, in its dtype and on its device.

    Matrices are int8 in the file, with one scale for each row; they are multiplied out here. The
    input embeddings are the target's.
    """
    settings, tensors = _read(path)
    with errors_of(path):
        return _load(settings, tensors, target)


def _load(
    settings: dict[str, Any], tensors: dict[str, Tensor], target: LoadedModel
) -> LlamaForCausalLM:
    """The draft with these settings of a LlamaConfig, and these tensors by name."""
    config = LlamaConfig(**settings)
    if target.module is not None:
        embeddings = target.module.get_input_embeddings()
    else:  # a compiled target has packed embeddings; the draft gets a dense copy
        table = target.backend.embed(torch.arange(target.num_embeddings))
        embeddings = nn.Embedding.from_pretrained(table)
    num_layers = len({name.split(".")[2] for name in tensors if name.startswith("model.layers.")})
    num_tokens, width = embeddings.weight.shape
    for name, expected in (
        ("vocab_size", num_tokens),
        ("hidden_size", width),
        ("num_hidden_layers", num_layers),
    ):
        if (value := getattr(config, name)) != expected:
            raise SequoiaPlanError(f"{name}: found {value!r:.60}, expected {expected}")
    d2t = tensors.pop(D2T_KEY, torch.empty(0))
    check_d2t(d2t, config.vocab_size, config.vocab_size)
    draft, weights = build_draft(config, embeddings, d2t.long()), dict(tensors)
    for name, tensor in tensors.items():
        if tensor.dtype == torch.int8:
            scale = weights.pop(f"{name}.scale", None)
            if scale is None or scale.shape != tensor.shape[:1] or scale.dtype != torch.float32:
                raise SequoiaPlanError(
                    f"{name}.scale: expected float32, one for each row of {name}"
                )
            weights[name] = tensor.float() * scale[:, None]
    load_weights(draft, weights | {EMBEDDINGS_KEY: embeddings.weight}, embeddings.weight)
    return draft.eval()


def _read(path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The settings of the model, and the tensors, of a draft file."""
    if not Path(path).is_file():
        raise SequoiaPlanError(f"{path}: no such file; expected a draft written by sequoia-plan")
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get(METADATA_KEY, "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise SequoiaPlanError(f"{path}: not a readable safetensors file ({error})") from error
    header = header if isinstance(header, dict) else {}
    is_draft = repr([header.get("format"), header.get("version")]) == repr([FORMAT, VERSION])
    if not is_draft or not isinstance(header.get("config"), dict):
        raise SequoiaPlanError(
            f"{path}: not a draft (expected safetensors of format {FORMAT}, version {VERSION}); "
            "give --draft a folder for other models"
        )
    return header["config"], tensors
