"""No decoding path writes to one place twice, which is undefined on CUDA.

Any of the values may stay there, so the CPU's other tests cannot see it.
"""

import itertools

import pytest
import torch
from architectures import resembling, tiny
from simulated import simulate_capture
from torch.utils._python_dispatch import TorchDispatchMode
from toys import PLAIN, TREE, toy_models

from drafts import small_pair
from sequoia_plan.artifacts import TokenTree
from sequoia_plan.models import loaded_model
from sequoia_plan.runtime import Sampling, SequoiaDecoder
from sequoia_plan.runtime.sampling.drawing import DRAWING_OF_VERIFIER

TREES = [TREE, TokenTree.chain(5), TokenTree.star(4), PLAIN]
PROMPTS = [[3], [3, 1], [3, 1, 4, 1, 5]]
SETTINGS = [Sampling(), *(Sampling(0.9, 0.8, 5, verifier=name) for name in DRAWING_OF_VERIFIER)]
pytestmark = pytest.mark.slow


class NoDuplicateIndices(TorchDispatchMode):
    """Raises AssertionError where an operation writes several values to one place.

    Attributes:
        writes: operations that wrote by index.
    """

    def __init__(self):
        super().__init__()
        self.writes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = function.overloadpacket.__name__.strip("_")
        if name == "index_copy":
            self.check(name, [args[2]], args[3])
        elif name in ("index_put", "index_put_impl", "unsafe_index_put"):
            is_accumulated = kwargs.get("accumulate", len(args) > 3 and args[3])
            if not is_accumulated:
                self.check(name, [index for index in args[1] if index is not None], args[2])
        elif name == "scatter" and "src" in function._overloadname and "reduce" not in kwargs:
            self.check_lines(name, args[1], args[2])
        return function(*args, **kwargs)

    def check(self, name, indices, values):
        """The places are combinations of indices; one value for all of them is no conflict."""
        self.writes += 1
        if indices[0].dtype == torch.bool or values.numel() == 1:
            return
        places = torch.stack(torch.broadcast_tensors(*indices)).flatten(1)
        assert places.unique(dim=1).shape == places.shape, f"{name} writes twice to {places}"

    def check_lines(self, name, dim, index):
        """Each line along `dim` has indices of its own."""
        self.writes += 1
        is_twice = index.sort(dim).values.diff(dim=dim) == 0
        assert not is_twice.any(), f"{name} writes twice to {index}"


def toys(covered):
    return toy_models(covered=covered)


def of_transformers(name):
    target = tiny(name)
    return target, resembling(target)


PAIRS = {
    "toys": (toys, None),
    "part of the vocabulary": (toys, [0, 2, 3, 5, 7]),
    "windowed": (of_transformers, "Qwen2, some layers windowed"),
    **{kind: (small_pair, kind) for kind in ("EAGLE-3", "DFlash 2", "DSpark")},
}


@pytest.mark.parametrize("pair", PAIRS)
def test_no_decoding_path_writes_to_one_place_twice(pair, monkeypatch):
    """Every verifier and kind of tree, short prompts, in passes as the CPU or CUDA runs them."""
    make, setting = PAIRS[pair]
    target, draft = make(setting)
    decoders = [SequoiaDecoder(target, draft, tree) for tree in TREES]
    with NoDuplicateIndices() as mode:
        for decoder, prompt in itertools.product(decoders, PROMPTS):
            decoder.generate(prompt, 8, sampling=Sampling(0.9), seed=0)
        for sampling, is_padded in itertools.product(SETTINGS, (False, True)):
            step = decoders[0].step
            if is_padded:
                multiples = loaded_model.PREFILL_MULTIPLES
                monkeypatch.setitem(multiples, "cpu", multiples["cuda"])
                simulate_capture(step)
            decoders[0].generate(PROMPTS[0], 12, sampling=sampling, seed=0)
    assert mode.writes > 100


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.index_copy_(0, torch.tensor([1, 1]), torch.tensor([1.0, 2.0])),
        lambda x: x.index_put_((torch.tensor([0, 0]),), torch.tensor([1.0, 2.0])),
        lambda x: x.__setitem__(torch.tensor([2, 2]), torch.tensor([1.0, 2.0])),
        lambda x: x.scatter_(0, torch.tensor([2, 0, 2]), torch.ones(3)),
    ],
)
def test_a_place_that_is_written_twice_is_seen(write):
    with NoDuplicateIndices(), pytest.raises(AssertionError, match="writes twice"):
        write(torch.zeros(3))
