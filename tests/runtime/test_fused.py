"""The Triton kernels of verification and drawing, against enumeration and the tensor versions.

They run on a CUDA device, or without one on the CPU, by Triton's interpreter.
"""

from __future__ import annotations

import importlib
import itertools
import warnings
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from enumeration import CASES, Case, independent, without_replacement
from toys import SMALL_TREES as TREES
from toys import toy_decoder
from triton_kernels import DEVICE

from sequoia_plan.artifacts import TokenTree, load_tree
from sequoia_plan.runtime import Sampling, step
from sequoia_plan.runtime.base import kernel_launch
from sequoia_plan.runtime.base import sampling as sampling_module
from sequoia_plan.runtime.base.drawing import race_on_device
from sequoia_plan.runtime.verify import (
    VERIFIERS,
    Acceptance,
    TreeIndex,
    fused_verifier,
    greedy,
    verify,
)
from sequoia_plan.runtime.verify.fused_verifier import FUSED_VERIFIERS, FusedVerifier

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("one_thread"),
    # the interpreter computes with NumPy
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
]
interpreted = pytest.mark.skipif(
    DEVICE == "cuda", reason="kernels that are compiled cannot be changed from Python"
)
BLOCK = 2
"""Tokens that a program reads at once: vocabularies take several blocks, the last not full."""
SMALL = TokenTree.from_parents([-1, 0, 0, 1])
WIDE = TokenTree.from_parents([-1, 0, 0, 0, 1, 1, 2, 4, 7])
DELTA = 1e-9


class ObservedAcceptance(Acceptance):
    """An acceptance with known bonus probabilities, float64 [size, vocabulary]."""

    def __init__(self, end_probs, bonus_probs_of_end, order):
        super().__init__(end_probs, None, order)
        object.__setattr__(self, "bonus_probs_of_end", bonus_probs_of_end)

    def bonus_probs(self, end, target_probs, index, d2t=None):
        return self.bonus_probs_of_end[end]


def acceptance_of_kernels(tree, verifier, change):
    """A function like a verifier's `acceptance` that observes what the kernels do.

    The tensor version gives each node an interval of the first uniform number, and each token after
    it an interval of the second. The kernels are run just inside both ends of each interval. If
    both runs end at the same node with the same token, the interval is theirs, else it is shared.

    Args:
        change: changes the `FusedVerifier` before it runs.
    """

    def observe(target_probs, draft_probs, drawn, index, d2t=None):
        probs = target_probs(torch.arange(index.size))
        vocabulary = probs.shape[1]
        fused = FusedVerifier(tree, DEVICE, d2t, vocabulary, BLOCK)
        change(fused)
        logits = probs.log().to(DEVICE)
        draws = draft_probs.to(DEVICE), drawn.to(DEVICE)
        acceptance = VERIFIERS[verifier].acceptance(target_probs, draft_probs, drawn, index, d2t)
        end_probs = torch.zeros(index.size, dtype=torch.float64)
        token_masses = torch.zeros(index.size, vocabulary, dtype=torch.float64)

        def run(first, second):
            uniforms = torch.tensor([first, second], dtype=torch.float64, device=DEVICE)
            result = fused.verify(logits, Sampling(1.0, verifier=verifier), *draws, uniforms)
            path, count = result.path.tolist(), int(result.count)
            end = path[count - 1]
            path_of_end = index.paths[end].tolist()
            expected = [n for n in path_of_end if n or path.index(n) == 0]
            assert path[:count] == expected[:count]
            return end, int(result.bonus)

        for node, low, high in intervals(acceptance.end_probs, index.post_order):
            bonus = acceptance.bonus_probs(torch.tensor([node]), target_probs, index, d2t)[0]
            token_order = torch.arange(bonus.numel())
            for _, left, right in intervals(bonus / bonus.sum(), token_order):
                share = (high - low) * (right - left)
                from_low = run(low + DELTA, left + DELTA)
                from_high = run(high - DELTA, right - DELTA)
                for end, token in (from_low, from_high):
                    end_probs[end] += share / 2
                    token_masses[end, token] += share / 2
        return ObservedAcceptance(end_probs, token_masses, index.together)

    return observe


def intervals(weights, order):
    """(entry, low, high): the interval in [0, 1) of each entry, laid out in `order`.

    Entries without weight are left out.
    """
    edges = [0.0, *weights[order].double().cumsum(0).tolist()]
    return [
        (int(entry), low, high)
        for entry, (low, high) in zip(order, itertools.pairwise(edges), strict=True)
        if high - low > 4 * DELTA
    ]


