"""Sequoia decoding: grow a tree, let the target judge it, keep what it accepts."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sequoia_plan.artifacts import SequoiaPlanError, TokenTree
from sequoia_plan.runtime.forward import CachedModel, TreeMask
from sequoia_plan.runtime.grow import Growth, Level, grow
from sequoia_plan.runtime.sampling import Sampling
from sequoia_plan.runtime.verify import Accepted, TreeIndex, greedy, verify

EXTENT_STEP = 64
"""Attention looks at a multiple of this many slots: few shapes, little waste."""


@dataclass(frozen=True)
class Step:
    """One step: the accepted nodes (the root first) and the tokens it added (the last is the bonus token)."""

    path: list[int]
    tokens: list[int]


@dataclass(frozen=True)
class Generation:
    """What `generate` returns.

    Args:
        sequences: int64 [1, prompt + new], as transformers' generate returns.
        new_tokens: tokens added.
        steps: target passes that made them.
        seconds: wall time, the prompt's prefill included.
        finish_reason: "eos", "length", or "context" when the model's context is full.
    """

    sequences: Tensor
    new_tokens: int
    steps: int
    seconds: float
    finish_reason: str

    @property
    def tokens_per_step(self) -> float:
        """New tokens for each pass of the target."""
        return self.new_tokens / max(self.steps, 1)


class SequoiaDecoder:
    """Decodes with a static token tree; the output law is the target's.

    Args:
        target: a transformers causal LM, loaded and in eval mode.
        draft: the same, sharing the target's vocabulary or covering part of it (attribute `covered_tokens`, int64
            [draft vocabulary]: the target's token for each of the draft's); None only for a tree of one node.
        tree: the token tree.

    Raises:
        SequoiaPlanError: if the vocabularies cannot belong together, or the tree drafts and there is no draft.
    """

    def __init__(self, target: Any, draft: Any, tree: TokenTree) -> None:
        if draft is None and tree.size > 1:
            raise SequoiaPlanError(f"a tree of {tree.size} nodes needs a draft model; only a tree of one node decodes without")
        self.tree, self.device = tree, target.device
        self.target = CachedModel(target)
        self.draft = CachedModel(draft) if tree.size > 1 else None
        self.context = int(getattr(target.config, "max_position_embeddings", 0) or 1 << 30)
        self.index = TreeIndex.of(tree, self.device)
        self.levels = [Level.of(tree, level, self.device) for level in range(tree.depth - 1)]
        self.mask = TreeMask(tree, self.device, target.dtype)
        self.nodes = torch.arange(tree.size, device=self.device)
        self.offsets = torch.as_tensor([-1, *tree.position_ids.tolist()], device=self.device)
        self.around_root = torch.arange(-1, 1, device=self.device)
        self.generator = torch.Generator(self.device)
        self.tokens = self.length = torch.zeros(1, dtype=torch.long, device=self.device)
        if self.draft:
            _check_vocabularies(target, draft)
            branching, covered = tree.branching, self.draft.covered
            if branching > (covered.numel() if covered is not None else _vocabulary(draft)):
                raise SequoiaPlanError(f"tree: {branching} children of one node, more than the draft's vocabulary holds")

    @torch.inference_mode()
    def generate(
        self,
        input_ids: Tensor | Sequence[int],
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
        eos_token_id: int | Iterable[int] | None = None,
        streamer: Any = None,
        *,
        sampling: Sampling | None = None,
    ) -> Generation:
        """Generate after `input_ids` (int64 [n] or [1, n]).

        Args:
            temperature: 0 is greedy.
            top_p: nucleus filter on the target.
            seed: makes sampling repeatable; None draws one.
            eos_token_id: ends the generation; None takes the target's generation config.
            streamer: anything with transformers' `put(tokens)` and `end()`.
            sampling: every sampling setting at once, in place of `temperature` and `top_p`.

        Raises:
            SequoiaPlanError: if the prompt is empty or does not fit the model's context, or a setting is impossible.
        """
        started = time.perf_counter()
        prompt = self._prompt(input_ids)
        eos = _eos(self.target.model if eos_token_id is None else eos_token_id)
        new: list[int] = []
        steps, reason = 0, ""
        for step in self.steps(prompt, max_new_tokens, sampling or Sampling(temperature, top_p), seed):
            steps += 1
            added = step.tokens[: max_new_tokens - len(new)]
            end = next((i + 1 for i, token in enumerate(added) if token in eos), None)
            added = added[:end]
            new.extend(added)
            if streamer is not None:
                streamer.put(torch.tensor(added))
            reason = "eos" if end else "length" if len(new) >= max_new_tokens else ""
            if reason:
                break
        if streamer is not None:
            streamer.end()
        sequences = torch.cat([prompt, torch.tensor(new, dtype=torch.long, device=self.device)])[None]
        return Generation(sequences, len(new), steps, time.perf_counter() - started, reason or "context")

    @torch.inference_mode()
    def steps(self, prompt: Tensor, max_new_tokens: int, sampling: Sampling, seed: int | None = None) -> Iterator[Step]:
        """Prefill `prompt` (int64 [n]), then one `Step` after the other until `max_new_tokens` or the context is full."""
        self.prefill(prompt, max_new_tokens, seed)
        length = prompt.numel() - 1
        end = min(length + max_new_tokens, self.context - self.tree.depth)
        while length < end:
            count, *values = self.step(self.extent(length), sampling).tolist()
            path, tokens = values[: self.tree.depth], values[self.tree.depth :]
            length += count
            yield Step(path[:count], tokens[:count])

    def prefill(self, prompt: Tensor, max_new_tokens: int, seed: int | None = None) -> None:
        """Start a sequence: both caches hold all of `prompt` but its last token, which is the first root."""
        if seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(seed)
        last = min(prompt.numel() + max_new_tokens, self.context)
        self.tokens = torch.zeros(last + self.tree.depth + 1, dtype=torch.long, device=self.device)
        self.tokens[: prompt.numel()] = prompt
        self.length = torch.tensor([prompt.numel() - 1], device=self.device)
        for model in filter(None, (self.target, self.draft)):
            model.reset(self.extent(last))
            model.prefill(prompt[:-1])

    def step(self, extent: int, sampling: Sampling) -> Tensor:
        """One step on fixed shapes: int64 [1 + 2 * depth], the accepted count, the path, the tokens added.

        Args:
            extent: slots attention looks at, at least length + size.
        """
        mask = self.mask(self.length, extent)
        growth = self.grow(mask, sampling)
        accepted = self.judge(growth, mask, sampling)
        return self.keep(accepted, growth)

    def grow(self, mask: Tensor, sampling: Sampling) -> Growth:
        """The draft's part of a step."""
        root = (self.length + self.around_root).clamp(min=0)
        if self.draft is None:
            return Growth(self.tokens[root[1:]], self.tokens[:0], self.tokens[:0])
        return grow(self.draft, self.levels, self.tokens[root], self.length, self.offsets, mask, sampling, self.generator)

    def judge(self, growth: Growth, mask: Tensor, sampling: Sampling) -> Accepted:
        """The target's part of a step: one pass over the tree, and which nodes it accepts."""
        logits = self.target(growth.tokens, self.length + self.offsets[1:], self.length + self.nodes, mask[1:])
        if sampling.greedy:
            return greedy(logits.argmax(-1), growth.tokens, self.index)
        uniforms = torch.rand(2, dtype=torch.float64, device=self.device, generator=self.generator)
        covered = self.draft.covered if self.draft else None
        return verify(sampling.rule, lambda nodes: sampling.target(logits[nodes]), growth.laws, growth.drawn, self.index, uniforms, covered)

    def keep(self, accepted: Accepted, growth: Growth) -> Tensor:
        """Commit the accepted path: KV rows, tokens, length."""
        rows = self.length + accepted.path
        for model in filter(None, (self.target, self.draft)):
            model.cache.keep(rows, self.length)
        after = torch.cat([accepted.path[1:], accepted.path[:1]])
        order = torch.arange(self.tree.depth, device=self.device)
        added = torch.where(order == accepted.count - 1, accepted.bonus, growth.tokens[after])
        self.tokens.index_copy_(0, self.length + 1 + order, added)
        self.length += accepted.count
        return torch.cat([accepted.count, accepted.path, added])

    def extent(self, length: int) -> int:
        """How far attention looks with the root in slot `length`: past the whole tree, in few different shapes."""
        return -(-(length + self.tree.size) // EXTENT_STEP) * EXTENT_STEP

    def _prompt(self, input_ids: Tensor | Sequence[int]) -> Tensor:
        prompt = torch.as_tensor(input_ids, dtype=torch.long, device=self.device)
        if prompt.ndim == 2 and prompt.shape[0] != 1:
            raise SequoiaPlanError(f"input_ids: a batch of {prompt.shape[0]}, expected one sequence; call generate once for each")
        prompt = prompt.reshape(-1)
        if prompt.numel() == 0:
            raise SequoiaPlanError("prompt: empty, expected at least one token")
        room = self.context - self.tree.depth
        if prompt.numel() > room:
            raise SequoiaPlanError(
                f"prompt: {prompt.numel()} tokens, expected at most {room} (the model's context of {self.context} less the tree's depth); shorten it"
            )
        return prompt


def _eos(source: Any) -> set[int]:
    """The tokens that end a generation, from a model's generation config or as given."""
    config = getattr(source, "generation_config", None)
    found = config.eos_token_id if config is not None else source if isinstance(source, (int, Iterable)) else None
    return set() if found is None else {found} if isinstance(found, int) else set(found)


def _vocabulary(model: Any) -> int:
    return int(model.get_output_embeddings().out_features)


def _check_vocabularies(target: Any, draft: Any) -> None:
    covered, size = getattr(draft, "covered_tokens", None), _vocabulary(target)
    if covered is not None and int(covered.max()) >= size:
        raise SequoiaPlanError(f"draft: covers token {int(covered.max())}, the target's vocabulary has {size}; use a draft made for this target")
    if covered is None and _vocabulary(draft) != size:
        raise SequoiaPlanError(f"draft: a vocabulary of {_vocabulary(draft)} tokens, the target's has {size}; use a draft that shares the target's tokenizer")
