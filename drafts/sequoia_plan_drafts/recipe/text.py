"""Training text that the target writes: `python -m sequoia_plan_drafts.recipe text`."""

import itertools
import json
import random
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig

from sequoia_plan.artifacts import ArgumentError, SequoiaPlanError
from sequoia_plan.artifacts.files import write_atomically
from sequoia_plan.profiler.prompts import encode
from sequoia_plan_drafts.recipe.questions import make_questions, passage_of

TOP = 64
"""How many of the target's most probable tokens are kept for each answer token."""
CONTEXT = 256
"""The most tokens that a conversation may have."""
TEMPERATURES = (0.0, 0.6, 1.0)
"""Of the answers, batch by batch in turn."""
MAX_QUESTION_TOKENS = 40
"""The most tokens of a question that the target writes itself."""
MIN_PASSAGE_TOKENS = 24
"""Shorter answers are not used as passages."""
MAX_PASSAGES = 1000
"""Of the last answers. Each may be copied several times."""
MAX_HIDDEN_STATE = 60_000.0
"""Hidden states are clamped to this magnitude: float16 ends at 65,504."""
QUESTION_MARKER = "QUESTION-5b1f"
"""Stands for a question in a chat template, to find what is before it."""


class Conversation(NamedTuple):
    """One conversation of n tokens, the last a of which are the target's answer.

    `tokens` int32 [n]; `top_ids` int32 [a, TOP] and `top_logp` float16 [a, TOP]: the target's most
    probable tokens at each answer token and their log-probabilities; `hidden_states` float16
    [n, layers * width].
    """

    tokens: Tensor
    top_ids: Tensor
    top_logp: Tensor
    hidden_states: Tensor


@dataclass(frozen=True)
class TextRecipe:
    """How training text is written."""

    tokens: int = 1_000_000
    rows: int = 224
    hidden_states: tuple[int, ...] = ()
    seed: int = 0


@torch.inference_mode()
def write_text(model: Any, tokenizer: Any, recipe: TextRecipe, output: Path) -> None:
    """Let the target write at least `tokens` answer tokens, and save them in the folder `output`.

    Each batch of `rows` conversations is one file, so that the text so far can always be used.
    """
    hidden_states = recipe.hidden_states
    num_layers = model.config.num_hidden_layers
    if wrong := [layer for layer in hidden_states if not 0 <= layer <= num_layers]:
        raise ArgumentError(
            f"--hidden-states {wrong[0]}: the target has 0 (the embedding) to {num_layers}"
        )
    output.mkdir(parents=True, exist_ok=True)
    rng = random.Random(recipe.seed)
    torch.manual_seed(recipe.seed)
    opening = _opening(tokenizer)
    passages: deque[str] = deque(maxlen=MAX_PASSAGES)
    num_answer_tokens, started = 0, time.perf_counter()
    for batch, temperature in enumerate(itertools.cycle(TEMPERATURES)):
        questions = make_questions(tokenizer, recipe.rows, passages, rng)
        own_questions = iter(
            generate(model, tokenizer, [opening] * questions.count(None), MAX_QUESTION_TOKENS, 1.0)
        )
        prompts = []
        for question in questions:
            if question is None:
                question = tokenizer.decode(next(own_questions), skip_special_tokens=True)
            prompts.append(encode(tokenizer, question)[: CONTEXT - 1])
        answers = generate(model, tokenizer, prompts, CONTEXT, temperature)
        conversations = list(label(model, prompts, answers, hidden_states))
        num_answer_tokens += sum(len(answer) for answer in answers)
        passages += [passage_of(tokenizer, a) for a in answers if len(a) >= MIN_PASSAGE_TOKENS]
        metadata = {"seed": recipe.seed, "hidden_states": list(hidden_states)}
        write_conversations(output / f"text-{batch:05d}.safetensors", conversations, metadata)
        elapsed = time.perf_counter() - started
        print(
            f"{num_answer_tokens} answer tokens, {recipe.rows * (batch + 1)} conversations, "
            f"{elapsed:.0f} s, {num_answer_tokens / elapsed:.0f} tokens/s",
            flush=True,
        )
        if num_answer_tokens >= recipe.tokens:
            return


def generate(
    model: Any, tokenizer: Any, prompts: list[list[int]], max_new_tokens: int, temperature: float
) -> list[list[int]]:
    """The tokens that the target writes after each prompt, its end token included.

    It samples from its `TOP` most probable tokens; prompt and new tokens are at most `CONTEXT`.
    """
    if not prompts:
        return []
    end = tokenizer.eos_token_id
    inputs = pad_sequence([torch.tensor(p) for p in prompts], True, padding_side="left")
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    width = inputs.shape[1]
    sampling = {"temperature": temperature, "top_k": TOP, "top_p": 1.0} if temperature else {}
    written = model.generate(
        inputs,
        attention_mask=(torch.arange(width) >= width - lengths[:, None]).long(),
        generation_config=GenerationConfig(
            do_sample=bool(temperature),
            max_new_tokens=min(max_new_tokens, CONTEXT - int(lengths.min())),
            eos_token_id=end,
            pad_token_id=end,
            **sampling,
        ),
    )[:, width:].tolist()
    ends = [row.index(end) + 1 if end in row else len(row) for row in written]
    return [
        row[: min(row_end, CONTEXT - len(prompt))]
        for row, row_end, prompt in zip(written, ends, prompts, strict=True)
    ]


def label(
    model: Any, prompts: list[list[int]], answers: list[list[int]], layers: Sequence[int]
) -> Iterator[Conversation]:
    """Yield the conversations with the target's probabilities, from one pass over each."""
    for prompt, answer in zip(prompts, answers, strict=True):
        text = torch.tensor(prompt + answer)
        output = model(text[None], output_hidden_states=bool(layers), use_cache=False)
        answer_logits = output.logits[0, len(prompt) - 1 : -1].float()
        top_logp, top_ids = answer_logits.log_softmax(-1).topk(TOP)
        states = [output.hidden_states[layer][0] for layer in layers]
        hidden_states = torch.cat(states, -1) if states else torch.zeros(len(text), 0)
        clamped = hidden_states.float().clamp(-MAX_HIDDEN_STATE, MAX_HIDDEN_STATE)
        yield Conversation(text.int(), top_ids.int(), top_logp.half(), clamped.half())


def write_conversations(
    path: Path, conversations: Sequence[Conversation], metadata: dict[str, Any]
) -> None:
    """Write conversations to one file, each field's rows one after the other."""
    fields = zip(Conversation._fields, zip(*conversations, strict=True), strict=True)
    tensors = {name: torch.cat(tensors) for name, tensors in fields}
    tensors["lengths"] = torch.tensor([len(c.tokens) for c in conversations])
    tensors["answer_lengths"] = torch.tensor([len(c.top_ids) for c in conversations])
    write_atomically(path, save(tensors, {"text": json.dumps(metadata)}))


def _opening(tokenizer: Any) -> list[int]:
    """The chat template's tokens before a question."""
    messages, opening = [{"role": "user", "content": QUESTION_MARKER}], ""
    if getattr(tokenizer, "chat_template", None):
        template = tokenizer.apply_chat_template(messages, tokenize=False)
        opening = template.partition(QUESTION_MARKER)[0]
    if not opening:
        raise SequoiaPlanError(
            "target: its tokenizer has no chat template with a begin of a user's turn, in which "
            "training text is written; name a model that is made for conversations"
        )
    return list(tokenizer.encode(opening, add_special_tokens=False))
