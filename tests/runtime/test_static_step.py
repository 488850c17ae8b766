"""A step is a fixed sequence of tensor operations: it traces whole, and replaying the trace gives
the same tokens."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from architectures import tiny
from operations import Operations
from spies import spy
from strategies import looking_up
from torch.overrides import TorchFunctionMode
from toys import TREE

from drafts import PARTS, small_pair
from sequoia_plan.artifacts import TokenTree
from sequoia_plan.models.modules import backend
from sequoia_plan.models.offload.disk_stream import DiskStream
from sequoia_plan.models.offload.host_stream import HostStream
from sequoia_plan.runtime import Sampling, SequoiaDecoder, captured_step, decoding_models
from sequoia_plan.runtime.captured_step import CapturedStep
from sequoia_plan.runtime.step import TreeStep
from sequoia_plan.runtime.verify import VERIFIERS

pytestmark = pytest.mark.slow

FILTERED = Sampling(0.8, top_p=0.9, top_k=20, min_p=0.01, draft_temperature=1.1)
SETTINGS = [
    Sampling(0.0),
    FILTERED,
    *(Sampling(0.8, verifier=name) for name in VERIFIERS if name != FILTERED.verifier),
]
STEPS = 60
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def models(device="cpu"):
    return [tiny("Llama", seed, num_hidden_layers=2 - seed).to(device) for seed in (0, 1)]


def decoder(device="cpu", **options):
    return SequoiaDecoder(*models(device), TREE, **options)


def accepted(decoder, sampling):
    """What each of many steps accepted and added."""
    prompt = torch.arange(7, device=decoder.step.device)
    steps = decoder.steps(prompt, STEPS * TREE.depth, sampling, seed=3)
    return [(step.path, step.tokens) for step in itertools.islice(steps, STEPS)]


@pytest.fixture
def traced(monkeypatch):
    """Decoders run the trace of their step: one graph, or an error."""
    torch._dynamo.reset()
    monkeypatch.setattr("sequoia_plan.runtime.sampling.drawing.HAS_NUMBA", False)  # as on CUDA
    monkeypatch.setattr(captured_step, "EXTENT_MULTIPLE", {"cpu": 1024})  # one shape, one trace
    # dynamo cannot guard tensors of inference mode
    monkeypatch.setattr(SequoiaDecoder, "steps", SequoiaDecoder.steps.__wrapped__)

    def trace(backend="eager"):
        options = dict(fullgraph=True, backend=backend, dynamic=False)
        monkeypatch.setattr(CapturedStep, "run", torch.compile(TreeStep.__call__, **options))

    with torch.no_grad():
        yield trace


LOOKS_UP = TokenTree(TREE.parents, looks_up=True)
PORTFOLIO = TokenTree(TREE.parents, by_match={1: LOOKS_UP, 2: looking_up(*range(5))})


@pytest.mark.parametrize(
    ("kind", "sampling"),
    [
        # other verifiers are traced in tests/profiler/test_verify_acceptance.py
        *(("language model", each) for each in (*SETTINGS[:2], Sampling(0.8, verifier="topk"))),
        *((kind, Sampling(0.8)) for kind in ("portfolio", "EAGLE-3", "DFlash 2", "DSpark")),
    ],
    ids=repr,
)
def test_the_step_traces_whole_and_the_trace_gives_the_same_tokens(kind, sampling, traced):
    if kind in PARTS:
        eager, traced_decoder = (SequoiaDecoder(*small_pair(kind), TREE) for _ in range(2))
    else:
        tree = PORTFOLIO if kind == "portfolio" else TREE
        eager, traced_decoder = (decoder().with_tree(tree) for _ in range(2))
    expected = accepted(eager, sampling)
    # once down to the operations that PyTorch's own ones are made of, which takes twice as long
    traced("aot_eager" if sampling.greedy else "eager")
    assert accepted(traced_decoder, sampling) == expected
    # other kinds may end their text earlier
    assert expected and (len(expected) == STEPS or kind != "language model")


def test_a_step_that_reads_a_tensor_does_not_trace(traced, monkeypatch):
    """Negative control: the tracer notices a host read."""
    keep = TreeStep.commit

    def reading(self, taken):
        return keep(self, replace(taken, count=taken.count + int(taken.count.item() > 99)))

    monkeypatch.setattr(TreeStep, "commit", reading)
    traced()
    with pytest.raises(torch._dynamo.exc.TorchDynamoException):
        accepted(decoder(), Sampling(0.0))


class FromPython(TorchFunctionMode):
    """Notes tensors made from Python's numbers: they are made on the host, and operations do not
    show it."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (
            torch.tensor,
            torch.as_tensor,
            torch.asarray,
            torch.from_numpy,
            torch.Tensor.new_tensor,
        ):
            self.seen.add("cpu")
        return function(*args, **(kwargs or {}))


