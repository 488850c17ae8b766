"""Latency: what is recorded, never how long it took."""

from __future__ import annotations

import itertools
import sys

import numpy as np
import pytest
import torch
from msgspec import structs
from toys import PROMPTS, toy_pair

from sequoia_plan.artifacts import Latency, SequoiaPlanError, TokenTree, Verification
from sequoia_plan.artifacts.cost import StepTime, most_expected_tokens
from sequoia_plan.planner import solve
from sequoia_plan.profiler import latency
from sequoia_plan.profiler.breakdown import PARTS, WARM_UP, breakdown
from sequoia_plan.profiler.hardware import differences, fingerprint
from sequoia_plan.profiler.measure import measure
from sequoia_plan.profiler.prompts import Prompt
from sequoia_plan.profiler.verification import ShapeTimer, bushy, fit
from sequoia_plan.runtime import Sampling, SequoiaDecoder


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
        for name, seconds in {"target": 0.001 * timer.size, "draft": 0.0001 * timer.size, "rest": 0.00002}.items():
            timer.samples[name].append(seconds)

    monkeypatch.setattr(latency.SizeTimer, "run", run)
    found = latency.measure_latency(pair, Sampling(1.0), 1e9, 0.0, context=20)
    assert found.target == pytest.approx({size: 0.001 * size for size in sizes}) and found.draft == pytest.approx({size: 0.0001 * size for size in sizes})
    assert found.quartiles["target"] == {size: pytest.approx((0.001 * size, 0.001 * size)) for size in sizes} and list(found.quartiles["draft"]) == sizes
    assert found.overhead == 0.00002 and found.context == 20 and found.out_of_memory is None
    assert found.samples == {1: 5, 2: 3, 3: 2, 4: 2} and latency.LEAST_ROUNDS == 5


def test_all_sizes_share_one_sequence(pair, sizes):
    """No size keeps caches of its own: the meter holds the target's and the draft's once, and one decoder a size."""
    meter = latency.LatencyMeter(pair, Sampling(1.0), 20)
    meter.begin(1e9)
    used = [value for timer in (*meter.timers, *meter.shapes) for value in vars(timer).values() if isinstance(value, SequoiaDecoder)]
    assert len(used) == len(sizes) + 4 and {id(each.sequence) for each in used} == {id(meter.decoder.sequence)}


@pytest.mark.parametrize("size", [1, 2, 5, 13])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)], ids=repr)
def test_the_draft_pass_that_is_timed_reads_so_many_tokens_and_draws_a_child_of_each(pair, size, sampling, monkeypatch):
    """Of the same laws as the draft gives the nodes of a tree, and without touching the tree's tokens."""
    decoder = SequoiaDecoder(pair.target, pair.draft, TokenTree.chain(2))
    timer = latency.SizeTimer(decoder, size, sampling, torch.arange(20) % 8)
    before, widths = decoder.sequence.tokens.clone(), []
    run = pair.draft.forward
    monkeypatch.setattr(pair.draft, "forward", lambda *args, **kwargs: widths.append(kwargs["input_ids"].shape[1]) or run(*args, **kwargs))
    laws, picks = timer.draft_pass()
    assert widths == [size] and laws.shape == (size, 8) and picks.shape == (size, 1)
    after, length = decoder.sequence.tokens, int(timer.length)
    assert torch.equal(after[length + size : length + 2 * size], picks[:, 0])
    assert torch.equal(after[: length + size], before[: length + size]) and torch.equal(after[length + 2 * size :], before[length + 2 * size :])


VERIFICATIONS = [
    (Sampling(1.0, verifier="traversal"), Verification(0.002, 0.0003, 0.0001, 0.00005, "level")),
    (Sampling(1.0, verifier="sequoia"), Verification(0.001, 0.0002, 0.0, 0.00005, "tree")),
    (Sampling(), Verification(0.0005, 0.0, 0.0, 0.0001, "tree")),
]


