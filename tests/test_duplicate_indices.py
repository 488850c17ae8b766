"""No decoding path writes to one place twice, which is undefined on CUDA."""

from __future__ import annotations

import itertools

import pytest
import torch
from architectures import resembling, tiny
from duplicate_indices import NoDuplicateIndices
from simulated import simulate_capture
from toys import ToyModel

from drafts import PARTS, load, small_target, write
from sequoia_plan.artifacts import TokenTree
from sequoia_plan.runtime import Sampling, SequoiaDecoder
from sequoia_plan.runtime.base.drawing import DRAWING_OF_VERIFIER
from sequoia_plan.runtime.models import forward

TREE = TokenTree.from_parents([-1, 0, 0, 1, 1, 2, 3])
TREES = [TREE, TokenTree.chain(5), TokenTree.star(4), TokenTree.chain(1)]
PROMPTS = [[3], [3, 1], [3, 1, 4, 1, 5]]
SETTINGS = [Sampling(), *(Sampling(0.9, 0.8, 5, verifier=name) for name in DRAWING_OF_VERIFIER)]
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


def toys(folder):
    target = ToyModel(0)
    return target, ToyModel(1, base=target, noise=0.5)


def toys_with_part_of_the_vocabulary(folder):
    target = ToyModel(0)
    return target, ToyModel(1, base=target, noise=0.5, covered=[0, 2, 3, 5, 7])


def transformers_models(name):
    def models(folder):
        target = tiny(name)
        return target, resembling(target)

    return models


def models_with_hidden_states(algorithm):
    def models(folder):
        target = small_target()
        return target, load(write(folder / "draft", *PARTS[algorithm](target)), target)

    return models


PAIRS = {
    "toys": toys,
    "part of the vocabulary": toys_with_part_of_the_vocabulary,
    **{name: transformers_models(name) for name in ("Llama", "Qwen2, some layers windowed")},
    **{algorithm: models_with_hidden_states(algorithm) for algorithm in PARTS},
}


@pytest.mark.parametrize("pair", PAIRS)
def test_no_decoding_path_writes_to_one_place_twice(pair, tmp_path):
    """Every verifier and kind of tree, short prompts, in passes as the CPU or CUDA runs them."""
    target, draft = PAIRS[pair](tmp_path)
    decoders = [SequoiaDecoder(target, draft, tree) for tree in TREES]
    with NoDuplicateIndices() as mode:
        for decoder, prompt in itertools.product(decoders, PROMPTS):
            decoder.generate(prompt, 8, sampling=Sampling(0.9), seed=0)
        for sampling, is_padded in itertools.product(SETTINGS, (False, True)):
            step = decoders[0].step
            if is_padded:
                step.target.prefill_multiples = forward.PREFILL_MULTIPLES["cuda"]
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


def test_other_writes_are_no_conflict():
    x = torch.zeros(3, 3)
    with NoDuplicateIndices() as mode:
        x[torch.tensor([0, 1]), torch.tensor([1, 1])] = torch.tensor([1.0, 2.0])
        x[torch.tensor([0, 0])] = 1.0
        x[x > 2] = torch.tensor([5.0])
        x.index_put_((torch.tensor([0, 0]),), torch.ones(2, 3), accumulate=True)
        x.scatter_(1, torch.tensor([[0, 1], [1, 0]]), torch.ones(2, 2))
    assert mode.writes in (3, 4)  # torch 2.15 writes a single value by another operation
