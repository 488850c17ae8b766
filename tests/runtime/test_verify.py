"""Verification by exact enumeration: every verifier's output has the target's distribution.

Every draw of a whole tree and every outcome are enumerated.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from enumeration import CASES, Case, independent, most_probable, without_replacement
from toys import SMALL_TREES as TREES

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.runtime.sampling.drawing import DRAWING_OF_VERIFIER
from sequoia_plan.runtime.verify import VERIFIERS, Acceptance, DrawnTree, TreeIndex, spectr
from sequoia_plan.runtime.verify.accepted_path import exclusive_cumprod

DRAWS = {
    "sequoia": without_replacement,
    "traversal": without_replacement,
    "specinfer": independent,
    "spectr": independent,
    "topk": most_probable,
}


def test_every_verifier_declares_the_drawing_it_is_tested_with():
    declared = {name: DRAWING_OF_VERIFIER[name].draw.__name__ for name in VERIFIERS}
    assert declared == {name: draws.__name__ for name, draws in DRAWS.items()}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", VERIFIERS)
def test_output_has_the_targets_distribution(name, tree, case):
    for seed in range(2):
        setting = Case(TREES[tree], seed=seed, **CASES[case])
        assert setting.error(VERIFIERS[name], DRAWS[name]) < 1e-12


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tree", TREES)
def test_traversal_is_never_worse_than_sequoia(tree, case):
    gains = []
    for seed in range(4):
        setting = Case(TREES[tree], seed=seed, **CASES[case])
        sequoia, traversal = (
            setting.output(VERIFIERS[name], without_replacement)[1]
            for name in ("sequoia", "traversal")
        )
        gains.append(traversal - sequoia)
    assert min(gains) > -1e-12
    if tree == "star":  # at the root the two rules are the same
        assert max(gains) < 1e-12
    elif case == "random":
        assert max(gains) > 1e-3


def without_residual(rule):
    """Negative control: rejections do not change the target's probabilities."""

    def broken(tree):
        acceptance = rule(tree)
        probs = tree.covered(tree.target_probs(acceptance.order.nodes))
        return replace(acceptance, residual_probs=probs.__getitem__)

    return broken


def traversal_by_definition(update, tree):
    """Traversal verification node by node, as its paper writes it.

    Args:
        update: gives a after a rejection from S, a before it, and the draft mass not drawn yet.
    """
    index, drawn, d2t = tree.index, tree.drawn, tree.d2t
    order, child_of = index.by_level, dict[tuple[int, int], int]()
    for child, parent in enumerate(index.parents.tolist(), 1):
        child_of[parent, sum(p == parent for p, _ in child_of)] = child
    accept_probs, residual = tree.draft_probs.new_ones(index.size), {}
    for place, node in enumerate(order.nodes.tolist()):  # parents come first
        row = order.draft_rows[place]
        probs = tree.target_probs(torch.tensor([node]))[0]
        a, r = accept_probs[node], probs if d2t is None else probs[d2t]
        uncovered_mass, q = probs.sum() - r.sum(), tree.draft_probs[row].clone()
        # mass: of the target's probabilities that remain, in their own units
        undrawn_mass, mass = torch.ones(()), 1.0
        for rank in range(int(index.child_count[node])):
            token = drawn[row, rank]
            is_undrawn = torch.ones_like(q).index_fill(0, drawn[row, :rank], 0.0)
            d = q / q.sum() if q.sum() > 0 else is_undrawn / is_undrawn.sum()
            accept_prob = (a * r[token] / d[token]).clamp(max=1) if d[token] > 0 else 0.0
            accept_probs[child_of[node, rank]] = accept_prob
            r = (a * r - d).clamp(min=0)
            s = r.sum() + a * uncovered_mass
            r = r / s.clamp(min=1e-300)
            uncovered_mass = a * uncovered_mass / s.clamp(min=1e-300)
            undrawn_mass = undrawn_mass - tree.draft_probs[row, token]
            mass = mass * s / a.clamp(min=1e-300)
            a = update(s, a, undrawn_mass)
            q[token] = 0
        accept_probs[node], residual[place] = a, r * mass
    ordered = accept_probs.double()[index.post_order]
    ordered_end_probs = ordered * exclusive_cumprod(1 - ordered)
    end_probs = torch.zeros_like(ordered).index_copy(0, index.post_order, ordered_end_probs)
    return Acceptance(
        end_probs, lambda places: torch.stack([residual[int(place)] for place in places]), order
    )


