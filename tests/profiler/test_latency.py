"""Latency: what is recorded, never how long it took."""

import itertools
import statistics
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from architectures import resembling, tiny
from refusals import refusal
from toys import PROMPTS, TREE, toy_pair

from sequoia_plan.artifacts import SequoiaPlanError, TokenTree
from sequoia_plan.artifacts.expected_tokens import max_expected_tokens
from sequoia_plan.artifacts.prompts import Prompt, measuring_half
from sequoia_plan.artifacts.step_time import StepTime
from sequoia_plan.planner import solve
from sequoia_plan.profiler import latency
from sequoia_plan.profiler.breakdown import WARM_UP_ROUNDS, breakdown
from sequoia_plan.profiler.hardware import TIME_KEYS, differences, fingerprint
from sequoia_plan.profiler.latency import MAX_ROUNDS, MIN_ROUNDS, LatencyMeter
from sequoia_plan.profiler.measure import measure
from sequoia_plan.profiler.size_timer import MAX_OVERHEAD_SIZE, SizeTimer
from sequoia_plan.profiler.timing import drift_free_quartiles
from sequoia_plan.profiler.verification import VerificationTimer, fit_cost
from sequoia_plan.runtime import Sampling
from sequoia_plan.runtime.captured_step import CapturedStep

pytestmark = pytest.mark.slow

SIZES = (1, 2, 3, 4)
WARM = Sampling(1.0)


@pytest.fixture
def pair():
    """Toy models that say how many embeddings they have, which the prompt is drawn from."""
    pair = toy_pair()
    pair.target.num_embeddings = 8
    return pair


@pytest.fixture
def short_measure(monkeypatch):
    """Four sizes; the text of a prompt is a number in `PROMPTS`."""
    monkeypatch.setattr(latency, "SIZES", SIZES)
    module = sys.modules["sequoia_plan.profiler.measure"]
    monkeypatch.setattr(module, "encode", lambda tokenizer, text: PROMPTS[int(text) % 12])


@pytest.fixture
def meter(pair, short_measure):
    """A meter of four sizes."""
    return LatencyMeter(pair, WARM, 20)


def finished(meter, max_tokens=1e9):
    """The latency after the fewest rounds."""
    meter.begin(max_tokens)
    return meter.finish(0.0)


def set_clock(monkeypatch, seconds_of):
    """Let timers take the seconds that `seconds_of` gives for a part and a size, without a clock.

    Returns the sizes whose timers were run.
    """
    runs = []

    def run(timer):
        runs.append(timer.size)
        parts = ["target", *["draft"] * timer.times_draft]
        parts += ["overhead"] * (timer.size <= MAX_OVERHEAD_SIZE)  # as on CUDA
        return {(part, timer.size): seconds_of(part, timer.size) for part in parts}

    monkeypatch.setattr(SizeTimer, "run", run)
    return runs


def test_a_context_beyond_the_models(pair):
    with refusal("context: found 1000000, expected less than"):
        LatencyMeter(pair, WARM, 1000000)


def test_every_size_with_quartiles(meter, monkeypatch):
    per_node = {"target": 0.001, "draft": 0.0001, "overhead": 0.00002}
    set_clock(monkeypatch, lambda part, n: per_node[part] * (1 if part == "overhead" else n))
    result = finished(meter)
    assert result.target == pytest.approx({size: 0.001 * size for size in SIZES})
    assert result.draft == pytest.approx({size: 0.0001 * size for size in SIZES})
    for size, quartiles in result.quartiles["target"].items():
        assert quartiles == pytest.approx((0.001 * size, 0.001 * size))
    assert [*result.quartiles["target"]] == [*result.quartiles["draft"]] == [*SIZES]
    assert (result.overhead, result.context, result.out_of_memory) == (0.00002, 20, None)
    # a size of k plain passes takes part in one round of k
    assert result.samples == {1: 5, 2: 3, 3: 2, 4: 2} and MIN_ROUNDS == 5


@pytest.mark.parametrize("size", [1, 2, 5, 13])
@pytest.mark.parametrize("sampling", [Sampling(), WARM], ids=repr)
def test_the_draft_pass_that_is_timed_reads_size_tokens_and_draws_a_child_of_each(
    pair, size, sampling, monkeypatch
):
    """It leaves the tokens of the tree as they are: the children are written behind them."""
    meter = LatencyMeter(pair, sampling, 20)
    timer = SizeTimer(meter.step, size, sampling, torch.arange(20) % 8)
    before, widths = timer.step.sequence.tokens.clone(), []
    forward = pair.draft.module.forward

    def counting(*args, **options):
        widths.append(options["input_ids"].shape[1])
        return forward(*args, **options)

    monkeypatch.setattr(pair.draft.module, "forward", counting)
    probs, children = timer.draft_pass()
    assert widths == [size] and probs.shape == (size, 8) and children.shape == (size, 1)
    after, first = timer.step.sequence.tokens, int(timer.length) + size
    assert after[first : first + size].equal(children[:, 0])
    assert after[:first].equal(before[:first])
    assert after[first + size :].equal(before[first + size :])


