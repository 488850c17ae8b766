"""The verifier is chosen with the tree: the measurements, the choice, and who follows it."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from brute_force import TREES as SMALL
from enumeration import CASES, Case, without_replacement
from msgspec import structs
from toys import PROMPTS, ToyModel, toy_pair
from toys import SMALL_TREES as TREES

from sequoia_plan.artifacts import (
    ArgumentError,
    Latency,
    LevelCounts,
    Profile,
    SequoiaPlanError,
    TokenTree,
    VerificationCost,
    VerifierAcceptance,
    load_tree,
    save_tree,
)
from sequoia_plan.artifacts.cost import (
    StepTime,
    acceptance_rows,
    expected_tokens,
    expected_walk,
    num_rounds,
)
from sequoia_plan.artifacts.merge import merge, pooled
from sequoia_plan.artifacts.prompts import Prompt
from sequoia_plan.planner import solve
from sequoia_plan.planner.solving import solve as solving
from sequoia_plan.profiler.acceptance import measure_acceptance
from sequoia_plan.profiler.latency import LatencyMeter
from sequoia_plan.profiler.measure import measure
from sequoia_plan.profiler.methods import path_probs
from sequoia_plan.profiler.observed import (
    LEVELS,
    TREE,
    ObservedAcceptance,
    as_traversal_accepts,
    max_children_by_level,
)
from sequoia_plan.profiler.verification import (
    ShapeTimer,
    bushy,
    round_order,
    steered_acceptance,
)
from sequoia_plan.runtime import Sampling, SequoiaDecoder
from sequoia_plan.runtime.base.sampling import DEFAULT_VERIFIER
from sequoia_plan.runtime.captured_step import CapturedStep
from sequoia_plan.runtime.verify import VERIFIERS, TreeIndex, traversal
from sequoia_plan.runtime.verify.fused_verifier import FusedVerifier

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
]
BOTH = [Sampling(1.0, verifier="traversal"), Sampling(1.0, verifier="sequoia")]


@pytest.fixture
def pair():
    """Toy models that also have embeddings, which the prompt's tokens are drawn from."""
    pair = toy_pair(noise=1.5)
    pair.target.get_input_embeddings = lambda: torch.nn.Embedding(8, 2)
    return pair


# The choice


def two_verifiers(rng):
    """A profile of both; which of them wins differs from draw to draw."""
    rows = -np.sort(-rng.dirichlet(np.ones(4), 3)[:, :3], axis=1) * 0.9
    more = rows * (1 + rng.uniform(0, 0.1, (3, 1)))
    target, drafts = (np.cumsum(rng.uniform(0.0002, 0.004, 7)) for _ in range(2))
    costs = {
        name: VerificationCost(0.0005, *rng.uniform(0, 0.002, 2).tolist(), 0.0001, order)
        for name, order in (("traversal", "level"), ("sequoia", "tree"))
    }
    latency = Latency(
        {n: 0.02 + float(target[n - 1]) for n in range(1, 8)},
        {n: float(drafts[n - 1]) for n in range(1, 7)},
        verification=costs["traversal"],
    )

    def levels(p):
        return tuple(LevelCounts(10_000, tuple((10_000 * row).tolist())) for row in p)

    other = VerifierAcceptance(pooled(levels(rows)), 900, levels(rows), {}, costs["sequoia"])
    return Profile(
        pooled(levels(more)),
        900,
        latency,
        {"temperature": 0.6, "verifier": "traversal"},
        levels=levels(more),
        verifiers={"sequoia": other},
    )


def fastest_of_all(profile):
    """(tokens a second, verifier) of every tree and verifier, by brute force."""
    found = []
    for name in profile.all_verifiers:
        one = profile.for_verifier(name)
        rows = acceptance_rows(one.acceptance_by_level, 4)
        fits = [tree for tree in SMALL if tree.depth <= 4 and tree.branching <= 3]
        found += [
            (expected_tokens(tree, rows) / StepTime.from_measured(one).step_seconds(tree), name)
            for tree in fits
        ]
    return max(found)


