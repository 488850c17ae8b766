"""A draft that is in the target's own checkpoint: its multi-token-prediction (MTP) head.

A head is a norm for the embedding of a token, one for the target's hidden state before that token,
a linear layer that makes one row of both, and a layer of the target's own kind with a final norm.
Published by DeepSeek-V3 (arXiv 2412.19437), GLM-4-MoE, Mellum, Qwen3-Next.
"""

import copy
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.runtime.base.cache import TreeCache, cache_argument
from sequoia_plan.runtime.base.errors import first_line
from sequoia_plan.runtime.base.masks import mask_as_dtype, windowed_mask
from sequoia_plan.runtime.draft.hidden_state_draft import HiddenStateDraft
from sequoia_plan.runtime.models.architecture import (
    FULL,
    attention_window,
    execution_device,
    text_config,
    unwrapped,
)
from sequoia_plan.runtime.models.aux_hidden_states import AFTER_FINAL_NORM
from sequoia_plan.runtime.models.pretrained import downloaded_folder

MTP = "mtp"
"""The value of --draft that asks for the target's head."""
NAME = re.compile(r"(?:model\.)?(mtp\.)?(?:layers\.(\d+)\.)?(.+)")
"""A tensor's name: the prefix that some heads have, the number of a layer, the name in it."""
OUR_NAMES = {
    "enorm.weight": "enorm.weight",
    "pre_fc_norm_embedding.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "pre_fc_norm_hidden.weight": "hnorm.weight",
    "eh_proj.weight": "fc.weight",
    "fc.weight": "fc.weight",
    "shared_head.norm.weight": "block.norm.weight",
    "norm.weight": "block.norm.weight",
    "shared_head.head.weight": None,
    "embed_tokens.weight": None,
}
"""Published names of a head's tensors outside its layer, and ours; None: the target has it."""
COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
"""Where config.json says how many heads there are."""