def error(case, verifier, draws=without_replacement, change=lambda fused: None):
    """How far the kernels' output distribution is from the target's."""
    return case.error(acceptance_of_kernels(case.tree, verifier, change), draws)


class Changed:
    """A kernel whose arguments are changed before it is launched, or its results after."""

    def __init__(self, kernel, before=lambda *args: args, after=lambda *args: None):
        self.kernel, self.before, self.after = kernel, before, after

    def __getitem__(self, grid):
        def launch(*args, **constants):
            args = self.before(*args)
            self.kernel[grid](*args, **constants)
            self.after(*args)

        return launch


ENUMERATED = {
    "random": SMALL,
    "zeros": TREES["chain"],
    "one-hot": TREES["lopsided"],
    "equal": TREES["chain"],
    "disjoint": TREES["star"],
    "reduced": TREES["chain"],
    "reduced-zeros": SMALL,
}
"""Every case with one tree, because interpreted kernels are slow."""


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("verifier", FUSED_VERIFIERS)
def test_output_has_the_targets_distribution(verifier, case):
    assert error(Case(ENUMERATED[case], **CASES[case]), verifier) < 1e-7


@interpreted
@pytest.mark.parametrize("verifier", FUSED_VERIFIERS)
def test_broken_kernels_fail(verifier, monkeypatch):
    case = Case(SMALL, 3, [0, 1])
    assert error(case, verifier) < 1e-7
    assert error(case, verifier, independent) > 1e-3
    if verifier == "traversal":

        def reverse(fused):
            fused.post_order = torch.arange(fused.tree.size).flip(0)

        assert error(case, verifier, change=reverse) > 1e-3
    kernels = fused_verifier.kernels()
    weights = kernels.target_weights

    def without_residual(logits, q, t2d, tokens, inside, size, top, threshold, c, e, *filters):
        """Rejections do not change the target's probabilities."""
        temperature, min_p, _, dtype = filters
        return weights(logits, tokens, inside, top, threshold, temperature, min_p, dtype)

    monkeypatch.setattr(kernels, "residual_weights", without_residual)
    assert error(case, verifier) > 1e-3


@interpreted
@pytest.mark.parametrize("verifier", FUSED_VERIFIERS)
def test_a_draft_whose_drawn_tokens_stay_fails(verifier, monkeypatch):
    """Negative control: the mass before each child is all of the draft's."""
    kernels = fused_verifier.kernels()
    original = kernels.sum_never_drawn

    def sum_all(draft_probs, drawn, count, draft_vocabulary, DTYPE, BLOCK):
        return original(draft_probs, drawn, count * 0, draft_vocabulary, DTYPE, BLOCK)

    monkeypatch.setattr(kernels, "sum_never_drawn", sum_all)
    assert error(Case(SMALL, 3), verifier) > 1e-3


FILTERS = [
    {},
    {"top_p": 0.8},
    {"top_k": 3},
    {"min_p": 0.1},
    {"top_k": 5, "top_p": 0.9, "min_p": 0.05},
]


@pytest.mark.parametrize("verifier", FUSED_VERIFIERS)
@pytest.mark.parametrize(
    ("filters", "dtype"),
    [*((filters, torch.float16) for filters in FILTERS), (FILTERS[-1], torch.float32)],
    ids=str,
)
def test_they_accept_what_the_tensor_versions_accept(verifier, filters, dtype):
    """The same path and bonus token, with every filter, also with a part of the vocabulary."""
    generator = torch.Generator().manual_seed(0)
    sampling, paths = Sampling(0.7, verifier=verifier, **filters), set()
    trees = [TREES["both"], WIDE, TokenTree.chain(1)]
    for tree, d2t in itertools.product(trees, [None, torch.tensor([1, 3, 4, 7, 8])]):
        width, inner = 9 if d2t is None else 5, int((tree.child_count > 0).sum())
        logits = (torch.randn(tree.size, 9, generator=generator) * 2).to(dtype)
        draft_probs = torch.softmax(torch.randn(inner, width, generator=generator) * 2, -1)
        drawn = torch.rand(inner, width, generator=generator).argsort(-1)[:, : tree.branching]
        uniforms = torch.rand(2, generator=generator, dtype=torch.float64)
        inputs = [tensor.to(DEVICE) for tensor in (draft_probs, drawn, uniforms)]
        fused = FusedVerifier(tree, DEVICE, d2t, 9, 16)
        accepted = fused.verify(logits.to(DEVICE), sampling, *inputs)

        def target_probs(nodes, logits=logits):
            return sampling.target_probs(logits[nodes])

        rule, index = VERIFIERS[verifier], TreeIndex.of(tree)
        expected = verify(rule, target_probs, draft_probs, drawn, index, uniforms, d2t)
        assert as_lists(accepted) == as_lists(expected)
        paths.add(tuple(accepted.path.tolist()))
    assert len(paths) > 2


