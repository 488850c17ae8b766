"""Training text that the target writes: `python -m sequoia_plan_drafts.recipe text`."""

from __future__ import annotations

import json
import random
import re
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from sequoia_plan.artifacts import ArgumentError, SequoiaPlanError
from sequoia_plan.runtime.base.cache import cache_argument
from sequoia_plan.runtime.base.masks import additive_mask
from sequoia_plan.runtime.models.attention import attending, shares_heads

TOP = 64
"""How many of the target's most probable tokens are kept for each answer token."""
CONTEXT = 256
"""The most tokens that a conversation may have."""
TEMPERATURES = (0.0, 0.6, 1.0)
"""An answer is sampled at one of these, drawn at random."""
MAX_QUESTION_TOKENS = 40
"""The most tokens of a question that the target writes itself."""
MAX_PASSAGE_TOKENS = 80
"""The most tokens of a passage that is to be copied: the answer must fit in `CONTEXT`, too."""
MIN_PASSAGE_TOKENS = 24
"""Shorter answers are not used as passages."""
MAX_PASSAGES = 1000
"""Of the last answers. Each may be copied several times."""
EXTENT_MULTIPLE = 32
"""The number of positions that a pass attends to is a multiple of this: at least as many as the
longest conversation has."""
MAX_HIDDEN_STATE = 60_000.0
"""Hidden states are clamped to this magnitude: float16 ends at 65,504."""
SECONDS_BETWEEN_SAVES = 300
ID_DTYPE = np.uint32
"""Of stored token ids: uint16 would wrap in vocabularies of more than 65,536 tokens."""
HIDDEN_STATE_FILES = "hidden-[0-9][0-9][0-9][0-9].npy"
QUESTION_MARKER = "QUESTION-5b1f"
"""Stands for a question in a chat template, to find what is before and after it."""
QUESTIONS = Path(__file__).with_name("questions.txt")
"""Templates of questions, one a line; {a} and {b} stand for words, {passage} for an earlier answer
and {misspelled} for one with a few letters taken out."""


@dataclass
class Turn:
    """A part of a conversation that is still to be written."""

    forced: list[int]
    temperature: float
    limit: int
    is_answer: bool


@dataclass
class Conversation:
    """A conversation, while the target writes it and after.

    `top_logp` float16 [TOP].
    """

    turns: list[Turn]
    tokens: list[int]
    is_answer: list[bool]
    hidden_states: list[np.ndarray] | np.ndarray | None
    top_ids: list[np.ndarray] = field(default_factory=list)
    top_logp: list[np.ndarray] = field(default_factory=list)

    def write(
        self, sampled: int, top_ids: np.ndarray, top_logp: np.ndarray, end_token: int
    ) -> None:
        """Append the next token: the one that the turn prescribes, or else the sampled one.

        A question ends at `end_token`, which is replaced by the first token of the next turn.
        `top_ids`, `top_logp` [TOP].
        """
        turn = self.turns[0]
        is_answer = False
        if turn.forced:
            token = turn.forced.pop(0)
        elif turn.is_answer:
            token, is_answer = sampled, True
            self.top_ids.append(top_ids)
            self.top_logp.append(top_logp)
        else:
            turn.limit -= 1
            token = sampled
            if sampled == end_token or turn.limit == 0:
                self.turns.pop(0)
                token = self.turns[0].forced.pop(0)
        self.tokens.append(token)
        self.is_answer.append(is_answer)

    def answer(self) -> list[int]:
        """The tokens of the target's answer so far."""
        return [token for token, kept in zip(self.tokens, self.is_answer, strict=True) if kept]

    def is_finished(self, end_token: int) -> bool:
        """True once the answer ended, or the context is full."""
        answer_ended = self.is_answer[-1] and self.tokens[-1] == end_token
        return answer_ended or len(self.tokens) >= CONTEXT


class RowsCache(Cache):
    """The KV cache of several conversations (rows), each at a position of its own.

    `positions` int64 [rows].
    """

    def __init__(self, layers: int, rows: int) -> None:
        self.rows = torch.arange(rows)
        self.positions = torch.zeros(rows, dtype=torch.long)
        self.extent = 0
        super().__init__(layers=[_RowsLayer(self) for _ in range(layers)])

    def share_prefix(self, length: int) -> None:
        """Copy the first `length` positions of row 0 to all rows."""
        for layer in self.layers:
            layer.keys[1:, :, :length] = layer.keys[:1, :, :length]
            layer.values[1:, :, :length] = layer.values[:1, :, :length]


