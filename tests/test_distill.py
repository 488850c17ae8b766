"""Making a draft: the text says what the target says, a chain in training is a chain in decoding, and what is trained is what is loaded."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from drafts import golden, load, small_target, write
from safetensors import safe_open

from sequoia_plan.artifacts import SequoiaPlanError, TokenTree
from sequoia_plan.profiler.distill.block import BlockRecipe, Blocks, blocks, train_dflash
from sequoia_plan.profiler.distill.block import batches as block_batches
from sequoia_plan.profiler.distill.block import divergences as block_divergences
from sequoia_plan.profiler.distill.block import untrained as untrained_block
from sequoia_plan.profiler.distill.feature import Batch, FeatureRecipe, batches, chains, divergences, evaluate, losses, train_eagle3, untrained
from sequoia_plan.profiler.distill.text import TOP, write_text
from sequoia_plan.profiler.distill.train import Recipe, train
from sequoia_plan.profiler.distill.training import Text, apart, magnitudes
from sequoia_plan.runtime import SequoiaDecoder, load_pair
from sequoia_plan.runtime.models.attention import attending

GOLDEN, BLOCKS = golden("eagle3"), golden("dflash")
TAPS = (2, 15, 27)
TREE = TokenTree.from_parents([-1, 0, 0, 1, 3])


@pytest.fixture(scope="module")
def text(plain_target, pair, tmp_path_factory):
    """Some conversations that the embedded target wrote, with its hidden states."""
    folder = tmp_path_factory.mktemp("text")
    write_text(plain_target, pair.tokenizer, 500, 3, folder, rows=8, taps=TAPS)
    return Text([folder])


@pytest.mark.parametrize(("heads", "shared", "tokens", "sequences"), [(6, 2, 1, 5), (4, 4, 1, 3), (9, 3, 7, 1), (9, 3, 4, 2)])
def test_heads_that_share_are_attended_as_transformers_does(heads, shared, tokens, sequences):
    """The path that copies nothing, for several sequences of one token and for one sequence of several."""
    target = small_target(hidden=8 * heads, num_attention_heads=heads, num_key_value_heads=shared)
    read = torch.randint(48, (sequences, tokens), generator=torch.Generator().manual_seed(1))
    mask = torch.zeros(sequences, 1, tokens, tokens).masked_fill(torch.ones(tokens, tokens).triu(1).bool(), torch.finfo(torch.float32).min)
    plain = target(read, attention_mask=mask).logits
    with attending(target.device, target.config):
        ours = target(read, attention_mask=mask).logits
    torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_the_text_has_the_laws_and_hidden_states_of_its_target(plain_target, text):
    """Against one pass of transformers over each conversation."""
    assert len(text.conversations) == len(text.hidden) >= 3
    for (tokens, answer, ids, logp), states in zip(text.conversations, text.hidden, strict=True):
        read = plain_target(torch.from_numpy(tokens.astype(np.int64))[None], output_hidden_states=True)
        law = read.logits[0].log_softmax(-1)[torch.from_numpy(np.flatnonzero(answer)) - 1]
        assert ids.shape == logp.shape == (answer.sum(), TOP)
        torch.testing.assert_close(law.gather(1, torch.from_numpy(ids.astype(np.int64))), torch.from_numpy(logp.astype(np.float32)), atol=2e-2, rtol=2e-3)
        expected = torch.cat([read.hidden_states[tap][0] for tap in TAPS], -1)
        torch.testing.assert_close(torch.from_numpy(states[:-1].astype(np.float32)), expected[:-1], atol=2e-2, rtol=2e-3)
        assert not states[-1].any()


@pytest.mark.parametrize("variant", [name for name in GOLDEN if name != "window"])
@torch.no_grad()
def test_a_chain_in_training_is_one_in_decoding(variant, tmp_path):
    """Logits of speculators for chains from every root, all from one run of passes. A chain that attends further than to where it began
    must not pass."""
    config, weights, expected = GOLDEN[variant]
    draft = load(write(tmp_path / "draft", config, weights), small_target())
    tokens, features, wanted = expected["chain.tokens"], expected["features"], expected["chain.logits"]
    rows = 19
    batch = Batch(tokens[None, 1 : rows + 1], features[None, :rows], torch.arange(rows), torch.zeros(0), torch.zeros(0))
    found = list(chains(draft, batch, 4))
    for level, logits in enumerate(found):
        for root in range(1, rows + 1 - level):
            torch.testing.assert_close(logits[root - 1 + level], wanted[level, root - 1], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(found[1][5], wanted[0, 5], atol=1e-2), "the second pass repeats the first"


def test_the_share_of_rejected_tokens_is_that_of_speculative_sampling():
    """By enumeration: a token is drawn from the draft and kept with min(1, p / q). The draft has tokens 3, 0 and 2, and the target's last is cut off."""
    target, draft = torch.tensor([[0.5, 0.2, 0.15, 0.1, 0.05], [0.1, 0.2, 0.3, 0.35, 0.05]]), torch.tensor([[0.1, 0.6, 0.3], [0.5, 0.25, 0.25]])
    kept = [sum(float(q[at]) * min(1.0, float(p[token] / q[at])) for at, token in enumerate((3, 0, 2))) for p, q in zip(target, draft, strict=True)]
    logp, ids = target.sort(descending=True)
    _, found = apart(draft.log() + 7, torch.tensor([1, -1, 2, 0, -1]), ids[:, :4], logp[:, :4].log())
    assert float(found) == pytest.approx(1 - sum(kept) / 2, abs=1e-6)
    assert float(found) != pytest.approx(0.5 * float((target[:, [3, 0, 2]] - draft).abs().sum(-1).mean()), abs=0.02), "of covered tokens alone"


