"""Reads the folders and GGUF files in which people share EAGLE, DFlash and DSpark drafts.

`from_checkpoint.py` makes drafts of them. What has no known meaning is refused.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.models.base.errors import first_line, one_line
from sequoia_plan.models.files.gguf import GgufSource, is_gguf
from sequoia_plan.models.files.gguf_config import read_config
from sequoia_plan.models.files.gguf_file import read_gguf
from sequoia_plan.models.files.pretrained import downloaded_folder

EAGLE1, EAGLE3 = "EAGLE-1", "EAGLE-3"
DFLASH, DFLASH2, DSPARK = BLOCK_DRAFTS = "DFlash", "DFlash 2", "DSpark"
ALGORITHM_OF_ARCHITECTURE = {
    "LlamaForCausalLMEagle3": EAGLE3,
    "Eagle3LlamaForCausalLM": EAGLE3,
    "EagleLlamaForCausalLM": EAGLE1,
    "DFlashDraftModel": DFLASH,
    "DFlash2DraftModel": DFLASH2,
    "Qwen3DSparkModel": DSPARK,
}
"""Layouts with the layers' settings at the top: of SpecForge, AngelSlim, EAGLE, z-lab, DeepSpec."""
ALGORITHM_OF_SPECULATORS_TYPE = {
    "eagle3": EAGLE3,
    "dflash": DFLASH,
    "dflash2": DFLASH2,
    "dspark": DSPARK,
}
"""The layout of the library speculators, by `speculators_model_type`. The layers' settings are in
`transformer_layer_config`."""
DRAFT_WORDS = ("eagle", "dflash", "medusa", "mtp", "speculator", "draftmodel", "hydra", "dspark")
"""An architecture with one of these in its name is a draft, also if it is not supported."""
UNUSED_TENSORS = (
    "verifier_norm.weight",
    "verifier_lm_head.weight",
    "rotary_emb.inv_freq",
    "confidence_head.proj.weight",
    "confidence_head.proj.bias",
)
GGUF_NAME = "eagle3"
"""llama.cpp's name of the architecture."""
GGUF_SETTINGS = ("norm_before_residual", "norm_before_fc", "target_hidden_size")
GGUF_LAYERS = "target_layers"
"""Numbers of hidden states, from 1; config.json's own are less by one."""


@dataclass(frozen=True)
class Checkpoint:
    """A draft's folder: its config.json, and its weights by the names of our modules."""

    folder: str
    algorithm: str
    config: Mapping[str, Any]
    weights: Mapping[str, Tensor]

    @property
    def from_speculators(self) -> bool:
        """Is the layout that of the library speculators?"""
        return self.config.get("speculators_model_type") is not None


def find_checkpoint(source: str) -> Checkpoint | None:
    """Read the draft in a folder, a GGUF file or under a hub ID; None if it is no such draft."""
    if is_gguf(source):
        if not _is_gguf_draft(source):
            return None
        try:
            return Checkpoint(source, EAGLE3, *_read_gguf_draft(source))
        except SequoiaPlanError:
            raise
        except Exception as error:  # a damaged file may say anything
            raise SequoiaPlanError(
                f"{source}: no whole EAGLE-3 draft ({first_line(error)}); get it again"
            ) from error
    folder = downloaded_folder(source)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        algorithm = _algorithm_of(config, source)
    except (OSError, ValueError, AttributeError, RecursionError):  # transformers says why
        return None
    if algorithm is None and not _has_fc(folder):
        return None
    weights = {
        name.removeprefix("model.").replace("midlayer.", "layers.0.", 1): tensor
        for name, tensor in _read_tensors(folder).items()
    }
    for name in UNUSED_TENSORS:
        weights.pop(name, None)
    return Checkpoint(source, algorithm or EAGLE1, config, weights)


@contextmanager
def errors_of(draft: str | Path, meaning: str = "") -> Iterator[None]:
    """A context whose errors name the draft; `meaning` precedes those of other libraries."""
    try:
        yield
    except Exception as error:  # torch and transformers raise errors of many types
        reason = str(error)
        if not isinstance(error, SequoiaPlanError):
            reason = f"{meaning}{type(error).__name__}: {one_line(error)}"
        raise SequoiaPlanError(
            f"{draft}: {reason}; get the draft again, or use one made for this target"
        ) from error


def load_weights(module: nn.Module, weights: Mapping[str, Tensor], like: Tensor) -> None:
    """Give a module all of its weights, in the dtype and on the device of `like`."""
    for name, tensor in weights.items():
        if not tensor.is_floating_point():
            raise SequoiaPlanError(f"{name}: found {tensor.dtype}, expected floating point")
    try:
        module.load_state_dict({n: t.to(like) for n, t in weights.items()}, assign=True)
    except RuntimeError as error:
        raise SequoiaPlanError(
            f"its weights do not fit its config.json and this target: {one_line(error)}"
        ) from error


