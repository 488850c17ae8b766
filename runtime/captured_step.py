"""A step as decoder and profiler run it: as CUDA graphs where that is possible, read once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from sequoia_plan.artifacts import SequoiaPlanError, TokenTree
from sequoia_plan.models.base.cache import round_up
from sequoia_plan.models.base.threads import one_thread_of_torch
from sequoia_plan.models.layers import split_keys
from sequoia_plan.runtime.capture import read_back
from sequoia_plan.runtime.decoding_models import DecodingModels, Model
from sequoia_plan.runtime.draft.drafter import DraftedTree, Drafter
from sequoia_plan.runtime.sampling.sampling import Sampling
from sequoia_plan.runtime.sequence import CATCH_UP_TOKENS, TARGET_NOT_FINITE, SequenceState
from sequoia_plan.runtime.step import TreeStep

if TYPE_CHECKING:  # they need numba
    from sequoia_plan.runtime.compiled.compiled_step import CompiledStep
    from sequoia_plan.runtime.compiled.memory import Tree

T = TypeVar("T")
EXTENT_MULTIPLE = {"cpu": 64, "cuda": 512}
"""The extent is a multiple of so many slots: few shapes, little waste."""


@dataclass(frozen=True)
class StepOutput:
    """What one step accepted: nodes of its tree from the root on, and the token after each.

    `match_length` is that of the text's lookup match after the step; 0 without trees by match. If
    the sequence `keeps_logits`: `logits` and `processed_logits` [accepted, vocabulary], those of
    the target after the nodes of the path, before and after the text's logits processors.
    """

    path: list[int]
    tokens: list[int]
    tree: TokenTree
    match_length: int = 0
    logits: Tensor | None = None
    processed_logits: Tensor | None = None


class CapturedStep(TreeStep):
    """A `TreeStep` that runs as one call or CUDA graph if possible, else part by part."""

    @classmethod
    def of(
        cls, target: Model, draft: Model | None, tree: TokenTree, captured: bool | None = None
    ) -> CapturedStep:
        """A step with models of its own; the arguments are those of `SequoiaDecoder`."""
        return cls(DecodingModels(target, draft, tree, captured=captured), tree)

    def with_tree(self, tree: TokenTree) -> CapturedStep:
        """A step with another tree that shares models, sequence and graphs with this one."""
        return CapturedStep(self.models, tree)

    def prefill(
        self,
        prompt: Tensor,
        max_new_tokens: int,
        seed: int | None = None,
        *,
        reuse: bool = False,
        others: Iterable[TokenTree] = (),
    ) -> None:
        """Start a sequence; it has room for all trees by match and by context, and for `others`.

        `reuse`: what the models have read of the prompt is not read again. `prompt` int64 [n].
        """
        self.models.check_prompt(prompt)
        max_length = min(prompt.numel() + max_new_tokens, self.target.context)
        trees = [*self.tree.all_trees, *others]
        max_size = max(tree.size for tree in trees)
        # the draft may not have read the last tokens as it reads a prompt
        unsettled = CATCH_UP_TOKENS + max(tree.depth for tree in trees) if reuse else None
        if self.lookup:
            self.sequence.reserve_rows("lookup_chain", self.lookup.chain_length)
        # a text that goes on seldom needs larger caches
        capacity = round_up(self._extent(max_length + max_size), 1024 if reuse else 1)
        with one_thread_of_torch(self.target.traits.is_compiled):
            self.models.prefill(prompt, capacity, max_size, seed, unsettled)

    def extent(self, length: int) -> int:
        """How many slots of the cache attention looks at, with the root in slot `length`."""
        return self._extent(length + self.tree.size)

    def _extent(self, needed: int) -> int:
        """`needed` slots rounded up, so that passes have few shapes.

        Each shape is a CUDA graph of its own where passes are captured. So there are two extents
        for each doubling of the text, and only one, the whole cache, where attention finds the end
        of the text on the device (`splits_keys`).
        """
        if self.models.graphs is None:
            return round_up(needed, EXTENT_MULTIPLE[self.device.type])
        capacity = self.sequence.target.capacity
        if needed <= capacity >= split_keys.MIN_EXTENT and self.splits_keys():
            return capacity
        # a quarter of a power of two in (needed, 2 * needed]
        return round_up(needed, max(EXTENT_MULTIPLE["cuda"], (1 << needed.bit_length()) // 4))

    def splits_keys(self) -> bool:
        """Do all passes of a step read no keys after the tree, whatever the extent?"""
        if self.drafter and not self.drafter.splits_keys(self.max_rows):
            return False
        return self.target.backend.splits_keys(self.max_rows)

    def refill_random_numbers(self, sampling: Sampling) -> None:
        """Generate the random numbers of the next step, so that the step only reads tensors."""
        if not sampling.greedy:
            self.sequence.refill_random_numbers(self.num_parents * self.bits_per_parent(sampling))

    @property
    def launches_ahead(self) -> bool:
        """Can the next step be launched before this one, which may choose its tree, is read?"""
        captures = self.device.type == "cuda" and self.models.graphs is not None
        return captures and not self.alternates and not self.runs_by_parts

    @property
    def runs_by_parts(self) -> bool:
        """Does the host take part in a step, between its parts or by keeping their results?"""
        keeps_results = self.sequence.keeps_logits or self.verifier.observe is not None
        return keeps_results or self.sequence.path_logits is not None

    def launch(self, length: int, sampling: Sampling) -> Callable[[int], StepOutput]:
        """Start a step whose root is in slot `length` or before it.

        Call the result with the root's slot to wait for the output. Both raise SequoiaPlanError if
        a file of weights was written to, the latter also if logits were not finite.
        """
        self.models.check_files()
        extent = self.extent(length)
        self.refill_random_numbers(sampling)
        fits = extent <= self.sequence.target.capacity
        compiled = self._compiled(sampling) if fits and not self.runs_by_parts else None
        num_unread = 0
        if self.drafter and self.alternates:
            with one_thread_of_torch(self.target.traits.is_compiled):
                num_unread = catch_up(
                    self.drafter, self.sequence, self.tree, length, extent, bool(compiled)
                )
        if compiled:
            max_match = self.lookup.max_match if self.lookup else 0
            numbers = compiled(self.compiled_tree, sampling, max_match, num_unread)
            return partial(self._output, lambda: numbers)
        return partial(self._output, read_back(self.run(extent, sampling)))

    def part_seconds(self, sampling: Sampling) -> list[float]:
        """Of the last launch, the seconds of each draft pass, of the target's, and of the rest.

        Empty unless the step runs as one compiled call, which takes these times.
        """
        compiled = self._compiled(sampling)
        return compiled.seconds(self.compiled_tree) if compiled else []

    def time_passes(self, sampling: Sampling, *, of_target: bool) -> list[float]:
        """Seconds of the target's pass or of each draft pass; empty if steps are not compiled."""
        if compiled := self._compiled(sampling):
            if not of_target:
                self.refill_random_numbers(sampling)
            return compiled.time_passes(self.compiled_tree, sampling, of_target=of_target)
        return []

    def _compiled(self, sampling: Sampling) -> CompiledStep | None:
        """What runs a whole step with this sampling as one compiled call; None if nothing can."""
        step = self.models.step_for(self.max_rows)
        return step if step and step.follows(sampling) else None

    @cached_property
    def compiled_tree(self) -> Tree:
        """The tree as compiled steps take it."""
        from sequoia_plan.runtime.compiled.compiled_step import tree_of

        vocabulary = self.drafter.vocabulary if self.drafter else 0
        draws = [min(draft_pass.num_draws, vocabulary) for draft_pass in self.passes]
        return tree_of(self.tree, self.rows_of_passes, draws)

    def _output(self, read_numbers: Callable[[], list[int]], length: int) -> StepOutput:
        """Wait for a step whose root is in slot `length`, and check what `commit` returned."""
        count, *numbers = read_numbers()
        self.models.check_files()  # before anyone gets tokens of changed weights
        if count < 0:
            self.sequence.forget()  # attention multiplies what it hides by 0, but 0 * nan is nan
            model = "target" if count == TARGET_NOT_FINITE else "draft"
            raise SequoiaPlanError(
                f"{model}: logits that are not finite after token {length + 1}; the weights are "
                "damaged or the dtype overflows (float16 does, bfloat16 and float32 do not)"
            )
        count = min(count, self.target.context - 1 - length)  # nodes beyond the context are cut off
        depth, match_length = self.tree.depth, numbers[-1] if self.lookup else 0
        path, tokens = numbers[:count], numbers[depth : depth + count]
        if self.sequence.path_logits:
            self.sequence.path_logits.check(path, length)
            self.sequence.path_logits.commit(tokens)
        if self.alternates:
            note_accepted(self.sequence, self.tree, path)
        rows = [logits[path] for logits in self.logits] if self.sequence.keeps_logits else []
        return StepOutput(path, tokens, self.tree, match_length, *rows)

    def run(self, extent: int, sampling: Sampling) -> Tensor:
        """Run the step whole or part by part; returns what `commit` does, until the next run."""
        graphs = self.models.graphs
        is_whole = graphs is None or graphs.may_capture(("step", self.tree, extent, sampling))
        if is_whole and not self.runs_by_parts:
            return self.replay("step", partial(self, extent, sampling), extent, sampling)
        if graphs is None:
            self.target.prefetch()
        drafted = self.run_draft(extent, sampling)
        logits = self.run_target(extent)
        processed = self.process_target(logits)
        self.logits = logits, processed
        return self.run_verification(processed, drafted, sampling)

    def run_draft(self, extent: int, sampling: Sampling) -> DraftedTree:
        """`draft`, as a CUDA graph where that is possible."""
        return self.replay("draft", partial(self.draft, extent, sampling), extent, sampling)

    def run_target(self, extent: int) -> Tensor:
        """`forward_target`, as a CUDA graph where that is possible."""
        return self.replay("target", partial(self.forward_target, extent), extent)

    def run_verification(self, logits: Tensor, drafted: DraftedTree, sampling: Sampling) -> Tensor:
        """`verify` and `commit`, as a CUDA graph where that is possible."""

        def verify_and_commit(logits: Tensor, *drafted: Tensor) -> Tensor:
            """The part as a function of tensors alone, as a graph needs it."""
            return self.commit(self.verify(logits, DraftedTree(*drafted), sampling))

        inputs = (logits, *drafted)
        return self.replay("verify", verify_and_commit, sampling, logits.dtype, inputs=inputs)

    def replay(
        self,
        part: str,
        function: Callable[..., T],
        *settings: Hashable,
        inputs: tuple[Tensor, ...] = (),
    ) -> T:
        """`function(*inputs)`, as a CUDA graph if possible: one for each part and `settings`."""
        graphs, sequence = self.models.graphs, self.sequence
        if graphs is None or (part == "draft" and sequence.path_logits):
            with one_thread_of_torch(self.target.traits.is_compiled):
                return function(*inputs)
        if graphs.version != sequence.version:
            graphs.clear(sequence.version)
        state = partial(sequence.state_of_step, self.tree.size)
        return graphs((part, self.tree, *settings), function, state, inputs)


