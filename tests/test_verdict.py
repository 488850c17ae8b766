"""From a verdict to a decision: draws, greedy choice, precision, and a fixed sequence of operations."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from toys import SMALL_TREES as TREES

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.runtime.drawing import draw
from sequoia_plan.runtime.verify import VERIFIERS, TreeIndex, decide, greedy, verify


def random_case(tree, vocabulary, generator, dtype=torch.float64):
    """(target, draft, distinct drawn tokens, index) without any meaning."""
    index = TreeIndex.of(tree)
    inner = int((index.child_count > 0).sum())
    p, q = (torch.rand(rows, vocabulary, generator=generator, dtype=dtype) ** 4 for rows in (tree.size, inner))
    drawn = torch.rand(inner, vocabulary, generator=generator).argsort(-1)[:, : tree.branching]
    return (p / p.sum(-1, keepdim=True)).__getitem__, q / q.sum(-1, keepdim=True), drawn, index


@pytest.mark.parametrize("name", VERIFIERS)
def test_uniforms_pick_paths_as_often_as_the_verdict_says(name):
    tree = TREES["lopsided"]
    case = random_case(tree, 5, torch.Generator().manual_seed(3))
    verdict, n = VERIFIERS[name].judge(*case, None), 4000
    ends = Counter()
    for i in range(n):
        result = decide(verdict, case[0], case[3], torch.tensor([(i + 0.5) / n, 0.5], dtype=torch.float64))
        path = result.path.tolist()
        assert all(tree.parents[child] == parent for parent, child in itertools.pairwise(path[: int(result.count)]))
        assert set(path[int(result.count) :]) <= {0}
        ends[path[int(result.count) - 1]] += 1
    for node in range(tree.size):
        assert ends[node] / n == pytest.approx(float(verdict.ends[node]), abs=1.5 / n)


def test_a_tree_of_one_node_is_the_targets_law():
    p = torch.tensor([[0.0, 0.25, 0.75]])
    empty, index = torch.empty(0), TreeIndex.of(TokenTree.chain(1))
    results = [verify(VERIFIERS["sequoia"], p.__getitem__, empty, empty, index, torch.tensor([0.5, u], dtype=torch.float64)) for u in (0.2, 0.3)]
    assert [(r.path.tolist(), r.count.tolist(), r.bonus.tolist()) for r in results] == [([0], [1], [1]), ([0], [1], [2])]


def test_greedy_is_every_verifier_with_certain_laws():
    """At temperature 0 the cheap path takes the same nodes and bonus token as verification of one-hot laws."""
    generator = torch.Generator().manual_seed(0)
    for tree in [*TREES.values(), TokenTree.from_parents([-1, 0, 0, 0, 1, 1, 2, 3, 4])]:
        for name in ("sequoia", "traversal", "topk"):
            for _ in range(50):
                _, _, drawn, index = random_case(tree, 5, generator)
                tokens = torch.zeros(tree.size, dtype=torch.long)
                inner = np.flatnonzero(tree.child_count)
                for node in range(1, tree.size):
                    tokens[node] = drawn[int(np.flatnonzero(inner == tree.parents[node])[0]), tree.ranks[node] - 1]
                choices = torch.randint(5, (tree.size,), generator=generator)
                cheap = greedy(choices, tokens, index)
                one_hot = torch.nn.functional.one_hot
                uniforms = torch.rand(2, dtype=torch.float64, generator=generator)
                full = verify(VERIFIERS[name], one_hot(choices, 5).double().__getitem__, one_hot(drawn[:, 0], 5).double(), drawn, index, uniforms)
                assert cheap.path.tolist() == full.path.tolist()
                assert (cheap.count, cheap.bonus) == (full.count, full.bonus)


@pytest.mark.parametrize("name", VERIFIERS)
def test_float32_is_the_same_to_rounding_and_never_nan(name):
    """Among them: laws so far apart that what is left underflows, equal laws, and children the target rules out."""
    generator = torch.Generator().manual_seed(1)
    tree = TokenTree.from_parents([-1, 0, 0, 0, 1, 1, 2, 4, 7])
    for power in (1, 30, 300):
        target, draft, _, index = random_case(tree, 50, generator)
        p, q = (torch.softmax(law.log() * power, -1) for law in (target(torch.arange(tree.size)), draft))
        drawn = VERIFIERS[name].drawing(q.float(), tree.branching, generator)
        for target_law in (p, q[torch.zeros(tree.size, dtype=torch.long)]):
            exact = VERIFIERS[name].judge(target_law.__getitem__, q, drawn, index, None).ends
            rounded = VERIFIERS[name].judge(target_law.float().__getitem__, q.float(), drawn, index, None)
            assert rounded.left(torch.arange(index.together.nodes.numel())).isfinite().all()
            assert float(rounded.ends.sum()) == pytest.approx(1, abs=1e-5)
            if power == 1:  # where rho is ill-conditioned spectr finds another, as exact
                torch.testing.assert_close(rounded.ends, exact, atol=1e-2 if name == "spectr" else 1e-5, rtol=0)


@pytest.mark.parametrize("name", VERIFIERS)
@pytest.mark.parametrize("covered", [None, torch.tensor([1, 3, 4, 7, 8])])
def test_traces_whole(name, covered):
    """The whole decision is one graph: nothing branches on a tensor's value."""
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(2)
    p = torch.rand(6, 9, generator=generator)
    _, q, drawn, index = random_case(TREES["lopsided"], 9 if covered is None else 5, generator, torch.float32)

    def step(p, q, drawn, uniforms, covered):
        return verify(VERIFIERS[name], lambda nodes: p[nodes], q, drawn, index, uniforms, covered)

    compiled = torch.compile(step, fullgraph=True, backend="eager")
    for _ in range(5):
        uniforms = torch.rand(2, dtype=torch.float64, generator=generator)
        traced, eager = (run(p, q, drawn, uniforms, covered) for run in (compiled, step))
        assert (traced.path.tolist(), traced.count, traced.bonus) == (eager.path.tolist(), eager.count, eager.bonus)


def test_draw_inverts_the_law():
    law = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0])
    uniforms = torch.tensor([0.0, 0.2499, 0.25, 0.999999, 1.0], dtype=torch.float64)
    assert draw(law, uniforms).tolist() == [1, 1, 3, 3, 3]
    assert draw(law.repeat(2, 1), uniforms.repeat(2, 1)).tolist() == [[1, 1, 3, 3, 3]] * 2
