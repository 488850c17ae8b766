"""Acceptance is what the verifiers do: computed, counted, by level, and the same after an interruption."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
import torch
from msgspec import structs
from scipy.stats import t as student
from toys import PROMPTS, ToyModel, toy_pair

from sequoia_plan.artifacts import ArgumentError, LevelCounts, Profile, SequoiaPlanError, TokenTree
from sequoia_plan.artifacts.cost import expected_tokens
from sequoia_plan.artifacts.merge import merge, pooled
from sequoia_plan.artifacts.profile import MOST_KINDS, Counts, told_apart
from sequoia_plan.artifacts.uncertainty import Z95, student95
from sequoia_plan.planner import solve
from sequoia_plan.profiler.acceptance import measure_acceptance
from sequoia_plan.profiler.methods import expected_acceptance
from sequoia_plan.profiler.observed import LEVELS, TREE, Acceptance
from sequoia_plan.runtime import Sampling, SequoiaDecoder
from sequoia_plan.runtime.verify import VERIFIERS, TreeIndex

pytestmark = pytest.mark.usefixtures("one_thread")
PLAIN_RULE = Sampling(1.0, verifier="sequoia")
"""Measured as it is, nothing scaled."""


def laws(positions, vocabulary=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.softmax(1.5 * torch.randn(positions, vocabulary, generator=generator), -1) for _ in range(2))


@pytest.mark.parametrize("verifier", [name for name in VERIFIERS if name != "traversal"])
@pytest.mark.parametrize("covered", [None, [0, 2, 3, 5, 7]])
def test_stars_side_by_side_are_judged_as_one_by_one(verifier, covered):
    p, q = laws(20)
    covered = None if covered is None else torch.tensor(covered)
    q = q if covered is None else q[:, covered] / q[:, covered].sum(-1, keepdim=True)
    rule = VERIFIERS[verifier]
    picks = rule.drawing(q, 4, torch.Generator().manual_seed(1))
    together = rule.judge(lambda nodes: p[nodes], q, picks, TreeIndex.stars(20, 4), covered).ends
    assert together[20:].reshape(20, 4).sum(-1) + together[:20] == pytest.approx(np.ones(20), abs=1e-6)
    star = TreeIndex.of(TokenTree.star(4))
    for at in range(20):
        alone = rule.judge(lambda nodes, at=at: p[at].expand(len(nodes), -1), q[at : at + 1], picks[at : at + 1], star, covered).ends
        torch.testing.assert_close(together[20 + 4 * at : 24 + 4 * at], alone[1:])
        torch.testing.assert_close(together[at], alone[0])


def exact_acceptance(p, q):
    """Of ranks 1 and 2, by enumeration of every two children in draw order, by the definition of Sequoia's rule."""
    first = second = 0.0
    for s, t in itertools.permutations(range(len(p)), 2):
        drawn = q[s] * q[t] / (1 - q[s])
        take = min(1, p[s] / q[s])
        residual = np.maximum(p - q, 0)
        residual /= residual.sum()
        left = np.where(np.arange(len(q)) == s, 0, q)
        left /= left.sum()
        first += drawn * take
        second += drawn * (1 - take) * min(1, residual[t] / left[t])
    return first, second


@pytest.mark.parametrize(("draft_temperature", "right"), [(None, True), (3.0, False)])
def test_expected_acceptance_is_exact_on_average(draft_temperature, right):
    """Against enumeration; children drawn from another law (the control) give other figures."""
    p, q = (law[0] for law in laws(1, 5, seed=3))
    runs = 40_000
    sampling = Sampling(1.0, draft_temperature=draft_temperature, verifier="sequoia")
    found = expected_acceptance(p.log().expand(runs, -1), q.log().expand(runs, -1), sampling, 2, torch.Generator().manual_seed(0))
    z = (found.mean(0).numpy() - exact_acceptance(p.double().numpy(), q.double().numpy())) / (found.std(0).numpy() / runs**0.5)
    assert (np.abs(z) < 4).all() == right