def catch_up(
    drafter: Drafter, sequence: SequenceState, tree: TokenTree, length: int, extent: int,
    in_first_pass: bool,
) -> int:  # fmt: skip
    """Before a step with `tree`, let the draft read the committed tokens that it has not read.

    It does so if the step drafts, or if there would be more of them than it reads at once. With
    `in_first_pass`, the step's own first draft pass reads them: returns how many those are, else 0.
    `length`: the slot of the root. Afterwards `sequence.num_unread` counts all tokens that the step
    may accept and the draft does not read; `note_accepted` takes off those that it did not accept.
    """
    num_passes, num_unread, num_left = tree.num_drafted_levels, sequence.num_unread, 0
    is_full = num_unread + tree.depth > CATCH_UP_TOKENS
    width = drafter.drafting.catch_up_width(num_unread, num_passes or is_full)
    if width and in_first_pass and not is_full:
        num_left = num_unread
    elif count := min(width, length):
        slots = torch.arange(length - count, length, device=sequence.tokens.device)
        drafter.catch_up(sequence, slots, extent)
    most = drafter.drafting.num_unread(tree.depth, num_passes)
    sequence.num_unread = most if num_passes or width else num_unread + most
    return num_left


def note_accepted(sequence: SequenceState, tree: TokenTree, path: Sequence[int]) -> None:
    """Take off what the last step, with `tree`, did not accept; `path`: the nodes that it did."""
    num_unread = sequence.num_unread - (tree.depth - len(path))
    # no pass reads a leaf, also one above the last level
    ends_in_leaf = not tree.child_count[path[-1]]
    sequence.num_unread = max(num_unread, min(ends_in_leaf, sequence.num_unread))
