"""Sequoia decoding: draft a tree, let the target judge it, keep what it accepts."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Generator, Hashable, Iterable
from collections.abc import Sequence as Several
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from sequoia_plan.artifacts import ArgumentError, SequoiaPlanError, TokenTree
from sequoia_plan.runtime.capture import Graphs, addresses, capturable, on_one_cuda_device, readback
from sequoia_plan.runtime.draft.drafter import Drafter, Growth, Pass, grow
from sequoia_plan.runtime.draft.kinds import drafter_of
from sequoia_plan.runtime.generation import Ending, Generation, end_tokens, read_prompt, stop_criteria
from sequoia_plan.runtime.models.forward import TreeModel, execution_device, round_up, text_config
from sequoia_plan.runtime.models.parallel import from_first, is_split, shared_seed
from sequoia_plan.runtime.models.probe import probe
from sequoia_plan.runtime.models.vocabulary import shared_vocabulary, vocabulary_size
from sequoia_plan.runtime.sampling import Sampling, verifier_of
from sequoia_plan.runtime.sequence import Sequence
from sequoia_plan.runtime.structure import Structure
from sequoia_plan.runtime.verify import Accepted, greedy, verify
from sequoia_plan.runtime.verify.fused import Fused, available

T = TypeVar("T")
EXTENT_STEP = {"cpu": 64, "cuda": 512}
"""Attention looks at a multiple of this many slots: few shapes, little waste. On CUDA each shape is a graph of its own, so beyond 1024
slots there are two shapes for each doubling of the length."""

LARGEST_TREE = 4096
"""Nodes. A decoder's mask and paths grow with the square of the size."""

NOT_FINITE = (-1, -2)
"""What a step returns for a count if the target's, or the draft's, logits were not finite."""


@dataclass(frozen=True)
class Step:
    """One step: the accepted nodes (the root first) and the tokens it added (the last is the bonus token)."""

    path: list[int]
    tokens: list[int]


