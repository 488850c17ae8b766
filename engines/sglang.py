"""A plan for SGLang with chains (--speculative-eagle-topk 1), from its servers' files.

Nothing is run here. Acceptance is from the histogram in the `meta_info` of responses
(`spec_correct_drafts_histogram`, formerly `spec_accept_histogram`): entry n counts the steps in
which n drafted tokens were accepted. Step times are from lines of the log,
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from sequoia_plan.artifacts import ArgumentError, SequoiaPlanError
from sequoia_plan.artifacts.files import read_bytes
from sequoia_plan.artifacts.uncertainty import median_with_error
from sequoia_plan.engines.plan import ChainAcceptance, ScheduleEntry, StepSeconds

HISTOGRAMS = ("spec_correct_drafts_histogram", "spec_accept_histogram")
DECODE_LINE = re.compile(
    r"Decode batch.*?#running-req: (\d+).*?gen throughput \(token/s\): ([\d.]+)"
)
ACCEPT_LENGTH = re.compile(r"accept len: ([\d.]+)")
NUM_STEPS = re.compile(r"speculative_num_steps=(\d+|None)")
TOP_K = re.compile(r"speculative_eagle_topk=(\d+)")
LOG_INTERVAL = re.compile(r"decode_log_interval=(\d+)")
DEFAULT_LOG_INTERVAL = 40
"""Steps between two lines of the log, unless the server has another `decode_log_interval`."""
MAX_FILE_BYTES = 1 << 28
MAX_REQUESTS, MAX_TOKENS = 1 << 20, 1 << 10
"""The most requests of a step, and speculative tokens, that a log may speak of."""
EXPECTED = "responses of SGLang, as JSON or a JSON object a line"


class ServerLog(NamedTuple):
    """Measurements from the log of one server."""

    speculative_tokens: int
    steps: tuple[StepSeconds, ...]
    accept_lengths: dict[int, float]


def read_responses(path: str) -> ChainAcceptance:
    """Reads a file of responses, and sums their histograms of accepted tokens.

    Entry n of a histogram counts the steps in which n drafted tokens were accepted.
    """
    histograms = list(_histograms(_read_json(path)))
    if not histograms:
        raise SequoiaPlanError(
            f"{path}: no response has meta_info.{HISTOGRAMS[0]}; "
            "ask a server that runs with --speculative-algorithm for whole responses"
        )
    for histogram in histograms:
        if not isinstance(histogram, list) or not all(map(_is_count, histogram)):
            raise SequoiaPlanError(
                f"{path}: found the histogram {histogram!r:.60}, expected a list of counts"
            )
    num_entries = max(map(len, histograms))
    padded = [histogram + [0] * (num_entries - len(histogram)) for histogram in histograms]
    counts = np.sum(padded, axis=0)
    if num_entries < 2 or counts[1:].sum() == 0:
        raise SequoiaPlanError(
            f"{path}: no drafted token was accepted in {int(counts.sum())} steps; "
            "the draft does not fit the target, or nothing was drafted"
        )
    at_least_n_accepted = counts[::-1].cumsum()[::-1]  # entry 0 counts all steps
    return ChainAcceptance(
        drafts=int(at_least_n_accepted[0]),
        accepted=tuple(map(int, at_least_n_accepted[1:])),
        source=f"{len(histograms)} responses of SGLang",
    )


def _read_json(path: str) -> list[Any]:
    """Reads a JSON list, JSON lines, or a single JSON document that spans several lines."""
    text = read_bytes(path, EXPECTED, MAX_FILE_BYTES).decode(errors="replace")
    try:
        if text.lstrip().startswith("["):
            return [json.loads(text)]
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except (ValueError, RecursionError):
        try:
            return [json.loads(text)]
        except (ValueError, RecursionError) as error:
            raise SequoiaPlanError(f"{path}: not JSON; expected {EXPECTED}") from error


def _histograms(document: Any) -> Iterator[Any]:
    """Yields every histogram of accepted tokens in a JSON document, at any depth of nesting."""
    if isinstance(document, dict):
        name = next((name for name in HISTOGRAMS if document.get(name)), None)
        if name:
            yield document[name]
        else:
            for value in document.values():
                yield from _histograms(value)
    elif isinstance(document, list):
        for value in document:
            yield from _histograms(value)


def _is_count(value: Any) -> bool:
    """True for a whole number >= 0. JSON's true and false are no numbers."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def read_log(path: str) -> ServerLog:
    """Reads step times and accept lengths from a server's log."""
    text = read_bytes(path, "a log of SGLang", MAX_FILE_BYTES).decode(errors="replace")
    _check_chains(path, text)
    decode_lines = list(_decode_lines(text))
    if not decode_lines:
        raise SequoiaPlanError(
            f"{path}: no line 'Decode batch ... gen throughput (token/s)'; "
            "expected a log of SGLang that decoded for a while"
        )
    length = _num_speculative_tokens(path, text)
    interval_match = LOG_INTERVAL.search(text)
    log_interval = int(interval_match[1][:9]) if interval_match else DEFAULT_LOG_INTERVAL
    if length and not any(accept_length for _, _, accept_length in decode_lines):
        raise SequoiaPlanError(
            f"{path}: ran with {length} speculative tokens, but no line has 'accept len'; "
            "use an SGLang that logs it"
        )
    samples: dict[int, list[tuple[float, float]]] = {}  # seconds and tokens a step, by batch size
    for (previous_batch, *_), (batch, throughput, accept_length) in pairwise(decode_lines):
        if previous_batch == batch:
            tokens_per_step = accept_length or 1.0
            seconds_per_step = batch * tokens_per_step / throughput
            samples.setdefault(batch, []).append((seconds_per_step, tokens_per_step))
    if not samples:
        raise SequoiaPlanError(
            f"{path}: no two 'Decode batch' lines in a row with the same #running-req; "
            "expected a steady number of requests for a while"
        )
    steps = []
    for batch, batch_samples in sorted(samples.items()):
        seconds, error = median_with_error(np.array([seconds for seconds, _ in batch_samples]))
        step = StepSeconds(
            batch=batch,
            speculative_tokens=length,
            seconds=seconds,
            error=error,
            steps=len(batch_samples) * log_interval,  # a line stands for that many steps
        )
        steps.append(step)
    accept_lengths = {
        batch: float(np.mean([tokens for _, tokens in batch_samples]))
        for batch, batch_samples in samples.items()
    }
    return ServerLog(length, tuple(steps), accept_lengths)


