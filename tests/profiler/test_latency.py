"""Latency: what is recorded, never how long it took."""

from __future__ import annotations

import itertools
import statistics
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from architectures import resembling, tiny
from msgspec import structs
from toys import PROMPTS, toy_pair

from sequoia_plan.artifacts import Latency, SequoiaPlanError, TokenTree, VerificationCost
from sequoia_plan.artifacts.expected_tokens import max_expected_tokens
from sequoia_plan.artifacts.prompts import Prompt
from sequoia_plan.artifacts.step_time import StepTime
from sequoia_plan.planner import solve
from sequoia_plan.profiler import latency
from sequoia_plan.profiler.breakdown import PARTS, WARM_UP_ROUNDS, breakdown
from sequoia_plan.profiler.hardware import differences, fingerprint
from sequoia_plan.profiler.measure import measure
from sequoia_plan.profiler.verification import ShapeTimer, bushy, fit
from sequoia_plan.runtime import Sampling
from sequoia_plan.runtime.captured_step import CapturedStep


@pytest.fixture
def pair():
    """Toy models that also have embeddings, which the prompt's tokens are drawn from."""
    pair = toy_pair()
    pair.target.get_input_embeddings = lambda: torch.nn.Embedding(8, 2)
    return pair


@pytest.fixture
def sizes(monkeypatch):
    monkeypatch.setattr(latency, "SIZES", (1, 2, 3, 4))
    return [1, 2, 3, 4]


def test_every_size_with_quartiles(pair, sizes, monkeypatch):
    """Every size is recorded with the times its own samples say."""

    def run(timer):
        for name, seconds in {
            "target": 0.001 * timer.size,
            "draft": 0.0001 * timer.size,
            "rest": 0.00002,
        }.items():
            timer.samples[name].append(seconds)

    monkeypatch.setattr(latency.SizeTimer, "run", run)
    measured = latency.measure_latency(pair, Sampling(1.0), 1e9, 0.0, context=20)
    assert measured.target == pytest.approx(
        {size: 0.001 * size for size in sizes}
    ) and measured.draft == pytest.approx({size: 0.0001 * size for size in sizes})
    assert (
        measured.quartiles["target"]
        == {size: pytest.approx((0.001 * size, 0.001 * size)) for size in sizes}
        and list(measured.quartiles["draft"]) == sizes
    )
    assert (
        measured.overhead == 0.00002 and measured.context == 20 and measured.out_of_memory is None
    )
    assert measured.samples == {1: 5, 2: 3, 3: 2, 4: 2} and latency.MIN_ROUNDS == 5


def test_all_sizes_share_one_sequence(pair, sizes):
    """The KV caches exist once, and each size has a step of its own."""
    meter = latency.LatencyMeter(pair, Sampling(1.0), 20)
    meter.begin(1e9)
    steps = [timer.step for timer in (*meter.timers, *meter.shape_timers)]
    assert len(steps) == len({id(step) for step in steps}) == len(sizes) + 4
    assert all(step.sequence is meter.step.sequence for step in steps)


@pytest.mark.parametrize("size", [1, 2, 5, 13])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)], ids=repr)
def test_the_draft_pass_that_is_timed_reads_size_tokens_and_draws_a_child_of_each(
    pair, size, sampling, monkeypatch
):
    """It leaves the tokens of the tree as they are: the children are written behind them."""
    step = CapturedStep.of(pair.target, pair.draft, TokenTree.chain(2))
    timer = latency.SizeTimer(step, size, sampling, torch.arange(20) % 8)
    before, widths = step.sequence.tokens.clone(), []
    run = pair.draft.forward
    monkeypatch.setattr(
        pair.draft,
        "forward",
        lambda *args, **kwargs: widths.append(kwargs["input_ids"].shape[1]) or run(*args, **kwargs),
    )
    probs, children = timer.draft_pass()
    assert widths == [size] and probs.shape == (size, 8) and children.shape == (size, 1)
    after, first = step.sequence.tokens, int(timer.length) + size
    assert torch.equal(after[first : first + size], children[:, 0])
    assert torch.equal(after[:first], before[:first])
    assert torch.equal(after[first + size :], before[first + size :])