class MtpDraft(HiddenStateDraft):
    """An MTP head, used for every level: deeper rows take its own output in place of the target's.

    `block` is a model of the target's class, without embeddings and head, that has one layer.
    """

    def __init__(self, config: Any, block: Any, target: Any) -> None:
        super().__init__(config, target, (AFTER_FINAL_NORM,), None, False, 0)
        width = config.hidden_size
        self.block, self.cache_argument = block, cache_argument(block.forward)
        self.block.set_input_embeddings(nn.Identity())
        self.enorm, self.hnorm = copy.deepcopy(block.norm), copy.deepcopy(block.norm)
        self.fc = nn.Linear(2 * width, width, bias=False, dtype=target.dtype)

    @property
    def window(self) -> int | None:
        """Positions that its layer attends to; None if it has no window."""
        return attention_window(self.config)[0]

    def cache_layout(self) -> int:
        """One layer, whose memory its first pass shows."""
        return 1

    def fuse(self, hidden_states: Tensor) -> Tensor:
        """The target's last hidden state is the feature as it is, in the draft's dtype."""
        return hidden_states.to(self.dtype)

    def angles(self, positions: Tensor) -> tuple[Tensor, ...]:
        """The positions themselves [1, tokens]: `block` makes angles of them."""
        return (positions[None],)

    def masks_by_layer_type(
        self, cache: TreeCache, mask: Tensor, positions: Tensor, slots: Tensor
    ) -> Any:
        """The mask as `block` takes it, [1, 1, tokens, extent]."""
        mask = mask_as_dtype(mask, self.dtype)
        if cache.positions is not None and self.window is not None:
            mask = windowed_mask(cache, mask, positions, slots, self.window)
        return mask[None, None]

    def splits_keys(self, tokens: int) -> bool:
        """No: the memory of its keys is not known before its first pass."""
        return False

    def forward(
        self,
        tokens: Tensor,
        features: Tensor,
        angles: tuple[Tensor, ...],
        masks: Any,
        cache: TreeCache | None = None,
        logits_to_keep: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """As for `Eagle1`; embedding and feature have a norm each, and so has the output."""
        rows = self.fc(torch.cat([self.enorm(self.embed(tokens)), self.hnorm(features)], -1))
        output = self.block(
            inputs_embeds=rows,
            position_ids=angles[0],
            attention_mask=masks,
            use_cache=cache is not None,
            **{self.cache_argument: cache},
        ).last_hidden_state
        return self.head(output[:, -logits_to_keep:]), output  # [-0:] keeps all rows


def load_mtp(target: Any) -> MtpDraft:
    """The head in the checkpoint that `target` was loaded from."""
    target = unwrapped(target)
    folder = downloaded_folder(target.config.name_or_path)
    heads = _tensors_of_heads(folder, text_config(target).num_hidden_layers)
    try:
        if len(heads) != 1:
            raise SequoiaPlanError(_why_not(folder, len(heads)))
        return _build(target, heads[0])
    except Exception as error:  # transformers raises errors of many types
        ours = isinstance(error, SequoiaPlanError)
        reason = error if ours else f"its MTP head cannot be built: {first_line(error)}"
        raise SequoiaPlanError(
            f"draft {MTP}: {folder}: {reason}; get the model as its makers publish it, or name "
            "another --draft"
        ) from error


def _tensors_of_heads(folder: Path, num_layers: int) -> dict[int, dict[str, Tensor]]:
    """Each head's tensors by our names: those with a prefix, or behind the target's layers."""
    heads: defaultdict[int, dict[str, Tensor]] = defaultdict(dict)
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                prefix, number, inner = NAME.findall(name)[0]
                head = int(number or 0) - (0 if prefix else num_layers)
                our_name = OUR_NAMES.get(inner, f"block.layers.0.{inner}")
                if head >= 0 and our_name:
                    heads[head][our_name] = opened.get_tensor(name)
    return heads


def _why_not(folder: Path, num_heads: int) -> str:
    """Why a checkpoint with so many heads has no draft."""
    if num_heads:
        return f"has {num_heads} MTP heads, one for each level, expected one that serves all levels"
    config = json.loads((folder / "config.json").read_text())
    settings = config | (config.get("text_config") or {})
    for name in COUNTS:
        if settings.get(name):
            return (
                f"its config.json says {name}: {settings[name]}, and its files hold no tensor of "
                "an MTP head: this upload has lost them"
            )
    return "has no MTP head (no tensors named mtp.*, and none behind its last layer)"


def _build(target: Any, tensors: dict[str, Tensor]) -> MtpDraft:
    """The head with these weights.

    transformers loads its layer as that of a model with one layer, and so converts weights as it
    does for the target.
    """
    config = copy.deepcopy(text_config(target))
    # what numbers the target's layers does not number this one
    changes = {
        "num_hidden_layers": 1,
        "first_k_dense_replace": 0,
        "layer_types": getattr(config, "mtp_layer_types", None) or [FULL],
        "mlp_layer_types": getattr(config, "mtp_mlp_layer_types", None) or ["sparse"],
    }
    for name in changes.keys() & vars(config).keys():
        setattr(config, name, changes[name])
    no_words = copy.deepcopy(config)
    no_words.vocab_size, no_words.pad_token_id = 1, None
    shared = (target.get_input_embeddings(), target.get_output_embeddings())
    weights = {
        name.replace("block", target.base_model_prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith("block.")
    } | {
        f"{name}.weight": torch.zeros(1, config.hidden_size)
        for name, module in target.named_modules()
        if module in shared
    }
    model, info = type(target).from_pretrained(
        None, config=no_words, state_dict=weights, dtype=target.dtype, output_loading_info=True
    )
    draft = MtpDraft(config, model.base_model, target)
    own = {"enorm.weight", "hnorm.weight", "fc.weight"}
    missing = sorted(own - tensors.keys() | info["missing_keys"])
    if missing:
        raise SequoiaPlanError(f"has no tensor {missing[0]} of its MTP head")
    if unread := sorted(info["unexpected_keys"]):
        raise SequoiaPlanError(f"its MTP head has a tensor {unread[0]} that is not known")
    with torch.no_grad():
        for name in own:
            draft.get_parameter(name).copy_(tensors[name])
    return draft.to(execution_device(target)).eval().requires_grad_(False)
