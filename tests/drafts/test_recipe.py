"""Making a draft.

The text says what the target says, a chain in training is a chain in decoding, and what is trained
is what is loaded.
"""

import copy
import json
import random
import re
import runpy
import sys
from dataclasses import replace

import pytest
import torch
from architectures import plain_text
from refusals import refusal
from safetensors import safe_open
from sequoia_plan_drafts.recipe.eagle3 import (
    Eagle3Recipe,
    chain_logits,
    train_eagle3,
    untrained_draft,
)
from sequoia_plan_drafts.recipe.language_model import train_language_model
from sequoia_plan_drafts.recipe.questions import (
    MAX_PASSAGE_TOKENS,
    Questions,
    around_a_hole,
    misspelled,
    passage_of,
)
from sequoia_plan_drafts.recipe.text import TOP, Lane, TextRecipe, Writer, write_text
from sequoia_plan_drafts.recipe.training import (
    TrainingSettings,
    chain_losses,
    divergence_and_rejection,
)
from sequoia_plan_drafts.recipe.training_text import TextBatch, TrainingText
from spies import spy
from toys import TREE

from drafts import built, golden, load, small_target
from sequoia_plan.models.loaded_model import LoadedModel
from sequoia_plan.runtime import SequoiaDecoder, load_pair
from sequoia_plan.server import prompts

pytestmark = pytest.mark.slow
GOLDEN = golden("eagle3")
LAYERS = (2, 15, 27)
STATES = (*LAYERS, 28)


@pytest.fixture(scope="module")
def text_folder(pair, tmp_path_factory):
    """Some conversations that the embedded target wrote, with its hidden states."""
    folder = tmp_path_factory.mktemp("text")
    write_text(pair.target, TextRecipe(450, 6, hidden_states=STATES, seed=3), folder)
    return folder


@pytest.fixture
def text(text_folder):
    return TrainingText([text_folder])


def held_out_batch(text):
    """The last two conversations."""
    count = len(text.conversations)
    return next(text.batches(range(count - 2, count), 2))


@torch.no_grad()
def held_out_losses(text, draft, vocabulary, scale=1):
    """A draft's losses on the last conversations, and its logits by place."""
    batch = held_out_batch(text)
    logits = list(chain_logits(draft, batch, 2, scale))
    return chain_losses(logits, vocabulary.target_to_draft, batch), logits


@torch.no_grad()
def test_the_text_has_the_probs_and_hidden_states_of_its_target(plain_target, pair, text):
    """Against one pass of transformers over each conversation; an answer ends at the end token."""
    end = pair.tokenizer.eos_token_id
    for tokens, top_ids, top_logp, states in text.conversations:
        output = plain_target(tokens.long()[None], output_hidden_states=True)
        logp = output.logits[0].log_softmax(-1)[-len(top_ids) - 1 : -1]
        assert top_ids.shape == top_logp.shape == (len(top_ids), TOP)
        torch.testing.assert_close(
            logp.gather(1, top_ids.long()), top_logp.float(), atol=2e-2, rtol=2e-3
        )
        expected = torch.cat([output.hidden_states[layer][0] for layer in STATES], -1)
        torch.testing.assert_close(states[:-1].float(), expected[:-1], atol=2e-2, rtol=2e-3)
        answer = tokens[-len(top_ids) :].tolist()
        assert end not in answer[:-1] and (answer[-1] == end or len(tokens) == 256)
        assert all(token in ids for token, ids in zip(answer, top_ids.tolist(), strict=True))


@torch.no_grad()
def test_text_at_temperature_0_is_the_targets_greedy_text(plain_target, text):
    """Side by side with other conversations as alone, for those whose tokens are all the likeliest.

    Every third is written at this temperature.
    """
    num_greedy = 0
    for conversation in text.conversations:
        count = len(conversation.top_ids)
        if not torch.equal(conversation.tokens[-count:], conversation.top_ids[:, 0]):
            continue
        prompt = conversation.tokens[:-count].long()[None]
        alone = plain_text(plain_target, prompt, 20)[0]
        assert conversation.tokens[: len(alone)].tolist() == alone.tolist()
        num_greedy += 1
    assert num_greedy >= len(text.conversations) // 3