def experts_of_timed_passes(texts, monkeypatch):
    """How many experts of a layer the timed passes of each size ran, for a random mixture."""
    target = tiny("Qwen3-MoE", num_experts=64, num_experts_per_tok=4)
    pair = SimpleNamespace(target=target, draft=resembling(target, 0.05))
    meter = latency.LatencyMeter(pair, Sampling(1.0), 20, max_size=32, texts=texts)
    counts, reading = {}, []
    run_target = CapturedStep.run_target

    def running(step, extent):
        reading.append(step.tree.size)
        try:
            return run_target(step, extent)
        finally:
            reading.pop()

    def count(module, args, output):
        if reading:
            experts = next(tensor for tensor in output if not tensor.is_floating_point())
            counts.setdefault(reading[-1], []).append(experts.unique().numel())

    monkeypatch.setattr(CapturedStep, "run_target", running)
    for module in target.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.register_forward_hook(count)
    meter.begin(1e9)
    assert counts
    return {size: statistics.mean(numbers) for size, numbers in counts.items()}


def test_timed_passes_read_text_as_it_is_decoded(monkeypatch):
    """Slots that all hold one token would run a few experts only, and larger trees seem free."""
    experts = experts_of_timed_passes([list(range(3, 30, 2))], monkeypatch)
    assert experts[1] == 4
    drafted = latency.SizeTimer._draft_tokens
    monkeypatch.setattr(latency.SizeTimer, "_draft_tokens", lambda timer: drafted(timer) * 0)
    experts_of_zeros = experts_of_timed_passes([list(range(3, 30, 2))], monkeypatch)
    assert experts_of_zeros[32] < experts[32] / 1.5


def test_the_context_is_text_of_the_prompts(pair):
    meter = latency.LatencyMeter(pair, Sampling(1.0), 7, texts=[[1, 2], [3]])
    assert meter.prompt.tolist() == [1, 2, 3, 1, 2, 3, 1]
    assert latency.LatencyMeter(pair, Sampling(1.0), 7).prompt.numel() == 7


VERIFICATIONS = [
    (
        Sampling(1.0, verifier="traversal"),
        VerificationCost(0.002, 0.0003, 0.0001, 0.00005, "level"),
    ),
    (Sampling(1.0, verifier="sequoia"), VerificationCost(0.001, 0.0002, 0.0, 0.00005, "tree")),
    (Sampling(), VerificationCost(0.0005, 0.0, 0.0, 0.0001, "tree")),
]


@pytest.mark.parametrize(("sampling", "cost"), VERIFICATIONS, ids=repr)
def test_verification_is_fitted_to_the_shapes(pair, monkeypatch, sampling, cost):
    """With a clock that follows a given cost, the fit predicts the cost of any tree. With the other
    order of rounds (the control) it does not."""
    monkeypatch.setattr(latency, "SIZES", (1, 2, 8))
    truth = StepTime(Latency({1: 1.0}, {1: 1.0}, 0.0, 0, verification=cost))

    def timed(device, run):
        shape = getattr(getattr(run, "func", None), "__self__", None)
        if isinstance(shape, ShapeTimer):
            return run(), truth.verification_seconds(shape.step.tree)
        return run(), 0.01

    monkeypatch.setattr(latency, "timed", timed)
    measured = latency.measure_latency(pair, sampling, 1e9, 0.0, context=20)
    times = StepTime(measured)
    trees = [
        TokenTree.chain(8),
        TokenTree.star(8),
        bushy(13, 3),
        TokenTree.from_parents([-1, 0, 0, 0, 1, 1, 2, 4, 7]),
    ]
    assert [times.verification_seconds(tree) for tree in trees] == pytest.approx(
        [truth.verification_seconds(tree) for tree in trees], rel=1e-6
    )
    assert (
        measured.verification.round_order == cost.round_order and measured.verification.error < 1e-6
    )
    if cost.by_round:
        other = structs.replace(
            measured.verification, round_order="tree" if cost.round_order == "level" else "level"
        )
        assert StepTime(structs.replace(measured, verification=other)).verification_seconds(
            trees[0]
        ) != pytest.approx(truth.verification_seconds(trees[0]), rel=0.05)


def test_the_fit_has_no_negative_term():
    """Times that fall with every round: the unconstrained solution is negative there, ours is the
    best without."""
    trees = [TokenTree.chain(size) for size in (1, 2, 4, 8)]
    measured = fit(trees, [0.004, 0.003, 0.002, 0.001], "tree")
    assert measured.by_round == measured.by_parent == measured.by_child == 0
    errors = [measured.base / seconds - 1 for seconds in (0.004, 0.003, 0.002, 0.001)]
    assert measured.error == pytest.approx((sum(error**2 for error in errors) / 3) ** 0.5, abs=1e-4)
    assert measured.base == pytest.approx(
        sum(1 / t for t in (4e-3, 3e-3, 2e-3, 1e-3))
        / sum(1 / t**2 for t in (4e-3, 3e-3, 2e-3, 1e-3))
    )


