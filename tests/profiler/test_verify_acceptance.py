"""From acceptance to a path: draws, greedy choice, precision."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from toys import SMALL_TREES as TREES

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.runtime.sampling.drawing import DRAWING_OF_VERIFIER, draw_tokens
from sequoia_plan.runtime.verify import VERIFIERS, DrawnTree, TreeIndex, greedy, sample_path, verify

pytestmark = pytest.mark.slow


def random_case(tree, vocabulary, generator):
    """(target_probs, draft_probs, distinct drawn tokens, index), independent of each other."""
    index = TreeIndex.of(tree)
    inner = int((index.child_count > 0).sum())
    p, q = (
        torch.rand(rows, vocabulary, generator=generator, dtype=torch.float64) ** 4
        for rows in (tree.size, inner)
    )
    drawn = torch.rand(inner, vocabulary, generator=generator).argsort(-1)[:, : tree.branching]
    target_probs = (p / p.sum(-1, keepdim=True)).__getitem__
    return DrawnTree(target_probs, q / q.sum(-1, keepdim=True), drawn, index)


@pytest.mark.parametrize("name", VERIFIERS)
def test_uniforms_sample_paths_as_often_as_the_acceptance_says(name):
    tree = TREES["lopsided"]
    case = random_case(tree, 5, torch.Generator().manual_seed(3))
    acceptance, n = VERIFIERS[name](case), 4000
    ends = Counter()
    for i in range(n):
        uniforms = torch.tensor([(i + 0.5) / n, 0.5], dtype=torch.float64)
        result = sample_path(acceptance, case, uniforms)
        path, count = result.path.tolist(), int(result.count)
        pairs = itertools.pairwise(path[:count])
        assert all(tree.parents[child] == parent for parent, child in pairs)
        assert set(path[count:]) <= {0}
        ends[path[count - 1]] += 1
    for node in range(tree.size):
        end_prob = float(acceptance.end_probs[node])
        assert ends[node] / n == pytest.approx(end_prob, abs=1.5 / n)


def test_greedy_is_every_verifier_with_one_hot_probabilities():
    """`greedy` takes the same nodes and bonus token as verification of one-hot probabilities."""
    generator = torch.Generator().manual_seed(0)
    one_hot = torch.nn.functional.one_hot
    for tree in [*TREES.values(), TokenTree.from_parents([-1, 0, 0, 0, 1, 1, 2, 3, 4])]:
        inner = np.flatnonzero(tree.child_count)
        for name in ("sequoia", "traversal", "topk"):
            for _ in range(50):
                case = random_case(tree, 5, generator)
                drawn, index = case.drawn, case.index
                tokens = torch.zeros(tree.size, dtype=torch.long)
                for node in range(1, tree.size):
                    row = int(np.flatnonzero(inner == tree.parents[node])[0])
                    tokens[node] = drawn[row, tree.ranks[node] - 1]
                choices = torch.randint(5, (tree.size,), generator=generator)
                greedy_path = greedy(choices, tokens, index)
                uniforms = torch.rand(2, dtype=torch.float64, generator=generator)
                certain = DrawnTree(
                    one_hot(choices, 5).double().__getitem__,
                    one_hot(drawn[:, 0], 5).double(),
                    drawn,
                    index,
                )
                verified = verify(VERIFIERS[name], certain, uniforms)
                assert greedy_path.path.tolist() == verified.path.tolist()
                assert (greedy_path.count, greedy_path.bonus) == (verified.count, verified.bonus)


@pytest.mark.parametrize("name", VERIFIERS)
def test_float32_is_the_same_to_rounding_and_never_nan(name):
    """Also where the residual underflows, probabilities are equal, or a child is impossible."""
    generator = torch.Generator().manual_seed(1)
    tree = TokenTree.from_parents([-1, 0, 0, 0, 1, 1, 2, 4, 7])
    accept = VERIFIERS[name]
    for power in (1, 30, 300):
        case = random_case(tree, 50, generator)
        p = torch.softmax(case.target_probs(torch.arange(tree.size)).log() * power, -1)
        q = torch.softmax(case.draft_probs.log() * power, -1)
        drawn = DRAWING_OF_VERIFIER[name](q.float(), tree.branching, generator)
        for probs in (p, q[torch.zeros(tree.size, dtype=torch.long)]):
            exact = accept(DrawnTree(probs.__getitem__, q, drawn, case.index)).end_probs
            rounded = accept(DrawnTree(probs.float().__getitem__, q.float(), drawn, case.index))
            places = torch.arange(case.index.together.nodes.numel())
            assert rounded.residual_probs(places).isfinite().all()
            assert float(rounded.end_probs.sum()) == pytest.approx(1, abs=1e-5)
            if power == 1:  # where rho is ill-conditioned spectr finds another, as exact
                atol = 1e-2 if name == "spectr" else 1e-5
                torch.testing.assert_close(rounded.end_probs, exact, atol=atol, rtol=0)


def test_draw_tokens_inverts_the_cumulative_probabilities():
    probs = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0])
    uniforms = torch.tensor([0.0, 0.2499, 0.25, 0.999999, 1.0], dtype=torch.float64)
    assert draw_tokens(probs, uniforms).tolist() == [1, 1, 3, 3, 3]
    assert draw_tokens(probs.repeat(2, 1), uniforms.repeat(2, 1)).tolist() == [[1, 1, 3, 3, 3]] * 2
