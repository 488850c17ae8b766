"""The text acceptance is measured on: built-in prompts of several kinds, or the user's own file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.artifacts.files import read_bytes

BUILT_IN = Path(__file__).parent / "prompts.jsonl"


def built_in() -> list[str]:
    """Our own prompts: every second one is for measuring, the others are held out for checking what was measured."""
    return load(BUILT_IN)[::2]


def held_out(tokenizer: Any, most: int) -> list[list[int]]:
    """Token ids of the first prompts that nothing is measured on."""
    return [encode(tokenizer, text) for text in load(BUILT_IN)[1::2][:most]]


def load(path: str | Path) -> list[str]:
    """Prompts from a file: .jsonl with a `text` or chat `messages` field a line (the last user message counts), or plain
    text with one prompt a paragraph.

    Raises:
        SequoiaPlanError: if the file cannot be read, a line is no prompt, or there is none.
    """
    try:
        text = read_bytes(path, "prompts, .jsonl or plain text").decode()
    except UnicodeDecodeError as error:
        raise SequoiaPlanError(f"{path}: not UTF-8 text; expected prompts, .jsonl or plain text") from error
    if str(path).endswith(".jsonl"):
        prompts = [_line(path, number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    else:
        prompts = [paragraph.strip() for paragraph in text.split("\n\n") if paragraph.strip()]
    if not prompts:
        raise SequoiaPlanError(f"{path}: holds no prompt; expected at least one")
    return prompts


def encode(tokenizer: Any, prompt: str) -> list[int]:
    """Token ids of a prompt as the model expects it: in its chat template if it has one, else as plain text."""
    if getattr(tokenizer, "chat_template", None):
        encoded = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=True)
        return list(encoded["input_ids"])
    return list(tokenizer(prompt)["input_ids"])


def _line(path: str | Path, number: int, line: str) -> str:
    try:
        entry = json.loads(line)
        prompt = entry["text"] if "text" in entry else next(m["content"] for m in reversed(entry["messages"]) if m["role"] == "user")
        if isinstance(prompt, str) and prompt:
            return prompt
    except (ValueError, TypeError, KeyError, StopIteration):
        pass
    raise SequoiaPlanError(f'{path}: line {number} is no prompt; expected {{"text": "..."}} or {{"messages": [...]}} with a user message')
