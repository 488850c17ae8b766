"""The training text as batches, and the draft vocabulary that it suggests."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan_drafts.recipe.text import Conversation, opened

LENGTH_NOISE = 16.0
"""Standard deviation of the noise by which conversations are sorted besides their length."""
RMS_CONVERSATIONS = 100
"""The magnitudes of hidden states are measured on so many conversations."""


@dataclass(frozen=True)
class DraftVocabulary:
    """The part of the target's vocabulary that a draft can propose.

    `d2t` int64 [draft vocabulary], ascending; `target_to_draft` int64 [target vocabulary], -1 for
    tokens that the draft lacks; `token_probs` float [target vocabulary]: the target's mean
    probability of each token over the text.
    """

    d2t: Tensor
    target_to_draft: Tensor
    token_probs: Tensor

    @property
    def probability(self) -> float:
        """The target's mean probability of the tokens that the draft has."""
        return float(self.token_probs[self.d2t].sum())


class TextBatch(NamedTuple):
    """b conversations, padded to n tokens, with a answer tokens.

    `tokens` int64 [b, n]; `hidden_states` float32 [b, n, layers * width]; `rows` int64 [a]: the
    token before each answer token, counted over all b * n; `top_ids` int64 [a, TOP]; `top_logp`
    float32 [a, TOP].
    """

    tokens: Tensor
    hidden_states: Tensor
    rows: Tensor
    top_ids: Tensor
    top_logp: Tensor


class TrainingText:
    """Conversations that `text.write_text` wrote, from one or more folders, read when used."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.conversations: list[Conversation] = []
        self.metadata: list[dict[str, Any]] = []
        for folder in folders:
            files = sorted(folder.glob("text-*.safetensors"))
            if not files:
                raise SequoiaPlanError(
                    f"{folder}: holds no training text; write some with: python -m "
                    "sequoia_plan_drafts.recipe text"
                )
            for file in files:
                metadata, conversations = read_conversations(file)
                self.conversations += conversations
                if metadata not in self.metadata:
                    self.metadata.append(metadata)

    def select_hidden_states(self, expected: tuple[int, ...]) -> None:
        """Keep these hidden states of the target; refuse text without one of them."""
        written = self.metadata[0]["hidden_states"]
        for metadata in self.metadata:
            if metadata["hidden_states"] != written or {*expected} - {*written}:
                numbers = " ".join(map(str, expected))
                raise SequoiaPlanError(
                    f"--text: holds the hidden states {metadata['hidden_states']}, expected "
                    f"{numbers} for this draft; write it with --hidden-states {numbers}"
                )
            metadata["hidden_states"] = list(expected)
        if tuple(written) == expected:
            return
        columns = [written.index(layer) for layer in expected]
        for index, conversation in enumerate(self.conversations):
            states = conversation.hidden_states.unflatten(1, (len(written), -1))[:, columns]
            self.conversations[index] = conversation._replace(hidden_states=states.flatten(1))

    def draft_vocabulary(
        self, vocabulary: int, size: int, d2t: Tensor | None = None
    ) -> DraftVocabulary:
        """The tokens `d2t`, or else the `size` tokens with the most target probability."""
        mass = torch.zeros(vocabulary, dtype=torch.float64)
        for conversation in self.conversations:
            highest = max(int(conversation.tokens.max()), int(conversation.top_ids.max()))
            if highest >= vocabulary:
                raise SequoiaPlanError(
                    f"--text: holds the token {highest}, the target has 0 to {vocabulary - 1}; it "
                    "was written by another target"
                )
            probs = conversation.top_logp.double().exp()
            mass.index_add_(0, conversation.top_ids.flatten(), probs.flatten())
        if d2t is None:
            d2t = mass.argsort(descending=True, stable=True)[:size].sort().values
        target_to_draft = torch.full((vocabulary,), -1)
        target_to_draft[d2t] = torch.arange(d2t.numel())
        return DraftVocabulary(d2t, target_to_draft, (mass / mass.sum()).float())

    @cached_property
    def hidden_state_scale(self) -> Tensor:
        """float [layers * width]: gives every dimension of the hidden states magnitude 1.

        A few dimensions are a hundred times as large as the others. The first token of a
        conversation is left out, because its hidden states are unlike all others.
        """
        states = [c.hidden_states[1:].float() for c in self.conversations[:RMS_CONVERSATIONS]]
        return 1 / (torch.cat(states).square().mean(0).sqrt() + 1e-6)

    def split(self, held_out: int) -> tuple[list[int], list[int]]:
        """Indices of the conversations to train on, and of the last `held_out`."""
        indices = list(range(len(self.conversations)))
        if not 0 < held_out < len(indices):
            raise SequoiaPlanError(
                f"--held-out {held_out}: the text has {len(indices)} conversations; write more "
                "text, or hold out fewer, at least one"
            )
        return indices[:-held_out], indices[-held_out:]

    def shuffled(self, indices: Sequence[int], batch: int, rng: np.random.Generator) -> list[int]:
        """Conversations in random order, those of a batch of similar length: little padding."""
        lengths = np.array([len(self.conversations[index].tokens) for index in indices])
        order = np.argsort(lengths + rng.normal(scale=LENGTH_NOISE, size=lengths.shape))
        batches = [order[i : i + batch] for i in range(0, len(order), batch)]
        rng.shuffle(batches)
        return [indices[number] for number in np.concatenate(batches)]

    def batches(self, indices: Sequence[int], size: int) -> Iterator[TextBatch]:
        """Padded batches of some conversations, in order."""
        for start in range(0, len(indices), size):
            batch = [self.conversations[index] for index in indices[start : start + size]]
            tokens = pad_sequence([c.tokens.long() for c in batch], True)
            hidden_states = pad_sequence([c.hidden_states.float() for c in batch], True)
            rows = [
                torch.arange(-len(c.top_ids), 0) + len(c.tokens) - 1 + i * tokens.shape[1]
                for i, c in enumerate(batch)
            ]
            yield TextBatch(
                tokens,
                hidden_states,
                torch.cat(rows),
                torch.cat([c.top_ids for c in batch]).long(),
                torch.cat([c.top_logp.float() for c in batch]),
            )


def read_conversations(file: Path) -> tuple[dict[str, Any], list[Conversation]]:
    """The metadata and the conversations of a file of `text.write_conversations`."""
    with opened(file) as (metadata, tensors):
        lengths, answer_lengths = (
            tensors.get_tensor(name).tolist() for name in ("lengths", "answer_lengths")
        )
        parts = [
            tensors.get_tensor(name).split(answer_lengths if "top" in name else lengths)
            for name in Conversation._fields
        ]
    return metadata, list(map(Conversation._make, zip(*parts, strict=True)))