def test_the_fastest_tree_and_verifier_are_found():
    """The choice is compared with brute force over all trees of up to seven nodes.

    Each of the two verifiers is the faster one in some of the cases.
    """
    rng, taken = np.random.default_rng(0), []
    for _ in range(25):
        profile = two_verifiers(rng)
        speed, name = fastest_of_all(profile)
        plan = solve(profile, 7, 4).plan
        assert plan.settings["verifier"] == name
        assert plan.expected_tokens / plan.step_seconds == pytest.approx(
            speed, rel=1e-5
        )  # acceptance is rounded to six digits
        (other, alternative), alone = (
            *plan.alternatives.items(),
            [solve(profile, 7, 4, verifier=each).plan for each in profile.all_verifiers],
        )
        speeds = {
            each.settings["verifier"]: each.expected_tokens / each.step_seconds for each in alone
        }
        assert alternative.advantage == pytest.approx(speeds[name] / speeds[other]) and {
            name,
            other,
        } == set(profile.all_verifiers)
        assert all(each.alternatives == {} for each in alone)
        taken.append(name)
    assert 3 < taken.count("sequoia") < 22


def test_a_choice_that_forgets_verification_is_noticed(monkeypatch):
    """The control: with the verification time of one verifier for both, the choice is slower.

    The verifier that accepts more is then always taken.
    """
    rng, right = np.random.default_rng(0), Profile.for_verifier
    monkeypatch.setattr(
        Profile,
        "for_verifier",
        lambda self, name: structs.replace(right(self, name), latency=self.latency),
    )
    wrong = [
        solve(profile, 7, 4).plan.settings["verifier"]
        for profile in (two_verifiers(rng) for _ in range(12))
    ]
    monkeypatch.undo()
    rng = np.random.default_rng(0)
    best = [fastest_of_all(two_verifiers(rng))[1] for _ in range(12)]
    assert set(wrong) == {"traversal"} != set(best)


def test_tokens_and_baselines_are_compared_as_well():
    profile = two_verifiers(np.random.default_rng(0))
    most = solve(profile, 7, 4, objective="tokens")
    assert most.plan.settings["verifier"] == "traversal"
    other = solve(profile, 7, 4, objective="tokens", verifier="sequoia")
    assert most.plan.alternatives["sequoia"].advantage == pytest.approx(
        most.plan.expected_tokens / other.plan.expected_tokens
    )
    chain = [
        solve(profile, 3, 3, baseline="chain", verifier=name).plan for name in profile.all_verifiers
    ]
    speeds = {plan.settings["verifier"]: plan.expected_tokens / plan.step_seconds for plan in chain}
    assert solve(profile, 3, 3, baseline="chain").plan.settings["verifier"] == max(
        speeds, key=speeds.get
    )


def test_a_verifier_that_was_not_measured_is_refused():
    profile = two_verifiers(np.random.default_rng(0))
    with pytest.raises(
        ArgumentError,
        match="verifier: found 'topk', expected traversal or sequoia, which the profile has; "
        "profile --verifier measures it",
    ):
        solve(profile, 7, 4, verifier="topk")
    with pytest.raises(ArgumentError, match="verifier: found 'sequoia' with an acceptance vector"):
        solve([0.5, 0.2], 4, 3, verifier="sequoia")


# By how much


def measured(rng, prompts, truth, ratio, clock):
    """A profile as `measure` makes it, of prompts of which some are easier than others.

    They accept by `truth` (p by level, of `sequoia`).
    """
    trials = np.tile([12, 6, 3, 2], (prompts, 1))
    easier = np.exp(0.1 * rng.normal(size=(prompts, 1, 1)))
    p = truth[None] * np.minimum(easier, 1.4)
    drawn = rng.multinomial(trials, np.concatenate([p, 1 - p.sum(-1, keepdims=True)], -1))[
        ..., :-1
    ].astype(float)
    past = np.clip(
        np.cumprod(p.sum(-1), 1) * np.exp(0.3 * rng.normal(size=(prompts, LEVELS))), 0, None
    )
    more = np.cumprod(ratio[None] * np.exp(0.05 * rng.normal(size=(prompts, LEVELS))), 1)
    ones = np.ones((prompts, 1))
    reached = np.stack([np.concatenate([ones, past], 1), np.concatenate([ones, past * more], 1)], 1)
    found = {
        "sequoia": ObservedAcceptance(trials, drawn),
        "traversal": ObservedAcceptance(
            trials, as_traversal_accepts(drawn, trials, reached.sum(0))
        ),
    }
    latency = Latency(clock["target"], clock["draft"], verification=clock["traversal"])
    judged = {
        name: VerifierAcceptance(
            pooled(each.levels()), each.effective_trials(), each.levels(), {}, clock[name]
        )
        for name, each in found.items()
    }
    own = judged["traversal"]
    settings = {"temperature": 0.6, "verifier": "traversal"}
    return Profile(
        own.vector,
        own.trials,
        latency,
        settings,
        levels=own.levels,
        verifiers={"sequoia": judged["sequoia"]},
    )


