"""The logic of CUDA graphs, on the CPU: what is captured and how often, when graphs are captured
anew, and which attention kernels are allowed."""

from __future__ import annotations

import threading
import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from architectures import plain_text, resembling, tiny
from simulated import Cuda, simulate_capture
from torch.utils._python_dispatch import TorchDispatchMode
from toys import ToyModel, toy_decoder, toy_pair
from transformers import LlamaConfig, LlamaForCausalLM, TopPLogitsWarper

from sequoia_plan.artifacts import SequoiaPlanError, TokenTree
from sequoia_plan.profiler import hardware, latency
from sequoia_plan.runtime import Sampling, SequoiaDecoder, capture, sequoia
from sequoia_plan.runtime.base import sampling
from sequoia_plan.runtime.base.weight_stream import register_stream
from sequoia_plan.runtime.capture import Graphs, is_on_one_cuda_device
from sequoia_plan.runtime.captured_step import CapturedStep
from sequoia_plan.runtime.draft.drafter import DraftedTree
from sequoia_plan.runtime.models import forward, probe
from sequoia_plan.runtime.models.attention import attending
from sequoia_plan.runtime.models.forward import TreeModel
from sequoia_plan.runtime.offload.disk_stream import DiskStream
from sequoia_plan.runtime.offload.host_stream import HostStream

TREE = TokenTree.from_parents([-1, 0, 0, 1, 1, 2, 3])
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


def simulated():
    """A decoder that captures, on the CPU."""
    decoder = toy_decoder(TREE)
    simulate_capture(decoder.step)
    return decoder


# What is captured, and how often


def test_alternating_generations_capture_nothing_twice():
    """Greedy and sampled in turn, with each of three trees; the second time round nothing is
    captured."""
    first = simulated()
    decoders = [first.with_tree(tree) for tree in (TREE, TokenTree.chain(3), TokenTree.star(5))]
    turns = [(decoder, temperature) for decoder in decoders for temperature in (0.0, 1.0, 0.7)]
    for decoder, temperature in turns:
        decoder.generate([3, 1, 4], 40, temperature, seed=0)
    captured = list(first.step.models.graphs.captures)
    assert captured == ["step"] * len(turns)
    for decoder, temperature in turns:
        decoder.generate([3, 1, 4], 40, temperature, seed=0)
    assert first.step.models.graphs.captures == captured


def test_a_long_text_takes_few_captures():
    """5000 tokens: an extent of 512 and of 1024, then two for each doubling. A second text takes
    none."""
    step = simulated().step
    extents = [step.extent(length) for length in range(5000)]
    assert sorted(set(extents)) == [512, 1024, 1536, 2048, 3072, 4096, 6144]
    assert all(
        length + TREE.size <= extent <= max(512, 2 * (length + TREE.size))
        for length, extent in enumerate(extents)
    )
    target = ToyModel(0, context=1 << 14)
    # the draft is the target, so every path is accepted whole
    decoder = SequoiaDecoder(target, target, TokenTree.chain(8))
    simulate_capture(decoder.step)
    for _ in range(2):
        assert decoder.generate([3, 1, 4], 2500).new_tokens == 2500
        assert decoder.step.models.graphs.captures == ["step"] * 5


def test_longer_prompts_seldom_need_new_memory():
    """Prompts that grow token by token: memory is reserved ahead, so graphs are forgotten at most
    twice while the length doubles."""
    step = simulated().step
    for length in range(10, 2000, 10):
        step.prefill(torch.arange(length) % 8, 16, seed=0)
    assert step.sequence.version == 4


def test_the_least_recently_used_graph_is_forgotten():
    decoder = simulated()
    decoder.step.models.graphs.max_graphs = 2
    for temperature in (0.5, 0.6, 0.5, 0.7, 0.5, 0.6):
        decoder.generate([3, 1, 4], 20, temperature, seed=0)
    graphs = decoder.step.models.graphs
    assert graphs.captures == ["step"] * 4 and len(graphs.graphs) == 2