def test_both_methods_agree_where_every_position_is_alike():
    """One law everywhere: text makes no difference, so counting and computing estimate the same vector, and greedy is 0 or 1."""
    pair = toy_pair(constant=True)
    setting, options = PLAIN_RULE, {"precision": 0, "rounds": 5, "tokens_per_prompt": 60}
    computed, counted = (measure_acceptance(pair, PROMPTS, [setting], method=method, **options)[0] for method in ("forced", "decoding"))
    a, b = (each.counts.sum((0, 1)) / each.trials.sum() for each in (computed, counted))
    error = np.sqrt(b * (1 - b) / counted.trials.sum()) + 1e-4
    assert (np.abs(a - b) < 4 * error).all()
    spread = [(each.counts[:, :, 0].sum(1) / each.trials.sum(1)).std() * np.sqrt(each.trials[0].sum()) for each in (computed, counted)]
    assert spread[0] < spread[1]  # a trial says more
    off = replace(setting, draft_temperature=4.0)
    wrong = measure_acceptance(pair, PROMPTS, [off], **options)[0]
    assert (np.abs(wrong.counts.sum((0, 1)) / wrong.trials.sum() - b) > 4 * error).any()


def test_traversal_is_measured_as_it_accepts_in_a_tree():
    """What the levels promise for the tree is what decoding with `traversal` yields; what `sequoia`'s promise (the control) is less."""
    pair = toy_pair(noise=1.5, constant=True)
    rules = [Sampling(1.0, verifier=name) for name in ("sequoia", "traversal")]
    promised = []
    for each in measure_acceptance(pair, PROMPTS, rules, precision=0, rounds=8, tokens_per_prompt=60):
        profile = Profile(pooled(each.levels()), levels=each.levels())
        promised.append(expected_tokens(TREE, profile.by_level))
    decoder = SequoiaDecoder(pair.target, pair.draft, TREE)
    yields = [len(step.tokens) for prompt in PROMPTS for step in itertools.islice(decoder.steps(torch.tensor(prompt), 480, rules[1], 1), 150)]
    error = np.std(yields) / len(yields) ** 0.5
    assert promised[1] == pytest.approx(np.mean(yields), abs=4 * error)
    assert promised[0] < np.mean(yields) - 4 * error


def test_levels_are_where_the_text_stood():
    """A perfect greedy draft: every step goes down the first children of the tree, five levels, and all of them are accepted."""
    target = ToyModel(0, context=512)
    pair = replace(toy_pair(), target=target, draft=target)
    found = measure_acceptance(pair, PROMPTS[:2], [Sampling()], precision=0, tokens_per_prompt=50)[0]
    depth = TREE.depth
    assert depth == 5
    assert found.trials.tolist() == [[11, 10, 10, 20]] * 2  # ten steps of five tokens, and the root of the next one
    assert (found.counts[:, :, 0] == found.trials).all()
    assert found.counts[:, :, 1:].sum() == 0
    assert [level.trials for level in found.levels()] == [22, 20, 20, 40]


def classes_decoded(pair, sampling, tokens, off):
    """Accepted nodes by level and class in the text of `forced`, from the decoder's own paths; `off` tells the class from the ranks so far."""
    found = np.zeros((LEVELS, 2), int)
    for number, prompt in enumerate(PROMPTS):
        made = 0
        for step in SequoiaDecoder(pair.target, pair.draft, TREE).steps(torch.tensor(prompt), tokens, sampling, number):
            ranks = [int(TREE.ranks[node]) for node in step.path[1:]]
            for level in range(len(step.tokens)):  # the root, and the accepted nodes below it
                found[min(level, LEVELS - 1), off(ranks[:level])] += 1
            made += len(step.tokens)
            if made >= tokens:
                break
        found[0, 0] += 1  # the next step's root, on which the text ends
    return found


def test_classes_are_where_the_text_stood():
    """Counts by class are of the nodes that the decoder accepted; the last choice alone (the control) tells another class."""
    pair = toy_pair(noise=1.5)
    found = measure_acceptance(pair, PROMPTS, [PLAIN_RULE], precision=0, tokens_per_prompt=40)[0]
    apart = np.stack([found.trials - found.off.trials, found.off.trials], -1).sum(0)
    assert np.array_equal(apart, classes_decoded(pair, PLAIN_RULE, 40, lambda ranks: int(max(ranks, default=1) > 1)))
    assert not np.array_equal(apart, classes_decoded(pair, PLAIN_RULE, 40, lambda ranks: int([1, *ranks][-1] > 1)))
    assert (found.off.counts <= found.counts + 1e-9).all() and (found.off.trials[:, 0] == 0).all()
    for level in found.levels()[1:]:
        assert 0 < level.off.trials < level.trials
    assert found.levels()[0].off is None
    assert told_apart(found.levels())


