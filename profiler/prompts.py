"""Prompts as token ids; `artifacts.prompts` reads them from files."""

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.artifacts.prompts import BUILT_IN, Prompt, PromptText, held_out_half, load
from sequoia_plan.models.base.errors import first_line
from sequoia_plan.runtime import Pair
from sequoia_plan.runtime.text import text_ids


def held_out(tokenizer: PreTrainedTokenizerBase, max_prompts: int) -> list[list[int]]:
    """Token ids of the first `max_prompts` built-in prompts that no profile is measured on."""
    prompts = held_out_half(load(BUILT_IN))[:max_prompts]
    return [encode(tokenizer, prompt.text) for prompt in prompts]


def encode(tokenizer: PreTrainedTokenizerBase, prompt: PromptText) -> list[int]:
    """Token ids of a prompt: in the model's chat template if it has one, else as plain text."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if getattr(tokenizer, "chat_template", None):
        try:
            encoded = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=True
            )
        except Exception as error:  # a template may raise anything
            roles = ", ".join(str(message["role"]) for message in messages)
            raise SequoiaPlanError(
                f"prompt {str(prompt)!r:.60}: the model's chat template refuses its messages "
                f"({roles}): {first_line(error)}; expected turns of user and assistant"
            ) from error
        return list(encoded["input_ids"])
    return text_ids(tokenizer, "\n\n".join(message["content"] for message in messages))


def check_lengths(path: str | Path, prompts: Sequence[Prompt], pair: Pair) -> None:
    """Refuse a prompt that leaves no room for a new token, before anything is measured."""
    context = pair.target.context
    for number, prompt in enumerate(prompts, 1):
        length = len(encode(pair.tokenizer, prompt.text))
        if length >= context:
            raise SequoiaPlanError(
                f"{path}: prompt {number} has {length} tokens, expected at most {context - 1} (the "
                "model's context less one new token)"
            )