def assert_decodes_exactly(loaded, plain_target):
    """Our greedy text is that of transformers."""
    prompt = loaded.tokenizer("Name three rivers of Europe.", return_tensors="pt").input_ids
    ours = SequoiaDecoder(loaded.target, loaded.draft, TREE).generate(prompt, 24)
    assert torch.equal(ours.sequences, plain_target.generate(prompt, max_new_tokens=24, do_sample=False))


def test_what_is_trained_is_what_is_loaded(plain_target, text, tmp_path):
    """Some steps of training bring the draft nearer to the target; its folder, loaded as anyone's, gives the same logits and decodes exactly."""
    recipe = FeatureRecipe(covered=512, steps=12, batch=2, chain=2, held_out=2)
    said: list[str] = []
    train_eagle3(plain_target, text, recipe, tmp_path / "draft", "the target", said.append)
    loaded = load_pair(draft=str(tmp_path / "draft"), dtype="float32", placement="resident")
    covered, _, to_draft = text.most_used(recipe.covered, plain_target.config.vocab_size)
    assert loaded.draft.taps == TAPS and torch.equal(loaded.draft.covered_tokens, covered)
    last_two = range(len(text.conversations) - 2, len(text.conversations))
    (scaled,) = batches(text, last_two, 2, 1 / magnitudes(text))
    (held_out,) = batches(text, last_two, 2, torch.ones(3 * plain_target.config.hidden_size))
    with torch.no_grad():
        new = untrained(plain_target, covered, text.counts(plain_target.config.vocab_size))
        before, after = divergences(new, to_draft, scaled, 2), divergences(loaded.draft, to_draft, held_out, 2)
    assert (after < before).all()
    told = [float(each) for each in said[-1].split("[")[1].split("]")[0].split(",")]
    assert evaluate(loaded.draft, to_draft, [held_out], 2) == pytest.approx(told, abs=0.02), "bfloat16 weights and unscaled hidden states"
    assert_decodes_exactly(loaded, plain_target)


def test_training_goes_on_from_a_draft(plain_target, text, tmp_path):
    """Without a learning rate the draft stays what it was; with one it comes nearer to the target, chains included. Other drafts are refused."""
    recipe = FeatureRecipe(covered=512, steps=4, batch=2, chain=2, held_out=2)
    train_eagle3(plain_target, text, recipe, tmp_path / "draft", "the target", print)
    (held_out,) = batches(text, range(len(text.conversations) - 2, len(text.conversations)), 2, torch.ones(3 * plain_target.config.hidden_size))
    kept = replace(recipe, covered=9, steps=1, learning_rate=0.0, start=str(tmp_path / "draft"))
    found = {}
    for name, further in (("draft", None), ("kept", kept), ("further", replace(kept, steps=12, learning_rate=1e-3))):
        if further:
            train_eagle3(plain_target, text, further, tmp_path / name, "the target", print)
        draft = load(tmp_path / name, plain_target)
        _, to_draft = text.covered_by(draft.covered_tokens, plain_target.config.vocab_size)
        with torch.no_grad():
            found[name] = losses(draft, to_draft, held_out, recipe)
    torch.testing.assert_close(found["kept"], found["draft"], atol=0.01, rtol=0)  # fc is rounded to bfloat16 once more
    with safe_open(tmp_path / "kept" / "model.safetensors", "pt") as file:
        told = json.loads(file.metadata()["sequoia_plan"])["recipe"]
    assert (told["covered"], told["start"]) == (512, str(tmp_path / "draft"))
    assert (found["further"] < found["draft"] - 0.02).all(), found
    config, weights, _ = BLOCKS["plain"]
    (tmp_path / "empty").mkdir()
    for other in (write(tmp_path / "block", config, weights), str(tmp_path / "empty")):
        with pytest.raises(SequoiaPlanError, match=f"^--start {other}: expected a draft as `eagle3` writes it|^{other}: made for a target"):
            train_eagle3(plain_target, text, replace(kept, start=other), tmp_path / "refused", "the target")
    assert not (tmp_path / "refused").exists()


