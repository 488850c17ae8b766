"""Compiled steps against steps by parts, which are enumerated, on the same random numbers."""

from concurrent.futures import ThreadPoolExecutor
from weakref import ref

import pytest
import torch
from refusals import refusal
from scripted import joint_law_p_value
from spies import spy
from strategies import looking_up
from toys import PLAIN
from workers import interrupt_first_worker, use_workers

from drafts import built, eagle3_parts, small_target
from sequoia_plan.artifacts import TokenTree
from sequoia_plan.runtime import Sampling, SequoiaDecoder
from sequoia_plan.runtime.captured_step import CapturedStep, catch_up
from sequoia_plan.runtime.compiled import compiled_step
from sequoia_plan.runtime.draft.packed_eagle import PackedEagle
from sequoia_plan.runtime.sequence import SequenceState

pytestmark = pytest.mark.slow

PROMPT = torch.tensor([2, 1, 2, 0, 1, 2, 0, 1])
BASE = TokenTree([-1, 0, 0, 0, 1, 1, 2, 4, 4, 7])
SPINE = looking_up(0, 0, 1, 1, 2, 3, 6)
FAMILY = TokenTree(
    BASE.parents, by_match={1: SPINE, 2: looking_up(0, 0, 1, 2, 2), 3: looking_up(*range(4))}
)
TREES = {"plain": PLAIN, "one": BASE, "family": FAMILY}
SAMPLINGS = [
    Sampling(),
    *(
        Sampling(temperature, verifier=verifier, **filters)
        for verifier in ("sequoia", "traversal")
        for temperature, filters in [
            (1.0, {}),
            (0.3, {}),
            (2.0, {"draft_temperature": 0.5}),
            (0.8, {"top_p": 0.8}),
            (1.5, {"top_k": 4, "min_p": 0.05}),
        ]
    ),
]


def small(seed, vocabulary):
    """A model whose pass is compiled."""
    return small_target(seed, vocabulary, hidden=32, head_dim=32)


