"""Requests of many threads on one decoder: every text is the one that a single thread gets."""

import copy
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from threading import Event

import pytest
import torch
from architectures import plain_text
from forking import fork, status_of
from refusals import refusal
from toys import PLAIN, TREE, Ids, text_inside_generate

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.models.backends import loaded
from sequoia_plan.models.base import forks
from sequoia_plan.profiler.hardware import fingerprint
from sequoia_plan.runtime import Sampling, SequoiaDecoder
from sequoia_plan.runtime.pair import _remarks
from sequoia_plan.runtime.sequence import SequenceLock

OTHER = TokenTree.chain(4)
PROMPTS = [[1 + (7 * i + j) % 90 for j in range(3 + i % 5)] for i in range(16)]
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def switching():
    """Threads give way often, so that what can go wrong does."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def decoder(target, draft):
    return SequoiaDecoder(target, draft, TREE)


def by_threads(request):
    """`request(i)` for every prompt, from eight threads at once."""
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(request, range(len(PROMPTS))))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_decoders_requests_take_turns(decoder, temperature):
    """The streamed tokens are those of the result, and of a request that is alone."""

    def request(i):
        streamer = Ids()
        result = decoder.generate(PROMPTS[i], 24, temperature, seed=i, streamer=streamer)
        assert streamer.ended and streamer.tokens == result.sequences[0].tolist()
        return streamer.tokens

    assert by_threads(request) == [request(i) for i in range(len(PROMPTS))]


def test_without_turns_texts_are_wrong(decoder, monkeypatch):
    """Negative control: the same load on the same decoder, nobody waiting."""
    alone = [decoder.generate(prompt, 24).sequences[0].tolist() for prompt in PROMPTS]
    monkeypatch.setattr(SequenceLock, "hold", lambda self: nullcontext())

    def request(i):
        try:
            return decoder.generate(PROMPTS[i], 24).sequences[0].tolist()
        except Exception as error:  # whatever shapes that do not fit together give
            return error

    assert any(by_threads(request) != alone for _ in range(5))


def test_custom_generate_takes_turns_too(target, draft):
    """Two trees in turn, so that the kept decoder changes hands; Hugging Face's own generate is the
    reference."""

    def request(i):
        options = {"tree": TREE if i % 8 else OTHER, "max_new_tokens": 16}
        return text_inside_generate(target, draft, torch.tensor([PROMPTS[i]]), **options).tolist()

    reference = [plain_text(target, torch.tensor([prompt]), 16).tolist() for prompt in PROMPTS]
    assert by_threads(request) == reference


def test_a_thread_does_not_wait_for_itself(decoder):
    steps = decoder.steps(torch.tensor([1, 2, 3]), 20, Sampling())
    next(steps)
    for other in (decoder, decoder.with_tree(OTHER)):
        with refusal("in the middle of another sequence"):
            other.generate([1, 2], 4)
    steps.close()
    assert decoder.generate([1, 2], 4).new_tokens == 4


@pytest.mark.parametrize(("asked", "cores"), [(2, 1), (2, 2), (1, 2)])
def test_more_threads_than_cores(asked, cores, model, monkeypatch):
    """Passes take as many as cores, and one line says so; no line where the cores are enough."""
    for name in ("models.base.threads", "runtime.pair"):
        monkeypatch.setattr(f"sequoia_plan.{name}.usable_cores", lambda: cores)
    torch.set_num_threads(asked)
    try:
        target = loaded(copy.deepcopy(model))
        lines = [line for line in _remarks(target) if line.startswith("threads: found 2")]
        taken = target.backend.runner.workers.count, fingerprint("cpu")["threads"]
    finally:
        torch.set_num_threads(1)
    assert taken == (min(asked, cores),) * 2 and len(lines) == (asked > cores)


@pytest.mark.parametrize("part", ["text", "pass"])
def test_a_fork_while_another_thread_decodes(part, model, monkeypatch):
    """The control: whoever holds the locks is not in the child, which waits for ever."""
    decoder = SequoiaDecoder(copy.deepcopy(model), None, PLAIN)
    prompt, begun, ends = torch.tensor([1, 2, 3]), Event(), Event()
    locks = {"text": nullcontext(), "pass": decoder.step.target.backend.runner.workers.lock}
    expected = decoder.generate(prompt, 20).sequences

    def decode():
        assert decoder.generate(prompt, 20).sequences.equal(expected)

    def begin():
        with closing(decoder.steps(prompt, 20, Sampling())) as steps:
            next(steps)
            with locks[part]:
                begun.set()
                ends.wait(60)

    with ThreadPoolExecutor(1) as pool:
        thread = pool.submit(begin)
        begun.wait(60)
        if part == "pass":
            monkeypatch.setattr(decoder.step.sequence, "lock", SequenceLock())
        ended = status_of(fork(decode))
        monkeypatch.setattr(forks, "_renewed", set())
        without = status_of(fork(decode), seconds=2)
        ends.set()
        thread.result()
    assert (ended, without) == (0, -signal.SIGKILL)
    decode()