def statistics_error(logits, sampling, block=64):
    """How far the probabilities that the statistics stand for are from `Sampling.target_probs`."""
    fused = FusedVerifier(TokenTree.chain(1), DEVICE, block=block)
    statistics = fused.target_statistics(logits.to(DEVICE), sampling)
    max_logits, thresholds, totals = (column.cpu()[:, None] for column in statistics)
    bits = logits.float().view(torch.int32)
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() + (1 << 31)
    weights = torch.exp((logits.double() - max_logits) / sampling.temperature)
    weights[(keys < thresholds) | (weights < sampling.min_p)] = 0.0
    expected = sampling.target_probs(logits)
    return float((weights / totals - expected).abs().max())


SELECTIONS = [
    {"top_p": 0.05},
    {"top_p": 0.9},
    {"top_p": 1 - 1e-6},
    {"top_k": 1},
    {"top_k": 30},
    {"top_k": 1000},
    {"top_k": 40, "top_p": 0.7, "min_p": 0.02},
]


def logits_to_select_from(dtype, scale=3.0):
    """Of both signs, with ties, equal ones, infinite ones; several blocks, the last not full."""
    logits = torch.randn(4, 200, generator=torch.Generator().manual_seed(1)) * scale
    logits[1, 3:90] = logits[1, 3]
    logits[2] = 0.25
    logits[3, ::2] = -torch.inf
    return logits.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("filters", SELECTIONS, ids=str)
def test_radix_selection_keeps_what_the_tensor_versions_keep(filters, dtype):
    sampling = Sampling(0.8, **filters)
    for scale in (0.01, 8.0):
        assert statistics_error(logits_to_select_from(dtype, scale), sampling) < 1e-6


@interpreted
@pytest.mark.parametrize(
    ("name", "argument", "change"),
    [
        ("select_digit", 1, torch.clone),  # the goal is not lessened by larger digits
        ("digit_masses", 2, torch.zeros_like),  # keys with other higher digits count
        ("kept_masses", 2, torch.zeros_like),  # what the filters have removed counts
    ],
)
def test_wrong_selections_fail(name, argument, change, monkeypatch):
    kernels = fused_verifier.kernels()

    def before(*args):
        return *args[:argument], change(args[argument]), *args[argument + 1 :]

    sampling = Sampling(0.8, top_k=40, top_p=0.7)
    logits = logits_to_select_from(torch.bfloat16)
    assert statistics_error(logits, sampling) < 1e-6
    monkeypatch.setattr(kernels, name, Changed(getattr(kernels, name), before))
    assert statistics_error(logits, sampling) > 1e-3


def as_lists(accepted):
    return accepted.path.tolist(), accepted.count.tolist(), accepted.bonus.tolist()


def test_greedy_is_the_tensor_version():
    generator = torch.Generator().manual_seed(0)
    max_count = 0
    for tree in [*TREES.values(), WIDE, TokenTree.chain(1)] * 6:
        logits = torch.randn(tree.size, 5, generator=generator)
        tokens = torch.zeros(tree.size, dtype=torch.long)
        for node in np.flatnonzero(tree.child_count):
            first, count = int(tree.first_child[node]), int(tree.child_count[node])
            tokens[first : first + count] = torch.randperm(5, generator=generator)[:count]
        fused = FusedVerifier(tree, DEVICE, block=BLOCK)
        accepted = fused.greedy(logits.to(DEVICE), tokens.to(DEVICE))
        expected = greedy(logits.argmax(-1), tokens, TreeIndex.of(tree))
        assert as_lists(accepted) == as_lists(expected)
        max_count = max(max_count, int(accepted.count))
    assert max_count > 2


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("verifier", FUSED_VERIFIERS)
def test_logits_that_are_not_finite_end_somewhere(verifier, value):
    """With indices that exist: the step reports the fault afterwards."""
    logits = torch.full((SMALL.size, 9), value, device=DEVICE)
    draft_probs = torch.full((2, 9), 1 / 9, device=DEVICE)
    drawn = torch.arange(2, device=DEVICE).expand(2, 2).contiguous()
    uniforms = torch.tensor([0.5, 0.5], dtype=torch.float64, device=DEVICE)
    fused = FusedVerifier(SMALL, DEVICE, block=16)
    with np.errstate(all="ignore"):
        sampling = Sampling(0.7, top_p=0.9, verifier=verifier)
        accepted = fused.verify(logits, sampling, draft_probs, drawn, uniforms)
        assert 0 <= int(accepted.bonus) < 9 and 1 <= int(accepted.count) <= SMALL.depth