TRUTH = np.array([[0.45, 0.1, 0.05], [0.5, 0.1, 0.05], [0.5, 0.1, 0.0], [0.5, 0.1, 0.0]])
RATIO = np.array([1.0, 1.03, 1.05, 1.05])
CLOCK = {
    "target": {1: 0.04, 16: 0.045},
    "draft": {1: 0.002, 16: 0.002},
    "traversal": VerificationCost(0.0005, 0.0002, 0.0, 0.0, "level"),
    "sequoia": VerificationCost(0.0005, 0.0002, 0.0, 0.0, "tree"),
}


def test_verification_that_is_not_sure_widens_the_interval():
    rng = np.random.default_rng(0)
    profile = measured(rng, 40, TRUTH, RATIO, CLOCK)
    unsure = {name: structs.replace(CLOCK[name], error=0.5) for name in ("traversal", "sequoia")}
    alternative = structs.replace(profile.verifiers["sequoia"], verification=unsure["sequoia"])
    less_sure = structs.replace(
        profile,
        latency=structs.replace(profile.latency, verification=unsure["traversal"]),
        verifiers={"sequoia": alternative},
    )

    def interval(profile, **options):
        return solve(profile, 12, 5, **options).plan.interval

    sure_speedup, unsure_speedup = (
        interval(each).predicted_speedup for each in (profile, less_sure)
    )
    assert np.ptp(np.log(unsure_speedup)) > 1.1 * np.ptp(np.log(sure_speedup))
    assert interval(profile, smooth=True) is None


# What is measured


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tree", TREES)
def test_the_way_through_each_node_is_known_before_what_is_below_it_is_drawn(tree, case):
    """On average over all draws, it is the probability that the path ends in the node's subtree.

    The control: the product of the acceptance along the path is not.
    """
    setting = Case(TREES[tree], seed=1, **CASES[case])
    size, index = setting.tree.size, setting.index
    found, control, expected = np.zeros(size), np.zeros(size), np.zeros(size)
    d2t = setting.d2t_tensor()
    for drawn, tokens, chance in setting.assignments(without_replacement):
        p, q, children = setting.verifier_inputs(drawn, tokens)
        inputs = (p.__getitem__, q, children, index, d2t)
        end_probs = VERIFIERS["traversal"].acceptance(*inputs).end_probs.numpy()
        expected += chance * end_probs @ setting.tree.attention_mask
        residual = traversal.residual_after_children(*inputs)
        subtree_probs = traversal.subtree_probs(residual, index)
        found += chance * path_probs(subtree_probs, index).numpy()
        control += chance * subtree_probs[index.paths].prod(-1).numpy()
    assert found == pytest.approx(expected, abs=1e-12)
    if case == "random":
        assert np.abs(control - expected).max() > 1e-3 or (tree == "chain" and size == 2)


def test_both_are_measured_on_the_same_draws():
    """Counts differ by the acceptance ratio alone: not at all at the root, where the verifiers
    are the same, and more below it."""
    traversal_acceptance, plain = measure_acceptance(
        toy_pair(noise=1.5), PROMPTS, BOTH, precision=0, rounds=2, tokens_per_prompt=40
    )
    assert np.array_equal(traversal_acceptance.trials, plain.trials)
    ratio = traversal_acceptance.counts.sum(0)[:, 0] / plain.counts.sum(0)[:, 0]
    assert ratio[0] == pytest.approx(1) and min(ratio) > 0.999 and ratio[2] > 1.005
    assert tuple(max_children_by_level(TREE)) == (3, 2, 2, 1)
    assert np.allclose(traversal_acceptance.counts[:, 0], plain.counts[:, 0], atol=1e-12)
    alone = measure_acceptance(
        toy_pair(noise=1.5), PROMPTS, BOTH[:1], precision=0, rounds=2, tokens_per_prompt=40
    )[0]
    # measuring the other verifier along with it changes nothing
    assert np.array_equal(alone.counts, traversal_acceptance.counts)
    warmer = [replace(each, draft_temperature=2.0) for each in BOTH]
    observed = measure_acceptance(
        toy_pair(), PROMPTS[:3], warmer, precision=0, tokens_per_prompt=20
    )
    assert len({each.trials.tobytes() for each in observed}) == 1


