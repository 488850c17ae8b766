"""Trees by match: the search for looked-up spines and for portfolios, held against brute force."""

import json
from dataclasses import replace

import numpy as np
import pytest
from brute_force import DFLASH, EAGLE
from brute_force import TREES as SMALL_TREES
from commands import succeed
from msgspec import structs
from strategies import looking_up

from sequoia_plan.artifacts import (
    LANGUAGE_MODEL,
    Acceptance,
    ArgumentError,
    Counts,
    Latency,
    Profile,
    StreamCost,
    TokenTree,
    VerificationCost,
    load_tree,
    save_tree,
)
from sequoia_plan.artifacts.counts import ClassCounts
from sequoia_plan.artifacts.expected_tokens import expected_tokens
from sequoia_plan.artifacts.lookup import LookupCounts, MatchClass, Position, write_positions
from sequoia_plan.artifacts.prediction import prediction_for
from sequoia_plan.artifacts.step_time import StepTime
from sequoia_plan.artifacts.tree_file import CATALOG
from sequoia_plan.planner.report.plot import draw
from sequoia_plan.planner.report.tree_summary import print_summary
from sequoia_plan.planner.solving.match import by_match, recorded
from sequoia_plan.planner.solving.match.acceptance import (
    looked_up_acceptance,
    looked_up_as_visited,
    pooled_rates,
)
from sequoia_plan.planner.solving.match.looked_up import fastest_looked_up_tree
from sequoia_plan.planner.solving.match.portfolio import MatchProblem, fastest_portfolio
from sequoia_plan.planner.solving.match.replay import recorded_texts, replay, step_length_table
from sequoia_plan.planner.solving.problem import SpeedProblem
from sequoia_plan.planner.solving.promised import ratios_by_kind
from sequoia_plan.planner.solving.solve import solve

LEVELS, RANKS = 3, 2
"""Levels below the root's, and children of a node, of the trees in brute force."""


def random_rows(rng, looks_up=False):
    """p[level][class][rank]; with `looks_up`, rank 1 on the spine may be likelier or less likely
    than the ranks after it."""
    rows = -np.sort(-rng.dirichlet([0.6] * RANKS + [0.5], size=(LEVELS, 2))[:, :, :RANKS])
    if looks_up:
        rows[:, 0, 0] = rng.uniform(0.2, 0.95, LEVELS)
        rows[:, 0, 1:] = (1 - rows[:, :1, 0]) * rng.uniform(0.2, 0.9, (LEVELS, 1)) / (RANKS - 1)
    return rows


def random_times(rng):
    """Step times with any verification, draft and stream."""
    target = 0.02 + np.cumsum(rng.uniform(0.0002, 0.008, 7))
    draft = np.cumsum(rng.uniform(0.0005, 0.006, 7))
    costs = [None, *(VerificationCost(0.001, by_node) for by_node in (0, 0.0001, 0.0005))]
    latency = Latency(
        {n: float(seconds) for n, seconds in enumerate(target, 1)},
        {n: float(seconds) for n, seconds in enumerate(draft, 1)},
        0.001,
        verification=costs[rng.integers(len(costs))],
        stream=[None, None, StreamCost(0.03, 1000)][rng.integers(3)],
    )
    return StepTime(latency, [LANGUAGE_MODEL, DFLASH, EAGLE][rng.integers(3)])


def possible_trees(times, looks_up, max_size):
    """Every tree within the limits."""
    deepest = times.drafting.max_depth or LEVELS + 1
    for tree in SMALL_TREES:
        if tree.size <= max_size and tree.depth <= LEVELS + 1 and tree.branching <= RANKS:
            candidate = TokenTree(tree.parents, looks_up=looks_up)
            if candidate.num_drafted_levels < deepest:
                yield candidate


def highest_speed(problems, shares, times, max_size):
    """Tokens a second of the fastest portfolio: Dinkelbach's iteration over lists of all trees."""
    figures = []
    for problem in problems:
        points = []
        for part in filter(None, (problem.drafted, problem.looked_up)):
            for tree in possible_trees(times, part is problem.looked_up, max_size):
                seconds = times.step_seconds(tree) + part.seconds_beside(tree)
                points.append((expected_tokens(tree, part.rates), seconds))
        figures.append(np.array(points))
    speed = 0.0
    for _ in range(100):
        best = [points[np.argmax(points[:, 0] - speed * points[:, 1])] for points in figures]
        tokens, seconds = shares @ np.array(best)
        speed = tokens / seconds
    return speed


