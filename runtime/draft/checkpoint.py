"""Reads and writes the folders in which people share EAGLE-1, EAGLE-3 and DFlash drafts.

The layouts differ in where settings stand, in tensor names, and in how they number hidden states. A
`Checkpoint` has one form for all: tensor names of our modules, and the layer numbers of
models/aux_hidden_states.py. What has no known meaning is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.artifacts.files import write_atomically
from sequoia_plan.runtime.base.errors import first_line
from sequoia_plan.runtime.draft.dflash_model import DraftBlock
from sequoia_plan.runtime.models.pretrained import local_folder

EAGLE1, EAGLE3, DFLASH = "EAGLE-1", "EAGLE-3", "DFlash"
ALGORITHM_OF_ARCHITECTURE = {
    "LlamaForCausalLMEagle3": EAGLE3,
    "Eagle3LlamaForCausalLM": EAGLE3,
    "EagleLlamaForCausalLM": EAGLE1,
    "DFlashDraftModel": DFLASH,
}
"""Layouts with the layers' settings at the top: those of SpecForge, AngelSlim, EAGLE and z-lab."""
ALGORITHM_OF_SPECULATORS_TYPE = {"eagle3": EAGLE3, "dflash": DFLASH}
"""The layout of the library speculators, by `speculators_model_type`. The layers' settings are in
`transformer_layer_config`."""
DRAFT_WORDS = ("eagle", "dflash", "medusa", "mtp", "speculator", "draftmodel", "hydra", "dspark")
"""An architecture with one of these in its name is a draft, also if it is not supported."""
UNUSED_TENSORS = (
    "t2d",
    "verifier_norm.weight",
    "verifier_lm_head.weight",
    "rotary_emb.inv_freq",
)
"""Tensors that drafting does not need."""
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
LAYER_ID_KEYS = (
    LAYER_IDS,
    f"eagle_config.{LAYER_IDS}",
    "aux_hidden_state_layer_ids",
    "dflash_config.target_layer_ids",
    "target_layer_ids",
    "layer_ids",
    "eagle_config.layer_ids",
    "dflash_config.layer_ids",
)
"""Where a config.json may have layer numbers."""


@dataclass(frozen=True)
class Checkpoint:
    """A draft's folder, with one meaning whatever the layout.

    `d2t` int64 [draft vocabulary].
    """

    folder: str
    algorithm: str
    layer_config: dict[str, Any]
    config: dict[str, Any]
    aux_hidden_state_layers: tuple[int, ...] | None
    weights: dict[str, Tensor]
    d2t: Tensor | None
    target_name: str = ""
    target_architecture: str = ""

    def error(self, message: str) -> SequoiaPlanError:
        """An error about this draft."""
        return SequoiaPlanError(f"{self.folder}: {message}")


def find_checkpoint(source: str) -> Checkpoint | None:
    """Read the draft in a folder or under a hub ID if it reads hidden states; None otherwise."""
    folder = local_folder(source)
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):  # transformers says what is wrong with it
        return None
    try:
        algorithm = algorithm_of(config, tensor_names(folder), source)
        return read_checkpoint(folder, config, algorithm, source) if algorithm else None
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError) as error:
        raise SequoiaPlanError(
            f"{source}: config.json: has values of other types than a draft's "
            f"({type(error).__name__}: {first_line(error)}); get the draft again"
        ) from error


def algorithm_of(config: Mapping[str, Any], names: Iterable[str], folder: str) -> str | None:
    """The algorithm of the draft in a folder; None for anything that loads as a language model."""
    expected = (
        f"expected one of {', '.join(ALGORITHM_OF_ARCHITECTURE)}, or the layout of speculators "
        f"({', '.join(ALGORITHM_OF_SPECULATORS_TYPE)})"
    )
    speculators_type = config.get("speculators_model_type")
    if speculators_type is not None:
        if speculators_type not in ALGORITHM_OF_SPECULATORS_TYPE:
            raise SequoiaPlanError(
                f"{folder}: found speculators_model_type {speculators_type!r:.60}, which is a "
                f"draft of another kind; {expected}"
            )
        return ALGORITHM_OF_SPECULATORS_TYPE[speculators_type]
    architectures = config.get("architectures") or [""]
    architecture = str(architectures[0] if isinstance(architectures, list) else architectures)
    if architecture in ALGORITHM_OF_ARCHITECTURE:
        return ALGORITHM_OF_ARCHITECTURE[architecture]
    if any(word in architecture.lower() for word in DRAFT_WORDS):
        raise SequoiaPlanError(
            f"{folder}: found the architecture {architecture!r:.60}, which is a draft of another "
            f"kind; {expected}"
        )
    return EAGLE1 if "fc.weight" in names else None


