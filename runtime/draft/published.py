"""Drafts as people publish them: folders of EAGLE-1, EAGLE-3 and DFlash checkpoints, told apart by their configurations.

Layouts name the same hidden state by different numbers. Here each is brought to the numbers of taps.py, once, or refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.artifacts.files import write_atomically
from sequoia_plan.runtime.draft.block_model import Block
from sequoia_plan.runtime.models.load import first_line, local_folder, model_config

EAGLE1, EAGLE3, DFLASH = "EAGLE-1", "EAGLE-3", "DFlash"
FLAT = {"LlamaForCausalLMEagle3": EAGLE3, "Eagle3LlamaForCausalLM": EAGLE3, "EagleLlamaForCausalLM": EAGLE1, "DFlashDraftModel": DFLASH}
"""By architecture: a configuration whose layers' settings are at its top. SpecForge, AngelSlim, EAGLE itself, z-lab."""
NESTED = {"eagle3": EAGLE3, "dflash": DFLASH}
"""By `speculators_model_type`: the layout of the library speculators."""
LIKE_A_DRAFT = ("eagle", "dflash", "medusa", "mtp", "speculator", "draftmodel", "hydra", "dspark")
NOT_OURS = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight", "rotary_emb.inv_freq")
"""Tensors that drafting does not need."""
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class Checkpoint:
    """A draft's folder, its meaning made plain.

    Args:
        kind: `EAGLE1`, `EAGLE3` or `DFLASH`.
        layers: the configuration of its layers, as transformers' LlamaConfig or Qwen3Config take it.
        settings: what else its configuration says, under the names of the layout.
        taps: the hidden states it reads; None where it leaves that to the engine.
        weights: by their names in our module.
        covered: the target's token for each of its own; None if it has them all.
        made_for: what it calls its target, and the target's architecture; empty where it does not say.
    """

    folder: str
    kind: str
    layers: dict[str, Any]
    settings: dict[str, Any]
    taps: tuple[int, ...] | None
    weights: dict[str, Tensor]
    covered: Tensor | None
    made_for: tuple[str, str] = field(default=("", ""))

    def refuse(self, what: str) -> SequoiaPlanError:
        """An error about this draft."""
        return SequoiaPlanError(f"{self.folder}: {what}")


def find_checkpoint(source: str) -> Checkpoint | None:
    """The draft that reads hidden states in a folder or under a hub ID; None for anything else.

    Raises:
        SequoiaPlanError: if it is such a draft of a kind that is not known, or cannot be read.
    """
    config = model_config(source)
    if config is None:
        return None
    local = Path(source) if Path(source).is_dir() else None
    kind = kind_of(config, tensor_names(local) if local else (), source)
    return read_checkpoint(local or local_folder(source), config, kind, source) if kind else None


def kind_of(config: Mapping[str, Any], names: Iterable[str], folder: str) -> str | None:
    """Which draft a folder holds; None if it holds a language model, or anything that is loaded as one.

    Args:
        config: its config.json.
        names: those of its tensors.

    Raises:
        SequoiaPlanError: if it is a draft of a kind that is not known.
    """
    expected = f"expected one of {', '.join(FLAT)}, or the layout of speculators ({', '.join(NESTED)})"
    nested = config.get("speculators_model_type")
    if nested is not None:
        if nested not in NESTED:
            raise SequoiaPlanError(f"{folder}: found speculators_model_type {nested!r:.60}, which is a draft of another kind; {expected}")
        return NESTED[nested]
    architecture = str((config.get("architectures") or [""])[0])
    if architecture in FLAT:
        return FLAT[architecture]
    if any(word in architecture.lower() for word in LIKE_A_DRAFT):
        raise SequoiaPlanError(f"{folder}: found the architecture {architecture!r:.60}, which is a draft of another kind; {expected}")
    return EAGLE1 if "fc.weight" in names else None


def read_checkpoint(folder: Path, config: Mapping[str, Any], kind: str, name: str) -> Checkpoint:
    """The draft of `kind` in a folder, which errors call `name`.

    Raises:
        SequoiaPlanError: if its weights cannot be read, or a number in its configuration has no known meaning.
    """
    weights = {_our_name(name): value for name, value in _read_weights(folder).items()}
    offsets = weights.pop("d2t", None)
    marked = weights.pop("t2d", None)
    for other in NOT_OURS:
        weights.pop(other, None)
    nested = config.get("speculators_model_type") is not None
    layers = dict(config.get("transformer_layer_config") or {}) if nested else dict(config)
    if kind != DFLASH:
        layers = {"model_type": "llama"} | layers
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    made_for = str(verifier.get("name_or_path") or ""), str((verifier.get("architectures") or [""])[0])
    taps = _taps(config, kind, nested, name)
    return Checkpoint(name, kind, layers, dict(config), taps, weights, _covered(offsets, marked, name), made_for)


