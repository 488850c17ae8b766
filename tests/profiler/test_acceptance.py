"""Measured acceptance: as the verifiers accept, by level and class, and the same after an
interruption."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest
import torch
from msgspec import structs
from paths import ROOT
from scipy.stats import t as student
from toys import PROMPTS, ToyModel, toy_pair

from sequoia_plan.artifacts import (
    Acceptance,
    ArgumentError,
    LevelCounts,
    Profile,
    SequoiaPlanError,
    TokenTree,
)
from sequoia_plan.artifacts.counts import MAX_KINDS, Counts, has_classes
from sequoia_plan.artifacts.expected_tokens import expected_tokens
from sequoia_plan.artifacts.merge import merge, pooled
from sequoia_plan.artifacts.uncertainty import Z95, student95
from sequoia_plan.planner import solve
from sequoia_plan.profiler.acceptance import measure_acceptance
from sequoia_plan.profiler.methods import expected_acceptance
from sequoia_plan.profiler.observed import LEVELS, TREE, ObservedAcceptance
from sequoia_plan.runtime import Sampling, SequoiaDecoder
from sequoia_plan.runtime.verify import VERIFIERS, TreeIndex

pytestmark = pytest.mark.usefixtures("one_thread")
PLAIN_RULE = Sampling(1.0, verifier="sequoia")
"""Its acceptance is measured without an acceptance ratio."""


def random_probs(positions, vocabulary=8, seed=0):
    """The target's and the draft's probabilities, each float32 [positions, vocabulary]."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.softmax(1.5 * torch.randn(positions, vocabulary, generator=generator), -1)
        for _ in range(2)
    )


@pytest.mark.parametrize("verifier", [name for name in VERIFIERS if name != "traversal"])
@pytest.mark.parametrize("d2t", [None, [0, 2, 3, 5, 7]])
def test_stars_side_by_side_are_verified_as_one_by_one(verifier, d2t):
    p, q = random_probs(20)
    d2t = None if d2t is None else torch.tensor(d2t)
    q = q if d2t is None else q[:, d2t] / q[:, d2t].sum(-1, keepdim=True)
    rule = VERIFIERS[verifier]
    drawn = rule.drawing(q, 4, torch.Generator().manual_seed(1))
    together = rule.acceptance(
        lambda nodes: p[nodes], q, drawn, TreeIndex.stars(20, 4), d2t
    ).end_probs
    assert together[20:].reshape(20, 4).sum(-1) + together[:20] == pytest.approx(
        np.ones(20), abs=1e-6
    )
    star = TreeIndex.of(TokenTree.star(4))
    for at in range(20):
        alone = rule.acceptance(
            lambda nodes, at=at: p[at].expand(len(nodes), -1),
            q[at : at + 1],
            drawn[at : at + 1],
            star,
            d2t,
        ).end_probs
        torch.testing.assert_close(together[20 + 4 * at : 24 + 4 * at], alone[1:])
        torch.testing.assert_close(together[at], alone[0])


def exact_acceptance(p, q):
    """Of ranks 1 and 2, by enumeration of every two children in draw order, by the definition of
    Sequoia's rule."""
    first = second = 0.0
    for s, t in itertools.permutations(range(len(p)), 2):
        draw_prob = q[s] * q[t] / (1 - q[s])
        accept_prob = min(1, p[s] / q[s])
        residual = np.maximum(p - q, 0)
        residual /= residual.sum()
        draft_probs = np.where(np.arange(len(q)) == s, 0, q)
        draft_probs /= draft_probs.sum()
        first += draw_prob * accept_prob
        second += draw_prob * (1 - accept_prob) * min(1, residual[t] / draft_probs[t])
    return first, second


@pytest.mark.parametrize(("draft_temperature", "is_exact"), [(None, True), (3.0, False)])
def test_expected_acceptance_is_exact_on_average(draft_temperature, is_exact):
    """Against enumeration. Children drawn from other probabilities (the control) give other
    figures."""
    p, q = (probs[0] for probs in random_probs(1, 5, seed=3))
    runs = 40_000
    sampling = Sampling(1.0, draft_temperature=draft_temperature, verifier="sequoia")
    observed = expected_acceptance(
        p.log().expand(runs, -1),
        q.log().expand(runs, -1),
        sampling,
        2,
        torch.Generator().manual_seed(0),
    )
    z = (observed.mean(0).numpy() - exact_acceptance(p.double().numpy(), q.double().numpy())) / (
        observed.std(0).numpy() / runs**0.5
    )
    assert (np.abs(z) < 4).all() == is_exact


