"""A plan for SGLang with chains (--speculative-eagle-topk 1), from its servers' files.

Nothing is run here. Acceptance is from the histogram in the `meta_info` of responses, and step
times are from the lines `Decode batch` of a log.
"""

import re
from collections.abc import Sequence
from itertools import pairwise, zip_longest
from typing import NamedTuple

import numpy as np

from sequoia_plan.artifacts import ArgumentError, SequoiaPlanError
from sequoia_plan.artifacts.files import read_bytes
from sequoia_plan.engines.plan import ChainAcceptance, ContextPlan, StepSeconds
from sequoia_plan.engines.timing import step_seconds

HISTOGRAM = re.compile(r'"spec_correct_drafts_histogram":\s*\[\s*(\d[\d,\s]*)\]')
DECODE_LINE = re.compile(
    r"Decode batch.*?#running-req: ([1-9]\d{0,5})(?!\d)"  # requests decoded together
    r"(?:.*?accept len: (\d{1,4}(?:\.\d+)?)(?![\d.]))?"  # mean tokens of a step and request
    r".*?gen throughput \(token/s\): (\d{1,9}(?:\.\d+)?)(?![\d.])"
)
"""A line about decoding; processes that write into each other's lines leave some that do not match.
"""
NUM_STEPS = re.compile(r"speculative_num_steps=(\d{1,3}|None)\b")
TOP_K = re.compile(r"speculative_eagle_topk=(\d+)")
LOG_INTERVAL = re.compile(r"decode_log_interval=(\d+)")
DEFAULT_LOG_INTERVAL = 40
"""Steps between two lines of the log, unless the server has another `decode_log_interval`."""
MAX_FILE_BYTES = 1 << 28


class ServerLog(NamedTuple):
    """Measurements from the log of one server."""

    speculative_tokens: int
    steps: list[StepSeconds]
    accept_lengths: dict[int, float]
    """By batch size the mean number of tokens that a step yields for a request."""


def read_responses(path: str) -> ChainAcceptance:
    """Reads a file of responses in JSON, and sums their histograms of accepted tokens.

    Entry n of a histogram counts the steps in which n drafted tokens were accepted.
    """
    text = read_bytes(path, "responses of SGLang, as JSON", MAX_FILE_BYTES).decode(errors="replace")
    rows = [[int(count) for count in row.split(",")] for row in HISTOGRAM.findall(text)]
    if not rows:
        raise SequoiaPlanError(
            f"{path}: no response has a list of counts meta_info.spec_correct_drafts_histogram; "
            "ask a server that runs with --speculative-algorithm for whole responses"
        )
    counts = np.sum([*zip_longest(*rows, fillvalue=0)], axis=1)
    at_least_n_accepted = counts[::-1].cumsum()[::-1].tolist()  # entry 0 counts all steps
    return ChainAcceptance(
        drafts=at_least_n_accepted[0],
        accepted=tuple(at_least_n_accepted[1:]),
        source=f"{len(rows)} responses of SGLang",
    )


def read_log(path: str) -> ServerLog:
    """Reads step times and accept lengths from a server's log."""
    text = read_bytes(path, "a log of SGLang", MAX_FILE_BYTES).decode(errors="replace")
    num_steps, top_k = NUM_STEPS.search(text), TOP_K.search(text)
    if not num_steps or (top_k and top_k[1] != "1"):
        raise SequoiaPlanError(
            f"{path}: found {num_steps and num_steps[0]}, {top_k and top_k[0]}; expected the log "
            "of a server of chains (--speculative-eagle-topk 1) from its start on, which has its "
            "speculative_num_steps"
        )
    length = int(num_steps[1].replace("None", "0"))
    samples: dict[int, list[tuple[float, float]]] = {}  # seconds and tokens a step, by batch size
    for (previous_batch, *_), (batch, accept_length, throughput) in pairwise(
        DECODE_LINE.findall(text)
    ):
        # the first line after a change of the number of requests is a mix
        if previous_batch == batch and float(throughput) and (accept_length or not length):
            tokens = float(accept_length or 1)
            seconds = int(batch) * tokens / float(throughput)
            samples.setdefault(int(batch), []).append((seconds, tokens))
    if not samples:
        raise SequoiaPlanError(
            f"{path}: no two 'Decode batch ... gen throughput (token/s)' lines in a row with the "
            "same #running-req and, with speculation, an 'accept len'; expected a steady number of "
            "requests for a while"
        )
    interval = LOG_INTERVAL.search(text)
    steps_per_line = int(interval[1]) if interval else DEFAULT_LOG_INTERVAL
    steps, accept_lengths = [], {}
    for batch, rows in sorted(samples.items()):
        seconds, tokens = np.array(rows).T
        steps.append(step_seconds(batch, length, seconds, len(rows) * steps_per_line))
        accept_lengths[batch] = float(tokens.mean())
    return ServerLog(length, steps, accept_lengths)


def acceptance_from_logs(logs: Sequence[ServerLog]) -> ChainAcceptance:
    """Computes acceptance from the accept length of the log with the most speculative tokens."""
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

    At the rate r, 1 + r + ... + r^length is the measured tokens a step.
    """
    rates = np.linspace(0, 1, 100_001)
    rate = np.interp(tokens_per_step, np.polyval(np.ones(length + 1), rates), rates)
    # n tokens are accepted with the probability rate^n
    accepted = tuple(round(drafts * rate**n) for n in range(1, length + 1))
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