@pytest.mark.parametrize("second", [False, True])
def test_a_draft_that_is_wrong_first_leaves_the_spine(second):
    """Of a draft that always ranks the target's token second, every accepted node is off the spine; of a perfect one, none."""
    target = ToyModel(0, context=512)

    class Second(ToyModel):
        def _covered(self, logits):
            best, following = logits.topk(2).values.unbind(-1)
            swapped = torch.where(logits == best[..., None], following[..., None] - 1e-3, logits)
            return swapped

    draft = Second(0, context=512) if second else target
    found = measure_acceptance(replace(toy_pair(), target=target, draft=draft), PROMPTS[:2], [Sampling()], precision=0, tokens_per_prompt=50)[0]
    assert found.off.trials[:, 1:].sum() == (found.trials[:, 1:].sum() if second else 0)
    assert found.counts[:, 0, 1 if second else 0].sum() == found.trials[:, 0].sum()


def test_traversal_lifts_both_classes():
    """The classes add up to the level, and each holds at most one accepted child a trial, however few there are."""
    pair = toy_pair(noise=1.5)
    rules = [Sampling(1.0, verifier=name) for name in ("sequoia", "traversal")]
    plain, lifted = measure_acceptance(pair, PROMPTS, rules, precision=0, tokens_per_prompt=40)
    assert lifted.off.counts[..., 0].sum() > plain.off.counts[..., 0].sum() * 1.001
    for level in lifted.levels()[1:]:
        assert sum(level.off.counts) <= level.off.trials + 1e-3
        assert sum(level.counts) - sum(level.off.counts) <= level.trials - level.off.trials + 1e-3
    Profile(pooled(lifted.levels()), levels=lifted.levels(), kinds=lifted.by_kind(["a", "b"]))
    few = Acceptance(np.array([[4, 2]]), np.array([[[2.0, 1.0], [1.9, 0.0]]]), None, Acceptance(np.array([[0, 1]]), np.array([[[0.0, 0.0], [1.4, 0.0]]])))
    assert few.levels()[1] == LevelCounts(2, (1.9, 0.0), Counts(1, (1.0, 0.0)))
    many = replace(few, off=Acceptance(np.array([[0, 1]]), np.array([[[0.0, 0.0], [0.2, 0.0]]])))
    assert many.levels()[1] == LevelCounts(2, (1.9, 0.0), Counts(1, (0.9, 0.0)))


def test_settings_share_text_and_keep_their_order():
    pair = toy_pair(covered=[0, 2, 3, 5, 7])
    settings = [PLAIN_RULE, Sampling(0.0), Sampling(1.0, verifier="topk"), replace(PLAIN_RULE, draft_temperature=2.0), Sampling(1.0, verifier="traversal")]
    found = measure_acceptance(pair, PROMPTS[:3], settings, precision=0, tokens_per_prompt=20)
    assert len({each.trials.tobytes() for each in (found[0], *found[2:])}) == 1
    assert found[0].trials.tobytes() != found[1].trials.tobytes()
    alone = measure_acceptance(pair, PROMPTS[:3], settings[:1], precision=0, tokens_per_prompt=20)[0]
    assert np.array_equal(alone.counts, found[0].counts)
    greedy = measure_acceptance(pair, PROMPTS[:3], settings[1:2], precision=0, tokens_per_prompt=20, rounds=5)[0]
    assert np.array_equal(greedy.counts, found[1].counts)  # greedy takes one round
    assert len({each.counts.tobytes() for each in found}) == 5  # traversal draws children anew


def test_precision_ends_the_work():
    pair = toy_pair()
    seen = []
    short = {"tokens_per_prompt": 16}
    found = measure_acceptance(pair, PROMPTS, [Sampling(1.0)], precision=0.1, rounds=50, on_prompt=lambda *now: seen.append(now), **short)[0]
    assert 8 <= len(found.trials) == seen[-1][0] < seen[-1][1] == 600
    assert found.precision() <= 0.1 < seen[-2][2].precision()
    assert Acceptance(found.trials[:7], found.counts[:7]).precision() == float("inf")
    # four times the prompts, half the interval
    long = measure_acceptance(pair, PROMPTS, [Sampling(1.0)], precision=0, rounds=12, **short)[0]
    quarter = np.mean([Acceptance(long.trials[i::4], long.counts[i::4]).precision() for i in range(4)])
    assert 1.5 < quarter / long.precision() < 2.7


