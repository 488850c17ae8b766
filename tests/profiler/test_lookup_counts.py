"""Counts by class of match: matching, trials, acceptance after a looked-up token, aggregation."""

from __future__ import annotations

import itertools
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from enumeration import without_replacement
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import PROMPTS, ToyModel, toy_pair

from sequoia_plan.artifacts import Profile, SequoiaPlanError
from sequoia_plan.artifacts import lookup as lookup_artifact
from sequoia_plan.artifacts.lookup import (
    MATCH_LENGTHS,
    MAX_MATCH,
    LookupCounts,
    MatchClass,
    class_of,
    class_summaries,
    limited_texts,
    read_positions,
)
from sequoia_plan.artifacts.merge import merge, pooled
from sequoia_plan.artifacts.prompts import BUILT_IN, held_out_half, load, measuring_half
from sequoia_plan.planner.report.profile_summary import describe_profile
from sequoia_plan.profiler import methods
from sequoia_plan.profiler.acceptance import measure_acceptance, measure_by_prompt
from sequoia_plan.profiler.children import DrawnChildren
from sequoia_plan.profiler.lookup_counts import (
    CHAIN,
    LEVELS_AFTER_CHAIN,
    LOOKUP_LEVELS,
    MAX_RUN,
    LookupTrials,
    look_up,
    lookup_counts,
)
from sequoia_plan.profiler.methods import ForcedMethod
from sequoia_plan.profiler.observed import LEVELS
from sequoia_plan.runtime import Pair, Sampling
from sequoia_plan.runtime.base import lookup as device_lookup

pytestmark = pytest.mark.usefixtures("one_thread")
texts = st.tuples(
    st.lists(st.integers(0, 2), min_size=1, max_size=40), st.integers(0, 40), st.integers(0, 90)
).map(lambda drawn: (drawn[0] + [drawn[0][0]] * drawn[2], drawn[1]))
"""Tokens of small numbers, some with a long repetition at the end, and a first position."""


def by_definition(text, position):
    """Match length, chain and run at a position."""
    known = text[: position + 1]
    length, end = 0, None
    for earlier in range(position):
        common = 0
        while common < min(MAX_MATCH, earlier + 1) and (
            known[earlier - common] == known[position - common]
        ):
            common += 1
        if common and common >= length:
            length, end = common, earlier
    if not length:
        return 0, [], 0
    chain = list(known)
    while len(chain) < position + 1 + MAX_RUN:
        chain.append(chain[end + len(chain) - position])
    chain = chain[position + 1 :]
    run = 0
    while run < MAX_RUN and position + 1 + run < len(text):
        if text[position + 1 + run] != chain[run]:
            break
        run += 1
    return length, chain[:CHAIN], run


@settings(max_examples=150)
@given(texts)
def test_look_up_follows_the_definition(drawn):
    text, first = drawn
    first = min(first, len(text) - 1)
    lookups = look_up(np.array(text), first)
    assert len(lookups.runs) == len(text) - first
    for at, position in enumerate(range(first, len(text))):
        length, chain, run = by_definition(text, position)
        assert (lookups.match_lengths[at], lookups.runs[at]) == (length, run)
        if length:
            assert lookups.chains[at].tolist() == chain


def test_look_up_agrees_with_the_decoder():
    generator = np.random.default_rng(0)
    text = generator.integers(0, 4, 60)
    text[40:] = text[10:30]
    lookups = look_up(text, 0)
    for position in range(len(text)):
        length, chain = device_lookup.look_up(
            torch.from_numpy(text), torch.tensor([position]), MAX_MATCH, CHAIN
        )
        assert int(length) == lookups.match_lengths[position]
        if int(length):
            assert chain.tolist() == lookups.chains[position].tolist()


