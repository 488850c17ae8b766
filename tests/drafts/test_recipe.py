"""Making a draft.

The text says what the target says, a chain in training is a chain in decoding, and what is trained
is what is loaded.
"""

from __future__ import annotations

import copy
import itertools
import json
import random
import runpy
import shutil
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from sequoia_plan_drafts.recipe import dflash
from sequoia_plan_drafts.recipe.dflash import (
    BlockBatch,
    DFlashRecipe,
    block_batches,
    block_logits,
    level_divergences,
    train_dflash,
)
from sequoia_plan_drafts.recipe.eagle3 import (
    ChainBatch,
    Eagle3Recipe,
    chain_batches,
    chain_divergences,
    chain_logits,
    chain_losses,
    top1_agreement,
    train_eagle3,
    untrained_draft,
)
from sequoia_plan_drafts.recipe.language_model import LanguageModelRecipe, train_language_model
from sequoia_plan_drafts.recipe.text import (
    MAX_PASSAGE_TOKENS,
    TOP,
    misspelled,
    passage_text,
    random_turns,
    write_text,
)
from sequoia_plan_drafts.recipe.training import TrainingText, divergence_and_rejection

from drafts import golden, load, small_target, write
from sequoia_plan.artifacts import SequoiaPlanError, TokenTree
from sequoia_plan.runtime import SequoiaDecoder, load_pair
from sequoia_plan.runtime.models.attention import attending

GOLDEN, BLOCKS = golden("eagle3"), golden("dflash")
LAYERS = (2, 15, 27)
TREE = TokenTree.from_parents([-1, 0, 0, 1, 3])


@pytest.fixture(scope="module")
def text(plain_target, pair, tmp_path_factory):
    """Some conversations that the embedded target wrote, with its hidden states."""
    folder = tmp_path_factory.mktemp("text")
    write_text(plain_target, pair.tokenizer, 300, 3, folder, rows=8, hidden_state_layers=LAYERS)
    loaded = TrainingText([folder])
    loaded.folders = [folder]
    return loaded


@pytest.mark.parametrize(
    ("heads", "shared", "tokens", "sequences"),
    [(6, 2, 1, 5), (4, 4, 1, 3), (9, 3, 7, 1), (9, 3, 4, 2)],
)
def test_heads_that_share_are_attended_as_transformers_does(heads, shared, tokens, sequences):
    """The path that copies nothing: several sequences of one token, and one sequence of several."""
    target = small_target(hidden=8 * heads, num_attention_heads=heads, num_key_value_heads=shared)
    read = torch.randint(48, (sequences, tokens), generator=torch.Generator().manual_seed(1))
    mask = torch.zeros(sequences, 1, tokens, tokens).masked_fill(
        torch.ones(tokens, tokens).triu(1).bool(), torch.finfo(torch.float32).min
    )
    plain = target(read, attention_mask=mask).logits
    with attending(target.device, target.config):
        ours = target(read, attention_mask=mask).logits
    torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_the_text_has_the_probs_and_hidden_states_of_its_target(plain_target, text):
    """Against one pass of transformers over each conversation."""
    assert len(text.conversations) == len(text.hidden_states) >= 3
    for (tokens, answer, ids, logp), states in zip(
        text.conversations, text.hidden_states, strict=True
    ):
        output = plain_target(
            torch.from_numpy(tokens.astype(np.int64))[None], output_hidden_states=True
        )
        logp_of_target = output.logits[0].log_softmax(-1)[
            torch.from_numpy(np.flatnonzero(answer)) - 1
        ]
        assert ids.shape == logp.shape == (answer.sum(), TOP)
        torch.testing.assert_close(
            logp_of_target.gather(1, torch.from_numpy(ids.astype(np.int64))),
            torch.from_numpy(logp.astype(np.float32)),
            atol=2e-2,
            rtol=2e-3,
        )
        expected = torch.cat([output.hidden_states[layer][0] for layer in LAYERS], -1)
        torch.testing.assert_close(
            torch.from_numpy(states[:-1].astype(np.float32)), expected[:-1], atol=2e-2, rtol=2e-3
        )
        assert not states[-1].any()


