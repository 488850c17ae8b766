"""Training text that the target writes: `python -m sequoia_plan_drafts.recipe text`."""

import itertools
import json
import random
import re
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from sequoia_plan.artifacts import ArgumentError, SequoiaPlanError
from sequoia_plan.artifacts.files import check_new_folder, write_atomically
from sequoia_plan.models.base.masks import additive_mask
from sequoia_plan.models.loaded_model import LoadedModel
from sequoia_plan.profiler.prompts import encode
from sequoia_plan.runtime.generation import end_tokens
from sequoia_plan.runtime.text import text_ids
from sequoia_plan.server.prompts import infill, markers_of
from sequoia_plan_drafts.recipe.questions import Questions, around_a_hole, passage_of

TOP = 64
"""How many of the target's most probable tokens are kept for each answer token."""
TEMPERATURES = (0.0, 0.6, 1.0)
"""Of the answers, in turn."""
MAX_QUESTION_TOKENS = 40
"""The most tokens of a question that the target writes itself."""
MIN_PASSAGE_TOKENS = 24
"""Shorter answers are not used as passages."""
MAX_PASSAGES = 1000
"""Of the last answers. Each may be copied several times."""
MAX_CODE = 500
"""Characters of code that is a passage as a whole."""
MAX_HIDDEN_STATE = 60_000.0
"""Hidden states are clamped to this magnitude: float16 ends at 65,504."""
FILL_SHARE = 0.1
"""Of a coder's conversations: they fill in what is missing in the code of an answer."""
CODE = re.compile(r"```\w+\n(.*?\n.*?\n.*?)```", re.DOTALL)
"""Code of three lines and more in an answer."""
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
    rows: int = 32
    context: int = 256
    hidden_states: tuple[int, ...] = ()
    questions: str = "chat"
    seed: int = 0

    @property
    def metadata(self) -> dict[str, Any]:
        """What a file of text says of how it was written."""
        return {"seed": self.seed, "hidden_states": list(self.hidden_states)}


@dataclass
class Lane:
    """A conversation that is being written, in `context` slots of the cache from `first_slot` on.

    `num_read` of its `tokens` are in the cache. With no temperature it is a question's begin, which
    the target completes; `rows` has what a pass said of each token: (top_ids, top_logp, states).
    """

    first_slot: int
    tokens: list[int]
    temperature: float | None
    num_prompt: int = 0
    num_read: int = 0
    rows: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)


