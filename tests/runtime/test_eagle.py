"""EAGLE drafts: their logits against an implementation that is not ours, and drafts in a step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from drafts import eagle1_parts, eagle3_parts, golden, load, small_target, write
from sequoia_plan.artifacts import TokenTree
from sequoia_plan.artifacts.expected_tokens import expected_tokens
from sequoia_plan.profiler.acceptance import measure_acceptance
from sequoia_plan.profiler.observed import TREE as MEASURED
from sequoia_plan.runtime import Pair, Sampling, SequoiaDecoder
from sequoia_plan.runtime.base.masks import additive_mask
from sequoia_plan.runtime.base.sequence import SequenceState
from sequoia_plan.runtime.base.tree_tensors import TreeTensors
from sequoia_plan.runtime.draft.eagle import EagleDrafter

GOLDEN = golden("eagle3")
DEPTH = 4
FORK = 12
"""The slot of the root after which the two texts of the golden file differ."""
TREE = TokenTree.from_parents([-1, 0, 0, 1, 2, 3, 4, 5, 6])
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


def flat(config, weights, layout):
    """The same draft as SpecForge and AngelSlim write them."""
    layer = config["transformer_layer_config"]
    ids = [number - 1 for number in config["eagle_aux_hidden_state_layer_ids"]]
    names = ("draft_vocab_size", "norm_before_residual", "norm_output", "fc_norm", "norm_before_fc")
    kept = {name: config[name] for name in names}
    architectures = {
        "SpecForge": "LlamaForCausalLMEagle3",
        "AngelSlim": "Eagle3LlamaForCausalLM",
    }
    rope = {"rope_theta": layer["rope_parameters"]["rope_theta"], "rope_scaling": None}
    settings = {name: value for name, value in layer.items() if name != "rope_parameters"}
    renamed = {name.replace("layers.0.", "midlayer."): value for name, value in weights.items()}
    flat_layout = {
        "architectures": [architectures[layout]],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids},
    }
    return settings | rope | kept | flat_layout, renamed


def started(draft, text, features, committed):
    """A drafter, and a sequence whose prompt is `text`, read up to `committed` in two chunks.

    The target's hidden states are `features`.
    """
    drafter = EagleDrafter(draft, draft.get_output_embeddings().out_features, draft.d2t)
    sequence = SequenceState(torch.device("cpu"))
    sequence.reserve(64, drafter.new_cache, drafter.new_cache)
    sequence.tokens[: text.numel()] = text
    sequence.length.fill_(committed)
    drafter.prefill(sequence.draft, text[:committed])
    for slots in torch.arange(committed).split(committed - 3 if committed > 4 else committed):
        mask = additive_mask(torch.arange(int(slots[-1]) + 1) <= slots[:, None], torch.float32)
        drafter.prefill_hidden_states(sequence.draft, text[slots], slots, mask, features[slots])
    return drafter, sequence


def logits_of_tree(drafter, sequence, tree):
    """Logits of each pass of a tree whose tokens are in the sequence."""
    tensors = TreeTensors.of(tree, "cpu", torch.float32)
    columns, logits, output = tensors.columns(sequence.length, 64), [], None
    for draft_pass in drafter.passes(tree, tensors):
        output = drafter.forward(draft_pass, sequence, columns, output)
        logits.append(output.logits)
    return logits


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
    assert draft.aux_hidden_state_layers == (1, 2, 4)
    # in training, speculators counts the window of deeper rows from the first row
    levels = 1 if variant == "window" else DEPTH
    for root in range(1, 20):
        drafter, sequence = started(draft, expected["chain.tokens"], expected["features"], root)
        chain = TokenTree.chain(levels + 1)
        for level, logits in enumerate(logits_of_tree(drafter, sequence, chain)):
            torch.testing.assert_close(
                logits[0], expected["chain.logits"][level, root - 1], atol=1e-5, rtol=1e-5
            )
    drafter, sequence = started(draft, expected["chain.tokens"], expected["features"], FORK)
    for level in range(1, DEPTH + 1):
        for node, name in ((2 * level - 1, "chain"), (2 * level, "branch")):
            sequence.tokens[FORK + node] = expected[f"{name}.tokens"][FORK + level]
    for level, logits in enumerate(logits_of_tree(drafter, sequence, TREE)[:levels]):
        for row, name in zip(logits, ("chain", "branch"), strict=False):
            torch.testing.assert_close(
                row, expected[f"{name}.logits"][level, FORK - 1], atol=1e-5, rtol=1e-5
            )


def eagle1_by_hand(weights, config, embeddings, head, tokens, features, root, deeper):
    """Logits along a chain after `root`, from the description of EAGLE alone.

    Every row is computed anew, without a cache, in plain operations.
    """
    heads, shared = config["num_attention_heads"], config["num_key_value_heads"]
    width, eps = config["head_dim"], config["rms_norm_eps"]
    w = {name.removeprefix("layers.0."): value for name, value in weights.items()}
    rows = [torch.cat([embeddings[tokens[i + 1]], features[i]]) for i in range(root)]
    logits = []
    for level in range(deeper + 1):
        x = torch.stack(rows) @ w["fc.weight"].T + w["fc.bias"]
        wavelengths = config["rope_theta"] ** (torch.arange(0, width, 2) / width)
        angles = torch.arange(len(rows))[:, None] / wavelengths
        rotation = torch.polar(torch.ones_like(angles), angles)[:, None]

        def rotated(states, rotation=rotation):
            first, second = states.chunk(2, -1)
            states = torch.complex(first, second) * rotation
            return torch.cat([states.real, states.imag], -1)

        q = rotated((x @ w["self_attn.q_proj.weight"].T).view(len(rows), heads, width))
        k = rotated((x @ w["self_attn.k_proj.weight"].T).view(len(rows), shared, width))
        v = (x @ w["self_attn.v_proj.weight"].T).view(len(rows), shared, width)
        k, v = (states.repeat_interleave(heads // shared, 1) for states in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) / width**0.5
        scores = scores.masked_fill(torch.ones(len(rows), len(rows)).triu(1).bool(), -torch.inf)
        attended = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).reshape(len(rows), -1)
        x = x + attended @ w["self_attn.o_proj.weight"].T
        inverse_rms = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        normed = x * inverse_rms * w["post_attention_layernorm.weight"]
        gate, up = (normed @ w[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (torch.nn.functional.silu(gate) * up) @ w["mlp.down_proj.weight"].T
        logits.append(x[-1] @ head.T)
        if level < deeper:
            rows.append(torch.cat([embeddings[tokens[root + 1 + level]], x[-1]]))
    return logits


@torch.no_grad()
def test_eagle1_is_what_its_paper_describes(tmp_path):
    """Against a computation of the test's own: no library on the package index has this model."""
    target = small_target()
    config, weights = eagle1_parts(target)
    draft = load(write(tmp_path / "draft", config, weights), target)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(48, (20,), generator=generator)
    features = torch.randn(20, 16, generator=generator)
    embeddings, head = target.model.embed_tokens.weight, target.lm_head.weight
    for root in (1, 2, 5, 11):
        drafter, sequence = started(draft, tokens, features, root)
        expected = eagle1_by_hand(
            weights, config, embeddings, head, tokens, features, root, deeper=3
        )
        for level, logits in enumerate(logits_of_tree(drafter, sequence, TokenTree.chain(5))):
            torch.testing.assert_close(logits[0], expected[level], atol=1e-5, rtol=1e-5)