def test_the_precision_holds():
    """Errors of 30 small measurements, against a large one, are as large as their 95 % intervals say: no narrower, no wider."""
    pair = toy_pair(constant=True)
    long = measure_acceptance(pair, PROMPTS, [Sampling(1.0)], precision=0, rounds=30, tokens_per_prompt=10)[0]

    def tokens(part):
        return expected_tokens(TREE, part.counts.sum((0, 1)) / part.trials.sum())

    parts = [Acceptance(long.trials[i::30], long.counts[i::30]) for i in range(30)]
    errors = np.array([(tokens(part) / tokens(long) - 1) / part.precision() for part in parts])
    assert 0.7 < 1.96 * np.mean(errors**2) ** 0.5 < 1.45  # of 30 standard normal numbers: 0.75 to 1.25 in 95 % of cases


def test_positions_of_one_text_count_for_less():
    """Independent positions are worth about what they are; where whole prompts accept alike, one prompt is one trial."""
    rng, trials = np.random.default_rng(0), np.full((400, LEVELS), 10)
    alone, alike = (rng.binomial(10, 0.4, (400, LEVELS)), 10 * np.repeat(rng.binomial(1, 0.4, (400, 1)), LEVELS, 1))
    effective = [Acceptance(trials, accepted[..., None] * np.array([1.0, 0.0, 0.0])).effective_trials() for accepted in (alone, alike)]
    assert effective[0] == pytest.approx(trials.sum(), rel=0.2)
    assert effective[1] == pytest.approx(400, rel=0.2)
    assert Acceptance(trials[:7], np.zeros((7, LEVELS, 3))).effective_trials() == trials[:7].sum()  # too few to tell


def profile_of_kinds(rng, kinds, prompts, spread=0.4):
    """A profile of so many prompts of so many kinds, and what a further kind accepts, [levels, ranks]: of as many prompts, and expected.

    Every kind, and every prompt within it, accepts more or less often, by a normal number of logits; it is told apart by nothing else.
    """
    trials = np.array([15, 10, 0, 0])
    kind = rng.normal(0.2, spread, kinds + 1)
    within = [0.6 * NormalDist().inv_cdf((i + 0.5) / 400) for i in range(400)]

    def shares(logits):
        return np.stack([share := 0.7 / (1 + np.exp(-logits)), 0.3 / 0.7 * share], -1)  # of the first and the second child

    drawn = np.repeat(shares(kind[:, None] + rng.normal(0, 0.6, (kinds + 1, prompts)))[:, :, None], LEVELS, 2)
    counts = rng.multinomial(trials, np.concatenate([drawn, 1 - drawn.sum(-1, keepdims=True)], -1))[..., :2].astype(float)
    found = Acceptance(np.tile(trials, (kinds * prompts, 1)), counts[:-1].reshape(-1, LEVELS, 2))
    names = [f"kind {number}" for number in range(kinds) for _ in range(prompts)]
    profile = Profile(pooled(found.levels()), found.effective_trials(), levels=found.levels(), kinds=found.by_kind(names))
    return profile, counts[-1, :, :2].sum(0) / (prompts * trials[:2, None]), shares(kind[-1] + np.array(within)).mean(0)[None]


@pytest.mark.parametrize("kinds", [4, 8])
def test_the_interval_for_a_new_kind_covers_one(kinds):
    """As many prompts of a further kind lie within it as often as it says, its expectation at least as often. The interval for prompts like
    the profiled ones (a control) holds neither, and with the normal law in place of Student's (another) four kinds are too few."""
    rng = np.random.default_rng(kinds)
    held = []
    for _ in range(300):
        profile, sample, expectation = profile_of_kinds(rng, kinds, 6)
        tree = solve(profile, 6, 4).tree
        wide, narrow = tree.plan.interval_new_kind.expected_tokens, tree.plan.interval.expected_tokens
        middle, factor = tree.plan.expected_tokens, Z95 / student95(kinds - 1)
        normal = [middle + (end - middle) * factor for end in wide]
        found, expected = expected_tokens(tree, sample), expected_tokens(tree, expectation)
        within = [(interval[0] <= value <= interval[1]) for interval in (wide, narrow, normal) for value in (found, expected)]
        held.append(within)
    wide, wide_expected, narrow, narrow_expected, normal, _ = np.mean(held, 0)
    assert wide == pytest.approx(0.95, abs=0.035) and wide <= wide_expected
    assert max(narrow, narrow_expected) < 0.7
    assert normal < (0.9 if kinds == 4 else 0.94)


