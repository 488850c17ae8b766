"""Measured acceptance: as the verifiers accept, by level and class, also after an interruption."""

import itertools
import json
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from enumeration import exact_acceptance
from refusals import refusal
from toys import PROMPTS, toy_pair

from sequoia_plan.artifacts import Acceptance, TokenTree
from sequoia_plan.artifacts.counts import MAX_KINDS, ClassCounts
from sequoia_plan.artifacts.expected_tokens import expected_tokens
from sequoia_plan.profiler.children import DrawnChildren
from sequoia_plan.profiler.measure import measure_acceptance
from sequoia_plan.profiler.observed import LEVELS, TREE, ObservedAcceptance, named_kinds
from sequoia_plan.runtime import Sampling, SequoiaDecoder
from sequoia_plan.runtime.sampling.drawing import DRAWING_OF_VERIFIER
from sequoia_plan.runtime.verify import VERIFIERS, DrawnTree, TreeIndex

pytestmark = pytest.mark.slow
PLAIN_RULE = Sampling(1.0, verifier="sequoia")
"""Its acceptance is measured without an acceptance ratio."""
TRAVERSAL = Sampling(1.0, verifier="traversal")


def measured(pair, sampling, prompts=PROMPTS, **options):
    """The acceptance with one sampling on all prompts."""
    options = {"precision": 0, "tokens_per_prompt": 16} | options
    return measure_acceptance(pair, prompts, sampling, **options)


def rate(observed):
    """The acceptance of each rank over all levels and node classes."""
    return observed.counts.sum((0, 1, 2)) / observed.trials.sum()


def random_probs(positions, vocabulary=8, seed=0):
    """The target's and the draft's probabilities, each float32 [positions, vocabulary]."""
    logits = torch.randn(2, positions, vocabulary, generator=torch.Generator().manual_seed(seed))
    return torch.softmax(1.5 * logits, -1)


@pytest.mark.parametrize("verifier", [name for name in VERIFIERS if name != "traversal"])
@pytest.mark.parametrize("d2t", [None, [0, 2, 3, 5, 7]])
def test_stars_side_by_side_are_verified_as_one_by_one(verifier, d2t):
    p, q = random_probs(20)
    d2t = None if d2t is None else torch.tensor(d2t)
    q = q if d2t is None else q[:, d2t] / q[:, d2t].sum(-1, keepdim=True)
    rule = VERIFIERS[verifier]
    drawn = DRAWING_OF_VERIFIER[verifier](q, 4, torch.Generator().manual_seed(1))
    stars, star = TreeIndex.stars(20, 4), TreeIndex.of(TokenTree.star(4))
    together = rule(DrawnTree(p.__getitem__, q, drawn, stars, d2t)).end_probs
    for at in range(20):
        one = slice(at, at + 1)
        target_probs = p[at].expand(star.size, -1).__getitem__
        alone = rule(DrawnTree(target_probs, q[one], drawn[one], star, d2t)).end_probs
        torch.testing.assert_close(together[20 + 4 * at : 24 + 4 * at], alone[1:])
        torch.testing.assert_close(together[at], alone[0])


@pytest.mark.parametrize(("draft_temperature", "is_exact"), [(None, True), (3.0, False)])
def test_expected_acceptance_is_exact_on_average(draft_temperature, is_exact):
    """Against enumeration. Children drawn from other probabilities (the control) differ."""
    p, q = random_probs(1, 5, seed=3)[:, 0]
    runs, generator = 40_000, torch.Generator().manual_seed(0)
    sampling = replace(PLAIN_RULE, draft_temperature=draft_temperature)
    logits = (p.log().expand(runs, -1), q.log().expand(runs, -1))
    observed = DrawnChildren.draw(*logits, sampling, 2, generator, None).expected_acceptance()
    expected = exact_acceptance(p.double().numpy(), q.double().numpy(), 2)
    z = (observed.mean(0).numpy() - expected) / (observed.std(0).numpy() / runs**0.5)
    assert (np.abs(z) < 4).all() == is_exact


