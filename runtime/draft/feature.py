"""The drafter of a feature draft: a pass for each level that has children; the first reads the last committed tokens again.

The draft's row for a token is in the token's own slot. It pairs the token with the hidden states of the token before, so token 0 has no
row, and slot 0 is hidden. A step reads the rows of accepted tokens with features that the draft made up; the next step's first pass reads
them again with the target's, as many rows as a step may accept, whether it did or not. So nothing of the draft's cache is moved, and the
target's features are kept for the last tokens only.
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sequoia_plan.artifacts import FEATURE_DRAFT, TokenTree
from sequoia_plan.runtime.cache import TreeCache
from sequoia_plan.runtime.draft.drafter import Pass, pass_over_all, passes_by_level, read_steps
from sequoia_plan.runtime.draft.feature_model import FeatureModel
from sequoia_plan.runtime.models.forward import Reading, additive, many_shapes
from sequoia_plan.runtime.sequence import Sequence
from sequoia_plan.runtime.structure import Structure

KEPT = 2 * (FEATURE_DRAFT.deepest or 0)
"""Tokens whose features are kept: those that a first pass reads, and as many that a step writes without knowing how many it accepts."""


class FeatureCache(TreeCache):
    """Keys and values, and `recent` [KEPT, hidden size]: the target's fused features of the token in slot s, in row s mod KEPT."""

    recent: Tensor


class FeatureDrafter:
    """A feature draft as drafter (see `Drafter`).

    Args:
        model: the draft.
        vocabulary, covered, backend: as for `LanguageModelDrafter`.
    """

    drafting = FEATURE_DRAFT

    def __init__(self, model: FeatureModel, vocabulary: int, covered: Tensor | None = None, backend: Any = None) -> None:
        self.model, self.vocabulary, self.covered, self.taps = model, vocabulary, covered, model.taps
        self.compiled = None if backend is None else torch.compile(model, dynamic=False, backend=backend)

    def passes(self, tree: TokenTree, structure: Structure) -> tuple[Pass, ...]:
        """A pass for each level that has children, over the nodes that have them; the first over as many committed tokens as the tree has
        levels, the root last."""
        again = torch.arange(1 - tree.depth, 1, device=structure.nodes.device)
        passes = passes_by_level(tree, structure)
        return tuple(replace(each, reads=again, offsets=again) if level == 0 else each for level, each in enumerate(passes))

    def trial(self, structure: Structure) -> tuple[Pass, Reading | None]:
        features = torch.zeros(1, self.model.config.hidden_size, dtype=self.model.dtype, device=structure.nodes.device)
        return pass_over_all(structure), Reading(features[:, :0], features)

    def new_cache(self, capacity: int) -> FeatureCache:
        window = self.model.window
        cache = FeatureCache(self.model.new_layout(), capacity, self.model.device, counts_positions=window is not None and window < capacity)
        cache.recent = torch.zeros(KEPT, self.model.config.hidden_size, dtype=self.model.dtype, device=self.model.device)
        return cache

    def prefill(self, cache: TreeCache, tokens: Tensor) -> None:
        """There is nothing to read before the target has."""
        assert isinstance(cache, FeatureCache)
        cache.finite.fill_(True)
        cache.recent.zero_()

    def watch(self, cache: TreeCache, tokens: Tensor, slots: Tensor, mask: Tensor, features: Tensor) -> None:
        assert isinstance(cache, FeatureCache)
        fused = self.model.fuse(features)
        before = torch.cat([cache.recent[(slots[:1] - 1) % KEPT], fused[:-1]])
        hidden = mask.clone()
        hidden[:, 0] = torch.finfo(mask.dtype).min
        self._pass(self.model, cache, tokens, before, slots, hidden, 1)
        self._keep(cache, slots[-KEPT:], fused[-KEPT:])

    def read(self, step: Pass, sequence: Sequence, columns: Tensor, before: Reading | None = None) -> Reading:
        cache, slots = sequence.draft, (sequence.length + step.reads).clamp_(min=0)
        assert isinstance(cache, FeatureCache)
        first = torch.arange(columns.numel(), device=columns.device) == 0
        if before is None:
            features = cache.recent[(slots - 1) % KEPT]
            seen = torch.arange(columns.numel(), device=columns.device) <= slots[:, None]
            mask = additive(seen & ~first, step.mask.dtype)
        else:
            assert before.features is not None and step.parents is not None
            features = before.features[step.parents]
            mask = step.mask.index_select(1, columns.where(~first, step.mask.shape[1] - 1))
        run = self.model if self.compiled is None else self.compiled
        return self._pass(run, cache, sequence.tokens[slots], features, slots, mask, step.expands, sequence.length + step.offsets)

    def read_text(self, sequence: Sequence, here: Tensor, levels: Several[int], features: Tensor | None) -> Tensor:
        """As a step reads it: a chain from each root, with its own outputs below the root."""
        cache = sequence.draft
        assert isinstance(cache, FeatureCache) and features is not None
        fused = self.model.fuse(features)
        chain = TokenTree.chain(max(levels) + 2 if max(levels) >= 0 else 2)

        def watch(start: int, end: int) -> None:
            self._keep(cache, here[start:end], fused[start:end])

        return read_steps(self, chain, Structure.of(chain, here.device, self.model.dtype), sequence, here, levels, watch)

    def keep(self, sequence: Sequence, path: Tensor) -> None:
        assert isinstance(sequence.draft, FeatureCache)
        slots = sequence.length + torch.arange(path.numel(), device=path.device)
        self._keep(sequence.draft, slots, self.model.fuse(sequence.features.index_select(0, path)))

    def _keep(self, cache: FeatureCache, slots: Tensor, fused: Tensor) -> None:
        cache.recent.index_copy_(0, slots % KEPT, fused)

    def _pass(
        self, run: Any, cache: FeatureCache, tokens: Tensor, features: Tensor, slots: Tensor, mask: Tensor, last: int, positions: Tensor | None = None
    ) -> Reading:
        """One pass over rows. A row has the position of the token whose features it takes, as in the engines."""
        positions = ((slots if positions is None else positions) - 1).clamp(min=0)
        masks = self.model.masks(cache, mask, positions, slots)
        with self.model.attending(), many_shapes(run is not self.model):
            logits, outputs = run(tokens[None], features[None], positions[None], masks, cache.at(slots, mask.shape[1]), last)
        logits = logits[0, :, : self.vocabulary]
        cache.finite.logical_and_(logits.amax(-1).isfinite().all())
        return Reading(logits, outputs[0, -last:])