@pytest.fixture
def few_sizes(monkeypatch):
    monkeypatch.setattr("sequoia_plan.profiler.latency.SIZES", (1, 2, 4))


def profile_of(pair, monkeypatch, samplings, **options):
    monkeypatch.setattr(
        sys.modules["sequoia_plan.profiler.measure"],
        "encode",
        lambda tokenizer, prompt: PROMPTS[int(prompt)],
    )
    return measure(
        pair,
        [Prompt(str(i), kind="ab"[i % 2]) for i in range(8)],
        samplings,
        0.0,
        20,
        precision=0,
        tokens_per_prompt=16,
        **options,
    )


def test_a_profile_has_both(pair, few_sizes, monkeypatch, tmp_path):
    """And solve, a file, and a merge keep them; each has a verification of its own."""
    profile = profile_of(pair, monkeypatch, BOTH[:1], verifiers=[["sequoia"]])[0]
    assert profile.all_verifiers == ("traversal", "sequoia")
    assert (
        profile.latency.verification.round_order == "level"
        and profile.verifiers["sequoia"].verification.round_order == "tree"
    )
    profile.save(tmp_path / "p.yaml")
    assert Profile.load(tmp_path / "p.yaml") == profile
    one = profile.for_verifier("sequoia")
    assert (
        one.settings == {**profile.settings, "verifier": "sequoia"}
        and one.all_verifiers == ("sequoia",)
        and one.latency.target == profile.latency.target
    )
    assert profile.for_verifier("traversal").verifiers == {}
    tree = solve(profile, 8, 4).tree
    assert tree.plan.profile_sha256 == profile.sha256 and len(tree.plan.alternatives) == 1
    save_tree(tree, tmp_path / "t.safetensors")
    assert load_tree(tmp_path / "t.safetensors").plan == tree.plan
    doubled = structs.replace(
        profile,
        levels=tuple(
            LevelCounts(2 * level.trials, tuple(2 * count for count in level.counts))
            for level in profile.levels
        ),
        verifiers={"sequoia": structs.replace(profile.verifiers["sequoia"], kinds={})},
        kinds={},
    )
    both = merge([profile, doubled])
    assert (
        both.verifiers["sequoia"].trials == 2 * profile.verifiers["sequoia"].trials
        and both.verifiers["sequoia"].verification == one.latency.verification
    )
    with pytest.raises(
        SequoiaPlanError,
        match=r"b: measured with traversal, a with sequoia and traversal; profile again, with the "
        r"same --verifier",
    ):
        merge([profile, profile.for_verifier("traversal")], ["a", "b"])


def test_greedy_decoding_has_one_verifier(pair, few_sizes, monkeypatch):
    """Nothing more is measured for it, and nothing chosen.

    The measurement holds for any verifier that is asked for.
    """
    judged = []
    run = ShapeTimer.run
    monkeypatch.setattr(
        ShapeTimer, "run", lambda self, sampling: judged.append(sampling) or run(self, sampling)
    )
    profile = profile_of(pair, monkeypatch, [Sampling()], verifiers=[["sequoia"]])[0]
    assert set(judged) == {Sampling()} and profile.verifiers == {}
    plans = [solve(profile, 4, 3, verifier=name).plan for name in (None, "topk")]
    assert (
        plans[0].alternatives == {}
        and plans[0].expected_tokens == plans[1].expected_tokens
        and plans[1].settings["verifier"] == "topk"
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "verifiers:\n  sequoia:",
            "verifiers:\n  traversal:",
            "verifiers.traversal: found beside the verifier traversal at temperature 0.6, "
            "expected other",
        ),
        (
            "temperature: 0.6",
            "temperature: 0",
            "verifiers.sequoia: found beside the verifier traversal at temperature 0",
        ),
        (
            "verifiers:\n  sequoia:",
            "verifiers:\n  'se quoia':",
            "verifiers: found the key 'se quoia', expected a verifier's name",
        ),
        (
            "    vector: [0.4, 0.1]",
            "    vector: [0.4, 0.9]",
            "verifiers.sequoia.vector: sums to 1.3, expected at most 1",
        ),
        (
            "trials: 50\n      counts: [20.0",
            "trials: 5\n      counts: [20.0",
            "verifiers.sequoia.levels[0].counts: sum to 25, expected at most 5 trials",
        ),
    ],
)
def test_what_is_impossible_is_refused(old, new, message):
    levels = (LevelCounts(50, (21.0, 5.0)),)
    other = VerifierAcceptance((0.4, 0.1), 40, (LevelCounts(50, (20.0, 5.0)),))
    settings = {"temperature": 0.6, "verifier": "traversal"}
    text = Profile(
        (0.42, 0.1), 40, settings=settings, levels=levels, verifiers={"sequoia": other}
    ).to_yaml()
    assert Profile.from_bytes(text.encode(), "p").to_yaml() == text and old in text, text
    with pytest.raises(SequoiaPlanError) as error:
        Profile.from_bytes(text.replace(old, new).encode(), "p.yaml")
    assert message in str(error.value)