def test_traversal_is_measured_as_it_accepts_in_a_tree():
    """The levels predict the tokens a step that decoding yields.

    The levels of `sequoia` (the control) predict fewer.
    """
    pair = toy_pair(noise=1.5, constant=True)
    decoder = SequoiaDecoder(pair.target, pair.draft, TREE)
    yields = np.array(
        [
            len(step.tokens)
            for number, prompt in enumerate(PROMPTS)
            for step in itertools.islice(
                decoder.steps(torch.tensor(prompt), 480, TRAVERSAL, number), 150
            )
        ]
    )
    error = yields.std() / len(yields) ** 0.5
    sequoia, traversal = (
        expected_tokens(TREE, Acceptance.counted(observed.totals()).with_one_class().rates)
        for observed in (
            measured(pair, sampling, PROMPTS * 4, tokens_per_prompt=30)
            for sampling in (PLAIN_RULE, TRAVERSAL)
        )
    )
    assert traversal == pytest.approx(yields.mean(), abs=4 * error)
    assert sequoia < yields.mean() - 4 * error


def classes_decoded(pair, class_of):
    """int [LEVELS, 2]: accepted nodes by level and class, from the decoder's own paths.

    `class_of` gives the class for the ranks on the way to a node.
    """
    counts = np.zeros((LEVELS, 2), int)
    decoder = SequoiaDecoder(pair.target, pair.draft, TREE)
    for number, prompt in enumerate(PROMPTS):
        num_tokens = 0
        for step in decoder.steps(torch.tensor(prompt), 40, PLAIN_RULE, number):
            ranks = [int(TREE.ranks[node]) for node in step.path[1:]]
            for level in range(len(step.tokens)):  # the root, and the accepted nodes below it
                counts[min(level, LEVELS - 1), class_of(ranks[:level])] += 1
            num_tokens += len(step.tokens)
            if num_tokens >= 40:
                break
        counts[0, 0] += 1  # the next step's root, on which the text ends
    return counts


def test_classes_are_those_of_the_decoded_tree():
    """A class that depends on the last rank alone (the control) gives other trials."""
    pair = toy_pair(noise=1.5)
    observed = measured(pair, PLAIN_RULE, tokens_per_prompt=40)
    by_class = observed.trials.sum(0)
    of_path = classes_decoded(pair, lambda ranks: int(max(ranks, default=1) > 1))
    of_rank = classes_decoded(pair, lambda ranks: int([1, *ranks][-1] > 1))
    assert np.array_equal(by_class, of_path) and not np.array_equal(by_class, of_rank)
    assert np.array_equal(observed.totals().trials, by_class)
    assert (by_class[1:] > 0).all() and by_class[0, 1] == 0


def test_the_ratio_of_traversal_is_applied_to_both_classes():
    """Each class has at most one accepted child a trial, also with few trials."""
    plain, multiplied = (
        measured(toy_pair(noise=1.5), sampling, tokens_per_prompt=40)
        for sampling in (PLAIN_RULE, TRAVERSAL)
    )
    first_child = [
        o.counts[:, 1:, :, 0].sum((0, 1)) / o.trials[:, 1:].sum((0, 1)) for o in (plain, multiplied)
    ]
    assert (first_child[1] > first_child[0] * 1.001).all()
    totals = multiplied.totals()
    assert (totals.accepted.sum(-1) <= totals.trials + 1e-3).all()
    trials = np.array([[[4, 0], [1, 1]]])
    for off_count, expected in ((1.4, 1.0), (0.2, 0.9)):  # of 1.9 in all, at most 1 a class
        counts = np.array([[[[2.0, 1.0], [0.0, 0.0]], [[1.9 - off_count, 0.0], [off_count, 0.0]]]])
        accepted = ObservedAcceptance(trials, counts).totals().accepted
        assert accepted[1, :, 0].tolist() == pytest.approx([1.9 - expected, expected])


def test_precision_ends_the_work():
    progress = []
    observed = measured(
        toy_pair(),
        TRAVERSAL,
        PROMPTS * 50,
        precision=0.1,
        on_prompt=lambda *arguments: progress.append(arguments),
    )
    assert 8 <= len(observed.trials) == progress[-1][0] < progress[-1][1] == 600
    assert observed.precision() <= 0.1 < progress[-2][2].precision()
    assert ObservedAcceptance(observed.trials[:7], observed.counts[:7]).precision() == float("inf")