@torch.no_grad()
def test_labels_of_a_large_vocabulary(pair, tmp_path):
    """Most tokens of Llama 3, Qwen and Gemma are beyond what 16 bits hold."""
    target = small_target(vocabulary=152_000)
    write_text(target, pair.tokenizer, 40, 3, tmp_path, rows=2)
    [*conversations] = TrainingText([tmp_path]).conversations
    tokens, answer, ids, _ = conversations[0]
    assert max(int(tokens.max()), int(ids.max())) > 1 << 16
    logits = target(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0]
    top = logits[np.flatnonzero(answer) - 1].argmax(-1)
    assert top.tolist() == ids[:, 0].tolist()


@torch.no_grad()
def test_text_in_bfloat16(plain_target, pair, tmp_path):
    """The labels are those of the target in bfloat16, which rounds otherwise in other batches."""
    target = copy.deepcopy(plain_target).to(torch.bfloat16)
    write_text(target, pair.tokenizer, 60, 3, tmp_path, rows=4, hidden_state_layers=LAYERS)
    text = TrainingText([tmp_path])
    for tokens, answer, ids, logp in text.conversations:
        output = target(torch.from_numpy(tokens.astype(np.int64))[None])
        places = torch.from_numpy(np.flatnonzero(answer)) - 1
        of_target = output.logits[0].float().log_softmax(-1)[places]
        at_ids = of_target.gather(1, torch.from_numpy(ids.astype(np.int64)))
        difference = (at_ids.exp() - torch.from_numpy(logp.astype(np.float32)).exp()).abs()
        assert difference.sum(1).mean() < 0.1
    assert all(np.isfinite(states).all() for states in text.hidden_states)


def test_a_fifth_of_the_questions_asks_for_copies(pair):
    """The passage is the begin of an earlier answer, whole sentences where there are some."""
    tokenizer, rng = pair.tokenizer, random.Random(1)
    answer = tokenizer.encode("The ferry crosses the river twice every morning. " * 12)
    passages: list[list[int]] = []
    turns = random_turns(tokenizer, [1], rng, passages)

    def num_copying(count: int) -> int:
        """How many of the next `count` questions hold much of the passage."""
        questions = [turn[0].forced for turn in itertools.islice(turns, count)]
        return sum(tokenizer.decode(question).count("river") > 2 for question in questions)

    assert num_copying(100) == 0
    passages.append(answer)
    assert 50 < num_copying(400) < 110
    passage = passage_text(tokenizer, answer)
    assert passage.endswith("morning.") and len(tokenizer.encode(passage)) <= MAX_PASSAGE_TOKENS
    assert passage_text(tokenizer, tokenizer.encode("no end of a sentence")).startswith("no end")
    damaged = misspelled(passage, rng)
    assert 0 < len(passage) - len(damaged) < 15
    assert len(damaged.split()) == len(passage.split())


def test_text_without_words(pair, tmp_path):
    """Where no token is a word, the target writes all questions itself."""
    decode = lambda tokens, **_: "".join(chr(0x4E00 + token % 1000) for token in tokens)  # noqa: E731
    tokenizer = copy.copy(pair.tokenizer)
    tokenizer.decode = decode
    write_text(small_target(vocabulary=50_000), tokenizer, 40, 3, tmp_path, rows=2)
    assert TrainingText([tmp_path]).conversations


