"""Sequoia decoding: grow a tree, let the target judge it, keep what it accepts."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from sequoia_plan.artifacts import ArgumentError, SequoiaPlanError, TokenTree
from sequoia_plan.runtime.capture import Graphs, capturable, readback
from sequoia_plan.runtime.forward import CachedModel, TreeMask
from sequoia_plan.runtime.generation import Ending, Generation, eos_tokens, read_prompt, stop_criteria
from sequoia_plan.runtime.grow import Growth, Level, grow
from sequoia_plan.runtime.parallel import shared_seed
from sequoia_plan.runtime.probe import probe
from sequoia_plan.runtime.sampling import Sampling
from sequoia_plan.runtime.verify import Accepted, TreeIndex, greedy, verify
from sequoia_plan.runtime.vocabulary import shared_vocabulary

T = TypeVar("T")
EXTENT_STEP = {"cpu": 64, "cuda": 512}
"""Attention looks at a multiple of this many slots: few shapes, little waste. On CUDA each shape is a graph of its own."""

NOT_FINITE = (-1, -2)
"""What a step returns for a count if the target's, or the draft's, logits were not finite."""


@dataclass(frozen=True)
class Step:
    """One step: the accepted nodes (the root first) and the tokens it added (the last is the bonus token)."""

    path: list[int]
    tokens: list[int]


class SequoiaDecoder:
    """Decodes with a static token tree; the output law is the target's.

    Args:
        target: a transformers causal LM, loaded and in eval mode; quantised, sharded or compiled as you like.
        draft: the same, sharing the target's vocabulary or covering part of it (attribute `covered_tokens`, int64
            [draft vocabulary]: the target's token for each of the draft's); None only for a tree of one node.
        tree: the token tree.
        tokenizer: the target's, for prompts that are text, stop strings and the text of results.
        draft_tokenizer: the draft's, to be compared with the target's token by token.
        captured: replay steps as CUDA graphs; None: if both models lie on one CUDA device and neither is compiled.

    Raises:
        SequoiaPlanError: if the vocabularies cannot belong together, the tree drafts and there is no draft, or a model
            cannot read a tree (see `probe`).
    """

    def __init__(self, target: Any, draft: Any, tree: TokenTree, *, tokenizer: Any = None, draft_tokenizer: Any = None, captured: bool | None = None) -> None:
        if draft is None and tree.size > 1:
            raise SequoiaPlanError(f"a tree of {tree.size} nodes needs a draft model; only a tree of one node decodes without")
        self.tree, self.device, self.tokenizer = tree, target.device, tokenizer
        self.draft: CachedModel | None = None
        if tree.size > 1:
            if draft.device != target.device:
                raise SequoiaPlanError(f"draft: on {draft.device}, the target takes its input on {target.device}; move the draft there")
            size, covered = shared_vocabulary(target, draft, tokenizer, draft_tokenizer)
            if tree.branching > size:
                raise SequoiaPlanError(f"tree: {tree.branching} children of one node, more than the draft's vocabulary holds")
            self.draft = CachedModel(draft, probe(draft), size, covered)
        self.target = CachedModel(target, probe(target))
        self.models = [self.target, *([self.draft] if self.draft else [])]
        self.context = self.target.context
        self.index = TreeIndex.of(tree, self.device)
        self.levels = [Level.of(tree, level, self.device) for level in range(tree.depth - 1)]
        self.mask = TreeMask(tree, self.device, target.dtype)
        self.nodes = torch.arange(tree.size, device=self.device)
        self.offsets = torch.as_tensor([-1, *tree.position_ids.tolist()], device=self.device)
        self.around_root = torch.arange(-1, 1, device=self.device)
        self.generator = torch.Generator(self.device)
        self.bits = torch.empty(0, 0, dtype=torch.int32, device=self.device)
        self.uniforms = torch.zeros(2, dtype=torch.float64, device=self.device)
        self.tokens = torch.zeros(0, dtype=torch.long, device=self.device)
        self.length = torch.zeros(1, dtype=torch.long, device=self.device)
        wanted = all(capturable(each.model) for each in self.models) if captured is None else captured
        self.captured = Graphs(self.device) if wanted else None
        self.ahead = wanted  # launch a step before the last one's tokens are read: the device never waits for the host

    @torch.inference_mode()
    def generate(
        self,
        input_ids: Any,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
        eos_token_id: int | Iterable[int] | None = None,
        streamer: Any = None,
        *,
        sampling: Sampling | None = None,
        attention_mask: Tensor | None = None,
        stop_strings: str | Sequence[str] | None = None,
        stopping_criteria: Sequence[Callable[..., Any]] = (),
    ) -> Generation:
        """Generate after a prompt: token ids (int64 [n] or [1, n]), text, or what a tokenizer returns.

        Args:
            temperature: 0 is greedy.
            top_p: nucleus filter on the target.
            seed: makes sampling repeatable; None draws one.
            eos_token_id: ends the generation; None takes the target's generation config.
            streamer: anything with transformers' `put(tokens)` and `end()`; gets the prompt first, as from transformers.
            sampling: every sampling setting at once, in place of `temperature` and `top_p`.
            attention_mask: as tokenizers return it; it must hide nothing.
            stop_strings: text after which to stop; needs the decoder's tokenizer. As in transformers, the token that
                completes one is kept.
            stopping_criteria: transformers' criteria, called as `criterion(input_ids, None)` after every token.

        Raises:
            SequoiaPlanError: if the prompt is empty, a batch or too long for the context, a setting is impossible, the
                memory does not suffice, or a model's logits are not finite.
        """
        started = time.perf_counter()
        sampling = sampling or Sampling(temperature, top_p)
        if max_new_tokens < 1:
            raise ArgumentError(f"max_new_tokens: found {max_new_tokens}, expected 1 or more")
        prompt = read_prompt(input_ids, self.tokenizer, attention_mask).to(self.device)
        ids = prompt.tolist()
        criteria = [*stop_criteria(stop_strings, self.tokenizer), *stopping_criteria]
        ending = Ending(ids, max_new_tokens, self.context - len(ids), eos_tokens(eos_token_id, self.target.model), criteria)
        new: list[int] = []
        steps, reason = 0, ""
        decoding = self.steps(prompt, max_new_tokens, sampling, seed)
        if streamer is not None:
            streamer.put(prompt[None].cpu())
        while not reason:
            added, reason = ending.take(next(decoding).tokens)
            steps += 1
            new.extend(added)
            if streamer is not None:
                streamer.put(torch.tensor(added))
        if streamer is not None:
            streamer.end()
        sequences = torch.tensor([ids + new], device=self.device)
        text = self.tokenizer.decode(new, skip_special_tokens=True) if self.tokenizer is not None else None
        return Generation(sequences, len(new), steps, time.perf_counter() - started, reason, text)

    def generate_each(self, prompts: Iterable[Any], *, seed: int | None = None, **settings: Any) -> list[Generation]:
        """`generate` for several prompts, one after the other; with a seed, prompt i gets seed + i."""
        return [self.generate(prompt, seed=None if seed is None else seed + i, **settings) for i, prompt in enumerate(prompts)]

    @torch.inference_mode()
    def steps(self, prompt: Tensor, max_new_tokens: int, sampling: Sampling, seed: int | None = None) -> Iterator[Step]:
        """Prefill `prompt` (int64 [n]), then one `Step` after the other until `max_new_tokens` or the context is full.

        The tree never shrinks: near the end of the context, nodes beyond it are cut off the result. If `ahead`, a step that is needed
        however many tokens the last one accepts runs while those are read.

        Raises:
            SequoiaPlanError: if the prompt leaves no room in the context, or a model's logits are not finite.
        """
        self.prefill(prompt, max_new_tokens, seed)
        length = prompt.numel() - 1
        end = min(length + max_new_tokens, self.context - 1)

        def launched(longest: int) -> Callable[[], list[int]]:
            self.throw(sampling)
            return readback(self.run(self.extent(longest), sampling))

        following: Callable[[], list[int]] | None = None
        while length < end:
            read = following or launched(length)
            longest = length + self.tree.depth
            following = launched(longest) if self.ahead and longest < end else None
            count, *values = read()
            if count < 0:
                raise SequoiaPlanError(
                    f"{'target' if count == NOT_FINITE[0] else 'draft'}: logits that are not finite after token {length + 1}; "
                    "the weights are damaged or the dtype overflows (float16 does, bfloat16 and float32 do not)"
                )
            count = min(count, self.context - 1 - length)
            path, tokens = values[: self.tree.depth], values[self.tree.depth :]
            length += count
            yield Step(path[:count], tokens[:count])

    def prefill(self, prompt: Tensor, max_new_tokens: int, seed: int | None = None) -> None:
        """Start a sequence: both caches hold all of `prompt` but its last token, which is the first root.

        Raises:
            SequoiaPlanError: if the prompt leaves no room in the context, or there is no memory for the sequence.
        """
        if prompt.numel() >= self.context:
            raise SequoiaPlanError(f"prompt: {prompt.numel()} tokens, expected at most {self.context - 1} (the model's context less one new token); shorten it")
        self.generator.manual_seed(shared_seed(self.target.model) if seed is None else seed)
        last = min(prompt.numel() + max_new_tokens, self.context)
        capacity, memory = self.extent(last), [self.tokens, *(model.cache for model in self.models)]
        for model in self.models:
            model.reset(capacity)
        if self.tokens.numel() < capacity:
            self.tokens = torch.zeros(capacity, dtype=torch.long, device=self.device)
        if self.captured and any(old is not new for old, new in zip(memory, [self.tokens, *(model.cache for model in self.models)], strict=True)):
            self.captured.clear()
        self.tokens[: prompt.numel()] = prompt
        self.length.fill_(prompt.numel() - 1)
        for model in self.models:
            model.prefill(prompt[:-1])

    def throw(self, sampling: Sampling) -> None:
        """The random numbers of the next step, so that the step is a function of tensors."""
        inner = sum(level.expands for level in self.levels)
        columns = sampling.drawing.columns(int(self.draft.vocabulary or 0), self.tree.branching) if self.draft else 0
        if self.bits.shape != (inner, columns):
            if self.captured:
                self.captured.clear()
            self.bits = torch.empty(inner, columns, dtype=torch.int32, device=self.device)
        if not sampling.greedy:
            self.bits.random_(generator=self.generator)
            self.uniforms.uniform_(generator=self.generator)

    def run(self, extent: int, sampling: Sampling) -> Tensor:
        """`step`, replayed as a CUDA graph where that is possible; what it returns is overwritten by the next."""
        return self.replayed(("step", extent, sampling), lambda: self.step(extent, sampling))

    def replayed(self, key: Hashable, run: Callable[[], T]) -> T:
        """`run()`, which reads and changes nothing but this decoder's sequence; as a CUDA graph where that is possible."""
        return self.captured(key, run, (self.tokens, self.length)) if self.captured else run()

    def step(self, extent: int, sampling: Sampling) -> Tensor:
        """One step on fixed shapes: int64 [1 + 2 * depth], the accepted count, the path, the tokens added.

        In place of the count: one of `NOT_FINITE` if the target's or the draft's logits were NaN or infinite.

        Args:
            extent: slots attention looks at, at least length + size.
        """
        mask = self.mask(self.length, extent)
        growth = self.grow(mask, sampling)
        logits = self.read(growth, mask)
        accepted = self.judge(logits, growth, sampling)
        return self.keep(accepted, growth)

    def grow(self, mask: Tensor, sampling: Sampling) -> Growth:
        """The draft's part of a step."""
        root = (self.length + self.around_root).clamp(min=0)
        if self.draft is None:
            return Growth(self.tokens[root[1:]], self.tokens[:0], self.tokens[:0])
        return grow(self.draft, self.levels, self.tokens[root], self.length, self.offsets, mask, sampling, self.bits)

    def read(self, growth: Growth, mask: Tensor) -> Tensor:
        """The target's part of a step: one pass over the tree. Logits [size, vocabulary]."""
        return self.target(growth.tokens, self.length + self.offsets[1:], self.length + self.nodes, mask[1:])

    def judge(self, logits: Tensor, growth: Growth, sampling: Sampling) -> Accepted:
        """Which nodes are accepted, and the bonus token."""
        if sampling.greedy:
            return greedy(logits.argmax(-1), growth.tokens, self.index)
        covered = self.draft.covered if self.draft else None
        return verify(sampling.rule, lambda nodes: sampling.target(logits[nodes]), growth.laws, growth.drawn, self.index, self.uniforms, covered)

    def keep(self, accepted: Accepted, growth: Growth) -> Tensor:
        """Commit the accepted path: KV rows, tokens, length."""
        rows = self.length + accepted.path
        for model in self.models:
            model.cache.keep(rows, self.length)
        after = torch.cat([accepted.path[1:], accepted.path[:1]])
        order = torch.arange(self.tree.depth, device=self.device)
        added = torch.where(order == accepted.count - 1, accepted.bonus, growth.tokens[after])
        self.tokens.index_copy_(0, self.length + 1 + order, added)
        self.length += accepted.count
        count = accepted.count if self.draft is None else accepted.count.where(self.draft.finite, NOT_FINITE[1])
        return torch.cat([count.where(self.target.finite, NOT_FINITE[0]), accepted.path, added])

    def extent(self, length: int) -> int:
        """How far attention looks with the root in slot `length`: past the whole tree, in few different shapes."""
        step = EXTENT_STEP["cuda" if self.captured else "cpu"]
        return -(-(length + self.tree.size) // step) * step