def test_an_alternative_cannot_be_faster_than_what_was_taken():
    tree = solve(two_verifiers(np.random.default_rng(0)), 7, 4).tree
    (name, other) = next(iter(tree.plan.alternatives.items()))
    facts = tree.plan.to_dict()
    assert type(tree.plan).from_dict(facts) == tree.plan
    facts["alternatives"][name]["advantage"] = 0.9
    with pytest.raises(
        SequoiaPlanError,
        match=rf"plan.alternatives.{name}.advantage: found 0.9, expected a number >= 1",
    ):
        type(tree.plan).from_dict(facts)
    assert other.advantage >= 1


def test_a_plan_of_an_earlier_version_with_an_interval_of_the_advantage_loads():
    """Earlier versions wrote alternatives.NAME.interval; the key is read over."""
    tree = solve(two_verifiers(np.random.default_rng(0)), 7, 4).tree
    (name,) = tree.plan.alternatives
    document = tree.plan.to_dict()
    document["alternatives"][name]["interval"] = [0.98, 1.05]
    assert type(tree.plan).from_dict(document) == tree.plan
    assert TokenTree(tree.parents, document).plan == tree.plan


# What runs


@pytest.mark.parametrize(
    "tree", [*TREES.values(), bushy(13, 3), load_tree("llama3-70b-8b-cnn-128x10")], ids=repr
)
def test_rounds_are_those_that_run(tree):
    """The kernels (path) and the tensor versions (level, tree) run as many as are counted."""
    index = TreeIndex.of(tree)
    assert num_rounds(tree, "path") == len(FusedVerifier(tree, "cpu").rounds)
    assert num_rounds(tree, "level") == sum(map(len, index.by_level.groups))
    assert num_rounds(tree, "tree") == sum(map(len, index.together.groups))


def test_the_rounds_that_are_counted_are_those_of_the_device():
    step = CapturedStep.of(ToyModel(0), ToyModel(1, base=ToyModel(0)), bushy(7, 2))
    settings = [Sampling(), *BOTH, Sampling(1.0, verifier="topk")]
    assert [round_order(step, each) for each in settings] == ["tree", "level", "tree", "tree"]
    step.verifier.fused = FusedVerifier(step.tree, "cpu")
    assert [round_order(step, each) for each in settings] == ["walk", "path", "walk", "tree"]


def test_a_walk_is_as_long_as_acceptance_lets_expect():
    """The expectation agrees with the mean of walks that are drawn.

    At each node, the child of a rank is accepted with p[level][rank], or none of them is.
    """
    rng, tree = np.random.default_rng(0), TokenTree.from_parents([-1, 0, 0, 0, 1, 1, 2, 4, 7])
    rows = np.array([[0.4, 0.2, 0.1], [0.5, 0.3, 0.0], [0.6, 0.0, 0.0]])
    found = []
    for _ in range(20_000):
        node, rejected, visited = 0, 0, 1
        while tree.child_count[node]:
            level, count = int(tree.position_ids[node]), int(tree.child_count[node])
            taken = int(
                np.searchsorted(np.cumsum(rows[min(level, 2)][:count]), rng.random(), side="right")
            )
            rejected += taken
            if taken == count:
                break
            node, visited = int(tree.first_child[node]) + taken, visited + 1
        found.append((rejected, visited))
    mean, error = np.mean(found, 0), np.std(found, 0) / len(found) ** 0.5
    assert (np.abs(np.array(expected_walk(tree, rows)) - mean) < 4 * error).all()
    assert expected_walk(tree, None) == (max(num_rounds(tree, "path"), 3), tree.depth)
    assert (
        expected_walk(TokenTree.chain(5), [1.0]) == (0, 5)
        and expected_walk(TokenTree.star(6), [0.0]) == (6, 1)
        and expected_walk(TokenTree.chain(1), [0.5]) == (0, 1)
    )