@pytest.mark.parametrize("seed", [*range(24), 900, 1165])
def test_the_fastest_looked_up_tree_is_that_of_brute_force(seed):
    """No tree with a looked-up spine is faster than the bound, and the tree found is the fastest,
    alone or beside other steps; of the last two, a search finds one of fewer passes."""
    rng = np.random.default_rng(seed)
    rows, times = random_rows(rng, looks_up=True), random_times(rng)
    others = rng.uniform(0, (5, 0.2)) if seed % 2 else (0.0, 0.0)
    problem = SpeedProblem(rows, int(rng.integers(2, 8)), times, *others)
    result = fastest_looked_up_tree(problem, problem.evaluate(TokenTree.chain(1)))
    trees = possible_trees(times, True, problem.budget)
    best = max(problem.evaluate(tree).speed for tree in trees)
    assert result.tree.size <= problem.budget
    assert result.tree.depth <= LEVELS + 1
    assert result.tree.branching <= RANKS
    assert result.tree.looks_up or result.tree.size == 1
    assert result.bound >= best * (1 - 1e-12)
    assert result.speed == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("seed", range(16))
def test_no_portfolio_is_faster_than_the_solved_one(seed):
    """Brute force over all portfolios of two or three match classes, in some of which the draft
    has to catch up after a step that left many tokens unread."""
    rng = np.random.default_rng(100 + seed)
    times = random_times(rng)
    catch_ups = [(0.0,), (0.0, 0.0, 0.001, 0.004, 0.006), (0.001, 0.002, 0.002, 0.003)]

    def problem(looks_up, seconds=(0.0,)):
        rows = random_rows(rng, looks_up=looks_up)
        return SpeedProblem(rows, 6, times, catch_up=seconds)

    problems = [MatchProblem(0, problem(False))]
    for match_length in (1, 3)[: 1 + seed % 2]:
        parts = [problem(looks_up, catch_ups[rng.integers(3)]) for looks_up in (False, True)]
        problems.append(MatchProblem(match_length, *parts))
    shares = rng.dirichlet([1.0] * len(problems)) * 0.999 + 0.001 / len(problems)
    result = fastest_portfolio(problems, shares, [TokenTree.chain(1)] * len(problems))
    best = highest_speed(problems, shares, times, 6)
    assert result.bound >= best * (1 - 1e-12)
    assert result.speed == pytest.approx(best, rel=1e-9)


def test_shares_by_hand():
    """A drafted chain of one token that is right half of the time, and a looked-up chain of two.

    The steps begin at position 0; at 1 with probability .5; at 2 with .5 + .25; at 3 with .25. From
    2 the lookup chain takes three tokens, from 3 its second token is wrong. All ways meet at 5.
    """
    text = [Position(0, 0), Position(0, 0), Position(2, 2), Position(2, 1), Position(0, 0)]
    text += [Position(0, 0)] * 3  # the last steps do not count
    trees = [TokenTree.chain(2), looking_up(0, 1)]
    rows = [np.array(rates) for rates in ([[[0.5]]], [[[0.9], [0.5]]])]
    result = replay(recorded_texts([write_positions(text)], (0, 2)), trees, rows)
    assert result.shares.tolist() == pytest.approx([0.6, 0.4])
    # from the first step on: 0 to 1, 1 to 2 or 3, 0 to 2
    assert result.transitions.tolist() == [pytest.approx([0.5, 1.0]), pytest.approx([0, 0])]
    assert result.tokens_per_step == pytest.approx(2.0)


