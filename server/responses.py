"""Answers in the shapes of OpenAI's API and of llama-server."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any
from uuid import uuid4

from sequoia_plan.runtime.text import TextBefore
from sequoia_plan.server.tools import OPENED, calls_in
from sequoia_plan.server.worker import Job, Piece, Result

CHAT, COMPLETION, NATIVE = "chat.completion", "text_completion", "native"
"""The shapes: OpenAI's for conversations and for texts, and llama-server's own."""


class Answer:
    """What the pieces of a job become: chunks of a stream, and the whole."""

    def __init__(self, shape: str, job: Job, tokenizer: Any, model: str) -> None:
        self.shape, self.job, self.tokenizer, self.model = shape, job, tokenizer, model
        self.id, self.created = f"chatcmpl-{uuid4().hex}", int(time.time())
        self.pieces: list[list[Piece]] = [[] for _ in job.prompts]
        self.results: list[Result] = []
        self.has_tools = bool(job.request.tools) and job.request.tool_choice == "auto"
        self.before_calls = [TextBefore([OPENED] * self.has_tools) for _ in job.prompts]
        self.sent = [0] * len(job.prompts)

    def add(self, event: Piece | Result) -> Iterator[dict[str, Any]]:
        """Take what the worker emits; the chunks of a stream that it makes."""
        index = event.index
        if isinstance(event, Result):
            self.results.append(event)
            yield from self._last_chunks(event)
            return
        if not self.pieces[index] and self.shape == CHAT:
            yield self._chunk(index, {"role": "assistant", "content": None})
        self.pieces[index].append(event)
        if self.shape == NATIVE:
            yield {
                "index": index, "content": event.text, "tokens": event.tokens, "stop": False,
                "id_slot": -1, "tokens_predicted": sum(len(p.tokens) for p in self.pieces[index]),
                "tokens_evaluated": len(self.job.prompts[index]), **self._probs([event]),
            }  # fmt: skip
            return
        text = self.before_calls[index].add(event.text)
        self.sent[index] += len(text)
        if text or event.probs:
            yield self._chunk(index, {"content": text}, pieces=[event])

    def _last_chunks(self, result: Result) -> Iterator[dict[str, Any]]:
        """The chunks that end a choice, and those that end the stream."""
        index = result.index
        if self.shape == NATIVE:
            yield self._native(result, "", [])
            return
        content, calls = self._content(index)
        if calls:
            numbered = [{"index": number, **call} for number, call in enumerate(calls)]
            yield self._chunk(index, {"tool_calls": numbered})
        elif left := content[self.sent[index] :]:
            yield self._chunk(index, {"content": left})
        last = self._chunk(index, {}, self._finish(result, calls))
        if len(self.results) == len(self.pieces):
            figures = {"timings": timings(self.results)}
            if self.job.request.stream_options.include_usage:
                yield last
                last = self._wrap([], ".chunk") | {"usage": self.usage()}
            last |= figures
        yield last

    def whole(self) -> Any:
        """The answer to a request that is not streamed."""
        if self.shape == NATIVE:
            answers = [
                self._native(result, self._content(result.index)[0], self.pieces[result.index])
                for result in self.results
            ]
            return answers[0] if len(answers) == 1 else answers
        choices = []
        for result in self.results:
            pieces, (content, calls) = self.pieces[result.index], self._content(result.index)
            ending = {"finish_reason": self._finish(result, calls), "index": result.index}
            if self.shape == CHAT:
                message = {"role": "assistant", "content": content or (None if calls else "")}
                message |= {"tool_calls": calls} if calls else {}
                choices.append(ending | {"message": message} | self._probs(pieces))
            else:
                choices.append(ending | {"text": content, "logprobs": None} | self._probs(pieces))
        return self._wrap(choices) | {"usage": self.usage(), "timings": timings(self.results)}

    def usage(self) -> dict[str, Any]:
        """Counts of tokens, as OpenAI's API has them: a prompt counts once for its choices."""
        count = self.job.request.n
        firsts = [result for result in self.results if result.index % count == 0]
        num_prompt = sum(result.num_prompt for result in firsts)
        num_new = sum(result.num_new for result in self.results)
        return {
            "completion_tokens": num_new, "prompt_tokens": num_prompt,
            "total_tokens": num_prompt + num_new,
            "prompt_tokens_details": {"cached_tokens": sum(result.cached for result in firsts)},
        }  # fmt: skip

    def _content(self, index: int) -> tuple[str, list[dict[str, Any]] | None]:
        """The text of a choice, and its tool calls, which are then no part of the text."""
        text = "".join(piece.text for piece in self.pieces[index])
        calls = calls_in(text) if self.has_tools else None
        return (text.partition(OPENED)[0] if calls else text), calls

    def _finish(self, result: Result, calls: Any = None) -> str:
        """Why a choice ended, in OpenAI's words."""
        if calls:
            return "tool_calls"
        return "stop" if result.finish_reason in ("eos", "stop") else "length"

    def _wrap(self, choices: list[Any], suffix: str = "") -> dict[str, Any]:
        """Choices with what every object of OpenAI's API has."""
        return {
            "choices": choices, "created": self.created, "id": self.id, "model": self.model,
            "system_fingerprint": "sequoia-plan",
            "object": self.shape + suffix * (self.shape == CHAT),
        }  # fmt: skip

    def _chunk(
        self, index: int, delta: dict[str, Any], finish: str | None = None,
        pieces: Sequence[Piece] = (),
    ) -> dict[str, Any]:  # fmt: skip
        """A chunk of a stream."""
        choice = {"finish_reason": finish, "index": index}
        if self.shape == CHAT:
            choice |= {"delta": delta}
        else:
            choice |= {"text": delta.get("content", ""), "logprobs": None}
        return self._wrap([choice | self._probs(pieces)], ".chunk")

    def _probs(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The log-probabilities of the tokens of pieces, if there are any."""
        entries = [
            self._prob(*own) | {"top_logprobs": [self._prob(*pair) for pair in top]}
            for piece in pieces
            for own, *top in piece.probs
        ]
        name = "completion_probabilities"
        return (
            {}
            if not entries
            else {name: entries}
            if self.shape == NATIVE
            else {"logprobs": {"content": entries}}
        )

    def _prob(self, token: int, logprob: float) -> dict[str, Any]:
        """A token with its log-probability."""
        text = str(self.tokenizer.decode([token]))
        whole = None if "\ufffd" in text else list(text.encode())
        return {"id": token, "token": text, "bytes": whole, "logprob": logprob}

    def _native(self, result: Result, text: str, pieces: Sequence[Piece]) -> dict[str, Any]:
        """llama-server's own shape of a text, or of the end of a stream."""
        request, prompt = self.job.request, self.job.prompts[result.index]
        tokens = [token for piece in pieces for token in piece.tokens]
        answer = {
            "index": result.index, "content": text, "tokens": tokens * request.return_tokens,
            "id_slot": 0, "stop": True, "model": self.model,
            "tokens_predicted": result.num_new, "tokens_evaluated": len(prompt),
            "generation_settings": {
                **self.job.sampling.settings(), "seed": request.seed, "n_predict": self.job.limit,
                "max_tokens": self.job.limit, "stop": request.stops, "stream": request.stream,
                "n_probs": request.n_probs, "ignore_eos": request.ignore_eos,
                "grammar": request.grammar, "presence_penalty": request.presence_penalty,
                "frequency_penalty": request.frequency_penalty,
                "repeat_penalty": request.repeat_penalty,
            },
            "prompt": self.tokenizer.decode(prompt), "has_new_line": "\n" in self._content(result.index)[0],
            "truncated": False, "stopping_word": result.stop,
            "stop_type": {"eos": "eos", "stop": "word"}.get(result.finish_reason, "limit"),
            "tokens_cached": result.num_prompt + result.num_new,
            "timings": timings([result]), **self._probs(pieces),
        }  # fmt: skip
        return select(answer, request.response_fields)


def select(answer: dict[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """The fields that a client asks for, with slashes between names; all if it asks for none."""
    selected = {}
    for path in paths:
        value: Any = answer
        for name in path.split("/"):
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None:
            selected[path] = value
    return selected if paths else answer


def timings(results: Sequence[Result]) -> dict[str, Any]:
    """Counts and milliseconds of choices, by llama-server's names."""
    cached = sum(result.cached for result in results)
    counts = {
        "prompt": sum(result.num_prompt for result in results) - cached,
        "predicted": sum(result.num_new for result in results),
    }
    seconds = {
        "prompt": sum(result.read - result.started for result in results),
        "predicted": sum(result.ended - result.read for result in results),
    }
    figures: dict[str, Any] = {"cache_n": cached}
    for name, count in counts.items():
        figures |= {
            f"{name}_n": count, f"{name}_ms": 1000 * seconds[name],
            f"{name}_per_token_ms": 1000 * seconds[name] / max(count, 1),
            f"{name}_per_second": count / max(seconds[name], 1e-9),
        }  # fmt: skip
    drafted = sum(result.drafted for result in results)
    accepted = {"draft_n_accepted": sum(result.accepted for result in results)}
    return figures | ({"draft_n": drafted} | accepted if drafted else {})