@pytest.mark.parametrize("covered", [None, [0, 2, 3, 5, 6]])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.6, verifier="sequoia")], ids=repr)
def test_a_walk_that_is_timed_goes_where_it_should(pair, sampling, covered):
    """Triton's interpreter runs the kernels: a chain is walked down to its end.

    In any other tree the walk ends at the root, whatever was written before.
    """
    pytest.importorskip("triton", exc_type=ImportError)
    draft = ToyModel(1, base=pair.target, noise=0.7, covered=covered)
    for tree in (TokenTree.chain(1), TokenTree.chain(4), TokenTree.star(3), bushy(8, 2)):
        step = CapturedStep.of(pair.target, draft, tree)
        step.prefill(torch.arange(6), tree.depth, seed=0)
        d2t = step.drafter and step.drafter.d2t
        step.verifier.fused = FusedVerifier(tree, "cpu", d2t, 8, block=2)
        timer = ShapeTimer(step, [sampling])
        assert round_order(step, sampling) == "walk"
        num_visited = round(expected_walk(tree, steered_acceptance(tree))[1])
        for _ in range(2):
            step.sequence.tokens[6:] = 1
            timer.prepare(sampling)
            visited = int(timer.run(sampling)[0])
            timer.restore()
            assert (visited, int(step.sequence.length)) == (num_visited, 5)


def test_both_verifiers_verify_the_same_draws_in_the_same_rounds(pair, few_sizes):
    meter = LatencyMeter(pair, BOTH[0], 20, further_samplings=BOTH)
    meter.begin(1e9)
    meter.finish(0.0)
    num_shapes = len(meter.shape_timers)
    assert meter.samplings == BOTH
    assert np.array(meter.shape_samples).shape == (meter.rounds, 2, num_shapes)
    for timer in meter.shape_timers:
        (logits, drafted), other = (timer.inputs[each] for each in BOTH)
        assert logits is other[0] and drafted is other[1]
    assert meter.verification_cost(BOTH[1]).round_order == "tree"
    assert meter.verification_cost(BOTH[0]).round_order == "level"


# Who goes by it


@pytest.mark.parametrize(
    ("recorded", "expected"), [("sequoia", "sequoia"), ("topk", "topk"), (None, DEFAULT_VERIFIER)]
)
def test_a_decoder_takes_the_verifier_of_its_tree(recorded, expected, monkeypatch):
    settings = {"temperature": 0.8} | ({"verifier": recorded} if recorded else {})
    decoder = SequoiaDecoder(
        ToyModel(0),
        ToyModel(1, base=ToyModel(0)),
        TokenTree.from_parents([-1, 0, 0, 1], {"settings": settings}),
    )
    used = []
    run = CapturedStep.run
    monkeypatch.setattr(
        CapturedStep,
        "run",
        lambda self, extent, sampling: (
            used.append(sampling.verifier) or run(self, extent, sampling)
        ),
    )
    decoder.generate([1, 2, 3], 4, temperature=0.8, seed=0)
    decoder.generate([1, 2, 3], 4, sampling=Sampling(0.8, verifier="specinfer"), seed=0)
    assert list(dict.fromkeys(used)) == [expected, "specinfer"]


def test_the_solver_is_asked_once_for_each(monkeypatch):
    """Intervals are made for the tree that is taken alone."""
    asked = []
    right = solving.intervals
    monkeypatch.setattr(
        solving, "intervals", lambda one, lost: asked.append(one.verifier) or right(one, lost)
    )
    plan = solve(measured(np.random.default_rng(0), 40, TRUTH, RATIO, CLOCK), 12, 5).plan
    assert asked == [plan.settings["verifier"]]
