"""The Triton kernels of verification and drawing, against enumeration and the tensor versions.

They run on a CUDA device, or without one on the CPU, by Triton's interpreter.
"""

import warnings
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from enumeration import CASES, Case, independent, without_replacement
from toys import SMALL_TREES as TREES
from toys import normal, toy_decoder
from triton_kernels import DEVICE, interpreted

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.models.base import kernel_launch
from sequoia_plan.runtime import Sampling
from sequoia_plan.runtime.sampling import drawing, drawing_kernels
from sequoia_plan.runtime.sampling import sampling as sampling_module
from sequoia_plan.runtime.sampling.drawing import race_on_device
from sequoia_plan.runtime.verify import (
    VERIFIERS,
    DrawnTree,
    TreeIndex,
    residual,
    residual_kernels,
    traversal,
)

pytestmark = [
    pytest.mark.slow,
    # the interpreter computes with NumPy
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
]
SMALL = TokenTree([-1, 0, 0, 1])
WIDE = TokenTree([-1, 0, 0, 0, 1, 1, 2, 4, 7])
SEQUENTIAL = {
    "sequoia": without_replacement,
    "traversal": without_replacement,
    "specinfer": independent,
}
"""The verifiers that reject one child after the other, and the draws that each is exact for."""


@pytest.fixture(autouse=True)
def _drawn_as_on_cuda(monkeypatch):
    """A CPU has another way to draw, and loops in place of tensor operations."""
    on, cuda = Sampling.drawing_on, torch.device("cuda")
    monkeypatch.setattr(Sampling, "drawing_on", lambda sampling, _: on(sampling, cuda))
    monkeypatch.setattr(drawing, "HAS_NUMBA", False)


@pytest.fixture
def use_kernels(monkeypatch):
    """Let kernels run as on CUDA, each program over few tokens: a vocabulary takes several."""
    for module in (residual, sampling_module):
        monkeypatch.setattr(module, "kernels_available", lambda device: True)
    monkeypatch.setattr(residual, "BLOCK", 2)
    monkeypatch.setattr(
        sampling_module, "race_on_device", lambda *args: race_on_device(*args, block=16)
    )
    monkeypatch.setattr(kernel_launch, "_failed_kernels", set())


def error(case, verifier, draws=without_replacement):
    """How far the output distribution is from the target's."""
    with torch.device(DEVICE):
        case.index = TreeIndex.of(case.tree, DEVICE)
        return case.error(VERIFIERS[verifier], draws)


class Kernel:
    """In place of a kernel; `launch` takes the grid and what a launch takes."""

    def __init__(self, launch):
        self.launch = launch

    def __getitem__(self, grid):
        return partial(self.launch, grid)


def changed(kernel, before=lambda *args: args, after=lambda *args: None):
    """A kernel whose arguments are changed before it is launched, or its results after."""

    def launch(grid, *args, **constants):
        args = before(*args)
        kernel[grid](*args, **constants)
        after(*args)

    return Kernel(launch)


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


@pytest.mark.usefixtures("use_kernels")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("verifier", SEQUENTIAL)
def test_output_has_the_targets_distribution(verifier, case):
    assert error(Case(ENUMERATED[case], **CASES[case]), verifier, SEQUENTIAL[verifier]) < 1e-12


@interpreted
@pytest.mark.usefixtures("use_kernels")
@pytest.mark.parametrize("verifier", ["sequoia", "traversal"])
@pytest.mark.parametrize(("column", "wrong_value"), [(0, 0.0), (2, 1.0)])
def test_a_broken_kernel_fails(verifier, column, wrong_value, monkeypatch):
    """Controls: what was rejected stays in the residual; a node's a stays 1."""

    def spoil(*args):
        args[4][column] = wrong_value  # the state

    case = Case(SMALL, 3, [0, 1])
    assert error(case, verifier, independent) > 1e-3
    assert error(case, verifier) < 1e-12
    spoiled = changed(residual_kernels.reject_child, after=spoil)
    monkeypatch.setattr(residual_kernels, "reject_child", spoiled)
    is_unused = verifier == "sequoia" and column == 2  # only traversal goes on from a
    assert (error(case, verifier) < 1e-12) == is_unused


def rejected(tree, device):
    """The state and the acceptance of all nodes of a tree after all rejections, on `device`."""
    inner = int((tree.child_count > 0).sum())
    probs = torch.softmax(2 * normal(tree.size, 9), -1).to(device)
    draft_probs = torch.softmax(2 * normal(inner, 9, seed=1), -1).to(device)
    draft_probs[0] = 0.0  # the draft had nothing left
    drawn = normal(inner, 9, seed=2).argsort(-1)[:, : tree.branching].to(device)
    after = traversal.residual_after_children(
        DrawnTree(probs.__getitem__, draft_probs, drawn, TreeIndex.of(tree, device))
    )
    return after.state.cpu(), after.accept_probs.cpu()


@pytest.mark.parametrize("tree", [WIDE, *TREES.values()])
def test_the_kernel_rejects_as_tensor_operations_do(tree, request):
    expected = rejected(tree, "cpu")
    request.getfixturevalue("use_kernels")
    torch.testing.assert_close(rejected(tree, DEVICE), expected)


def race_difference(count=9):
    """How many tokens are drawn otherwise than by the tensor version; all draws come from few of
    several blocks."""
    logits = 8 * normal(5, 37)
    logits[0, 5:] = -torch.inf  # fewer tokens than are drawn
    logits[1, 16:32] += 60.0
    logits[2] = -torch.inf  # no token has a probability
    torch.manual_seed(0)
    bits = torch.empty(5, 37, dtype=torch.int32).random_()
    probs, drawn = race_on_device(logits.to(DEVICE), 0.6, count, bits.to(DEVICE), block=16)
    expected_probs, expected_drawn = Sampling(0.6).draw_children(logits, count, bits)
    torch.testing.assert_close(probs.cpu(), expected_probs, rtol=1e-5, atol=1e-9, equal_nan=True)
    return int((drawn.cpu() != expected_drawn).sum())