def distill(monkeypatch, *words):
    """The command in this process: its exit code."""
    monkeypatch.setattr(sys, "argv", ["distill", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("sequoia_plan_drafts.recipe", run_name="__main__")
    return ended.value.code


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("text", "--rows", "0"), "--rows: found '0', expected a whole number, 1 or more"),
        (("text", "--tokens", "x"), "--tokens: found 'x', expected a whole number, 1 or more"),
        (("text", "--hidden-states", "99"), "--hidden-states 99: the target has 0 (the embedding)"),
        (("train", "--text", "t", "--steps", "0"), "--steps: found '0', expected a whole number"),
        (("train", "--text", "t", "--batch", "²"), "--batch: found '²', expected a whole number"),
        (
            ("train", "--text", "t", "--learning-rate", "nan"),
            "--learning-rate: found 'nan', expected a number above 0",
        ),
        (("train", "--text", "t", "--layers", "99"), "--layers 99: the target has the layers 0 to"),
        (("dflash", "--text", "t", "--layers", "99"), "--layers 99: the target has the layers 0"),
    ],
)
def test_options_that_cannot_be(text, tmp_path, monkeypatch, capsys, words, message):
    words = [str(text.folders[0]) if word == "t" else word for word in words]
    assert distill(monkeypatch, *words, "-o", tmp_path / "out") == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_earlier_text_is_never_lost(text, monkeypatch, capsys):
    [folder] = text.folders
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert distill(monkeypatch, "text", "--tokens", 9, "-o", folder) == 2
    assert f"-o {folder}: exists already; name a new folder" in capsys.readouterr().err
    assert distill(monkeypatch, "train", "--text", folder, "-o", folder) == 2
    assert f"-o {folder}: is the input {folder} itself" in capsys.readouterr().err
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def test_a_tokenizer_without_a_usable_chat_template(pair, plain_target, tmp_path):
    tokenizer = copy.copy(pair.tokenizer)
    for template, message in (
        (None, "no chat template"),
        ("{{ messages[0].content }}", "puts 0 tokens before a question and 0 after it"),
        ("{{ 'word ' * 300 + messages[0].content + '!' }}", "puts 30. tokens before a question"),
    ):
        tokenizer.chat_template = template
        with pytest.raises(SequoiaPlanError, match=message):
            write_text(plain_target, tokenizer, 40, 3, tmp_path, rows=2)


def test_text_that_is_damaged_or_of_another_target(text, tmp_path):
    [folder] = text.folders
    for name, content in (
        ("text.json", b"[]"),
        ("text.json", b"{}"),
        ("text.json", b'{"ends": [1, "x"]}'),
        ("tokens.npy", b""),
        ("answer.npy", (folder / "tokens.npy").read_bytes()[:200]),
    ):
        damaged = shutil.copytree(folder, tmp_path / "damaged", dirs_exist_ok=True)
        (damaged / name).write_bytes(content)
        with pytest.raises(SequoiaPlanError, match="no training text"):
            TrainingText([damaged])
    with pytest.raises(SequoiaPlanError, match="the target has 0 to 99; it was written by another"):
        text.most_probable_tokens(50, 100)


@pytest.mark.parametrize("variant", [name for name in GOLDEN if name != "window"])
@torch.no_grad()
def test_a_chain_in_training_is_one_in_decoding(variant, tmp_path):
    """Logits of speculators for chains from every root, all from one run of passes.

    A chain that attends further than to where it began must not pass.
    """
    config, weights, expected = GOLDEN[variant]
    draft = load(write(tmp_path / "draft", config, weights), small_target())
    tokens, features = expected["chain.tokens"], expected["features"]
    expected_logits = expected["chain.logits"]
    rows = 19
    nothing = torch.zeros(0)
    batch = ChainBatch(
        tokens[None, 1 : rows + 1], features[None, :rows], torch.arange(rows), nothing, nothing
    )
    logits_by_place = list(chain_logits(draft, batch, 4))
    for level, logits in enumerate(logits_by_place):
        for root in range(1, rows + 1 - level):
            torch.testing.assert_close(
                logits[root - 1 + level], expected_logits[level, root - 1], atol=1e-5, rtol=1e-5
            )
    assert not torch.allclose(logits_by_place[1][5], expected_logits[0, 5], atol=1e-2), (
        "the second pass repeats the first"
    )


