"""EAGLE and DFlash drafts: their logits against implementations that are not ours."""

from pathlib import Path

import pytest
import torch
from architectures import tokens_of
from toys import normal
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from drafts import (
    PARTS,
    assert_close,
    built,
    eagle1_parts,
    eagle3_parts,
    golden,
    load,
    logits_of_tree,
    small_target,
    started,
    write,
)
from sequoia_plan.artifacts import TokenTree
from sequoia_plan.models.base.masks import causal_mask
from sequoia_plan.models.layers.int8 import ROWS_AT_A_TIME, rows_in_8_bits
from sequoia_plan.runtime.draft.dflash import DFlashDrafter
from sequoia_plan.runtime.draft.eagle import EagleDrafter

EAGLE3, DFLASH = golden("eagle3"), golden("dflash")
DEPTH = 4
FORK = 12
"""The slot of the root after which the two texts of the golden file differ."""
TREE = TokenTree([-1, 0, 0, 1, 2, 3, 4, 5, 6])
pytestmark = pytest.mark.slow


def flat(config, weights, layout):
    """The same draft as SpecForge, AngelSlim and z-lab write theirs."""
    layer = config["transformer_layer_config"]
    rope = {"rope_theta": layer["rope_parameters"]["rope_theta"], "rope_scaling": None}
    settings = layer | rope
    del settings["rope_parameters"]
    if layout == "z-lab":
        dflash_config = {
            "mask_token_id": config["mask_token_id"],
            "target_layer_ids": [number - 1 for number in config["aux_hidden_state_layer_ids"]],
        }
        return settings | {
            "architectures": ["DFlashDraftModel"],
            "block_size": config["block_size"],
            "dflash_config": dflash_config,
        }, weights
    ids = [number - 1 for number in config["eagle_aux_hidden_state_layer_ids"]]
    names = ("draft_vocab_size", "norm_before_residual", "norm_output", "fc_norm", "norm_before_fc")
    architectures = {"SpecForge": "LlamaForCausalLMEagle3", "AngelSlim": "Eagle3LlamaForCausalLM"}
    renamed = {name.replace("layers.0.", "midlayer."): value for name, value in weights.items()}
    return settings | {name: config[name] for name in names} | {
        "architectures": [architectures[layout]],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids},
    }, renamed


@pytest.mark.parametrize("layout", ["speculators", "SpecForge", "AngelSlim"])
@pytest.mark.parametrize("variant", EAGLE3)
@torch.no_grad()
def test_logits_of_eagle3_are_those_of_speculators(variant, layout):
    """Along a chain from every root, and along two branches of one tree."""
    config, weights, expected = EAGLE3[variant]
    if layout != "speculators" and config["transformer_layer_config"]["num_hidden_layers"] > 1:
        pytest.skip("those trainers write one layer")
    parts = (config, weights) if layout == "speculators" else flat(config, weights, layout)
    draft = built(small_target(), *parts)
    assert draft.aux_hidden_state_layers == (1, 2, 4)
    # in training, speculators counts the window of deeper rows from the first row
    levels = 1 if variant == "window" else DEPTH
    text = EagleDrafter, draft, expected["chain.tokens"], expected["features"]
    for root in range(1, 20):
        logits = logits_of_tree(*started(*text, root), TokenTree.chain(levels + 1))
        for level, of_level in enumerate(logits):
            assert_close(of_level[0], expected["chain.logits"][level, root - 1])
    drafter, sequence = started(*text, FORK)
    for level in range(1, DEPTH + 1):
        for node, name in ((2 * level - 1, "chain"), (2 * level, "branch")):
            sequence.tokens[FORK + node] = expected[f"{name}.tokens"][FORK + level]
    for level, of_level in enumerate(logits_of_tree(drafter, sequence, TREE)[:levels]):
        for row, name in zip(of_level, ("chain", "branch"), strict=False):
            assert_close(row, expected[f"{name}.logits"][level, FORK - 1])


