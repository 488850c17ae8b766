"""What all recipes share: the training text, distances of draft and target, and the optimiser."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from sequoia_plan.artifacts import ArgumentError, SequoiaPlanError
from sequoia_plan_drafts.recipe.text import HIDDEN_STATE_FILES

EVALUATION_INTERVAL = 100
"""Steps between two evaluations on the held-out conversations; each also saves the draft."""
EVALUATION_BATCH = 16
"""Conversations in a batch of an evaluation."""
FINAL_NORM_SCALE = 0.3
"""Factor of the target's final norm in a new draft: with the whole of it, one or two layers are
confident and wrong."""
SORTED_BATCHES = 32
"""Conversations are sorted by length within so many batches."""
RMS_CONVERSATIONS = 100
"""The magnitudes of hidden states are measured on so many conversations."""
Batch = TypeVar("Batch")


@dataclass(frozen=True)
class TrainingSettings:
    """Settings that every recipe has."""

    draft_vocabulary: int = 8192
    steps: int = 2000
    batch: int = 8
    learning_rate: float = 2e-3
    weight_decay: float = 0.05
    held_out: int = 100
    seed: int = 0
    dtype: str = "float32"


@dataclass(frozen=True)
class DraftVocabulary:
    """The part of the target's vocabulary that a draft can propose.

    `d2t` int64 [draft vocabulary]; `target_to_draft` int64 [target vocabulary].
    """

    d2t: Tensor
    target_to_draft: Tensor
    probability: float


class TextConversation(NamedTuple):
    """One conversation of n tokens, a of which are the target's answer.

    `tokens` uint32 [n]; `is_answer` bool [n]; `top_ids` uint32 [a, TOP]; `top_logp` float16 [a,
    TOP].
    """

    tokens: np.ndarray
    is_answer: np.ndarray
    top_ids: np.ndarray
    top_logp: np.ndarray


class TextBatch(NamedTuple):
    """b conversations, padded to n tokens.

    `tokens` int64 [b, n]; `rows` int64 [a]; `top_ids` int64 [a, TOP]; `top_logp` float32 [a, TOP].
    """

    tokens: Tensor
    rows: Tensor
    top_ids: Tensor
    top_logp: Tensor


class TrainingText:
    """Conversations that `text.write_text` wrote, from one or more folders.

    `hidden_states` float16 [n, layers * width].
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self.metadata: list[dict[str, Any]] = []
        self.conversations: list[TextConversation] = []
        self.hidden_states: list[np.ndarray] = []
        for folder in folders:
            self._read(folder)

    def _read(self, folder: Path) -> None:
        """Append the conversations of one folder; `text.write_text` describes its files."""
        names = ("tokens", "answer", "top_ids", "top_logp")
        try:
            metadata = json.loads((folder / "text.json").read_text())
            tokens, is_answer, top_ids, top_logp = (
                np.load(folder / f"{name}.npy") for name in names
            )
            state_files = [
                np.load(file, mmap_mode="r") for file in sorted(folder.glob(HIDDEN_STATE_FILES))
            ]
            ends = [int(end) for end in metadata.pop("ends")]
            if ends != sorted(ends) or ends[-1:] != [len(tokens)] or len(is_answer) != len(tokens):
                raise ValueError("its files do not fit together")
        except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise SequoiaPlanError(
                f"{folder}: no training text ({error}); write some with: python -m "
                "sequoia_plan_drafts.recipe text"
            ) from error
        bounds = list(zip([0, *ends], ends, strict=False))
        # the number of answer tokens before each token: the next row of `top_ids`
        answers_before = np.concatenate([[0], np.cumsum(is_answer)])
        for start, end in bounds:
            answers = slice(answers_before[start], answers_before[end])
            self.conversations.append(
                TextConversation(
                    tokens[start:end], is_answer[start:end], top_ids[answers], top_logp[answers]
                )
            )
        file_start = 0
        for states in state_files:  # each file holds whole conversations
            file_end = file_start + len(states)
            for start, end in bounds:
                if file_start <= start < file_end:
                    self.hidden_states.append(states[start - file_start : end - file_start])
            file_start = file_end
        self.metadata.append(metadata)

    def hidden_state_layers(self, expected: tuple[int, ...] = ()) -> tuple[int, ...]:
        """The numbers of the target's hidden states that the text holds."""
        expected = expected or tuple(self.metadata[0].get("taps", ()))
        if not expected:
            raise SequoiaPlanError(
                "--text: holds no hidden states, and this draft reads some; write it with "
                "--hidden-states"
            )
        for metadata in self.metadata:
            if tuple(metadata.get("taps", ())) != expected:
                numbers = " ".join(map(str, expected))
                raise SequoiaPlanError(
                    f"--text: holds the hidden states {metadata.get('taps', [])}, expected "
                    f"{numbers} for this draft; write it with --hidden-states {numbers}"
                )
        return expected

    def most_probable_tokens(self, count: int, vocabulary: int) -> DraftVocabulary:
        """The tokens with the most target probability over the text, in ascending order."""
        mass = self._probability_mass(vocabulary)
        tokens = np.sort(np.argsort(-mass, kind="stable")[:count])
        return _draft_vocabulary(mass, torch.from_numpy(tokens))

    def draft_vocabulary(self, d2t: Tensor, vocabulary: int) -> DraftVocabulary:
        """The draft vocabulary of tokens that are chosen already.

        `d2t` int64 [draft vocabulary].
        """
        return _draft_vocabulary(self._probability_mass(vocabulary), d2t)

    def _probability_mass(self, vocabulary: int) -> np.ndarray:
        """float64 [vocabulary]: each token's probability, summed over all answer tokens."""
        mass = np.zeros(vocabulary)
        highest = max(
            (
                int(ids.max())
                for c in self.conversations
                for ids in (c.tokens, c.top_ids)
                if ids.size
            ),
            default=0,
        )
        if highest >= vocabulary:
            raise SequoiaPlanError(
                f"--text: holds the token {highest}, the target has 0 to {vocabulary - 1}; it was "
                "written by another target"
            )
        for conversation in self.conversations:
            probs = np.exp(conversation.top_logp.astype(np.float64))
            np.add.at(mass, conversation.top_ids.astype(np.int64), probs)
        return mass

    def token_counts(self, vocabulary: int) -> Tensor:
        """float [vocabulary]: how often the text has each token."""
        tokens = np.concatenate([conversation.tokens for conversation in self.conversations])
        return torch.from_numpy(np.bincount(tokens, minlength=vocabulary)).float()

    def split(self, held_out: int) -> tuple[list[int], list[int]]:
        """Indices of the conversations to train on, and of the last `held_out`."""
        indices = list(range(len(self.conversations)))
        if not 0 < held_out < len(indices):
            raise SequoiaPlanError(
                f"--held-out {held_out}: the text has {len(indices)} conversations; write more "
                "text, or hold out fewer, at least one"
            )
        return indices[:-held_out], indices[-held_out:]

    def batches(self, numbers: Sequence[int], size: int) -> Iterator[TextBatch]:
        """Padded batches of some conversations, in order."""
        for start in range(0, len(numbers), size):
            batch = [self.conversations[index] for index in numbers[start : start + size]]
            length = max(len(conversation.tokens) for conversation in batch)
            tokens = np.zeros((len(batch), length), np.int64)
            rows = []
            for i, conversation in enumerate(batch):
                tokens[i, : len(conversation.tokens)] = conversation.tokens
                # the token before each answer token, in the tokens of the whole batch
                rows.append(np.flatnonzero(conversation.is_answer) - 1 + i * length)
            top_ids = np.concatenate([conversation.top_ids for conversation in batch])
            top_logp = np.concatenate([conversation.top_logp for conversation in batch])
            yield TextBatch(
                torch.from_numpy(tokens),
                torch.from_numpy(np.concatenate(rows)),
                torch.from_numpy(top_ids.astype(np.int64)),
                torch.from_numpy(top_logp.astype(np.float32)),
            )

    def padded_hidden_states(self, numbers: Sequence[int], length: int, scale: Tensor) -> Tensor:
        """The target's hidden states in some conversations, scaled, with zeros as padding.

        `scale` float [layers * width]; returns float32 [conversations, length, layers * width].
        """
        hidden_states = torch.zeros(len(numbers), length, scale.numel())
        for i, conversation_index in enumerate(numbers):
            states = self.hidden_states[conversation_index]
            hidden_states[i, : len(states)] = torch.from_numpy(states.astype(np.float32))
        return hidden_states * scale

    def hidden_state_rms(self) -> Tensor:
        """float [layers * width]: the root mean square of each dimension of the hidden states.

        A few dimensions are a hundred times as large as the others. The first token of a
        conversation is left out, because its hidden states are unlike all others; the last one has
        none.
        """
        inner_states = [states[1:-1] for states in self.hidden_states[:RMS_CONVERSATIONS]]
        sample = np.concatenate(inner_states).astype(np.float32)
        return torch.from_numpy(np.sqrt((sample**2).mean(0)) + 1e-6)