def experts_of_timed_passes(monkeypatch):
    """How many experts of a layer the timed passes of each size ran, for a random mixture."""
    target = tiny("Qwen3-MoE", num_local_experts=64, num_experts_per_tok=4)
    pair = SimpleNamespace(target=target, draft=resembling(target, 0.05))
    meter = LatencyMeter(pair, WARM, 20, max_size=32, texts=[list(range(3, 30, 2))])
    counts, sizes = {}, []
    step_class = type(meter.step)
    run_target = step_class.run_target

    def running(step, extent):
        sizes.append(step.tree.size)
        try:
            return run_target(step, extent)
        finally:
            sizes.pop()

    def count(module, args, output):
        if sizes:
            experts = next(tensor for tensor in output if not tensor.is_floating_point())
            counts.setdefault(sizes[-1], []).append(experts.unique().numel())

    monkeypatch.setattr(step_class, "run_target", running)
    for module in target.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.register_forward_hook(count)
    meter.begin(1e9)
    return {size: statistics.mean(numbers) for size, numbers in counts.items()}


def test_timed_passes_read_text_as_it_is_decoded(monkeypatch):
    """Slots that all hold one token would run a few experts only, and larger trees seem free."""
    experts = experts_of_timed_passes(monkeypatch)
    assert experts[1] == 4
    draft_tokens = SizeTimer._draft_tokens
    monkeypatch.setattr(SizeTimer, "_draft_tokens", lambda timer: draft_tokens(timer) * 0)
    assert experts_of_timed_passes(monkeypatch)[32] < experts[32] / 1.5


@pytest.mark.parametrize("costs", [(0.001, 0.0002), (0.0005, 0.0)])
def test_verification_is_fitted_to_the_times_of_trees(pair, costs, monkeypatch):
    """With a clock that follows a base and a slope, the meter finds them."""
    monkeypatch.setattr(latency, "SIZES", (1, 2, 8, 16))
    base, slope = costs
    monkeypatch.setattr(
        VerificationTimer,
        "run",
        lambda timer: base + slope * (timer.step.tree.size - 1) + bool(timer.step.lookup) / 1000,
    )
    cost = finished(LatencyMeter(pair, WARM, 20, max_size=8)).verification
    assert (cost.base, cost.by_node) == pytest.approx(costs, abs=1e-9)
    assert cost.lookup == pytest.approx(0.001)


@pytest.mark.parametrize(
    ("seconds", "kept"), [((4, 3, 2, 1), "base"), ((0.5, 2.5, 4.5, 6.5), "by_node")]
)
def test_the_fit_has_no_negative_term(seconds, kept):
    """Where the unconstrained solution is negative, ours is the best without."""
    sizes = np.array([2, 4, 6, 8])
    cost = fit_cost(dict(zip(map(TokenTree.chain, sizes.tolist()), seconds, strict=True)), {})
    relative = (np.ones(4) if kept == "base" else sizes - 1.0) / np.array(seconds)
    assert getattr(cost, kept) == pytest.approx(relative.sum() / (relative @ relative))
    assert {cost.base, cost.by_node} == {getattr(cost, kept), 0.0}


def test_latency_is_timed_between_prompts(pair, short_measure, monkeypatch):
    """Rounds are among the prompts, and as many more as are asked for come after them."""
    events, run_round = [], LatencyMeter.round
    set_clock(monkeypatch, lambda part, size: 1.0)  # else a busy machine would leave out rounds

    def counting(meter):
        events.append("round")
        run_round(meter)

    monkeypatch.setattr(LatencyMeter, "round", counting)

    prompts = [Prompt(str(number)) for number in range(12)]
    report = {"on_prompt": lambda *_: events.append("prompt")}
    profile = measure(pair, prompts, WARM, 1e9, [20], precision=0, **report)
    rounds = ["round"] * (MAX_ROUNDS - 1)
    assert events == ["prompt"] * 10 + ["round"] + ["prompt"] * 2 + rounds
    assert profile.latency.samples[1] == MAX_ROUNDS
    assert list(profile.latency.target) == list(SIZES) and len(profile.prompts["all"]) == 12


def test_every_kind_is_measured(pair, short_measure):
    """Of six kinds one after the other, eight prompts each, though far fewer reach the precision.

    Latency has a step of plain decoding, whose time is that of the prediction.
    """
    prompts = [Prompt(str(number), kind) for kind in "abcdef" for number in range(16)]
    measuring = measuring_half([*prompts, Prompt("0", "rare")])
    profile = measure(pair, measuring, WARM, 0.0, [20], precision=0.9, tokens_per_prompt=4)
    numbers = {kind: len(of_kind) for kind, of_kind in profile.prompts.items()}
    assert numbers == dict.fromkeys("abcdef", 8) | {"rare": 1}
    assert profile.latency.plain == StepTime(profile.latency).plain_seconds() > 0