@torch.no_grad()
def test_a_block_in_training_is_one_in_decoding(tmp_path):
    """Logits of speculators for blocks from several roots, all from one pass. Blocks that see further than their roots must not pass."""
    config, weights, expected = BLOCKS["plain"]
    target = small_target()
    target.model.embed_tokens.weight.data = expected["embeddings"]
    draft = load(write(tmp_path / "draft", config, weights), target)
    tokens, features, anchors = (expected[name] for name in ("tokens", "features", "anchors"))
    nothing = torch.zeros(0)
    batch = Blocks(features[None, : len(tokens)], tokens[anchors][None], anchors[None], nothing, nothing, nothing)
    torch.testing.assert_close(blocks(draft, batch)[0], expected["logits"][:, 1:], atol=1e-5, rtol=1e-5)
    late = batch._replace(positions=batch.positions + 1)
    assert not torch.allclose(blocks(draft, late)[0], expected["logits"][:, 1:], atol=1e-2)


def test_the_laws_of_a_block_are_those_of_the_tokens_after_its_root(text):
    """Against the conversations themselves; where an answer ends, nothing is learnt."""
    recipe = BlockRecipe(size=4, roots=400)
    which = [0, 1, 2]
    (batch,) = block_batches(text, which, 3, torch.ones(text.hidden[0].shape[1]), recipe)
    ended = 0
    for row, conversation in enumerate(which):
        tokens, answer, ids, _ = text.conversations[conversation]
        laws = dict(zip(np.flatnonzero(answer).tolist(), ids.tolist(), strict=True))
        for root, position, found in zip(batch.roots[row].tolist(), batch.positions[row].tolist(), batch.laws[row].tolist(), strict=True):
            assert root == tokens[position] and position + 1 in laws
            for level, at in enumerate(found, 1):
                assert (batch.ids[at].tolist() if at >= 0 else None) == laws.get(position + level)
                ended += at < 0
    assert ended


def test_a_block_draft_that_is_trained_is_what_is_loaded(plain_target, text, tmp_path):
    """Some steps bring it nearer to the target, as its folder shows when it is loaded as anyone's; and that decodes exactly."""
    recipe = BlockRecipe(covered=512, steps=12, batch=2, held_out=2, layers=(0,), size=4, roots=16)
    said: list[str] = []
    train_dflash(plain_target, text, recipe, tmp_path / "draft", "the target", said.append)
    loaded = load_pair(draft=str(tmp_path / "draft"), dtype="float32", placement="resident")
    covered, _, to_draft = text.most_used(recipe.covered, plain_target.config.vocab_size)
    assert loaded.draft.taps == TAPS and torch.equal(loaded.draft.covered_tokens, covered)
    assert loaded.draft.block.mask == int(text.counts(plain_target.config.vocab_size).argmin())
    last_two = range(len(text.conversations) - 2, len(text.conversations))
    scales = 1 / magnitudes(text), torch.ones(3 * plain_target.config.hidden_size)
    drawn = [next(block_batches(text, last_two, 2, scale, recipe)) for scale in scales]
    same = drawn[0]._replace(hidden=drawn[1].hidden)
    with torch.no_grad():
        new = untrained_block(plain_target, TAPS, covered, recipe, loaded.draft.block.mask)
        before, after = block_divergences(new, to_draft, drawn[0]), block_divergences(loaded.draft, to_draft, same)
    assert (after < before).all()
    assert_decodes_exactly(loaded, plain_target)


def test_text_without_the_hidden_states_is_refused(plain_target, text):
    """The folder that is written says no layer ids, so a draft of other states would be read wrongly by everyone."""
    other = Text([])
    other.facts, other.conversations, other.hidden = [{"taps": [3, 15, 27]}], text.conversations, text.hidden
    with pytest.raises(SequoiaPlanError, match=r"--text: holds the hidden states \[3, 15, 27\], expected 2 15 27 for this draft; write it with --taps 2 15 27"):
        train_eagle3(plain_target, other, FeatureRecipe(), "nowhere", "the target")
    other.facts = [{}]
    with pytest.raises(SequoiaPlanError, match="--text: holds no hidden states, and this draft reads some; write it with --taps"):
        train_dflash(plain_target, other, BlockRecipe(), "nowhere", "the target")


def test_text_that_leaves_nothing_to_learn_from_is_refused(plain_target, text, tmp_path):
    """Training would wait for its first batch forever."""
    count = len(text.conversations)
    with pytest.raises(SequoiaPlanError, match=rf"--held-out 100: the text has {count} conversations; write more text, or hold out fewer"):
        train_eagle3(plain_target, text, FeatureRecipe(covered=64), tmp_path, "the target")
    with pytest.raises(SequoiaPlanError, match="--held-out 100: the text has"):
        train(plain_target, text, Recipe(covered=64), tmp_path / "draft.safetensors", "the target")