def train(
    parameters: Sequence[nn.Parameter],
    text: TrainingText,
    recipe: TrainingSettings,
    vocabulary: DraftVocabulary,
    make_batches: Callable[[Sequence[int], int], Iterator[Batch]],
    loss_of: Callable[[Batch, int], Tensor],
    agreement_on: Callable[[Sequence[int]], Any],
    save: Callable[[dict[str, Any]], None],
    report: Callable[[str], None],
) -> None:
    """Train for `recipe.steps`; the draft is evaluated and saved on the way, and at the end."""
    started = time.perf_counter()
    training_indices, held_out_indices = text.split(recipe.held_out)
    optimiser = torch.optim.AdamW(
        parameters,
        lr=recipe.learning_rate,
        weight_decay=recipe.weight_decay,
        betas=(0.9, 0.95),
    )
    schedule = _warmed_up_cosine(optimiser, recipe.steps)
    rng = np.random.default_rng(recipe.seed)
    products = partial(torch.autocast, "cpu", torch.bfloat16, recipe.dtype == "bfloat16")
    step, mean_loss = 0, 0.0
    report(
        f"{len(training_indices)} conversations, head of {recipe.draft_vocabulary} covers "
        f"{vocabulary.probability:.3f} of the target's mass, "
        f"{sum(parameter.numel() for parameter in parameters)} parameters"
    )
    while step < recipe.steps:
        shuffled_indices = _shuffled(training_indices, text, recipe.batch, rng)
        for batch in make_batches(shuffled_indices, recipe.batch):
            with products():
                loss = loss_of(batch, step)
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimiser.step()
            schedule.step()
            optimiser.zero_grad(set_to_none=True)
            mean_loss = loss.item() if step == 0 else 0.98 * mean_loss + 0.02 * loss.item()
            step += 1
            if step % EVALUATION_INTERVAL == 0 or step == recipe.steps:
                with products():
                    agreement = agreement_on(held_out_indices)
                elapsed = time.perf_counter() - started
                report(
                    f"step {step}: loss {mean_loss:.3f}, held-out top-1 agreement {agreement}, "
                    f"{elapsed:.0f} s"
                )
                metadata = {
                    "recipe": asdict(recipe),
                    "text": text.metadata,
                    "steps": step,
                    "seconds": round(elapsed),
                    "covered_mass": round(vocabulary.probability, 4),
                    "held_out_top1": agreement,
                }
                save(metadata)
            if step >= recipe.steps:
                break


