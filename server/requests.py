"""What clients send: every field with its type and range, declared once."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from torch import Tensor, bincount
from transformers.generation import logits_process

from sequoia_plan.artifacts import ArgumentError
from sequoia_plan.runtime import Grammar, Sampling

Limit = Annotated[int, Meta(ge=-1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Top = Annotated[int, Meta(ge=0, le=100)]
Stop = Annotated[str, Meta(min_length=1, max_length=1000)]
Texts = Annotated[list[Stop], Meta(max_length=1000)]


CHOICES = {"tool_choice": "auto or none", "response_format.type": "text, json_object, json_schema"}
"""Fields that take few values, which msgspec's errors do not list."""


class Refusal(ArgumentError):
    """A request that cannot be answered; `field` is the one that is wrong."""

    def __init__(self, message: str, status: int = 400, field: str | None = None) -> None:
        super().__init__(message)
        self.status, self.field = status, field


class Schema(Struct, frozen=True):
    """The schema of `response_format`, as OpenAI's API nests it."""

    schema: dict[str, Any]


class Format(Struct, frozen=True):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None
    schema: dict[str, Any] | None = None


class StreamOptions(Struct, frozen=True):
    """`stream_options`."""

    include_usage: bool = False


class Extra(Struct):
    """A part of another file, for `/infill`."""

    text: str = ""
    filename: str = "tmp"


class Function(Struct):
    """What a tool is called."""

    name: str


class Tool(Struct):
    """A tool, as far as it is checked; the chat template gets all of it."""

    type: Literal["function"]
    function: Function


class Request(Struct):
    """The fields of all endpoints; null is as good as none, and others are ignored."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)] | None = None
    prompt: str | list[int | str | list[int]] = ""
    suffix: str | None = None
    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: list[Extra] = []
    content: str = ""
    tokens: list[int] = []
    add_special: bool = False
    with_pieces: bool = False
    max_completion_tokens: Limit | None = None
    max_tokens: Limit | None = None
    n_predict: Limit | None = None
    t_max_predict_ms: float = 0
    ignore_eos: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: Limit | None = None
    min_p: float | None = None
    seed: int = -1
    presence_penalty: Penalty = 0
    frequency_penalty: Penalty = 0
    repeat_penalty: Annotated[float, Meta(gt=0, le=10)] = 1
    logit_bias: dict[int, float] | list[tuple[int, float]] = {}
    logprobs: bool | Top = False
    top_logprobs: Top = 0
    n_probs: Top = 0
    n: Annotated[int, Meta(ge=1, le=64)] = 1
    stop: Stop | Texts = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    response_format: Format = Format("text")
    json_schema: dict[str, Any] | None = None
    grammar: str = ""
    tools: list[dict[str, Any]] = []
    tool_choice: Literal["auto", "none"] = "auto"
    chat_template_kwargs: dict[str, Any] = {}
    response_fields: list[str] = []
    return_tokens: bool = False

    @property
    def limit(self) -> int | None:
        """New tokens, at most; None or -1 if the client does not say."""
        limits = (self.max_completion_tokens, self.max_tokens, self.n_predict)
        return next((limit for limit in limits if limit is not None), None)

    @property
    def num_probs(self) -> int | None:
        """How many of the most probable tokens to list for each token; None for no list."""
        count = max(
            self.top_logprobs, self.n_probs, int(self.logprobs is not True and self.logprobs)
        )
        return count if count or self.logprobs is True else None

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop

    def sampling(self, default: Sampling) -> Sampling:
        """How tokens are sampled: as the request says, else as the server was started."""
        top_k = self.top_k if self.top_k is None else max(self.top_k, 0)
        given = {"temperature": self.temperature, "top_p": self.top_p, "min_p": self.min_p}
        named = {name: x for name, x in {**given, "top_k": top_k}.items() if x is not None}
        return replace(default, **named)

    def constraint(self, tokenizer: Any) -> Grammar | None:
        """The grammar that the text follows; ArgumentError if it cannot be compiled."""
        form = self.response_format
        schema = self.json_schema or form.schema or (form.json_schema and form.json_schema.schema)
        if form.type == "json_schema" and schema is None:
            raise Refusal("response_format: found no json_schema.schema, expected one")
        if form.type == "json_object" and schema is None:
            schema = {"type": "object"}
        if schema is None and not self.grammar:
            return None
        return Grammar(tokenizer, json_schema=schema, ebnf=self.grammar or None)

    def processors(self, num_prompt_tokens: int) -> list[Any]:
        """Logits processors for the penalties and the biases."""
        found: list[Any] = []
        if self.repeat_penalty != 1:
            found.append(logits_process.RepetitionPenaltyLogitsProcessor(self.repeat_penalty))
        if self.presence_penalty or self.frequency_penalty:
            penalties = self.presence_penalty, self.frequency_penalty
            found.append(Penalties(num_prompt_tokens, *penalties))
        if self.logit_bias:
            biases = {(token,): float(bias) for token, bias in dict(self.logit_bias).items()}
            found.append(logits_process.SequenceBiasLogitsProcessor(biases))
        return found


class Penalties:
    """OpenAI's penalties for tokens that the new text has: once, and for each time."""

    def __init__(self, start: int, presence: float, frequency: float) -> None:
        self.start, self.presence, self.frequency = start, presence, frequency

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        """(int64 [1, length], float32 [1, vocabulary]) -> scores."""
        counts = bincount(ids[0, self.start :], minlength=scores.shape[1])[None]
        return scores - self.frequency * counts - self.presence * (counts > 0)


def read(body: bytes) -> Request:
    """A request from its body; Refusal names the first field that is wrong."""
    try:
        fields = msgspec.json.decode(body)
        if not isinstance(fields, dict):
            raise ValueError(f"found {fields!r:.60}")
        fields = {name: value for name, value in fields.items() if value is not None}
        request = msgspec.convert(fields, Request, str_keys=True)
        for tool in request.tools:
            msgspec.convert(tool, Tool)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$.")
        field = path.rstrip("`") or "tools"
        value: Any = fields.get(field.split("[")[0].split(".")[0])
        reason = f"expected {CHOICES[field]}" if field in CHOICES else reason
        raise Refusal(f"{field}: found {value!r:.60}; {reason}", field=field) from error
    except (ValueError, RecursionError) as error:
        raise Refusal(f"body: {error}; expected a JSON object") from error
    return request