def test_both_methods_agree_where_every_position_is_alike():
    """The same probabilities at every position: the text makes no difference, so counting and
    computing estimate the same vector."""
    pair = toy_pair(constant=True)
    setting, options = PLAIN_RULE, {"precision": 0, "rounds": 5, "tokens_per_prompt": 60}
    computed, counted = (
        measure_acceptance(pair, PROMPTS, [setting], method=method, **options)[0]
        for method in ("forced", "decoding")
    )
    a, b = (observed.counts.sum((0, 1)) / observed.trials.sum() for observed in (computed, counted))
    error = np.sqrt(b * (1 - b) / counted.trials.sum()) + 1e-4
    assert (np.abs(a - b) < 4 * error).all()
    spread = [
        (observed.counts[:, :, 0].sum(1) / observed.trials.sum(1)).std()
        * np.sqrt(observed.trials[0].sum())
        for observed in (computed, counted)
    ]
    assert spread[0] < spread[1]  # a computed trial has less variance than a counted one
    other_setting = replace(setting, draft_temperature=4.0)
    wrong = measure_acceptance(pair, PROMPTS, [other_setting], **options)[0]
    assert (np.abs(wrong.counts.sum((0, 1)) / wrong.trials.sum() - b) > 4 * error).any()


def test_traversal_is_measured_as_it_accepts_in_a_tree():
    """The tokens a step that the levels predict for the tree are those that decoding with
    `traversal` yields. The levels of `sequoia` (the control) predict fewer."""
    pair = toy_pair(noise=1.5, constant=True)
    rules = [Sampling(1.0, verifier=name) for name in ("sequoia", "traversal")]
    predicted = []
    for observed in measure_acceptance(
        pair, PROMPTS, rules, precision=0, rounds=8, tokens_per_prompt=60
    ):
        profile = Profile(pooled(observed.levels()), levels=observed.levels())
        predicted.append(expected_tokens(TREE, Acceptance.given(profile.acceptance_by_level).rates))
    decoder = SequoiaDecoder(pair.target, pair.draft, TREE)
    yields = [
        len(step.tokens)
        for prompt in PROMPTS
        for step in itertools.islice(decoder.steps(torch.tensor(prompt), 480, rules[1], 1), 150)
    ]
    error = np.std(yields) / len(yields) ** 0.5
    assert predicted[1] == pytest.approx(np.mean(yields), abs=4 * error)
    assert predicted[0] < np.mean(yields) - 4 * error


def test_levels_are_those_of_the_decoded_tree():
    """A perfect greedy draft: every step goes down the first children of the tree, five levels, and
    all of them are accepted."""
    target = ToyModel(0, context=512)
    pair = replace(toy_pair(), target=target, draft=target)
    observed = measure_acceptance(
        pair, PROMPTS[:2], [Sampling()], precision=0, tokens_per_prompt=50
    )[0]
    depth = TREE.depth
    assert depth == 5
    assert (
        observed.trials.tolist() == [[11, 10, 10, 20]] * 2
    )  # ten steps of five tokens, and the root of the next one
    assert (observed.counts[:, :, 0] == observed.trials).all()
    assert observed.counts[:, :, 1:].sum() == 0
    assert [level.trials for level in observed.levels()] == [22, 20, 20, 40]


def classes_decoded(pair, sampling, tokens, class_of):
    """int [LEVELS, 2]: accepted nodes by level and class in the text of `forced`, counted from the
    decoder's own paths; `class_of` gives the class for the ranks on the way to a node."""
    counts = np.zeros((LEVELS, 2), int)
    for number, prompt in enumerate(PROMPTS):
        num_tokens = 0
        for step in SequoiaDecoder(pair.target, pair.draft, TREE).steps(
            torch.tensor(prompt), tokens, sampling, number
        ):
            ranks = [int(TREE.ranks[node]) for node in step.path[1:]]
            for level in range(len(step.tokens)):  # the root, and the accepted nodes below it
                counts[min(level, LEVELS - 1), class_of(ranks[:level])] += 1
            num_tokens += len(step.tokens)
            if num_tokens >= tokens:
                break
        counts[0, 0] += 1  # the next step's root, on which the text ends
    return counts


