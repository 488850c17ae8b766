"""What goes into a generation, and what comes out: prompts, endings, results, texts that go on."""

import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, SupportsIndex

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from sequoia_plan.artifacts import ArgumentError, SequoiaPlanError, TokenTree
from sequoia_plan.models.base.architecture import text_config, unwrapped
from sequoia_plan.models.loaded_model import LoadedModel
from sequoia_plan.runtime.sampling.sampling import Sampling
from sequoia_plan.runtime.text import NewText, text_ids

Criterion = Callable[[Tensor, None], Tensor | bool]
"""A stopping criterion of transformers."""
Prompt = str | Tensor | np.ndarray | Sequence[int] | Sequence[Sequence[int]] | Mapping[str, object]
"""Text, token ids [n] or [1, n], or what a tokenizer returns."""
WITHOUT_EFFECT = ("input_ids", "attention_mask", "labels", "use_cache", "logits_to_keep")
"""Inputs of a model's `forward` that are checked elsewhere, or do not change what is generated."""


@dataclass(frozen=True)
class Generation:
    """What `generate` returns.

    Args:
        sequences: int64 [1, prompt + new], as transformers' generate returns it.
        new_tokens: number of tokens added.
        steps: target passes that added them.
        seconds: wall time, the prompt's prefill included.
        finish_reason: "eos", "stop" (a stop string or a stopping criterion), "length", or "context"
            when the model's context is full.
        text: the new tokens as text without special tokens; None if the decoder has no tokenizer.
        logprobs: float32 [new], the log-probability of each new token.
        top_logprobs: float32 [new, k], those of the most probable tokens.
        top_tokens: int64 [new, k], these tokens.
        logits: [new, vocabulary], the target's at each new token.
        scores: float32 [new, vocabulary], the same after processors, temperature and filters.

    The last five are None unless they were asked for, and without new tokens.
    """

    sequences: Tensor
    new_tokens: int
    steps: int
    seconds: float
    finish_reason: str
    text: str | None = None
    logprobs: Tensor | None = None
    top_logprobs: Tensor | None = None
    top_tokens: Tensor | None = None
    logits: Tensor | None = None
    scores: Tensor | None = None

    @property
    def tokens_per_step(self) -> float:
        """New tokens for each pass of the target."""
        return self.new_tokens / max(self.steps, 1)


class TokenRecord:
    """Collects what was asked for of the target's logits at each new token."""

    def __init__(
        self, sampling: Sampling, logprobs: int | None, output_logits: bool, output_scores: bool
    ) -> None:
        self.sampling, self.num_top = sampling, whole_number("logprobs", logprobs)
        names = [
            *(("logprobs", "top_logprobs", "top_tokens") if logprobs is not None else ()),
            *(("logits",) if output_logits else ()),
            *(("scores",) if output_scores else ()),
        ]
        self.recorded: dict[str, list[Tensor]] = {name: [] for name in names}

    def add(self, tokens: Sequence[int], logits: Tensor | None, processed: Tensor | None) -> None:
        """Take a step's tokens, and the target's logits at them, before and after processors."""
        if logits is None or processed is None or not tokens:
            return
        logits, scores = logits[: len(tokens)], self.sampling.scores(processed[: len(tokens)])
        values = {"logits": logits, "scores": scores}
        if self.num_top is not None:
            all_logprobs = scores.log_softmax(-1)
            index = torch.tensor(tokens, device=scores.device)[:, None]
            values["logprobs"] = all_logprobs.gather(1, index)[:, 0]
            top = all_logprobs.topk(min(self.num_top, all_logprobs.shape[1]))
            values["top_logprobs"], values["top_tokens"] = top
        for name, by_step in self.recorded.items():
            by_step.append(values[name])

    def tensors(self) -> dict[str, Tensor]:
        """What was asked for, by its name in `Generation`."""
        return {name: torch.cat(by_step) for name, by_step in self.recorded.items() if by_step}


