"""Latency: what is recorded, never how long it took."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from toys import PROMPTS, toy_pair

from sequoia_plan.artifacts import SequoiaPlanError, TokenTree
from sequoia_plan.planner import solve
from sequoia_plan.profiler import latency
from sequoia_plan.profiler.breakdown import PARTS, WARM_UP, breakdown
from sequoia_plan.profiler.hardware import differences, fingerprint
from sequoia_plan.profiler.measure import _best_nodes, measure
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


def test_every_size_with_quartiles(pair, sizes):
    found = latency.measure_latency(pair, Sampling(1.0), 1e9, 0.0, context=20)
    assert list(found.target) == list(found.draft) == list(found.quartiles["target"]) == list(found.quartiles["draft"]) == sizes
    assert found.context == 20 and found.samples[1] == latency.LEAST_ROUNDS and found.out_of_memory is None
    assert all(0 < low <= high for curve in found.quartiles.values() for low, high in curve.values())


def test_latency_is_timed_between_prompts(pair, sizes, monkeypatch):
    """Rounds lie among the prompts, as many more as are asked for come after them, and the profile holds them all."""
    events = []
    run = latency.LatencyMeter.round
    monkeypatch.setattr(latency.LatencyMeter, "round", lambda meter: (events.append("round"), run(meter)))
    monkeypatch.setattr(sys.modules["sequoia_plan.profiler.measure"], "encode", lambda tokenizer, prompt: PROMPTS[int(prompt)])
    found = measure(pair, [str(i) for i in range(12)], [Sampling(1.0)], 1e9, 20, precision=0, on_prompt=lambda *_: events.append("prompt"))[0]
    assert events == ["prompt"] * 10 + ["round"] + ["prompt"] * 2 + ["round"] * (latency.MOST_ROUNDS - 1)
    assert found.latency.samples[1] == latency.MOST_ROUNDS and list(found.latency.target) == sizes and found.trials > 0
    few = measure(pair, ["0", "1"], [Sampling(1.0)], 0.0, 20, precision=0)[0]
    assert few.latency.samples[1] == latency.LEAST_ROUNDS


def test_costly_sizes_are_timed_less_often(pair, sizes, monkeypatch):
    """A size of k plain passes in every k-th round, the largest in every fourth; what lies beyond the passes up to two nodes only."""
    monkeypatch.setattr(latency._Bench, "target", lambda bench: {1: 1.0, 2: 1.4, 3: 2.6, 4: 9.0}[bench.size])
    meter = latency.LatencyMeter(pair, Sampling(1.0), 20)
    meter.begin(1e9)
    found = meter.finish(0.0)
    assert latency.LEAST_ROUNDS == 5 and found.samples == {1: 5, 2: 5, 3: 3, 4: 2}
    for bench in meter.benches:
        taken = {name: sum(each == each for each in samples) for name, samples in bench.samples.items()}
        times = found.samples[bench.size]
        whole = times if bench.size <= latency.REST_UP_TO else 0
        assert taken == {"grow": times, "target": times, "draft": times, "rest": whole}
        assert {len(bench.samples[name]) for name in ("grow", "target", "draft")} == {5}


def test_no_tree_has_more_tokens_than_the_bound():
    """Best nodes of the endless tree against the planner's own optimum, for one vector, rows by level and ranks that rise."""
    for rows in ([[0.5, 0.2, 0.1]], [[0.4, 0.2], [0.5, 0.2], [0.7, 0.1]], [[0.1, 0.5, 0.2], [0.6, 0.0, 0.1]]):
        best = solve(rows, 40, 20).expected_tokens
        assert best <= _best_nodes(rows, 40) + 1e-12
    assert _best_nodes([[0.5, 0.2, 0.1]], 40) == pytest.approx(solve([0.5, 0.2, 0.1], 40, 40).expected_tokens)
    assert _best_nodes([[0.0]], 9) == 1 and _best_nodes([[1.0]], 9) == 9


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
    run = latency._Bench.run

    def limited(bench):
        if bench.size >= 3:
            raise error
        run(bench)

    monkeypatch.setattr(latency._Bench, "run", limited)
    found = latency.measure_latency(pair, Sampling(), 1e9, 0.0, context=20)
    assert list(found.target) == [1, 2] and found.out_of_memory == 3


def test_other_errors_and_plain_decoding_that_does_not_fit_are_errors(pair, sizes, monkeypatch):
    def failing(error):
        def run(bench):
            raise error

        monkeypatch.setattr(latency._Bench, "run", run)

    failing(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(torch.OutOfMemoryError):
        latency.measure_latency(pair, Sampling(), 1e9, 0.0, context=20)
    failing(RuntimeError("shapes differ"))
    with pytest.raises(RuntimeError, match="shapes differ"):
        latency.measure_latency(pair, Sampling(), 1e9, 0.0, context=20)


def test_no_size_above_the_largest_asked_for(pair, sizes):
    assert list(latency.measure_latency(pair, Sampling(), 1e9, 0.0, context=20, largest=2).target) == [1, 2]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, verifier="traversal")], ids=repr)
def test_the_parts_of_a_step_add_up_to_it(pair, sampling):
    found = breakdown(pair, TokenTree.from_parents([-1, 0, 0, 1, 1, 2, 3]), sampling, context=20, rounds=5)
    assert all(found[name] > 0 for name in ("step", "draft", "draw", "target", "verify", "keep"))  # host is a difference
    assert sum(found[name] for name in PARTS) == pytest.approx(found["step"])
    assert found["draw"] < found["draft"]
    assert found["share_not_model"] == pytest.approx(1 - (found["draft"] + found["target"]) / found["step"])


def test_plain_decoding_has_no_draft_part(pair):
    found = breakdown(pair, TokenTree.chain(1), Sampling(), context=1, rounds=5)
    assert found["draft"] == found["draw"] == 0 < found["target"] < found["step"]


def test_a_breakdown_leaves_every_step_the_same_step(pair, monkeypatch):
    """Each part and each whole step starts from the same length, or later rounds would look at more of the cache."""
    seen = []
    judge, keep = SequoiaDecoder.judge, SequoiaDecoder.keep
    monkeypatch.setattr(SequoiaDecoder, "judge", lambda self, *args: seen.append(int(self.length)) or judge(self, *args))
    monkeypatch.setattr(SequoiaDecoder, "keep", lambda self, *args: seen.append(int(self.length)) or keep(self, *args))
    breakdown(pair, TokenTree.chain(3), Sampling(), context=20, rounds=5)
    assert len(seen) == 2 * 2 * (5 + WARM_UP) and set(seen) == {19}


def test_fingerprints_are_compared_by_what_moves_times():
    here = fingerprint("cpu")
    assert differences(here, here) == []
    assert differences({}, here) == []
    other = here | {"threads": 999, "python": "2.7"}
    assert differences(other, here) == [f"threads 999, here {here['threads']}"]