def test_classes_are_those_of_the_decoded_tree():
    """The trials by class are the nodes that the decoder accepted. A class that depends on the last
    rank alone (the control) gives other trials."""
    pair = toy_pair(noise=1.5)
    observed = measure_acceptance(pair, PROMPTS, [PLAIN_RULE], precision=0, tokens_per_prompt=40)[0]
    by_class = np.stack(
        [observed.trials - observed.off_spine.trials, observed.off_spine.trials], -1
    ).sum(0)
    assert np.array_equal(
        by_class,
        classes_decoded(pair, PLAIN_RULE, 40, lambda ranks: int(max(ranks, default=1) > 1)),
    )
    assert not np.array_equal(
        by_class, classes_decoded(pair, PLAIN_RULE, 40, lambda ranks: int([1, *ranks][-1] > 1))
    )
    assert (observed.off_spine.counts <= observed.counts + 1e-9).all() and (
        observed.off_spine.trials[:, 0] == 0
    ).all()
    for level in observed.levels()[1:]:
        assert 0 < level.off_spine.trials < level.trials
    assert observed.levels()[0].off_spine is None
    assert has_classes(observed.levels())


@pytest.mark.parametrize("second", [False, True])
def test_a_draft_that_is_wrong_first_leaves_the_spine(second):
    """Of a draft that always ranks the target's token second, every accepted node is off the spine;
    of a perfect one, none."""
    target = ToyModel(0, context=512)

    class Second(ToyModel):
        def _covered(self, logits):
            best, following = logits.topk(2).values.unbind(-1)
            return torch.where(logits == best[..., None], following[..., None] - 1e-3, logits)

    draft = Second(0, context=512) if second else target
    observed = measure_acceptance(
        replace(toy_pair(), target=target, draft=draft),
        PROMPTS[:2],
        [Sampling()],
        precision=0,
        tokens_per_prompt=50,
    )[0]
    assert observed.off_spine.trials[:, 1:].sum() == (observed.trials[:, 1:].sum() if second else 0)
    assert observed.counts[:, 0, 1 if second else 0].sum() == observed.trials[:, 0].sum()


def test_the_ratio_of_traversal_is_applied_to_both_classes():
    """The classes add up to the level, and each has at most one accepted child a trial, also with
    few trials."""
    pair = toy_pair(noise=1.5)
    rules = [Sampling(1.0, verifier=name) for name in ("sequoia", "traversal")]
    plain, multiplied = measure_acceptance(pair, PROMPTS, rules, precision=0, tokens_per_prompt=40)
    assert multiplied.off_spine.counts[..., 0].sum() > plain.off_spine.counts[..., 0].sum() * 1.001
    for level in multiplied.levels()[1:]:
        assert sum(level.off_spine.counts) <= level.off_spine.trials + 1e-3
        assert (
            sum(level.counts) - sum(level.off_spine.counts)
            <= level.trials - level.off_spine.trials + 1e-3
        )
    Profile(
        pooled(multiplied.levels()),
        levels=multiplied.levels(),
        kinds=multiplied.by_kind(["a", "b"]),
    )
    few = ObservedAcceptance(
        np.array([[4, 2]]),
        np.array([[[2.0, 1.0], [1.9, 0.0]]]),
        ObservedAcceptance(np.array([[0, 1]]), np.array([[[0.0, 0.0], [1.4, 0.0]]])),
    )
    assert few.levels()[1] == LevelCounts(2, (1.9, 0.0), Counts(1, (1.0, 0.0)))
    many = replace(
        few, off_spine=ObservedAcceptance(np.array([[0, 1]]), np.array([[[0.0, 0.0], [0.2, 0.0]]]))
    )
    assert many.levels()[1] == LevelCounts(2, (1.9, 0.0), Counts(1, (0.9, 0.0)))