def devices_of_a_step(kind, sampling, monkeypatch):
    """The step on a device that has no values to look at. Only tensors copied from or to the host
    could lie elsewhere."""
    pair = small_pair(kind) if kind in PARTS else models()
    monkeypatch.setattr(backend, "probe", lambda model, module: None)
    monkeypatch.setattr(torch, "Generator", lambda device: None)
    target, draft = (model.to("meta") for model in pair)
    d2t = getattr(draft, "d2t", None)
    if kind == "part of the vocabulary":
        d2t = torch.empty(5, dtype=torch.long, device="meta")
    if d2t is not None:
        shared = (d2t.numel(), d2t)
        monkeypatch.setattr(decoding_models, "shared_vocabulary", lambda *_: shared)
    each = SequoiaDecoder(target, draft, TREE).step
    each.sequence.reserve(64, each.target.new_cache, each.drafter.new_cache)
    width = len(each.drafter.aux_hidden_state_layers) * target.config.hidden_size
    each.sequence.reserve_rows("aux_hidden_states", TREE.size, (width,), torch.float32)
    each.sequence.bits = torch.empty(
        each.num_parents * each.bits_per_parent(sampling), dtype=torch.int32, device="meta"
    )
    with torch.inference_mode(), Operations() as operations, FromPython(operations.devices):
        each(64, sampling)
    return operations.devices


@pytest.mark.parametrize("sampling", SETTINGS, ids=repr)
@pytest.mark.parametrize("kind", ["language model", "part of the vocabulary", *PARTS])
def test_no_operation_of_a_step_copies_from_the_host(kind, sampling, monkeypatch):
    """A copy would end the capture of a CUDA graph, and tracing does not see it."""
    assert devices_of_a_step(kind, sampling, monkeypatch) == {"meta"}


@pytest.mark.parametrize(
    "copied",
    [lambda: torch.tensor(1, device="meta"), lambda: torch.ones(1, dtype=torch.long).to("meta")],
)
def test_a_copy_from_the_host_is_seen(copied, monkeypatch):
    """Negative control."""
    keep = TreeStep.commit
    monkeypatch.setattr(TreeStep, "commit", lambda self, *args: keep(self, *args) + copied())
    assert devices_of_a_step("language model", Sampling(0.0), monkeypatch) == {"cpu", "meta"}


def test_models_that_read_the_length_on_the_host_are_not_captured():
    on_cuda, other = (SimpleNamespace(device=torch.device("cuda", i)) for i in range(2))

    def model(parameters=(on_cuda, on_cuda), rope="default", **attributes):
        model = torch.nn.Module()
        model.parameters = lambda: iter(parameters)
        model.config = SimpleNamespace(rope_parameters={"rope_type": rope})
        vars(model).update(attributes)
        return model

    def can_be_captured(model):
        found = backend.ModuleBackend.__new__(backend.ModuleBackend)
        found.module, found.stream, found.recurrent = model, getattr(model, "stream", None), []
        return found.can_be_captured()

    can = [model(), model(rope="llama3"), model(stream=HostStream)]  # the device copies by itself
    compiled = model()
    compiled.compile()
    cannot = [model(rope="dynamic"), model(rope="longrope"), model((on_cuda, other)), model(())]
    cannot += [model(_tp_size=2), model(_orig_mod=None), compiled, model(stream=DiskStream)]
    assert all(map(can_be_captured, can)) and not any(map(can_be_captured, cannot))


@pytest.mark.parametrize("sampling", [Sampling(), FILTERED], ids=repr)
@pytest.mark.parametrize(
    ("tokens", "context"), [(70, 2048), (1, 2048), (500, 50)], ids=["most", "one", "full context"]
)
def test_steps_launched_ahead_change_nothing(sampling, tokens, context, monkeypatch):
    """The same steps, none launched in vain; while one is read the next one is on its way."""
    launches, found = [], {}
    spy(monkeypatch, CapturedStep, "run", lambda step, extent, _: launches.append(extent))
    for ahead in (False, True):
        each = decoder()
        monkeypatch.setattr(CapturedStep, "launches_ahead", ahead)
        each.step.target.context = context
        launches.clear()
        steps = each.steps(torch.arange(7), tokens, sampling, seed=3)
        first = next(steps)
        assert len(launches) == 1 + (ahead and tokens > TREE.depth)
        found[ahead] = [first, *steps]
        assert len(launches) == len(found[ahead])
        assert max(launches) <= each.step.sequence.target.capacity
    assert found[True] == found[False]


@needs_cuda
@pytest.mark.parametrize("sampling", SETTINGS, ids=repr)
def test_captured_steps_give_the_same_tokens(sampling):
    eager, captured = decoder("cuda", captured=False), decoder("cuda")
    assert captured.step.models.graphs is not None
    expected = accepted(eager, sampling)
    assert accepted(captured, sampling) == expected
    assert accepted(captured, sampling) == expected  # replayed for another sequence
