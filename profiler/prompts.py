"""Prompts as the models see them; `artifacts.prompts` reads them from files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.artifacts.prompts import BUILT_IN, Message, Prompt, Text, built_in, held_out_half, load, measuring_half, read_messages
from sequoia_plan.runtime import Pair
from sequoia_plan.runtime.models.forward import context_length, text_config

__all__ = [
    "BUILT_IN",
    "Message",
    "Prompt",
    "Text",
    "built_in",
    "check_lengths",
    "encode",
    "held_out",
    "held_out_half",
    "load",
    "measuring_half",
    "read_messages",
]


def held_out(tokenizer: Any, most: int) -> list[list[int]]:
    """Token ids of the first of our own prompts that nothing is measured on."""
    return [encode(tokenizer, prompt.text) for prompt in held_out_half(load(BUILT_IN))[:most]]


def encode(tokenizer: Any, prompt: Text) -> list[int]:
    """Token ids of a prompt as the model expects it: in its chat template if it has one, else as plain text."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if getattr(tokenizer, "chat_template", None):
        encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        return list(encoded["input_ids"])
    return list(tokenizer("\n\n".join(message["content"] for message in messages))["input_ids"])


def check_lengths(path: str | Path, prompts: Sequence[Prompt], pair: Pair) -> None:
    """Refuse a prompt that leaves no room for a new token, before anything is measured.

    Raises:
        SequoiaPlanError: naming the file and which of its prompts it is.
    """
    context = context_length(text_config(pair.target))
    for number, prompt in enumerate(prompts, 1):
        if (length := len(encode(pair.tokenizer, prompt.text))) >= context:
            raise SequoiaPlanError(f"{path}: prompt {number} has {length} tokens, expected at most {context - 1} (the model's context less one new token)")