@pytest.mark.parametrize(("sampling", "known"), VERIFICATIONS, ids=repr)
def test_verification_is_fitted_to_the_shapes(pair, monkeypatch, sampling, known):
    """With a clock that follows a known cost, the cost of any tree is found; of the other order of rounds (the control) it is not."""
    monkeypatch.setattr(latency, "SIZES", (1, 2, 8))
    truth = StepTime(Latency({1: 1.0}, {1: 1.0}, 0.0, 0, verification=known))

    def timed(device, run):
        shape = getattr(getattr(run, "func", None), "__self__", None)
        return run(), truth.verification(shape.decoder.tree) if isinstance(shape, ShapeTimer) else 0.01

    monkeypatch.setattr(latency, "timed", timed)
    found = latency.measure_latency(pair, sampling, 1e9, 0.0, context=20)
    times = StepTime(found)
    trees = [TokenTree.chain(8), TokenTree.star(8), bushy(13, 3), TokenTree.from_parents([-1, 0, 0, 0, 1, 1, 2, 4, 7])]
    assert [times.verification(tree) for tree in trees] == pytest.approx([truth.verification(tree) for tree in trees], rel=1e-6)
    assert found.verification.rounds == known.rounds and found.verification.error < 1e-6
    if known.by_round:
        other = structs.replace(found.verification, rounds="tree" if known.rounds == "level" else "level")
        assert StepTime(structs.replace(found, verification=other)).verification(trees[0]) != pytest.approx(truth.verification(trees[0]), rel=0.05)


def test_the_fit_has_no_negative_term():
    """Times that fall with every round: the unconstrained solution is negative there, ours is the best without."""
    trees = [TokenTree.chain(size) for size in (1, 2, 4, 8)]
    found = fit(trees, [0.004, 0.003, 0.002, 0.001], "tree")
    assert found.by_round == found.by_parent == found.by_child == 0
    off = [found.base / seconds - 1 for seconds in (0.004, 0.003, 0.002, 0.001)]
    assert found.error == pytest.approx((sum(each**2 for each in off) / 3) ** 0.5, abs=1e-4)
    assert found.base == pytest.approx(sum(1 / t for t in (4e-3, 3e-3, 2e-3, 1e-3)) / sum(1 / t**2 for t in (4e-3, 3e-3, 2e-3, 1e-3)))


def test_latency_is_timed_between_prompts(pair, sizes, monkeypatch):
    """Rounds are among the prompts, as many more as are asked for come after them, and the profile holds them all."""
    events = []
    run = latency.LatencyMeter.round
    monkeypatch.setattr(latency.LatencyMeter, "round", lambda meter: (events.append("round"), run(meter)))
    monkeypatch.setattr(sys.modules["sequoia_plan.profiler.measure"], "encode", lambda tokenizer, prompt: PROMPTS[int(prompt)])
    found = measure(pair, [Prompt(str(i)) for i in range(12)], [Sampling(1.0)], 1e9, 20, precision=0, on_prompt=lambda *_: events.append("prompt"))[0]
    assert events == ["prompt"] * 10 + ["round"] + ["prompt"] * 2 + ["round"] * (latency.MOST_ROUNDS - 1)
    assert found.latency.samples[1] == latency.MOST_ROUNDS and list(found.latency.target) == sizes and found.trials > 0
    few = measure(pair, [Prompt("0"), Prompt("1")], [Sampling(1.0)], 0.0, 20, precision=0)[0]
    assert few.latency.samples[1] == latency.LEAST_ROUNDS


def test_costly_sizes_are_timed_less_often(pair, sizes, monkeypatch):
    """A size of k plain passes in one round of k, the largest in one of four; what is beyond the passes up to two nodes only."""
    monkeypatch.setattr(latency.SizeTimer, "target", lambda timer: {1: 1.0, 2: 1.4, 3: 2.6, 4: 9.0}[timer.size])
    meter = latency.LatencyMeter(pair, Sampling(1.0), 20)
    meter.begin(1e9)
    found = meter.finish(0.0)
    assert latency.LEAST_ROUNDS == 5 and found.samples == {1: 5, 2: 5, 3: 3, 4: 2}
    for timer in meter.timers:
        taken = {name: sum(each == each for each in samples) for name, samples in timer.samples.items()}
        times = found.samples[timer.size]
        assert taken == {"target": times, "draft": times, "rest": times if timer.size <= latency.REST_UP_TO else 0}
        assert {len(timer.samples[name]) for name in ("target", "draft")} == {5}


def test_draft_passes_that_no_tree_can_pay_for_are_not_timed(pair, sizes, monkeypatch):
    """From a pass on that takes longer than the most tokens take plainly, and in few rounds before that."""

    def run(timer):
        timer.samples["target"].append(1.0)
        if timer.drafts:
            timer.samples["draft"].append({1: 1.0, 2: 2.5, 3: 3.5}[timer.size])

    monkeypatch.setattr(latency.SizeTimer, "run", run)
    monkeypatch.setattr(latency.SizeTimer, "rest", lambda timer: 0.0)
    found = latency.measure_latency(pair, Sampling(1.0), 3.0, 0.0, context=20)
    assert list(found.target) == list(found.quartiles["target"]) == sizes
    assert found.draft == {1: 1.0, 2: 2.5, 3: 3.5} and list(found.quartiles["draft"]) == [1, 2, 3]
    assert found.samples == {1: 5, 2: 3, 3: 2, 4: 5}


