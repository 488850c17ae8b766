"""A plan for SGLang with chains (--speculative-eagle-topk 1), from its servers' files.

Nothing is run here. Acceptance is from the histogram in the `meta_info` of responses, and step
times are from the lines `Decode batch` of a log.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise, zip_longest
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from sequoia_plan.artifacts import ArgumentError, SequoiaPlanError
from sequoia_plan.artifacts.files import read_bytes
from sequoia_plan.artifacts.uncertainty import median_with_error
from sequoia_plan.engines.plan import ChainAcceptance, ContextPlan, StepSeconds
from sequoia_plan.engines.workload import round_digits

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
    try:
        rows = msgspec.convert(histograms, list[list[Annotated[int, msgspec.Meta(ge=0)]]])
    except msgspec.ValidationError as error:
        raise SequoiaPlanError(
            f"{path}: found a histogram {error}; expected a list of counts"
        ) from error
    counts = np.sum([*zip_longest(*rows, fillvalue=0)], axis=1)
    at_least_n_accepted = counts[::-1].cumsum()[::-1].tolist()  # entry 0 counts all steps
    return ChainAcceptance(
        drafts=at_least_n_accepted[0],
        accepted=tuple(at_least_n_accepted[1:]),
        source=f"{len(histograms)} responses of SGLang",
    )


def _read_json(path: str) -> Any:
    """Reads a JSON document, or one a line."""
    text = read_bytes(path, EXPECTED, MAX_FILE_BYTES).decode(errors="replace")
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError as error:
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


def read_log(path: str) -> ServerLog:
    """Reads step times and accept lengths from a server's log."""
    text = read_bytes(path, "a log of SGLang", MAX_FILE_BYTES).decode(errors="replace")
    decode_lines = list(_decode_lines(text))
    num_steps, top_k = NUM_STEPS.search(text), TOP_K.search(text)
    length = int(num_steps[1].replace("None", "0")) if num_steps else -1
    if not 0 <= length <= MAX_TOKENS:
        raise SequoiaPlanError(
            f"{path}: does not say speculative_num_steps, or says more than {MAX_TOKENS}; "
            "expected a log of SGLang from the server's start on, with its server_args"
        )
    if top_k and int(top_k[1]) != 1:
        raise SequoiaPlanError(
            f"{path}: the server ran with --speculative-eagle-topk {top_k[1]}, a tree; "
            "expected 1, a chain"
        )
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
            f"{path}: no two 'Decode batch ... gen throughput (token/s)' lines in a row with the "
            "same #running-req; expected a steady number of requests for a while"
        )
    log_interval = LOG_INTERVAL.search(text)
    steps = []
    for batch, batch_samples in sorted(samples.items()):
        seconds, error = median_with_error(np.array([seconds for seconds, _ in batch_samples]))
        # a line stands for so many steps
        num_steps_per_line = int(log_interval[1]) if log_interval else DEFAULT_LOG_INTERVAL
        steps.append(
            StepSeconds(
                batch=batch,
                speculative_tokens=length,
                seconds=round_digits(seconds),
                error=round_digits(error),
                steps=len(batch_samples) * num_steps_per_line,
            )
        )
    accept_lengths = {
        batch: float(np.mean([tokens for _, tokens in batch_samples]))
        for batch, batch_samples in samples.items()
    }
    return ServerLog(length, tuple(steps), accept_lengths)


def _decode_lines(text: str) -> Iterator[tuple[int, float, float | None]]:
    """Yields three numbers of each line of the log about decoding.

    They are the requests decoded together, the generated tokens a second, and the accept length
    (the mean number of tokens that a step yields for a request), None if the line has none. Two
    processes may have written into each other's lines, so broken numbers are left out.
    """
    for line in text.splitlines():
        match, accept_length = DECODE_LINE.search(line), ACCEPT_LENGTH.search(line)
        if match:
            with suppress(ValueError):
                tokens_per_step = float(accept_length[1]) if accept_length else None
                num_requests, throughput = int(match[1]), float(match[2])
                if 0 < num_requests <= MAX_REQUESTS and 0 < throughput < math.inf:
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
        is_below = sum(rate**n for n in range(length + 1)) < tokens_per_step
        low, high = (rate, high) if is_below else (low, rate)
    # n tokens are accepted with the probability rate^n
    accepted = tuple(round(drafts * low**n) for n in range(1, length + 1))
    source = f"accept len {tokens_per_step:.2f} of a log, one rate for all positions"
    return ChainAcceptance(drafts, accepted, source=source)


def launch_options(plan: ContextPlan) -> tuple[str, ...]:
    """SGLang's options for each best number of speculative tokens, as one text for each number.

    No speculation needs none. A chain has a top-k of 1, and SGLang counts the root among the draft
    tokens.
    """
    lengths = dict.fromkeys(plan.best_cell(batch).speculative_tokens for batch in plan.batches)
    return tuple(
        f"--speculative-num-steps {length} --speculative-eagle-topk 1 "
        f"--speculative-num-draft-tokens {length + 1}"
        for length in lengths
        if length
    )
