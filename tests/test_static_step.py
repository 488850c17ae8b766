"""A step is a fixed sequence of tensor operations: it traces whole, and replaying the trace gives the same tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.runtime import Sampling, SequoiaDecoder, decode
from sequoia_plan.runtime.verify import VERIFIERS

TREE = TokenTree.from_parents([-1, 0, 0, 1, 1, 2, 3])
FILTERED = Sampling(0.8, top_p=0.9, top_k=20, min_p=0.01, draft_temperature=1.1)
SETTINGS = [Sampling(0.0), FILTERED, *(Sampling(0.8, verifier=name) for name in VERIFIERS if name != FILTERED.verifier)]
STEPS = 200


def llama(seed, hidden, layers, device):
    torch.manual_seed(seed)
    config = LlamaConfig(hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers, num_attention_heads=2, vocab_size=64)
    return LlamaForCausalLM(config).eval().to(device)


def decoder(device="cpu", **options):
    return SequoiaDecoder(llama(0, 32, 2, device), llama(1, 16, 1, device), TREE, **options)


def accepted(decoder, sampling):
    """What each of many steps accepted and added."""
    prompt = torch.arange(7, device=decoder.device)
    return [(step.path, step.tokens) for step, _ in zip(decoder.steps(prompt, STEPS * TREE.depth, sampling, seed=3), range(STEPS), strict=False)]


@pytest.fixture
def traced(monkeypatch):
    """Decoders run the trace of their step: one graph, or an error."""
    torch._dynamo.reset()
    monkeypatch.setattr(decode, "EXTENT_STEP", {"cpu": 1024})  # one shape, one trace
    compiled = torch.compile(SequoiaDecoder.step, fullgraph=True, backend="aot_eager", dynamic=False)
    return lambda: monkeypatch.setattr(SequoiaDecoder, "run", compiled)


@pytest.mark.parametrize("sampling", SETTINGS[:-2], ids=repr)  # test_verify.py traces every verifier; here the whole step counts
def test_the_step_traces_whole_and_the_trace_gives_the_same_tokens(sampling, traced):
    with torch.no_grad():  # dynamo cannot guard tensors of inference mode
        eager, traced_decoder = decoder(), decoder()
        for each in (eager, traced_decoder):
            each.steps = SequoiaDecoder.steps.__wrapped__.__get__(each)
        expected = accepted(eager, sampling)
        traced()
        assert accepted(traced_decoder, sampling) == expected
    assert len(expected) == STEPS


def test_a_step_that_reads_a_tensor_does_not_trace(traced, monkeypatch):
    """Negative control: the tracer notices a host read."""
    keep = SequoiaDecoder.keep

    def reading(self, taken, growth):
        return keep(self, replace(taken, count=taken.count + int(taken.count.item() > 99)), growth)

    monkeypatch.setattr(SequoiaDecoder, "keep", reading)
    with torch.no_grad():
        control = decoder()
        control.steps = SequoiaDecoder.steps.__wrapped__.__get__(control)
        traced()
        with pytest.raises(torch._dynamo.exc.TorchDynamoException):
            accepted(control, Sampling(0.0))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("sampling", SETTINGS, ids=repr)
def test_captured_steps_give_the_same_tokens(sampling):
    eager, captured = decoder("cuda", captured=False), decoder("cuda")
    assert captured.captured is not None
    expected = accepted(eager, sampling)
    assert accepted(captured, sampling) == expected
    assert accepted(captured, sampling) == expected  # replayed for another sequence
