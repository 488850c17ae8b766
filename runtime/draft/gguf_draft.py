"""An EAGLE-3 draft in a GGUF file, as llama.cpp's converter writes it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sequoia_plan.models.files.gguf import GgufSource
from sequoia_plan.models.files.gguf_config import read_config
from sequoia_plan.models.files.gguf_file import read_gguf

NAME = "eagle3"
"""llama.cpp's name of the architecture."""
SETTINGS = ("norm_before_residual", "norm_before_fc", "target_hidden_size")
LAYERS = "target_layers"
"""Numbers of hidden states, from 1; config.json's own are less by one."""


def is_gguf_draft(path: str) -> bool:
    """Is a GGUF file such a draft? The architecture's name is its first value."""
    begin = np.fromfile(path, np.uint8, 96).tobytes() if Path(path).is_file() else b""
    return b"general.architecture" in begin and NAME.encode() in begin


def read_gguf_draft(path: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What a folder's config.json and weights would be.

    Raises:
        SequoiaPlanError: if it is damaged, or has a setting that drafts do not have.
    """
    file = read_gguf(Path(path))
    own: dict[str, Any] = {key: file.settings[key] for key in SETTINGS if key in file.settings}
    if LAYERS in file.settings:
        ids = [number - 1 for number in file.settings[LAYERS]]
        own["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": ids}
    others = {
        key.replace(NAME, "llama", 1): value
        for key, value in file.metadata.items()
        if key.removeprefix(f"{NAME}.") not in (*SETTINGS, LAYERS)
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
