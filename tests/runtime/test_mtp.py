"""Multi-token-prediction heads that are in the target's checkpoint, as drafts."""

import json

import pytest
import torch
from architectures import plain_text
from mtp import FAMILIES, checkpoint
from refusals import refusal
from safetensors.torch import load_file, save_file
from toys import TREE
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from drafts import assert_close, logits_of_tree, started
from sequoia_plan.artifacts import TokenTree
from sequoia_plan.models.backends import loaded
from sequoia_plan.models.files.from_transformers import load_whole
from sequoia_plan.runtime import SequoiaDecoder
from sequoia_plan.runtime.draft.eagle import EagleDrafter
from sequoia_plan.runtime.draft.mtp import load_mtp

pytestmark = pytest.mark.slow


@pytest.fixture(params=FAMILIES)
def pair(request, tmp_path):
    checkpoint(tmp_path, request.param)
    target = load_whole(tmp_path, torch.float32)
    return target, load_mtp(loaded(target))


def transformers_head(target):
    """transformers' own, told of the number of layers and of Qwen's heads."""
    config = target.config
    if not hasattr(config, "num_mtp_layers"):
        config.num_mtp_layers, config.mtp_layer_types = 1, ["full_attention"]
    target._keys_to_ignore_on_load_unexpected = [r"layers\.[2-9]\.", "^mtp"]
    return MtpModel.from_pretrained(target).eval()


@torch.no_grad()
def test_logits_are_those_of_transformers(pair):
    """On every path of a tree, after texts shorter and longer than a window and the tree."""
    target, draft = pair
    head, text = transformers_head(target), torch.arange(30) * 7 % 97
    features = target.model(input_ids=text[None]).last_hidden_state[0]
    for root in (1, 2, 20):
        drafter, sequence = started(EagleDrafter, draft, text, features, root)
        tokens = sequence.tokens[root : root + TREE.size] = torch.arange(TREE.size) * 5 + 1
        logits = torch.cat(logits_of_tree(drafter, sequence, TREE))
        for row, node in zip(logits, TREE.child_count.nonzero()[0], strict=True):
            path = TREE.attention_mask[node].nonzero()[0]
            ids = torch.cat([text[:root], tokens[path]])[None]
            cache, positions = MtpCache(config=head.config), torch.arange(1, root + 1)
            states = features[None, :root]
            for level in range(len(path)):
                number = min(level, len(head.layers) - 1)
                states = head.forward_layer(
                    number, states, positions[None], cache, input_ids=ids[:, positions]
                )
                if len(head.layers) == 1:  # has read the others
                    states, positions = states[:, -1:], positions[-1:]
                positions = positions + 1
            assert_close(row, target.lm_head(states[0, -1]))


def test_greedy_is_the_targets_own_text(pair):
    """With a chain where the target has a recurrent state."""
    target, draft = pair
    tree = TokenTree.chain(4) if "qwen" in target.config.model_type else TREE
    expected = plain_text(target, torch.tensor([[3, 1, 4]]), 40)
    assert SequoiaDecoder(target, draft, tree).generate([3, 1, 4], 40).sequences.equal(expected)


BAD = {
    "lost": ("layers.2.", None, {}, "num_nextn_predict_layers: 1, and its files"),
    "none": ("layers.2.", None, {"num_nextn_predict_layers": 0}, "has no MTP head"),
    "a norm lost": ("2.hnorm", None, {}, "pre_fc_norm_hidden.weight is missing"),
    "a projection lost": ("2.self_attn.q", None, {}, "q_proj.weight is missing"),
    "another width": ("2.eh_proj", torch.ones(3, 32), {}, "cannot be built"),
    "unknown": ("no name", torch.ones(3), {}, "layers.0.more.weight is missing or unknown"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_checkpoint_without_its_head_is_one_line(name, tmp_path):
    part, other, changes, message = BAD[name]
    checkpoint(tmp_path, "GLM-4-MoE")
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    tensors = {n: t for n, t in load_file(weights).items() if part not in n}
    if other is not None:
        tensors |= {f"model.layers.{part}.weight".replace("no name", "2.more"): other}
    save_file(tensors, weights, {"format": "pt"})
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    with refusal(message) as error:
        load_mtp(loaded(load_whole(tmp_path, torch.float32)))
    assert "draft mtp: " in str(error.value) and "\n" not in str(error.value)