def update_as_published(s, a, undrawn_mass):
    return s / (s + 1 - a).clamp(min=1e-300)


def update_from_public_code(s, a, undrawn_mass):
    """Negative control: min(1, S / draft mass not drawn yet), a rule seen in public code."""
    return (s / undrawn_mass.clamp(min=1e-300)).clamp(max=1)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tree", TREES)
def test_traversal_is_its_definition(tree, case):
    """Without any shortcut, the output distribution and the expected tokens are the same."""
    setting = Case(TREES[tree], **CASES[case])
    definition = partial(traversal_by_definition, update_as_published)
    probs, tokens = setting.output(VERIFIERS["traversal"], without_replacement)
    expected_probs, expected_tokens = setting.output(definition, without_replacement)
    assert np.abs(probs - expected_probs).max() < 1e-12
    assert tokens == pytest.approx(expected_tokens, abs=1e-12)


def traversal_from_the_last_child(tree):
    """Negative control: siblings are visited against the draw order."""
    reversed_index = replace(tree.index, post_order=torch.arange(tree.index.size).flip(0))
    return VERIFIERS["traversal"](replace(tree, index=reversed_index))


BROKEN = {
    **{
        f"{name} without residual": (without_residual(rule), DRAWS[name])
        for name, rule in VERIFIERS.items()
    },
    "sequoia that keeps what was drawn": (VERIFIERS["specinfer"], without_replacement),
    "specinfer that removes what was drawn": (VERIFIERS["sequoia"], independent),
    "spectr on draws without replacement": (spectr.acceptance, without_replacement),
    "traversal on independent draws": (VERIFIERS["traversal"], independent),
    "traversal with another start": (
        partial(traversal_by_definition, update_from_public_code),
        without_replacement,
    ),
    "traversal from the last child": (traversal_from_the_last_child, without_replacement),
    "topk on independent draws": (VERIFIERS["topk"], independent),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("d2t", [[0, 1, 2], [0, 1]])
def test_broken_verifiers_fail(name, d2t):
    assert Case(TREES["binary"], 3, d2t).error(*BROKEN[name]) > 1e-3


def accepted_probability(name, p, q, children):
    """The probability that one of `children` drawn from q is accepted by a target with p."""
    index = TreeIndex.of(TokenTree.star(children))
    p = torch.tensor([p] * index.size, dtype=torch.float64)
    probability = 0
    for order, chance in DRAWS[name](np.array(q), children):
        draft_probs = torch.tensor([q], dtype=torch.float64)
        tree = DrawnTree(p.__getitem__, draft_probs, torch.tensor([order]), index)
        acceptance = VERIFIERS[name](tree)
        probability += chance * (1 - float(acceptance.end_probs[0]))
    return probability


@pytest.mark.parametrize("name", VERIFIERS)
def test_optimal_transport_property(name):
    """Sequoia, Theorem 3.5: with one child, acceptance is 1 - TV(p, q).

    The naive rule does not reach it.
    """
    for seed in range(20):
        p, q = np.random.default_rng(seed).dirichlet(np.ones(4), 2)
        optimum = 1 - 0.5 * np.abs(p - q).sum()
        expected = p[q.argmax()] if name == "topk" else optimum
        probability = accepted_probability(name, p.tolist(), q.tolist(), 1)
        assert probability == pytest.approx(expected, abs=1e-12)
    if name == "topk":  # where 1 - TV = 0.7
        probability = accepted_probability(name, [0.5, 0.3, 0.2], [0.2, 0.3, 0.5], 1)
        assert probability == pytest.approx(0.2)


@pytest.mark.parametrize("name", VERIFIERS)
def test_cover_property(name):
    """Sequoia, Theorem 3.5: k children are never all rejected if q has k tokens that cover p.

    Independent draws miss some of them.
    """
    p, q = [0.0, 0.2, 0.8, 0.0], [0.0, 0.9, 0.1, 0.0]
    rate = accepted_probability(name, p, q, 2)
    if name in ("specinfer", "spectr"):
        assert rate < 0.75
    else:
        assert rate == pytest.approx(1, abs=1e-12)