def test_torch_checkpoints_are_read_as_well(tmp_path):
    """EAGLE's own folders hold pytorch_model.bin."""
    target = small_target()
    for parts in (eagle1_parts(target), eagle3_parts(target)):
        folder = write(tmp_path / "draft", *parts)
        first = load(folder, target).state_dict()
        (tmp_path / "draft" / "model.safetensors").unlink()
        torch.save(parts[1], tmp_path / "draft" / "pytorch_model.bin")
        assert all(
            torch.equal(value, first[name])
            for name, value in load(folder, target).state_dict().items()
        )
        (tmp_path / "draft" / "pytorch_model.bin").unlink()


def test_which_hidden_states_are_read(tmp_path):
    """Layouts count layers from different places; without numbers, the engines' default is read."""
    target = small_target(layers=8)
    config, weights = eagle3_parts(target)
    without_numbers = {name: value for name, value in config.items() if name != "eagle_config"}
    nested = {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": config,
        "draft_vocab_size": 16,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 6],
    }
    for written, expected in (
        (config, (1, 2, 7)),
        (without_numbers, (2, 4, 5)),
        (nested, (0, 1, 6)),
    ):
        draft = load(write(tmp_path / "draft", written, weights), target)
        assert draft.aux_hidden_state_layers == expected


def test_a_draft_can_be_trained_and_then_keeps_its_promise(tmp_path):
    """The module computes gradients: after a few seconds of training, acceptance is higher.

    What the profiler promises of a tree by counting level by level is what decoding yields.
    """
    torch.manual_seed(0)
    target = small_target()
    text = target.generate(
        torch.randint(48, (64, 1)), max_new_tokens=48, do_sample=True, temperature=0.5, top_k=0
    )
    folder = write(tmp_path / "draft", *eagle3_parts(target, d2t=range(48), intermediate=64))
    draft, before = load(folder, target), load(folder, target)
    with torch.no_grad():
        output = target(text, output_hidden_states=True)
        layers = [output.hidden_states[layer] for layer in draft.aux_hidden_state_layers]
        features = torch.cat(layers, -1)
        expected_logp = torch.log_softmax(output.logits[:, 1:-1, draft.d2t] / 0.5, -1)
    rows = text.shape[1] - 1
    positions = torch.arange(rows).expand(len(text), -1)
    causal = torch.ones(rows, rows).tril().bool()
    masks = {"full_attention": additive_mask(causal, torch.float32)[None, None]}
    optimizer = torch.optim.AdamW(draft.train().requires_grad_(True).parameters(), 3e-3)
    for _ in range(200):
        logits, _ = draft(text[:, 1:], draft.fuse(features[:, :-1]), positions, masks)
        logp = torch.log_softmax(logits[:, :-1] / 0.5, -1)
        loss = torch.nn.functional.kl_div(
            logp, expected_logp, log_target=True, reduction="batchmean"
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    draft.eval().requires_grad_(False)
    sampling, prompts = Sampling(0.5, verifier="sequoia"), [row[:6].tolist() for row in text[:32]]
    tokens = {}
    for name, model, count in (("before", before, 8), ("after", draft, 32)):
        decoder = SequoiaDecoder(target, model, MEASURED)
        texts = [
            decoder.generate(prompt, 40, sampling=sampling, seed=seed)
            for seed, prompt in enumerate(prompts[:count])
        ]
        steps = sum(text.steps for text in texts)
        tokens[name] = sum(text.new_tokens for text in texts) / steps
    assert tokens["after"] > tokens["before"] + 0.15
    metadata = {"target": {"name": "small"}, "draft": {"name": "small"}}
    pair = Pair(target, draft, SimpleNamespace(eos_token_id=None), metadata)
    (estimate,) = measure_acceptance(pair, prompts, [sampling], precision=0.0, tokens_per_prompt=40)
    counts = estimate.totals().with_classes(1)
    rates = counts.accepted / counts.trials[..., None]
    assert expected_tokens(MEASURED, rates) == pytest.approx(tokens["after"], rel=0.05)