@pytest.mark.parametrize("drafting", [LANGUAGE_MODEL, EAGLE])
def test_the_draft_catches_up_after_a_step_that_it_had_no_part_in(drafting):
    """A draft reads in its first pass what a step with the same tree may have accepted, and what
    other steps may have accepted in a pass before it."""
    latency = Latency({1: 0.02}, {n: 0.001 * n for n in (1, 2, 4, 8)})
    times, chains = StepTime(latency, drafting), [TokenTree.chain(n) for n in range(6)[1:]]
    spine = looking_up(*range(6))
    with_sibling = looking_up(0, 0, 1, 3)

    def seconds(last_tree, tree):
        return times.catch_up_seconds(times.num_unread(last_tree), tree.num_drafted_levels)

    assert all(seconds(tree, tree) == seconds(tree, spine) == 0 for tree in SMALL_TREES)
    assert seconds(spine, chains[2]) == 0.008
    assert seconds(with_sibling, chains[1]) == 0.004
    # the feature draft's deeper passes are read once more; those of a language model are not
    assert seconds(chains[4], chains[1]) == 0.004 * (drafting is EAGLE)


def test_a_draft_catches_up_with_accepted_tokens_only():
    """Of ten steps, nine accept the root alone, and one accepts five looked-up tokens, too."""
    visits = np.array([9.0, 0, 0, 0, 0, 1.0])
    seconds = recorded._looked_up_catch_up(np.array([0, 0, 0.001, 0.002, 0.003]), visits)
    assert seconds == pytest.approx((0, 0, 0.0001, 0.0002, 0.0003))


def test_a_drafted_sibling_gets_its_chance_once_the_looked_up_token_is_rejected():
    """The root's looked-up child has p = .6, its drafted one .2 and a child of its own with .3."""
    table = step_length_table(looking_up(0, 0, 2), np.array([[[0.6, 0.2], [0.3, 0.0]]]))
    assert table.tolist() == [pytest.approx([0.5, 0.35, 0.15]), pytest.approx([0, 1, 0])]


def test_a_tree_that_looks_up_nothing_goes_as_far_as_its_acceptance_says():
    """The expected length of a step is the tree's expected tokens."""
    rows = random_rows(np.random.default_rng(0))
    for tree in SMALL_TREES[:60]:
        if tree.depth <= LEVELS + 1:
            lengths = step_length_table(tree, rows)[0]
            mean = float(lengths @ np.arange(1, len(lengths) + 1))
            assert mean == pytest.approx(expected_tokens(tree, rows))


def test_a_long_run_counts_as_the_steps_that_it_takes():
    """Of 100 steps at looked-up tokens, half have a run of none and half one of two or more."""
    rows = np.array([[[0.9, 0.05], [0.5, 0.2]]] * 2)
    visits = np.array([50.0, 0.0, 50.0])
    visited = looked_up_as_visited(rows, visits).tolist()
    # of the looked-up tokens that are wrong, half have the drafted one right, as before
    assert visited == [[[0.5, 0.25], [0.5, 0.2]], [[1.0, 0.0], [0.5, 0.2]]]
    assert looked_up_as_visited(rows, visits / 10) is rows


@pytest.mark.parametrize(
    ("trials", "accepted", "rates"),
    [
        ([200, 40, 20], [100, 30, 15], [0.5, 0.75, 0.75]),
        ([200, 40, 0], [100, 20, 0], [0.5, 0.5, 0.5]),  # too few take the level above
    ],
)
def test_sparse_levels_have_one_vector(trials, accepted, rates):
    counts = np.array(trials, float), np.array(accepted, float)[:, None]
    assert pooled_rates(*counts)[:, 0].tolist() == rates


def test_classes_of_a_looked_up_tree_are_not_mixed():
    """A looked-up token and a drafted one have probabilities of their own, however few counts."""
    counts = Counts([[100, 0], [80, 60]], [[[80, 10], [0, 0]], [[70, 2], [6, 3]]])
    drafted = Acceptance.given([0.5, 0.1])
    rates = looked_up_acceptance(MatchClass(2, None, counts), drafted).rates.tolist()
    assert rates == [[[0.8, 0.1], [0.1, 0.05]], [[0.875, 0.025], [0.1, 0.05]]]
    assert looked_up_acceptance(MatchClass(2), drafted) is None


