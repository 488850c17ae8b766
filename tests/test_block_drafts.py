"""Block drafts: what published folders compute, against an implementation that is not ours."""

from __future__ import annotations

import pytest
import torch
from drafts import golden, load, small_target, write

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.runtime.draft.block import BlockDrafter
from sequoia_plan.runtime.models.forward import additive
from sequoia_plan.runtime.sequence import Sequence
from sequoia_plan.runtime.structure import Structure

GOLDEN = golden("dflash")
pytestmark = pytest.mark.usefixtures("one_thread")


def flat(config, weights):
    """The same draft as z-lab writes it."""
    layer = config["transformer_layer_config"]
    rope = {"rope_theta": layer["rope_parameters"]["rope_theta"], "rope_scaling": None}
    settings = {name: value for name, value in layer.items() if name != "rope_parameters"} | rope
    own = {"mask_token_id": config["mask_token_id"], "target_layer_ids": [number - 1 for number in config["aux_hidden_state_layer_ids"]]}
    return settings | {"architectures": ["DFlashDraftModel"], "block_size": config["block_size"], "dflash_config": own}, weights


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
    assert draft.taps == (1, 3)
    drafter = BlockDrafter(draft, draft.lm_head.out_features, draft.covered_tokens)
    assert drafter.drafting.first == 5 and drafter.drafting.deepest == 5
    for row, anchor in enumerate(expected["anchors"].tolist()):
        sequence = Sequence(torch.device("cpu"))
        sequence.reserve(64, drafter.new_cache, drafter.new_cache)
        sequence.tokens[: expected["tokens"].numel()] = expected["tokens"]
        sequence.length.fill_(anchor)
        drafter.prefill(sequence.draft, expected["tokens"][:anchor])
        for slots in torch.arange(anchor).split(4):
            drafter.watch(sequence.draft, sequence.tokens[slots], slots, additive(slots >= 0, torch.float32), expected["features"][slots])
        tree = TokenTree.chain(5)
        structure = Structure.of(tree, "cpu", torch.float32)
        (step,) = drafter.passes(tree, structure)
        logits = drafter.read(step, sequence, structure.columns(sequence.length, 64)).logits
        torch.testing.assert_close(logits, expected["logits"][row, 1:], atol=1e-5, rtol=1e-5)