@settings(max_examples=60)
@given(texts, st.randoms(use_true_random=False))
def test_trials_follow_the_definition(drawn, random):
    """Each position is a root; tallies are added up position by position."""
    text, first = drawn
    first = min(first, len(text) - 1)
    count, ranks = len(text) - first, 3
    levels = [0]
    while len(levels) < count:
        levels.append(random.choice([0, levels[-1] + 1]))
    node_classes = [level and random.randrange(2) for level in levels]
    rows = [
        2 * min(level, LEVELS - 1) + node_class if level < 6 else -1
        for level, node_class in zip(levels, node_classes, strict=True)
    ]
    trials = LookupTrials(np.array(text), levels, rows)
    generator = np.random.default_rng(random.randrange(99))
    drafted_probs = generator.random((count, ranks))
    looked_up_probs = generator.random((len(trials.tokens), ranks))
    tokens = zip(trials.token_positions.tolist(), trials.tokens.tolist(), strict=True)
    probs_of_token = dict(zip(tokens, looked_up_probs, strict=True))
    assert len(probs_of_token) == len(looked_up_probs)

    drafted = np.zeros((len(MATCH_LENGTHS), LEVELS, 2, 1 + ranks))
    looked_up = np.zeros((len(MATCH_LENGTHS), LOOKUP_LEVELS, 2, 1 + ranks))
    for at in range(count):
        if rows[at] >= 0:
            root = at - levels[at]
            match_class = class_of(by_definition(text, first + root)[0], MATCH_LENGTHS)
            row = drafted[match_class].reshape(-1, 1 + ranks)[rows[at]]
            row += [1, *drafted_probs[at]]
        length, chain, run = by_definition(text, first + at)
        if not length:
            continue
        table = looked_up[class_of(length, MATCH_LENGTHS)]
        for level in range(min(run, CHAIN - 1) + 1):
            if rows[at + level] >= 0:
                probs = probs_of_token[at + level, chain[level]]
                table[min(level, LOOKUP_LEVELS - 1), 0] += [1, *probs]
        for after in range(run + 1, run + 1 + LEVELS_AFTER_CHAIN):
            if run < MAX_RUN and at + after < count and rows[at + after] >= 0:
                table[min(after, LOOKUP_LEVELS - 1), 1] += [1, *drafted_probs[at + after]]

    tally = trials.tally(drafted_probs, looked_up_probs)
    for name, expected in (("drafted", drafted), ("looked_up", looked_up)):
        table = np.zeros_like(expected).reshape(-1, 1 + ranks)
        for number, *row in tally[name]:
            table[number] = row
        np.testing.assert_allclose(table, expected.reshape(-1, 1 + ranks), atol=1e-5)
    assert [tuple(position) for position in read_positions(tally["text"])] == [
        by_definition(text, position)[::2] for position in range(first, len(text))
    ]


class ScriptedModel(ToyModel):
    """Its logits after the token at position i put the tokens `script[i]` first, in that order."""

    def __init__(self, script, vocabulary):
        super().__init__(0, vocabulary=vocabulary)
        self.script = torch.zeros(64, vocabulary)
        for position, tokens in enumerate(script):
            for place, token in enumerate(tokens):
                self.script[position, token] = 10 - place

    def forward(self, input_ids, position_ids=None, **options):
        output = super().forward(input_ids, position_ids, **options)  # fills the cache
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None]
        logits = self.script[position_ids].expand(len(input_ids), -1, -1)
        return SimpleNamespace(logits=logits[:, -output.logits.shape[1] :])