def _check_chains(path: str, text: str) -> None:
    """Raises if a server's arguments say that it drafted trees."""
    top_k = TOP_K.search(text)
    if top_k and int(top_k[1]) != 1:
        raise SequoiaPlanError(
            f"{path}: the server ran with --speculative-eagle-topk {top_k[1]}, a tree; "
            "expected 1, a chain"
        )


def _num_speculative_tokens(path: str, text: str) -> int:
    """Reads the length of the server's chains from its arguments; 0 is no speculation."""
    num_steps = NUM_STEPS.search(text)
    if not num_steps:
        raise SequoiaPlanError(
            f"{path}: does not say speculative_num_steps; "
            "expected a log from the server's start on, with its server_args"
        )
    length = 0 if num_steps[1] == "None" else int(num_steps[1][:9])
    if length > MAX_TOKENS:
        raise SequoiaPlanError(
            f"{path}: speculative_num_steps={num_steps[1]:.20}, expected at most {MAX_TOKENS}"
        )
    return length


def _decode_lines(text: str) -> Iterator[tuple[int, float, float | None]]:
    """Yields three numbers of each line of the log about decoding.

    They are the requests decoded together, the generated tokens a second, and the accept length
    (the mean number of tokens that a step yields for a request), None if the line has none. Lines
    with broken numbers are left out.
    """
    for line in text.splitlines():
        match = DECODE_LINE.search(line)
        if not match:
            continue
        accept_length = ACCEPT_LENGTH.search(line)
        try:
            num_requests, throughput = int(match[1]), float(match[2])
            tokens_per_step = float(accept_length[1]) if accept_length else None
        except ValueError:  # two processes may have written into each other's lines
            continue
        values = (throughput, 1.0 if tokens_per_step is None else tokens_per_step)
        if 0 < num_requests <= MAX_REQUESTS and all(0 < value < math.inf for value in values):
            yield num_requests, throughput, tokens_per_step


def acceptance_from_logs(logs: Sequence[ServerLog]) -> ChainAcceptance:
    """Computes acceptance from the accept length of the log with the most speculative tokens.

    The accept length is the mean number of tokens that a step yields for a request.
    """
    log = max(logs, key=lambda log: log.speculative_tokens)
    if not log.speculative_tokens:
        raise ArgumentError(
            "--log: no server ran with speculation; add the log of one that did, or --responses"
        )
    # each step verifies one chain for each request
    drafts = sum(step.batch * step.steps for step in log.steps)
    tokens = sum(log.accept_lengths[step.batch] * step.batch * step.steps for step in log.steps)
    return acceptance_from_mean(tokens / drafts, log.speculative_tokens, drafts)


def acceptance_from_mean(tokens_per_step: float, length: int, drafts: int) -> ChainAcceptance:
    """Acceptance from a log alone, as if all positions had the same acceptance rate.

    Bisection finds the rate r at which 1 + r + ... + r^length is the measured tokens a step.
    """
    if not 1 < tokens_per_step < length + 1:
        raise SequoiaPlanError(
            f"accept len {tokens_per_step:g} with {length} speculative tokens; "
            f"expected more than 1 and less than {length + 1}"
        )
    low, high = 0.0, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        if sum(rate**n for n in range(length + 1)) < tokens_per_step:
            low = rate
        else:
            high = rate
    # n tokens are accepted with the probability rate^n
    accepted = tuple(round(drafts * low**n) for n in range(1, length + 1))
    source = f"accept len {tokens_per_step:.2f} of a log, one rate for all positions"
    return ChainAcceptance(drafts, accepted, source=source)


def launch_flags(schedule: Sequence[ScheduleEntry], batches: Sequence[int] = ()) -> tuple[str, ...]:
    """SGLang's flags for each best number of speculative tokens, as one text for each number.

    No speculation needs no flags, so 0 has no text. A chain has a top-k of 1, and SGLang counts the
    root among the draft tokens.
    """
    lengths = dict.fromkeys(
        entry.speculative_tokens
        for entry in schedule
        if not batches or any(entry.first <= batch <= entry.last for batch in batches)
    )
    return tuple(
        f"--speculative-num-steps {length} --speculative-eagle-topk 1 "
        f"--speculative-num-draft-tokens {length + 1}"
        for length in lengths
        if length
    )
