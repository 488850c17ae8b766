"""The one thread that decodes: requests in the order of arrival, and the texts that it keeps."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import torch

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.runtime import Generation, Grammar, Pair, Sampling, SequoiaDecoder
from sequoia_plan.server.requests import Request

MAX_TEXTS = 4
"""So many texts are kept at most: the memory of a step takes 50 ms to make anew."""
CHUNK_SECONDS = 0.02
"""A stream has one chunk in so long at most: one a step took 7 % of the embedded pair's speed."""
PROMPT_CHUNK = 512
"""Tokens of a prompt that are read before a client that has gone away is noticed."""
POSITION = 'spec_decode_num_accepted_tokens_per_pos_total{position="%d"}'


@dataclass
class Choice:
    """One text of an answer: how it began, what is known of it, and how it ended.

    `cached` tokens of the prompt were not read again; `sent` characters are in chunks, -1 at
    first. `times` has when it began, when each step ended, and when it ended.
    """

    index: int
    prompt: list[int]
    times: list[float] = field(default_factory=list)
    cached: int = 0
    drafted: int = 0
    accepted: int = 0
    text: str = ""
    sent: int = -1
    result: Generation | None = None


@dataclass
class Job:
    """A request that waits or is answered.

    Args:
        request: what the client sent.
        choices: the texts to decode.
        limit: new tokens of each, at most.
        sampling: how they are sampled.
        constraint: the grammar that they follow.
        emit: called, in the decoding thread, with (choice, text so far, result once it has ended),
            and at last with None or an error.
        is_over: the client has its answer, or has gone away.
    """

    request: Request
    choices: list[Choice]
    limit: int
    sampling: Sampling
    constraint: Grammar | None
    emit: Callable[[Any], object]
    is_over: bool = False

    def end(self) -> None:
        """Let nobody work for it any more."""
        self.is_over = True

    def check(self) -> None:
        """Raise InterruptedError if the client has gone away."""
        if self.is_over:
            raise InterruptedError


class Worker:
    """Decodes jobs one after the other.

    Args:
        pair: the models.
        tree: the token tree.
        sampling: where a request does not say how to sample.
        memory: tokens that the caches of kept texts may have room for.

    Attributes:
        jobs: the queue; None ends `run`.
        totals: counts since the start, by vLLM's names.
    """

    def __init__(self, pair: Pair, tree: TokenTree, sampling: Sampling, memory: int) -> None:
        self.pair, self.tree, self.sampling, self.memory = pair, tree, sampling, memory
        self.jobs = SimpleQueue[Any]()
        self.totals = Counter[str]()
        self.texts = [self._new_text()]  # the least recently used first

    def run(self) -> None:
        """Answer jobs until there is None."""
        while job := self.jobs.get():
            try:
                for choice in job.choices:
                    self._decode(job, choice)
                job.emit(None)
            except Exception as error:
                job.emit(error)

    def _decode(self, job: Job, choice: Choice) -> None:
        """Decode one text of a job, and emit what is known of it as it grows."""
        request, times = job.request, choice.times
        times.append(time.perf_counter())
        decoder = self._text_for(choice)
        for end in range(choice.cached + PROMPT_CHUNK, len(choice.prompt), PROMPT_CHUNK):
            job.check()
            decoder.generate(choice.prompt[:end], 0, reuse_prefix=True)

        last_chunk, is_enough, seconds_limit = 0.0, False, request.t_max_predict_ms / 1000

        def on_step(output: Any, text: str) -> None:
            """Count a step, and emit its text."""
            nonlocal last_chunk, is_enough
            job.check()
            times.append(time.perf_counter())
            accepted, drafted = len(output.path) - 1, output.tree.size - 1
            choice.drafted += drafted
            choice.accepted += accepted
            seconds: Any = times[-1] - times[-2]
            self.totals.update(POSITION % position for position in range(accepted))
            self.totals.update(
                inter_token_latency_seconds_count=1,
                inter_token_latency_seconds_sum=seconds,
                spec_decode_num_drafts_total=drafted > 0,
                spec_decode_num_draft_tokens_total=drafted,
                spec_decode_num_accepted_tokens_total=accepted,
                generation_tokens_total=accepted + 1,
            )
            wanted = request.deep_lines(text)
            is_late = bool(seconds_limit) and "\n" in text and times[-1] - times[1] > seconds_limit
            is_enough = is_late or wanted != text
            if times[-1] - last_chunk > CHUNK_SECONDS:
                last_chunk = times[-1]
                job.emit((choice, wanted, None))

        result = decoder.generate(
            choice.prompt, job.limit, sampling=job.sampling, stop_strings=request.stop,
            seed=None if request.seed < 0 else request.seed + choice.index, on_step=on_step,
            logits_processor=request.processors(len(choice.prompt)), constraint=job.constraint,
            logprobs=max(int(request.logprobs), request.top_logprobs, request.n_probs) or None,
            reuse_prefix=True,
            stopping_criteria=[lambda *_: is_enough] if request.n_indent or seconds_limit else (),
        )  # fmt: skip
        times.append(time.perf_counter())
        job.emit((choice, request.deep_lines(result.text or ""), result))

    def _text_for(self, choice: Choice) -> SequoiaDecoder:
        """A decoder whose caches have `choice.cached` tokens of a prompt: a kept one, or a copy."""
        ids = torch.tensor(choice.prompt[:-1])

        def shared(text: SequoiaDecoder) -> int:
            """How many of the first tokens of the prompt a kept text has in its caches."""
            return text.step.sequence.num_shared(ids)

        text = max(self.texts, key=shared)
        choice.cached = count = shared(text)
        if count < text.step.sequence.num_read / 2:  # most of that text would be lost
            source, clock = text.step.sequence, text.clock
            # the copy overwrites the least recently used text
            text = self._new_text() if len(self.texts) < MAX_TEXTS else self.texts[0]
            text.clock = clock  # texts differ, the machine does not
            copy, drafter = text.step.sequence, text.step.drafter
            caches = self.pair.target.new_cache, drafter.new_cache if drafter else None
            copy.num_read = 0
            copy.reserve(len(source.tokens), *caches)
            copy.take(source.tokens, source.target, source.draft, count)
            choice.cached = copy.num_read
        self.texts = [each for each in self.texts if each is not text] + [text]
        while sum(len(each.step.sequence.tokens) for each in self.texts[:-1]) > self.memory:
            del self.texts[0]
        return text

    def _new_text(self) -> SequoiaDecoder:
        pair = self.pair
        return SequoiaDecoder(pair.target, pair.draft, self.tree, tokenizer=pair.tokenizer)
