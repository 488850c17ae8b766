"""Target-written training text for a draft: `python -m sequoia_plan.profiler.distill text`.

The draft must imitate the target on the target's own text, so the target writes it. Half of the questions are the
target's own too (it continues an open user turn, as in Magpie, arXiv 2406.08464); half are templates filled with words
from the tokenizer's vocabulary, so nothing is needed but the model. For every answer token the target's `TOP` most
probable tokens are kept: one pass gives both text and labels. The hidden states that a feature draft reads are kept too,
if they are asked for.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from sequoia_plan.runtime.models.attention import attending, shares_heads

TOP = 64
CONTEXT = 256
TEMPERATURES = (0.0, 0.6, 1.0)
LARGEST = 60_000.0
"""A hidden state beyond this is cut off there: float16 ends at 65,504."""
HIDDEN = "hidden-[0-9][0-9][0-9][0-9].npy"

TEMPLATES = (
    "Write a short story about {a} and {b}.",
    "Explain {a} to a ten year old child.",
    "What is the difference between {a} and {b}?",
    "Give me five tips about {a}.",
    "Write a poem about {a}.",
    "Summarize the history of {a} in one paragraph.",
    "Write a Python function called {a}_{b} and explain how it works.",
    "Write an email to my manager about {a}.",
    "How do I use {a} at home?",
    "Why is {a} important for {b}?",
    "List the advantages and disadvantages of {a}.",
    "Translate into French: the {a} is near the {b}.",
    "If one {a} costs 7 dollars and a {b} costs 5 dollars, what do 3 of each cost?",
    "Rewrite this sentence to make it more formal: we need the {a} before {b}.",
    "Write a dialogue between a teacher and a student about {a}.",
    "Create a recipe that uses {a} and {b}.",
    "Describe a day in the life of a {a}.",
    "What should a beginner know about {a}?",
    "Write a product description for a new {a} made for {b}.",
    "What are the main causes of {a}?",
    "Plan a weekend in a city known for {a} and {b}.",
    "Write a speech about {a}, {b} and the future.",
    "Write a SQL query that finds every {a} with a {b}.",
    "Summarize the following text: The {a} was changed last year because of {b}. Many people liked it, some did not.",
    "Write a JavaScript class that represents a {a}.",
    "Who invented the {a}, and when?",
    "Is {a} good or bad? Discuss both sides.",
    "Make a list of questions to ask about {a} in an interview.",
    "Write a letter from a {a} to a {b}.",
    "Solve step by step: a train with {a} leaves at 3 pm and travels 120 miles at 40 miles per hour.",
    "I want to learn about {a}. Where do I start?",
    "My neighbour always talks about {a}, and I prefer {b}. What can I say to him?",
    "How does {a} work, and what does it have to do with {b}?",
    "Explain {a} with an example from everyday life.",
    "What happens when {a} meets {b}?",
    "Which mistakes do people make with {a}?",
    "Write a Python class for a {a} that has a method {b}, with tests.",
    "Write a function in C that counts every {a} in an array of strings.",
    "Fix this code: for {a} in {b} print({a}",
    "Write an HTML page with a table of {a} and {b}.",
    "What does this command do: grep -r {a} {b} | sort | uniq -c",
    "Give me a one-sentence summary: The committee met on Monday to discuss the {a}. After two hours it decided that {b} should come first.",
    "Shorten this text: In spite of the fact that the {a} had been repaired several times, it was still not as good as the {b}.",
    "Translate into Spanish: I would like to buy a {a} and a {b}, please.",
    "Translate into German: Where is the {a}? My {b} is lost.",
    "Correct the grammar: she have two {a} but no {b} yet",
    "A shop sells 12 {a} for 30 dollars. How much do 7 of them cost? Show each step.",
    "There are 4 red {a}, 5 green ones and 6 blue ones in a bag. What is the probability of drawing a green one?",
    "Solve for x: 5x - 8 = 27, and explain it to somebody who knows only {a}.",
    "What is 15 percent of 240 {a}?",
    "Write the first chapter of a novel about {a} in a small town.",
    "Tell me a joke about {a} and {b}.",
    "Write a fairy tale in which a {a} saves a {b}.",
    "Write song lyrics about {a}.",
    "Write a short review of a {a} that disappointed you.",
    "Write a cover letter for a job that involves {a} and {b}.",
    "Draft a polite complaint about {a} to a company.",
    "Write a social media post that announces {a}.",
    "Name ten words that have to do with {a}, as a numbered list.",
    "Compare {a}, {b} and sleep in a table.",
    "Act as an expert on {a} and answer: is {b} worth it?",
    "What were the most important events in the history of {a}? Give dates.",
)


@dataclass
class Turn:
    """What one row still has to do: tokens it must take, then how it samples until it ends."""

    forced: list[int]
    temperature: float
    limit: int
    is_answer: bool


@dataclass
class Conversation:
    """What was written: tokens, which of them are the answer, the laws of those, and hidden states until they are saved."""

    tokens: list[int]
    answer: list[bool]
    laws: list[tuple[np.ndarray, np.ndarray]]
    hidden: np.ndarray | None


class _RowsLayer(CacheLayerMixin):
    """Keys and values [rows, heads, CONTEXT, dim]; each row writes at its own position."""

    def __init__(self, rows: RowsCache) -> None:
        super().__init__()
        self.rows = rows

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        shape = (self.rows.index.numel(), key_states.shape[1], CONTEXT, key_states.shape[3])
        self.keys, self.values = torch.zeros(shape), torch.zeros(shape)
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys[self.rows.index, :, self.rows.position] = key_states[:, :, 0]
        self.values[self.rows.index, :, self.rows.position] = value_states[:, :, 0]
        return self.keys[:, :, : self.rows.extent], self.values[:, :, : self.rows.extent]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.rows.extent, 0

    def get_seq_length(self) -> int:
        return self.rows.extent

    def get_max_length(self) -> int:
        return CONTEXT


class RowsCache(Cache):
    """The KV cache of many rows, each at its own position."""

    def __init__(self, layers: int, rows: int) -> None:
        self.index = torch.arange(rows)
        self.position = torch.zeros(rows, dtype=torch.long)
        self.extent = 0
        super().__init__(layers=[_RowsLayer(self) for _ in range(layers)])

    def share_prefix(self, length: int) -> None:
        """Row 0's first `length` positions become every row's."""
        for layer in self.layers:
            layer.keys[1:, :, :length] = layer.keys[:1, :, :length]
            layer.values[1:, :, :length] = layer.values[:1, :, :length]


def vocabulary_words(tokenizer: Any) -> list[str]:
    """Lower-case English-looking words that are one token with a leading space."""
    words = (tokenizer.decode([i]) for i in range(len(tokenizer)))
    return sorted({w[1:] for w in words if w[:1] == " " and len(w) > 4 and w[1:].isascii() and w[1:].islower() and w[1:].isalpha()})


def turn_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The chat template around a question: what opens the user's turn, and what closes it and opens the answer."""
    template = tokenizer.apply_chat_template([{"role": "user", "content": "@"}], add_generation_prompt=True, tokenize=False)
    opening, closing = template.split("@")
    return tokenizer.encode(opening, add_special_tokens=False), tokenizer.encode(closing, add_special_tokens=False)


