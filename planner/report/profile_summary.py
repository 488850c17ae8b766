"""What a profile measured, in a few lines."""

from collections.abc import Iterator, Mapping
from typing import Any

from sequoia_plan.artifacts import Latency, Profile
from sequoia_plan.artifacts.lookup import share_with_match

BRIEF_RANKS = 8
BRIEF_SIZES = (1, 4, 16, 64, 256)
"""The shown part of acceptance by rank, and of times by the tokens in a pass."""


def describe_profile(profile: Profile) -> Iterator[str]:
    """Yields lines with models, acceptance by rank, lookup, and times by the tokens in a pass."""
    for role, model in profile.models.items():
        weights = model.get("weights") or model.get("dtype")
        yield f"{role:<12}{model.get('name')}{f', {weights}' if weights else ''}"
    probs = " ".join(f"{p:.3f}" for p in profile.acceptance.pooled()[:BRIEF_RANKS])
    yield (
        f"accepted    {probs} ... of the draft's 1st, 2nd, 3rd ... choice at temperature "
        f"{profile.settings.get('temperature', 0):g}, verifier {profile.verifier}"
    )
    if profile.lookup:
        share = share_with_match(profile.lookup)
        yield f"lookup      before {share:.0%} of tokens, the end of the text occurs earlier in it"
    for latency in (profile.latency, *profile.longer) if profile.latency else ():
        yield from _times(latency, profile.models.get("target", {}))


def _times(latency: Latency, target: Mapping[str, Any]) -> Iterator[str]:
    """Yields the times of passes by the tokens in them, and what a streamed target moves."""
    context = f", with {latency.context} tokens in the KV cache" if latency.context else ""
    yield f"times       of a pass by the tokens in it{context}"
    for role, seconds in (("target", latency.target), ("draft", latency.draft)):
        times = [f"{n}: {1000 * seconds[n]:.1f} ms" for n in BRIEF_SIZES if n in seconds]
        yield f"  {role:<10}{'  '.join(times)}"
    if latency.stream and "layers" in target:
        yield (
            f"streamed    {latency.stream.bytes / 1e6:.0f} MB a pass in "
            f"{latency.stream.seconds * 1000:.0f} ms; {target['resident_layers']} of "
            f"{target['layers']} layers, and {target['resident_bytes'] / 1e6:.0f} MB in all, stay "
            "in memory"
        )
