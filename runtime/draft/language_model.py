"""A draft that is a language model with a KV cache of its own: one pass for each level that has children."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from sequoia_plan.artifacts import LANGUAGE_MODEL, TokenTree
from sequoia_plan.runtime.cache import TreeCache
from sequoia_plan.runtime.draft.drafter import Pass
from sequoia_plan.runtime.models.forward import Reading, TreeModel, additive
from sequoia_plan.runtime.models.probe import probe
from sequoia_plan.runtime.sampling import Sampling
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

        def tensor(values: Any) -> Tensor:
            return torch.as_tensor(np.asarray(values, np.int64), device=structure.nodes.device)

        def expansion(level: int) -> Pass:
            parents, first, end = tree.expanded(level), int(tree.level_offsets[level + 1]), int(tree.level_offsets[level + 2])
            nodes, children = tensor(parents), int(tree.child_count[parents].max())
            mask = structure.mask[nodes]
            return Pass(
                reads=nodes if level else tensor([-1, 0]),
                offsets=structure.offsets[nodes] if level else tensor([-1, 0]),
                mask=mask if level else torch.cat([before, mask]),
                expands=len(parents),
                children=children,
                drawn=tensor(np.searchsorted(parents, tree.parents[first:end]) * children + tree.ranks[first:end] - 1),
                nodes=structure.nodes[first:end],
            )

        return tuple(expansion(level) for level in range(tree.depth - 1))

    def read(self, step: Pass, sequence: Sequence, columns: Tensor) -> Reading:
        slots = (sequence.length + step.reads).clamp_(min=0)  # a prompt of one token has none before its root
        positions = (sequence.length + step.offsets).clamp_(min=0)
        return self.model(sequence.draft, sequence.tokens[slots], positions, slots, step.mask.index_select(1, columns), last=step.expands)

    def read_text(self, cache: TreeCache, tokens: Tensor, slots: Tensor, mask: Tensor) -> Reading:
        return self.model(cache, tokens, slots, slots, mask)

    def draw_children(self, step: Pass, logits: Tensor, sequence: Sequence, sampling: Sampling, bits: Tensor) -> tuple[Tensor, Tensor]:
        law, picks = sampling.children(logits, step.children, bits)
        children = picks.flatten()[step.drawn]
        sequence.tokens.index_copy_(0, sequence.length + step.nodes, children if self.covered is None else self.covered[children])
        return law, picks

    def keep(self, cache: TreeCache, slots: Tensor, start: Tensor) -> None:
        cache.keep(slots, start)