def race_difference(count=9):
    """How many tokens are drawn otherwise than by the tensor version; all draws come from few of
    several blocks."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 37, generator=generator) * 8
    logits[0, 5:] = -torch.inf  # fewer tokens than are drawn
    logits[1, 16:32] += 60.0
    bits = torch.empty(5, 37, dtype=torch.int32).random_(generator=generator)
    probs, drawn = race_on_device(logits.to(DEVICE), 0.6, count, bits.to(DEVICE), block=16)
    expected_probs, expected_drawn = Sampling(0.6).draw_children(logits, count, bits)
    torch.testing.assert_close(probs.cpu(), expected_probs, rtol=1e-5, atol=1e-9)
    return int((drawn.cpu() != expected_drawn).sum())


@pytest.mark.parametrize("count", [1, 9, 37])
def test_races_are_drawn_as_the_tensor_version_draws(count):
    assert race_difference(count) == 0


@interpreted
@pytest.mark.parametrize("wrong", ["fewer winners", "other numbers"])
def test_wrong_races_differ(wrong, monkeypatch):
    """Controls: a block has fewer winners than are drawn; its tokens share random numbers."""
    kernels = drawing_kernels()

    def other_numbers(*args):
        *inputs, bits, probs, keys, tokens, vocabulary, count, temperature = args
        bits = bits[:, :16].repeat(1, 3)[:, :vocabulary].contiguous()
        return *inputs, bits, probs, keys, tokens, vocabulary, count, temperature

    def fewer_winners(*args):
        args[-5][..., -3:] = -torch.inf  # the keys

    controls = {
        "fewer winners": Changed(kernels.race, after=fewer_winners),
        "other numbers": Changed(kernels.race, other_numbers),
    }
    monkeypatch.setattr(kernels, "race", controls[wrong])
    assert race_difference() > 0


def use_kernels(monkeypatch):
    """Let steps that are made from now on use kernels as on CUDA."""
    for module in (step, sampling_module):
        monkeypatch.setattr(module, "kernels_available", lambda device: True)
    monkeypatch.setattr(step, "is_on_one_cuda_device", lambda model: True)
    monkeypatch.setattr(step, "FusedVerifier", lambda *args: FusedVerifier(*args, block=16))
    monkeypatch.setattr(
        sampling_module, "race_on_device", lambda *args: race_on_device(*args, block=16)
    )
    monkeypatch.setattr(kernel_launch, "_failed_kernels", set())


@interpreted
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(0.9, verifier="sequoia"),
        Sampling(0.9),
        Sampling(0.9, verifier="spectr"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("covered", [None, [0, 2, 3, 5, 7]])
def test_a_decoder_generates_the_same_with_kernels(sampling, covered, monkeypatch):
    """Whole texts, as a decoder on CUDA runs; also a verifier without kernels."""
    decoder = toy_decoder(WIDE, covered=covered)
    expected = decoder.generate([3, 1, 4], 12, sampling=sampling, seed=3).sequences
    use_kernels(monkeypatch)
    decoder = decoder.with_tree(WIDE)
    fused, runs = decoder.step.verifier.fused, []
    for name, method in {"greedy": fused.greedy, "verify": fused.verify}.items():

        def counted(*args, method=method, name=name):
            runs.append(name)
            return method(*args)

        monkeypatch.setattr(fused, name, counted)
    result = decoder.generate([3, 1, 4], 12, sampling=sampling, seed=3)
    assert torch.equal(result.sequences, expected)
    if sampling.verifier == "spectr":
        assert runs == []
    else:
        assert runs == ["greedy" if sampling.greedy else "verify"] * result.steps


def drawing_kernels():
    """The module of the kernel that draws, which needs Triton."""
    return importlib.import_module("sequoia_plan.runtime.base.drawing_kernels")


class Uncompiled:
    """A kernel that cannot be compiled: Triton raises when it is launched, as for a wrong type."""

    def __init__(self):
        self.launches = 0

    def __getitem__(self, grid):
        def launch(*args, **constants):
            self.launches += 1
            try:
                raise TypeError("quoted code\nLoop-carried variable mass has another type")
            except TypeError as error:
                raise CompilationError("at 1:2:") from error

        return launch


class CompilationError(Exception):
    """Like Triton's, which is no RuntimeError."""


