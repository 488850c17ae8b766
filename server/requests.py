"""What clients send: every field with its type and range, declared once."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec
from torch import Tensor, bincount
from transformers import PreTrainedTokenizerBase
from transformers.generation import logits_process

from sequoia_plan.artifacts import ArgumentError
from sequoia_plan.runtime import Grammar, Sampling

Json = dict[str, Any]
Limit = Annotated[int, msgspec.Meta(ge=-1)]
Count = Annotated[int, msgspec.Meta(ge=0, le=100)]


class Format(msgspec.Struct, frozen=True):
    """`response_format`; `json_schema` has the schema in its field `schema`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Json = {}


class Request(msgspec.Struct):
    """The fields of all endpoints; null is as good as none, and others are ignored.

    -1 is no number of tokens, and a seed that is drawn.
    """

    messages: list[Json] = []
    prompt: str | list[int | str | list[int]] = ""
    suffix: str | None = None
    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: list[dict[str, str]] = []
    content: str = ""
    tokens: list[int] = []
    add_special: bool = False
    max_completion_tokens: Limit = -1
    max_tokens: Limit = -1
    n_predict: Limit = -1
    n_indent: Count = 0
    t_max_predict_ms: float = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: Limit = -1
    presence_penalty: float = 0
    frequency_penalty: float = 0
    repeat_penalty: Annotated[float, msgspec.Meta(gt=0)] = 1
    logit_bias: dict[int, float] | list[tuple[int, float]] = {}
    logprobs: bool | Count = 0
    top_logprobs: Count = 0
    n_probs: Count = 0
    n: Annotated[int, msgspec.Meta(ge=1, le=100)] = 1
    stop: str | list[str] = []
    stream: bool = False
    stream_options: Json = {}
    response_format: Format = Format("text")
    json_schema: Json = {}
    grammar: str = ""
    tools: list[Json] = []
    tool_choice: Literal["auto", "none"] = "auto"
    chat_template_kwargs: Json = {}
    response_fields: list[str] = []
    return_tokens: bool = False

    def sampling(self, default: Sampling) -> Sampling:
        """How tokens are sampled: as the request says, else as the server was started."""
        names = "temperature", "top_p", "top_k", "min_p"
        given = {name: x for name in names if (x := getattr(self, name)) is not None}
        return replace(default, **given)

    def constraint(self, tokenizer: PreTrainedTokenizerBase) -> Grammar | None:
        """The grammar that the text follows; ArgumentError if it cannot be compiled."""
        schema, form = self.json_schema, self.response_format
        if form.type != "text":
            schema = form.json_schema.get("schema", {"type": "object"})
        sources: Json = {"json_schema": schema or None, "ebnf": self.grammar or None}
        return Grammar(tokenizer, **sources) if any(sources.values()) else None

    def deep_lines(self, text: str) -> str:
        """A text up to the first new line that is indented by less than `n_indent` characters."""
        found = re.search(rf"\n[ \t]{{,{self.n_indent - 1}}}\S", text) if self.n_indent else None
        return text[: found.end() - 1] if found else text

    def processors(self, length: int) -> list[Callable[..., Tensor]]:
        """Logits processors for penalties and biases, after a prompt of so many tokens."""

        def penalise(ids: Tensor, scores: Tensor) -> Tensor:
            """Lower the scores of tokens in the new text, once and for each time (OpenAI)."""
            counts = bincount(ids[0, length:], minlength=scores.shape[1])
            return scores - self.frequency_penalty * counts - self.presence_penalty * counts.sign()

        biases = {(token,): float(bias) for token, bias in dict(self.logit_bias).items()}
        repeat = logits_process.RepetitionPenaltyLogitsProcessor(float(self.repeat_penalty))
        processors: list[Callable[..., Tensor]] = []
        if self.repeat_penalty != 1:
            processors.append(repeat)
        if self.presence_penalty or self.frequency_penalty:
            processors.append(penalise)
        if biases:
            processors.append(logits_process.SequenceBiasLogitsProcessor(biases))
        return processors


def read(body: bytearray) -> Request:
    """A request from its body; ArgumentError names the first field that is wrong."""
    fields: Json = {}
    try:
        fields = msgspec.json.decode(body, type=Json)
        fields = {name: value for name, value in fields.items() if value is not None}
        return msgspec.convert(fields, Request, str_keys=True)
    except (ValueError, RecursionError) as error:
        reason, _, path = str(error).partition(" - at `$.")
        name = re.split(r"[.[`]", path)[0]
        found = f"{name}: found {fields[name]!r:.60}" if name in fields else "body"
        raise ArgumentError(f"{found}: {reason}; docs/serve.md has the fields") from error