def lookup_profile(**changes):
    """A profile with two match classes, in which looked-up tokens are mostly right."""
    drafted = Counts([[900, 0], [400, 100]], [[[450, 120], [0, 0]], [[220, 50], [40, 10]]])
    right = np.array([[400, 360, 10], [360, 330, 8], [330, 310, 5], [310, 295, 4.0]])
    looked_up = Counts(
        np.stack([right[:, 0], np.zeros(4)], 1), np.stack([right[:, 1:], np.zeros((4, 2))], 1)
    )
    no_match = [Position(0, 0)] * 10
    copied = [Position(2, run) for run in range(12, -1, -1)]
    text = write_positions([*no_match, *copied, *no_match, *no_match])
    classes = (MatchClass(0, drafted), MatchClass(2, drafted, looked_up))
    profile = Profile(
        Acceptance.counted(drafted),
        latency=Latency({n: 0.03 + 0.001 * n for n in range(1, 20)}, {n: 0.006 for n in (1, 19)}),
        settings={"temperature": 0.0},
        lookup=LookupCounts(classes, {"all": (text,) * 3}),
    )
    return structs.replace(profile, **changes)


def solved(profile=None, **limits):
    """The solution of a profile with lookup, of `lookup_profile()` if none is given."""
    return solve(profile or lookup_profile(), **{"budget": 16, "depth": 10} | limits)


def saved(tree, folder):
    """The tree as its file has it."""
    save_tree(tree, folder / "tree")
    return load_tree(folder / "tree")


def test_a_profile_with_lookup_counts_gives_trees_by_match(tmp_path):
    """Through both files: the plan promises what its classes come to, and more than one tree."""
    lookup_profile().save(tmp_path / "profile.yaml")
    profile = Profile.load(tmp_path / "profile.yaml")
    assert profile == lookup_profile()
    tree = solved(profile).tree
    plan = tree.plan
    assert not tree.looks_up and tree.by_match[2].looks_up
    assert [part.match_length for part in plan.by_match] == [0, 2]
    assert plan.predicted_speedup > plan.tree_speedup
    assert saved(tree, tmp_path) == tree and saved(tree, tmp_path).plan == plan
    # the recorded texts, decoded again with these trees, have the plan's shares
    trees = [tree.for_match(part.match_length) for part in plan.by_match]
    acceptances = [part.acceptance.at_depth(10) for part in plan.by_match]
    shares = replay(recorded_texts(profile.lookup.texts["all"], (0, 2)), trees, acceptances).shares
    assert shares.tolist() == pytest.approx([part.share for part in plan.by_match])


@pytest.mark.parametrize(
    ("temperature", "speedup", "bound"),
    [("t0", 1.81258055, 1.90841289), ("t06", 1.56135086, 1.572262)],
)
def test_the_catalogs_profiles_have_trees_as_fast_as_ever(temperature, speedup, bound):
    """What a change of the search finds and proves is not below what was found before."""
    name = f"smollm2-135m-epyc-2-cores-{temperature}.yaml"
    plan = solve(Profile.load(CATALOG / "profiles" / name), budget=768, depth=20).plan
    assert speedup <= plan.predicted_speedup <= plan.speedup_bound <= bound


def test_each_context_has_a_plan_of_its_own(tmp_path, capsys):
    """As solving for each alone; a text takes the one nearest to its length, in ratio."""
    profile = lookup_profile()
    short = structs.replace(profile.latency, context=256)
    slow = {size: seconds * (1 + size) for size, seconds in short.target.items()}
    long = structs.replace(short, context=4096, target=slow)
    profile = structs.replace(profile, latency=short, longer=(long,))
    profile.save(tmp_path / "profile.yaml")
    assert Profile.load(tmp_path / "profile.yaml") == profile
    tree = saved(solved(profile).tree, tmp_path)
    alone = [structs.replace(profile, latency=each, longer=()) for each in (short, long)]
    for length, of_context in ((1023, alone[0]), (1024, alone[1])):
        expected, found = solved(of_context).tree, tree.for_context(length)
        assert found == replace(expected, by_context=found.by_context)
        assert found.plan.predicted_speedup == expected.plan.predicted_speedup
        assert found.plan.profile_sha256 == profile.sha256
    assert tree.for_context(1024) != replace(tree, by_context={})
    print_summary(tree)
    assert "texts of 1024+ tokens" in capsys.readouterr().out