def test_latency_is_timed_between_prompts(pair, sizes, monkeypatch):
    """Rounds are among the prompts, as many more as are asked for come after them, and the profile
    holds them all."""
    events = []
    # sizes that seem costly on a busy machine would be timed in fewer rounds
    for name in ("target_seconds", "draft_seconds"):
        monkeypatch.setattr(latency.SizeTimer, name, lambda timer: 1.0)
    run = latency.LatencyMeter.round
    monkeypatch.setattr(
        latency.LatencyMeter, "round", lambda meter: (events.append("round"), run(meter))
    )
    monkeypatch.setattr(
        sys.modules["sequoia_plan.profiler.measure"],
        "encode",
        lambda tokenizer, prompt: PROMPTS[int(prompt)],
    )
    measured = measure(
        pair,
        [Prompt(str(i)) for i in range(12)],
        [Sampling(1.0)],
        1e9,
        20,
        precision=0,
        on_prompt=lambda *_: events.append("prompt"),
    )[0]
    assert events == ["prompt"] * 10 + ["round"] + ["prompt"] * 2 + ["round"] * (
        latency.MAX_ROUNDS - 1
    )
    assert (
        measured.latency.samples[1] == latency.MAX_ROUNDS
        and list(measured.latency.target) == sizes
        and measured.trials > 0
    )
    few = measure(pair, [Prompt("0"), Prompt("1")], [Sampling(1.0)], 0.0, 20, precision=0)[0]
    assert few.latency.samples[1] == latency.MIN_ROUNDS


def test_costly_sizes_are_timed_less_often(pair, sizes, monkeypatch):
    """A size of k plain passes in one round of k, the largest in one of four; what is beyond the
    passes up to two nodes only."""
    monkeypatch.setattr(
        latency.SizeTimer,
        "target_seconds",
        lambda timer: {1: 1.0, 2: 1.4, 3: 2.6, 4: 9.0}[timer.size],
    )
    meter = latency.LatencyMeter(pair, Sampling(1.0), 20)
    meter.begin(1e9)
    measured = meter.finish(0.0)
    assert latency.MIN_ROUNDS == 5 and measured.samples == {1: 5, 2: 5, 3: 3, 4: 2}
    for timer in meter.timers:
        taken = {name: int(np.isfinite(samples).sum()) for name, samples in timer.samples.items()}
        times = measured.samples[timer.size]
        assert taken == {
            "target": times,
            "draft": times,
            "rest": times if timer.size <= latency.MAX_OVERHEAD_SIZE else 0,
        }
        assert {len(timer.samples[name]) for name in ("target", "draft")} == {5}


def test_draft_passes_that_no_tree_can_pay_for_are_not_timed(pair, sizes, monkeypatch):
    """From a pass on that takes longer than the most tokens take plainly, and in few rounds before
    that."""

    def run(timer):
        timer.samples["target"].append(1.0)
        if timer.times_draft:
            timer.samples["draft"].append({1: 1.0, 2: 2.5, 3: 3.5}[timer.size])

    monkeypatch.setattr(latency.SizeTimer, "run", run)
    monkeypatch.setattr(latency.SizeTimer, "overhead_seconds", lambda timer: 0.0)
    measured = latency.measure_latency(pair, Sampling(1.0), 3.0, 0.0, context=20)
    assert list(measured.target) == list(measured.quartiles["target"]) == sizes
    assert measured.draft == {1: 1.0, 2: 2.5, 3: 3.5} and list(measured.quartiles["draft"]) == [
        1,
        2,
        3,
    ]
    assert measured.samples == {1: 5, 2: 3, 3: 2, 4: 5}


def test_no_tree_has_more_tokens_than_the_bound():
    """Best nodes of the endless tree against the planner's own optimum, for one vector, rows by
    level and ranks that rise."""
    for rows in (
        [[0.5, 0.2, 0.1]],
        [[0.4, 0.2], [0.5, 0.2], [0.7, 0.1]],
        [[0.1, 0.5, 0.2], [0.6, 0.0, 0.1]],
    ):
        best = solve(rows, budget=40, depth=20).plan.expected_tokens
        assert best <= max_expected_tokens(rows, 40) + 1e-12
    assert max_expected_tokens([[0.5, 0.2, 0.1]], 40) == pytest.approx(
        solve([0.5, 0.2, 0.1], budget=40, depth=40).plan.expected_tokens
    )
    assert max_expected_tokens([[0.0]], 9) == 1 and max_expected_tokens([[1.0]], 9) == 9