def test_costly_sizes_are_timed_less_often(meter, monkeypatch):
    """The largest in one round of four."""
    seconds = {1: 1.0, 2: 1.4, 3: 2.6, 4: 9.0}
    runs = set_clock(monkeypatch, lambda part, size: seconds[size])
    assert finished(meter).samples == {1: 5, 2: 5, 3: 3, 4: 2}
    assert [runs.count(size) for size in SIZES] == [3 + 5, 3 + 5, 3 + 3, 3 + 2]  # three at first


def test_draft_passes_that_no_tree_can_pay_for_are_not_timed(meter, monkeypatch):
    """From a pass on that takes longer than the most tokens take plainly."""
    draft_seconds = {1: 1.0, 2: 2.5, 3: 3.5, 4: 9.0}
    set_clock(monkeypatch, lambda part, n: draft_seconds[n] if part == "draft" else 1.0)
    result = finished(meter, max_tokens=3.0)
    assert list(result.target) == list(SIZES)
    assert result.draft == {1: 1.0, 2: 2.5, 3: 3.5} and list(result.quartiles["draft"]) == [1, 2, 3]
    assert result.samples == {1: 5, 2: 3, 3: 2, 4: 5}


def test_medians_and_quartiles_are_free_of_drift():
    """Noise of 1 % on a machine that drifts by 30 %; raw figures (the control) are not."""
    rng = np.random.default_rng(0)
    base = np.array([[1.0, 2.0, 4.0, 5.0, 8.0], [0.1, 0.1, 0.2, 0.2, 0.3]])[..., None]
    drift, noise = rng.standard_normal(40), rng.standard_normal((2, 5, 40))
    times = base * np.exp(0.3 * drift) * np.exp(0.01 * noise)
    times[:, 3:, 1::2] = np.nan  # these two took part in every second round
    low, middle, high = drift_free_quartiles(times)
    assert np.ptp(middle / base[..., 0]) < 0.02
    assert np.median((high - low) / low) == pytest.approx(1.349 * 0.01, rel=0.35)
    low, middle, high = np.nanquantile(times, [0.25, 0.5, 0.75], axis=-1)
    assert np.ptp(middle / base[..., 0]) > 0.05 and ((high - low) / low).min() > 0.2


OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    ("error", "first_size", "is_recorded"),
    [
        (OUT_OF_MEMORY, 3, True),
        (SequoiaPlanError("KV cache: 9 tokens need 1 GB on cuda"), 3, True),
        (OUT_OF_MEMORY, 1, False),  # plain decoding does not fit
        (RuntimeError("shapes differ"), 3, False),
    ],
)
def test_a_size_that_does_not_fit_is_recorded(meter, monkeypatch, error, first_size, is_recorded):
    run = SizeTimer.run

    def limited(timer):
        if timer.size >= first_size:
            raise error
        return run(timer)

    monkeypatch.setattr(SizeTimer, "run", limited)
    if not is_recorded:
        with pytest.raises(type(error), match=str(error)):
            finished(meter)
        return
    result = finished(meter)
    assert list(result.target) == [1, 2] and result.out_of_memory == 3


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, verifier="traversal")], ids=repr)
@pytest.mark.parametrize("tree", [TREE, TokenTree.chain(1)])
def test_the_parts_of_a_step_add_up_to_it(pair, tree, sampling, monkeypatch):
    times = itertools.cycle([0.07, 0.006, 0.05, 0.003])
    module = sys.modules["sequoia_plan.profiler.breakdown"]
    monkeypatch.setattr(module, "timed", lambda device, run: (run(), next(times)))
    figures = breakdown(pair, tree, sampling, context=20, rounds=5)
    expected = {"step": 0.07, "draft": 0.006, "target": 0.05, "verify": 0.003, "host": 0.011}
    assert figures == pytest.approx(expected | {"share_not_model": 0.014 / 0.07})


def test_a_breakdown_leaves_every_step_the_same_step(pair, monkeypatch):
    """Each part and each whole step starts from the same length, and looks at as much cache."""
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
    assert differences(current, current, TIME_KEYS) == differences({}, current, TIME_KEYS) == []
    other = current | {"threads": 999, "python": "2.7"}
    assert differences(other, current, TIME_KEYS) == [f"threads 999, here {current['threads']}"]


@pytest.mark.parametrize(
    "rates",
    [
        [[0.5, 0.2, 0.1]],
        [[0.4, 0.2, 0.0], [0.5, 0.2, 0.0], [0.7, 0.1, 0.0]],
        [[0.1, 0.5, 0.2], [0.6, 0.0, 0.1]],
    ],
)
def test_no_tree_has_more_tokens_than_the_bound(rates):
    """Best nodes of the endless tree against the planner's own optimum."""
    bound = max_expected_tokens(np.array(rates)[:, None], 40)
    assert solve(rates, budget=40, depth=20).plan.expected_tokens <= bound + 1e-12
    if len(rates) == 1:
        best = solve(rates, budget=40, depth=40).plan.expected_tokens
        assert bound == pytest.approx(best)
