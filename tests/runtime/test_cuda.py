"""The logic of CUDA graphs, on the CPU: what is captured and how often, when graphs are captured
anew, and which attention kernels are allowed."""

import itertools
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress

import pytest
import torch
from architectures import plain_text, resembling, tiny, tokens_of
from operations import Operations
from refusals import refusal
from simulated import Cuda, simulate_capture
from torch._subclasses.fake_tensor import FakeTensorMode
from toys import PLAIN, TREE, ToyModel, normal, text_inside_generate, toy_decoder

from drafts import small_pair
from sequoia_plan.artifacts import TokenTree
from sequoia_plan.models import loaded_model
from sequoia_plan.models.layers.attention import attend_shared_heads, attending
from sequoia_plan.runtime import SequoiaDecoder, captured_step
from sequoia_plan.runtime.capture import Graphs
from sequoia_plan.runtime.captured_step import CapturedStep
from sequoia_plan.runtime.sampling import sampling

pytestmark = pytest.mark.slow
CUDA, IDS = torch.device("cuda", 0), torch.tensor([[5, 6, 7, 8]])


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
    for _ in range(2):
        for decoder, temperature in turns:
            decoder.generate([3, 1, 4], 40, temperature, seed=0)
        assert first.step.models.graphs.captures == ["step"] * len(turns)


def test_a_long_text_takes_few_captures():
    """An extent of 512 and of 1024, then two for each doubling. A second text takes none."""
    target = ToyModel(0, context=1 << 14)
    # the draft is the target, so every path is accepted whole
    decoder = SequoiaDecoder(target, target, TokenTree.chain(8))
    simulate_capture(decoder.step)
    for _ in range(2):
        assert decoder.generate([3, 1, 4], 2500).new_tokens == 2500
        assert decoder.step.models.graphs.captures == ["step"] * 5


def test_new_memory_makes_new_graphs(monkeypatch):
    monkeypatch.setattr(captured_step, "EXTENT_MULTIPLE", {"cpu": 64, "cuda": 64})
    decoder, eager = simulated(), toy_decoder(TREE)
    for prompt, tokens in (([3, 1, 4], 20), ([3, 1, 4], 20), ([3, 1, 4] * 20, 100)):
        expected = eager.generate(prompt, tokens).sequences
        assert decoder.generate(prompt, tokens).sequences.equal(expected)
    assert decoder.step.models.graphs.version == decoder.step.sequence.version == 2


@pytest.mark.parametrize(
    ("excluded", "fails", "captured"),
    [
        ((), (), {"step"}),
        ((), ("step", "target"), {"draft", "verify"}),
        (("step", "target"), (), {"draft", "verify"}),  # known before, so not tried
        ((), ("step", "draft"), {"target", "verify"}),
        ((), ("step", "draft", "target", "verify"), set()),
    ],
)
@pytest.mark.parametrize(
    ("kind", "temperature"),
    [("language model", 0.0), ("MTP", 1.0), ("EAGLE-3", 1.0), ("DFlash 2", 1.0)],
)
def test_only_the_parts_that_cannot_be_captured_run_as_they_are(
    kind, temperature, excluded, fails, captured, recwarn
):
    """Hidden states reach the next graph through memory that stays."""
    each = SequoiaDecoder(*small_pair(kind), TREE)

    def text():
        return each.generate([3, 1, 4], 30, temperature, seed=1).sequences

    expected = text()
    simulate_capture(each.step, excluded)
    graphs = each.step.models.graphs
    graphs.fails = frozenset(fails)
    for _ in range(2):
        assert text().equal(expected)
    assert set(graphs.captures) == captured and len(graphs.captures) == len(graphs.graphs)
    assert {key[0] for key in graphs.failed} == set(fails)
    warned = [str(w.message) for w in recwarn if "cannot be captured" in str(w.message)]
    assert len(warned) == len(graphs.failed) and all("and more" not in line for line in warned)


def test_graphs_that_read_each_others_outputs_share_no_memory(monkeypatch):
    """A part's graph is captured where another part's memory is free again: in a pool of its own.

    In one pool, the draft would leave its output where the target writes before verification reads.
    """
    cuda, graphs = Cuda(monkeypatch), Graphs(CUDA)
    for part, extent in itertools.product(("draft", "target"), (512, 1024)):
        graphs((part, extent), lambda: torch.zeros(3))
    assert cuda.pools == 2 == len({*graphs.pools.values()})


