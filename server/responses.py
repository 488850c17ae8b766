"""Answers in the shapes of OpenAI's API and of llama-server."""

import json
import re
import time
from contextlib import suppress
from functools import reduce
from operator import getitem
from typing import Any
from uuid import uuid4

from transformers import PreTrainedTokenizerBase

from sequoia_plan.runtime.text import TextBefore
from sequoia_plan.server.requests import Json
from sequoia_plan.server.worker import Choice, Job

CHAT, COMPLETION, NATIVE = "chat.completion", "text_completion", "native"
"""The shapes: OpenAI's for conversations and for texts, and llama-server's own."""
SHAPES = json.loads("""{
    "chat.completion": {"index": "index", "finish_reason": "finish", "logprobs": "probs",
        "message": {"role": "role", "content": "content", "tool_calls": "calls"}},
    "chat.completion.chunk": {"index": "index", "finish_reason": "finish", "logprobs": "probs",
        "delta": {"role": "role", "content": "content", "tool_calls": "calls"}},
    "text_completion": {"index": "index", "finish_reason": "finish", "text": "content",
        "logprobs": "probs or null"},
    "native": {"index": "index", "content": "content", "tokens": "tokens", "id_slot": "slot",
        "stop": "is over", "model": "model", "tokens_predicted": "new", "tokens_evaluated": "read",
        "generation_settings": "settings", "prompt": "prompt", "has_new_line": "has line",
        "truncated": "never", "stop_type": "stop type", "stopping_word": "stop word",
        "tokens_cached": "total", "timings": "timings", "completion_probabilities": "entries"}
}""")
"""The names of an answer, and under which other name `fill` finds the value of each, if any."""
OPENED = "<tool_call>"
CALL = re.compile(f"{OPENED}(.*?)(?:</tool_call>|$)", re.DOTALL)
"""A call of a tool in Qwen's format."""
ENDS = {"eos": ("stop", "eos"), "stop": ("stop", "word")}
"""Why a text ended, in OpenAI's word and in llama-server's; else by its length."""
LEAST = -9999.0
"""The log-probability of a token that filters have removed; JSON has no infinity."""


def fill(shape: Json, values: Json) -> Json:
    """An object of a shape of `SHAPES`, with those of its fields that `values` has."""
    filled: Json = {}
    for name, source in shape.items():
        if isinstance(source, dict):
            filled[name] = fill(source, values)
        elif source in values:
            filled[name] = values[source]
    return filled


