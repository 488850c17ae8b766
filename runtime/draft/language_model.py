"""A draft that is a language model with a KV cache of its own: one pass for each level that has children."""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sequoia_plan.artifacts import LANGUAGE_MODEL, TokenTree
from sequoia_plan.runtime.cache import TreeCache
from sequoia_plan.runtime.draft.drafter import Pass, pass_over_all, passes_by_level
from sequoia_plan.runtime.models.forward import Reading, TreeModel, additive
from sequoia_plan.runtime.models.probe import probe
from sequoia_plan.runtime.sequence import Sequence
from sequoia_plan.runtime.structure import Structure


class LanguageModelDrafter:
    """A transformers causal LM as drafter (see `Drafter`).

    Args:
        model: a transformers causal LM in eval mode.
        vocabulary: use only so many of its logits.
        covered: int64 [vocabulary], the target's token for each of them; None if they are the same.
        backend: compile its passes by this backend of torch.compile; None leaves them as they are.

    Raises:
        SequoiaPlanError: if the model cannot read a tree.
    """

    drafting = LANGUAGE_MODEL
    taps: tuple[int, ...] = ()

    def __init__(self, model: Any, vocabulary: int, covered: Tensor | None = None, backend: Any = None) -> None:
        self.model = TreeModel(model, probe(model), vocabulary)
        if backend is not None:
            self.model.compile(backend)
        self.vocabulary, self.covered = vocabulary, covered
        self.new_cache, self.prefill = self.model.new_cache, self.model.prefill

    def passes(self, tree: TokenTree, structure: Structure) -> tuple[Pass, ...]:
        """A pass for each level that has children, over the nodes that have them. The first also reads the token before the root
        again: if that was an accepted leaf, the draft has not read it yet."""
        committed = torch.zeros_like(structure.mask[:1], dtype=torch.bool)
        committed[0, 0] = True
        before = additive(committed, structure.mask.dtype)
        passes = passes_by_level(tree, structure)
        again = torch.tensor([-1, 0], device=structure.nodes.device)
        return tuple(replace(each, reads=again, offsets=again, mask=torch.cat([before, each.mask])) if i == 0 else each for i, each in enumerate(passes))

    def trial(self, structure: Structure) -> tuple[Pass, Reading | None]:
        return pass_over_all(structure), None

    def watch(self, cache: TreeCache, tokens: Tensor, slots: Tensor, mask: Tensor, features: Tensor) -> None:
        """It reads no hidden states."""

    def read(self, step: Pass, sequence: Sequence, columns: Tensor, before: Reading | None = None) -> Reading:
        slots = (sequence.length + step.reads).clamp_(min=0)  # a prompt of one token has none before its root
        positions = (sequence.length + step.offsets).clamp_(min=0)
        return self.model(sequence.draft, sequence.tokens[slots], positions, slots, step.mask.index_select(1, columns), last=step.expands)

    def read_text(self, sequence: Sequence, here: Tensor, levels: Several[int], features: Tensor | None) -> Tensor:
        """In one pass: the level makes no difference."""
        mask = additive(torch.arange(int(here[-1]) + 1, device=here.device) <= here[:, None], self.model.model.dtype)
        return self.model(sequence.draft, sequence.tokens[here], here, here, mask).logits

    def keep(self, sequence: Sequence, path: Tensor) -> None:
        sequence.draft.keep(sequence.length + path, sequence.length)