def test_a_window_longer_than_the_text_hides_nothing():
    config, weights, expected = EAGLE3["window"]
    layer, logits = config["transformer_layer_config"], []
    for changes in ({"sliding_window": 4096}, {"layer_types": ["full_attention"] * 2}):
        longer = config | {"transformer_layer_config": layer | changes}
        draft = built(small_target(), longer, weights)
        text = EagleDrafter, draft, expected["chain.tokens"], expected["features"]
        logits.append(torch.cat(logits_of_tree(*started(*text, 19), TREE)))
    assert_close(*logits)


@pytest.mark.parametrize("layout", ["speculators", "z-lab"])
@pytest.mark.parametrize("variant", DFLASH)
@torch.no_grad()
def test_logits_of_dflash_are_those_of_speculators(variant, layout):
    config, weights, expected = DFLASH[variant]
    if layout == "z-lab" and variant != "plain":
        pytest.skip("that layout counts windows in another way")
    parts = (config, weights) if layout == "speculators" else flat(config, weights, layout)
    target = small_target()
    target.model.embed_tokens.weight.data = expected["embeddings"]
    draft = built(target, *parts)
    assert draft.aux_hidden_state_layers == (1, 3)
    for row, anchor in enumerate(expected["anchors"].tolist()):
        text = DFlashDrafter, draft, expected["tokens"], expected["features"]
        drafter, sequence = started(*text, anchor)
        assert drafter.drafting.first_width == drafter.drafting.max_depth == 5
        (logits,) = logits_of_tree(drafter, sequence, TokenTree.chain(5))
        assert_close(logits, expected["logits"][row, 1:])


def eagle1_by_description(weights, config, target, tokens, features, root, deeper):
    """Logits along a chain after `root`, from the description of EAGLE alone.

    A layer of transformers without its first norm reads embedding and feature by a linear layer;
    every row is computed anew, without a cache.
    """
    config = LlamaConfig(**config, attn_implementation="eager")
    layer, rotary = LlamaDecoderLayer(config, 0), LlamaRotaryEmbedding(config)
    layer.input_layernorm = torch.nn.Identity()
    layer.load_state_dict(
        {name.removeprefix("layers.0."): w for name, w in weights.items() if "layers.0." in name}
    )
    embeddings = target.model.embed_tokens.weight
    rows = [torch.cat([embeddings[tokens[i + 1]], features[i]]) for i in range(root)]
    logits = []
    for level in range(deeper + 1):
        x = (torch.stack(rows) @ weights["fc.weight"].T + weights["fc.bias"])[None]
        slots = torch.arange(len(rows))
        mask = causal_mask(slots, len(slots), torch.float32)[None, None]
        x = layer(x, attention_mask=mask, position_embeddings=rotary(x, slots[None]))[0]
        logits.append(target.lm_head(x[-1]))
        rows.append(torch.cat([embeddings[tokens[root + 1 + level]], x[-1]]))
    return logits


@torch.no_grad()
def test_eagle1_is_what_its_paper_describes():
    """No library on the package index has this model."""
    target = small_target()
    config, weights = eagle1_parts(target)
    draft = built(target, config, weights)
    tokens, features = tokens_of(20) % 48, normal(20, 16)
    for root in (1, 2, 5, 11):
        expected = eagle1_by_description(weights, config, target, tokens, features, root, deeper=3)
        text = started(EagleDrafter, draft, tokens, features, root)
        for level, logits in enumerate(logits_of_tree(*text, TokenTree.chain(5))):
            assert_close(logits[0], expected[level])


def convolved_layer_by_description(layer, name, weights, x, inputs):
    """x[i] (base[0] + a[i, 0]) + x[i - 1] (base[1] + a[i, 1]) around both parts of a layer.

    `a` is a projection of what the first of the two convolutions reads, one for 4 channels.
    """
    parts = {
        "attention": ("input", lambda rows: layer.self_attn(rows, **inputs)[0]),
        "mlp": ("post_attention", layer.mlp),
    }
    for part, (norm, run) in parts.items():
        rows = getattr(layer, f"{norm}_layernorm")(x)
        conv = f"{name}.{part}_conv."
        added = (rows @ weights[conv + "kernel_projection.weight"].T).view(5, 2, 2, 4)
        for side, then in enumerate((run, lambda rows: rows)):
            kernel = weights[conv + "base_kernel"][side] + added[:, side].repeat_interleave(4, -1)
            before = torch.cat([0 * rows[:, :1], rows[:, :-1]], 1)
            rows = then(rows * kernel[:, 0] + before * kernel[:, 1])
        x = x + rows
    return x