class Ending:
    """Finds where a generation ends.

    It ends at an end-of-sequence token, at a stop string of `text`, at a stopping criterion, or
    when no more tokens may be added, or fit. `known` is the text of its new tokens.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        max_tokens_in_context: int,
        end_tokens: set[int],
        criteria: Sequence[Criterion],
        text: NewText | None,
    ) -> None:
        self.sequence, self.end_tokens, self.criteria = list(prompt), end_tokens, criteria
        self.text, self.known = text, ""
        self.max_length = len(prompt) + min(max_tokens, max_tokens_in_context)
        self.reason_at_max_length = "length" if max_tokens <= max_tokens_in_context else "context"

    def cut(self, tokens: Sequence[int]) -> tuple[list[int], str]:
        """A step's tokens up to where the generation ends, and why it ends; "" if it goes on."""
        for count, token in enumerate(tokens, 1):
            self.sequence.append(token)
            self.known += self.text.add([token]) if self.text else ""
            if reason := self._reason(token):
                return list(tokens[:count]), reason
        return list(tokens), ""

    def _reason(self, token: int) -> str:
        """Why the generation ends after `token`, the last of the sequence; "" if it goes on."""
        if token in self.end_tokens:
            return "eos"
        if self.text and self.text.before.found:
            return "stop"
        if self.criteria:
            ids = torch.tensor([self.sequence])
            for criterion in self.criteria:
                if bool(torch.as_tensor(criterion(ids, None)).all()):
                    return "stop"
        return self.reason_at_max_length if len(self.sequence) >= self.max_length else ""


class Session:
    """A decoder and the token ids of one text, which the decoder's caches hold between turns.

    Whatever else the decoder generates meanwhile is right, too; the text is then read again.
    """

    def __init__(self, decoder: Any, prompt: Prompt) -> None:
        self.decoder, self.ids = decoder, list[int]()
        if len(prompt):
            self.say(prompt)

    def say(self, prompt: Prompt) -> None:
        """Add text or token ids; they are read when the text is continued."""
        tokenizer = self.decoder.tokenizer
        if isinstance(prompt, str) and tokenizer is not None and self.ids:
            # many tokenizers put a space where a text begins, which this prompt does not
            space = " " * "".join(tokenizer.tokenize("a")).startswith("▁")
            prompt = tokenizer(prompt.removeprefix(space), add_special_tokens=False)
        self.ids += read_prompt(prompt, tokenizer, None, self.decoder.step.target).tolist()

    def generate(self, max_new_tokens: int | None = 128, **settings: Any) -> Generation:
        """Continue the text; `settings` are those of `SequoiaDecoder.generate`."""
        result = self.decoder.generate(self.ids, max_new_tokens, reuse_prefix=True, **settings)
        self.ids = result.sequences[0].tolist()
        return result

    def rewind(self, num_tokens: int) -> None:
        """Take the last tokens back."""
        count = whole_number("num_tokens", num_tokens, 0, len(self.ids)) or 0
        del self.ids[len(self.ids) - count :]


def whole_number(
    name: str, value: SupportsIndex | None, least: int = 0, most: int | None = None
) -> int | None:
    """An argument as a whole number from `least` to `most`, or None; else ArgumentError."""
    if value is None:
        return None
    with suppress(TypeError):
        number = operator.index(value)
        if not isinstance(value, bool) and least <= number <= (number if most is None else most):
            return number
    limits = f"of {least} or more" if most is None else f"from {least} to {most}"
    raise ArgumentError(f"{name}: found {value!r:.60}, expected a whole number {limits}, or None")