def test_short_conversations_keep_to_their_slots(pair, tmp_path, monkeypatch):
    """Also questions that the target writes, which would be longer than the context."""
    slots = []

    def note(model, cache, tokens, positions, slots_of_pass, *_, **options):
        slots.append(slots_of_pass)
        assert int(positions.max()) < 80

    spy(monkeypatch, LoadedModel, "__call__", note)
    write_text(pair.target, TextRecipe(100, 4, context=80, questions="code"), tmp_path / "text")
    assert all(int(s.max()) < 4 * 80 and len(s.unique()) == len(s) for s in slots)
    with refusal("--context 24: expected"):
        write_text(pair.target, TextRecipe(context=24), tmp_path / "none")


def test_text_goes_on_where_it_stopped(pair, tmp_path):
    """With other questions; a folder with other text, or with something else, is left alone."""
    recipe = TextRecipe(30, 2, context=80, hidden_states=(2,))
    write_text(pair.target, recipe, tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    write_text(pair.target, replace(recipe, tokens=120), tmp_path)
    after = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert before.items() < after.items()
    text = TrainingText([tmp_path])
    assert 120 <= sum(len(conversation.top_ids) for conversation in text.conversations) < 300
    assert len({tuple(c.tokens.tolist()) for c in text.conversations}) == len(text.conversations)
    with refusal("holds text with {'seed': 0, 'hidden_states': .2.}"):
        write_text(pair.target, replace(recipe, hidden_states=(3,)), tmp_path)
    with refusal("exists already; name a new folder"):
        write_text(pair.target, recipe, tmp_path.parent)


def test_what_begins_as_the_last_conversation_is_read_once(pair):
    """The last token is always read: its logits choose the next."""
    writer = Writer(pair.target, TextRecipe(30, 2, context=80))
    last = Lane(0, [1, 2, 3, 4], None, num_read=3, rows=["a", "b", "c"])
    for prompt, rows in (([1, 2, 9, 9], "ab"), ([1, 2, 3, 4, 5], "abc"), ([1, 2], "a"), ([9], "")):
        lane = writer.lane(last, prompt, 0.6)
        assert (lane.num_read, lane.rows, lane.num_prompt) == (len(rows), [*rows], len(prompt))


def test_a_model_with_markers_fills_in_what_is_missing_in_its_code(pair, monkeypatch):
    """Its prompts are an editor's, around any place of code that an answer had."""
    code = "def ferry(x):\n    y = x + 1\n    return y\n"
    rng = random.Random(1)
    for _ in range(200):
        before, after = around_a_hole(code, rng)
        assert code.startswith(before) and code.endswith(after) and after[:1] in ("\n", "")
        assert len(before) + len(after) <= len(code)
    target = pair.target
    assert not Writer(target, TextRecipe()).markers
    monkeypatch.setattr(prompts, "MARKERS", [("", "", "", "<a>", "<b>", "<c>")])
    monkeypatch.setattr(pair.tokenizer, "get_vocab", lambda: {"<a>": 0})
    writer = Writer(target, TextRecipe(context=128))
    assert writer.markers
    writer.codes.append(code)
    lanes = [writer.next_lane(Lane(0, [], None)) for _ in range(200)]
    texts = [pair.tokenizer.decode(lane.tokens) for lane in lanes]
    fills = [text for text in texts if text.startswith("<a>")]
    assert 5 < len(fills) < 40 and all(text.endswith("<c>") for text in fills)
    answer = pair.tokenizer.encode(f"So:\n```python\n{code}```\nThat is all, said at length." * 2)
    lane = Lane(0, [1, *answer], 0.6, rows=[(torch.zeros(1),) * 3] * len(answer))
    lane.num_prompt = 1
    writer.ended(lane)
    assert list(writer.codes) == [code] * 3 and f"```\n{code}```" in writer.passages


def test_a_fifth_of_the_questions_asks_for_copies(pair):
    """The passage is the begin of an earlier answer, whole sentences where there are some."""
    tokenizer, rng = pair.tokenizer, random.Random(1)
    answer = tokenizer.encode("The ferry crosses the river twice every morning. " * 12)
    passage = passage_of(tokenizer, answer)
    assert passage.endswith("morning.") and len(tokenizer.encode(passage)) <= MAX_PASSAGE_TOKENS
    assert passage_of(tokenizer, tokenizer.encode("no end of it")).startswith("no end")
    for passages, expected in (([], range(1)), ([passage], range(50, 110))):
        make = Questions("chat", tokenizer, rng)
        questions = [make.next(passages) for _ in range(400)]
        assert sum((question or "").count("river") > 2 for question in questions) in expected
        assert 120 < questions.count(None) < 240
    make = Questions("code", tokenizer, rng)
    questions = [make.next([passage]) or make.begin() for _ in range(400)]
    assert not any(re.search("{(a|b|task|language|passage)}", question) for question in questions)
    assert 20 < sum("Python" in question for question in questions) < 100
    damaged = misspelled(passage, rng)
    assert 0 < len(passage) - len(damaged) < 15
    assert len(damaged.split()) == len(passage.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("text --hidden-states 99", "--hidden-states 99: the target has 0"),
        ("train --text T --steps 0", "--steps: invalid"),
        ("text -o T", "holds text with"),
        ("train --text T -o T", "is the input"),
        ("train --text T", "--held-out 100: the text has"),
    ],
)
def test_options_that_cannot_be(text_folder, tmp_path, monkeypatch, capsys, words, message):
    """One line says so, and earlier text is never lost."""
    before = [file.read_bytes() for file in text_folder.iterdir()]
    command, *options = words.replace("T", str(text_folder)).split()
    monkeypatch.setattr(sys, "argv", ["recipe", command, "-o", str(tmp_path / "out"), *options])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("sequoia_plan_drafts.recipe", run_name="__main__")
    assert ended.value.code
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert [file.read_bytes() for file in text_folder.iterdir()] == before


