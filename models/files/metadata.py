"""What profiles and trees record of a model, so that another one under its name is noticed."""

import hashlib
import json
from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sequoia_plan.models.base.dtype import dtype_name

FIRST_NUMBERS, SPREAD_NUMBERS = 64, 128
"""How many numbers of each parameter are hashed: its first ones, and as many others spread over all
of it. They tell weights apart without reading gigabytes."""


def module_metadata(
    model: PreTrainedModel, samples: Mapping[str, Tensor] | None = None
) -> dict[str, object]:
    """Digest, content, dtype and parameters of a module.

    `digest` hashes the configuration and each parameter's first numbers, `content` numbers from all
    over each parameter: those in `samples`, for a model whose weights are not in memory.
    """
    config = model.config.to_dict()
    for key in ("_name_or_path", "dtype", "transformers_version"):
        config.pop(key, None)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    content = hashlib.sha256()
    for parameter_name, parameter in model.named_parameters():
        if samples:
            sample = samples[parameter_name]
        else:
            positions = sampled_positions(parameter.numel()).to(parameter.device)
            sample = parameter.detach().reshape(-1)[positions]
        sample = sample.float().cpu()
        digest.update(sample[:FIRST_NUMBERS].numpy().tobytes())
        content.update(sample.numpy().tobytes())
    return {
        "digest": digest.hexdigest()[:16],
        "content": content.hexdigest()[:16],
        "dtype": dtype_name(model.dtype),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def sampled_positions(count: int) -> Tensor:
    """int64: which of a parameter's `count` numbers are hashed; the first ones, then the others.

    The others run from its first number to its last in almost equal steps. A step is no multiple
    of a row, so they are in many columns, unless the number of rows is a multiple of 127.
    """
    if count <= FIRST_NUMBERS:
        return torch.arange(count)
    spread = torch.arange(SPREAD_NUMBERS) * (count - 1) // (SPREAD_NUMBERS - 1)
    return torch.cat([torch.arange(FIRST_NUMBERS), spread])