# A capture that fails


@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError])
@pytest.mark.parametrize("fails", [None, "warm", "checked", "inside", "end"])
def test_a_capture_that_fails_leaves_nothing_behind(fails, error, monkeypatch):
    """What it changed is as before, the allocator is told that the capture is over, and the next
    one takes another pool. No workspace of a matrix product stays: the graph's lies in its pool."""
    cuda = Cuda(monkeypatch, fails, error)
    graphs, total = Graphs(CUDA), torch.zeros(3)
    with pytest.raises(error) if fails else nullcontext():
        graphs.capture("sum", cuda.run, [total], (total,))
        total.sub_(1)  # the stand-in runs where CUDA only records
    assert total.tolist() == [0.0] * 3 and cuda.sync == 0
    assert cuda.capturing == set() and cuda.workspaces == {}
    assert cuda.graph_workspaces == ([] if fails in ("warm", "checked") else [(0, 1)])
    assert {*graphs.pools} == ({"sum"} if fails is None else set())


def test_captures_of_two_threads_do_not_overlap(monkeypatch):
    cuda = Cuda(monkeypatch)
    graphs = [Graphs(CUDA) for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        [*threads.map(lambda each: each("sum", lambda: time.sleep(0.05)), graphs)]
    assert [each.failed for each in graphs] == [{}, {}] and cuda.pools == 2


@pytest.mark.parametrize(
    ("message", "captured"), [("a previous error during capture", True), ("wrong shape", False)]
)
@pytest.mark.filterwarnings("ignore:sum. cannot be captured")
def test_only_errors_that_another_thread_may_cause_are_not_final(message, captured, monkeypatch):
    cuda = Cuda(monkeypatch, "inside", lambda where: RuntimeError(message))
    graphs, total = Graphs(CUDA), torch.zeros(3)
    for _ in range(2):
        graphs("sum", cuda.run, inputs=(total,))
    assert ("sum" in graphs.graphs) == captured


def test_a_function_that_waits_for_the_device_is_not_captured(monkeypatch):
    cuda = Cuda(monkeypatch)
    graphs = Graphs(CUDA)
    with pytest.warns(UserWarning, match="sum: cannot be captured .* called a synchronizing CUDA"):
        graphs(("sum", 512), cuda.wait)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the same is not said twice
        for extent in (512, 1024):
            graphs(("sum", extent), cuda.wait)
        cuda.wait()
    assert {*graphs.failed} == {("sum", 512), ("sum", 1024)}
    assert graphs.graphs == {} and cuda.sync == 0


# Models that were moved


@pytest.fixture
def models():
    """A target and its draft."""
    target = tiny("Llama")
    return target, resembling(target)


def test_weights_that_were_moved_make_new_graphs(models):
    target, decoder = models[0], SequoiaDecoder(*models, TREE)
    step = decoder.step
    simulate_capture(step)
    first = decoder.generate([5, 6, 7], 20).sequences
    version, captures = step.sequence.version, list(step.models.graphs.captures)
    target.lm_head.weight.data = target.lm_head.weight.data.clone()  # as `to` there and back does
    assert decoder.generate([5, 6, 7], 20).sequences.equal(first)
    assert step.sequence.version == version + 1 == step.models.graphs.version
    assert step.models.graphs.captures == captures  # captured anew
    target.double()
    with refusal(r"llama: .*dtype changed .*; make it anew"):
        decoder.generate([5, 6, 7], 4)


def test_custom_generate_makes_a_new_decoder_for_a_model_that_was_moved(models):
    for dtype in (torch.float32, torch.float64):
        for model in models:
            model.to(dtype)
        expected = plain_text(models[0], IDS, 12)
        assert text_inside_generate(*models, IDS, max_new_tokens=12).equal(expected)


# What is measured, and sums in no fixed order


def test_whole_numbers_add_up_alike_in_any_order():
    """And floats, the control, do not. Only on a device, whose sums have no fixed order."""
    p = torch.softmax(normal(200_000), -1)
    assert sampling.summands(p, 0.9)[0] is p
    assert sampling.summands(p.to("meta"), 0.9)[0].dtype == torch.int64
    orders = [torch.randperm(p.numel()) for _ in range(9)]

    def sums(weights):
        bins = torch.zeros(p.numel(), dtype=torch.long)
        return {float(weights.new_zeros(1).scatter_add_(0, bins, weights[o])) for o in orders}

    assert len(sums(sampling.whole_numbers(p, 0.9)[0])) == 1 < len(sums(p))


# Passes of a model


@pytest.mark.parametrize("tree", [TREE, PLAIN], ids=["tree", "plain"])
def test_heads_that_share_keys_and_values_do_not_copy_them(tree):
    """transformers (the control) copies both in each of three layers; the logits are the same."""
    counts, logits = [], []
    for shares_heads in (True, False):
        step = CapturedStep.of(tiny("Llama"), tiny("Llama"), tree)
        if not shares_heads:
            step.target.backend.sdpa_config = None
        with torch.no_grad():  # in inference mode `reshape` does not show its copy
            step.prefill(torch.arange(5, 20), 8, seed=0)
            extent = step.extent(14)
            with Operations() as operations:
                logits.append(step.forward_target(extent))
        counts.append(operations.calls.count(("clone", 4 * extent * 8)))
    assert counts[0] == 0 and (counts[1] == 6 or tree.size == 1)
    torch.testing.assert_close(*logits)


@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("key_heads", [2, 8])
def test_attention_with_a_mask_names_its_kernel(key_heads, tokens):
    """On CUDA. Switches that choose one are the process's: passes that overlap leave them wrong."""
    with FakeTensorMode(), Operations() as operations:
        query, keys, mask = (
            torch.empty(1, *shape, dtype=torch.bfloat16, device="cuda")
            for shape in ((8, tokens, 128), (key_heads, 64, 128), (1, tokens, 64))
        )
        with suppress(RuntimeError):  # afterwards: PyTorch for the CPU copies nothing on CUDA
            attend_shared_heads(None, query, keys, keys, mask)
    names = [name for name, _ in operations.calls if "attention" in name]
    assert names == ["_scaled_dot_product_efficient_attention"]


def test_attention_is_replaced_in_our_passes_only():
    """The model's own `generate` returns the same tokens before and after our steps, and passes of
    one model may overlap."""
    model = tiny("Llama")
    expected = plain_text(model, IDS, 20)
    passes = attending(model.config), attending(model.config)
    passes[0].__enter__()
    decoder = SequoiaDecoder(model, tiny("Llama"), TREE)
    passes[1].__enter__()
    for each in passes:
        each.__exit__(None, None, None)
    assert model.config._attn_implementation == "sdpa"
    assert decoder.generate(IDS, 20).sequences.equal(expected)
    assert plain_text(model, IDS, 20).equal(expected)


@pytest.mark.parametrize("length", [2, 64, 65, 1500])
def test_a_prompt_in_fixed_shapes_is_the_same_prompt(length, monkeypatch):
    """Padding changes no token, and the model sees few shapes."""
    prompt = tokens_of(length)
    model, shapes = tiny("Llama", max_position_embeddings=4096), []
    decoder = SequoiaDecoder(model, tiny("Llama"), TREE)
    step = decoder.step
    expected = decoder.generate(prompt, 20).sequences
    for settings in (loaded_model.PREFILL_CHUNK, loaded_model.PREFILL_MULTIPLES):
        monkeypatch.setitem(settings, "cpu", settings["cuda"])
    assert decoder.generate(prompt, 20).sequences.equal(expected)

    def note(model, args, given):
        shapes.append((given["input_ids"].shape[1], given["attention_mask"].shape[3]))

    model.register_forward_pre_hook(note, with_kwargs=True)
    with torch.inference_mode():
        step.prefill(prompt, 600, seed=0)
    capacity = step.sequence.target.capacity
    extents = {capacity, *range(512, capacity, 512)}
    assert all(width % 64 == 0 and extent in extents for width, extent in shapes)
    assert len(shapes) == -(-length // 1024)