@pytest.mark.parametrize("template", [None, "{{ messages[0].content }}"])
def test_a_tokenizer_without_a_usable_chat_template(pair, tmp_path, template):
    target = copy.copy(pair.target)
    target.tokenizer = copy.copy(target.tokenizer)
    target.tokenizer.chat_template = template
    with refusal("no chat template"):
        write_text(target, TextRecipe(40, 2), tmp_path)


def test_text_that_does_not_fit_is_refused(plain_target, text, text_folder, tmp_path):
    """Damaged text, that of another target, or other hidden states, which a folder cannot name."""
    (tmp_path / "text-00000.safetensors").write_bytes(next(text_folder.iterdir()).read_bytes()[:-9])
    with refusal("no training text"):
        TrainingText([tmp_path])
    with refusal("the target has 0 to 99; it was written by another"):
        text.draft_vocabulary(100, 50)
    for layers in ([3, 15, 27], []):
        text.metadata = [{"hidden_states": layers}]
        with refusal("write it with --hidden-states 2 15 27"):
            train_eagle3(plain_target, text, Eagle3Recipe(), tmp_path, "the target")


@pytest.mark.parametrize("variant", [name for name in GOLDEN if name != "window"])
@torch.no_grad()
def test_a_chain_in_training_is_one_in_decoding(variant):
    """Logits of speculators for chains from every root, all from one run of passes.

    A chain that attends further than to where it began must not pass.
    """
    config, weights, expected = GOLDEN[variant]
    draft = built(small_target(), config, weights)
    rows, nothing = 19, torch.zeros(0)
    tokens, features = (expected[name][None, : rows + 1] for name in ("chain.tokens", "features"))
    batch = TextBatch(tokens, features, torch.arange(1, rows + 1), nothing, nothing)
    logits_by_place = list(chain_logits(draft, batch, 4))
    expected_logits = expected["chain.logits"]
    for level, logits in enumerate(logits_by_place):
        torch.testing.assert_close(
            logits[level:], expected_logits[level, : rows - level], atol=1e-5, rtol=1e-5
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
    target_to_draft, nothing = torch.tensor([1, -1, 2, 0, -1]), torch.zeros(0)
    batch = TextBatch(nothing, nothing, nothing, ids[:, :4], probs[:, :4].log())
    _, rejection = divergence_and_rejection(draft.log() + 7, target_to_draft, batch)
    assert float(rejection) == pytest.approx(1 - sum(accepted) / 2, abs=1e-6)
    of_draft_tokens_alone = 0.5 * float((target[:, d2t] - draft).abs().sum(-1).mean())
    assert float(rejection) != pytest.approx(of_draft_tokens_alone, abs=0.02)


def assert_decodes_exactly(loaded, plain_target):
    """Our greedy text is that of transformers."""
    prompt = loaded.tokenizer("Name three rivers of Europe.", return_tensors="pt").input_ids
    ours = SequoiaDecoder(loaded.target, loaded.draft, TREE).generate(prompt, 16)
    assert ours.sequences.equal(plain_text(plain_target, prompt, 16))


@pytest.mark.parametrize(("dtype", "bits"), [("float32", 16), ("bfloat16", 8)])
def test_what_is_trained_is_what_is_loaded(plain_target, text, tmp_path, capsys, dtype, bits):
    """Some steps of training bring the draft nearer to the target.

    Its folder, loaded as anyone's, reads hidden states as they are and decodes exactly.
    """
    recipe = Eagle3Recipe(
        draft_vocabulary=512, steps=8, batch=2, chain=2, held_out=2, dtype=dtype, bits=bits
    )
    train_eagle3(plain_target, text, recipe, tmp_path / "draft", "the target")
    last = capsys.readouterr().out.splitlines()[-1]
    loaded = load_pair(draft=str(tmp_path / "draft"), dtype="float32", placement="resident")
    vocabulary = text.draft_vocabulary(plain_target.config.vocab_size, 512)
    assert loaded.draft.aux_hidden_state_layers == LAYERS
    assert loaded.draft.d2t.equal(vocabulary.d2t)
    new = untrained_draft(plain_target, vocabulary)
    losses_before, _ = held_out_losses(text, new, vocabulary, text.hidden_state_scale)
    losses, logits = held_out_losses(text, loaded.draft, vocabulary)
    assert (losses < losses_before).all()
    expected = vocabulary.target_to_draft[held_out_batch(text).top_ids[:, 0]]
    agreement = [float((place.argmax(-1) == expected).float().mean()) for place in logits]
    reported = json.loads(last[last.index("[") : last.index("]") + 1])
    assert agreement == pytest.approx(reported, abs=0.003)  # of unscaled hidden states
    assert_decodes_exactly(loaded, plain_target)


def test_training_goes_on_from_a_draft(plain_target, text, tmp_path):
    """Without a learning rate the draft stays what it was, with one it comes nearer to the target.

    Other drafts are refused.
    """
    recipe = Eagle3Recipe(512, 4, 2, chain=2, held_out=2)
    kept = replace(
        recipe, draft_vocabulary=9, steps=1, learning_rate=0.0, start=str(tmp_path / "draft")
    )
    further = replace(kept, steps=8, learning_rate=1e-3)
    losses = {}
    for name, settings in {
        "draft": recipe,
        "kept": kept,
        "further": further,
        "copying": replace(further, induction_heads=1),
        "later": replace(further, start=str(tmp_path / "copying")),
    }.items():
        train_eagle3(plain_target, text, settings, tmp_path / name, "the target")
        draft = load(tmp_path / name, plain_target)
        vocabulary = text.draft_vocabulary(plain_target.config.vocab_size, 0, draft.d2t)
        losses[name], _ = held_out_losses(text, draft, vocabulary)
    # fc is rounded to bfloat16 once more
    torch.testing.assert_close(losses["kept"], losses["draft"], atol=0.01, rtol=0)
    with safe_open(tmp_path / "kept" / "model.safetensors", "pt") as file:
        written = json.loads(file.metadata()["sequoia_plan"])["recipe"]
    assert (written["draft_vocabulary"], written["start"]) == (512, kept.start)
    assert (losses["further"] < losses["draft"] - 0.02).all()
    first, *_, copying, last = (
        load(tmp_path / name, plain_target).layers[0].self_attn for name in losses
    )
    changed = (first.q_proj.weight != last.q_proj.weight).any(1)
    assert changed.sum() <= first.head_dim  # queries but the new head's are kept
    assert not copying.o_proj.weight.equal(last.o_proj.weight)
    with refusal("expected a draft as `eagle3` writes it"):
        train_eagle3(plain_target, text, replace(kept, start=str(tmp_path)), tmp_path, "the target")


def test_a_language_model_draft_that_is_trained_decodes_exactly(plain_target, text, tmp_path):
    recipe = TrainingSettings(512, 6, 2, held_out=2)
    path = tmp_path / "draft.safetensors"
    train_language_model(plain_target, text, recipe, path, "the target")
    assert_decodes_exactly(load_pair(draft=str(path), dtype="float32"), plain_target)