def test_settings_share_text_and_keep_their_order():
    pair = toy_pair(covered=[0, 2, 3, 5, 7])
    settings = [
        PLAIN_RULE,
        Sampling(0.0),
        Sampling(1.0, verifier="topk"),
        replace(PLAIN_RULE, draft_temperature=2.0),
        Sampling(1.0, verifier="traversal"),
    ]
    observed = measure_acceptance(pair, PROMPTS[:3], settings, precision=0, tokens_per_prompt=20)
    assert len({observed.trials.tobytes() for observed in (observed[0], *observed[2:])}) == 1
    assert observed[0].trials.tobytes() != observed[1].trials.tobytes()
    alone = measure_acceptance(pair, PROMPTS[:3], settings[:1], precision=0, tokens_per_prompt=20)[
        0
    ]
    assert np.array_equal(alone.counts, observed[0].counts)
    greedy = measure_acceptance(
        pair, PROMPTS[:3], settings[1:2], precision=0, tokens_per_prompt=20, rounds=5
    )[0]
    assert np.array_equal(greedy.counts, observed[1].counts)  # greedy takes one round
    assert (
        len({observed.counts.tobytes() for observed in observed}) == 5
    )  # traversal draws children anew


def test_precision_ends_the_work():
    pair = toy_pair()
    seen = []
    short = {"tokens_per_prompt": 16}
    observed = measure_acceptance(
        pair,
        PROMPTS,
        [Sampling(1.0)],
        precision=0.1,
        rounds=50,
        on_prompt=lambda *progress: seen.append(progress),
        **short,
    )[0]
    assert 8 <= len(observed.trials) == seen[-1][0] < seen[-1][1] == 600
    assert observed.precision() <= 0.1 < seen[-2][2].precision()
    assert ObservedAcceptance(observed.trials[:7], observed.counts[:7]).precision() == float("inf")
    # four times the prompts, half the interval
    long = measure_acceptance(pair, PROMPTS, [Sampling(1.0)], precision=0, rounds=12, **short)[0]
    quarter = np.mean(
        [ObservedAcceptance(long.trials[i::4], long.counts[i::4]).precision() for i in range(4)]
    )
    assert 1.5 < quarter / long.precision() < 2.7


def test_the_precision_holds():
    """Errors of 30 small measurements, against a large one, are as large as their 95 % intervals
    say: no narrower, no wider."""
    pair = toy_pair(constant=True)
    long = measure_acceptance(
        pair, PROMPTS, [Sampling(1.0)], precision=0, rounds=30, tokens_per_prompt=10
    )[0]

    def tokens(part):
        return expected_tokens(
            TREE, Acceptance.given(part.counts.sum((0, 1)) / part.trials.sum()).rates
        )

    parts = [ObservedAcceptance(long.trials[i::30], long.counts[i::30]) for i in range(30)]
    errors = np.array([(tokens(part) / tokens(long) - 1) / part.precision() for part in parts])
    assert (
        0.7 < 1.96 * np.mean(errors**2) ** 0.5 < 1.45
    )  # of 30 standard normal numbers: 0.75 to 1.25 in 95 % of cases


def test_positions_of_one_text_count_for_less():
    """Independent positions count as about one trial each. Where all positions of a prompt accept
    alike, the whole prompt counts as one trial."""
    rng, trials = np.random.default_rng(0), np.full((400, LEVELS), 10)
    independent, alike = (
        rng.binomial(10, 0.4, (400, LEVELS)),
        10 * np.repeat(rng.binomial(1, 0.4, (400, 1)), LEVELS, 1),
    )
    effective = [
        ObservedAcceptance(
            trials, accepted[..., None] * np.array([1.0, 0.0, 0.0])
        ).effective_trials()
        for accepted in (independent, alike)
    ]
    assert effective[0] == pytest.approx(trials.sum(), rel=0.2)
    assert effective[1] == pytest.approx(400, rel=0.2)
    too_few = ObservedAcceptance(trials[:7], np.zeros((7, LEVELS, 3)))
    assert too_few.effective_trials() == trials[:7].sum()


