"""vLLM's own counters of speculation, from a metrics page (Prometheus text) or an engine."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Mapping
from http.client import HTTPException, IncompleteRead
from pathlib import Path

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
    r"\s+(\S+)"  # value
)
"""A line of Prometheus text."""
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
MAX_PAGE_BYTES = 1 << 26
TIMEOUT_SECONDS = 10
"""A server must answer within this time."""

Counters = dict[str, float]
"""Values by name, with positions in brackets, summed over engines, models and processes."""


def fetch(source: str) -> tuple[Counters, str]:
    """Reads the counters on a metrics page."""
    if not re.match(r"https?://", source):
        description = "a metrics page of vLLM (Prometheus text)"
        page = read_bytes(source, description, MAX_PAGE_BYTES).decode(errors="replace")
        return parse(page), page
    address = source
    if not source.rstrip("/").endswith("/metrics"):
        address = f"{source.rstrip('/')}/metrics"
    try:
        page = _download(address).decode(errors="replace")
    except (OSError, ValueError, HTTPException) as error:
        reason = getattr(error, "reason", error) or type(error).__name__
        raise SequoiaPlanError(
            f"--metrics {source}: {address} cannot be read ({str(reason).splitlines()[0]:.200}); "
            "name a running vLLM server, or a file of its metrics"
        ) from error
    return parse(page), page


def _download(address: str) -> bytes:
    """What a server answers, within `TIMEOUT_SECONDS` for all of it.

    The timeout of a connection is one for each read, so a server that sends a byte now and then
    would never meet it. Another thread reads, and is left behind when the time is over.
    """
    from urllib.request import urlopen

    outcome: list[bytes | Exception] = []

    def read() -> None:
        """Put the answer into `outcome`, or what went wrong."""
        try:
            with urlopen(address, timeout=TIMEOUT_SECONDS) as response:
                page = response.read(MAX_PAGE_BYTES)
                if response.length:  # the connection ended before the page did
                    raise IncompleteRead(page, response.length)
                outcome.append(page)
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(TIMEOUT_SECONDS)
    if not outcome:
        raise TimeoutError(f"no whole answer within {TIMEOUT_SECONDS} s")
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


def parse(page: str) -> Counters:
    """Reads the counters of speculation and of generated tokens from Prometheus text.

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
        if not name.startswith(PREFIX) and name not in (NUM_GENERATED, NUM_FIRST_TOKENS):
            continue
        if name == ACCEPTED_PER_POSITION:
            name = f"{name}[{labels.get('position', '?')}]"
        try:
            value = float(sample[3])
        except ValueError:
            continue
        if not math.isfinite(value):
            raise SequoiaPlanError(
                f"--metrics: {sample[1]} is {value}, expected a count; read the page again"
            )
        counters[name] = counters.get(name, 0.0) + value
    return counters


def chain_acceptance(
    after: Mapping[str, float],
    before: Mapping[str, float] | None = None,
    source: str = "",
    page: str | None = None,
) -> ChainAcceptance:
    """Computes how far chains were accepted between two snapshots of the counters."""
    name = source or "counters"
    positions = _positions(after, name, page)
    earlier = before or {}
    increase = {counter: value - earlier.get(counter, 0.0) for counter, value in after.items()}
    accepted = [increase[f"{ACCEPTED_PER_POSITION}[{position}]"] for position in positions]
    _check_increase(increase, accepted, name)
    drafts = increase[NUM_DRAFTS]

    is_file = source and "://" not in source
    source_text = Path(source).name if is_file else source
    mean_length = increase.get(NUM_DRAFT_TOKENS, 0.0) / drafts
    if mean_length < 0.9 * len(accepted):  # some chains were clearly shorter than the longest
        lengths = f"chains of {mean_length:.1f} tokens on average, {len(accepted)} at most"
        source_text = f"{source_text}; {lengths}".removeprefix("; ")
    try:
        return ChainAcceptance(
            drafts=round(drafts),
            accepted=tuple(map(round, accepted)),
            drafting_share=round(_drafting_share(increase, drafts, sum(accepted)), 4),
            source=source_text,
        )
    except SequoiaPlanError as error:
        raise SequoiaPlanError(f"{name}: {error}") from error


def _positions(counters: Mapping[str, float], name: str, page: str | None) -> list[int]:
    """Finds the positions of a drafted chain that vLLM counts acceptance for: 0, 1, ...."""
    counter_names = sorted(counter for counter in counters if counter.startswith(PREFIX))
    if not counter_names:
        if page is not None and "vllm:" not in page:
            raise SequoiaPlanError(
                f"{name}: holds no metrics of vLLM; start the server without "
                "--disable-log-stats and read its /metrics page"
            )
        raise SequoiaPlanError(
            f"{name}: vLLM counts no speculation; start the server with --speculative-config "
            "(and without --disable-log-stats)"
        )
    pattern = re.compile(rf"{re.escape(ACCEPTED_PER_POSITION)}\[(\d+)\]")
    matches = [pattern.fullmatch(counter) for counter in counter_names]
    positions = sorted(int(match[1]) for match in matches if match)
    if NUM_DRAFTS not in counters or not positions:
        raise SequoiaPlanError(
            f"{name}: found {', '.join(counter_names)[:200]}, expected {NUM_DRAFTS} and "
            f"{ACCEPTED_PER_POSITION}; this version counts otherwise: "
            "use vLLM V1, 0.8.5 or later"
        )
    if positions != list(range(len(positions))):
        raise SequoiaPlanError(
            f"{name}: {ACCEPTED_PER_POSITION} has the positions {positions}, "
            f"expected 0 to {len(positions) - 1}; read the whole page"
        )
    return positions


def _check_increase(increase: Mapping[str, float], accepted: list[float], name: str) -> None:
    """Raises if the counters were reset, counted nothing, or contradict each other."""
    drafts = increase[NUM_DRAFTS]
    if min(drafts, *accepted) < 0:
        raise SequoiaPlanError(
            f"{name}: the counters are lower than before; the server was started anew: "
            "read both pages again"
        )
    if drafts == 0:
        raise SequoiaPlanError(
            f"{name}: no drafts were counted; send the server requests, then read its metrics again"
        )
    if NUM_ACCEPTED in increase and abs(sum(accepted) - increase[NUM_ACCEPTED]) > 0.5:
        raise SequoiaPlanError(
            f"{name}: {ACCEPTED_PER_POSITION} adds up to {sum(accepted):g}, {NUM_ACCEPTED} is "
            f"{increase[NUM_ACCEPTED]:g}; this version counts otherwise, tell us which it is"
        )


def _drafting_share(increase: Mapping[str, float], drafts: float, num_accepted: float) -> float:
    """Share of a request's steps that drafted any token; 1 if the page lacks what it takes.

    A step yields its accepted tokens and one more, so the number of steps is the number of
    generated tokens minus the accepted ones. The first token of a request is from the pass over its
    prompt, which is no such step.
    """
    if NUM_GENERATED not in increase or NUM_FIRST_TOKENS not in increase:
        return 1.0
    steps = increase[NUM_GENERATED] - num_accepted - increase[NUM_FIRST_TOKENS]
    return min(1.0, drafts / steps) if steps > 0 else 1.0
