"""vLLM's own counters of speculation, from a metrics page (Prometheus text) or an engine."""

import re
from collections import defaultdict
from collections.abc import Mapping
from http.client import HTTPException
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
SAMPLE = re.compile(r"^(vllm:\w+?)(?:_total)?(?:\{(.*)\})? (\S+)", re.MULTILINE)
"""Name, labels and value. vLLM's own snapshot (`LLM.get_metrics`) has names without `_total`."""
POSITION = re.compile(r'(?:^|,)position="(\d+)"')
MAX_PAGE_BYTES = 1 << 26
TIMEOUT_SECONDS = 10
"""A server must answer within this time."""


def fetch(source: str) -> dict[str, float]:
    """Reads the counters on a metrics page: a server's address, or a file."""
    if not re.match(r"https?://", source):
        page = read_bytes(source, "a metrics page of vLLM (Prometheus text)", MAX_PAGE_BYTES)
        return parse(page.decode(errors="replace"))
    address = f"{source.rstrip('/').removesuffix('/metrics')}/metrics"
    try:
        with urlopen(address, timeout=TIMEOUT_SECONDS) as response:
            return parse(response.read().decode(errors="replace"))
    except (OSError, ValueError, HTTPException) as error:
        raise SequoiaPlanError(
            f"--metrics {source}: {address} cannot be read ({error!r:.200}); "
            "name a running vLLM server, or a file of its metrics"
        ) from error


def parse(page: str) -> dict[str, float]:
    """Values by name, with positions in brackets, summed over engines, models and processes."""
    counters: dict[str, float] = defaultdict(float)
    for name, labels, value in SAMPLE.findall(page):
        position = POSITION.search(labels)
        counters[f"{name}[{position[1]}]" if position else name] += float(value)
    return counters


def chain_acceptance(counters: Mapping[str, float], source: str) -> ChainAcceptance:
    """Computes how far chains were accepted, from counts since the server's start or of a run.

    `source` is where the counts are from: a server's address, a file, or words.
    """
    accepted: list[float] = []
    while (name := f"{ACCEPTED_PER_POSITION}[{len(accepted)}]") in counters:
        accepted.append(counters[name])
    drafts, total = counters.get(NUM_DRAFTS), counters.get(NUM_ACCEPTED, -1.0)
    if not drafts or not accepted or abs(sum(accepted) - total) > 0.5:
        names = sorted(name for name in counters if name.startswith(PREFIX))
        raise SequoiaPlanError(
            f"{source}: found {', '.join(names)[:300] or 'no counters of speculation'}, expected "
            f"{NUM_DRAFTS} above 0, and {ACCEPTED_PER_POSITION} from position 0 on with the sum "
            f"{NUM_ACCEPTED}; use vLLM V1, 0.8.5 or later, with --speculative-config and without "
            "--disable-log-stats, and send it requests"
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


def _drafting_share(counters: Mapping[str, float], drafts: float, num_accepted: float) -> float:
    """Share of a request's steps that drafted any token; 1 if the page lacks what it takes.

    A step yields its accepted tokens and one more, so the number of steps is the number of
    generated tokens minus the accepted ones. The first token of a request is from the pass over its
    prompt, which is no such step.
    """
    if NUM_GENERATED not in counters or NUM_FIRST_TOKENS not in counters:
        return 1.0
    steps = counters[NUM_GENERATED] - num_accepted - counters[NUM_FIRST_TOKENS]
    return min(1.0, drafts / steps) if steps > 0 else 1.0
