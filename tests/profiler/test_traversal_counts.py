"""What `traversal` accepts and what verification costs, measured on the draws of `sequoia`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from enumeration import CASES, Case, without_replacement
from toys import PROMPTS, ToyModel, toy_pair
from toys import SMALL_TREES as TREES

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.profiler.acceptance import measure_acceptance
from sequoia_plan.profiler.latency import LatencyMeter
from sequoia_plan.profiler.methods import path_probs
from sequoia_plan.profiler.observed import TREE, max_children_by_level
from sequoia_plan.profiler.verification import ShapeTimer, bushy, walks_down
from sequoia_plan.runtime import Sampling
from sequoia_plan.runtime.captured_step import CapturedStep
from sequoia_plan.runtime.verify import VERIFIERS, traversal
from sequoia_plan.runtime.verify.fused_verifier import FusedVerifier

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
]
BOTH = [Sampling(1.0, verifier="traversal"), Sampling(1.0, verifier="sequoia")]


@pytest.fixture
def pair():
    """Toy models that also have embeddings, which the prompt's tokens are drawn from."""
    pair = toy_pair(noise=1.5)
    pair.target.get_input_embeddings = lambda: torch.nn.Embedding(8, 2)
    return pair


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tree", TREES)
def test_the_way_through_each_node_is_known_before_what_is_below_it_is_drawn(tree, case):
    """On average over all draws, it is the probability that the path ends in the node's subtree.

    The control: the product of the acceptance along the path is not.
    """
    setting = Case(TREES[tree], seed=1, **CASES[case])
    size, index = setting.tree.size, setting.index
    found, control, expected = np.zeros(size), np.zeros(size), np.zeros(size)
    d2t = setting.d2t_tensor()
    for drawn, tokens, chance in setting.assignments(without_replacement):
        p, q, children = setting.verifier_inputs(drawn, tokens)
        inputs = (p.__getitem__, q, children, index, d2t)
        end_probs = VERIFIERS["traversal"].acceptance(*inputs).end_probs.numpy()
        expected += chance * end_probs @ setting.tree.attention_mask
        residual = traversal.residual_after_children(*inputs)
        subtree_probs = traversal.subtree_probs(residual, index)
        found += chance * path_probs(subtree_probs, index).numpy()
        control += chance * subtree_probs[index.paths].prod(-1).numpy()
    assert found == pytest.approx(expected, abs=1e-12)
    if case == "random":
        assert np.abs(control - expected).max() > 1e-3 or (tree == "chain" and size == 2)


def test_both_are_measured_on_the_same_draws():
    """Counts differ by the acceptance ratio alone: not at all at the root, where the verifiers
    are the same, and more below it."""
    traversal_acceptance, plain = measure_acceptance(
        toy_pair(noise=1.5), PROMPTS, BOTH, precision=0, rounds=2, tokens_per_prompt=40
    )
    assert np.array_equal(traversal_acceptance.trials, plain.trials)
    ratio = traversal_acceptance.counts.sum(0)[:, 0] / plain.counts.sum(0)[:, 0]
    assert ratio[0] == pytest.approx(1) and min(ratio) > 0.999 and ratio[2] > 1.005
    assert tuple(max_children_by_level(TREE)) == (3, 2, 2, 1)
    assert np.allclose(traversal_acceptance.counts[:, 0], plain.counts[:, 0], atol=1e-12)
    alone = measure_acceptance(
        toy_pair(noise=1.5), PROMPTS, BOTH[:1], precision=0, rounds=2, tokens_per_prompt=40
    )[0]
    # measuring the other verifier along with it changes nothing
    assert np.array_equal(alone.counts, traversal_acceptance.counts)
    warmer = [replace(each, draft_temperature=2.0) for each in BOTH]
    observed = measure_acceptance(
        toy_pair(), PROMPTS[:3], warmer, precision=0, tokens_per_prompt=20
    )
    assert len({each.trials.tobytes() for each in observed}) == 1


@pytest.mark.parametrize("covered", [None, [0, 2, 3, 5, 6]])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.6, verifier="sequoia")], ids=repr)
def test_a_walk_that_is_timed_goes_where_it_should(pair, sampling, covered):
    """Triton's interpreter runs the kernels: a chain is walked down to its end.

    In any other tree the walk ends at the root, whatever was written before.
    """
    pytest.importorskip("triton", exc_type=ImportError)
    draft = ToyModel(1, base=pair.target, noise=0.7, covered=covered)
    for tree in (TokenTree.chain(1), TokenTree.chain(4), TokenTree.star(3), bushy(8, 2)):
        step = CapturedStep.of(pair.target, draft, tree)
        step.prefill(torch.arange(6), tree.depth, seed=0)
        d2t = step.drafter and step.drafter.d2t
        step.verifier.fused = FusedVerifier(tree, "cpu", d2t, 8, block=2)
        timer = ShapeTimer(step, [sampling])
        assert walks_down(step, sampling)
        num_visited = tree.depth if tree.branching == 1 else 1
        for _ in range(2):
            step.sequence.tokens[6:] = 1
            timer.prepare(sampling)
            visited = int(timer.run(sampling)[0])
            timer.restore()
            assert (visited, int(step.sequence.length)) == (num_visited, 5)


def test_verification_of_both_is_timed_on_the_same_draws(pair, monkeypatch):
    monkeypatch.setattr("sequoia_plan.profiler.latency.SIZES", (1, 2, 4))
    meter = LatencyMeter(pair, BOTH[0], 20, further_samplings=BOTH)
    meter.begin(1e9)
    meter.finish(0.0)
    num_shapes = len(meter.shape_timers)
    assert meter.samplings == BOTH
    assert np.array(meter.shape_samples).shape == (meter.rounds, 2, num_shapes)
    for timer in meter.shape_timers:
        (logits, drafted), other = (timer.inputs[sampling] for sampling in BOTH)
        assert logits is other[0] and drafted is other[1]
