"""Targets with recurrent layers decode with chains, and their state is that of accepted tokens."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from architectures import TAKES_CHAINS, VOCABULARY, plain_text, tiny, tokens_of
from msgspec.structs import replace
from paths import ROOT
from refusals import refusal
from scripted import Scripted, error_of_a_step
from spies import spy
from toys import ToyModel

from drafts import PARTS, built, small_target
from sequoia_plan.artifacts import Acceptance, Profile, TokenTree, load_tree
from sequoia_plan.models import loaded_model
from sequoia_plan.models.base.cache import TreeCache
from sequoia_plan.models.modules.recurrent import RecurrentCache
from sequoia_plan.planner import solve
from sequoia_plan.profiler.forced import ForcedAcceptance
from sequoia_plan.runtime import Pair, Sampling, SequoiaDecoder
from sequoia_plan.runtime.verify import AcceptedPath

NEW, PROMPT, CHAIN = 200, 20, TokenTree.chain(5)
LOOKUP = TokenTree([-1], by_match={1: TokenTree(CHAIN.parents, looks_up=True)})
PAGE = (ROOT / "docs" / "models.md").read_text()
pytestmark = pytest.mark.slow


class Oracle(ToyModel):
    """A draft that knows the text, and is wrong about a share of it."""

    def __init__(self, text, share=0.25):
        super().__init__(0, vocabulary=VOCABULARY, context=1024)
        wrong = torch.rand(len(text), generator=torch.Generator().manual_seed(1)) < share
        self.next_tokens = (text + wrong).roll(-1) % VOCABULARY

    def forward(self, input_ids, position_ids=None, **_):
        positions = torch.arange(input_ids.shape[1]) if position_ids is None else position_ids
        logits = self.eye[self.next_tokens[positions % len(self.next_tokens)]]
        return SimpleNamespace(logits=logits.expand(*input_ids.shape, -1))


@pytest.fixture(scope="module", params=TAKES_CHAINS)
def target_and_text(request):
    target = tiny(request.param, max_position_embeddings=1024)
    text = plain_text(target, tokens_of(PROMPT)[None], NEW)[0]
    assert len(text.unique()) > 20
    assert f"{request.param} (`{type(target).__name__.removesuffix('ForCausalLM')}`" in PAGE
    return target, text


def test_greedy_text_is_that_of_transformers(target_and_text, monkeypatch):
    target, text = target_and_text
    decoder, counts = SequoiaDecoder(target, Oracle(text), CHAIN), set()
    monkeypatch.setitem(loaded_model.PREFILL_CHUNK, "cpu", 8)
    monkeypatch.setitem(loaded_model.PREFILL_MULTIPLES, "cpu", (64, 64))  # padding, as on CUDA
    spy(monkeypatch, decoder.step, "commit", lambda accepted: counts.add(int(accepted.count)))
    for drafting in (decoder, SequoiaDecoder(target, None, LOOKUP)):
        result = drafting.generate(text[:PROMPT], NEW)
        assert result.sequences[0].equal(text) and result.tokens_per_step > 1.01
    assert counts == {1, 2, 3, 4, 5}
    monkeypatch.setattr(RecurrentCache, "roll_back", TreeCache.roll_back)
    assert not decoder.generate(text[:PROMPT], NEW).sequences[0].equal(text)


def test_a_draft_that_knows_the_text_is_counted_as_right():
    """The text is read again from where it began, not from the state at its end."""
    target = tiny("Bamba")
    text = plain_text(target, torch.arange(PROMPT)[None], 120)[0]
    pair = Pair(target, Oracle(text, share=0), SimpleNamespace(eos_token_id=None), {})
    tally = ForcedAcceptance(pair, 2, False)(text[:PROMPT], Sampling(), 100, 0)
    assert np.array(tally["counts"])[..., 0].sum() == np.sum(tally["trials"]) > 90


@pytest.mark.parametrize("kind", PARTS)
def test_drafts_that_read_hidden_states(kind):
    target = tiny("Qwen3-Next")
    draft = built(target, *PARTS[kind](target))
    text = plain_text(target, torch.arange(PROMPT)[None], 100)[0]
    result = SequoiaDecoder(target, draft, TokenTree.chain(4)).generate(text[:PROMPT], 100)
    assert result.sequences[0].equal(text) and result.tokens_per_step > 1


@pytest.mark.parametrize("is_wrong", [False, True])
@pytest.mark.parametrize("name", ["Qwen3-Next", "Bamba", "LFM2"])
def test_a_sampled_step_after_a_rejection_has_the_targets_distribution(name, is_wrong, monkeypatch):
    tree, target = TokenTree.chain(3), tiny(name, vocab_size=3)
    decoder = SequoiaDecoder(target, small_target(5, vocabulary=3), tree)
    step = decoder.step
    prefill, forward_target = step.prefill, step.forward_target
    if is_wrong:
        monkeypatch.setattr(RecurrentCache, "roll_back", TreeCache.roll_back)

    def prefill_and_reject(prompt, *rest):
        """The last two tokens are an accepted node and a bonus token."""
        prefill(prompt[:-2], *rest)
        root = int(step.sequence.length)
        step.sequence.tokens[root + 1 : root + 3] = torch.stack([prompt[-2], 2 - prompt[-1]])
        forward_target(64)
        step.commit(AcceptedPath(torch.arange(3), torch.tensor([2]), prompt[-1:]))

    def forward_and_undo(extent):
        """A pass that leaves the recurrent states as they were."""
        logits, cache = forward_target(extent), step.sequence.target
        for layer, state in zip(cache.layers, cache.states, strict=True):
            vars(layer).update(state)
        return logits

    step.prefill, step.forward_target = prefill_and_reject, forward_and_undo
    error = error_of_a_step(decoder, [2, 1, 0, 1, 2, 0], Scripted(1.0, verifier="traversal"))
    assert (error > 1e-3) if is_wrong else error < 1e-5, error


def test_from_profile_to_generate(pair, run_briefly, tmp_path, monkeypatch):
    """The commands measure, solve and decode drafted chains; docs/models.md has looked-up ones."""
    monkeypatch.chdir(tmp_path)
    for name, model in (("target", "LFM2"), ("draft", "Llama")):
        sizes = {"vocab_size": len(pair.tokenizer), "max_position_embeddings": 512}
        tiny(model, **sizes).save_pretrained(name)
        pair.tokenizer.save_pretrained(name)
    models = ("--target", "target", "--dtype", "float32", "--draft", "draft")
    run_briefly("profile", *models, "--tokens", "8", "--precision", "40%")
    assert "chains only" in run_briefly("solve")
    tree = load_tree("tree.safetensors")
    assert tree.plan.branching == 1 and "recurrent state" in run_briefly("show")
    run_briefly("generate", *models, "--tree", "tree.safetensors", "--max-new-tokens", "4")
    profile = Profile.load("profile.yaml")
    profile = replace(profile, acceptance=Acceptance.given([0.9, 0.1]))
    assert solve(profile, budget=768, depth=4, objective="tokens").tree == TokenTree.chain(4)


def test_refusals():
    target = tiny("LFM2")
    with refusal("2 children of one node, and lfm2 has layers with"):
        SequoiaDecoder(target, tiny("Llama"), TokenTree.star(2))
    with refusal("draft: lfm2 has layers with a recurrent state"):
        SequoiaDecoder(tiny("Llama"), target, CHAIN)
    decoder = SequoiaDecoder(target, tiny("Llama"), CHAIN)
    for module in target.modules():
        module._forward_pre_hooks.clear()
    with refusal("hooks were removed"):
        decoder.generate([1, 2, 3], 20)