class SequoiaDecoder:
    """Decodes with a static token tree; the output law is the target's. It holds one sequence: requests of several threads take turns.

    Args:
        target: a transformers causal LM, loaded and in eval mode; quantised, sharded or compiled as you like.
        draft: the same, sharing the target's vocabulary or covering part of it (attribute `covered_tokens`, int64
            [draft vocabulary]: the target's token for each of the draft's); None only for a tree of one node.
        tree: the token tree.
        tokenizer: the target's, for prompts that are text, stop strings and the text of results.
        draft_tokenizer: the draft's, to be compared with the target's token by token.
        captured: replay steps as CUDA graphs; None: if both models lie on one CUDA device and neither is compiled.
        compile: compile the models' passes over trees by torch.compile, each shape for itself; they are captured all the same. Plain
            decoding gains from it, too. The first step of each shape takes a minute or so. A backend's name, or a backend, chooses it.

    Raises:
        SequoiaPlanError: if the vocabularies cannot belong together, the tree drafts and there is no draft, or a model
            cannot read a tree (see `probe`).
    """

    def __init__(
        self,
        target: Any,
        draft: Any,
        tree: TokenTree,
        *,
        tokenizer: Any = None,
        draft_tokenizer: Any = None,
        captured: bool | None = None,
        compile: bool | str | Callable[..., Any] = False,
    ) -> None:
        backend = "inductor" if compile is True else compile or None
        self.device, self.tokenizer = execution_device(target), tokenizer
        self.drafter: Drafter | None = None
        if draft is not None and tree.size > 1:
            if execution_device(draft) != self.device:
                raise SequoiaPlanError(f"draft: on {execution_device(draft)}, the target takes its input on {self.device}; move the draft there")
            self.drafter = drafter_of(draft, *shared_vocabulary(target, draft, tokenizer, draft_tokenizer), backend)
        self.target = TreeModel(target, probe(target), taps=self.drafter.taps if self.drafter else ())
        if backend is not None:
            self.target.compile(backend)
        self.models = [model for model in (target, draft) if model is not None]
        self.context = self.target.context
        self.sequence = Sequence(self.device)
        possible = {"draft": draft is None or capturable(draft), "target": capturable(target), "verify": on_one_cuda_device(target)}
        possible["step"] = all(possible.values())
        self.uncaptured = set[str]() if captured else {part for part in possible if not possible[part]}
        wanted = possible["verify"] and (possible["draft"] or possible["target"]) if captured is None else captured
        self.graphs = Graphs(self.device) if wanted else None
        self.ahead = wanted  # launch a step before the last one's tokens are read: the device never waits for the host
        self._use(tree)

    def with_tree(self, tree: TokenTree) -> SequoiaDecoder:
        """A decoder of another tree that shares this one's models, sequence and graphs: only one of the two can be amid a sequence.

        Raises:
            SequoiaPlanError: if the tree drafts and this decoder has no draft, or a node has more children than the draft has tokens.
        """
        other = copy.copy(self)
        other._use(tree)
        return other

    def _use(self, tree: TokenTree) -> None:
        if self.drafter is None and tree.size > 1:
            raise SequoiaPlanError(f"a tree of {tree.size} nodes needs a draft model; only a tree of one node decodes without")
        if self.drafter and tree.branching > self.drafter.vocabulary:
            raise SequoiaPlanError(f"tree: {tree.branching} children of one node, more than the draft's vocabulary holds")
        deepest = self.drafter.drafting.deepest if self.drafter else None
        if deepest and tree.depth > deepest:
            raise SequoiaPlanError(f"tree: {tree.depth} levels, the draft reaches {deepest}; solve with its own profile, or with --depth {deepest}")
        if tree.size > LARGEST_TREE:
            raise SequoiaPlanError(f"tree: {tree.size} nodes, expected at most {LARGEST_TREE} to decode with; solve with a smaller --budget")
        self.tree, self.structure = tree, Structure.of(tree, self.device, self.target.model.dtype)
        self.passes: tuple[Pass, ...] = self.drafter.passes(tree, self.structure) if self.drafter else ()
        self.inner, self.branching, self.depth = sum(step.expands for step in self.passes), tree.branching, tree.depth
        self.fused: Fused | None = None
        if available(self.device) and on_one_cuda_device(self.target.model):
            covered = self.drafter.covered if self.drafter else None
            self.fused = Fused(tree, self.device, covered, vocabulary_size(self.target.model) if covered is not None else 0)

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
        stop_strings: str | Several[str] | None = None,
        stopping_criteria: Several[Callable[..., Any]] = (),
    ) -> Generation:
        """Generate after a prompt: token ids (int64 [n] or [1, n]), text, or what a tokenizer returns.

        Args:
            temperature: 0 is greedy.
            top_p: nucleus filter on the target.
            seed: makes sampling repeatable; None draws one.
            eos_token_id: ends the generation; None takes those of the target's generation config, else the tokenizer's.
            streamer: anything with transformers' `put(tokens)` and `end()`; gets the prompt first, as from transformers.
            sampling: every sampling setting at once, in place of `temperature` and `top_p`; else the verifier is the one that the tree's plan
                records (`verifier_of`).
            attention_mask: as tokenizers return it; it must hide nothing.
            stop_strings: text after which to stop; needs the decoder's tokenizer. As in transformers, the token that
                completes one is kept.
            stopping_criteria: transformers' criteria, called as `criterion(input_ids, None)` after every token.

        Raises:
            SequoiaPlanError: if the prompt is empty, a batch or too long for the context, a setting is impossible, the
                memory does not suffice, or a model's logits are not finite.
        """
        started = time.perf_counter()
        sampling = sampling or Sampling(temperature, top_p, verifier=verifier_of(self.tree))
        if max_new_tokens < 1:
            raise ArgumentError(f"max_new_tokens: found {max_new_tokens}, expected 1 or more")
        prompt = read_prompt(input_ids, self.tokenizer, attention_mask).to(self.device)
        ids = prompt.tolist()
        criteria = [*stop_criteria(stop_strings, self.tokenizer), *stopping_criteria]
        ending = Ending(ids, max_new_tokens, self.context - len(ids), end_tokens(eos_token_id, self.target.model, self.tokenizer), criteria)
        new: list[int] = []
        steps, reason = 0, ""
        if streamer is not None:
            streamer.put(prompt[None].cpu())
        with closing(self.steps(prompt, max_new_tokens, sampling, seed)) as decoding:
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
    def steps(self, prompt: Tensor, max_new_tokens: int, sampling: Sampling, seed: int | None = None) -> Generator[Step, None, None]:
        """Prefill `prompt` (int64 [n]), then one `Step` after the other until `max_new_tokens` or the context is full.

        From the first step until the last one, or until the iterator is closed, other threads wait for the decoder.

        The tree never shrinks: near the end of the context, nodes beyond it are cut off the result. If `ahead`, a step that is needed
        however many tokens the last one accepts runs while those are read.

        Raises:
            SequoiaPlanError: if the prompt leaves no room in the context, or a model's logits are not finite.
        """
        with self.sequence.turns.take():
            self.prefill(prompt, max_new_tokens, seed)
            length = prompt.numel() - 1
            end = min(length + max_new_tokens, self.context - 1)

            def launched(longest: int) -> Callable[[], list[int]]:
                self.refill_random_numbers(sampling)
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
            SequoiaPlanError: if the prompt leaves no room in the context, or there is not the memory for the sequence.
        """
        largest, last = int(prompt.max()), self.target.last_token
        if int(prompt.min()) < 0 or largest > last:
            wrong = largest if largest > last else int(prompt.min())
            raise ArgumentError(f"prompt: found the token {wrong}, expected 0 to {last}, the target's embeddings; was it made by another tokenizer?")
        if prompt.numel() >= self.context:
            raise SequoiaPlanError(f"prompt: {prompt.numel()} tokens, expected at most {self.context - 1} (the model's context less one new token); shorten it")
        sequence, drafter = self.sequence, self.drafter
        sequence.generator.manual_seed(shared_seed(self.target.model) if seed is None else seed)
        capacity = self.extent(min(prompt.numel() + max_new_tokens, self.context))
        sequence.reserve(capacity, self.target.new_cache, drafter.new_cache if drafter else None)
        if drafter and drafter.taps:
            sequence.reserve_features(self.tree.size, len(drafter.taps) * text_config(self.target.model).hidden_size, self.target.model.dtype)
        if self.graphs:
            sequence.read_from(addresses(self.models))
        sequence.tokens[: prompt.numel()] = prompt
        sequence.length.fill_(prompt.numel() - 1)
        if drafter:
            drafter.prefill(sequence.draft, prompt[:-1])
        self.target.prefill(sequence.target, prompt[:-1], partial(drafter.watch, sequence.draft) if drafter else None)

    def refill_random_numbers(self, sampling: Sampling) -> None:
        """The random numbers of the next step, so that the step is a function of tensors."""
        if not sampling.greedy:
            self.sequence.refill_random_numbers(self.inner * self.bits_per_node(sampling))

    def bits_per_node(self, sampling: Sampling) -> int:
        """How many random numbers it takes to draw a node's children."""
        return sampling.drawing.columns(self.drafter.vocabulary, self.branching) if self.drafter else 0

    def random_bits(self, sampling: Sampling) -> Tensor:
        """int32 [inner, columns], the random numbers that this step's children are drawn with; no columns if they are not needed."""
        width = 0 if sampling.greedy else self.bits_per_node(sampling)
        return self.sequence.bits[: self.inner * width].view(self.inner, width)

    def run(self, extent: int, sampling: Sampling) -> Tensor:
        """`step`, replayed as a CUDA graph where that is possible, else part by part; what it returns is overwritten by the next."""
        if self.graphs is None or self.may_capture("step", extent, sampling):
            return self.replayed("step", lambda: self.step(extent, sampling), extent, sampling)
        growth = self.run_draft(extent, sampling)
        logits = self.run_target(extent)
        return self.run_verification(logits, growth, sampling)

    def run_draft(self, extent: int, sampling: Sampling) -> Growth:
        """`grow`, as a CUDA graph where that is possible."""
        return self.replayed("draft", lambda: self.grow(extent, sampling), extent, sampling)

    def run_target(self, extent: int) -> Tensor:
        """`read`, as a CUDA graph where that is possible."""
        return self.replayed("target", lambda: self.read(extent), extent)

    def run_verification(self, logits: Tensor, growth: Growth, sampling: Sampling) -> Tensor:
        """`judge` and `keep`, as a CUDA graph where that is possible."""

        def decided(logits: Tensor, laws: Tensor, drawn: Tensor) -> Tensor:
            return self.keep(self.judge(logits, Growth(laws, drawn), sampling))

        return self.replayed("verify", decided, sampling, inputs=(logits, growth.laws, growth.drawn))

    def replayed(self, part: str, run: Callable[..., T], *settings: Hashable, inputs: tuple[Tensor, ...] = ()) -> T:
        """`run(*inputs)`, which reads and changes nothing but this decoder's sequence; as a CUDA graph where that is possible.

        Args:
            part: "step", "draft", "target", "verify", or a name of one's own for another function.
            settings: what else the function depends on, beside the tree.
            inputs: tensors that may be others at each call.
        """
        if self.graphs is None or part in self.uncaptured:
            return run(*inputs)
        if self.graphs.version != self.sequence.version:
            self.graphs.clear(self.sequence.version)
        return self.graphs((part, self.tree, *settings), run, lambda: self.sequence.changed(self.tree.size), inputs)

    def may_capture(self, part: str, *settings: Hashable) -> bool:
        """Is nothing known that keeps this part of a step from being captured?"""
        return part not in self.uncaptured and not (self.graphs and (part, self.tree, *settings) in self.graphs.failed)

    def step(self, extent: int, sampling: Sampling) -> Tensor:
        """One step on fixed shapes: int64 [1 + 2 * depth], the accepted count, the path, the tokens added.

        In place of the count: one of `NOT_FINITE` if the target's or the draft's logits were NaN or infinite.

        Args:
            extent: slots attention looks at, at least length + size.
        """
        self.target.prefetch()
        growth = self.grow(extent, sampling)
        logits = self.read(extent)
        accepted = self.judge(logits, growth, sampling)
        return self.keep(accepted)

    def grow(self, extent: int, sampling: Sampling) -> Growth:
        """The draft's part of a step: the tree's tokens are then in the sequence."""
        if not self.drafter or not self.passes:
            nothing = self.sequence.tokens[:0]
            return Growth(nothing, nothing)
        sequence = self.sequence
        columns = self.structure.columns(sequence.length, extent)
        growth = grow(self.drafter, self.passes, sequence, columns, sampling, self.random_bits(sampling))
        if is_split(self.target.model):
            slots = sequence.length + self.structure.nodes
            sequence.tokens.index_copy_(0, slots, from_first(self.target.model, sequence.tokens[slots]))
        return growth

    def read(self, extent: int) -> Tensor:
        """The target's part of a step: one pass over the tree. Logits [size, vocabulary]."""
        sequence, structure = self.sequence, self.structure
        slots = sequence.length + structure.nodes
        mask = structure.mask.index_select(1, structure.columns(sequence.length, extent))
        reading = self.target(sequence.target, sequence.tokens[slots], sequence.length + structure.offsets, slots, mask)
        if reading.features is not None:
            sequence.features.index_copy_(0, structure.nodes, reading.features)
        return reading.logits

    def judge(self, logits: Tensor, growth: Growth, sampling: Sampling) -> Accepted:
        """Which nodes are accepted, and the bonus token."""
        accepted = self.verdict(logits, growth, sampling)
        if not is_split(self.target.model):
            return accepted
        agreed = from_first(self.target.model, torch.cat([accepted.path, accepted.count, accepted.bonus]))
        return Accepted(agreed[:-2], agreed[-2:-1], agreed[-1:])

    def fuses(self, sampling: Sampling) -> bool:
        """Do kernels that walk on the device judge the tree? Else tensor operations do, which take other rounds."""
        return self.fused is not None and (sampling.greedy or sampling.fusible)

    def verdict(self, logits: Tensor, growth: Growth, sampling: Sampling) -> Accepted:
        """What this process by itself says of the tree."""
        sequence, index = self.sequence, self.structure.index
        if sampling.greedy:
            tokens = sequence.tokens[sequence.length + self.structure.nodes]
            return self.fused.greedy(logits, tokens) if self.fused else greedy(logits.argmax(-1), tokens, index)
        if self.fused and self.fuses(sampling):
            return self.fused.verify(sampling.verifier, logits, sampling.filters, growth.laws, growth.drawn, sequence.uniforms)
        covered = self.drafter.covered if self.drafter else None
        return verify(sampling.rule, lambda nodes: sampling.target(logits.index_select(0, nodes)), growth.laws, growth.drawn, index, sequence.uniforms, covered)

    def keep(self, accepted: Accepted) -> Tensor:
        """Commit the accepted path: caches, tokens, length."""
        sequence, length = self.sequence, self.sequence.length
        slots = length + accepted.path
        order = self.structure.nodes[: self.depth]
        following = sequence.tokens[slots].roll(-1)
        added = torch.where(order == accepted.count - 1, accepted.bonus, following)
        sequence.target.keep(slots, length)
        count = accepted.count
        if self.drafter and self.passes:
            self.drafter.keep(sequence, accepted.path)
            count = count.where(sequence.draft.finite, NOT_FINITE[1])
        sequence.tokens.index_copy_(0, length + 1 + order, added)
        length += accepted.count
        return torch.cat([count.where(sequence.target.finite, NOT_FINITE[0]), accepted.path, added])

    def extent(self, length: int) -> int:
        """How far attention looks with the root in slot `length`: past the whole tree, in few different shapes."""
        needed = length + self.tree.size
        step = EXTENT_STEP["cuda" if self.graphs or self.device.type == "cuda" else "cpu"]
        if self.graphs:
            step = max(step, (1 << needed.bit_length()) // 4)
        return round_up(needed, step)