def conversations(tokenizer: Any, answer: list[int], rng: random.Random) -> Iterator[list[Turn]]:
    """Endless questions: the turns of each, after what opens the user's turn. `answer` closes it."""
    words = vocabulary_words(tokenizer)
    while True:
        temperature = rng.choice(TEMPERATURES)
        if rng.random() < 0.5:
            yield [Turn([], 1.0, 40, False), Turn(list(answer), temperature, CONTEXT, True)]
        else:
            question = rng.choice(TEMPLATES).format(a=rng.choice(words), b=rng.choice(words))
            yield [Turn(tokenizer.encode(question, add_special_tokens=False) + answer, temperature, CONTEXT, True)]


@torch.inference_mode()
def write_text(model: Any, tokenizer: Any, tokens: int, seed: int, out: Path, rows: int = 224, taps: Sequence[int] = ()) -> None:
    """Write at least `tokens` answer tokens to `out`: tokens.npy, answer.npy, top_ids.npy, top_logp.npy, text.json.

    tokens uint16 [N] and answer bool [N] (is this token the target's answer?) are whole conversations one after
    the other, ends in text.json; top_ids uint16 [A, TOP] and top_logp float16 [A, TOP] (natural log of the target's
    probability at temperature 1) have one row for each answer token, the law it was drawn from.

    With `taps`, numbers of hidden states as in runtime/models/taps.py and below the last layer's, there are also files
    hidden-0000.npy, hidden-0001.npy, ... which together are float16 [N, taps * hidden size]: those states at every token,
    side by side; the last token of a conversation is not read, and has zeros.
    """
    rng = random.Random(seed)
    torch.manual_seed(seed)
    prefix, answer = turn_tokens(tokenizer)
    questions = conversations(tokenizer, answer, rng)
    eos = tokenizer.eos_token_id
    cache = RowsCache(model.config.num_hidden_layers, rows)
    lowest = torch.finfo(torch.float32).min
    columns, shares = torch.arange(CONTEXT), shares_heads(model, model.config)

    def forward(current: list[int]) -> tuple[torch.Tensor, np.ndarray]:
        cache.extent = min(CONTEXT, (int(cache.position.max()) // 32 + 1) * 32)
        mask = torch.where(columns[: cache.extent] <= cache.position[:, None], 0.0, lowest)[:, None, None]
        inputs = {"attention_mask": mask, "position_ids": cache.position[:, None], "past_key_values": cache}
        with attending(model.device, model.config if shares else None):
            read = model(torch.tensor(current)[:, None], **inputs, output_hidden_states=bool(taps))
        states = torch.cat([read.hidden_states[tap][:, 0] for tap in taps], -1) if taps else torch.zeros(rows, 0)
        return read.logits[:, 0], states.clamp(-LARGEST, LARGEST).numpy().astype(np.float16)

    opening = []
    for at, token in enumerate(prefix[:-1]):
        cache.position.fill_(at)
        opening.append(forward([token] * rows)[1][0])
    cache.share_prefix(len(prefix) - 1)

    turns: list[list[Turn]] = [next(questions) for _ in range(rows)]
    written: list[list[int]] = [[] for _ in range(rows)]
    answered: list[list[bool]] = [[] for _ in range(rows)]
    laws: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in range(rows)]
    states: list[list[np.ndarray]] = [list(opening) for _ in range(rows)]
    current = [prefix[-1]] * rows
    cache.position.fill_(len(prefix) - 1)
    done: list[Conversation] = []
    count, started, reported = 0, time.perf_counter(), 0.0
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob(HIDDEN):
        old.unlink()
    while count < tokens:
        logits, hidden = forward(current)
        logp = logits.log_softmax(-1)
        top_logp, top_ids = logp.topk(TOP)
        temperature = torch.tensor([t[0].temperature for t in turns])[:, None]
        noise = -torch.empty_like(top_logp).exponential_().log()
        pick = (top_logp + temperature * noise).argmax(-1, keepdim=True)
        sampled = top_ids.gather(1, pick)[:, 0].tolist()
        ids, lp = top_ids.numpy().astype(np.uint16), top_logp.numpy().astype(np.float16)
        for row in range(rows):
            states[row].append(hidden[row])
            turn = turns[row][0]
            if turn.forced:
                current[row], is_answer = turn.forced.pop(0), False
            else:
                current[row], is_answer = sampled[row], turn.is_answer
                turn.limit -= 1
                if not is_answer and (current[row] == eos or turn.limit == 0):
                    turns[row].pop(0)
                    current[row] = turns[row][0].forced.pop(0)
            if is_answer:
                laws[row].append((ids[row], lp[row]))
            written[row].append(current[row])
            answered[row].append(is_answer)
            cache.position[row] += 1
            if (is_answer and current[row] == eos) or len(prefix) + len(written[row]) >= CONTEXT:
                states[row].append(np.zeros_like(hidden[row]))
                done.append(Conversation(prefix + written[row], [False] * len(prefix) + answered[row], laws[row], np.array(states[row])))
                count += len(laws[row])
                turns[row], written[row], answered[row], laws[row], states[row] = next(questions), [], [], [], list(opening)
                current[row] = prefix[-1]
                cache.position[row] = len(prefix) - 1
        elapsed = time.perf_counter() - started
        if elapsed - reported > 300 or count >= tokens:
            reported = elapsed
            save(out, done, dict(seed=seed, answer_tokens=count, conversations=len(done), seconds=round(elapsed), taps=list(taps)))
            print(f"{count} answer tokens, {len(done)} conversations, {elapsed:.0f} s, {count / elapsed:.0f} tokens/s", flush=True)


def save(out: Path, done: list[Conversation], facts: dict[str, Any]) -> None:
    """All conversations so far; text.json goes last, so a reader never finds it without its arrays."""
    arrays = dict(
        tokens=np.concatenate([np.array(d.tokens, np.uint16) for d in done]) if done else np.zeros(0, np.uint16),
        answer=np.concatenate([np.array(d.answer) for d in done]) if done else np.zeros(0, bool),
        top_ids=np.array([law[0] for d in done for law in d.laws], np.uint16),
        top_logp=np.array([law[1] for d in done for law in d.laws], np.float16),
    )
    new = [d for d in done if d.hidden is not None]
    if facts["taps"] and new:  # each save adds a file of them, for they are too many to keep in memory
        arrays[f"hidden-{len(list(out.glob(HIDDEN))):04d}"] = np.concatenate([d.hidden for d in new if d.hidden is not None])
    for name, array in arrays.items():
        np.save(out / f"{name}.tmp.npy", array)
        (out / f"{name}.tmp.npy").rename(out / f"{name}.npy")
    for each in new:
        each.hidden = None
    (out / "text.json").write_text(json.dumps({**facts, "ends": np.cumsum([len(d.tokens) for d in done]).tolist()}))