@interpreted
@pytest.mark.parametrize(
    ("sampling", "module", "kernel", "name"),
    [
        (Sampling(), fused_verifier.kernels, "greedy", "greedy"),
        (Sampling(0.9, verifier="sequoia"), fused_verifier.kernels, "sequoia", "sequoia"),
        (Sampling(0.9), fused_verifier.kernels, "traversal_round", "traversal"),
        (Sampling(0.9), drawing_kernels, "race", "drawing"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tensor_operations_replace_a_kernel_that_cannot_be_compiled(
    sampling, module, kernel, name, monkeypatch
):
    """The same text, with one warning; the kernel is tried once."""
    decoder = toy_decoder(WIDE)
    expected = decoder.generate([3, 1, 4], 12, sampling=sampling, seed=3).sequences
    use_kernels(monkeypatch)
    uncompiled = Uncompiled()
    monkeypatch.setattr(module(), kernel, uncompiled)
    decoder = decoder.with_tree(WIDE)
    assert decoder.step.verifier.uses_kernels(sampling)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = decoder.generate([3, 1, 4], 12, sampling=sampling, seed=3)
        decoder.with_tree(SMALL).generate([3, 1, 4], 12, sampling=sampling, seed=3)
    assert torch.equal(result.sequences, expected) and result.steps > 1
    messages = [str(warning.message) for warning in caught if name in str(warning.message)]
    assert messages == [
        f"{name}: its Triton kernel cannot be compiled, and slower tensor operations replace it: "
        "TypeError: Loop-carried variable mass has another type"
    ]
    assert uncompiled.launches == 1
    assert decoder.step.verifier.uses_kernels(sampling) == (name == "drawing")


@interpreted
def test_a_device_without_memory_is_no_kernel_that_cannot_be_compiled(monkeypatch):
    monkeypatch.setattr(kernel_launch, "_failed_kernels", set())

    def run_kernel():
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        kernel_launch.kernel_or_tensors("sequoia", run_kernel, lambda: pytest.fail("replaced"))
    assert not kernel_launch.has_failed("sequoia")


@interpreted
@pytest.mark.parametrize("verifier", ["greedy", *FUSED_VERIFIERS, "drawing"])
def test_kernels_are_launched_on_the_device_of_their_inputs(verifier, monkeypatch):
    """Triton launches on the current device, which may be another GPU than the model's."""
    devices = []

    @contextmanager
    def device_of(tensor):
        devices.append(tensor.shape)
        yield
        devices.pop()

    class Launched:
        def __getitem__(self, grid):
            return lambda *args, **constants: launches.append(list(devices))

    launches, logits = [], torch.randn(SMALL.size, 9)
    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    kernels = fused_verifier.kernels()
    rounds = ("traversal_start", "traversal_round", "traversal_finish")
    names = ["kept_masses", "greedy", "sequoia", *rounds]
    drawing_names = ((drawing_kernels(), name) for name in ("race_totals", "race"))
    for module, name in [*((kernels, name) for name in names), *drawing_names]:
        monkeypatch.setattr(module, name, Launched())
    fused = FusedVerifier(SMALL, DEVICE, block=16)
    draft_probs, drawn = torch.full((2, 9), 1 / 9), torch.arange(2).expand(2, 2)
    if verifier == "greedy":
        fused.greedy(logits, torch.zeros(SMALL.size, dtype=torch.long))
    elif verifier == "drawing":
        race_on_device(logits, 0.6, 2, torch.zeros(SMALL.size, 9, dtype=torch.int32))
    else:
        sampling = Sampling(0.7, verifier=verifier)
        fused.verify(logits, sampling, draft_probs, drawn, torch.rand(2).double())
    assert launches and all(current == [logits.shape] for current in launches)


@pytest.mark.parametrize(
    ("name", "rounds"), [("llama3-70b-8b-cnn-128x10", 10), ("llama3-70b-8b-cnn-768x18", 18)]
)
def test_traversal_takes_few_rounds(name, rounds):
    """Every child is tested once, after its parent and its earlier siblings, in as few rounds."""
    tree = load_tree(name)
    fused, round_of_child = FusedVerifier(tree, "cpu"), {0: -1}
    assert len(fused.rounds) == rounds
    for number, (rows, ranks) in enumerate(fused.rounds):
        parents = fused.inner_nodes[rows].tolist()
        for node, rank in zip(parents, ranks.tolist(), strict=True):
            child = int(tree.first_child[node]) + rank
            assert child not in round_of_child and round_of_child[node] < number
            assert rank == 0 or round_of_child[child - 1] < number
            round_of_child[child] = number
    assert len(round_of_child) == tree.size
