"""A plan for SGLang with chains (--speculative-eagle-topk 1), from what its servers say: nothing is run here.

Acceptance is from the histogram in its responses' `meta_info` (`spec_correct_drafts_histogram`, before that `spec_accept_histogram`): entry n
counts the steps in which n drafted tokens were accepted. Step times are from the lines of its log,

    Decode batch. #running-req: 4, ..., accept len: 2.40, accept rate: 0.47, ..., gen throughput (token/s): 252.18, ...

where `accept len` counts the token that every step yields, too: a step takes running x accept len / throughput. From SGLang's
`scheduler_metrics_mixin.py` and `metrics_reporter.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.artifacts.engine_plan import ChainAcceptance, Range, StepSeconds
from sequoia_plan.artifacts.files import read_bytes
from sequoia_plan.artifacts.uncertainty import median

HISTOGRAMS = ("spec_correct_drafts_histogram", "spec_accept_histogram")
DECODE = re.compile(r"Decode batch.*?#running-req: (\d+).*?gen throughput \(token/s\): ([\d.]+)")
ACCEPTED, LENGTH, BRANCHES = re.compile(r"accept len: ([\d.]+)"), re.compile(r"speculative_num_steps=(\d+|None)"), re.compile(r"speculative_eagle_topk=(\d+)")
INTERVAL = re.compile(r"decode_log_interval=(\d+)")
USUAL_INTERVAL = 40
"""Steps between two lines of the log, unless the server was told otherwise."""
LARGEST_FILE = 1 << 28
EXPECTED = "responses of SGLang, as JSON or a JSON object a line"


def read_responses(path: str) -> ChainAcceptance:
    """The acceptance that all histograms in a file add up to.

    Raises:
        SequoiaPlanError: if the file is no JSON, or no response has a histogram.
    """
    text = read_bytes(path, EXPECTED, LARGEST_FILE).decode(errors="replace")
    try:
        documents = [json.loads(text)] if text.lstrip().startswith("[") else [json.loads(line) for line in text.splitlines() if line.strip()]
    except (ValueError, RecursionError):
        try:
            documents = [json.loads(text)]
        except (ValueError, RecursionError) as error:
            raise SequoiaPlanError(f"{path}: not JSON; expected {EXPECTED}") from error
    found = list(_histograms(documents))
    if not found:
        raise SequoiaPlanError(f"{path}: no response has meta_info.{HISTOGRAMS[0]}; ask a server that runs with --speculative-algorithm for whole responses")
    for histogram in found:
        if not isinstance(histogram, list) or not all(isinstance(count, int) and not isinstance(count, bool) and count >= 0 for count in histogram):
            raise SequoiaPlanError(f"{path}: found the histogram {histogram!r:.60}, expected a list of counts")
    longest = max(map(len, found))
    counts = np.sum([histogram + [0] * (longest - len(histogram)) for histogram in found], axis=0)
    if longest < 2 or counts[1:].sum() == 0:
        raise SequoiaPlanError(f"{path}: no drafted token was accepted in {int(counts.sum())} steps; the draft does not fit the target, or nothing was drafted")
    at_least = counts[::-1].cumsum()[::-1]
    return ChainAcceptance(drafts=int(at_least[0]), accepted=tuple(map(int, at_least[1:])), source=f"{len(found)} responses of SGLang")


def read_log(path: str) -> tuple[int, tuple[StepSeconds, ...], dict[int, float]]:
    """The speculative tokens that a server's log says it ran with, step times by batch size, and the mean of tokens a step.

    Lines whose number of requests differs from the line before are left out: their time is a mix.

    Raises:
        SequoiaPlanError: if the log has no such lines, does not say how many tokens, or is of a tree.
    """
    text = read_bytes(path, "a log of SGLang", LARGEST_FILE).decode(errors="replace")
    branches = BRANCHES.search(text)
    if branches and int(branches[1]) != 1:
        raise SequoiaPlanError(f"{path}: the server ran with --speculative-eagle-topk {branches[1]}, a tree; expected 1, a chain")
    said, seen = LENGTH.search(text), list(_decode_lines(text))
    if not seen:
        raise SequoiaPlanError(f"{path}: no line 'Decode batch ... gen throughput (token/s)'; expected a log of SGLang that decoded for a while")
    if not said:
        raise SequoiaPlanError(f"{path}: does not say speculative_num_steps; expected a log from the server's start on, with its server_args")
    length = 0 if said[1] == "None" else int(said[1])
    interval = int(told[1]) if (told := INTERVAL.search(text)) else USUAL_INTERVAL
    if length and not any(accepted for _, _, accepted in seen):
        raise SequoiaPlanError(f"{path}: ran with {length} speculative tokens, but no line has 'accept len'; use an SGLang that logs it")
    steady = [now for before, now in pairwise(seen) if before[0] == now[0]]
    by_batch: dict[int, list[tuple[float, float]]] = {}
    for batch, throughput, accepted in steady:
        by_batch.setdefault(batch, []).append((batch * (accepted or 1.0) / throughput, accepted or 1.0))
    rows = []
    for batch, found in sorted(by_batch.items()):
        middle, error = median(np.array([each for each, _ in found]))
        rows.append(StepSeconds(batch=batch, speculative_tokens=length, seconds=middle, error=error, steps=len(found) * interval))
    if not rows:
        raise SequoiaPlanError(f"{path}: no two 'Decode batch' lines in a row with the same #running-req; expected a steady number of requests for a while")
    return length, tuple(rows), {batch: float(np.mean([each for _, each in found])) for batch, found in by_batch.items()}


def of_mean(tokens_per_step: float, length: int, drafts: int) -> ChainAcceptance:
    """Acceptance from a log alone: the same chance at every position, so that `drafts` chains of `length` yield that many tokens a step.

    Raises:
        SequoiaPlanError: if they cannot.
    """
    if not 1 < tokens_per_step < length + 1:
        raise SequoiaPlanError(f"accept len {tokens_per_step:g} with {length} speculative tokens; expected more than 1 and less than {length + 1}")
    low, high = 0.0, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        low, high = (rate, high) if sum(rate**n for n in range(length + 1)) < tokens_per_step else (low, rate)
    source = f"accept len {tokens_per_step:.2f} of a log, one rate for all positions"
    return ChainAcceptance(drafts, tuple(round(drafts * low**n) for n in range(1, length + 1)), source=source)


def lines(ranges: Sequence[Range]) -> tuple[str, ...]:
    """The three flags for each number of tokens; nothing for a batch size at which it should not speculate."""
    lengths = dict.fromkeys(each.speculative_tokens for each in ranges)
    return tuple(f"--speculative-num-steps {n} --speculative-eagle-topk 1 --speculative-num-draft-tokens {n + 1}" for n in lengths if n)


def _decode_lines(text: str) -> Iterator[tuple[int, float, float | None]]:
    """Requests, tokens a second, and accepted tokens a step if the line says so."""
    for line in text.splitlines():
        match = DECODE.search(line)
        if match and int(match[1]) and float(match[2]) > 0:
            accepted = ACCEPTED.search(line)
            yield int(match[1]), float(match[2]), float(accepted[1]) if accepted else None


def _histograms(document: Any) -> Iterator[Any]:
    """Every histogram, wherever it stands."""
    if isinstance(document, dict):
        if name := next((name for name in HISTOGRAMS if document.get(name)), None):
            yield document[name]
        else:
            for value in document.values():
                yield from _histograms(value)
    elif isinstance(document, list):
        for value in document:
            yield from _histograms(value)
