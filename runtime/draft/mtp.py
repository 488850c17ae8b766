"""A draft that is in the target's own checkpoint: its multi-token-prediction (MTP) head.

A head is a norm for the embedding of a token, one for the target's hidden state before that token,
a linear layer that makes one row of both, and a layer of the target's own kind with a final norm.
Published by DeepSeek-V3 (arXiv 2412.19437), GLM-4-MoE, Mellum, Qwen3-Next.
"""

import copy
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from msgspec import structs
from safetensors import safe_open
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from sequoia_plan.artifacts import EAGLE_DRAFT, SequoiaPlanError
from sequoia_plan.models.base.architecture import AFTER_FINAL_NORM, FULL
from sequoia_plan.models.base.cache import TreeCache
from sequoia_plan.models.files.pretrained import downloaded_folder
from sequoia_plan.models.loaded_model import LoadedModel
from sequoia_plan.runtime.draft.checkpoint import errors_of
from sequoia_plan.runtime.draft.hidden_state_draft import CACHE_ARGUMENT, HiddenStateDraft

MTP = "mtp"
"""The value of --draft that asks for the target's head."""
NAME = re.compile(r"(?:model\.)?(mtp\.)?(?:layers\.(\d+)\.)?(.+)")
"""A tensor's name: the prefix that some heads have, the number of a layer, the name in it."""
OUR_NAMES = {
    "enorm.weight": "pre_fc_norm_embedding.weight",
    "pre_fc_norm_embedding.weight": "pre_fc_norm_embedding.weight",
    "hnorm.weight": "pre_fc_norm_hidden.weight",
    "pre_fc_norm_hidden.weight": "pre_fc_norm_hidden.weight",
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


class MtpHead(nn.Module):
    """One head. `block` is a model of the target's class with one layer, without embeddings."""

    def __init__(self, block: PreTrainedModel, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.block = block
        block.set_input_embeddings(nn.Identity())
        self.pre_fc_norm_embedding = copy.deepcopy(block.norm)
        self.pre_fc_norm_hidden = copy.deepcopy(block.norm)
        self.fc = nn.Linear(2 * width, width, bias=False, dtype=dtype)

    def forward(
        self,
        embedded: Tensor,
        features: Tensor,
        positions: Tensor,
        mask: Tensor,
        cache: TreeCache | None,
    ) -> Tensor:
        """Embeddings and features [batch, rows, hidden size] -> outputs after its norm."""
        normed = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(features)]
        return self.block(
            inputs_embeds=self.fc(torch.cat(normed, -1)),
            position_ids=positions,
            attention_mask=mask,
            use_cache=cache is not None,
            **{CACHE_ARGUMENT: cache},
        ).last_hidden_state


class MtpDraft(HiddenStateDraft):
    """One head that serves all levels, or one for each level.

    One head takes, below the root's children, its own output in place of the target's. Of several,
    each takes the output of the one before for the token before, also of committed tokens: features
    of these lie side by side, the target's hidden state first.
    """

    def __init__(
        self, config: PreTrainedConfig, blocks: Sequence[PreTrainedModel], target: LoadedModel
    ) -> None:
        super().__init__(config, target, (AFTER_FINAL_NORM,), None, False, 0)
        width, self.num_heads = config.hidden_size, len(blocks)
        self.heads = nn.ModuleList(MtpHead(block, width, target.dtype) for block in blocks)
        self.feature_width, self.drafting = self.num_heads * width, EAGLE_DRAFT
        if self.num_heads > 1:
            self.drafting = structs.replace(EAGLE_DRAFT, max_depth=self.num_heads + 1)

    def cache_layout(self) -> int:
        """The number of layers, one for each head; the first pass shows what memory they need."""
        return self.num_heads

    def rotary_emb(self, like: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """The positions in place of cosines and sines, which each head computes itself."""
        return (positions,)

    def masks_by_layer_type(self, *rows: Any) -> Any:
        """The mask of each head, [1, 1, tokens, extent]; head k hides the first k + 1 tokens."""
        masks = [*super().masks_by_layer_type(*rows).values()][-1:]
        for number in range(1, self.num_heads):
            masks.append(masks[-1].clone())
            masks[-1][..., number : number + 1] = torch.finfo(self.dtype).min
        return masks

    def forward(
        self,
        tokens: Tensor,
        features: Tensor,
        angles: Any,
        masks: Any,
        cache: Any = None,
        logits_to_keep: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """As for `EagleModel`. Of several heads, that of this level and those of deeper ones run.

        Features and outputs are of these alone, which tells the level; the first level's rows are
        committed tokens, one after the other.
        """
        embedded, width = self.embed(tokens), self.config.hidden_size
        outputs = list[Tensor]()
        features_by_head = features.split(width, -1)
        level = self.num_heads - len(features_by_head)
        for number, feature in enumerate(features_by_head, level):
            if outputs and not level:  # the output of the head before, for the token before
                feature = torch.cat([feature[:, :1], outputs[-1][:, :-1]], 1)
            outputs.append(self.heads[number](embedded, feature, angles[0], masks[number], cache))
        passed_on = torch.cat(outputs[: len(features_by_head) - 1] or outputs, -1)
        if not level and self.num_heads > 1:
            cache.features[:, width:].index_copy_(0, cache.slots + 1, passed_on[0])
        return self.head(outputs[0][:, -logits_to_keep:]), passed_on  # [-0:] keeps all rows


def load_mtp(model: LoadedModel) -> MtpDraft:
    """The draft made of MTP heads in the target's checkpoint; SequoiaPlanError if it has none."""
    config = model.config
    whole_config = config if model.module is None else model.module.config
    folder = downloaded_folder(whole_config.name_or_path)
    heads = _tensors_of_heads(folder, config.num_hidden_layers)
    with errors_of(f"draft {MTP}: {folder}", "its MTP head cannot be built: "):
        if not heads:
            raise SequoiaPlanError(_why_none(config))
        return build_mtp(model, [heads[number] for number in range(len(heads))])


def _tensors_of_heads(folder: Path, num_layers: int) -> dict[int, dict[str, Tensor]]:
    """By head, tensors by `MtpHead`'s names; heads are `mtp.` layers, or follow the target's."""
    heads: defaultdict[int, dict[str, Tensor]] = defaultdict(dict)
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                prefix, number, inner = NAME.findall(name)[0]
                head = int(number or 0) - (0 if prefix else num_layers)
                our_name = OUR_NAMES.get(inner, f"block.layers.0.{inner}")
                if head >= 0 and our_name:  # else it is the target's
                    heads[head][our_name] = opened.get_tensor(name)
    return heads


def _why_none(config: PreTrainedConfig) -> str:
    """Why a checkpoint of this configuration has no head."""
    for name in COUNTS:
        if count := getattr(config, name, None):
            return (
                f"its config.json says {name}: {count}, and its files hold no tensor of an MTP "
                "head: this upload has lost them"
            )
    return "has no MTP head (no tensors named mtp.*, and none behind its last layer)"


def build_mtp(model: LoadedModel, heads: Sequence[dict[str, Tensor]]) -> MtpDraft:
    """The draft of heads with these weights, which go by the names of `MtpHead`'s parameters.

    transformers loads a head's layer as that of a model with one layer, and so converts weights as
    it does for the target.
    """
    config = copy.deepcopy(model.config)
    target_class = type(model.module)
    if model.module is None:
        target_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    # what numbers the target's layers does not number these
    changes = {
        "num_hidden_layers": 1,
        "first_k_dense_replace": 0,
        "layer_types": getattr(config, "mtp_layer_types", None) or [FULL],
        "mlp_layer_types": getattr(config, "mtp_mlp_layer_types", None) or ["sparse"],
    }
    for name in changes.keys() & vars(config).keys():
        setattr(config, name, changes[name])
    # the layer comes with embeddings and a head, which are dropped: one token keeps them small
    one_token_config = copy.deepcopy(config)
    one_token_config.vocab_size, one_token_config.pad_token_id = 1, None
    prefix = target_class.base_model_prefix
    one_token_weights = dict.fromkeys(
        (f"{prefix}.embed_tokens.weight", "lm_head.weight"), torch.zeros(1, config.hidden_size)
    )
    blocks, own = [], {"pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "fc.weight"}
    for number, tensors in enumerate(heads):
        weights = {
            name.replace("block", prefix): tensor
            for name, tensor in tensors.items()
            if name not in own
        }
        layer, info = target_class.from_pretrained(
            None,
            config=one_token_config,
            state_dict=one_token_weights | weights,
            dtype=model.dtype,
            output_loading_info=True,
        )
        wrong = own - tensors.keys() | info["missing_keys"] | info["unexpected_keys"]
        if wrong:
            raise SequoiaPlanError(
                f"the tensors of MTP head {number} are not those of a {target_class.__name__}'s "
                f"layer: {min(wrong)} is missing or unknown"
            )
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = number
        blocks.append(layer.base_model)
    draft = MtpDraft(config, blocks, model)
    with torch.no_grad():
        for head, tensors in zip(draft.heads, heads, strict=True):
            for name in own:
                head.get_parameter(name).copy_(tensors[name])
    return draft.to(model.device).eval().requires_grad_(False)