def test_counts_of_a_scripted_text():
    """At temperature 0, every count by hand.

    The draft has the right token as its fourth, which is out of reach of the small tree: every
    step has one token. After token 2 of position 8, the draft's first token is the looked-up 3.
    """
    text, vocabulary = [1, 2, 3, 1, 2, 3, 1, 4, 2, 6, 5], 12
    target = [[token] for token in text[1:]]
    draft = [[8, 9, 10, token] for token in text[1:]]
    draft[8] = [3, 8, 9, 6]
    pair = Pair(
        ScriptedModel(target, vocabulary),
        ScriptedModel(draft, vocabulary),
        SimpleNamespace(eos_token_id=None),
        {},
    )
    method = ForcedMethod(pair, ranks=6, compares=False)
    (tally,) = method(torch.tensor(text[:5]), [Sampling(0.0)], max_new_tokens=5, seed=0)
    # the last token, 5, is never written
    assert tally["lookup"]["text"] == "2:2 3:1 4:0 0:0 1:0 0:0"
    counts = lookup_counts([tally["lookup"]], ["quote"])
    assert counts.texts == {"quote": ("2:2 3:1 4:0 0:0 1:0 0:0",)}
    assert counts.match_lengths == MATCH_LENGTHS

    def accepted(*ranks, off_spine=()):
        """(trials, count of each rank, those off the spine) where these ranks were accepted."""
        both = [*ranks, *off_spine]
        tables = [[float(part.count(rank)) for rank in range(1, 7)] for part in (both, off_spine)]
        return len(both), tables[0], len(off_spine), tables[1]

    def table(levels):
        no_counts = [0.0] * 6
        return [
            (
                level.trials,
                list(level.counts),
                level.off_spine.trials if level.off_spine else 0,
                list(level.off_spine.counts) if level.off_spine else no_counts,
            )
            for level in levels
        ]

    none, match1, match2, match3, *longer = counts.classes
    assert [table(part.drafted) for part in counts.classes] == [
        [accepted(4, 4)], [accepted(4)], [accepted(4)], [accepted(4, 4)], *[[] for _ in longer]
    ]  # fmt: skip
    assert [part.looked_up for part in (none, *longer)] == [()] * 4
    assert table(match1.looked_up) == [accepted(4), accepted(off_spine=[4])]
    assert table(match2.looked_up) == [
        accepted(1), accepted(1), accepted(5), *[accepted(off_spine=[4])] * 3
    ]  # fmt: skip
    assert table(match3.looked_up) == [
        accepted(1, 5), accepted(5, off_spine=[4]), accepted(off_spine=[4, 4]),
        accepted(off_spine=[4, 4]), accepted(off_spine=[4]),
    ]  # fmt: skip
    shares = [summary.share for summary in class_summaries(counts)]
    assert shares == [2 / 6, 1 / 6, 1 / 6, 2 / 6, 0, 0, 0]
    runs = [summary.mean_run for summary in class_summaries(counts)]
    assert runs == [None, 0, 2, 0.5, None, None, None]
    accepted_shares = [summary.accepted for summary in class_summaries(counts)]
    assert accepted_shares == [None, 0, 1, 0.5, None, None, None]


def exact_after_lookup(p, q, token, count):
    """Acceptance of a looked-up token, then of drafted children, by the definition of the rule.

    Args:
        p, q: float64 [vocabulary], what the target and the draft say; q may lack tokens.
        token: the token that lookup proposes.
        count: how many children are drafted after it.

    Returns:
        float64 [1 + count], over every ordered draw of `count` other tokens.
    """

    def normalised(x):
        return x / x.sum()

    without = np.where(np.arange(len(q)) == token, 0, q)
    result = np.zeros(1 + count)
    result[0] = p[token]
    for order, probability in without_replacement(normalised(without), count):
        residual = normalised(np.where(np.arange(len(p)) == token, 0, p))
        draft_probs, left = normalised(without), 1 - p[token]
        for rank, child in enumerate(order, 1):
            accept_prob = min(1, residual[child] / draft_probs[child])
            result[rank] += probability * left * accept_prob
            left *= 1 - accept_prob
            residual = np.maximum(residual - draft_probs, 0)
            if left < 1e-12:
                break
            residual = normalised(residual)
            draft_probs = np.where(np.arange(len(q)) == child, 0, draft_probs)
            draft_probs = normalised(draft_probs)
    return result


@pytest.mark.parametrize("d2t", [None, [0, 2, 3, 4]])
@pytest.mark.parametrize("twin", [None, "x left in q", "x left in the draws"])
def test_acceptance_after_a_looked_up_token_is_exact(d2t, twin, monkeypatch):
    """Averaged over every draw, against the definition. Two wrong ways give other figures."""
    generator = np.random.default_rng(4)
    p = generator.dirichlet(np.ones(5))
    q = generator.dirichlet(np.ones(5))
    covered = [0, 1, 2, 3, 4] if d2t is None else d2t
    q = np.where(np.isin(np.arange(5), covered), q, 0)
    q /= q.sum()
    draws = list(without_replacement(q[covered], 3))
    count = len(draws)
    drawn = torch.tensor([order for order, _ in draws])
    target_probs, draft_probs = torch.tensor(p).expand(count, -1), torch.tensor(q[covered])
    children = DrawnChildren(
        target_probs,
        draft_probs.expand(count, -1),
        drawn,
        Sampling(1.0, verifier="traversal"),
        None if d2t is None else torch.tensor(d2t),
    )
    if twin == "x left in q":
        monkeypatch.setattr(torch.Tensor, "scatter", lambda self, *_: self)
        monkeypatch.setattr(torch.Tensor, "masked_fill", lambda self, *_: self)
    if twin == "x left in the draws":
        keep = torch.arange(3).expand(count, -1)
        monkeypatch.setattr(torch.Tensor, "argsort", lambda self, **_: keep)
    weights = np.array([probability for _, probability in draws])
    errors = []
    for token in range(5):
        probs = children.looked_up_acceptance(torch.arange(count), torch.full((count,), token))
        assert probs.shape == (count, 3) and (probs.sum(1) <= 1 + 1e-6).all()
        expected = exact_after_lookup(p, q, token, 2)
        errors.append(np.abs(weights @ probs.numpy() - expected).max())
    assert (max(errors) < 1e-6) == (twin is None)