def _algorithm_of(config: Mapping[str, object], folder: str) -> str | None:
    """The algorithm that a config.json names; None if it may be a language model's."""
    algorithms, name = ALGORITHM_OF_SPECULATORS_TYPE, config.get("speculators_model_type")
    if name is None:
        architectures = config.get("architectures") or [""]
        name = str(architectures[0] if isinstance(architectures, list) else architectures)
        algorithms = ALGORITHM_OF_ARCHITECTURE
        if not any(word in name.lower() for word in DRAFT_WORDS):
            return None
    if not isinstance(name, str) or name not in algorithms:
        raise SequoiaPlanError(
            f"{folder}: found a draft of another kind, {name!r:.60}, expected one of "
            f"{', '.join(algorithms)}"
        )
    return algorithms[name]


def _has_fc(folder: Path) -> bool:
    """Has the model a matrix `fc`, as an EAGLE-1 draft whose config.json says it is a Llama?"""
    try:
        for file in _weight_files(folder):
            if file.suffix == ".safetensors":
                with safe_open(file, framework="pt") as opened:
                    names = opened.keys()
            else:
                names = torch.load(file, map_location="meta", weights_only=True).keys()
            if "fc.weight" in names:
                return True
    except Exception:  # loading it as a language model says what is wrong
        pass
    return False


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of a draft's files by name; matrices in 8 bits are multiplied by their scales."""
    tensors: dict[str, Tensor] = {}
    for file in _weight_files(folder):
        try:
            if file.suffix == ".safetensors":
                tensors |= load_file(file)
                continue
            for name, tensor in torch.load(file, map_location="cpu", weights_only=True).items():
                if not isinstance(name, str) or not isinstance(tensor, Tensor):
                    raise TypeError(f"{name!r:.60} is not the name of a tensor")
                tensors[name] = tensor
        except Exception as error:  # pickles fail in many ways
            raise SequoiaPlanError(
                f"{file}: cannot be read ({first_line(error)}); get the draft again"
            ) from error
    if not tensors:
        raise SequoiaPlanError(
            f"{folder}: no weights found, expected model.safetensors or pytorch_model.bin"
        )
    with errors_of(folder, "its scales do not fit its weights: "):
        for name in [name for name in tensors if name.endswith(".weight_scale")]:
            scales, matrix_name = tensors.pop(name).float(), name.removesuffix("_scale")
            groups = tensors[matrix_name].float().unflatten(1, (scales.shape[1], -1))
            tensors[matrix_name] = (groups * scales[..., None]).flatten(1)
    return tensors


def _weight_files(folder: Path) -> list[Path]:
    """A folder's *.safetensors, else its pytorch_model*.bin."""
    return sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))


def _is_gguf_draft(path: str) -> bool:
    """Is a GGUF file an EAGLE-3 draft? The architecture's name is its first value."""
    begin = np.fromfile(path, np.uint8, 96).tobytes() if Path(path).is_file() else b""
    return b"general.architecture" in begin and GGUF_NAME.encode() in begin


def _read_gguf_draft(path: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The settings and tensors that a folder would have, from a file of llama.cpp's converter.

    Raises:
        SequoiaPlanError: if it is damaged, or has a setting that drafts do not have.
    """
    file = read_gguf(Path(path))
    own = {key: file.settings[key] for key in GGUF_SETTINGS if key in file.settings}
    if GGUF_LAYERS in file.settings:
        ids = [number - 1 for number in file.settings[GGUF_LAYERS]]
        own["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": ids}
    # what is left describes a Llama of one layer, which the readers of GGUF files know
    others = {
        key.replace(GGUF_NAME, "llama", 1): value
        for key, value in file.metadata.items()
        if key.removeprefix(f"{GGUF_NAME}.") not in (*GGUF_SETTINGS, GGUF_LAYERS)
    }
    llama = replace(file, metadata=others | {"general.architecture": "llama"})
    config = read_config(llama)
    source, weights = GgufSource(llama, config), dict[str, Tensor]()
    for name, shape in source.shapes().items():
        ours = name.replace("blk.", "layers.").replace("attn_norm_2", "hidden_norm")
        if name == "d2t":  # folders have offsets
            tokens = torch.from_numpy(file.tensors[name].read().view(np.int64).flatten())
            weights[name] = tokens - torch.arange(tokens.numel())
        elif len(shape) == 2:
            weights[ours.removeprefix("model.")] = source.matrix(name).dense()
        else:
            weights[ours.removeprefix("model.")] = torch.from_numpy(source.vector(name))
    if "d2t" in weights:
        own["draft_vocab_size"] = weights["d2t"].numel()
    return config.to_diff_dict() | own, weights