def test_the_share_of_rejected_tokens_is_that_of_speculative_sampling():
    """By enumeration: a token is drawn from the draft and accepted with min(1, p / q).

    The draft has the target's tokens 3, 0 and 2, and the target's least probable one is cut off.
    """
    d2t = [3, 0, 2]
    target = torch.tensor([[0.5, 0.2, 0.15, 0.1, 0.05], [0.1, 0.2, 0.3, 0.35, 0.05]])
    draft = torch.tensor([[0.1, 0.6, 0.3], [0.5, 0.25, 0.25]])
    accepted = [
        sum(float(q[i]) * min(1.0, float(p[token] / q[i])) for i, token in enumerate(d2t))
        for p, q in zip(target, draft, strict=True)
    ]
    probs, ids = target.sort(descending=True)
    target_to_draft = torch.tensor([1, -1, 2, 0, -1])
    _, rejection = divergence_and_rejection(
        draft.log() + 7, target_to_draft, ids[:, :4], probs[:, :4].log()
    )
    assert float(rejection) == pytest.approx(1 - sum(accepted) / 2, abs=1e-6)
    of_draft_tokens_alone = 0.5 * float((target[:, d2t] - draft).abs().sum(-1).mean())
    assert float(rejection) != pytest.approx(of_draft_tokens_alone, abs=0.02)