@pytest.mark.parametrize("covered", [None, [0, 2, 3, 5, 7]])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_other_tallies_are_the_same_without_lookup(covered, temperature, monkeypatch):
    """Lookup takes no random numbers from the draws, and it changes no sum."""
    pair = toy_pair(covered=covered)
    names = ["traversal", "sequoia"] if temperature else ["sequoia"]
    samplings = [Sampling(temperature, verifier=name) for name in names]

    def tallies():
        method = ForcedMethod(pair, ranks=4, compares=bool(temperature))
        return [method(torch.tensor(prompt), samplings, 24, 5) for prompt in PROMPTS[:3]]

    counted = tallies()
    monkeypatch.setattr(methods, "counts_lookup", lambda sampling: False)
    uncounted = tallies()
    for tally in itertools.chain(*counted):
        assert tally["lookup"]["looked_up"]
        tally["lookup"] = None
    assert counted == uncounted


def test_verifiers_that_cannot_look_up_are_not_counted():
    pair = toy_pair()
    samplings = [Sampling(1.0, verifier=name) for name in ("specinfer", "sequoia")]
    options = {"precision": 0, "tokens_per_prompt": 16, "ranks": 3}
    specinfer, sequoia = measure_acceptance(pair, PROMPTS[:2], samplings, **options)
    assert lookup_counts(specinfer.lookup, [None]) is None
    assert lookup_counts(sequoia.lookup, [None]) is not None
    (decoding,) = measure_acceptance(pair, PROMPTS[:2], samplings[1:], method="decoding", **options)
    assert lookup_counts(decoding.lookup, [None]) is None


def observed_counts(kinds, prompts=PROMPTS[:4], **options):
    """The counts of toy models on a few prompts."""
    sampling = Sampling(0.8, verifier="sequoia")
    options = {"precision": 0, "tokens_per_prompt": 24, "ranks": 4} | options
    (acceptance,) = measure_acceptance(toy_pair(), prompts, [sampling], **options)
    return acceptance, lookup_counts(acceptance.lookup, kinds)


def test_a_resumed_measurement_has_the_same_counts(tmp_path):
    _, whole = observed_counts(["chat"])
    journal = tmp_path / "journal"
    options = {"precision": 0, "tokens_per_prompt": 24, "ranks": 4, "journal": journal}
    progress = measure_by_prompt(
        toy_pair(), PROMPTS[:4], [Sampling(0.8, verifier="sequoia")], **options
    )
    next(progress), next(progress)
    progress.close()
    _, resumed = observed_counts(["chat"], journal=journal)
    assert resumed == whole


def test_texts_are_kept_by_kind_of_prompt():
    acceptance, counts = observed_counts(["chat", "code"], rounds=2)
    texts_of_prompts = [tally["text"] for tally in acceptance.lookup]
    assert len(texts_of_prompts) == 8
    assert counts.texts == {
        "chat": tuple(texts_of_prompts[::2]),
        "code": tuple(texts_of_prompts[1::2]),
    }
    # every position counts once as the root of a step
    positions = [position for text in texts_of_prompts for position in read_positions(text)]
    for number, match_class in enumerate(counts.classes[1:], 1):
        num_roots = sum(
            class_of(position.match_length, MATCH_LENGTHS) == number for position in positions
        )
        assert num_roots == (match_class.looked_up[0].trials if match_class.looked_up else 0)
    # positions by level and class of parent are those of the profile, split by class of match
    levels = acceptance.levels()
    for level, total in enumerate(levels):
        rows = [part.drafted[level] for part in counts.classes if len(part.drafted) > level]
        assert sum(row.trials for row in rows) == total.trials
        for rank, count in enumerate(total.counts):
            assert sum(row.counts[rank] for row in rows) == pytest.approx(count, abs=1e-3)
    without_kinds = lookup_counts(acceptance.lookup, ["chat", None])
    assert without_kinds.texts == {"all": tuple(texts_of_prompts)}
    too_many = lookup_counts(acceptance.lookup, [str(number) for number in range(65)])
    assert too_many.texts == without_kinds.texts


