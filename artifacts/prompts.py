"""The prompts that acceptance is measured on: the built-in ones, or a user's own file."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from sequoia_plan.artifacts.counts import MAX_KIND_LENGTH
from sequoia_plan.artifacts.errors import SequoiaPlanError
from sequoia_plan.artifacts.files import read_text

JSON_LINES = (".jsonl", ".ndjson")
"""How the names of files with one JSON object a line end, in lower case."""
BUILT_IN = Path(__file__).parent / "prompts.jsonl"
EXPECTED_LINE = (
    '{"text": "..."}, {"messages": [...]} with a user message, or {"turns": ["...", ...]}'
)

Message = dict[str, str]
PromptText = str | list[Message]
"""A user's text, or a conversation whose last message is the user's."""


@dataclass(frozen=True)
class Prompt:
    """A prompt for a language model."""

    text: PromptText
    kind: str | None = None


def built_in() -> list[Prompt]:
    """The measuring half of the built-in prompts."""
    return measuring_half(load(BUILT_IN))


def measuring_half(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The first prompt of the first kind and every second one from there. `profile` uses these."""
    return _evenly(_grouped(prompts)[::2])


def held_out_half(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts that are not in the measuring half. `bench` decodes these.

    A single prompt is in both halves.
    """
    return _evenly(_grouped(prompts)[1::2] or prompts)


def _grouped(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts, one kind after the other."""
    return list(chain.from_iterable(by_kind(prompts).values()))


def by_kind(prompts: Sequence[Prompt]) -> dict[str | None, list[Prompt]]:
    """The prompts of each kind, in the order of their first prompts."""
    groups: dict[str | None, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.kind, []).append(prompt)
    return groups


def _evenly(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts in an order in which the first ones are of all kinds, and of the whole file.

    Kinds take turns. Those of one kind come in the order of their reversed binary numbers: the
    first, the middle one, those at the quarters, ...
    """
    spread = [
        [group[i] for i in sorted(range(len(group)), key=lambda i: f"{i:032b}"[::-1])]
        for group in by_kind(prompts).values()
    ]
    return list(filter(None, chain.from_iterable(zip_longest(*spread))))


class _TextPart(Struct, tag_field="type", tag="text"):
    """A part of a message as OpenAI writes it; other parts than text are refused."""

    text: str


class _Message(Struct):
    """A message of a chat."""

    role: str
    content: str | list[_TextPart]


class _Line(Struct):
    """A line of .jsonl: a text, a chat, or MT-bench's turns, of which the first is used."""

    text: Annotated[str, Meta(min_length=1)] | None = None
    messages: list[_Message] | None = None
    turns: Annotated[list[str], Meta(min_length=1)] | None = None
    kind: Any = None
    category: Any = None


def load(path: str | Path) -> list[Prompt]:
    """Read prompts from a file: .jsonl with a prompt a line, or text with a prompt a paragraph."""
    text = read_text(path, "prompts, .jsonl or plain text").replace("\r\n", "\n")
    if "\0" in text:
        raise SequoiaPlanError(
            f"{path}: holds NUL characters, as UTF-16 does; expected UTF-8, .jsonl or plain text"
        )
    name = str(path).lower()
    if name.endswith(JSON_LINES):
        lines = enumerate(text.split("\n"), 1)  # splitlines would split at U+2028 within JSON text
        prompts = [_parse_line(path, number, line) for number, line in lines if line.strip()]
    elif name.endswith(".json") or _is_json(text):
        raise SequoiaPlanError(
            f"{path}: holds JSON and is not named .jsonl; expected plain text, or a file named "
            f".jsonl with a prompt a line, as {EXPECTED_LINE}"
        )
    else:
        paragraphs = [paragraph.strip() for paragraph in text.split("\n\n")]
        prompts = [Prompt(paragraph) for paragraph in paragraphs if paragraph]
    if not prompts:
        raise SequoiaPlanError(f"{path}: holds no prompt; expected at least one")
    return prompts


def _is_json(text: str) -> bool:
    """Whether the first line or the whole text is a JSON object or list."""
    for part in (text.lstrip().split("\n")[0], text):
        with suppress(msgspec.DecodeError, RecursionError):
            return isinstance(msgspec.json.decode(part), dict | list)
    return False


def _parse_line(path: str | Path, number: int, line: str) -> Prompt:
    """The prompt in a line of a .jsonl file."""
    try:
        entry = msgspec.json.decode(line, type=_Line)
    except (msgspec.DecodeError, RecursionError):
        entry = _Line()
    text = _chat(entry.messages) if entry.messages else entry.text or (entry.turns or [""])[0]
    if not text:
        raise SequoiaPlanError(f"{path}: line {number} is no prompt; expected {EXPECTED_LINE}")
    kind = entry.category if entry.kind is None else entry.kind
    # a profile can hold no other kinds
    has_kind = isinstance(kind, str) and kind.isprintable() and 0 < len(kind) <= MAX_KIND_LENGTH
    return Prompt(text, kind if has_kind else None)


def _chat(messages: Sequence[_Message]) -> list[Message]:
    """The messages as plain text, up to the last user message; empty if there is none."""
    chat = [
        {
            "role": message.role,
            "content": message.content
            if isinstance(message.content, str)
            else "".join(part.text for part in message.content),
        }
        for message in messages
    ]
    while chat and chat[-1]["role"] != "user":
        chat.pop()
    return chat if chat and chat[-1]["content"] else []
