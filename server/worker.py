"""The one thread that decodes: requests in the order of arrival, and the texts that it keeps."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import torch
from transformers import TextStreamer

from sequoia_plan.artifacts import SequoiaPlanError, TokenTree
from sequoia_plan.artifacts.errors import ArgumentError
from sequoia_plan.runtime import Grammar, Pair, Sampling, SequoiaDecoder
from sequoia_plan.runtime.captured_step import StepOutput
from sequoia_plan.server.requests import Refusal, Request

MAX_TEXTS = 8
"""So many texts are kept at most, whatever memory they take."""
PART = 512
"""Tokens of a prompt that are read before a client that has gone away is noticed."""
SLOTS = 1024
"""Caches have multiples of so many slots, so that a text that goes on seldom needs larger ones."""


class Cancelled(Exception):
    """The client has gone away."""


@dataclass
class Job:
    """A request that waits or is answered.

    Args:
        request: what the client sent.
        prompts: token ids of each choice's prompt.
        limit: new tokens of a choice, at most.
        sampling: how tokens are sampled.
        constraint: the grammar that texts follow.
        emit: called, in the decoding thread, with each `Piece`, with the `Result` of each choice,
            and at last with None or an error.
        cancelled: set it to end the job.
    """

    request: Request
    prompts: list[list[int]]
    limit: int
    sampling: Sampling
    constraint: Grammar | None
    emit: Callable[[Any], None]
    cancelled: bool = False


@dataclass
class Piece:
    """New text of a choice, its tokens, and for each [(token, log-probability), ...] if asked.

    The first of a token's pairs is its own, the others are those of the most probable tokens.
    """

    index: int
    text: str
    tokens: list[int]
    probs: list[list[tuple[int, float]]]


@dataclass
class Result:
    """How a choice ended. `cached` tokens of the prompt were not read again; times in seconds."""

    index: int
    num_prompt: int
    cached: int
    finish_reason: str = ""
    stop: str = ""
    num_new: int = 0
    drafted: int = 0
    accepted: int = 0
    started: float = field(default_factory=time.perf_counter)
    read: float = 0.0
    ended: float = 0.0


class Worker:
    """Decodes jobs one after the other.

    Args:
        pair: the models.
        tree: the token tree.
        sampling: where a request does not say how to sample.
        memory: bytes that the caches of kept texts may take.

    Attributes:
        jobs: the queue; None ends `run`.
        totals: counts since the start, by vLLM's names of counters.
    """

    def __init__(self, pair: Pair, tree: TokenTree, sampling: Sampling, memory: int) -> None:
        self.pair, self.tree, self.sampling, self.memory = pair, tree, sampling, memory
        self.jobs: SimpleQueue[Job | None] = SimpleQueue()
        self.totals: Counter[str] = Counter()
        self.texts = [self._new_decoder()]  # the least recently used first

    def _new_decoder(self) -> SequoiaDecoder:
        pair = self.pair
        return SequoiaDecoder(pair.target, pair.draft, self.tree, tokenizer=pair.tokenizer)

    def run(self) -> None:
        """Answer jobs until there is None."""
        while job := self.jobs.get():
            try:
                for index, prompt in enumerate(job.prompts):
                    self._decode(job, index, prompt)
                job.emit(None)
            except Cancelled:
                pass
            except Exception as error:
                if not isinstance(error, SequoiaPlanError):
                    logging.getLogger("sequoia_plan").exception("a request failed")
                is_clients = isinstance(error, ArgumentError)
                job.emit(Refusal(str(error), 400 if is_clients else 503))

    def _decode(self, job: Job, index: int, prompt: list[int]) -> None:
        """Decode one choice of a job."""
        request = job.request
        decoder, cached = self._text_for(prompt, job.limit)
        result = Result(index, len(prompt), cached)
        self._read(decoder, prompt, job)
        printer = Printer(self, job, result)
        stops, ends = request.stops, self.pair.end_tokens
        special = self.pair.tokenizer.get_added_vocab()  # no part of the text
        generation = decoder.generate(
            torch.tensor(prompt), job.limit,
            seed=None if request.seed < 0 else request.seed + index,
            eos_token_id=[*ends * (not request.ignore_eos), *(special[s] for s in stops if s in special)],
            streamer=printer, sampling=job.sampling, stop_strings=stops, cut_stop=True,
            stopping_criteria=[printer.is_late] if request.t_max_predict_ms else (),
            logits_processor=request.processors(len(prompt)), constraint=job.constraint,
            logprobs=0 if request.num_probs is not None else None,
            reuse_prefix=True, on_step=printer.on_step,
        )  # fmt: skip
        result.finish_reason, result.num_new = generation.finish_reason, generation.new_tokens
        result.ended = time.perf_counter()
        result.read = result.read or result.ended
        self.totals["prompt_tokens"] += len(prompt)
        self.totals["generation_tokens"] += result.num_new
        job.emit(result)

    def _text_for(self, prompt: list[int], limit: int) -> tuple[SequoiaDecoder, int]:
        """A decoder with room for a text, and how much of the prompt its caches hold."""
        ids = torch.tensor(prompt[:-1])
        target, shared = (
            self.pair.target,
            [text.step.sequence.num_shared(ids) for text in self.texts],
        )
        count = max(shared)
        source = decoder = self.texts[shared.index(count)]
        if count < source.step.sequence.num_read / 2:  # another text, that would be lost
            decoder = self._new_decoder() if len(self.texts) < MAX_TEXTS else self.texts[0]
        models, sequence, other = decoder.step.models, decoder.step.sequence, source.step.sequence
        drafter = models.drafter
        needed = min(len(prompt) + limit, target.context) + max(t.size for t in self.tree.all_trees)
        sequence.num_read = count if decoder is source else 0
        sequence.reserve(
            -(-needed // SLOTS) * SLOTS, target.new_cache, drafter.new_cache if drafter else None
        )
        if decoder is not source and not target.traits.chains_only:
            pairs = [(sequence.target, other.target)]
            pairs += [(sequence.draft, other.draft)] if drafter else []
            if all(len(new.blocks) == len(old.blocks) for new, old in pairs):
                for new, old in pairs:
                    new.take(old, count)
                sequence.tokens[:count] = other.tokens[:count]
                sequence.num_read = count
        self.texts = [text for text in self.texts if text is not decoder] + [decoder]
        while len(self.texts) > 1 and sum(map(bytes_of, self.texts)) > self.memory:
            del self.texts[0]
        return decoder, sequence.num_read

    def _read(self, decoder: SequoiaDecoder, prompt: list[int], job: Job) -> None:
        """Read a long prompt but for its last part; Cancelled if the client goes away."""
        target, step = self.pair.target, decoder.step
        reads_at_once = target.traits.chains_only or target.stream
        start = len(prompt) if reads_at_once else step.sequence.num_read + PART
        for end in range(start, len(prompt), PART):
            _check(job)
            with torch.inference_mode(), step.sequence.lock.hold():
                step.prefill(torch.tensor(prompt[:end], device=step.device), 0, 0, reuse=True)
        _check(job)


class Printer(TextStreamer):
    """Takes the steps of a choice and their text, and emits them."""

    def __init__(self, worker: Worker, job: Job, result: Result) -> None:
        super().__init__(worker.pair.tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.worker, self.job, self.result = worker, job, result
        self.piece = Piece(result.index, "", [], [])
        self.last, self.has_lines = time.perf_counter(), False

    def on_step(self, output: StepOutput, tokens: list[int]) -> None:
        """Count a step, and keep what is emitted with its text."""
        _check(self.job)
        now, totals, result = time.perf_counter(), self.worker.totals, self.result
        result.read = result.read or now
        accepted = len(output.tokens) - 1
        result.drafted += output.tree.size - 1
        result.accepted += accepted
        totals["steps"] += 1
        totals["seconds"] += now - self.last
        totals["spec_decode_num_drafts"] += output.tree.size > 1
        totals["spec_decode_num_draft_tokens"] += output.tree.size - 1
        totals["spec_decode_num_accepted_tokens"] += accepted
        totals.update(range(accepted))
        self.last = now
        self.piece = Piece(result.index, "", tokens, [])
        count = self.job.request.num_probs
        if count is not None and output.logits is not None:
            for token, row in zip(tokens, output.logits.float().log_softmax(-1), strict=False):
                top = row.topk(count)
                own = (token, float(row[token]))
                self.piece.probs.append([own, *zip(top.indices.tolist(), top.values.tolist())])

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Emit text that is known."""
        self.has_lines |= "\n" in text
        self.piece.text = text
        if text or self.piece.tokens:
            self.job.emit(self.piece)
        self.piece = Piece(self.result.index, "", [], [])

    def is_late(self, ids: Any, scores: Any) -> bool:
        """Is the time over that a client has for lines after the first?"""
        passed = 1000 * (time.perf_counter() - (self.result.read or time.perf_counter()))
        return self.has_lines and passed > self.job.request.t_max_predict_ms


def _check(job: Job) -> None:
    """Raise Cancelled if the client has gone away."""
    if job.cancelled:
        raise Cancelled


def bytes_of(text: SequoiaDecoder) -> int:
    """What the caches of a text take."""
    sequence = text.step.sequence
    caches = [sequence.target, sequence.draft]
    parts = [part for cache in caches for part in (*cache.blocks, *vars(cache).values())]
    return sum(getattr(part, "nbytes", 0) for part in parts)
