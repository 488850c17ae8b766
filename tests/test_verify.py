"""Sequoia verification by exact enumeration: over every draw of children and every outcome, the output law is the target's."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.runtime import verify
from sequoia_plan.runtime.sampling import draw
from sequoia_plan.runtime.verify import TreeIndex, greedy, judge, residual_law, sequoia

TREES = {
    "chain": TokenTree.chain(3),
    "star": TokenTree.star(3),
    "binary": TokenTree.from_parents([-1, 0, 0, 1, 1]),
    "lopsided": TokenTree.from_parents([-1, 0, 0, 2, 2, 3]),
    "root": TokenTree.chain(1),
}


def laws(generator, contexts, vocabulary, zeros):
    """A random law for every context; `zeros` of its entries are 0."""
    found = {}
    for context in contexts:
        p = generator.dirichlet(np.full(vocabulary, 0.7))
        p[generator.permutation(vocabulary)[:zeros]] = 0
        found[context] = p / p.sum()
    return found


def draws(q, count):
    """Every ordered draw of `count` tokens without replacement, with its probability; uniform once q is exhausted."""
    for order in itertools.permutations(range(len(q)), count):
        probability, left = 1.0, q.copy()
        free = np.ones(len(q), bool)
        for token in order:
            law = left / left.sum() if left.sum() > 0 else free / free.sum()
            probability *= law[token]
            left[token], free[token] = 0, False
        if probability > 0:
            yield order, probability


def assignments(tree, draft, covered, node=0, tokens=None):
    """Every way to draw the whole tree: (drawn indices by inner node, tokens by node, probability)."""
    tokens = tokens or {0: 0}
    inner = [int(n) for n in np.flatnonzero(tree.child_count)]
    if node == len(inner):
        yield {}, dict(tokens), 1.0
        return
    parent = inner[node]
    context = tuple(tokens[n] for n in np.flatnonzero(tree.attention_mask[parent]))
    for order, probability in draws(draft[context], int(tree.child_count[parent])):
        for rank, index in enumerate(order):
            tokens[int(tree.first_child[parent]) + rank] = covered[index]
        for drawn, whole, rest in assignments(tree, draft, covered, node + 1, tokens):
            yield {parent: order} | drawn, whole, probability * rest


def output_law(tree, target, draft, covered, vocabulary, length, judge=judge):
    """The law of the first `length` tokens: verified tokens, the bonus token, then the target's own law."""
    index = TreeIndex.of(tree)
    law = np.zeros([vocabulary] * length)
    inner = [int(n) for n in index.inner]
    reduced = None if len(covered) == vocabulary else torch.tensor(covered)

    def emit(tokens, probability):
        if probability == 0:
            return
        if len(tokens) >= length:
            law[tuple(tokens[:length])] += probability
            return
        for token, p in enumerate(target[(0, *tokens)]):
            emit([*tokens, token], probability * p)

    for drawn, tokens, chance in assignments(tree, draft, covered):
        contexts = [tuple(tokens[n] for n in np.flatnonzero(tree.attention_mask[node])) for node in range(tree.size)]
        p = torch.tensor(np.array([target[c] for c in contexts]))
        if not inner:
            emit([], chance)
            continue
        q = torch.tensor(np.array([draft[contexts[n]] for n in inner]))
        picks = torch.zeros(len(inner), tree.branching, dtype=torch.long)
        for row, node in enumerate(inner):
            picks[row, : len(drawn[node])] = torch.tensor(drawn[node])
        accept, inside, outside = judge(p, q, picks, index, reduced)

        def walk(node, probability, tokens=tokens, p=p, accept=accept, inside=inside, outside=outside):
            for rank in range(int(tree.child_count[node])):
                a = float(accept[index.inner_row[node], rank])
                if a > 0:
                    walk(int(tree.first_child[node]) + rank, probability * a)
                probability *= 1 - a
            if probability > 1e-18:
                bonus = residual_law(p, inside, outside, torch.tensor([node]), index, reduced)
                path = [tokens[n] for n in np.flatnonzero(tree.attention_mask[node])][1:]
                for token, b in enumerate(bonus.tolist()):
                    emit([*path, token], probability * b)

        walk(0, chance)
    return law


def target_law(target, vocabulary, length):
    law = np.zeros([vocabulary] * length)
    for tokens in itertools.product(range(vocabulary), repeat=length):
        law[tokens] = np.prod([target[(0, *tokens[:i])][token] for i, token in enumerate(tokens)])
    return law


def setting(tree, vocabulary, covered, zeros, seed):
    generator = np.random.default_rng(seed)
    contexts = [(0, *tokens) for length in range(tree.depth + 1) for tokens in itertools.product(range(vocabulary), repeat=length)]
    return laws(generator, contexts, vocabulary, zeros[0]), laws(generator, contexts, len(covered), zeros[1])


CASES = [
    pytest.param(3, [0, 1, 2], (0, 0), id="all"),
    pytest.param(3, [0, 1, 2], (1, 1), id="zeros"),
    pytest.param(4, [0, 2, 3], (0, 0), id="reduced"),
    pytest.param(4, [1, 2, 3], (1, 2), id="reduced-zeros"),
]


