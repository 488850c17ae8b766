"""DFlash drafts: their logits against an implementation that is not ours."""

from __future__ import annotations

import pytest
import torch

from drafts import golden, load, small_target, write
from sequoia_plan.artifacts import TokenTree
from sequoia_plan.runtime.base.masks import additive_mask
from sequoia_plan.runtime.base.sequence import SequenceState
from sequoia_plan.runtime.base.tree_tensors import TreeTensors
from sequoia_plan.runtime.draft.dflash import DFlashDrafter

GOLDEN = golden("dflash")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


def flat(config, weights):
    """The same draft as z-lab writes it."""
    layer = config["transformer_layer_config"]
    rope = {"rope_theta": layer["rope_parameters"]["rope_theta"], "rope_scaling": None}
    settings = {name: value for name, value in layer.items() if name != "rope_parameters"} | rope
    dflash_config = {
        "mask_token_id": config["mask_token_id"],
        "target_layer_ids": [number - 1 for number in config["aux_hidden_state_layer_ids"]],
    }
    flat_layout = {
        "architectures": ["DFlashDraftModel"],
        "block_size": config["block_size"],
        "dflash_config": dflash_config,
    }
    return settings | flat_layout, weights


@pytest.mark.parametrize("layout", ["speculators", "z-lab"])
@pytest.mark.parametrize("variant", GOLDEN)
@torch.no_grad()
def test_logits_are_those_of_speculators(variant, layout, tmp_path):
    config, weights, expected = GOLDEN[variant]
    if layout == "z-lab" and variant != "plain":
        pytest.skip("that layout counts windows in another way")
    parts = (config, weights) if layout == "speculators" else flat(config, weights)
    target = small_target()
    target.model.embed_tokens.weight.data = expected["embeddings"]
    draft = load(write(tmp_path / "draft", *parts), target)
    assert draft.aux_hidden_state_layers == (1, 3)
    drafter = DFlashDrafter(draft, draft.lm_head.out_features, draft.d2t)
    assert drafter.drafting.first_width == 5 and drafter.drafting.max_depth == 5
    for row, anchor in enumerate(expected["anchors"].tolist()):
        sequence = SequenceState(torch.device("cpu"))
        sequence.reserve(64, drafter.new_cache, drafter.new_cache)
        sequence.tokens[: expected["tokens"].numel()] = expected["tokens"]
        sequence.length.fill_(anchor)
        drafter.prefill(sequence.draft, expected["tokens"][:anchor])
        for slots in torch.arange(anchor).split(4):
            drafter.prefill_hidden_states(
                sequence.draft,
                sequence.tokens[slots],
                slots,
                additive_mask(slots >= 0, torch.float32),
                expected["features"][slots],
            )
        tree = TokenTree.chain(5)
        tensors = TreeTensors.of(tree, "cpu", torch.float32)
        (draft_pass,) = drafter.passes(tree, tensors)
        logits = drafter.forward(draft_pass, sequence, tensors.columns(sequence.length, 64)).logits
        torch.testing.assert_close(logits, expected["logits"][row, 1:], atol=1e-5, rtol=1e-5)