def profile_of(acceptance, counts):
    levels = acceptance.levels()
    return Profile(acceptance=pooled(levels), levels=levels, lookup=counts)


def test_profiles_are_written_and_merged(tmp_path):
    first, second = (
        profile_of(*observed_counts([kind], prompts))
        for kind, prompts in (("chat", PROMPTS[:4]), ("code", PROMPTS[4:7]))
    )
    for number, profile in enumerate((first, second)):
        profile.save(tmp_path / f"{number}.yaml")
        assert Profile.load(tmp_path / f"{number}.yaml") == profile
    merged = merge([first, second]).lookup
    assert merged.texts == first.lookup.texts | second.lookup.texts
    both = zip(merged.classes, first.lookup.classes, second.lookup.classes, strict=True)
    for total, *parts in both:
        for name in ("drafted", "looked_up"):
            for level, row in enumerate(getattr(total, name)):
                rows = [
                    getattr(part, name)[level] for part in parts if level < len(getattr(part, name))
                ]
                assert row.trials == sum(part.trials for part in rows)
                assert row.counts[0] == pytest.approx(sum(part.counts[0] for part in rows))
                if level and name == "looked_up":
                    off_trials = sum(part.off_spine.trials for part in rows)
                    assert (row.off_spine.trials if row.off_spine else 0) == off_trials
    without = Profile(acceptance=second.acceptance, levels=second.levels)
    assert merge([first, without]).lookup is None
    other = LookupCounts((MatchClass(0, second.lookup.classes[0].drafted),))
    with pytest.raises(SequoiaPlanError, match="classes of matches"):
        merge([first, Profile(acceptance=second.acceptance, levels=second.levels, lookup=other)])


def test_profile_prints_classes_of_match():
    profile = profile_of(*observed_counts(["chat"], PROMPTS[:7]))
    summaries = [summary._asdict() for summary in class_summaries(profile.lookup)]
    assert [summary["match_length"] for summary in summaries] == list(MATCH_LENGTHS)
    assert sum(summary["share"] for summary in summaries) == pytest.approx(1)
    lines = list(describe_profile(profile, verbose=True))
    start = next(number for number, line in enumerate(lines) if line.startswith("lookup")) + 1
    rows = [line.split() for line in lines[start : start + len(MATCH_LENGTHS)]]
    assert [row[0] for row in rows] == ["0", "1", "2", "3-4", "5-7", "8-15", "16+"]
    assert [row[1] for row in rows] == [f"{summary['share']:.1%}" for summary in summaries]
    assert rows[1][2:] == [f"{summaries[1]['accepted']:.1%}", f"{summaries[1]['mean_run']:.1f}"]


def test_texts_beyond_the_limit_are_left_out(monkeypatch):
    """Kinds take turns, so none is left without texts."""
    monkeypatch.setattr(lookup_artifact, "MAX_TEXT_CHARACTERS", 10)
    texts_of_kinds = {"chat": ["0:0 0:0", "1:1"], "code": ["2:3", "3:0", "4:0"]}
    assert limited_texts(texts_of_kinds) == {"chat": ("0:0 0:0",), "code": ("2:3",)}


def test_built_in_prompts_that_copy_are_in_both_halves():
    """They are spread over the file, because a measurement may end early."""
    prompts = load(BUILT_IN)
    assert {prompt.kind for prompt in prompts} == {prompt.kind for prompt in prompts[:56]}
    for half in (measuring_half(prompts), held_out_half(prompts)):
        kinds = Counter(prompt.kind for prompt in half)
        assert len(half) == 92 and len(kinds) == 12
        assert all(kinds[kind] == 3 for kind in ("proofread", "quote", "edit-code", "shorten"))


def test_texts_that_repeat_nothing_have_counts_without_a_match():
    trials = LookupTrials(np.arange(9), [0, 0, 0], [0, 0, 0])
    probs = np.full((3, 2), 0.25)
    tally = trials.tally(probs, np.zeros((0, 2)))
    counts = lookup_counts([tally], [None])
    assert counts.classes[0].drafted[0].trials == 3
    assert not any(part.looked_up for part in counts.classes)
    assert lookup_counts([{**tally, "drafted": []}], [None]) is None
