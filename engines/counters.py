"""vLLM's own counters of speculation, from a metrics page (Prometheus text) or an engine."""

from __future__ import annotations

import re
from http.client import HTTPException, IncompleteRead
from pathlib import Path
from urllib.request import urlopen

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.artifacts.files import read_bytes
from sequoia_plan.engines.plan import ChainAcceptance

PREFIX = "vllm:spec_decode_"
NUM_DRAFTS = f"{PREFIX}num_drafts"
NUM_DRAFT_TOKENS = f"{PREFIX}num_draft_tokens"
NUM_ACCEPTED = f"{PREFIX}num_accepted_tokens"
ACCEPTED_PER_POSITION = f"{PREFIX}num_accepted_tokens_per_pos"
NUM_GENERATED = "vllm:generation_tokens"
NUM_FIRST_TOKENS = "vllm:time_to_first_token_seconds_count"
"""Requests that got their first token."""

SAMPLE = re.compile(
    r"^([A-Za-z_:][\w:]*)"  # name
    r'(?:\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\})?'  # labels
    r"\s+(\d+(?:\.\d*)?(?:e[+-]?\d+)?)(?:\s|$)"  # value
)
"""A line of Prometheus text."""
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
MAX_PAGE_BYTES = 1 << 26
TIMEOUT_SECONDS = 10
"""A server must answer within this time."""

Counters = dict[str, float]
"""Values by name, with positions in brackets, summed over engines, models and processes."""


def fetch(source: str) -> Counters:
    """Reads the counters on a metrics page: a server's address, or a file."""
    if not re.match(r"https?://", source):
        description = "a metrics page of vLLM (Prometheus text)"
        return parse(read_bytes(source, description, MAX_PAGE_BYTES).decode(errors="replace"))
    address = source
    if not source.rstrip("/").endswith("/metrics"):
        address = f"{source.rstrip('/')}/metrics"
    try:
        with urlopen(address, timeout=TIMEOUT_SECONDS) as response:
            page = response.read(MAX_PAGE_BYTES)
            if response.length:  # the connection ended before the page did
                raise IncompleteRead(page, response.length)
    except (OSError, ValueError, HTTPException) as error:
        reason = getattr(error, "reason", error) or type(error).__name__
        raise SequoiaPlanError(
            f"--metrics {source}: {address} cannot be read ({str(reason).splitlines()[0]:.200}); "
            "name a running vLLM server, or a file of its metrics"
        ) from error
    return parse(page.decode(errors="replace"))


def parse(page: str) -> Counters:
    """Reads vLLM's counters from Prometheus text.

    Samples of one name are added up over engines, models and processes. Names lose the suffix
    `_total`, since vLLM's own snapshot of its counters (`LLM.get_metrics`) has none. Samples named
    `..._created` are times and are left out.
    """
    counters: Counters = {}
    for line in page.splitlines():
        sample = SAMPLE.match(line.strip())
        if not sample or sample[1].endswith("_created"):
            continue
        name, labels = sample[1].removesuffix("_total"), dict(LABEL.findall(sample[2] or ""))
        if name == ACCEPTED_PER_POSITION:
            name = f"{name}[{labels.get('position', '?')}]"
        counters[name] = counters.get(name, 0.0) + float(sample[3])
    return counters


def chain_acceptance(counters: Counters, source: str) -> ChainAcceptance:
    """Computes how far chains were accepted, from counts since the server's start or of a run.

    `source` is where the counts are from: a server's address, a file, or words.
    """
    accepted: list[float] = []
    while (name := f"{ACCEPTED_PER_POSITION}[{len(accepted)}]") in counters:
        accepted.append(counters[name])
    names = sorted(name for name in counters if name.startswith(PREFIX))
    if not names:
        raise SequoiaPlanError(
            f"{source}: vLLM counts no speculation there; start the server with "
            "--speculative-config and without --disable-log-stats, and read its /metrics page"
        )
    drafts, total = counters.get(NUM_DRAFTS), counters.get(NUM_ACCEPTED, -1.0)
    if drafts is None or not accepted or abs(sum(accepted) - total) > 0.5:
        raise SequoiaPlanError(
            f"{source}: found {', '.join(names)[:300]}, expected {NUM_DRAFTS}, and "
            f"{ACCEPTED_PER_POSITION} from position 0 on with the sum {NUM_ACCEPTED}; this version "
            "counts otherwise: use vLLM V1, 0.8.5 or later"
        )
    if not drafts:
        raise SequoiaPlanError(
            f"{source}: no drafts were counted; send the server requests, then read its metrics "
            "again"
        )
    origin = source if "://" in source else Path(source).name
    mean_length = counters.get(NUM_DRAFT_TOKENS, 0.0) / drafts
    if mean_length < 0.9 * len(accepted):  # some chains were clearly shorter than the longest
        origin += f"; chains of {mean_length:.1f} tokens on average, {len(accepted)} at most"
    return ChainAcceptance(
        drafts=round(drafts),
        accepted=tuple(map(round, accepted)),
        drafting_share=round(_drafting_share(counters, drafts, total), 4),
        source=origin,
    )


def _drafting_share(counters: Counters, drafts: float, num_accepted: float) -> float:
    """Share of a request's steps that drafted any token; 1 if the page lacks what it takes.

    A step yields its accepted tokens and one more, so the number of steps is the number of
    generated tokens minus the accepted ones. The first token of a request is from the pass over its
    prompt, which is no such step.
    """
    if NUM_GENERATED not in counters or NUM_FIRST_TOKENS not in counters:
        return 1.0
    steps = counters[NUM_GENERATED] - num_accepted - counters[NUM_FIRST_TOKENS]
    return min(1.0, drafts / steps) if steps > 0 else 1.0