def test_no_tree_has_more_tokens_than_the_bound():
    """Best nodes of the endless tree against the planner's own optimum, for one vector, rows by level and ranks that rise."""
    for rows in ([[0.5, 0.2, 0.1]], [[0.4, 0.2], [0.5, 0.2], [0.7, 0.1]], [[0.1, 0.5, 0.2], [0.6, 0.0, 0.1]]):
        best = solve(rows, 40, 20).plan.expected_tokens
        assert best <= most_expected_tokens(rows, 40) + 1e-12
    assert most_expected_tokens([[0.5, 0.2, 0.1]], 40) == pytest.approx(solve([0.5, 0.2, 0.1], 40, 40).plan.expected_tokens)
    assert most_expected_tokens([[0.0]], 9) == 1 and most_expected_tokens([[1.0]], 9) == 9


def test_medians_and_quartiles_are_free_of_drift():
    """Noise of 1 % on a machine that drifts by 30 %: sizes keep their ratios and quartiles are those of the noise; raw ones (the control) are not."""
    rng = np.random.default_rng(0)
    base = np.array([[1.0, 2.0, 4.0, 5.0, 8.0], [0.1, 0.1, 0.2, 0.2, 0.3]])[..., None]
    times = base * np.exp(0.3 * rng.standard_normal(40)) * np.exp(0.01 * rng.standard_normal((2, 5, 40)))
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
    found = latency.measure_latency(pair, Sampling(), 1e9, 0.0, context=20)
    assert list(found.target) == [1, 2] and found.out_of_memory == 3


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
    assert list(latency.measure_latency(pair, Sampling(), 1e9, 0.0, context=20, largest=2).target) == [1, 2]


def clock(monkeypatch, *seconds):
    """In place of the clock of `breakdown`: what is timed in a round takes these times, in turn."""
    times = itertools.cycle(seconds)
    monkeypatch.setattr(sys.modules["sequoia_plan.profiler.breakdown"], "timed", lambda device, run: (run(), next(times)))


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, verifier="traversal")], ids=repr)
def test_the_parts_of_a_step_add_up_to_it(pair, sampling, monkeypatch):
    clock(monkeypatch, 0.004, 0.001, 0.05, 0.003, 0.002, 0.07)
    found = breakdown(pair, TokenTree.from_parents([-1, 0, 0, 1, 1, 2, 3]), sampling, context=20, rounds=5)
    expected = {"step": 0.07, "draft": 0.005, "target": 0.05, "verify": 0.003, "keep": 0.002, "host": 0.01, "draw": 0.001, "share_not_model": 0.015 / 0.07}
    assert found == pytest.approx(expected)
    assert sum(found[name] for name in PARTS) == pytest.approx(found["step"])


def test_plain_decoding_has_no_draft_part(pair, monkeypatch):
    clock(monkeypatch, 0.05, 0.003, 0.002, 0.06)
    found = breakdown(pair, TokenTree.chain(1), Sampling(), context=1, rounds=5)
    assert found["draft"] == found["draw"] == 0
    assert (found["target"], found["step"]) == (0.05, 0.06) and found["host"] == pytest.approx(0.005)


def test_a_breakdown_leaves_every_step_the_same_step(pair, monkeypatch):
    """Each part and each whole step starts from the same length, or later rounds would look at more of the cache."""
    seen = []
    judge, keep = SequoiaDecoder.judge, SequoiaDecoder.keep
    monkeypatch.setattr(SequoiaDecoder, "judge", lambda self, *args: seen.append(int(self.sequence.length)) or judge(self, *args))
    monkeypatch.setattr(SequoiaDecoder, "keep", lambda self, *args: seen.append(int(self.sequence.length)) or keep(self, *args))
    breakdown(pair, TokenTree.chain(3), Sampling(), context=20, rounds=5)
    assert len(seen) == 2 * 2 * (5 + WARM_UP) and set(seen) == {19}


def test_fingerprints_are_compared_by_what_moves_times():
    here = fingerprint("cpu")
    assert differences(here, here) == []
    assert differences({}, here) == []
    other = here | {"threads": 999, "python": "2.7"}
    assert differences(other, here) == [f"threads 999, here {here['threads']}"]