def eagle3_taps(layers: int) -> tuple[int, ...]:
    """The hidden states that a draft of EAGLE-3 reads of a target of so many layers where its folder does not say: what both engines and all
    trainers take."""
    return 2, layers // 2, layers - 3


def write_eagle3(folder: Path, config: Any, weights: Mapping[str, Tensor], covered: Tensor, before_residual: bool, facts: Mapping[str, Any]) -> None:
    """Write an EAGLE-3 draft as SpecForge does, a layout for vLLM and SGLang.

    No layer ids are written, because the two engines count them differently. The draft must read `eagle3_taps`.

    Args:
        config: of its layers, a LlamaConfig of the target's vocabulary.
        weights: by their names in our module, without embeddings.
        covered: int64 [draft vocabulary], the target's token for each of the draft's.
        before_residual: as in `Norms`.
        facts: how it was made, for the header of model.safetensors.
    """
    layout = {name.replace("layers.0.", "midlayer.", 1): value for name, value in weights.items()}
    dtype = str(layout["fc.weight"].dtype).removeprefix("torch.")
    settings = _layer_settings(config)
    settings |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "draft_vocab_size": covered.numel(), "torch_dtype": dtype}
    settings |= {"rope_theta": config.rope_parameters["rope_theta"]}  # where readers older than `rope_parameters` look
    settings |= {"target_hidden_size": int(config.hidden_size), "norm_before_residual": before_residual}
    _write(folder, settings, layout, int(config.vocab_size), covered, facts)


def write_dflash(
    folder: Path, config: Any, weights: Mapping[str, Tensor], covered: Tensor, taps: tuple[int, ...], block: Block, facts: Mapping[str, Any]
) -> None:
    """Write a DFlash draft as the library speculators does, whose layout has a head of the draft's own.

    Args:
        config: of its layers, a Qwen3Config of the target's vocabulary.
        taps: the hidden states that it reads.
        block: what a block is.
        others: as for `write_eagle3`.
    """
    settings = {"architectures": ["DFlashDraftModel"], "speculators_model_type": "dflash", "draft_vocab_size": covered.numel()}
    settings |= {"block_size": block.size, "mask_token_id": block.mask, "sample_from_anchor": block.from_root, "aux_hidden_state_layer_ids": list(taps)}
    settings |= {"transformer_layer_config": _layer_settings(config) | {"model_type": "qwen3"}}
    _write(folder, settings, weights, int(config.vocab_size), covered, facts)


def _layer_settings(config: Any) -> dict[str, Any]:
    """What differs from transformers' defaults, without private settings and those that say nothing about how the draft computes."""
    return {name: value for name, value in config.to_diff_dict().items() if name[0] != "_" and name not in ("dtype", "transformers_version", "layer_types")}


def _write(folder: Path, settings: Mapping[str, Any], weights: Mapping[str, Tensor], tokens: int, covered: Tensor, facts: Mapping[str, Any]) -> None:
    """A folder with a draft, and both tables of its vocabulary: d2t, offsets to the target's tokens, and t2d, which of these it has."""
    marked = torch.zeros(tokens, dtype=torch.bool)
    marked[covered] = True
    tensors = {name: value.detach().contiguous() for name, value in weights.items()} | {"d2t": covered - torch.arange(covered.numel()), "t2d": marked}
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "model.safetensors", save(tensors, {"format": "pt", "sequoia_plan": json.dumps(facts, sort_keys=True)}))
    write_atomically(folder / "config.json", (json.dumps(settings, indent=2, sort_keys=True) + "\n").encode())


def tensor_names(folder: Path) -> set[str]:
    """Names of the tensors in a folder's safetensors files, or in the index of a checkpoint that torch saved; none where reading says nothing."""
    found: set[str] = set()
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as opened:
                found |= set(opened.keys())
        except Exception:  # whoever loads it says what is wrong
            continue
    return found or set(_saved_by_torch(folder, mapped=True))