def test_kinds_that_do_not_differ_widen_the_interval_less():
    rng = np.random.default_rng(0)
    widths = [
        [np.ptp(solve(profile_of_kinds(rng, 8, 6, spread)[0], 6, 4).plan.interval_new_kind.expected_tokens) for _ in range(20)] for spread in (0, 0.4, 0.8)
    ]
    assert np.median(widths[0]) < 0.8 * np.median(widths[1]) < 0.8 * np.median(widths[2])


def test_student95_is_the_quantile():
    exact = student.ppf(0.975, np.arange(3, 64))
    assert [student95(n) for n in range(3, 64)] == pytest.approx(exact, rel=2e-3) != pytest.approx([Z95] * 61, rel=2e-3)


def test_kinds_are_kept_where_every_prompt_has_one():
    """Three rounds of four prompts; a prompt without a kind, or a name for each prompt, says nothing."""
    trials = np.arange(12 * LEVELS).reshape(12, LEVELS)
    found = Acceptance(trials, trials[..., None] * np.array([0.5, 0.25]))
    by_kind = found.by_kind(["a", "b", "b", "c"])
    assert list(by_kind) == ["a", "b", "c"]
    assert [level.trials for level in by_kind["b"]] == trials.reshape(3, 4, LEVELS)[:, 1:3].sum((0, 1)).tolist()
    profile = Profile(pooled(found.levels()), 10, levels=found.levels(), kinds=by_kind)
    assert Profile.from_bytes(profile.to_yaml().encode(), "p") == profile
    assert solve(profile, 4, 3).plan.interval_new_kind is None  # three kinds
    assert solve(structs.replace(profile, kinds=found.by_kind(list("abcd"))), 4, 3).plan.interval_new_kind is not None
    assert found.by_kind(["a", None, "b", "c"]) == {}
    many = Acceptance(np.ones((MOST_KINDS + 1, LEVELS), int), np.zeros((MOST_KINDS + 1, LEVELS, 2)))
    assert many.by_kind([str(i) for i in range(MOST_KINDS + 1)]) == {} != many.by_kind([str(i % MOST_KINDS) for i in range(MOST_KINDS + 1)])


def test_interrupted_runs_go_on(tmp_path):
    """Stopped after five prompts: the rest alone is measured, and nothing tells the result from an uninterrupted one."""
    pair, journal = toy_pair(), tmp_path / "journal"
    whole = measure_acceptance(pair, PROMPTS, [PLAIN_RULE], precision=0, tokens_per_prompt=16)[0]

    def stop(done, most, found):
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_acceptance(pair, PROMPTS, [PLAIN_RULE], precision=0, tokens_per_prompt=16, journal=journal, on_prompt=stop)
    assert len(json.loads(journal.read_text())["done"]) == 5
    times = []
    again = measure_acceptance(pair, PROMPTS, [PLAIN_RULE], precision=0, tokens_per_prompt=16, journal=journal, on_prompt=lambda *_: times.append(1))[0]
    assert np.array_equal(again.counts, whole.counts) and np.array_equal(again.trials, whole.trials)
    kept = json.loads(journal.read_text())
    kept["done"]["0.0"][0]["counts"][0][0][0] = 0.5  # shows that it is read at all
    journal.write_text(json.dumps(kept))
    assert measure_acceptance(pair, PROMPTS, [PLAIN_RULE], precision=0, tokens_per_prompt=16, journal=journal)[0].counts[0, 0, 0] == 0.5
    for other in ("{", '{"work": 1}', '{"done": {}}', "[]"):
        journal.write_text(other)
        assert np.array_equal(measure_acceptance(pair, PROMPTS, [PLAIN_RULE], precision=0, tokens_per_prompt=16, journal=journal)[0].counts, whole.counts)
    elsewhere = measure_acceptance(pair, PROMPTS, [PLAIN_RULE], precision=0, tokens_per_prompt=16, journal=journal, seed=1)[0]
    assert not np.array_equal(elsewhere.counts, whole.counts)  # other work does not take what is kept


KILLED = """
import sys, time, pathlib, torch
from toys import PROMPTS, toy_pair
from sequoia_plan.profiler.acceptance import measure_acceptance
from sequoia_plan.runtime import Sampling
found = measure_acceptance(toy_pair(), PROMPTS, [Sampling(1.0)], precision=0, tokens_per_prompt=16, journal=pathlib.Path(sys.argv[1]),
                           on_prompt=lambda *_: (print("done", flush=True), time.sleep(float(sys.argv[2]))))[0]
print(found.counts.tobytes().hex())
"""