def read_checkpoint(
    folder: Path, config: Mapping[str, Any], algorithm: str, name: str
) -> Checkpoint:
    """Read a draft of `algorithm` from a folder."""
    tensors = _read_tensors(folder)
    weights = {_module_name(tensor_name): tensor for tensor_name, tensor in tensors.items()}
    offsets, t2d = weights.pop("d2t", None), weights.get("t2d")
    for unused in UNUSED_TENSORS:
        weights.pop(unused, None)
    from_speculators = config.get("speculators_model_type") is not None
    if from_speculators:
        layer_config = dict(config.get("transformer_layer_config") or {})
    else:
        layer_config = dict(config)
    if algorithm != DFLASH:
        layer_config = {"model_type": "llama"} | layer_config
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    layers = _aux_hidden_state_layers(config, algorithm, from_speculators, name)
    return Checkpoint(
        name,
        algorithm,
        layer_config,
        dict(config),
        layers,
        weights,
        _d2t_from_offsets(offsets, t2d, name),
        target_name=str(verifier.get("name_or_path") or ""),
        target_architecture=str((verifier.get("architectures") or [""])[0]),
    )


def eagle3_default_layers(num_layers: int) -> tuple[int, ...]:
    """The hidden states of a target that an EAGLE-3 draft reads where its folder does not say.

    SGLang, vLLM and all trainers take these.
    """
    return 2, num_layers // 2, num_layers - 3  # a number k is the output of layer k, from 1


def write_eagle3(
    folder: Path,
    config: Any,
    weights: Mapping[str, Tensor],
    d2t: Tensor,
    norm_before_residual: bool,
    metadata: Mapping[str, Any],
) -> None:
    """Write an EAGLE-3 draft as SpecForge does, a layout that vLLM and SGLang load.

    No layer ids are written, because these two engines count them differently: the draft must read
    `eagle3_default_layers`. `d2t` int64 [draft vocabulary].
    """
    tensors = {
        name.replace("layers.0.", "midlayer.", 1): tensor for name, tensor in weights.items()
    }
    settings = _layer_settings(config) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "draft_vocab_size": d2t.numel(),
        "torch_dtype": str(tensors["fc.weight"].dtype).removeprefix("torch."),
        # readers older than `rope_parameters` look here
        "rope_theta": config.rope_parameters["rope_theta"],
        "target_hidden_size": int(config.hidden_size),
        "norm_before_residual": norm_before_residual,
    }
    _write(folder, settings, tensors, int(config.vocab_size), d2t, metadata)


def write_dflash(
    folder: Path,
    config: Any,
    weights: Mapping[str, Tensor],
    d2t: Tensor,
    aux_hidden_state_layers: tuple[int, ...],
    block: DraftBlock,
    metadata: Mapping[str, Any],
) -> None:
    """Write a DFlash draft as speculators does, whose layout has a head of the draft's own."""
    settings = {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "draft_vocab_size": d2t.numel(),
        "block_size": block.size,
        "mask_token_id": block.mask_token,
        "sample_from_anchor": block.from_root,
        "aux_hidden_state_layer_ids": list(aux_hidden_state_layers),
        "transformer_layer_config": _layer_settings(config) | {"model_type": "qwen3"},
    }
    _write(folder, settings, weights, int(config.vocab_size), d2t, metadata)


def _layer_settings(config: Any) -> dict[str, Any]:
    """The settings that differ from transformers' defaults and say how the layers compute."""
    unused = ("dtype", "transformers_version", "layer_types")
    return {
        name: value
        for name, value in config.to_diff_dict().items()
        if name[0] != "_" and name not in unused
    }


def _write(
    folder: Path,
    settings: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    target_vocabulary: int,
    d2t: Tensor,
    metadata: Mapping[str, Any],
) -> None:
    """Write config.json and model.safetensors.

    Two tensors describe the draft's vocabulary. d2t has offsets: a draft token t is the target's
    token t + d2t[t]. t2d, bool [target vocabulary], marks the tokens that the draft has. `d2t`
    int64 [draft vocabulary].
    """
    t2d = torch.zeros(target_vocabulary, dtype=torch.bool)
    t2d[d2t] = True
    tensors = {name: tensor.detach().contiguous() for name, tensor in weights.items()}
    tensors |= {"d2t": d2t - torch.arange(d2t.numel()), "t2d": t2d}
    header = {"format": "pt", "sequoia_plan": json.dumps(metadata, sort_keys=True)}
    config = json.dumps(settings, indent=2, sort_keys=True) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "model.safetensors", save(tensors, header))
    write_atomically(folder / "config.json", config.encode())