def pair(kind, vocabulary=12):
    target = small(0, vocabulary)
    if kind == "EAGLE-3":
        parts = eagle3_parts(target, d2t=range(0, vocabulary, 2), head_dim=32)
        draft = built(target, *parts)
        draft.compiled = PackedEagle(draft)
        return target, draft
    draft = small(5, vocabulary // 2 if kind == "part of the vocabulary" else vocabulary)
    if kind == "part of the vocabulary":
        draft.d2t = torch.arange(vocabulary)[1::2]
    if kind == "a shorter context":
        draft.config.max_position_embeddings, weights = PROMPT.numel() + 8, draft.state_dict()
        draft = type(draft)(draft.config).eval()
        draft.load_state_dict(weights)
    return target, None if kind == "none" else draft


def outputs(decoder, seed, sampling):
    return [
        (step.path, step.tokens, step.match_length)
        for step in decoder.steps(PROMPT, 40, sampling, seed)
    ]


@pytest.mark.parametrize(
    "kind", ["language model", "part of the vocabulary", "a shorter context", "EAGLE-3", "none"]
)
def test_steps_are_those_of_tensors(kind, monkeypatch):
    """Tokens, paths and matches; with one worker to three.

    In one control drafts do not read what they left unread, the other one swaps two rules.
    """
    models = pair(kind)
    trees = TREES if models[1] else {"plain": TREES["plain"]}
    controls = [
        ("sequoia_plan.runtime.captured_step.catch_up", lambda *a: 0 * catch_up(*a)),
        (compiled_step, "RULES", {"sequoia": 2, "traversal": 1}),
    ]
    is_seen = [False, False]
    for (name, tree), workers in zip(trees.items(), (1, 2, 3), strict=False):
        decoder = SequoiaDecoder(*models, tree)
        use_workers(decoder.step.target.backend, workers)
        for sampling in SAMPLINGS:
            for seed in range(6):
                ours = outputs(decoder, seed, sampling)
                assert decoder.step.models.compiled_step is not None
                steps = decoder.step_of_tree.values()
                assert all(p.num_draws <= max(1, s.branching) for s in steps for p in s.passes)
                with monkeypatch.context() as patch:
                    patch.setattr(CapturedStep, "_compiled", lambda *_: None)
                    expected = outputs(decoder, seed, sampling)
                assert ours == expected, (name, sampling, seed)
                if is_seen[seed % 2]:
                    continue
                with monkeypatch.context() as patch:
                    patch.setattr(*controls[seed % 2])
                    is_seen[seed % 2] = outputs(decoder, seed, sampling) != expected
    assert all(is_seen) or kind == "none"


@pytest.mark.parametrize("kind", ["language model", "EAGLE-3"])
@pytest.mark.parametrize("verifier", ["sequoia", "traversal"])
def test_joint_law_of_two_tokens(kind, verifier, monkeypatch):
    """Chi-square; in the control, path and bonus token share their random number."""
    decoder = SequoiaDecoder(*pair(kind, 4), TokenTree([-1, 0, 0, 1]))
    law, sampling = (decoder, [2, 1, 2], 2), Sampling(4.0, verifier=verifier)
    assert joint_law_p_value(*law, 20000, sampling) > 1e-3
    refill = SequenceState.refill_random_numbers

    def shared(sequence, count):
        refill(sequence, count)
        sequence.uniforms[1] = sequence.uniforms[0]

    monkeypatch.setattr(SequenceState, "refill_random_numbers", shared)
    assert joint_law_p_value(*law, 12000, sampling) < 1e-9


def test_faults_leave_the_decoder_usable(monkeypatch):
    """Logits that are not finite, an interrupt, an exception in a streamer, and two at once."""
    target, draft = pair("language model")
    decoders = [SequoiaDecoder(target, draft, tree) for tree in (BASE, FAMILY)]
    backend = decoders[0].step.target.backend
    use_workers(backend, 2)
    expected = decoders[0].generate(PROMPT, 40).sequences

    spy(monkeypatch, compiled_step, "decode", interrupt_first_worker)
    with pytest.raises(KeyboardInterrupt):
        decoders[0].generate(PROMPT, 40)
    monkeypatch.undo()
    with pytest.raises(AttributeError):
        decoders[0].generate(PROMPT, 40, streamer=object())
    with ThreadPoolExecutor(2) as pool:
        texts = pool.map(lambda i: decoders[i % 2].generate(PROMPT, 40).sequences, range(12))
        assert all(text.equal(expected) for text in texts)
    for module, role in (
        (draft.lm_head, "draft"),
        (target.lm_head, "target"),
        (target.model.embed_tokens, "target"),  # with nan, so are keys and values
    ):
        weight, before = module.weight.data, module.weight.data.clone()
        weight[expected[0, PROMPT.numel()]] = torch.nan
        decoders[0].refresh()
        with refusal(f"{role}: logits"):
            decoders[0].generate(PROMPT, 40)
        weight.copy_(before)
        decoders[0].refresh()
        assert decoders[0].generate(PROMPT, 40).sequences.equal(expected)
    assert backend.runner.workers.count == 2


def test_a_step_keeps_the_weights_that_it_reads():
    decoder = SequoiaDecoder(*pair("EAGLE-3"), BASE)
    steps = decoder.steps(PROMPT, 40, Sampling())
    next(steps)
    step = decoder.step
    weights = [ref(model.weights) for model in (step.target.backend, step.drafter.backend)]
    decoder.refresh()
    assert all(own() is not None for own in weights)
    next(steps)


def test_a_tree_alone_that_looks_up_is_refused():
    target, _ = pair("none")
    with refusal("its spine is looked up"):
        SequoiaDecoder(target, None, FAMILY.for_match(3))


def test_a_prompt_of_one_token_is_not_left_unread():
    """Its draft's keys are its own, also if the first steps do not draft."""
    tree = TokenTree([-1], by_match={1: TokenTree([-1, 0, 0, 1])})
    texts = []
    for before in ([1, 11, 10, 0] * 6, [9, 8, 7, 6] * 6):
        decoder = SequoiaDecoder(*pair("language model"), tree)
        decoder.generate(before, 2)
        texts.append([decoder.generate([5], 30, 2.0, seed=i).sequences.tolist() for i in range(8)])
    assert texts[0] == texts[1]


def test_a_draft_catches_up_with_one_thread_of_torch(monkeypatch):
    """Others would go on spinning on the processors of the step's workers."""
    monkeypatch.setattr(CapturedStep, "_compiled", lambda *_: None)
    decoder, counts = SequoiaDecoder(*pair("EAGLE-3"), FAMILY), []
    decoder.step.drafter.catch_up = lambda *_: counts.append(torch.get_num_threads())
    torch.set_num_threads(2)
    outputs(decoder, 0, Sampling())
    torch.set_num_threads(1)
    assert max(counts) == 1