def divergence_and_rejection(
    logits: Tensor, target_to_draft: Tensor, top_ids: Tensor, top_logp: Tensor
) -> tuple[Tensor, Tensor]:
    """Two distances of draft and target, means over answer tokens.

    The first is KL(target || draft), over those of the target's most probable tokens that the draft
    has. The second is the probability that speculative sampling rejects a token drawn from the
    draft at temperature 1, their total variation distance (arXiv 2211.17192, Corollary 3.6).
    `logits` [a, draft vocabulary]; `target_to_draft` int64 [target vocabulary]; `top_ids` int64 [a,
    TOP]; `top_logp` float [a, TOP].
    """
    draft_ids, logits = target_to_draft[top_ids], logits.to(top_logp.dtype)
    # p: the target's probabilities, q: the draft's
    in_draft, p = draft_ids >= 0, top_logp.exp()
    log_q = logits.gather(1, draft_ids.clamp(min=0)) - logits.logsumexp(-1, keepdim=True)
    divergence = (p * in_draft * (top_logp - log_q)).sum(-1).mean()
    rejection = 1 - torch.minimum(p, log_q.exp() * in_draft).sum(-1).mean()
    return divergence, rejection


def kl_divergence(
    logits: Tensor, target_to_draft: Tensor, top_ids: Tensor, top_logp: Tensor
) -> Tensor:
    """KL(target || draft), the mean over answer tokens: the first of `divergence_and_rejection`."""
    return divergence_and_rejection(logits, target_to_draft, top_ids, top_logp)[0]


def decayed_mean(losses: Tensor, decay: float) -> Tensor:
    """The mean of losses [n], each of which weighs `decay` times as much as the one before it."""
    weights = decay ** torch.arange(losses.numel())
    return (weights * losses).sum() / weights.sum()