class _RowsLayer(CacheLayerMixin):
    """Keys and values of one layer, [rows, heads, CONTEXT, head_dim]."""

    def __init__(self, cache: RowsCache) -> None:
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for all rows and positions; the arguments [rows, heads, 1, head_dim] say how."""
        _, heads, _, head_dim = key_states.shape
        shape = (self.cache.rows.numel(), heads, CONTEXT, head_dim)
        self.keys, self.values = key_states.new_zeros(shape), key_states.new_zeros(shape)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write one position of each row, and return keys and values of the first `extent` ones.

        `key_states`, `value_states` [rows, heads, 1, head_dim].
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        rows, positions, extent = self.cache.rows, self.cache.positions, self.cache.extent
        self.keys[rows, :, positions] = key_states[:, :, 0]
        self.values[rows, :, positions] = value_states[:, :, 0]
        return self.keys[:, :, :extent], self.values[:, :, :extent]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The number of positions that the mask covers, and the first of them."""
        return self.cache.extent, 0

    def get_seq_length(self) -> int:
        """The number of positions that the pass attends to."""
        return self.cache.extent

    def get_max_length(self) -> int:
        """The number of positions that fit."""
        return CONTEXT

    get_max_cache_shape = get_max_length  # the name in transformers 5.10


class RowsModel:
    """The target, which reads one token of each row in a pass."""

    def __init__(self, model: Any, rows: int, hidden_state_layers: Sequence[int]) -> None:
        self.model, self.rows = model, rows
        self.hidden_state_layers = hidden_state_layers
        self.cache_argument = cache_argument(model.forward)
        self.cache = RowsCache(model.config.num_hidden_layers, rows)
        self.config_sharing_heads = model.config if shares_heads(model, model.config) else None

    def forward(self, tokens: list[int], positions: list[int]) -> tuple[Tensor, np.ndarray]:
        """Read one token of each row, and write its keys and values to the cache.

        Returns float32 [rows, vocabulary].
        """
        cache = self.cache
        cache.positions = torch.tensor(positions)
        extent = (max(positions) // EXTENT_MULTIPLE + 1) * EXTENT_MULTIPLE
        cache.extent = min(CONTEXT, extent)
        visible = torch.arange(cache.extent) <= cache.positions[:, None]
        with attending(self.model.device, self.config_sharing_heads):
            output = self.model(
                torch.tensor(tokens)[:, None],
                attention_mask=additive_mask(visible, self.model.dtype)[:, None, None],
                position_ids=cache.positions[:, None],
                output_hidden_states=bool(self.hidden_state_layers),
                **{self.cache_argument: cache},
            )
        hidden_states = torch.zeros(self.rows, 0)
        if self.hidden_state_layers:
            layers = [output.hidden_states[layer][:, 0] for layer in self.hidden_state_layers]
            hidden_states = torch.cat(layers, -1)
        clamped = hidden_states.float().clamp(-MAX_HIDDEN_STATE, MAX_HIDDEN_STATE)
        return output.logits[:, 0].float(), clamped.numpy().astype(np.float16)

    def read_prefix(self, tokens: list[int]) -> list[np.ndarray]:
        """Start all rows with the same tokens: read them one by one."""
        hidden_states = []
        for position, token in enumerate(tokens):
            _, row_states = self.forward([token] * self.rows, [position] * self.rows)
            hidden_states.append(row_states[0])  # all rows have the same
        self.cache.share_prefix(len(tokens))
        return hidden_states


def vocabulary_words(tokenizer: Any) -> list[str]:
    """Lower-case English-looking words that are one token with a leading space."""
    decoded = (tokenizer.decode([token]) for token in range(len(tokenizer)))
    return sorted(
        {
            text[1:]
            for text in decoded
            if text[:1] == " "
            and len(text) > 4
            and text[1:].isascii()
            and text[1:].islower()
            and text[1:].isalpha()
        }
    )


def turn_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The chat template's tokens around a question."""
    if not getattr(tokenizer, "chat_template", None):
        raise SequoiaPlanError(
            "target: its tokenizer has no chat template, in which training text is written; name a "
            "model that is made for conversations"
        )
    template = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION_MARKER}], add_generation_prompt=True, tokenize=False
    )
    opening, _, closing = template.partition(QUESTION_MARKER)
    opening_tokens, closing_tokens = (
        tokenizer.encode(part, add_special_tokens=False) for part in (opening, closing)
    )
    count = len(opening_tokens) + len(closing_tokens)
    if not opening_tokens or not closing_tokens or count > CONTEXT // 2:
        raise SequoiaPlanError(
            f"target: its chat template puts {len(opening_tokens)} tokens before a question and "
            f"{len(closing_tokens)} after it; expected some of each, and at most {CONTEXT // 2}"
        )
    return opening_tokens, closing_tokens