def test_the_precision_holds():
    """Errors of 30 small measurements, against all together, are as their 95 % intervals say."""
    long = measured(toy_pair(constant=True), TRAVERSAL, PROMPTS * 30, tokens_per_prompt=10)

    def tokens(part):
        return expected_tokens(TREE, rate(part)[None, None])

    parts = [ObservedAcceptance(long.trials[i::30], long.counts[i::30]) for i in range(30)]
    errors = np.array([(tokens(part) / tokens(long) - 1) / part.precision() for part in parts])
    # of 30 standard normal numbers: 0.75 to 1.25 in 95 % of cases
    assert 0.7 < 1.96 * np.mean(errors**2) ** 0.5 < 1.45
    quarters = [ObservedAcceptance(long.trials[i::4], long.counts[i::4]) for i in range(4)]
    ratio = np.mean([quarter.precision() for quarter in quarters]) / long.precision()
    assert 1.5 < ratio < 2.7  # four times the prompts, half the interval


def test_kinds_are_kept_where_every_prompt_has_one():
    """A prompt without a kind, or a name for each of many prompts, says nothing."""
    trials = np.arange(5 * LEVELS).reshape(5, LEVELS, 1)
    observed = ObservedAcceptance(trials, trials[..., None] * np.array([0.5, 0.25]))
    prompts = observed.by_prompt(named_kinds(["a", "b", "b", "c", "c", "d"]))
    assert {kind: len(of_kind) for kind, of_kind in prompts.items()} == {"a": 1, "b": 2, "c": 2}
    second = int(trials[2].sum())
    assert prompts["b"][1] == ClassCounts(second, (second / 2, second / 4))
    assert named_kinds(["a", None]) == ["all"] * 2
    assert set(named_kinds([str(number) for number in range(MAX_KINDS + 1)])) == {"all"}


def test_interrupted_runs_go_on(tmp_path):
    """After a stop at five prompts only the others are measured, with the same result."""
    pair, journal = toy_pair(), tmp_path / "journal"
    whole = measured(pair, PLAIN_RULE)

    def stop(num_prompts, max_prompts, observed):
        if num_prompts == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measured(pair, PLAIN_RULE, journal=journal, on_prompt=stop)
    document = json.loads(journal.read_text())
    assert len(document["done"]) == 5
    document["done"]["0"]["counts"][0][0][0] = 0.5  # shows that the journal is read
    journal.write_text(json.dumps(document))
    resumed = measured(pair, PLAIN_RULE, journal=journal)
    assert resumed.counts[0, 0, 0, 0] == 0.5 != whole.counts[0, 0, 0, 0]
    assert np.array_equal(resumed.counts[1:], whole.counts[1:])
    assert resumed.lookup == whole.lookup
    # the journal of other arguments is not used, nor a damaged one
    other = measured(pair, PLAIN_RULE, journal=journal, tokens_per_prompt=8)
    assert other.trials.sum() < whole.trials.sum()
    for damaged in ("{", '{"work": 1}', "[]"):
        journal.write_text(damaged)
        again = measured(pair, PLAIN_RULE, PROMPTS[:1], journal=journal)
        assert np.array_equal(again.counts, whole.counts[:1])


def test_prompts_that_leave_no_room_are_refused():
    with refusal("prompt: 512 tokens"):
        measured(toy_pair(), Sampling(), [[1] * 512])


def test_a_prompt_that_compiles_does_not_end_the_measurement(monkeypatch):
    """By a clock on which the first prompt takes 1,000 seconds and the others one each."""
    readings = itertools.chain([0.0, 1000.0], itertools.count(1000.0, 0.5))
    module = import_module("sequoia_plan.profiler.measure")
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: next(readings)))
    numbers = []
    measured(
        toy_pair(), PLAIN_RULE, PROMPTS * 9, tokens_per_prompt=2, seconds=6.0,
        on_prompt=lambda number, *_: numbers.append(number),
    )  # fmt: skip
    assert numbers[-1] == 11  # 1.5 + 10 times .5 are more than 6