class Writer:
    """Lets the target write `rows` conversations side by side, each in slots of its own.

    What one of them says does not depend on the others.
    """

    def __init__(self, target: LoadedModel, recipe: TextRecipe) -> None:
        self.target, self.recipe = target, recipe
        self.rng = random.Random(recipe.seed)
        torch.manual_seed(recipe.seed)
        self.tokenizer = target.tokenizer
        self.opening = _opening(self.tokenizer)
        self.questions = Questions(recipe.questions, self.tokenizer, self.rng)
        self.temperatures = itertools.cycle(TEMPERATURES)
        self.passages: deque[str] = deque(maxlen=MAX_PASSAGES)
        self.codes: deque[str] = deque(maxlen=MAX_PASSAGES)
        self.markers = markers_of(self.tokenizer)  # around what is filled in
        self.cache = target.new_cache(recipe.rows * recipe.context)
        target.backend.prepare(recipe.hidden_states)
        self.ends = end_tokens(None, target, self.tokenizer)
        least = 2 * len(encode(self.tokenizer, ""))
        if not least <= recipe.context <= target.context:
            raise ArgumentError(
                f"--context {recipe.context}: expected {least}, twice the tokens of the target's "
                f"chat template, to {target.context}"
            )

    def conversations(self) -> Iterator[Conversation]:
        """Yield conversations as they end."""
        context = self.recipe.context
        lanes = [self.next_lane(Lane(row * context, [], None)) for row in range(self.recipe.rows)]
        while True:
            self.read(lanes)
            for number, lane in enumerate(lanes):
                if lane.num_read < len(lane.tokens):
                    continue  # its prompt is long
                last_ids, last_logp, _ = lane.rows[-1]
                is_question = lane.temperature is None
                temperature = 1.0 if is_question else lane.temperature
                choice = 0
                if temperature:
                    probs = (last_logp / temperature).softmax(-1)
                    choice = int(torch.multinomial(probs, 1))
                token = int(last_ids[choice])
                lane.tokens.append(token)
                count = len(lane.tokens) - lane.num_prompt
                limit = context - lane.num_prompt
                if is_question:
                    limit = min(limit, MAX_QUESTION_TOKENS)
                if token not in self.ends and count < limit:
                    continue
                if is_question:
                    question = self.tokenizer.decode(
                        lane.tokens[len(self.opening) :], skip_special_tokens=True
                    )
                    lanes[number] = self.answer(lane, encode(self.tokenizer, question))
                    continue
                yield self.ended(lane)
                lanes[number] = self.next_lane(lane)

    def next_lane(self, last: Lane) -> Lane:
        """A new conversation: its question, or the begin of one that the target is to write."""
        if self.codes and self.rng.random() < FILL_SHARE:
            before, after = around_a_hole(self.rng.choice(self.codes), self.rng)
            files = self.rng.choice((None, ()))  # an editor's two ways to ask
            text = infill(self.tokenizer, before, after, files)
            return self.answer(last, text_ids(self.tokenizer, text))
        question = self.questions.next(self.passages)
        if question is not None:
            return self.answer(last, encode(self.tokenizer, question))
        begin = self.tokenizer.encode(self.questions.begin(), add_special_tokens=False)
        return self.lane(last, self.opening + begin, None)

    def answer(self, last: Lane, prompt: list[int]) -> Lane:
        """A conversation whose question is there."""
        return self.lane(last, prompt, next(self.temperatures))

    def lane(self, last: Lane, prompt: list[int], temperature: float | None) -> Lane:
        """A conversation in the slots of the last one; what begins both is not read again."""
        lane = Lane(last.first_slot, prompt[: self.recipe.context // 2], temperature)
        # the last token is read, because its logits choose the next
        pairs = zip(lane.tokens[:-1], last.tokens[: last.num_read], strict=False)
        lane.num_read = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        lane.rows = last.rows[: lane.num_read]
        return lane

    def read(self, lanes: Sequence[Lane]) -> None:
        """One pass over what the lanes have not read, at most twice as many tokens as lanes."""
        spare, tokens, positions, starts = len(lanes), [], [], []
        parts: list[tuple[Lane, int]] = []
        for lane in lanes:
            unread = lane.tokens[lane.num_read :][: 1 + spare]
            count = len(unread)
            spare -= count - 1
            parts.append((lane, count))
            tokens += unread
            positions += range(lane.num_read, lane.num_read + count)
            starts += [lane.first_slot] * count
        position, start = torch.tensor(positions), torch.tensor(starts)
        slot = start + position
        columns = torch.arange(self.cache.capacity)
        visible = (columns <= slot[:, None]) & (columns >= start[:, None])
        output = self.target(
            self.cache, torch.tensor(tokens), position, slot,
            additive_mask(visible, self.target.dtype), hidden_states=self.recipe.hidden_states,
        )  # fmt: skip
        logits = output.logits.float()
        top_logits, top_ids = logits.topk(TOP)
        top_logp = top_logits - logits.logsumexp(-1, keepdim=True)
        states = output.hidden_states
        if states is None:
            states = torch.zeros(len(tokens), 0)
        states = states.float().clamp(-MAX_HIDDEN_STATE, MAX_HIDDEN_STATE).half()
        place = 0
        for lane, count in parts:
            part = slice(place, place + count)
            lane.rows += zip(top_ids[part], top_logp[part], states[part], strict=True)
            lane.num_read += count
            place += count

    def ended(self, lane: Lane) -> Conversation:
        """The conversation that a lane wrote; its last token was not read."""
        states = torch.stack([row[2] for row in lane.rows])
        answer = lane.rows[lane.num_prompt - 1 :]
        if len(answer) >= MIN_PASSAGE_TOKENS:
            self.passages.append(passage_of(self.tokenizer, lane.tokens[lane.num_prompt :]))
        if self.markers:
            codes = CODE.findall(self.tokenizer.decode(lane.tokens[lane.num_prompt :]))
            self.codes += codes
            self.passages += [f"```\n{code}```" for code in codes if len(code) < MAX_CODE]
        return Conversation(
            torch.tensor(lane.tokens).int(),
            torch.stack([row[0] for row in answer]).int(),
            torch.stack([row[1] for row in answer]).half(),
            torch.cat([states, torch.zeros_like(states[:1])]),  # nothing is drafted after the last
        )


def write_text(target: LoadedModel, recipe: TextRecipe, output: Path) -> None:
    """Let the target write at least `tokens` answer tokens, and save them in the folder `output`.

    Each file has so many conversations as are written side by side: the text so far can always be
    used, and the same call goes on from it, with other questions.
    """
    num_layers = target.config.num_hidden_layers
    if wrong := [layer for layer in recipe.hidden_states if not 0 <= layer <= num_layers]:
        raise ArgumentError(
            f"--hidden-states {wrong[0]}: the target has 0 (the embedding) to {num_layers}"
        )
    conversations: list[Conversation] = []
    num_files, written = count_written(output, recipe.metadata)
    # another seed than that of the files before asks other questions
    writer = Writer(target, replace(recipe, seed=recipe.seed + 1_000_003 * num_files))
    output.mkdir(parents=True, exist_ok=True)
    num_answer_tokens, started = written, time.perf_counter()
    for conversation in writer.conversations():
        conversations.append(conversation)
        num_answer_tokens += len(conversation.top_ids)
        is_enough = num_answer_tokens >= recipe.tokens
        if len(conversations) < recipe.rows and not is_enough:
            continue
        write_conversations(
            output / f"text-{num_files:05d}.safetensors", conversations, recipe.metadata
        )
        num_files, conversations = num_files + 1, []
        elapsed = time.perf_counter() - started
        print(
            f"{num_answer_tokens} answer tokens, {num_files} files of {recipe.rows} conversations, "
            f"{elapsed:.0f} s, {(num_answer_tokens - written) / elapsed:.0f} tokens/s",
            flush=True,
        )
        if is_enough:
            return


def count_written(folder: Path, metadata: dict[str, Any]) -> tuple[int, int]:
    """How many files of text a folder has, and answer tokens; refuses those of another call."""
    files, answer_tokens = sorted(folder.glob("text-*.safetensors")), 0
    if not files:
        check_new_folder(folder)
    for file in files:
        with opened(file) as (other, tensors):
            answer_lengths = tensors.get_tensor("answer_lengths")
        if other != metadata:
            raise SequoiaPlanError(
                f"{folder}: holds text with {other}, expected {metadata} to go on from; name a new "
                "folder"
            )
        answer_tokens += int(answer_lengths.sum())
    return len(files), answer_tokens


@contextmanager
def opened(file: Path) -> Iterator[tuple[dict[str, Any], Any]]:
    """The metadata of a file of text, and its tensors as `safe_open` gives them.

    Raises SequoiaPlanError if it is none.
    """
    try:
        with safe_open(file, "pt") as tensors:
            yield json.loads(tensors.metadata()["text"]), tensors
    except (SafetensorError, OSError, RuntimeError, TypeError, KeyError) as error:
        raise SequoiaPlanError(f"{file}: no training text ({error}); write it again") from error


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