def test_greedy_drafting_keeps_no_probs(monkeypatch):
    """Greedy verification reads no draft probs, so none are computed; sampled drafting has a row
    for each inner node."""
    for temperature, rows in ((0.0, 0), (1.0, 4)):
        decoder, drafted_trees = simulated(), []
        step, verify = decoder.step, decoder.step.verify
        step.models.graphs = None

        def recorded(logits, drafted, sampling, drafted_trees=drafted_trees, verify=verify):
            drafted_trees.append(drafted)
            return verify(logits, drafted, sampling)

        monkeypatch.setattr(step, "verify", recorded)
        decoder.generate([3, 1, 4], 5, temperature, seed=0)
        assert {drafted.draft_probs.shape[0] for drafted in drafted_trees} == {rows}
        assert all(isinstance(drafted, DraftedTree) for drafted in drafted_trees)
    logits = torch.randn(2, 5).bfloat16()
    assert Sampling().draft_probs(logits) is logits


# A capture that fails


@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError])
@pytest.mark.parametrize("fails", [None, "warm", "checked", "inside", "end"])
def test_a_capture_that_fails_leaves_nothing_behind(fails, error, monkeypatch):
    """What it changed is as before, the allocator is told that the capture is over, and the next
    one takes another pool."""
    cuda = Cuda(monkeypatch, fails, error)
    graphs, total = Graphs(torch.device("cuda", 0)), torch.zeros(3)
    if fails:
        with pytest.raises(error):
            graphs.capture(cuda.run, [total], (total,))
    else:
        graphs.capture(cuda.run, [total], (total,))
        total.sub_(1)  # the stand-in runs where CUDA only records
    assert total.tolist() == [0.0] * 3 and cuda.sync == 0
    assert cuda.capturing == set()
    assert cuda.pools == (2 if fails in ("inside", "end") else 1) and graphs.pool == (0, cuda.pools)


def test_an_allocator_that_is_not_told_goes_on_capturing(monkeypatch):
    """Negative control."""
    cuda = Cuda(monkeypatch, "end")
    monkeypatch.setattr(Graphs, "abandon", Graphs.new_pool)
    with pytest.raises(RuntimeError, match="capture end"):
        Graphs(torch.device("cuda", 0)).capture(cuda.run, [], (torch.zeros(3),))
    assert cuda.capturing == {(0, 1)}


@pytest.mark.parametrize("fails", [None, "checked", "inside", "end"])
def test_captured_products_write_to_the_memory_of_their_graph(fails, monkeypatch):
    """cuBLAS keeps a workspace for each stream. The one of the runs that prepare the capture lies
    outside the graph's pool, and torch.compile frees it; no workspace of the graph stays either."""
    cuda = Cuda(monkeypatch, fails)
    graphs = Graphs(torch.device("cuda", 0))
    with nullcontext() if fails is None else pytest.raises(RuntimeError):
        graphs.capture(cuda.run, [], (torch.zeros(3),))
    assert cuda.graph_workspaces == ([] if fails == "checked" else [(0, 1)])
    assert cuda.workspaces == {}


def test_a_function_that_waits_for_the_device_is_not_captured(monkeypatch):
    cuda = Cuda(monkeypatch)
    graphs = Graphs(torch.device("cuda", 0))
    with pytest.warns(UserWarning, match="sum: cannot be captured .* called a synchronizing CUDA"):
        graphs("sum", lambda: cuda.wait())
    assert graphs.failed == {"sum"} and graphs.graphs == {} and cuda.sync == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the same is not said twice
        graphs("sum", lambda: cuda.wait())
        cuda.wait()


def test_other_threads_may_wait_for_the_device_during_a_capture(monkeypatch):
    """PyTorch's check of operations that wait holds for all threads."""
    cuda = Cuda(monkeypatch)
    graphs, errors, checked = Graphs(torch.device("cuda", 0)), [], []

    def wait():
        try:
            cuda.wait()
        except RuntimeError as error:
            errors.append(error)

    def run():
        checked.append(cuda.sync)
        other = threading.Thread(target=wait)
        other.start()
        other.join()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graphs("sum", run)
    assert errors == [] and [*graphs.graphs] == ["sum"]
    assert checked == [0, "warn", 0] and cuda.modes == ["warn", 0]


