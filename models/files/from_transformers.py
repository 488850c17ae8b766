"""transformers loads a model, and nothing of its files is missing or left unread."""

import re
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.models.base.architecture import decoder_layers
from sequoia_plan.models.base.errors import first_line
from sequoia_plan.models.base.forks import renewed_in_forks

OLD_BUFFERS = r"rotary_emb\.inv_freq$|masked_bias$|position_ids$"
"""Tensors that older files have, and that models compute."""


default_dtype_lock = renewed_in_forks(threading.RLock())
"""transformers sets PyTorch's default dtype while it makes a model; threads would leave it so."""


def auto_class(
    config: PreTrainedConfig,
) -> type[AutoModelForCausalLM | AutoModelForImageTextToText]:
    """What loads a model; transformers' causal ones lack some of those that read images too."""
    reads_images = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    is_causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or not reads_images
    return AutoModelForCausalLM if is_causal else AutoModelForImageTextToText


def new_model(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """A model of a configuration, in eval mode; its weights have no meaning."""
    with default_dtype_lock:
        return auto_class(config).from_config(config, dtype=dtype).eval()


def load_whole(
    path: Path, dtype: torch.dtype, config: PreTrainedConfig = None, **settings: object
) -> PreTrainedModel:
    """A model in eval mode, all of it from a folder or a GGUF file, which needs its `config`.

    Raises:
        SequoiaPlanError: if transformers cannot load it, or with the name of a tensor that is
            missing, has another shape, or is left unread.
    """
    if config:
        settings |= {"gguf_file": path.name, "config": config}
    try:
        loads = auto_class(config or AutoConfig.from_pretrained(path))
        with default_dtype_lock:
            model, info = loads.from_pretrained(
                path.parent if config else path,
                dtype=dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, by name
                **settings,
            )
    except Exception as error:  # foreign code may do anything with a folder it does not expect
        raise not_loadable(path, error) from error
    refuse_shapes(path, info["mismatched_keys"])
    refuse_missing(path, info["missing_keys"])
    refuse_unread(path, model, info["unexpected_keys"])
    return model.eval()


def refuse_shapes(
    folder: Path, mismatched: Iterable[tuple[str, Sequence[int], Sequence[int]]]
) -> None:
    """Raise SequoiaPlanError for tensors (name, shape, shape in the model), if there are any."""
    for name, found, expected in sorted(mismatched):
        raise SequoiaPlanError(
            f"{folder}: tensor {name} has the shape {list(found)}, its configuration expects "
            f"{list(expected)}; get the model again"
        )


def refuse_missing(path: Path, missing: Iterable[str]) -> None:
    """Raise SequoiaPlanError for a tensor that a model needs, if there is one."""
    for name in sorted(missing):
        raise SequoiaPlanError(
            f"{path}: has no tensor {name}, which the model needs; get the model again"
        )


def unread(path: Path, model: PreTrainedModel, name: str) -> SequoiaPlanError:
    """The error for a tensor that a model would ignore."""
    return SequoiaPlanError(
        f"{path}: tensor {name} is not read by a {type(model).__name__} of its configuration; its "
        "logits would be wrong"
    )


def refuse_unread(folder: Path, model: PreTrainedModel, names: Iterable[str]) -> None:
    """Raise SequoiaPlanError for a tensor that the model would ignore and that is a part of it.

    Others, as heads that score texts, change no logits.
    """
    ignored = [OLD_BUFFERS, *(model._keys_to_ignore_on_load_unexpected or ())]
    names = sorted(names)
    heads = re.findall(r"(layers\.\d+\.)eh_proj", " ".join(names))  # multi-token-prediction heads
    ignored += map(re.escape, heads)
    names = [n for n in names if not any(re.search(pattern, n) for pattern in ignored)]
    modules = dict(model.named_modules())
    layers = f"{decoder_layers(model)[0]}." if names else ""
    for name in names:
        if name.startswith(layers) or name.rpartition(".")[0] in modules:
            raise unread(folder, model, name)


def not_loadable(folder: Path, error: Exception) -> SequoiaPlanError:
    """The error for a model that transformers fails to load."""
    message = f"{folder}: cannot be loaded as a causal language model ({first_line(error)})"
    if (folder / "adapter_config.json").is_file():
        message += "; it is an adapter: merge it into its model first, and save that"
    return SequoiaPlanError(message)
