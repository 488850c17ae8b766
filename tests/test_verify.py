"""Verification by exact enumeration: over every draw of children and every outcome, the output law is the target's."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from enumeration import CASES, Case, independent, most_probable, without_replacement
from toys import SMALL_TREES as TREES

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.runtime.verify import VERIFIERS, TreeIndex, specinfer, spectr
from sequoia_plan.runtime.verify.verdict import Verdict, before

JUDGES = {name: verifier.judge for name, verifier in VERIFIERS.items()}


DRAWS = {"sequoia": without_replacement, "traversal": without_replacement, "specinfer": independent, "spectr": independent, "topk": most_probable}


def test_every_verifier_declares_the_drawing_it_is_tested_with():
    assert {name: verifier.drawing.draw.__name__ for name, verifier in VERIFIERS.items()} == {name: draws.__name__ for name, draws in DRAWS.items()}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", VERIFIERS)
def test_output_law_is_the_targets(name, tree, case):
    for seed in range(2):
        assert Case(TREES[tree], seed=seed, **CASES[case]).error(JUDGES[name], DRAWS[name]) < 1e-12


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tree", TREES)
def test_traversal_is_never_worse_than_sequoia(tree, case):
    gains = []
    for seed in range(4):
        setting = Case(TREES[tree], seed=seed, **CASES[case])
        (_, top_down), (_, bottom_up) = (setting.output(JUDGES[name], without_replacement) for name in ("sequoia", "traversal"))
        gains.append(bottom_up - top_down)
    assert min(gains) > -1e-12
    if tree == "star":  # at the root the two rules are the same
        assert max(gains) < 1e-12
    elif case == "random":
        assert max(gains) > 1e-3


def no_residual(judge):
    """Negative control: rejections leave the target's law as it was."""

    def broken(target, draft, drawn, index, covered=None):
        verdict = judge(target, draft, drawn, index, covered)
        laws = target(verdict.order.nodes)
        return replace(verdict, left=(laws if covered is None else laws[:, covered]).__getitem__)

    return broken


def traversal_by_definition(update):
    """Traversal node by node, as its paper writes it; `update` gives a after a rejection from S, a before it, and the draft mass not drawn."""
    return partial(_traversal, update)


def _traversal(update, target, draft, drawn, index, covered=None):
    order, child_of = index.by_level, dict[tuple[int, int], int]()
    for child, parent in enumerate(index.parents.tolist(), 1):
        child_of[parent, sum(p == parent for p, _ in child_of)] = child
    accept, left = draft.new_ones(index.size), {}
    for place, node in enumerate(order.nodes.tolist()):  # parents come first
        law = target(torch.tensor([node]))[0]
        a, r = accept[node], law if covered is None else law[covered]
        outside, q = law.sum() - r.sum(), draft[order.drawn[place]].clone()
        undrawn, mass = torch.ones(()), 1.0  # mass of the target's law that is left, in its own units
        for rank in range(int(index.child_count[node])):
            token = drawn[order.drawn[place], rank]
            free = torch.ones_like(q).index_fill(0, drawn[order.drawn[place], :rank], 0.0)
            d = q / q.sum() if q.sum() > 0 else free / free.sum()
            accept[child_of[node, rank]] = (a * r[token] / d[token]).clamp(max=1) if d[token] > 0 else 0.0
            r = (a * r - d).clamp(min=0)
            s = r.sum() + a * outside
            r, outside = r / s.clamp(min=1e-300), a * outside / s.clamp(min=1e-300)
            undrawn = undrawn - draft[order.drawn[place], token]
            mass = mass * s / a.clamp(min=1e-300)
            a = update(s, a, undrawn)
            q[token] = 0
        accept[node], left[place] = a, r * mass
    ordered = accept.double()[index.post_order]
    ends = torch.zeros_like(ordered).index_copy(0, index.post_order, ordered * before(1 - ordered))
    return Verdict(ends, lambda places: torch.stack([left[int(place)] for place in places]), order)