def random_turns(
    tokenizer: Any, answer_opening: list[int], rng: random.Random, passages: Sequence[list[int]]
) -> Iterator[list[Turn]]:
    """Yield the turns of one random conversation after the other, without end.

    They begin after the chat template's opening of the user's turn. A fifth of the questions ask
    for copies, once there are passages. Half of the others are sampled from the target, half are
    filled in templates; all are sampled if the vocabulary has no words for the templates.
    """
    words = vocabulary_words(tokenizer)
    lines = QUESTIONS.read_text(encoding="utf-8").splitlines()
    copying = [line for line in lines if "{passage}" in line or "{misspelled}" in line]
    templates = [line for line in lines if line not in copying]
    while True:
        temperature = rng.choice(TEMPERATURES)
        sampled_turns, question = [], ""
        if passages and rng.random() < 0.2:
            passage = passage_text(tokenizer, rng.choice(passages))
            question = rng.choice(copying).replace("\\n", "\n").replace("{passage}", passage)
            question = question.replace("{misspelled}", misspelled(passage, rng))
        elif rng.random() < 0.5 or not words:
            sampled_turns = [Turn([], 1.0, MAX_QUESTION_TOKENS, is_answer=False)]
        else:
            question = rng.choice(templates).format(a=rng.choice(words), b=rng.choice(words))
        forced_tokens = tokenizer.encode(question, add_special_tokens=False) + answer_opening
        yield [*sampled_turns, Turn(forced_tokens, temperature, CONTEXT, is_answer=True)]


def passage_text(tokenizer: Any, answer: Sequence[int]) -> str:
    """The begin of an answer: up to its last whole sentence or line within the first tokens.

    If no sentence and no line ends there, the begin is cut off after `MAX_PASSAGE_TOKENS`.
    """
    text: str = tokenizer.decode(answer[:MAX_PASSAGE_TOKENS], skip_special_tokens=True)
    ends = [match.end() for match in re.finditer(r"[.!?](?=\s|$)|\n", text)]
    return text[: ends[-1]].strip() if ends else text.strip()


def misspelled(text: str, rng: random.Random) -> str:
    """The text with one inner letter taken out of about every eighth word of five letters."""

    def take_out_a_letter(match: re.Match[str]) -> str:
        word = match.group()
        if rng.random() > 1 / 8:
            return word
        place = rng.randrange(1, len(word) - 1)
        return word[:place] + word[place + 1 :]

    return re.sub(r"[a-z]{5,}", take_out_a_letter, text)


@torch.inference_mode()
def write_text(
    model: Any,
    tokenizer: Any,
    tokens: int,
    seed: int,
    out: Path,
    rows: int = 224,
    hidden_state_layers: Sequence[int] = (),
) -> None:
    """Let the target write at least `tokens` answer tokens, and save them in the folder `out`."""
    num_layers, vocabulary = model.config.num_hidden_layers, model.config.vocab_size
    if wrong := [layer for layer in hidden_state_layers if not 0 <= layer < num_layers]:
        raise ArgumentError(
            f"--hidden-states {wrong[0]}: the target has 0 (the embedding) to {num_layers - 1}"
        )
    if vocabulary < TOP:
        raise SequoiaPlanError(f"target: {vocabulary} tokens, expected at least {TOP}")
    check_empty(out)
    rng = random.Random(seed)
    torch.manual_seed(seed)
    opening, answer_opening = turn_tokens(tokenizer)
    passages: deque[list[int]] = deque(maxlen=MAX_PASSAGES)
    turns = random_turns(tokenizer, answer_opening, rng, passages)
    end_token = tokenizer.eos_token_id
    target = RowsModel(model, rows, hidden_state_layers)
    opening_states = target.read_prefix(opening[:-1])  # a row's first pass reads the last token

    def new_conversation() -> Conversation:
        """A conversation that has the template's opening only."""
        is_answer = [False] * len(opening)
        return Conversation(next(turns), list(opening), is_answer, list(opening_states))

    out.mkdir(parents=True, exist_ok=True)
    active = [new_conversation() for _ in range(rows)]
    finished: list[Conversation] = []
    num_answer_tokens, started, last_save = 0, time.perf_counter(), 0.0
    while num_answer_tokens < tokens:
        finished_rows = write_tokens(target, active, end_token)
        for row in finished_rows:
            finished.append(active[row])
            answer = active[row].answer()
            num_answer_tokens += len(answer)
            if len(answer) >= MIN_PASSAGE_TOKENS:
                passages.append(answer)
            active[row] = new_conversation()
        elapsed = time.perf_counter() - started
        if elapsed - last_save > SECONDS_BETWEEN_SAVES or num_answer_tokens >= tokens:
            last_save = elapsed
            metadata = dict(
                seed=seed,
                answer_tokens=num_answer_tokens,
                conversations=len(finished),
                seconds=round(elapsed),
                taps=list(hidden_state_layers),
            )
            save(out, finished, metadata)
            print(
                f"{num_answer_tokens} answer tokens, {len(finished)} conversations, "
                f"{elapsed:.0f} s, {num_answer_tokens / elapsed:.0f} tokens/s",
                flush=True,
            )