def test_graphs_stay_on_one_stream(monkeypatch):
    """PyTorch has 32 and hands them out in turn, so one of many new ones may be in use."""
    cuda = Cuda(monkeypatch)
    graphs = Graphs(torch.device("cuda", 0))
    streams = cuda.streams
    for version in range(40):
        graphs.clear(version)
    assert cuda.streams == streams and cuda.pools == 41


@pytest.mark.parametrize("can_be_captured", [False, True])
def test_a_model_that_waits_for_its_disk_is_not_captured(can_be_captured, monkeypatch):
    """The host waits in every pass. Weights that the device copies by itself can be captured."""
    model = tiny("Llama")
    monkeypatch.setattr(capture, "is_on_one_cuda_device", lambda model: True)
    assert capture.can_capture(model)
    stream_class = HostStream if can_be_captured else DiskStream
    register_stream(model, stream_class.__new__(stream_class))
    assert capture.can_capture(model) == can_be_captured


def test_a_warning_is_not_repeated_for_every_extent(monkeypatch):
    cuda = Cuda(monkeypatch, "checked")
    graphs, total = Graphs(torch.device("cuda", 0)), torch.zeros(3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for extent in (512, 1024, 1536):
            cuda.runs = 0
            graphs(("target", extent), cuda.run, inputs=(total,))
    assert len(caught) == 1 and len(graphs.failed) == 3


# Models that were moved


def test_weights_that_were_moved_make_new_graphs():
    target = tiny("Llama")
    decoder = SequoiaDecoder(target, resembling(target), TREE)
    step = decoder.step
    simulate_capture(step)
    first = decoder.generate([5, 6, 7], 20).sequences
    captures = list(step.models.graphs.captures)
    decoder.generate([5, 6, 7], 20)
    assert step.models.graphs.captures == captures
    target.lm_head.weight.data = target.lm_head.weight.data.clone()  # as `to` there and back does
    version = step.sequence.version
    assert torch.equal(decoder.generate([5, 6, 7], 20).sequences, first)
    assert step.sequence.version == version + 1 == step.models.graphs.version
    assert step.models.graphs.captures == captures  # captured anew


def test_a_decoder_of_a_model_that_was_moved_is_refused():
    target = tiny("Llama")
    decoder = SequoiaDecoder(target, resembling(target), TREE)
    target.double()
    with pytest.raises(SequoiaPlanError, match=r"llama: found as torch\.float64 .*; make it anew"):
        decoder.generate([5, 6, 7], 4)


def test_a_model_that_was_moved_is_probed_again(monkeypatch):
    probed = []
    error = probe._tree_error
    monkeypatch.setattr(
        probe, "_tree_error", lambda trial: probed.append(trial.model.dtype) or error(trial)
    )
    model = tiny("Llama")
    for dtype in (torch.float32, torch.float32, torch.float64, torch.float32):
        layout = probe.probe(model.to(dtype))
        assert {kind[1] for pair in layout for kind in pair} == {dtype}
    assert probed == [torch.float32, torch.float64, torch.float32]


def test_custom_generate_makes_a_new_decoder_for_a_model_that_was_moved():
    target = tiny("Llama")
    draft = resembling(target)
    settings = dict(custom_generate=sequoia, draft=draft, tree=TREE)
    ids = torch.tensor([[5, 6, 7, 8]])
    plain_text(target, ids, 12, **settings)
    first = target._sequoia_decoder[2]
    for model in (target, draft):
        model.double()
    expected = plain_text(target, ids, 12)
    assert torch.equal(plain_text(target, ids, 12, **settings), expected)
    assert target._sequoia_decoder[2] is not first


def test_models_compiled_in_place_are_not_captured():
    model = tiny("Llama")
    on_cuda = SimpleNamespace(device=torch.device("cuda", 0))
    model.parameters = lambda: iter([on_cuda])
    assert is_on_one_cuda_device(model)
    model.compile()
    assert not is_on_one_cuda_device(model)


# Sums in no fixed order


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("scale", [0.1, 3.0, 30.0])
def test_top_p_in_whole_numbers_is_transformers(top_p, scale, monkeypatch):
    monkeypatch.setattr(sampling, "summands", sampling.whole_numbers)
    logits = torch.randn(20, 3000, generator=torch.Generator().manual_seed(2)) * scale
    theirs = torch.softmax(TopPLogitsWarper(top_p)(None, logits), -1)
    torch.testing.assert_close(sampling.top_p_filter(torch.softmax(logits, -1), top_p), theirs)


def test_whole_numbers_add_up_alike_in_any_order():
    """And floats, the control, do not."""
    p = torch.softmax(torch.randn(200_000, generator=torch.Generator().manual_seed(0)), -1)
    orders = [
        torch.randperm(p.numel(), generator=torch.Generator().manual_seed(seed))
        for seed in range(5)
    ]
    assert (
        sampling.summands(p, 0.9)[0] is p
        and sampling.summands(p.to("meta"), 0.9)[0].dtype == torch.int64
    )
    bins = torch.zeros(p.numel(), dtype=torch.long)

    def sums(weights):
        return {
            float(torch.zeros(1, dtype=weights.dtype).scatter_add_(0, bins, weights[order]))
            for order in orders
        }

    assert len(sums(sampling.whole_numbers(p, 0.9)[0])) == 1 < len(sums(p))


# The machine


def test_the_card_is_asked_for_by_its_uuid(monkeypatch):
    asked = []
    card = SimpleNamespace(uuid="0af3", stdout="555.1, 1980, 2619, 700.00\n")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(
        hardware.subprocess, "run", lambda command, **_: asked.append(command) or card
    )
    driver = hardware._nvidia_driver(torch.device("cuda", 1))
    assert asked[0][:2] == ["nvidia-smi", "--id=GPU-0af3"]
    assert list(driver) == ["driver", "sm_mhz", "memory_mhz", "watts"]
    assert list(driver.values()) == ["555.1", "1980", "2619", "700.00"]


@pytest.mark.parametrize("context", [20, 600])
@pytest.mark.parametrize("sampling_settings", [Sampling(), Sampling(1.0)], ids=repr)
def test_profiling_captures_each_part_once(sampling_settings, context, monkeypatch):
    """Every size and every shape, over several rounds; memory was taken before the first."""
    pair = toy_pair(context=1024)
    pair.target.get_input_embeddings = lambda: torch.nn.Embedding(8, 2)
    meter = latency.LatencyMeter(pair, [sampling_settings], context, max_size=16)
    step = meter.step
    simulate_capture(step)
    step.prefill(meter.prompt, 40, seed=0)
    meter.begin(1e9)
    graphs = step.models.graphs
    captures = list(graphs.captures)
    meter.finish(0.0)
    assert graphs.captures == captures and len(captures) == len(graphs.graphs)
    assert captures.count("target") == captures.count("draft pass") == 8


def test_the_clock_starts_on_a_busy_device(monkeypatch):
    """While steps are launched ahead, the time of a launch is no part of a measured time."""
    events = []

    def event(enable_timing):
        return SimpleNamespace(
            record=lambda stream: events.append("record"),
            synchronize=lambda: events.append("wait"),
            elapsed_time=lambda end: 3.0,
        )

    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: events.append("idle"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: events.append("busy"))
    assert latency.timed(torch.device("cuda"), lambda: events.append("run")) == (None, 0.003)
    assert events == ["idle", "busy", "record", "run", "record", "wait"]


# Passes of a model


def gqa(heads=6, shared=2):
    """A tiny Llama whose heads share keys and values."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=heads,
        num_key_value_heads=shared,
        vocab_size=90,
        head_dim=8,
    )
    return LlamaForCausalLM(config).eval()


class Copies(TorchDispatchMode):
    """Counts copies of whole keys or values, one for each head that shares them."""

    def __init__(self, numbers):
        super().__init__()
        self.numbers, self.count = numbers, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.count += function.overloadpacket.__name__ == "clone" and result.numel() == self.numbers
        return result


def copies_and_logits(shares_heads, tree):
    """The copies of keys or values in one pass over a tree, and the logits of that pass."""
    model = gqa()
    step = CapturedStep.of(model, gqa(), tree)
    assert step.target.grouped_query_config is model.config
    if not shares_heads:
        step.target.grouped_query_config = None
    with torch.no_grad():  # in inference mode `reshape` does not show its copy
        step.prefill(torch.arange(5, 20), 8, seed=0)
        extent = step.extent(14)
        with Copies(6 * extent * 8) as copies:
            logits = step.forward_target(extent)
    assert model.config._attn_implementation == "sdpa"
    return copies.count, logits


@pytest.mark.parametrize("tree", [TREE, TokenTree.chain(1)], ids=["tree", "plain"])
def test_heads_that_share_keys_and_values_do_not_copy_them(tree):
    """transformers (the control) copies both in each of three layers; the logits are the same."""
    none, logits = copies_and_logits(True, tree)
    copied, expected = copies_and_logits(False, tree)
    assert none == 0 and (copied == 6 or tree.size == 1)  # older versions copy for one token, too
    torch.testing.assert_close(logits, expected)


def test_attention_is_replaced_in_our_passes_only():
    """The model's own `generate` returns the same tokens before and after our steps."""
    model, ids = gqa(), torch.tensor([[5, 6, 7, 8]])
    expected = plain_text(model, ids, 20)
    decoder = SequoiaDecoder(model, gqa(), TREE)
    assert torch.equal(decoder.generate(ids, 20).sequences, expected)
    assert torch.equal(plain_text(model, ids, 20), expected)


def test_passes_of_one_model_may_overlap():
    """A decoder made during a pass sees the model's own attention, which is restored once the last
    pass has ended."""
    model, cpu = gqa(), torch.device("cpu")
    first, second = attending(cpu, model.config), attending(cpu, model.config)
    first.__enter__()
    assert CapturedStep.of(model, gqa(), TREE).target.grouped_query_config is model.config
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert model.config._attn_implementation == "sdpa"


def test_a_mask_is_not_attended_to_by_cudnn(monkeypatch):
    """It would build a plan for every new shape."""

    backends = torch.backends.cuda

    def enabled():
        return (
            backends.cudnn_sdp_enabled(),
            backends.mem_efficient_sdp_enabled(),
            backends.math_sdp_enabled(),
        )

    before = enabled()
    with attending(torch.device("cuda")):
        assert enabled() == (False, True, True)
    with attending(torch.device("cpu")):
        assert enabled() == before
    assert enabled() == before


@pytest.mark.parametrize("length", [2, 40, 64, 65, 200, 1500])
def test_a_prompt_in_fixed_shapes_is_the_same_prompt(length):
    """Padding changes no token, and the model sees few shapes."""
    prompt = torch.randint(90, (length,), generator=torch.Generator().manual_seed(0))
    texts = []
    for fixed in (False, True):
        shapes = []
        model = gqa()
        decoder = SequoiaDecoder(model, gqa(), TREE)
        step = decoder.step
        if fixed:
            step.target.prefill_chunk = forward.PREFILL_CHUNK["cuda"]
            step.target.prefill_multiples = forward.PREFILL_MULTIPLES["cuda"]
        hook = model.register_forward_pre_hook(
            lambda model, args, given, shapes=shapes: shapes.append(
                (given["input_ids"].shape[1], given["attention_mask"].shape[3])
            ),
            with_kwargs=True,
        )
        with torch.inference_mode():
            step.prefill(prompt, 600, seed=0)
        hook.remove()
        capacity = step.sequence.target.capacity
        texts.append(decoder.generate(prompt, 20).sequences)
    assert torch.equal(*texts)
    extents = {capacity, *range(512, capacity, 512)}
    assert all(width % 64 == 0 and extent in extents for width, extent in shapes)
    assert len(shapes) == -(-length // 1024)


def test_a_prompt_is_read_in_larger_chunks_on_cuda():
    model = gqa()
    assert TreeModel(model).prefill_chunk == 256
    model.to("meta")
    model.__class__ = type("OnCuda", (type(model),), {"device": torch.device("cuda")})
    assert TreeModel(model).prefill_chunk >= 1024