def as_published(s, a, undrawn):
    return s / (s + 1 - a).clamp(min=1e-300)


def another_start(s, a, undrawn):
    """Negative control: min(1, S / draft mass not drawn yet), a rule seen in public code."""
    return (s / undrawn.clamp(min=1e-300)).clamp(max=1)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tree", TREES)
def test_traversal_is_its_definition(tree, case):
    """Node by node, without any of our shortcuts: the same output law and the same expected tokens."""
    setting = Case(TREES[tree], **CASES[case])
    (law, tokens), (plain, expected) = (setting.output(judge, without_replacement) for judge in (JUDGES["traversal"], traversal_by_definition(as_published)))
    assert np.abs(law - plain).max() < 1e-12 and tokens == pytest.approx(expected, abs=1e-12)


def traversal_from_the_last_child(target, draft, drawn, index, covered=None):
    """Negative control: siblings visited against the draw order."""
    return VERIFIERS["traversal"].judge(target, draft, drawn, replace(index, post_order=torch.arange(index.size).flip(0)), covered)


TWINS = {
    **{f"{name} without residual": (no_residual(verifier.judge), DRAWS[name]) for name, verifier in VERIFIERS.items()},
    "sequoia that keeps what was drawn": (specinfer.judge, without_replacement),
    "specinfer that removes what was drawn": (VERIFIERS["sequoia"].judge, independent),
    "spectr on draws without replacement": (spectr.judge, without_replacement),
    "traversal on independent draws": (VERIFIERS["traversal"].judge, independent),
    "traversal with another start": (traversal_by_definition(another_start), without_replacement),
    "traversal from the last child": (traversal_from_the_last_child, without_replacement),
    "topk on independent draws": (VERIFIERS["topk"].judge, independent),
}


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("covered", [[0, 1, 2], [0, 1]])
def test_broken_twins_fail(twin, covered):
    assert Case(TREES["binary"], 3, covered).error(*TWINS[twin]) > 1e-3


def accepted(name, p, q, children):
    """The probability that one of `children` drawn from q is accepted when the target's law is p."""
    index = TreeIndex.of(TokenTree.star(children))
    laws = torch.tensor([p] * index.size, dtype=torch.float64)
    return sum(
        chance * (1 - float(JUDGES[name](laws.__getitem__, torch.tensor([q], dtype=torch.float64), torch.tensor([order]), index, None).ends[0]))
        for order, chance in DRAWS[name](np.array(q), children)
    )


@pytest.mark.parametrize("name", VERIFIERS)
def test_optimal_transport_property(name):
    """Sequoia, Theorem 3.5: with one child, acceptance is 1 - TV(p, q). The naive rule falls short of it."""
    for seed in range(20):
        p, q = np.random.default_rng(seed).dirichlet(np.ones(4), 2)
        optimum = 1 - 0.5 * np.abs(p - q).sum()
        if name == "topk":
            assert accepted(name, p.tolist(), q.tolist(), 1) == pytest.approx(p[q.argmax()])
        else:
            assert accepted(name, p.tolist(), q.tolist(), 1) == pytest.approx(optimum, abs=1e-12)
    if name == "topk":
        assert accepted(name, [0.5, 0.3, 0.2], [0.2, 0.3, 0.5], 1) == pytest.approx(0.2)  # where 1 - TV = 0.7


@pytest.mark.parametrize("name", VERIFIERS)
def test_cover_property(name):
    """Sequoia, Theorem 3.5: where q has k tokens and they cover p, k children are never all rejected. Independent draws miss some."""
    p, q = [0.0, 0.2, 0.8, 0.0], [0.0, 0.9, 0.1, 0.0]
    rate = accepted(name, p, q, 2)
    if name in ("specinfer", "spectr"):
        assert rate < 0.75
    else:
        assert rate == pytest.approx(1, abs=1e-12)