def check_empty(out: Path) -> None:
    """Refuse a folder that holds something: earlier text would be replaced."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ArgumentError(f"-o {out}: exists already; name a new folder, or remove it")


def write_tokens(
    target: RowsModel, conversations: Sequence[Conversation], end_token: int
) -> list[int]:
    """Let the target read the last token of each conversation, and write the next one."""
    last_tokens = [conversation.tokens[-1] for conversation in conversations]
    positions = [len(conversation.tokens) - 1 for conversation in conversations]
    logits, hidden_states = target.forward(last_tokens, positions)
    temperatures = [conversation.turns[0].temperature for conversation in conversations]
    top_logp, top_ids = logits.log_softmax(-1).topk(TOP)
    sampled = sample(top_logp, top_ids, torch.tensor(temperatures)[:, None])
    ids, logp = top_ids.numpy().astype(ID_DTYPE), top_logp.numpy().astype(np.float16)
    finished_rows = []
    for row, conversation in enumerate(conversations):
        assert isinstance(conversation.hidden_states, list)
        conversation.hidden_states.append(hidden_states[row])
        conversation.write(sampled[row], ids[row], logp[row], end_token)
        if conversation.is_finished(end_token):
            # the target does not read the last token
            conversation.hidden_states.append(np.zeros_like(hidden_states[row]))
            conversation.hidden_states = np.array(conversation.hidden_states)
            finished_rows.append(row)
    return finished_rows


def sample(logp: Tensor, ids: Tensor, temperatures: Tensor) -> list[int]:
    """Draw one of `ids` in each row, by the Gumbel-max trick.

    `logp` float [rows, TOP]; `ids` int64 [rows, TOP]; `temperatures` float [rows, 1].
    """
    noise = -torch.empty_like(logp).exponential_().log()
    choice = (logp + temperatures * noise).argmax(-1, keepdim=True)
    drawn: list[int] = ids.gather(1, choice)[:, 0].tolist()
    return drawn


def save(out: Path, conversations: list[Conversation], metadata: dict[str, Any]) -> None:
    """Write all conversations so far to the folder `out`; `write_text` describes its files.

    text.json is written last, so readers never find it without arrays. Hidden states are too many
    to stay in memory: each save writes those of new conversations to a further file, and then
    removes them from `conversations`.
    """
    token_arrays = [np.array(c.tokens, ID_DTYPE) for c in conversations]
    answer_arrays = [np.array(c.is_answer) for c in conversations]
    arrays = dict(
        tokens=np.concatenate(token_arrays) if conversations else np.zeros(0, ID_DTYPE),
        answer=np.concatenate(answer_arrays) if conversations else np.zeros(0, bool),
        top_ids=np.array([ids for c in conversations for ids in c.top_ids], ID_DTYPE),
        top_logp=np.array([logp for c in conversations for logp in c.top_logp], np.float16),
    )
    new_states = [c.hidden_states for c in conversations if c.hidden_states is not None]
    if metadata["taps"] and new_states:
        file_number = len(list(out.glob(HIDDEN_STATE_FILES)))
        arrays[f"hidden-{file_number:04d}"] = np.concatenate(new_states)
    for name, array in arrays.items():
        unfinished = out / f"{name}.tmp.npy"
        np.save(unfinished, array)
        unfinished.rename(out / f"{name}.npy")
    for conversation in conversations:
        conversation.hidden_states = None
    ends = np.cumsum([len(c.tokens) for c in conversations]).tolist()
    (out / "text.json").write_text(json.dumps({**metadata, "ends": ends}))