def profile_of_kinds(rng, kinds, prompts, spread=0.4):
    """A profile of some kinds with some prompts each, and the acceptance of one further kind.

    The acceptance of every kind, and of every prompt within it, differs by a normally distributed
    shift of its logits, and by nothing else.

    Returns:
        The profile; the further kind's acceptance [levels, ranks] in a sample of as many prompts,
        and its expectation.
    """
    trials = np.array([15, 10, 0, 0])
    kind_logits = rng.normal(0.2, spread, kinds + 1)
    prompt_shifts = [0.6 * NormalDist().inv_cdf((i + 0.5) / 400) for i in range(400)]

    def acceptance(logits):
        first_child = 0.7 / (1 + np.exp(-logits))
        return np.stack([first_child, 0.3 / 0.7 * first_child], -1)

    logits = kind_logits[:, None] + rng.normal(0, 0.6, (kinds + 1, prompts))
    probs = np.repeat(acceptance(logits)[:, :, None], LEVELS, 2)
    probs = np.concatenate([probs, 1 - probs.sum(-1, keepdims=True)], -1)
    counts = rng.multinomial(trials, probs)[..., :2].astype(float)
    observed = ObservedAcceptance(
        np.tile(trials, (kinds * prompts, 1)), counts[:-1].reshape(-1, LEVELS, 2)
    )
    names = [f"kind {number}" for number in range(kinds) for _ in range(prompts)]
    profile = Profile(
        pooled(observed.levels()),
        observed.effective_trials(),
        levels=observed.levels(),
        kinds=observed.by_kind(names),
    )
    sample = counts[-1, :, :2].sum(0) / (prompts * trials[:2, None])
    return profile, sample, acceptance(kind_logits[-1] + np.array(prompt_shifts)).mean(0)[None]


@pytest.mark.parametrize("kinds", [4, 8])
def test_the_interval_for_a_new_kind_covers_one(kinds):
    """The interval holds the sample of a further kind in 95 % of the cases, and its expectation at
    least as often. The interval for prompts like the profiled ones (a control) holds neither, and
    with normal quantiles in place of Student's (another control) four kinds are too few."""
    rng = np.random.default_rng(kinds)
    is_held = []
    for _ in range(300):
        profile, sample, expectation = profile_of_kinds(rng, kinds, 6)
        tree = solve(profile, budget=6, depth=4).tree
        wide, narrow = (
            tree.plan.interval_new_kind.expected_tokens,
            tree.plan.interval.expected_tokens,
        )
        middle, factor = tree.plan.expected_tokens, Z95 / student95(kinds - 1)
        normal = [middle + (end - middle) * factor for end in wide]
        of_sample, of_expectation = (
            expected_tokens(tree, Acceptance.given(sample).rates),
            expected_tokens(tree, Acceptance.given(expectation).rates),
        )
        within = [
            (interval[0] <= value <= interval[1])
            for interval in (wide, narrow, normal)
            for value in (of_sample, of_expectation)
        ]
        is_held.append(within)
    wide, wide_expected, narrow, narrow_expected, normal, _ = np.mean(is_held, 0)
    assert wide == pytest.approx(0.95, abs=0.035) and wide <= wide_expected
    assert max(narrow, narrow_expected) < 0.7
    assert normal < (0.9 if kinds == 4 else 0.94)


def test_kinds_that_do_not_differ_widen_the_interval_less():
    rng = np.random.default_rng(0)
    widths = [
        [
            np.ptp(
                solve(
                    profile_of_kinds(rng, 8, 6, spread)[0], budget=6, depth=4
                ).plan.interval_new_kind.expected_tokens
            )
            for _ in range(20)
        ]
        for spread in (0, 0.4, 0.8)
    ]
    assert np.median(widths[0]) < 0.8 * np.median(widths[1]) < 0.8 * np.median(widths[2])


def test_student95_is_the_quantile():
    exact = student.ppf(0.975, np.arange(3, 64))
    assert (
        [student95(n) for n in range(3, 64)]
        == pytest.approx(exact, rel=2e-3)
        != pytest.approx([Z95] * 61, rel=2e-3)
    )