def assert_decodes_exactly(loaded, plain_target):
    """Our greedy text is that of transformers."""
    prompt = loaded.tokenizer("Name three rivers of Europe.", return_tensors="pt").input_ids
    ours = SequoiaDecoder(loaded.target, loaded.draft, TREE).generate(prompt, 24)
    assert torch.equal(
        ours.sequences, plain_target.generate(prompt, max_new_tokens=24, do_sample=False)
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_trained_is_what_is_loaded(plain_target, text, tmp_path, dtype):
    """Some steps of training bring the draft nearer to the target.

    Its folder, loaded as anyone's, gives the same logits and decodes exactly.
    """
    recipe = Eagle3Recipe(draft_vocabulary=512, steps=12, batch=2, chain=2, held_out=2, dtype=dtype)
    lines: list[str] = []
    train_eagle3(plain_target, text, recipe, tmp_path / "draft", "the target", lines.append)
    loaded = load_pair(draft=str(tmp_path / "draft"), dtype="float32", placement="resident")
    vocabulary = text.most_probable_tokens(recipe.draft_vocabulary, plain_target.config.vocab_size)
    target_to_draft = vocabulary.target_to_draft
    assert loaded.draft.aux_hidden_state_layers == LAYERS
    assert torch.equal(loaded.draft.d2t, vocabulary.d2t)
    last_two = range(len(text.conversations) - 2, len(text.conversations))
    (scaled,) = chain_batches(text, last_two, 2, 1 / text.hidden_state_rms())
    (held_out,) = chain_batches(text, last_two, 2, torch.ones(3 * plain_target.config.hidden_size))
    token_counts = text.token_counts(plain_target.config.vocab_size)
    with torch.no_grad():
        new = untrained_draft(plain_target, vocabulary.d2t, token_counts)
        before = chain_divergences(new, target_to_draft, scaled, 2)
        after = chain_divergences(loaded.draft, target_to_draft, held_out, 2)
    assert (after < before).all()
    reported = [float(share) for share in lines[-1].split("[")[1].split("]")[0].split(",")]
    agreement = top1_agreement(loaded.draft, target_to_draft, [held_out], 2)
    assert agreement == pytest.approx(reported, abs=0.02), (
        "bfloat16 weights and unscaled hidden states"
    )
    assert_decodes_exactly(loaded, plain_target)


def test_training_goes_on_from_a_draft(plain_target, text, tmp_path):
    """Without a learning rate the draft stays what it was; other drafts are refused.

    With a learning rate it comes nearer to the target, chains included.
    """
    recipe = Eagle3Recipe(draft_vocabulary=512, steps=4, batch=2, chain=2, held_out=2)
    train_eagle3(plain_target, text, recipe, tmp_path / "draft", "the target", print)
    last_two = range(len(text.conversations) - 2, len(text.conversations))
    (held_out,) = chain_batches(text, last_two, 2, torch.ones(3 * plain_target.config.hidden_size))
    kept = replace(
        recipe, draft_vocabulary=9, steps=1, learning_rate=0.0, start=str(tmp_path / "draft")
    )
    losses = {}
    for name, further in (
        ("draft", None),
        ("kept", kept),
        ("further", replace(kept, steps=12, learning_rate=1e-3)),
    ):
        if further:
            train_eagle3(plain_target, text, further, tmp_path / name, "the target", print)
        draft = load(tmp_path / name, plain_target)
        vocabulary = text.draft_vocabulary(draft.d2t, plain_target.config.vocab_size)
        with torch.no_grad():
            losses[name] = chain_losses(draft, vocabulary.target_to_draft, held_out, recipe)
    # fc is rounded to bfloat16 once more
    torch.testing.assert_close(losses["kept"], losses["draft"], atol=0.01, rtol=0)
    with safe_open(tmp_path / "kept" / "model.safetensors", "pt") as file:
        written = json.loads(file.metadata()["sequoia_plan"])["recipe"]
    assert (written["draft_vocabulary"], written["start"]) == (512, str(tmp_path / "draft"))
    assert (losses["further"] < losses["draft"] - 0.02).all(), losses
    config, weights, _ = BLOCKS["plain"]
    (tmp_path / "empty").mkdir()
    for other in (write(tmp_path / "block", config, weights), str(tmp_path / "empty")):
        message = f"^--start {other}: expected a draft as `eagle3` writes it"
        with pytest.raises(SequoiaPlanError, match=f"{message}|^{other}: made for a target"):
            train_eagle3(
                plain_target, text, replace(kept, start=other), tmp_path / "refused", "the target"
            )
    assert not (tmp_path / "refused").exists()


@torch.no_grad()
def test_a_block_in_training_is_one_in_decoding(tmp_path):
    """Logits of speculators for blocks from several roots, all from one pass.

    Blocks that see further than their roots must not pass.
    """
    config, weights, expected = BLOCKS["plain"]
    target = small_target()
    target.model.embed_tokens.weight.data = expected["embeddings"]
    draft = load(write(tmp_path / "draft", config, weights), target)
    tokens, features, anchors = (expected[name] for name in ("tokens", "features", "anchors"))
    nothing = torch.zeros(0)
    batch = BlockBatch(
        features[None, : len(tokens)],
        tokens[anchors][None],
        anchors[None],
        nothing,
        nothing,
        nothing,
    )
    torch.testing.assert_close(
        block_logits(draft, batch)[0], expected["logits"][:, 1:], atol=1e-5, rtol=1e-5
    )
    late = batch._replace(positions=batch.positions + 1)
    assert not torch.allclose(block_logits(draft, late)[0], expected["logits"][:, 1:], atol=1e-2)


def test_the_labels_of_a_block_are_those_of_the_tokens_after_its_root(text):
    """Against the conversations themselves; where an answer ends, nothing is learnt."""
    recipe = DFlashRecipe(size=4, roots=400)
    numbers = [0, 1, 2]
    scale = torch.ones(text.hidden_states[0].shape[1])
    (batch,) = block_batches(text, numbers, 3, scale, recipe)
    ended = 0
    for row, conversation in enumerate(numbers):
        tokens, answer, ids, _ = text.conversations[conversation]
        labels = dict(zip(np.flatnonzero(answer).tolist(), ids.tolist(), strict=True))
        for root, position, label_rows in zip(
            batch.roots[row].tolist(),
            batch.positions[row].tolist(),
            batch.label_rows[row].tolist(),
            strict=True,
        ):
            assert root == tokens[position] and position + 1 in labels
            for level, label_row in enumerate(label_rows, 1):
                label = batch.top_ids[label_row].tolist() if label_row >= 0 else None
                assert label == labels.get(position + level)
                ended += label_row < 0
    assert ended


def test_a_block_draft_that_is_trained_is_what_is_loaded(plain_target, text, tmp_path):
    """Some steps bring it nearer to the target, as its folder shows when it is loaded as anyone's.

    It decodes exactly.
    """
    recipe = DFlashRecipe(
        draft_vocabulary=512, steps=12, batch=2, held_out=2, layers=(0,), size=4, roots=16
    )
    lines: list[str] = []
    train_dflash(plain_target, text, recipe, tmp_path / "draft", "the target", lines.append)
    loaded = load_pair(draft=str(tmp_path / "draft"), dtype="float32", placement="resident")
    vocabulary = text.most_probable_tokens(recipe.draft_vocabulary, plain_target.config.vocab_size)
    target_to_draft = vocabulary.target_to_draft
    assert loaded.draft.aux_hidden_state_layers == LAYERS
    assert torch.equal(loaded.draft.d2t, vocabulary.d2t)
    mask_token = int(text.token_counts(plain_target.config.vocab_size).argmin())
    assert loaded.draft.block.mask_token == mask_token
    last_two = range(len(text.conversations) - 2, len(text.conversations))
    scales = 1 / text.hidden_state_rms(), torch.ones(3 * plain_target.config.hidden_size)
    scaled, unscaled = (next(block_batches(text, last_two, 2, scale, recipe)) for scale in scales)
    same_roots = scaled._replace(hidden_states=unscaled.hidden_states)
    with torch.no_grad():
        new = dflash.untrained_draft(plain_target, LAYERS, vocabulary.d2t, recipe, mask_token)
        before = level_divergences(new, target_to_draft, scaled)
        after = level_divergences(loaded.draft, target_to_draft, same_roots)
    assert (after < before).all()
    assert_decodes_exactly(loaded, plain_target)


def test_text_without_the_hidden_states_is_refused(plain_target, text):
    """EAGLE-3's folder names no layers, so everyone would read a draft of others wrongly."""
    other = TrainingText([])
    other.metadata = [{"taps": [3, 15, 27]}]
    other.conversations, other.hidden_states = text.conversations, text.hidden_states
    message = (
        r"--text: holds the hidden states \[3, 15, 27\], expected 2 15 27 for this draft; "
        "write it with --hidden-states 2 15 27"
    )
    with pytest.raises(SequoiaPlanError, match=message):
        train_eagle3(plain_target, other, Eagle3Recipe(), "nowhere", "the target")
    other.metadata = [{}]
    message = "--text: holds no hidden states, and this draft reads some; write it with --hidden-s"
    with pytest.raises(SequoiaPlanError, match=message):
        train_dflash(plain_target, other, DFlashRecipe(), "nowhere", "the target")


def test_text_that_leaves_nothing_to_learn_from_is_refused(plain_target, text, tmp_path):
    """Training would wait for its first batch forever."""
    count = len(text.conversations)
    message = f"--held-out 100: the text has {count} conversations; write more text, or hold out f"
    with pytest.raises(SequoiaPlanError, match=message):
        train_eagle3(plain_target, text, Eagle3Recipe(draft_vocabulary=64), tmp_path, "the target")
    recipe = LanguageModelRecipe(draft_vocabulary=64)
    with pytest.raises(SequoiaPlanError, match="--held-out 100: the text has"):
        train_language_model(plain_target, text, recipe, tmp_path / "d.safetensors", "the target")