def test_kill_9_and_again(tmp_path):
    """A real process, killed without warning in the middle."""
    folder = str(Path(__file__).parent)
    command = [sys.executable, "-c", KILLED, str(tmp_path / "journal")]
    process = subprocess.Popen([*command, "60"], stdout=subprocess.PIPE, cwd=folder, text=True)
    assert process.stdout.readline() == "done\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert len(json.loads((tmp_path / "journal").read_text())["done"]) >= 1
    again = subprocess.run([*command, "0"], capture_output=True, text=True, cwd=folder, check=True).stdout.split()
    whole = measure_acceptance(toy_pair(), PROMPTS, [Sampling(1.0)], precision=0, tokens_per_prompt=16)[0]
    assert again.count("done") == len(PROMPTS)
    assert bytes.fromhex(again[-1]) == whole.counts.tobytes()


def test_what_cannot_be_measured():
    with pytest.raises(ArgumentError, match="method: found 'guess', expected forced or decoding"):
        measure_acceptance(toy_pair(), PROMPTS, [Sampling()], method="guess")
    with pytest.raises(SequoiaPlanError, match="prompt: 512 tokens"):
        measure_acceptance(toy_pair(), [[1] * 512], [Sampling()])


def counted(*rows, **changes):
    levels = tuple(LevelCounts(*row) for row in rows)
    return Profile((0.5, 0.1), 10, settings={"temperature": 0.6}, models={"target": {"name": "t"}}, levels=levels, **changes)


def test_merging_adds_counts_up():
    a, b = counted((10, (5.0, 1.0))), counted((30, (9.0, 3.5)), (10, (1.0, 0.5)))
    both = merge([a, b], ["a", "b"])
    assert both.levels == (LevelCounts(40, (14.0, 4.5)), LevelCounts(10, (1.0, 0.5)))
    assert both.trials == a.trials + b.trials == 20 and both.acceptance == (0.3, 0.1)
    assert both.by_level == ((0.35, 0.1125), (0.1, 0.05))
    assert merge([both]).levels == both.levels
    kinds = [{"code": a.levels}, {"code": (LevelCounts(30, (9.0, 3.5)), LevelCounts(0, (0.0, 0.0))), "story": (LevelCounts(0, (0.0, 0.0)), b.levels[1])}]
    named = [structs.replace(each, kinds=own) for each, own in zip((a, b), kinds, strict=True)]
    assert merge(named).kinds == {"code": (LevelCounts(40, (14.0, 4.5)), LevelCounts(0, (0.0, 0.0))), "story": kinds[1]["story"]}
    assert merge([named[0], b]).kinds == {} and merge([named[0], b]).levels == both.levels
    for other, part in (
        (structs.replace(a, settings={"temperature": 1.0}), "b: its settings differ from those of a"),
        (structs.replace(a, models={}), "b: its models differ"),
        (structs.replace(a, levels=()), "b: has no acceptance.levels"),
        (counted((10, (5.0,))), "b: 1 ranks, a has 2"),
    ):
        with pytest.raises(SequoiaPlanError, match=part):
            merge([a, other], ["a", "b"])
    with pytest.raises(ArgumentError, match="no profile"):
        merge([])


def test_merging_adds_classes_up_where_all_tell_them_apart():
    told = counted((20, (9.0, 1.0)), (10, (5.0, 1.0), Counts(4, (2.5, 0.5))))
    more = counted((30, (9.0, 1.0)), (12, (5.0, 2.0), Counts(6, (1.5, 0.5))), (2, (1.0, 0.0), Counts(0, (0.0, 0.0))))
    both = merge([told, more])
    assert both.levels[1:] == (LevelCounts(22, (10.0, 3.0), Counts(10, (4.0, 1.0))), more.levels[2])
    assert both.levels[0].off is None and told_apart(both.levels)
    assert merge([told, counted((1, (0.0, 0.0)))]).levels[1] == told.levels[1]  # `decoding` sees the root alone, whose class is known
    assert merge([told, counted((20, (9.0, 0.0)), (10, (5.0, 1.0)))]).levels[1] == LevelCounts(20, (10.0, 2.0))
    assert not told_apart(merge([told, counted((20, (9.0, 0.0)), (10, (5.0, 1.0)))]).levels)


def test_deepest_level_counts_with_all_below():
    assert TREE.depth > LEVELS
    assert counted((0, (0.0, 0.0)), (4, (2.0, 1.0))).by_level == ((0.5, 0.1), (0.5, 0.25))