def tensor_names(folder: Path) -> set[str]:
    """Names of the tensors in a folder's *.safetensors, else in its pytorch_model*.bin.

    Files that cannot be read count as empty: loading the model says what is wrong with them.
    """
    names: set[str] = set()
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as opened:
                names |= set(opened.keys())
        except Exception:
            continue
    return names or set(_read_torch_files(folder, names_only=True))


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder's *.safetensors, else of its pytorch_model*.bin, by name."""
    tensors: dict[str, Tensor] = {}
    try:
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    tensors[name] = opened.get_tensor(name)
    except Exception as error:
        raise SequoiaPlanError(
            f"{folder}: its weights cannot be read ({first_line(error)}); get the draft again"
        ) from error
    tensors = tensors or _read_torch_files(folder)
    if not tensors:
        raise SequoiaPlanError(
            f"{folder}: no weights found, expected model.safetensors or pytorch_model.bin"
        )
    return tensors


def _read_torch_files(folder: Path, names_only: bool = False) -> dict[str, Tensor]:
    """Tensors of pytorch_model*.bin."""
    tensors: dict[str, Tensor] = {}
    device = "meta" if names_only else "cpu"
    for file in sorted(folder.glob("pytorch_model*.bin")):
        try:
            tensors |= torch.load(file, map_location=device, weights_only=True)
        except Exception as error:  # pickles fail in many ways
            if not names_only:
                raise SequoiaPlanError(
                    f"{file}: cannot be read ({first_line(error)}); get the draft again"
                ) from error
    return tensors


def _module_name(tensor_name: str) -> str:
    """A tensor's name in our module, from its name in any of the layouts."""
    return tensor_name.removeprefix("model.").replace("midlayer.", "layers.0.", 1)


def _d2t_from_offsets(offsets: Tensor | None, t2d: Tensor | None, folder: str) -> Tensor | None:
    """The target's token for each of the draft's tokens, from the offsets that files store.

    `offsets` int [draft vocabulary]; `t2d` bool [target vocabulary]; returns int64 [draft
    vocabulary].
    """
    if offsets is None:
        return None
    if offsets.ndim != 1 or offsets.is_floating_point():
        raise SequoiaPlanError(
            f"{folder}: d2t is {tuple(offsets.shape)} of {offsets.dtype}, expected one whole "
            "number for each token of the draft"
        )
    d2t = torch.arange(offsets.numel()) + offsets.long()
    if d2t.numel() and (int(d2t.min()) < 0 or d2t.unique().numel() != d2t.numel()):
        raise SequoiaPlanError(
            f"{folder}: d2t does not name each target token at most once; expected offsets: target "
            "token = draft token + d2t[draft token]"
        )
    if t2d is not None:
        marked_tokens = set(t2d.nonzero().flatten().tolist())
        if int(d2t.max()) >= t2d.numel() or set(d2t.tolist()) != marked_tokens:
            raise SequoiaPlanError(
                f"{folder}: d2t names other tokens than t2d marks; one of them was not filled, get "
                "the draft again"
            )
    return d2t


def _aux_hidden_state_layers(
    config: Mapping[str, Any], algorithm: str, from_speculators: bool, folder: str
) -> tuple[int, ...] | None:
    """The hidden states that a draft reads, in our numbers; None if its config.json names none."""
    if algorithm == EAGLE1:
        return None
    layer_ids = _layer_ids_by_key(config)
    if not layer_ids:
        return None
    shift = 0 if from_speculators else 1  # what makes our number of a number in the file
    if algorithm == EAGLE3:
        expected_key = LAYER_IDS if from_speculators else f"eagle_config.{LAYER_IDS}"
    elif from_speculators:
        expected_key = "aux_hidden_state_layer_ids"
    else:
        expected_key = "dflash_config.target_layer_ids"
    for key, ids in layer_ids.items():
        if key != expected_key:
            raise SequoiaPlanError(
                f"{folder}: found layer ids as {key}, whose numbers no known trainer of this "
                f"layout writes; expected {expected_key}"
            )
        if (
            not isinstance(ids, list)
            or not ids
            or not all(_is_layer(layer_id, shift) for layer_id in ids)
        ):
            raise SequoiaPlanError(
                f"{folder}: {key}: found {ids!r:.60}, expected a list of layer numbers"
            )
        if len(set(ids)) < len(ids):
            raise SequoiaPlanError(f"{folder}: {key}: found {ids!r:.60}, expected each layer once")
    return tuple(layer_id + shift for layer_id in layer_ids[expected_key])


def _layer_ids_by_key(config: Mapping[str, Any]) -> dict[str, Any]:
    """Everything in config.json that may be layer numbers, by its key, as `section.key`."""
    layer_ids = {}
    for path in LAYER_ID_KEYS:
        section_name, _, key = path.rpartition(".")
        section = config.get(section_name) if section_name else config
        if isinstance(section, Mapping) and section.get(key) is not None:
            layer_ids[path] = section[key]
    return layer_ids


def _is_layer(value: Any, shift: int) -> bool:
    """Is `value` a number that is a layer once `shift` is added to it?"""
    return isinstance(value, int) and not isinstance(value, bool) and value + shift >= 0
