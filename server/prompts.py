"""Prompts as token ids: conversations, texts, and the place between a prefix and a suffix."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sequoia_plan.runtime.text import text_ids
from sequoia_plan.server.requests import Extra, Refusal, Request

MARKERS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<|fim_begin|>", "<|fim_hole|>", "<|fim_end|>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
)
"""Tokens before a prefix, before a suffix, and before the text between them, by family."""
REPOSITORY_MARKERS = (("<|repo_name|>", "<|file_sep|>"), ("<repo_name>", "<file_sep>"))
"""Tokens before the name of a repository, and before each of its files."""
SNIPPET = "\n\n--- snippet ---\n\n"
"""Before a part of another file, where a model has no token for that."""


def conversation(tokenizer: Any, request: Request) -> str:
    """The messages in the model's chat template; Refusal if the template refuses them."""
    messages = [_message(message) for message in request.messages or []]
    if not messages:
        raise Refusal("messages: found none, expected a list of messages", field="messages")
    if not getattr(tokenizer, "chat_template", None):
        return "\n\n".join(message["content"] for message in messages)
    tools = request.tools if request.tool_choice == "auto" else None
    try:
        return str(
            tokenizer.apply_chat_template(
                messages, tools=tools or None, tokenize=False,
                **{"add_generation_prompt": True} | request.chat_template_kwargs,
            )
        )  # fmt: skip
    except Exception as error:  # a template may raise anything
        raise Refusal(
            f"messages: the model's chat template refuses them: {error!s:.200}", field="messages"
        ) from error


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """A message as templates take it: its content is text, arguments of calls are objects."""
    content, calls = message.get("content") or "", message.get("tool_calls")
    try:
        if not isinstance(message["role"], str):
            raise TypeError
        if not isinstance(content, str):
            content = "".join(part["text"] for part in content)
        for call in calls or ():
            arguments = call["function"]["arguments"]
            if isinstance(arguments, str):
                call["function"]["arguments"] = json.loads(arguments)
    except (KeyError, TypeError, ValueError) as error:
        raise Refusal(
            f"messages: found {message!r:.100}, expected a role, and a content of text or of parts "
            "with a text; arguments of tool_calls are JSON",
            field="messages",
        ) from error
    return message | {"content": content}


def prompts_of(tokenizer: Any, prompt: str | Sequence[Any]) -> list[list[int]]:
    """The token ids of one prompt or of several: texts, or ids mixed with texts."""
    if isinstance(prompt, str):
        return [text_ids(tokenizer, prompt)]
    if prompt and all(isinstance(part, str) for part in prompt):
        return [text_ids(tokenizer, part) for part in prompt]
    if prompt and all(isinstance(part, list) for part in prompt):
        return [list(part) for part in prompt]
    if any(isinstance(part, list) for part in prompt):
        raise Refusal("prompt: found lists beside others, expected one prompt, or a list of them")
    return [[token for part in prompt for token in _ids(tokenizer, part)]]


def infill(
    tokenizer: Any, prefix: str, suffix: str, middle: str = "", extra: Sequence[Extra] | None = None
) -> list[int]:
    """The text between a prefix and a suffix; `middle` begins it. With other files if not None."""
    vocabulary = tokenizer.get_vocab()
    before, after, between = _first(vocabulary, MARKERS) or _no_infill()
    names = _first(vocabulary, REPOSITORY_MARKERS)
    parts: list[str | int] = []
    if extra is not None and names:
        parts = [names[0], "myproject\n"]
    for file in extra or ():
        parts += [names[1], f"{file.filename}\n", file.text] if names else [SNIPPET, file.text]
    if extra is not None and names:
        parts += [names[1], "filename\n"]
    parts += [*tokenizer("")["input_ids"][:1], before, prefix + middle, after, suffix, between]
    return [token for part in parts for token in _ids(tokenizer, part)]


def _no_infill() -> Any:
    names = ", ".join(" ".join(markers) for markers in MARKERS)
    raise Refusal(f"infill: the model has none of these markers: {names}; take a coder")


def _first(
    vocabulary: Mapping[str, int], families: Sequence[Sequence[str]]
) -> Sequence[int] | None:
    """The ids of the first family of markers that a vocabulary has."""
    for markers in families:
        if all(marker in vocabulary for marker in markers):
            return [vocabulary[marker] for marker in markers]
    return None


def _ids(tokenizer: Any, part: str | int) -> list[int]:
    """The ids of a part of a prompt."""
    if isinstance(part, int):
        return [part]
    return list(tokenizer(part, add_special_tokens=False)["input_ids"])