def test_kinds_are_kept_where_every_prompt_has_one():
    """Three rounds of four prompts; a prompt without a kind, or a name for each prompt, says
    nothing."""
    trials = np.arange(12 * LEVELS).reshape(12, LEVELS)
    observed = ObservedAcceptance(trials, trials[..., None] * np.array([0.5, 0.25]))
    by_kind = observed.by_kind(["a", "b", "b", "c"])
    assert list(by_kind) == ["a", "b", "c"]
    assert [level.trials for level in by_kind["b"]] == trials.reshape(3, 4, LEVELS)[:, 1:3].sum(
        (0, 1)
    ).tolist()
    profile = Profile(pooled(observed.levels()), 10, levels=observed.levels(), kinds=by_kind)
    assert Profile.from_bytes(profile.to_yaml().encode(), "p") == profile
    assert solve(profile, budget=4, depth=3).plan.interval_new_kind is None  # three kinds
    assert (
        solve(
            structs.replace(profile, kinds=observed.by_kind(list("abcd"))), budget=4, depth=3
        ).plan.interval_new_kind
        is not None
    )
    assert observed.by_kind(["a", None, "b", "c"]) == {}
    many = ObservedAcceptance(
        np.ones((MAX_KINDS + 1, LEVELS), int), np.zeros((MAX_KINDS + 1, LEVELS, 2))
    )
    assert (
        many.by_kind([str(i) for i in range(MAX_KINDS + 1)])
        == {}
        != many.by_kind([str(i % MAX_KINDS) for i in range(MAX_KINDS + 1)])
    )


def test_interrupted_runs_go_on(tmp_path):
    """After a stop at five prompts only the others are measured, and the result equals that of an
    uninterrupted measurement."""
    pair, journal = toy_pair(), tmp_path / "journal"
    whole = measure_acceptance(pair, PROMPTS, [PLAIN_RULE], precision=0, tokens_per_prompt=16)[0]

    def stop(done, total, latest):
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_acceptance(
            pair,
            PROMPTS,
            [PLAIN_RULE],
            precision=0,
            tokens_per_prompt=16,
            journal=journal,
            on_prompt=stop,
        )
    assert len(json.loads(journal.read_text())["done"]) == 5
    times = []
    resumed = measure_acceptance(
        pair,
        PROMPTS,
        [PLAIN_RULE],
        precision=0,
        tokens_per_prompt=16,
        journal=journal,
        on_prompt=lambda *_: times.append(1),
    )[0]
    assert np.array_equal(resumed.counts, whole.counts) and np.array_equal(
        resumed.trials, whole.trials
    )
    results = json.loads(journal.read_text())
    results["done"]["0.0"][0]["counts"][0][0][0] = 0.5  # shows that the journal is read
    journal.write_text(json.dumps(results))
    assert (
        measure_acceptance(
            pair, PROMPTS, [PLAIN_RULE], precision=0, tokens_per_prompt=16, journal=journal
        )[0].counts[0, 0, 0]
        == 0.5
    )
    for other in ("{", '{"work": 1}', '{"done": {}}', "[]"):
        journal.write_text(other)
        assert np.array_equal(
            measure_acceptance(
                pair, PROMPTS, [PLAIN_RULE], precision=0, tokens_per_prompt=16, journal=journal
            )[0].counts,
            whole.counts,
        )
    elsewhere = measure_acceptance(
        pair, PROMPTS, [PLAIN_RULE], precision=0, tokens_per_prompt=16, journal=journal, seed=1
    )[0]
    assert not np.array_equal(
        elsewhere.counts, whole.counts
    )  # the journal of other arguments is not used


KILLED = """
import sys, time, pathlib
from toys import PROMPTS, toy_pair
from sequoia_plan.profiler.acceptance import measure_acceptance
from sequoia_plan.runtime import Sampling

def report(*progress):
    print("done", flush=True)
    time.sleep(float(sys.argv[2]))

journal = pathlib.Path(sys.argv[1])
options = {"precision": 0, "tokens_per_prompt": 16, "journal": journal, "on_prompt": report}
observed = measure_acceptance(toy_pair(), PROMPTS, [Sampling(1.0)], **options)[0]
print(observed.counts.tobytes().hex())
"""


def test_kill_9_and_again(tmp_path):
    """A real process, killed without warning in the middle."""
    folder = str(ROOT / "tests" / "helpers")
    command = [sys.executable, "-c", KILLED, str(tmp_path / "journal")]
    process = subprocess.Popen([*command, "60"], stdout=subprocess.PIPE, cwd=folder, text=True)
    assert process.stdout.readline() == "done\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert len(json.loads((tmp_path / "journal").read_text())["done"]) >= 1
    again = subprocess.run(
        [*command, "0"], capture_output=True, text=True, cwd=folder, check=True
    ).stdout.split()
    whole = measure_acceptance(
        toy_pair(), PROMPTS, [Sampling(1.0)], precision=0, tokens_per_prompt=16
    )[0]
    assert again.count("done") == len(PROMPTS)
    assert bytes.fromhex(again[-1]) == whole.counts.tobytes()