@pytest.mark.parametrize(("vocabulary", "covered", "zeros"), CASES)
@pytest.mark.parametrize("name", TREES)
def test_output_law_is_the_targets(name, vocabulary, covered, zeros):
    tree = TREES[name]
    for seed in range(3):
        target, draft = setting(tree, vocabulary, covered, zeros, seed)
        found = output_law(tree, target, draft, covered, vocabulary, tree.depth)
        assert np.abs(found - target_law(target, vocabulary, tree.depth)).max() < 1e-12


def no_residual(target, draft, drawn, index, covered=None):
    """Negative control: rejections leave the target's law as it was."""
    accept, _inside, outside = judge(target, draft, drawn, index, covered)
    laws = target[index.inner]
    return accept, laws if covered is None else laws[:, covered], torch.ones_like(outside)


def no_removal(target, draft, drawn, index, covered=None):
    """Negative control: the second child is judged as if it had been drawn with replacement (SpecInfer's rule)."""
    accept, inside, outside = judge(target, draft, drawn, index, covered)
    once = TreeIndex(index.size, index.depth, index.inner, index.inner_row, index.first_child, index.child_count, index.holders[:1])
    _, r, _ = judge(target, draft, drawn, once, covered)
    for rows in index.holders[1:2]:
        child = drawn[rows, 1][:, None]
        accept[rows, 1] = (r[rows].gather(1, child) / draft[rows].gather(1, child)).clamp(max=1)[:, 0]
    return accept, inside, outside


@pytest.mark.parametrize("broken", [no_residual, no_removal])
@pytest.mark.parametrize("covered", [[0, 1, 2], [0, 1]])
def test_broken_twins_fail(broken, covered):
    tree = TREES["binary"]
    target, draft = setting(tree, 3, covered, (0, 0), 0)
    found = output_law(tree, target, draft, covered, 3, tree.depth, judge=broken)
    assert np.abs(found - target_law(target, 3, tree.depth)).max() > 1e-3


def test_a_certain_draft_is_always_accepted_and_one_child_is_optimal_transport():
    """The paper's two properties: with one child acceptance is 1 - TV(p, q); a draft support that covers p is never rejected."""
    p, q = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64), torch.tensor([[0.2, 0.3, 0.5]], dtype=torch.float64)
    one = TreeIndex.of(TokenTree.chain(2))
    rate = sum(float(q[0, s]) * float(judge(p.repeat(2, 1), q, torch.tensor([[s]]), one)[0][0, 0]) for s in range(3))
    assert rate == pytest.approx(1 - 0.5 * float((p - q).abs().sum()))
    covering, three = torch.tensor([[0.0, 0.9, 0.1, 0.0]], dtype=torch.float64), TreeIndex.of(TokenTree.star(2))
    p = torch.tensor([[0.0, 0.2, 0.8, 0.0]] * 3, dtype=torch.float64)
    for order in ([1, 2], [2, 1]):
        accept = judge(p, covering, torch.tensor([order]), three)[0][0]
        assert 1 - (1 - accept[0]) * (1 - accept[1]) == pytest.approx(1)


def test_greedy_is_sequoia_with_certain_laws():
    """At temperature 0 the cheap path takes the same nodes and bonus token as verification of one-hot laws."""
    generator = torch.Generator().manual_seed(0)
    for tree in [*TREES.values(), TokenTree.from_parents([-1, 0, 0, 0, 1, 1, 2, 3, 4])]:
        index = TreeIndex.of(tree)
        for _ in range(200):
            orders = torch.stack([torch.randperm(5, generator=generator) for _ in range(tree.size)])
            tokens = torch.zeros(tree.size, dtype=torch.long)
            for node in range(1, tree.size):
                tokens[node] = orders[tree.parents[node], tree.ranks[node] - 1]
            choices = torch.randint(5, (tree.size,), generator=generator)
            cheap = greedy(choices, tokens, index)
            inner = index.inner
            one_hot = torch.nn.functional.one_hot
            full = sequoia(
                one_hot(choices, 5).double(),
                one_hot(orders[inner, 0], 5).double(),
                orders[inner, : tree.branching],
                index,
                torch.rand(inner.numel() * tree.branching + 1, dtype=torch.float64, generator=generator),
            )
            assert cheap.path.tolist() == full.path.tolist()
            assert (cheap.count, cheap.bonus) == (full.count, full.bonus)


def test_draw_inverts_the_law():
    law = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0])
    assert [int(draw(law, torch.tensor(u, dtype=torch.float64))) for u in (0.0, 0.2499, 0.25, 0.999999, 1.0)] == [1, 1, 3, 3, 3]


def test_accepts_without_reading_values_on_the_host():
    """The whole judgement traces as one graph: nothing branches on a tensor's value."""
    index = TreeIndex.of(TREES["lopsided"])
    arguments = (torch.rand(6, 9), torch.rand(3, 5), torch.tensor([[0, 1], [2, 3], [4, 0]]), index, torch.rand(7), torch.arange(5))
    explained = torch._dynamo.explain(verify.sequoia)(*arguments)
    assert explained.graph_break_count == 0