def of_kinds(texts):
    """The profile with prompts of several kinds: their recorded texts, all accepted alike."""
    profile, number = lookup_profile(), sum(map(len, texts.values()))
    counts = profile.acceptance.counts
    prompt = ClassCounts(int(counts.trials.sum()), tuple(counts.accepted.sum((0, 1)).tolist()))
    return structs.replace(
        profile,
        acceptance=Acceptance.counted(Counts(number * counts.trials, number * counts.accepted)),
        lookup=structs.replace(profile.lookup, texts=texts),
        prompts={kind: (prompt,) * len(of_kind) for kind, of_kind in texts.items()},
    )


COPIED = write_positions([Position(2, run) for run in range(60, 0, -1)])
DIFFERENT = write_positions([Position(0, 0)] * 60)


def test_each_kind_of_prompts_has_a_speedup_of_its_own(tmp_path, capsys):
    """What repeats is faster, of several texts their median is taken, and without kinds there are
    no such figures."""
    tree = solved(of_kinds({"copies": (COPIED, DIFFERENT, COPIED), "others": (DIFFERENT,)})).tree
    plan = tree.plan
    speedups, tokens = plan.speedup_by_kind, plan.tokens_by_kind
    assert speedups["others"] < plan.predicted_speedup < speedups["copies"]
    assert 1 <= tokens["others"] < plan.expected_tokens < tokens["copies"]
    slow, *fast = plan.text_speedups["copies"]
    assert slow < fast[0] == fast[1] == pytest.approx(speedups["copies"])
    assert saved(tree, tmp_path).plan == plan
    print_summary(tree)
    assert "\n  copies " in capsys.readouterr().out
    assert solved().plan.speedup_by_kind == {}


def test_looking_for_the_match_takes_time():
    """In every step but plain decoding's, and in what bench predicts from the plan."""
    cost = VerificationCost(0.001, 0.0, lookup=0.002)
    latency = structs.replace(lookup_profile().latency, verification=cost, plain=0.03)
    profile = lookup_profile(latency=latency)
    tree, alone = solved(profile).tree, solved(profile, lookup=False).tree
    for part in tree.plan.by_match:
        size = tree.for_match(part.match_length).size
        assert part.step_seconds >= latency.target[size] + 0.003
    times = StepTime(profile.latency, profile.drafting)
    assert alone.plan.step_seconds == pytest.approx(times.step_seconds(alone))
    prediction = prediction_for(tree, "sequoia", tree.plan)
    assert prediction.speedup == pytest.approx(tree.plan.predicted_speedup)
    assert times.plain_seconds() == times.step_seconds(TokenTree.chain(1)) == 0.03
    assert prediction_for(TokenTree.chain(1), "sequoia", tree.plan).speedup == pytest.approx(1)
    # the single tree is promised without that, and taken where the others gain less than it costs
    assert tree.plan.tree_speedup == pytest.approx(alone.plan.predicted_speedup, rel=0.01)
    few = write_positions([*[Position(0, 0)] * 60, Position(2, 1), *[Position(0, 0)] * 60])
    rare = structs.replace(profile, lookup=LookupCounts(profile.lookup.classes, {"all": (few,)}))
    assert solved(rare).tree == alone and solved(rare).tree.plan.speedup_bound


def test_the_picture_names_every_tree(tmp_path):
    tree = solved().tree
    draw(tree, tmp_path / "trees.svg")
    draw(tree, tmp_path / "again.svg")
    picture = (tmp_path / "trees.svg").read_text()
    assert picture == (tmp_path / "again.svg").read_text()
    for part, title in zip(tree.plan.by_match, ("no token", "2+ tokens"), strict=True):
        size = tree.for_match(part.match_length).size
        assert f"<!-- match of {title} -->" in picture and f"<!-- {size} nodes, " in picture