def _read_weights(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    try:
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as opened:
                found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except Exception as error:
        raise SequoiaPlanError(f"{folder}: its weights cannot be read ({first_line(error)}); get the draft again") from error
    found = found or _saved_by_torch(folder)
    if not found:
        raise SequoiaPlanError(f"{folder}: no weights found, expected model.safetensors or pytorch_model.bin")
    return found


def _saved_by_torch(folder: Path, mapped: bool = False) -> dict[str, Tensor]:
    """Tensors of pytorch_model*.bin; `mapped` reads none of their values."""
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("pytorch_model*.bin")):
        try:
            found |= torch.load(file, map_location="meta" if mapped else "cpu", weights_only=True)
        except Exception as error:  # pickles fail in many ways
            if not mapped:
                raise SequoiaPlanError(f"{file}: cannot be read ({first_line(error)}); get the draft again") from error
    return found


def _our_name(name: str) -> str:
    """A tensor's name without what layouts put before it."""
    return name.removeprefix("model.").replace("midlayer.", "layers.0.", 1)


def _covered(offsets: Tensor | None, marked: Tensor | None, folder: str) -> Tensor | None:
    """int64: the target's token for each of the draft's, from what is to be added to the draft's own number."""
    if offsets is None:
        return None
    if offsets.ndim != 1 or offsets.is_floating_point():
        raise SequoiaPlanError(f"{folder}: d2t is {tuple(offsets.shape)} of {offsets.dtype}, expected one whole number for each token of the draft")
    covered = torch.arange(offsets.numel()) + offsets.long()
    if covered.numel() and (int(covered.min()) < 0 or covered.unique().numel() != covered.numel()):
        raise SequoiaPlanError(f"{folder}: d2t does not name each target token at most once; expected offsets: target token = draft token + d2t[draft token]")
    if marked is not None and (int(covered.max()) >= marked.numel() or set(covered.tolist()) != set(marked.nonzero().flatten().tolist())):
        raise SequoiaPlanError(f"{folder}: d2t names other tokens than t2d marks; one of them was not filled, get the draft again")
    return covered


def _taps(config: Mapping[str, Any], kind: str, nested: bool, folder: str) -> tuple[int, ...] | None:
    """The hidden states a draft reads, by our numbers; None if its configuration does not say."""
    eagle, dflash = (config.get(name) or {} for name in ("eagle_config", "dflash_config"))
    places = {
        f"{LAYER_IDS}": (config, LAYER_IDS),
        f"eagle_config.{LAYER_IDS}": (eagle, LAYER_IDS),
        "aux_hidden_state_layer_ids": (config, "aux_hidden_state_layer_ids"),
        "dflash_config.target_layer_ids": (dflash, "target_layer_ids"),
        "target_layer_ids": (config, "target_layer_ids"),
        "layer_ids": (config, "layer_ids"),
        "eagle_config.layer_ids": (eagle, "layer_ids"),
        "dflash_config.layer_ids": (dflash, "layer_ids"),
    }
    found = {name: where[key] for name, (where, key) in places.items() if isinstance(where, Mapping) and where.get(key) is not None}
    if kind == EAGLE1:
        found = {}
    if not found:
        return None
    if (kind, nested) == (EAGLE3, True):
        known, shift = (LAYER_IDS,), 0  # as vLLM counts: the hidden state that layer k, counted from 0, reads
    elif (kind, nested) == (EAGLE3, False):
        known, shift = (f"eagle_config.{LAYER_IDS}",), 1  # as SGLang and both trainers count: what layer k, counted from 0, puts out
    elif nested:
        known, shift = ("aux_hidden_state_layer_ids",), 0
    else:
        known, shift = ("dflash_config.target_layer_ids",), 1
    for name, ids in found.items():
        if name not in known:
            raise SequoiaPlanError(f"{folder}: found layer ids as {name}, whose numbers no known trainer of this layout writes; expected {known[0]}")
        if not isinstance(ids, list) or not ids or any(isinstance(each, bool) or not isinstance(each, int) or each + shift < 0 for each in ids):
            raise SequoiaPlanError(f"{folder}: {name}: found {ids!r:.60}, expected a list of layer numbers")
        if len(set(ids)) < len(ids):
            raise SequoiaPlanError(f"{folder}: {name}: found {ids!r:.60}, expected each layer once")
    return tuple(each + shift for each in found[known[0]])