def test_what_cannot_be_measured():
    with pytest.raises(ArgumentError, match="method: found 'guess', expected forced or decoding"):
        measure_acceptance(toy_pair(), PROMPTS, [Sampling()], method="guess")
    with pytest.raises(SequoiaPlanError, match="prompt: 512 tokens"):
        measure_acceptance(toy_pair(), [[1] * 512], [Sampling()])


def counted(*rows, **changes):
    levels = tuple(LevelCounts(*row) for row in rows)
    return Profile(
        (0.5, 0.1),
        10,
        settings={"temperature": 0.6},
        models={"target": {"name": "t"}},
        levels=levels,
        **changes,
    )


def test_merging_adds_counts_up():
    a, b = counted((10, (5.0, 1.0))), counted((30, (9.0, 3.5)), (10, (1.0, 0.5)))
    both = merge([a, b], ["a", "b"])
    assert both.levels == (LevelCounts(40, (14.0, 4.5)), LevelCounts(10, (1.0, 0.5)))
    assert both.trials == a.trials + b.trials == 20 and both.acceptance == (0.3, 0.1)
    assert both.acceptance_by_level == ((0.35, 0.1125), (0.1, 0.05))
    assert merge([both]).levels == both.levels
    kinds = [
        {"code": a.levels},
        {
            "code": (LevelCounts(30, (9.0, 3.5)), LevelCounts(0, (0.0, 0.0))),
            "story": (LevelCounts(0, (0.0, 0.0)), b.levels[1]),
        },
    ]
    named = [
        structs.replace(profile, kinds=its_kinds)
        for profile, its_kinds in zip((a, b), kinds, strict=True)
    ]
    assert merge(named).kinds == {
        "code": (LevelCounts(40, (14.0, 4.5)), LevelCounts(0, (0.0, 0.0))),
        "story": kinds[1]["story"],
    }
    assert merge([named[0], b]).kinds == {} and merge([named[0], b]).levels == both.levels
    for other, part in (
        (
            structs.replace(a, settings={"temperature": 1.0}),
            "b: its settings differ from those of a",
        ),
        (structs.replace(a, models={}), "b: its models differ"),
        (structs.replace(a, levels=()), "b: has no acceptance.levels"),
        (counted((10, (5.0,))), "b: 1 ranks, a has 2"),
    ):
        with pytest.raises(SequoiaPlanError, match=part):
            merge([a, other], ["a", "b"])
    with pytest.raises(ArgumentError, match="no profile"):
        merge([])


def test_merging_adds_classes_up_where_all_tell_them_apart():
    with_classes = counted((20, (9.0, 1.0)), (10, (5.0, 1.0), Counts(4, (2.5, 0.5))))
    more = counted(
        (30, (9.0, 1.0)),
        (12, (5.0, 2.0), Counts(6, (1.5, 0.5))),
        (2, (1.0, 0.0), Counts(0, (0.0, 0.0))),
    )
    both = merge([with_classes, more])
    assert both.levels[1:] == (LevelCounts(22, (10.0, 3.0), Counts(10, (4.0, 1.0))), more.levels[2])
    assert both.levels[0].off_spine is None and has_classes(both.levels)
    # `decoding` measures the root's level alone, whose class is the spine
    assert merge([with_classes, counted((1, (0.0, 0.0)))]).levels[1] == with_classes.levels[1]
    assert merge([with_classes, counted((20, (9.0, 0.0)), (10, (5.0, 1.0)))]).levels[
        1
    ] == LevelCounts(20, (10.0, 2.0))
    assert not has_classes(
        merge([with_classes, counted((20, (9.0, 0.0)), (10, (5.0, 1.0)))]).levels
    )


def test_deepest_level_counts_with_all_below():
    assert TREE.depth > LEVELS
    assert counted((0, (0.0, 0.0)), (4, (2.0, 1.0))).acceptance_by_level == (
        (0.5, 0.1),
        (0.5, 0.25),
    )
