"""Feature drafts: what published folders compute, against an implementation that is not ours, and what they do in a step."""

from __future__ import annotations

import pytest
import torch
from drafts import golden, load, small_target, write

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.runtime.draft.feature import FeatureDrafter
from sequoia_plan.runtime.models.forward import additive
from sequoia_plan.runtime.sequence import Sequence
from sequoia_plan.runtime.structure import Structure

GOLDEN = golden("eagle3")
DEPTH = 4
FORK = 12
"""The slot of the root after which the two texts of the golden file differ."""
TREE = TokenTree.from_parents([-1, 0, 0, 1, 2, 3, 4, 5, 6])
pytestmark = pytest.mark.usefixtures("one_thread")


def flat(config, weights, layout):
    """The same draft as SpecForge and AngelSlim write them."""
    layer = config["transformer_layer_config"]
    ids = [number - 1 for number in config["eagle_aux_hidden_state_layer_ids"]]
    told = {name: config[name] for name in ("draft_vocab_size", "norm_before_residual", "norm_output", "fc_norm", "norm_before_fc")}
    architecture = {"SpecForge": "LlamaForCausalLMEagle3", "AngelSlim": "Eagle3LlamaForCausalLM"}[layout]
    rope = {"rope_theta": layer["rope_parameters"]["rope_theta"], "rope_scaling": None}
    settings = {name: value for name, value in layer.items() if name != "rope_parameters"} | rope | told
    renamed = {name.replace("layers.0.", "midlayer."): value for name, value in weights.items()}
    return settings | {"architectures": [architecture], "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}}, renamed


def started(draft, text, features, committed):
    """A drafter and a sequence whose prompt is `text`, read up to `committed`, in two chunks, with the target's `features`."""
    drafter = FeatureDrafter(draft, draft.get_output_embeddings().out_features, draft.covered_tokens)
    sequence = Sequence(torch.device("cpu"))
    sequence.reserve(64, drafter.new_cache, drafter.new_cache)
    sequence.tokens[: text.numel()] = text
    sequence.length.fill_(committed)
    drafter.prefill(sequence.draft, text[:committed])
    for slots in torch.arange(committed).split(committed - 3 if committed > 4 else committed):
        mask = additive(torch.arange(int(slots[-1]) + 1) <= slots[:, None], torch.float32)
        drafter.watch(sequence.draft, text[slots], slots, mask, features[slots])
    return drafter, sequence


def logits_of_tree(drafter, sequence, tree):
    """Logits of each pass of a tree whose tokens are in the sequence."""
    structure = Structure.of(tree, "cpu", torch.float32)
    columns, found, reading = structure.columns(sequence.length, 64), [], None
    for step in drafter.passes(tree, structure):
        reading = drafter.read(step, sequence, columns, reading)
        found.append(reading.logits)
    return found


@pytest.mark.parametrize("layout", ["speculators", "SpecForge", "AngelSlim"])
@pytest.mark.parametrize("variant", GOLDEN)
@torch.no_grad()
def test_logits_are_those_of_speculators(variant, layout, tmp_path):
    """Along a chain from every root, and along two branches of one tree."""
    config, weights, expected = GOLDEN[variant]
    if layout != "speculators" and config["transformer_layer_config"]["num_hidden_layers"] > 1:
        pytest.skip("those trainers write one layer")
    parts = (config, weights) if layout == "speculators" else flat(config, weights, layout)
    draft = load(write(tmp_path / "draft", *parts), small_target())
    assert draft.taps == (1, 2, 4)
    levels = 1 if variant == "window" else DEPTH  # in training, speculators counts the window of deeper rows from the first row
    for root in range(1, 20):
        drafter, sequence = started(draft, expected["chain.tokens"], expected["features"], root)
        for level, logits in enumerate(logits_of_tree(drafter, sequence, TokenTree.chain(levels + 1))):
            torch.testing.assert_close(logits[0], expected["chain.logits"][level, root - 1], atol=1e-5, rtol=1e-5)
    drafter, sequence = started(draft, expected["chain.tokens"], expected["features"], FORK)
    for level in range(1, DEPTH + 1):
        sequence.tokens[FORK + 2 * level - 1], sequence.tokens[FORK + 2 * level] = (expected[f"{name}.tokens"][FORK + level] for name in ("chain", "branch"))
    for level, logits in enumerate(logits_of_tree(drafter, sequence, TREE)[:levels]):
        for row, name in zip(logits, ("chain", "branch"), strict=False):
            torch.testing.assert_close(row, expected[f"{name}.logits"][level, FORK - 1], atol=1e-5, rtol=1e-5)