class Answer:
    """What the texts of a job become: chunks of a stream, or one answer."""

    def __init__(
        self, shape: str, job: Job, tokenizer: PreTrainedTokenizerBase, model: str
    ) -> None:
        self.shape, self.job, self.tokenizer = shape, job, tokenizer
        kind = shape + ".chunk" * (shape == CHAT and job.request.stream)
        self.common: Json = {"object": kind, "model": model, "system_fingerprint": "sequoia-plan"}
        self.common |= {"id": f"chatcmpl-{uuid4().hex}", "created": int(time.time())}

    def whole(self) -> Json | list[Json]:
        """The answer to a request that is not streamed."""
        choices = self.job.choices
        entries = [self.entry(choice) for choice in choices]
        if self.shape == NATIVE:
            return entries[0] if len(entries) == 1 else entries
        return self.common | {"choices": entries} | self.usage()

    def chunk(self, choice: Choice) -> Json:
        """The chunk of a stream for what is new of a choice."""
        entry = self.entry(choice)
        if self.shape == NATIVE:
            return entry
        last = {"timings": timings(choice)} if choice.result else {}
        return self.common | {"choices": [entry]} | last

    def usage(self) -> Json:
        """Counts of tokens, in which a prompt counts once for its choices, and timings."""
        choices = self.job.choices
        prompts = choices[:: self.job.request.n]
        read = sum(len(choice.prompt) for choice in prompts)
        new = sum(choice.result.new_tokens for choice in choices if choice.result)
        cached = {"cached_tokens": sum(choice.cached for choice in prompts)}
        counts = {"prompt_tokens": read, "completion_tokens": new, "total_tokens": read + new}
        usage = counts | {"prompt_tokens_details": cached}
        return {"usage": usage, "timings": timings(choices[0])}

    def entry(self, choice: Choice) -> Json:
        """The fields of what is new of a choice since its last entry, and all once it has ended."""
        request, prompt, result, start = self.job.request, choice.prompt, choice.result, choice.sent
        has_tools = bool(request.tools) and request.tool_choice == "auto"
        before_calls = TextBefore([OPENED] * has_tools)
        content = before_calls.add(choice.text)
        values: Json = {
            "index": choice.index, "finish": None, "tokens": [], "slot": 0, "is over": bool(result),
            "new": min(choice.accepted + len(choice.times) - 1, self.job.limit),
            "read": len(prompt), "probs or null": None,
        }  # fmt: skip
        if start < 0:
            values["role"] = "assistant"
        if result:
            calls = calls_in(choice.text) if before_calls.found else []
            content = content if calls else choice.text
            finish, stop_type = ENDS.get(result.finish_reason, ("length", "limit"))
            tokens = result.sequences[0, len(prompt) :].tolist()
            values |= {
                "finish": "tool_calls" if calls else finish, "stop type": stop_type,
                "stop word": "", "never": False, "model": self.common["model"],
                "settings": self.job.sampling.settings(), "prompt": self.tokenizer.decode(prompt),
                "has line": "\n" in content, "new": len(tokens), "total": len(prompt) + len(tokens),
                "timings": timings(choice), "tokens": tokens if request.return_tokens else [],
            }  # fmt: skip
            if calls:
                values["calls"] = calls
            if result.logprobs is not None:
                entries = self.probs(tokens, result)
                probs = {"content": entries}
                values |= {"entries": entries, "probs": probs, "probs or null": probs}
        values["content"], choice.sent = content[max(start, 0) :], len(content)
        entry = fill(SHAPES[self.common["object"]], values)
        return selected(entry, request.response_fields) if result else entry

    def probs(self, tokens: list[int], result: Any) -> list[Json]:
        """The log-probabilities of new tokens, as OpenAI's API has them."""

        def prob(token: int, logprob: float) -> Json:
            """A token with its log-probability."""
            text = self.tokenizer.decode([token])
            fields = {"id": token, "token": text, "bytes": [*text.encode()]}
            return fields | {"logprob": max(logprob, LEAST)}

        columns = result.logprobs, result.top_tokens, result.top_logprobs
        rows = zip(tokens, *(column.tolist() for column in columns), strict=True)
        return [
            prob(token, logprob) | {"top_logprobs": [*map(prob, top_tokens, top_logprobs)]}
            for token, logprob, top_tokens, top_logprobs in rows
        ]


def selected(answer: Json, paths: list[str]) -> Json:
    """The fields that a client asks for, with slashes between names; all if it asks for none."""
    fields: Json = {}
    for path in paths:
        with suppress(KeyError, TypeError):
            fields[path] = reduce(getitem, path.split("/"), answer)
    return fields if paths else answer


def timings(choice: Choice) -> Json:
    """Counts and milliseconds, by llama-server's names, of a choice that has ended."""
    assert choice.result
    began, prompt_read, *_, ended = *choice.times, choice.times[-1]
    figures: Json = {"cache_n": choice.cached}
    for name, count, ms in (
        ("prompt", len(choice.prompt) - choice.cached, 1000 * (prompt_read - began)),
        ("predicted", choice.result.new_tokens, 1000 * (ended - prompt_read)),
    ):
        figures |= {f"{name}_n": count, f"{name}_ms": ms}
        figures[f"{name}_per_token_ms"] = ms / max(count, 1)
        figures[f"{name}_per_second"] = 1000 * count / max(ms, 1e-6)
    drafts = {"draft_n": choice.drafted, "draft_n_accepted": choice.accepted}
    return figures | drafts if choice.drafted else figures


def calls_in(text: str) -> list[Json]:
    """The calls of tools in a text, as OpenAI's API has them; none if one of them is no call."""
    calls: list[Json] = []
    with suppress(ValueError, TypeError, KeyError):
        for source in CALL.findall(text):
            call = json.loads(source)
            function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
            about = {"type": "function", "id": f"call_{uuid4().hex}", "index": len(calls)}
            calls.append(about | {"function": function})
        return calls
    return []