def end_tokens(
    eos: int | Iterable[int] | None,
    model: LoadedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> set[int]:
    """The tokens that end a text: `eos`, else those of the generation config or tokenizer."""
    if eos is None:
        eos = getattr(model.generation_config, "eos_token_id", None)
    if eos is None:
        eos = getattr(tokenizer, "eos_token_id", None)
    if isinstance(eos, (Tensor, np.ndarray)):
        eos = eos.tolist()
    tokens = eos if isinstance(eos, Iterable) else () if eos is None else (eos,)
    return set(map(operator.index, tokens))


def read_prompt(
    prompt: Prompt,
    tokenizer: PreTrainedTokenizerBase | None,
    attention_mask: Tensor | None,
    model: LoadedModel,
) -> Tensor:
    """The prompt as int64 [n]; refuses what is no `Prompt`, and masks that hide tokens."""
    token_ids: object = prompt
    masks: list[object] = [attention_mask]
    other_inputs: Mapping[str, object] = {}
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ArgumentError(
                "prompt: text, but the decoder has no tokenizer; give it one "
                "(SequoiaDecoder(..., tokenizer=...)) or token ids"
            )
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise ArgumentError(
                f"prompt: character {error.start + 1} is half of one (a lone surrogate); expected "
                "text"
            ) from error
        token_ids = text_ids(tokenizer, prompt)
    elif isinstance(prompt, Mapping):
        other_inputs, token_ids = prompt, prompt.get("input_ids")
        masks.append(prompt.get("attention_mask"))
    try:
        ids = torch.as_tensor(token_ids)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ArgumentError(
            f"input_ids: found {token_ids!r:.60}, expected text or token ids, [tokens] or [1, "
            "tokens]; generate_each takes several prompts"
        ) from error
    if ids.numel() == 0:
        raise SequoiaPlanError("prompt: empty, expected at least one token")
    is_whole = not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
    if ids.ndim not in (1, 2) or ids.numel() != ids.shape[-1] or not is_whole:
        raise ArgumentError(
            f"input_ids: found {str(ids.dtype).removeprefix('torch.')} {list(ids.shape)}, expected "
            "whole numbers, [tokens] or [1, tokens]; generate_each takes several prompts"
        )
    for entries in (_entries(mask) for mask in masks if mask is not None):
        if len(entries) != ids.numel() or not all(entries):
            raise SequoiaPlanError(
                f"attention_mask: found {len(entries)} entries, {entries.count(0)} of them hide "
                f"tokens, expected {ids.numel()}, one for each token of the prompt, and none "
                "hidden; leave padding out"
            )
    refuse_other_inputs(other_inputs, ids.numel(), model)
    return ids.reshape(-1).long()


def stop_list(
    stop_strings: str | Sequence[str] | None, tokenizer: PreTrainedTokenizerBase | None
) -> list[str]:
    """Stop strings as a list; ArgumentError if one is no text or there is no tokenizer."""
    strings = [stop_strings] if isinstance(stop_strings, str) else list(stop_strings or ())
    if not all(isinstance(text, str) and text for text in strings):
        raise ArgumentError(
            f"stop_strings: found {stop_strings!r:.60}, expected text, or a list of texts"
        )
    if strings and tokenizer is None:
        raise ArgumentError(
            "stop_strings: the decoder has no tokenizer to read text with; give it one: "
            "SequoiaDecoder(..., tokenizer=...)"
        )
    return strings


def check_loaded(target: object, draft: object, tree: object) -> None:
    """Refuse names and files in place of loaded models and of a loaded tree."""
    for name, model in (("target", target), ("draft", draft)):
        if isinstance(model, str) or (model is None and name == "target"):
            raise ArgumentError(
                f"{name}: found {model!r:.60}, expected a loaded model; load_pair loads both by "
                "name, and transformers' from_pretrained loads one"
            )
    if not isinstance(tree, TokenTree):
        raise ArgumentError(
            f"tree: found {tree!r:.60}, expected a TokenTree; load_tree(file) reads one"
        )


def refuse_other_inputs(inputs: Mapping[str, object], num_tokens: int, model: LoadedModel) -> None:
    """Raise ArgumentError for a model's input that decoding with a tree would ignore."""
    module = unwrapped(model.module)
    accepted = inspect.signature(module.forward).parameters if module is not None else {}
    for name, value in inputs.items():
        if value is None or name in WITHOUT_EFFECT:
            continue
        if name == "position_ids":  # multimodal models have a row for each dimension
            rows = torch.atleast_2d(torch.as_tensor(value)).flatten(0, -2)
            is_ignored = any(row != list(range(num_tokens)) for row in rows.tolist())
        elif name in ("cache", "past_key_values"):
            is_ignored = not hasattr(value, "get_seq_length") or bool(value.get_seq_length())
        elif name.endswith("token_type_ids"):  # multimodal models mark text by 0
            is_multimodal = module is not None and text_config(module) is not module.config
            is_ignored = any(_entries(value)) or (name in accepted and not is_multimodal)
        else:
            is_input = name in accepted or name.endswith("_embeds")
            is_ignored = is_input and isinstance(value, Tensor)
        if is_ignored:  # it may be `position_ids`, which transformers makes of an attention mask
            raise ArgumentError(
                f"{name}: found {value!s:.60}, expected none, because decoding with a token tree "
                "reads token ids alone and would ignore it; leave it out, and attention masks of "
                "another length than the prompt's"
            )


def _entries(numbers: object) -> list[float]:
    """The entries of a tensor, an array or nested lists, one after the other."""
    return torch.as_tensor(numbers).flatten().tolist()