@pytest.mark.parametrize("count", [1, 9, 37])
def test_races_are_drawn_as_the_tensor_version_draws(count):
    assert race_difference(count) == 0


@interpreted
@pytest.mark.parametrize("wrong", ["fewer winners", "other numbers"])
def test_wrong_races_differ(wrong, monkeypatch):
    """Controls: a block has fewer winners than are drawn; its tokens share random numbers."""

    def other_numbers(*args):
        *inputs, bits, probs, keys, tokens, vocabulary, count, temperature = args
        bits = bits[:, :16].repeat(1, 3)[:, :vocabulary].contiguous()
        return *inputs, bits, probs, keys, tokens, vocabulary, count, temperature

    def fewer_winners(*args):
        args[-5][..., -3:] = -torch.inf  # the keys

    controls = {
        "fewer winners": changed(drawing_kernels.race, after=fewer_winners),
        "other numbers": changed(drawing_kernels.race, other_numbers),
    }
    monkeypatch.setattr(drawing_kernels, "race", controls[wrong])
    assert race_difference() > 0


def generated(decoder, sampling):
    return decoder.generate([3, 1, 4], 12, sampling=sampling, seed=3)


@interpreted
@pytest.mark.parametrize(
    "sampling",
    [Sampling(0.9, top_p=0.8, verifier="sequoia"), Sampling(0.9), Sampling(0.9, verifier="spectr")],
    ids=repr,
)
@pytest.mark.parametrize("covered", [None, [0, 2, 3, 5, 7]])
def test_a_decoder_generates_the_same_with_kernels(sampling, covered, request, monkeypatch):
    """Whole texts, as a decoder on CUDA runs; also a verifier without a kernel."""
    decoder = toy_decoder(WIDE, covered=covered)
    expected = generated(decoder, sampling).sequences
    request.getfixturevalue("use_kernels")
    ranks, kernel = [], residual_kernels.reject_child
    counted = changed(kernel, after=lambda *args: ranks.append(args[7]))
    monkeypatch.setattr(residual_kernels, "reject_child", counted)
    result = generated(decoder, sampling)
    assert result.sequences.equal(expected)
    # a launch for each rank of the widest node, or of each level's
    launches = {"sequoia": [0, 1, 2], "traversal": [0, 1, 2, 0, 1, 0, 0], "spectr": []}
    assert ranks == launches[sampling.verifier] * result.steps


class CompilationError(Exception):
    """Like Triton's, which is no RuntimeError."""


@interpreted
@pytest.mark.parametrize(
    ("verifier", "module", "kernel", "name"),
    [
        ("sequoia", residual_kernels, "reject_child", "verification"),
        ("traversal", residual_kernels, "reject_child", "verification"),
        ("traversal", drawing_kernels, "race", "drawing"),
    ],
)
def test_tensor_operations_replace_a_kernel_that_cannot_be_compiled(
    verifier, module, kernel, name, request, monkeypatch
):
    """The same text, with one warning; the kernel is tried once."""
    decoder, sampling = toy_decoder(WIDE), Sampling(0.9, verifier=verifier)
    expected = generated(decoder, sampling).sequences
    request.getfixturevalue("use_kernels")
    launches = []

    def launch(grid, *args, **constants):
        """As Triton raises when a kernel is launched, for a wrong type."""
        launches.append(grid)
        try:
            raise TypeError("quoted code\nLoop-carried variable mass has another type")
        except TypeError as error:
            raise CompilationError("at 1:2:") from error

    monkeypatch.setattr(module, kernel, Kernel(launch))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = generated(decoder, sampling)
        generated(decoder.with_tree(SMALL), sampling)
    assert result.sequences.equal(expected) and result.steps > 1
    messages = [str(warning.message) for warning in caught if name in str(warning.message)]
    assert messages == [
        f"{name}: its Triton kernel cannot be compiled, and slower tensor operations replace it: "
        "TypeError: Loop-carried variable mass has another type"
    ]
    assert len(launches) == 1


@interpreted
def test_a_device_without_memory_is_no_kernel_that_cannot_be_compiled(monkeypatch):
    monkeypatch.setattr(kernel_launch, "_failed_kernels", set())

    kernel = "verification", torch.float32

    def run_kernel():
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        kernel_launch.kernel_or_tensors(kernel, run_kernel, lambda: pytest.fail("replaced"))
    assert not kernel_launch.has_failed(kernel)


@interpreted
@pytest.mark.parametrize("part", ["verification", "drawing"])
@pytest.mark.usefixtures("use_kernels")
def test_kernels_are_launched_on_the_device_of_their_inputs(part, monkeypatch):
    """Triton launches on the current device, which may be another GPU than the model's."""
    devices = []

    @contextmanager
    def device_of(tensor):
        devices.append(tensor.shape)
        yield
        devices.pop()

    launches, logits = [], torch.randn(SMALL.size, 9)
    launched = Kernel(lambda *args, **constants: launches.append(list(devices)))
    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(residual_kernels, "reject_child", launched)
    for name in ("race_totals", "race"):
        monkeypatch.setattr(drawing_kernels, name, launched)
    if part == "drawing":
        race_on_device(logits, 0.6, 2, torch.zeros(SMALL.size, 9, dtype=torch.int32))
        assert launches == [[logits.shape]] * 2
    else:
        rejected(SMALL, DEVICE)
        assert launches == [[(2, 9)]] * 3