def test_drafted_children_of_a_kind_are_accepted_as_often_as_the_kind_says():
    """Half of the acceptance of all prompts, and a looked-up token that only the texts decide."""
    numbers = {"half": (2.5e5, 0.65e5), "more": (7.5e5, 1.95e5)}
    prompts = {kind: (ClassCounts(10**6, counts),) for kind, counts in numbers.items()}
    acceptance = Acceptance.counted(Counts([[2 * 10**6]], [[[10e5, 2.6e5]]]))
    ratios, (of_prompt,) = ratios_by_kind(Profile(acceptance, prompts=prompts))["half"]
    assert ratios == pytest.approx([0.5, 0.5], rel=1e-3) and (of_prompt == 0.5).all()
    drafted, looked_up = (
        SpeedProblem(np.array([rows]), 9, StepTime(Latency({1: 1.0}, {1: 1.0})))
        for rows in ([[0.5, 0.1]], [[0.8, 0.1], [0.6, 0.2]])
    )
    of_kind = recorded._for_kind(MatchProblem(2, drafted, looked_up), ratios)
    assert np.ravel(of_kind.drafted.rates) == pytest.approx([0.25, 0.05], rel=1e-3)
    assert np.ravel(of_kind.looked_up.rates) == pytest.approx([0.8, 0.05, 0.3, 0.1], rel=1e-3)


def test_exchanging_trees_raises_the_speed_on_the_recorded_texts():
    """From no speculation in any class, exchanges alone come to looked-up chains where text repeats
    itself, and never to slower trees."""
    profile = lookup_profile()
    times = StepTime(profile.latency, profile.drafting)
    problem = SpeedProblem(profile.acceptance.at_depth(10), 16, times)
    recording = recorded.recorded(profile, problem, 10, None)
    start = recording.decode((TokenTree.chain(1),) * 2)
    assert start.speed == pytest.approx(1 / times.plain_seconds())
    drafted = {TokenTree.chain(2), TokenTree.star(2)}
    better = by_match._with_trees_exchanged(recording, start, drafted)
    assert better.speed > 1.2 * start.speed
    assert not better.trees[0].looks_up
    assert better.trees[1].looks_up
    assert recording.decode(better.trees).speed == better.speed


def test_lookup_can_be_left_out():
    alone = solved(lookup=False).tree
    assert alone == solved(lookup_profile(lookup=None)).tree
    assert not alone.by_match and not solved(objective="tokens").plan.by_match


def test_a_class_with_the_tree_of_the_one_before_it_is_left_out():
    """Equal trees are stored once, and a tree that comes back is stored again."""
    drafted, spine = TokenTree.chain(3), looking_up(*range(4))
    trees = {0: drafted, 1: drafted, 2: spine, 3: spine, 5: drafted}
    tree = by_match._with_by_match(trees)
    assert list(tree.by_match) == [2, 5]
    for length, expected in trees.items():
        found = tree.for_match(length)
        assert (found.size, found.looks_up) == (expected.size, expected.looks_up)


def test_the_terminal_tells_classes_and_spines_apart(tmp_path, monkeypatch):
    """`solve` and `show` print a line for each class, and draw looked-up nodes as such."""
    monkeypatch.chdir(tmp_path)
    lookup_profile().save("profile.yaml")

    def output(*words):
        return succeed(*words).output

    limits = ("--budget", "16", "--depth", "10")
    assert "match of 2+ tokens" in output("solve", *limits)
    drawing = output("show")
    assert drawing.count("  looked up\n") == load_tree("tree.safetensors").by_match[2].depth - 1
    assert "without prompt lookup" in drawing and "slower than plain" in drawing
    parts = json.loads(output("solve", *limits, "--json"))["by_match"]
    assert [part["looks_up"] for part in parts] == [False, True]
    assert sum(part["share"] for part in parts) == pytest.approx(1)
    assert json.loads(output("solve", *limits, "--no-lookup", "--json"))["by_match"] == []


def test_without_a_draft_the_spines_alone_are_planned(tmp_path):
    tree = solved(draft=False).tree
    assert tree.size == 1 and saved(tree, tmp_path) == tree
    assert [spine.num_drafted_levels for spine in tree.by_match.values()] == [0]
    assert "draft" not in tree.plan.models
    assert tree.plan.predicted_speedup <= solved().plan.predicted_speedup
    for changes, options in (({"lookup": None}, {}), ({}, {"lookup": False})):
        with pytest.raises(ArgumentError, match="draft none: found"):
            solved(lookup_profile(**changes), draft=False, **options)
