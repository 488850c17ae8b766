"""What `traversal` accepts in a tree, beside `sequoia` on the same draws."""

import numpy as np
import pytest
import torch
from enumeration import CASES, Case, without_replacement
from toys import SMALL_TREES as TREES

from drafts import small_target
from sequoia_plan.models.backends import loaded
from sequoia_plan.profiler.forced import ForcedAcceptance
from sequoia_plan.profiler.traversal_paths import path_probs
from sequoia_plan.runtime import Pair, Sampling
from sequoia_plan.runtime.captured_step import CapturedStep
from sequoia_plan.runtime.verify import VERIFIERS, traversal

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tree", TREES)
def test_the_way_through_each_node_is_known_before_what_is_below_it_is_drawn(tree, case):
    """On average over all draws, it is the probability that the path ends in the node's subtree.

    The control: the product of the acceptance along the path is not.
    """
    setting = Case(TREES[tree], seed=1, **CASES[case])
    size, index = setting.tree.size, setting.index
    probs, control, expected = np.zeros((3, size))
    for drawn, tokens, chance in setting.assignments(without_replacement):
        drawn_tree = setting.drawn_tree(drawn, tokens)
        end_probs = VERIFIERS["traversal"](drawn_tree).end_probs.numpy()
        expected += chance * end_probs @ setting.tree.attention_mask
        residual = traversal.residual_after_children(drawn_tree)
        subtree_probs = traversal.subtree_probs(residual, index)
        probs += chance * path_probs(subtree_probs, index).numpy()
        control += chance * subtree_probs[index.paths].prod(-1).numpy()
    assert probs == pytest.approx(expected, abs=1e-12)
    if case == "random":
        assert np.abs(control - expected).max() > 1e-3 or (tree == "chain" and size == 2)


def test_paths_are_counted_where_steps_are_compiled(monkeypatch):
    """A compiled step asks no verifier: an observed one runs by parts, else nothing is counted."""
    models = (loaded(small_target(seed, hidden=32, head_dim=32)) for seed in (0, 5))
    pair, counts = Pair(*models, None), []
    for _ in range(2):
        measure = ForcedAcceptance(pair, 2, records_paths=True)
        tally = measure(torch.arange(9), Sampling(1.0, verifier="traversal"), 24, 0)
        counts.append(np.array(tally["reached"]))
        monkeypatch.setattr(CapturedStep, "runs_by_parts", False)  # the control
    sequoia, traversal_ = counts[0]
    assert sequoia[0] == traversal_[0] > 1 and (np.diff(counts[0]) <= 0).all()
    assert not counts[1].any()
