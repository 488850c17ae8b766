"""The prompts that acceptance is measured on: the built-in ones, or a user's own file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sequoia_plan.artifacts.counts import MAX_KIND_LENGTH
from sequoia_plan.artifacts.errors import SequoiaPlanError
from sequoia_plan.artifacts.files import read_bytes

JSON_LINES = (".jsonl", ".ndjson")
"""How the names of files with one JSON object a line end, in lower case."""
BUILT_IN = Path(__file__).parent / "prompts.jsonl"
MAX_FILE_BYTES = 1 << 28
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
    """The first prompt and every second one after it. `profile` measures on these."""
    return list(prompts[::2])


def held_out_half(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts that are not in the measuring half. `bench` decodes these.

    A single prompt is in both halves.
    """
    return list(prompts[1::2] or prompts)


def load(path: str | Path) -> list[Prompt]:
    """Read prompts from a file: .jsonl with a prompt a line, or text with a prompt a paragraph.

    A line of .jsonl has one of these keys:
    """
    try:
        data = read_bytes(path, "prompts, .jsonl or plain text", MAX_FILE_BYTES)
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SequoiaPlanError(
            f"{path}: not UTF-8 text; expected prompts, .jsonl or plain text"
        ) from error
    _check_encoding_and_name(path, text)
    text = text.replace("\r\n", "\n")
    prompts: list[Prompt]
    if str(path).lower().endswith(JSON_LINES):
        lines = enumerate(text.split("\n"), 1)  # splitlines would split at U+2028 within JSON text
        prompts = [_parse_line(path, number, line) for number, line in lines if line.strip()]
    else:
        paragraphs = [paragraph.strip() for paragraph in text.split("\n\n")]
        prompts = [Prompt(paragraph) for paragraph in paragraphs if paragraph]
    if not prompts:
        raise SequoiaPlanError(f"{path}: holds no prompt; expected at least one")
    return prompts


def is_text(value: Any) -> bool:
    """Whether `value` is text of whole characters: half of one (a lone surrogate) is none."""
    try:
        return isinstance(value, str) and bool(value.encode() or True)
    except UnicodeEncodeError:
        return False


def _check_encoding_and_name(path: str | Path, text: str) -> None:
    """Refuse a file that would be read as plain text but is UTF-16, or JSON by another name."""
    if "\0" in text:
        raise SequoiaPlanError(
            f"{path}: holds NUL characters, as UTF-16 does; expected UTF-8, .jsonl or plain text"
        )
    if str(path).lower().endswith(JSON_LINES):
        return
    is_json = str(path).lower().endswith(".json")
    if not is_json and text.lstrip()[:1] in ("{", "["):
        first_line = text.lstrip().split("\n")[0]
        for part in (first_line, text):
            with suppress(ValueError, RecursionError):
                is_json |= isinstance(json.loads(part), (dict, list))
    if is_json:
        raise SequoiaPlanError(
            f"{path}: holds JSON and is not named .jsonl; expected plain text, or a file named "
            f".jsonl with a prompt a line, as {EXPECTED_LINE}"
        )


def read_messages(entries: Any) -> list[Message]:
    """Convert a chat to messages of plain text, up to the last user message."""
    if not isinstance(entries, list):
        raise ValueError
    messages = [
        {"role": _content_text(entry["role"]), "content": _content_text(entry["content"])}
        for entry in entries
    ]
    while messages and messages[-1]["role"] != "user":
        messages.pop()
    if not messages or not messages[-1]["content"]:
        raise ValueError
    return messages


def _parse_line(path: str | Path, number: int, line: str) -> Prompt:
    """The prompt in a line of a .jsonl file."""
    try:
        entry = json.loads(line)
        if "messages" in entry:
            return Prompt(read_messages(entry["messages"]), _prompt_kind(entry))
        text = entry["text"] if "text" in entry else entry["turns"][0]
        if is_text(text) and text:
            return Prompt(text, _prompt_kind(entry))
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        pass
    raise SequoiaPlanError(f"{path}: line {number} is no prompt; expected {EXPECTED_LINE}")


def _prompt_kind(entry: Any) -> str | None:
    """The kind that a prompt's JSON object names; None if it names none that a profile can hold."""
    kind = entry.get("kind", entry.get("category"))
    if not isinstance(kind, str) or not kind.isprintable():
        return None
    return kind if 0 < len(kind) <= MAX_KIND_LENGTH else None


def _content_text(content: Any) -> str:
    """A message's text. OpenAI writes it as a list of parts, all of which must be text."""
    if isinstance(content, str):
        if not is_text(content):
            raise ValueError
        return content
    if not isinstance(content, list):
        raise ValueError
    if any(not isinstance(part, dict) or part.get("type") != "text" for part in content):
        raise ValueError
    return _content_text("".join(str(part["text"]) for part in content))
