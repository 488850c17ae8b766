"""vLLM's own counters of speculation, from a metrics page (Prometheus text) or an engine."""

import re
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from urllib.request import urlopen

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.engines.plan import ChainAcceptance

PREFIX = "vllm:spec_decode_"
NUM_DRAFTS = f"{PREFIX}num_drafts"
ACCEPTED_PER_POSITION = f"{PREFIX}num_accepted_tokens_per_pos"
NUM_GENERATED = "vllm:generation_tokens"
NUM_FIRST_TOKENS = "vllm:time_to_first_token_seconds_count"
"""Requests that got their first token."""
STEP_SECONDS = "vllm:inter_token_latency_seconds_sum"
NUM_STEPS = "vllm:inter_token_latency_seconds_count"
"""Steps of all requests; the passes over prompts are none."""
SAMPLE = re.compile(r"^(vllm:\w+?)(?:_total)?(?:\{(.*)\})? (\S+)", re.MULTILINE)
"""Name, labels and value. vLLM's own snapshot (`LLM.get_metrics`) has names without `_total`."""
POSITION = re.compile(r'(?:^|,)position="(\d+)"')
TIMEOUT_SECONDS = 10
"""A server must answer within this time."""


def fetch(url: str) -> dict[str, float]:
    """Reads the counters on a running server's metrics page."""
    address = f"{url.rstrip('/').removesuffix('/metrics')}/metrics"
    try:
        with urlopen(address, timeout=TIMEOUT_SECONDS) as response:
            return parse(response.read().decode(errors="replace"))
    except (OSError, ValueError, HTTPException) as error:
        raise SequoiaPlanError(
            f"{address} cannot be read ({error!r:.200}); name a running vLLM server"
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
    drafts = counters.get(NUM_DRAFTS)
    if not drafts or not accepted:
        names = sorted(name for name in counters if name.startswith(PREFIX))
        raise SequoiaPlanError(
            f"{source}: found {', '.join(names)[:300] or 'no counters of speculation'}, expected "
            f"{NUM_DRAFTS} above 0, and {ACCEPTED_PER_POSITION} from position 0 on; use vLLM V1, "
            "0.8.5 or later, with --speculative-config and without --disable-log-stats, and send "
            "it requests"
        )
    return ChainAcceptance(
        drafts=round(drafts),
        accepted=tuple(map(round, accepted)),
        # looked-up chains are not in every step; without counts of steps they are taken to be
        drafting_share=round(min(1.0, drafts / (counters.get(NUM_STEPS) or drafts)), 4),
        source=source,
    )


@dataclass(frozen=True)
class ServedSteps:
    """The steps that a running server made in a while, averaged over its requests."""

    seconds: float
    """Seconds of a step, with whatever else the server did in it, such as prefills of others."""
    tokens: float
    """Tokens of a step and request."""
    requests: float
    """Requests that were decoded together."""
    acceptance: ChainAcceptance | None
    """How far chains were accepted; None if none was drafted."""


def watch(source: str, seconds: float) -> ServedSteps:
    """Reads a running server's counters twice, so many seconds apart, and changes nothing there."""
    before, start_time = fetch(source), time.perf_counter()
    time.sleep(seconds)
    after, elapsed = fetch(source), time.perf_counter() - start_time
    counters = {name: value - before.get(name, 0.0) for name, value in after.items()}
    steps = counters.get(NUM_STEPS, 0.0)
    if steps <= 0:
        raise SequoiaPlanError(
            f"{source}: no token was decoded in {seconds:g} seconds; send the server your usual "
            "requests meanwhile, or give it more seconds"
        )
    return ServedSteps(
        seconds=counters[STEP_SECONDS] / steps,
        tokens=(counters[NUM_GENERATED] - counters[NUM_FIRST_TOKENS]) / steps,
        requests=counters[STEP_SECONDS] / elapsed,
        acceptance=chain_acceptance(counters, source) if counters.get(NUM_DRAFTS) else None,
    )
