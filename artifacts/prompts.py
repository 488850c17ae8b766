"""The text that acceptance is measured on: built-in prompts of several kinds, or the user's own file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sequoia_plan.artifacts.errors import SequoiaPlanError
from sequoia_plan.artifacts.files import read_bytes
from sequoia_plan.artifacts.profile import LONGEST_KIND

BUILT_IN = Path(__file__).parent / "prompts.jsonl"
LARGEST_FILE = 1 << 28
EXPECTED = '{"text": "..."}, {"messages": [...]} with a user message, or {"turns": ["...", ...]}'

Message = dict[str, str]
Text = str | list[Message]
"""A user's text, or a conversation whose last message is the user's."""


@dataclass(frozen=True)
class Prompt:
    """What a model is asked.

    Args:
        text: in one message, or as a conversation.
        kind: what kind of prompt it is, as "code" or "story"; None if nobody said.
    """

    text: Text
    kind: str | None = None


def built_in() -> list[Prompt]:
    """The measuring half of our own prompts."""
    return measuring_half(load(BUILT_IN))


def measuring_half(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Every second prompt, the first included: what `profile` measures on."""
    return list(prompts[::2])


def held_out_half(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The other prompts: what `bench` decodes. A file with one prompt gives it to both."""
    return list(prompts[1::2] or prompts)


def load(path: str | Path) -> list[Prompt]:
    """Prompts from a file: .jsonl with one prompt a line, or plain text with one prompt a paragraph.

    A line has a `text`, chat `messages` (as OpenAI and Hugging Face write them, content parts included; what follows the last user
    message is left out), or MT-bench's `turns`, of which the first is taken because the others follow answers. Its `kind`, or MT-bench's
    `category`, says of what kind it is.

    Raises:
        SequoiaPlanError: if the file cannot be read, a line is no prompt, or there is none.
    """
    try:
        text = read_bytes(path, "prompts, .jsonl or plain text", LARGEST_FILE).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SequoiaPlanError(f"{path}: not UTF-8 text; expected prompts, .jsonl or plain text") from error
    text = text.replace("\r\n", "\n")
    prompts: list[Prompt]
    if str(path).endswith(".jsonl"):
        lines = enumerate(text.split("\n"), 1)  # not splitlines: U+2028 may stand within a JSON text
        prompts = [_line(path, number, line) for number, line in lines if line.strip()]
    else:
        prompts = [Prompt(paragraph.strip()) for paragraph in text.split("\n\n") if paragraph.strip()]
    if not prompts:
        raise SequoiaPlanError(f"{path}: holds no prompt; expected at least one")
    return prompts


def read_messages(found: Any) -> list[Message]:
    """A conversation up to its last user message.

    Raises:
        ValueError: if it is none.
    """
    if not isinstance(found, list):
        raise ValueError
    messages = [{"role": str(message["role"]), "content": _content(message["content"])} for message in found]
    while messages and messages[-1]["role"] != "user":
        messages.pop()
    if not messages or not messages[-1]["content"]:
        raise ValueError
    return messages


def _line(path: str | Path, number: int, line: str) -> Prompt:
    try:
        entry = json.loads(line)
        if "messages" in entry:
            return Prompt(read_messages(entry["messages"]), _kind(entry))
        text = entry["text"] if "text" in entry else entry["turns"][0]
        if isinstance(text, str) and text:
            return Prompt(text, _kind(entry))
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        pass
    raise SequoiaPlanError(f"{path}: line {number} is no prompt; expected {EXPECTED}")


def _kind(entry: Any) -> str | None:
    """What a line says of its kind; what no profile can hold is none."""
    kind = entry.get("kind", entry.get("category"))
    return kind if isinstance(kind, str) and 0 < len(kind) <= LONGEST_KIND and kind.isprintable() else None


def _content(content: Any) -> str:
    """Text, or OpenAI's list of parts, of which all must be text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or any(part.get("type") != "text" for part in content):
        raise ValueError
    return "".join(str(part["text"]) for part in content)
