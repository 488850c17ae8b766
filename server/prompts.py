"""Prompts as token ids: conversations, texts, and the place between a prefix and a suffix."""

import json
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from sequoia_plan.artifacts import ArgumentError
from sequoia_plan.runtime.text import text_ids
from sequoia_plan.server.requests import Json, Request

QWEN = "<|repo_name|>myproject\n", "<|file_sep|>", "<|file_sep|>filename\n"
STARCODER = "<repo_name>myproject\n", "<file_sep>", "<file_sep>filename\n"
NONE = "", "\n\n--- snippet ---\n\n", ""
MARKERS = (
    (*QWEN, "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    (*STARCODER, "<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    (*NONE, "<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001
)
"""By family: the begin of a repository, of another file, and of the file itself; and the tokens
before a prefix, before a suffix, and before the text between them."""


def conversation(tokenizer: PreTrainedTokenizerBase, request: Request) -> str:
    """The messages in the model's chat template; ArgumentError if it does not take them."""
    messages = request.messages
    try:
        for message in messages:
            content = message.get("content") or ""
            if not isinstance(content, str):
                content = "".join(part["text"] for part in content)
            message["content"] = content
            for call in message.get("tool_calls") or ():
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        options = {"add_generation_prompt": True} | request.chat_template_kwargs
        tools = request.tools if messages and request.tool_choice == "auto" else None
        return tokenizer.apply_chat_template(messages, tools or None, tokenize=False, **options)
    except Exception as error:  # a template may raise anything
        raise ArgumentError(
            f"messages: found {messages!r:.60}, expected messages with a role and a text, which "
            f"the model's chat template takes ({error!r:.100})"
        ) from error


def prompts_of(tokenizer: PreTrainedTokenizerBase, prompt: str | Sequence[Any]) -> list[list[int]]:
    """The token ids of one prompt or of several, each of which is a text or token ids."""
    is_one = isinstance(prompt, str) or {*map(type, prompt)} <= {int}
    prompts: Sequence[Any] = [prompt] if is_one else prompt
    return [text_ids(tokenizer, each) if isinstance(each, str) else each for each in prompts]


def markers_of(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...] | None:
    """The row of `MARKERS` for a model; None if it fills nothing in."""
    vocabulary = tokenizer.get_vocab()
    return next((markers for markers in MARKERS if markers[3] in vocabulary), None)


def infill(
    tokenizer: PreTrainedTokenizerBase, prefix: str, suffix: str, files: Sequence[Json] | None
) -> str:
    """A prompt for the text between a prefix and a suffix, with other files if not None."""
    markers = markers_of(tokenizer)
    if markers is None:
        raise ArgumentError(
            "suffix: the model has no markers for a place between texts; take a coder"
        )
    repository, name, own, before_prefix, before_suffix, before_middle = markers
    other_files = [
        f"{name}{file.get('filename', 'tmp')}\n{file.get('text', '')}" for file in files or ()
    ]
    begin = [] if files is None else [repository, *other_files, own]
    return "".join([*begin, before_prefix, prefix, before_suffix, suffix, before_middle])