def test_medians_and_quartiles_are_free_of_drift():
    """Noise of 1 % on a machine that drifts by 30 %: sizes keep their ratios and quartiles are
    those of the noise; raw ones (the control) are not."""
    rng = np.random.default_rng(0)
    base = np.array([[1.0, 2.0, 4.0, 5.0, 8.0], [0.1, 0.1, 0.2, 0.2, 0.3]])[..., None]
    times = (
        base
        * np.exp(0.3 * rng.standard_normal(40))
        * np.exp(0.01 * rng.standard_normal((2, 5, 40)))
    )
    times[:, 3:, 1::2] = np.nan  # these two took part in every second round
    low, middle, high = latency.drift_free_quartiles(times)
    assert np.ptp(middle / base[..., 0]) < 0.02
    assert np.median((high - low) / low) == pytest.approx(1.349 * 0.01, rel=0.35)
    raw = np.nanquantile(times, [0.25, 0.5, 0.75], axis=-1)
    assert np.ptp(raw[1] / base[..., 0]) > 0.05
    assert ((raw[2] - raw[0]) / raw[0]).min() > 0.2


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
        SequoiaPlanError("KV cache: 9 tokens need 1 GB on cuda"),
    ],
)
def test_a_size_that_does_not_fit_is_recorded(pair, sizes, monkeypatch, error):
    run = latency.SizeTimer.run

    def limited(timer):
        if timer.size >= 3:
            raise error
        run(timer)

    monkeypatch.setattr(latency.SizeTimer, "run", limited)
    measured = latency.measure_latency(pair, Sampling(), 1e9, 0.0, context=20)
    assert list(measured.target) == [1, 2] and measured.out_of_memory == 3


def test_other_errors_and_plain_decoding_that_does_not_fit_are_errors(pair, sizes, monkeypatch):
    def failing(error):
        def run(timer):
            raise error

        monkeypatch.setattr(latency.SizeTimer, "run", run)

    failing(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(torch.OutOfMemoryError):
        latency.measure_latency(pair, Sampling(), 1e9, 0.0, context=20)
    failing(RuntimeError("shapes differ"))
    with pytest.raises(RuntimeError, match="shapes differ"):
        latency.measure_latency(pair, Sampling(), 1e9, 0.0, context=20)


def test_no_size_above_the_largest_asked_for(pair, sizes):
    assert list(
        latency.measure_latency(pair, Sampling(), 1e9, 0.0, context=20, max_size=2).target
    ) == [1, 2]


def clock(monkeypatch, *seconds):
    """In place of the clock of `breakdown`: what is timed in a round takes these times, in turn."""
    times = itertools.cycle(seconds)
    monkeypatch.setattr(
        sys.modules["sequoia_plan.profiler.breakdown"],
        "timed",
        lambda device, run: (run(), next(times)),
    )


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, verifier="traversal")], ids=repr)
def test_the_parts_of_a_step_add_up_to_it(pair, sampling, monkeypatch):
    clock(monkeypatch, 0.004, 0.001, 0.05, 0.003, 0.002, 0.07)
    measured = breakdown(
        pair, TokenTree.from_parents([-1, 0, 0, 1, 1, 2, 3]), sampling, context=20, rounds=5
    )
    expected = {
        "step": 0.07,
        "draft": 0.005,
        "target": 0.05,
        "verify": 0.003,
        "commit": 0.002,
        "host": 0.01,
        "draw": 0.001,
        "share_not_model": 0.015 / 0.07,
    }
    assert measured == pytest.approx(expected)
    assert sum(measured[name] for name in PARTS) == pytest.approx(measured["step"])


def test_plain_decoding_has_no_draft_part(pair, monkeypatch):
    clock(monkeypatch, 0.05, 0.003, 0.002, 0.06)
    measured = breakdown(pair, TokenTree.chain(1), Sampling(), context=1, rounds=5)
    assert measured["draft"] == measured["draw"] == 0
    assert (measured["target"], measured["step"]) == (0.05, 0.06) and measured[
        "host"
    ] == pytest.approx(0.005)


def test_a_breakdown_leaves_every_step_the_same_step(pair, monkeypatch):
    """Each part and each whole step starts from the same length, or later rounds would look at more
    of the cache."""
    lengths = []
    for name in ("verify", "commit"):
        run = getattr(CapturedStep, name)

        def with_length(step, *args, run=run):
            lengths.append(int(step.sequence.length))
            return run(step, *args)

        monkeypatch.setattr(CapturedStep, name, with_length)
    breakdown(pair, TokenTree.chain(3), Sampling(), context=20, rounds=5)
    assert len(lengths) == 2 * 2 * (5 + WARM_UP_ROUNDS) and set(lengths) == {19}


def test_fingerprints_are_compared_by_what_moves_times():
    current = fingerprint("cpu")
    assert differences(current, current) == []
    assert differences({}, current) == []
    other = current | {"threads": 999, "python": "2.7"}
    assert differences(other, current) == [f"threads 999, here {current['threads']}"]