def count_agreements(logits: Tensor, target_to_draft: Tensor, top_ids: Tensor) -> int:
    """Number of answer tokens at which draft and target have the same most probable token.

    Their share is the acceptance of rank 1 at temperature 0. `logits` [a, draft vocabulary];
    `target_to_draft` int64 [target vocabulary]; `top_ids` int64 [a, TOP].
    """
    return int((logits.argmax(-1) == target_to_draft[top_ids[:, 0]]).sum())


def initialise_fc_norm_and_head(draft: Any, target: Any, d2t: Tensor) -> None:
    """Start a draft that reads hidden states near to the target, before training.

    `fc`, which projects the target's hidden states (side by side) to the draft's width, passes the
    last one on as it is. The final norm is the target's, times `FINAL_NORM_SCALE`. The head has the
    rows of the target's head for the draft's tokens. `d2t` int64 [draft vocabulary].
    """
    width = draft.config.hidden_size
    with torch.no_grad():
        draft.fc.weight.zero_()[:, -width:] = torch.eye(width)
        draft.norm.weight.copy_(FINAL_NORM_SCALE * target.model.norm.weight)
        head = target.get_output_embeddings().weight
        draft.get_output_embeddings().weight.copy_(head[d2t])


def unscaled_weights(draft: nn.Module, scale: Tensor) -> dict[str, Tensor]:
    """The weights in bfloat16 of a draft that was trained on hidden states times `scale`.

    The factor moves into `fc`, which reads them, so the written draft reads hidden states as they
    are. `scale` float [layers * width].
    """
    weights = draft.state_dict()
    weights["fc.weight"] = weights["fc.weight"] * scale
    return {name: weight.bfloat16() for name, weight in weights.items()}


def check_layers(target: Any, layers: Sequence[int]) -> None:
    """Raise ArgumentError unless the target has all of these layers, numbered from 0."""
    num_layers = target.config.num_hidden_layers
    if wrong := [layer for layer in layers if not 0 <= layer < num_layers]:
        raise ArgumentError(f"--layers {wrong[0]}: the target has the layers 0 to {num_layers - 1}")


def config_like(target: Any, num_layers: int) -> LlamaConfig:
    """The configuration of a draft of layers like the target's, with a head of its own."""
    changes = {
        "num_hidden_layers": num_layers,
        "layer_types": None,
        "tie_word_embeddings": False,
    }
    return LlamaConfig(**target.config.to_dict() | changes)


def _warmed_up_cosine(
    optimiser: torch.optim.Optimizer, steps: int
) -> torch.optim.lr_scheduler.LRScheduler:
    """A learning rate that rises over the first steps, and falls along a cosine to zero.

    It rises over 100 steps, or over a tenth of all `steps` if that is less.
    """
    warm_up = min(100, steps // 10 + 1)

    def factor(step: int) -> float:
        """The learning rate after so many steps, as a share of its peak."""
        rise = min(1.0, (step + 1) / warm_up)
        return rise * 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))

    return torch.optim.lr_scheduler.LambdaLR(optimiser, factor)


def _draft_vocabulary(mass: np.ndarray, d2t: Tensor) -> DraftVocabulary:
    """The draft vocabulary of the tokens `d2t`.

    `mass` float64 [target vocabulary]; `d2t` int64 [draft vocabulary].
    """
    target_to_draft = torch.full(mass.shape, -1)
    target_to_draft[d2t] = torch.arange(d2t.numel())
    probability = float(mass[d2t.numpy()].sum() / mass.sum())
    return DraftVocabulary(d2t, target_to_draft, probability)


def _shuffled(
    conversation_indices: Sequence[int], text: TrainingText, batch: int, rng: np.random.Generator
) -> list[int]:
    """Random order of conversations in which those of a batch are of similar length.

    Batches then need little padding. The order is random, and sorted by length within each
    `SORTED_BATCHES` batches; then the batches are shuffled.
    """

    def length(conversation_index: int) -> int:
        """Number of tokens of a conversation."""
        return len(text.conversations[conversation_index].tokens)

    order = rng.permutation(conversation_indices)
    batches = []
    for start in range(0, len(order), SORTED_BATCHES * batch):
        pool = sorted(order[start : start + SORTED_BATCHES * batch], key=length)
        batches += [pool[i : i + batch] for i in range(0, len(pool), batch)]
    rng.shuffle(batches)
    return [int(conversation_index) for chunk in batches for conversation_index in chunk]
