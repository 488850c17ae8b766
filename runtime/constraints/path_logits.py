"""Logits processors on a token tree: a node's logits depend on the tokens on its path."""

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from sequoia_plan.artifacts import SequoiaPlanError

Path = tuple[int, ...]
"""The tokens from below the root to a node; those of the root and before it are committed."""


class PathProcessor(Protocol):
    """Changes logits by the tokens before them, and by nothing else."""

    def begin(self, prompt: Sequence[int], end_tokens: Collection[int]) -> None:
        """A text begins after `prompt`."""

    def __call__(self, paths: Sequence[Path], logits: Tensor) -> Tensor:
        """The logits after each path, float32 [paths, vocabulary]; `logits` may be changed."""

    def commit(self, tokens: Sequence[int]) -> None:
        """The text goes on with `tokens`."""


class PathLogits:
    """Processors of one decoder's text: `both` change the target's and the draft's logits.

    Verification is exact for any probabilities of the draft; what `both` forbid is not drawn.
    """

    def __init__(
        self, both: Sequence[PathProcessor], target_only: Sequence[PathProcessor], vocabulary: int
    ) -> None:
        self.both, self.all, self.vocabulary = both, (*both, *target_only), vocabulary
        self.without_token: list[int] = []

    def begin(self, prompt: Sequence[int], end_tokens: Collection[int]) -> None:
        """A text begins after `prompt`."""
        for processor in self.all:
            processor.begin(prompt, end_tokens)

    def commit(self, tokens: Sequence[int]) -> None:
        """The text goes on with `tokens`."""
        for processor in self.all:
            processor.commit(tokens)

    def of_target(self, paths: Sequence[Path], logits: Tensor) -> Tensor:
        """float32 [paths, vocabulary]: the target's logits after all nodes of a tree, processed."""
        processed = logits.float().clone()
        for processor in self.all:
            processed = processor(paths, processed)
        self.without_token = _restore_rows_without_token(processed, logits)
        return processed

    def of_draft(self, paths: Sequence[Path], logits: Tensor, d2t: Tensor | None) -> Tensor:
        """float32 [paths, draft vocabulary]: the draft's logits, processed as the target's."""
        width = logits.shape[1]
        tokens = torch.arange(width, device=logits.device) if d2t is None else d2t
        scattered = logits.new_full((len(paths), max(width, self.vocabulary)), -torch.inf)
        scattered = scattered.float().index_copy(1, tokens, logits.float())
        for processor in self.both:
            scattered = processor(paths, scattered)
        processed = scattered.index_select(1, tokens)
        # where no token of the draft is left, any is as good: the target accepts none of them
        _restore_rows_without_token(processed, logits)
        return processed

    def check(self, nodes: Iterable[int], root_slot: int) -> None:
        """Raise SequoiaPlanError if processors left no token after an accepted node."""
        for level, node in enumerate(nodes):
            if node in self.without_token:
                names = ", ".join(type(processor).__name__ for processor in self.all)
                raise SequoiaPlanError(
                    f"logits: {names} left no token after token {root_slot + 1 + level} of the "
                    "text, expected at least one"
                )


def _restore_rows_without_token(processed: Tensor, logits: Tensor) -> list[int]:
    """Give rows of `processed` that are all -inf their `logits` back; returns which rows."""
    rows = processed.amax(-1).isneginf().nonzero().flatten()
    processed[rows] = logits[rows].float()
    return rows.tolist()


def paths_of(tokens: Sequence[int], parents: Sequence[int], nodes: Iterable[int]) -> list[Path]:
    """The paths of `nodes`, from the tokens and the parents of all nodes of a tree."""

    def path(node: int) -> Path:
        return (*path(parents[node]), tokens[node]) if node else ()

    return [path(node) for node in nodes]
