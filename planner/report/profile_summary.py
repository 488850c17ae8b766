"""What a profile measured, in the terminal: a few lines, or all of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from sequoia_plan.artifacts import Latency, Profile
from sequoia_plan.artifacts.lookup import ClassSummary, LookupCounts, class_summaries

BRIEF_RANKS = 8
BRIEF_SIZES = (1, 4, 16, 64, 256)
"""What a short summary shows of acceptance by rank, and of times by the tokens in a pass."""


def describe_profile(profile: Profile, verbose: bool = False) -> Iterator[str]:
    """Yields lines with acceptance, lookup and times; all levels, ranks and sizes if `verbose`."""
    settings = profile.settings
    what = f"at temperature {settings.get('temperature', 0):g}, verifier {profile.verifier}"
    for role, model in profile.models.items():
        dtype = f", {model['dtype']}" if model.get("dtype") else ""
        yield f"{role:<12}{model.get('name')}{dtype}"
    if not verbose:
        probs = _probs_text(profile.acceptance.pooled()[:BRIEF_RANKS])
        yield f"accepted    {probs} ... of the draft's 1st, 2nd, 3rd ... choice {what}"
    else:
        yield f"acceptance  {_probs_text(profile.acceptance.pooled())}  {what}"
        yield f"            effective sample size {profile.effective_trials}"
        yield from _by_level(profile)
    if profile.lookup:
        yield from _by_match(profile.lookup) if verbose else _lookup_line(profile.lookup)
    if profile.latency:
        yield from _times(profile.latency, profile.models.get("target", {}), verbose)


def _by_level(profile: Profile) -> Iterator[str]:
    """Yields acceptance by rank for each level, and off the spine where it was counted."""
    counts, rates = profile.acceptance.counts, profile.acceptance.with_one_class().rates
    if counts is None:
        return
    for level, (trials, accepted) in enumerate(zip(counts.trials, counts.accepted, strict=True)):
        sign = "+" if 0 < level == counts.num_levels - 1 else " "  # it holds for deeper ones, too
        yield f"  level {level}{sign}  {_probs_text(rates[level, 0])}  ({trials.sum():.0f})"
        if counts.num_classes > 1 and trials[1]:
            yield f"    off the spine  {_probs_text(accepted[1] / trials[1])}  ({trials[1]:.0f})"


def _lookup_line(lookup: LookupCounts) -> Iterator[str]:
    """Yields how often the end of the text occurs earlier in it."""
    share = sum(summary.share for summary in class_summaries(lookup) if summary.match_length)
    yield f"lookup      before {share:.0%} of tokens, the end of the text occurs earlier in it"


def _by_match(lookup: LookupCounts) -> Iterator[str]:
    """Yields, by length of the match, how often it comes up and how far its lookup chain holds.

    `accepted` is of the chain's first token, `run` the number of its tokens that come next in the
    text, on average.
    """
    summaries = class_summaries(lookup)
    yield "lookup      match   share   accepted    run"
    for summary, name in zip(summaries, _match_names(summaries), strict=True):
        accepted = "" if summary.accepted is None else f"{summary.accepted:.1%}"
        mean_run = "" if summary.mean_run is None else f"{summary.mean_run:.1f}"
        line = f"            {name:<5}  {summary.share:>6.1%}  {accepted:>9}  {mean_run:>5}"
        yield line.rstrip()


def _match_names(summaries: Sequence[ClassSummary]) -> Iterator[str]:
    """Yields the lengths of match that each class stands for, as "0", "1-3" and "4+"."""
    lengths = [summary.match_length for summary in summaries]
    for first, following in itertools.pairwise(lengths):
        yield f"{first}" if following == first + 1 else f"{first}-{following - 1}"
    yield f"{lengths[-1]}+"


def _times(latency: Latency, target: Mapping[str, Any], verbose: bool) -> Iterator[str]:
    """Yields the times of passes by the tokens in them, and what a streamed target moves."""
    context = f", with {latency.context} tokens in the KV cache" if latency.context else ""
    yield f"times       of a pass by the tokens in it{context}"
    for role, seconds_by_size in (("target", latency.target), ("draft", latency.draft)):
        sizes = [size for size in seconds_by_size if verbose or size in BRIEF_SIZES]
        times = [f"{size}: {1000 * seconds_by_size[size]:.1f} ms" for size in sizes]
        yield f"  {role:<10}{'  '.join(times)}"
    yield f"  overhead  {latency.overhead * 1000:.2f} ms a step"
    if latency.stream and "streamed_bytes" in target:
        yield (
            f"streamed    {target['streamed_bytes'] / 1e6:.0f} MB a pass in "
            f"{latency.stream.seconds * 1000:.0f} ms; {target['resident_layers']} of "
            f"{target['layers']} layers, and {target['resident_bytes'] / 1e6:.0f} MB in all, stay "
            "in memory"
        )


def _probs_text(probs: Iterable[float]) -> str:
    """Probabilities, as "0.500 0.125"."""
    return " ".join(f"{p:.3f}" for p in probs)