def logits_by_parent(weights, hidden, logits, parent):
    """A level's logits after the token `parent`: of all tokens, or of the six most probable."""
    if "markov_head.markov_w1.weight" in weights:
        w1, w2 = (weights[f"markov_head.markov_w{n}.weight"] for n in (1, 2))
        return logits + w2 @ w1[parent]
    part = {name.rpartition("candidate_selector.")[2]: tensor for name, tensor in weights.items()}
    context = part["predecessor_codebook"][parent] * (part["hidden_projection.weight"] @ hidden)
    scores = logits + part["successor_codebook"] @ context
    return scores.masked_fill(logits < logits.sort().values[-6], -torch.inf)


@pytest.mark.parametrize("algorithm", ["DFlash 2", "DSpark"])
@torch.no_grad()
def test_logits_by_parent_are_what_the_sources_describe(algorithm, monkeypatch):
    """After each node of a tree; the rows without a parent's token are those of DFlash."""
    target = small_target()
    config, weights = PARTS[algorithm](target)
    unused = {"confidence_head.proj.weight": torch.ones(1, 19)}
    draft = built(target, config, weights | unused)
    tokens, features = normal(48).argsort(), normal(30, 32)
    drafter, sequence = started(DFlashDrafter, draft, tokens, features, 11)
    assert drafter.drafting.pass_widths(TREE.num_parents_by_level) == [5]
    logits, hidden = torch.cat(logits_of_tree(drafter, sequence, TREE)), []

    def forward(*args, run=draft.forward):
        for number, layer in enumerate(draft.layers if algorithm == "DFlash 2" else ()):

            def described(x, layer=layer, name=f"layers.{number}", **inputs):
                return convolved_layer_by_description(layer, name, weights, x, inputs)

            monkeypatch.setattr(layer, "forward", described)
        return hidden.append(run(*args)) or hidden[-1]

    monkeypatch.setattr(draft, "forward", forward)
    logits_of_tree(drafter, sequence, TREE)
    (rows,) = hidden[0]
    nodes = [node for node in range(TREE.size) if TREE.child_count[node]]
    for row, node in zip(logits, nodes, strict=True):
        level = rows[TREE.position_ids[node]]
        parent = tokens[11 + node]
        assert_close(row, logits_by_parent(weights, level, target.lm_head(level), parent))
    assert not torch.allclose(logits[1], logits[2], atol=0.01)


def test_torch_checkpoints_are_read_as_well(tmp_path):
    """EAGLE's own folders hold pytorch_model.bin."""
    target = small_target()
    for parts in (eagle1_parts(target), eagle3_parts(target)):
        folder = Path(write(tmp_path / parts[0]["architectures"][0], *parts))
        first = load(folder, target).state_dict()
        (folder / "model.safetensors").unlink()
        torch.save(parts[1], folder / "pytorch_model.bin")
        second = load(folder, target).state_dict()
        assert all(second[name].equal(tensor) for name, tensor in first.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_weight_of_a_draft_file_is_off_by_at_most_half_its_rows_scale(dtype):
    """Rows are of very different sizes, one of them all zeros."""
    count = ROWS_AT_A_TIME + 50
    weight = normal(count, 24) * torch.logspace(-4, 2, count)[:, None]
    weight[3] = 0
    integers, scales = rows_in_8_bits(weight, dtype)
    assert integers.dtype == torch.int8 and scales.dtype == dtype
    assert (integers.abs().amax(1)[weight.any(1)] == 127).all()

    def largest_error(scales):
        """In scales of the row."""
        scales = scales.double()[:, None]
        return ((weight.double() - integers.double() * scales).abs() / scales).max()

    assert largest_error(scales) <= 0.5 + 1e-4
    if dtype == torch.float32:  # the control: scales rounded after the integers were made
        assert largest_error(scales.bfloat16()) > 0.6
