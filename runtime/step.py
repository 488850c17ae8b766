"""One decoding step with a token tree: draft the tree, verify it with the target, commit a path."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from sequoia_plan.artifacts import ArgumentError, SequoiaPlanError, TokenTree
from sequoia_plan.artifacts.lookup import MAX_MATCH
from sequoia_plan.runtime.base.cache import round_up
from sequoia_plan.runtime.base.kernel_launch import (
    has_failed,
    kernel_or_tensors,
    kernels_available,
)
from sequoia_plan.runtime.base.lookup import look_up
from sequoia_plan.runtime.base.sampling import Sampling
from sequoia_plan.runtime.base.sequence import SequenceState
from sequoia_plan.runtime.base.tree_tensors import TreeTensors
from sequoia_plan.runtime.capture import (
    Graphs,
    can_capture,
    is_on_one_cuda_device,
    read_back,
    weight_addresses,
)
from sequoia_plan.runtime.draft.drafter import DraftedTree, Drafter, DraftPass, draft_tree
from sequoia_plan.runtime.draft.registry import make_drafter
from sequoia_plan.runtime.draft.unread import catch_up
from sequoia_plan.runtime.models import split_keys
from sequoia_plan.runtime.models.architecture import execution_device, rope_reason, text_config
from sequoia_plan.runtime.models.forward import TreeModel
from sequoia_plan.runtime.models.parallel import from_first, is_split, shared_seed
from sequoia_plan.runtime.models.prepacked import PrepackedLinear
from sequoia_plan.runtime.models.probe import probe
from sequoia_plan.runtime.models.vocabulary import shared_vocabulary, vocabulary_size
from sequoia_plan.runtime.verify import (
    VERIFIERS,
    AcceptedPath,
    TreeIndex,
    greedy,
)
from sequoia_plan.runtime.verify import verify as verify_tree
from sequoia_plan.runtime.verify.fused_verifier import FUSED_VERIFIERS, FusedVerifier
from sequoia_plan.runtime.verify.looked_up import looked_up_children, with_rows_of_tail

T = TypeVar("T")
EXTENT_MULTIPLE = {"cpu": 64, "cuda": 512}
"""Attention's extent is a multiple of so many slots: few shapes, little waste.

On CUDA each shape is a graph of its own, so beyond 1024 slots there are two shapes for each
doubling of the length."""

MAX_TREE_NODES = 4096
"""The mask and the paths of a tree grow with the square of its size."""

TARGET_NOT_FINITE, DRAFT_NOT_FINITE = -1, -2
"""A step returns one of these for the accepted count if that model's logits were not finite."""


class TreeStep:
    """One decoding step with one token tree, on fixed shapes.

    Calling it drafts a tree, runs one target pass over it, verifies it and commits the accepted
    path. Each of the four parts is a method of its own. The `run` methods do the same, as CUDA
    graphs where that is possible. Nothing in a step depends on values that the host must read.
    """

    can_split_keys: bool | None

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
        if backend is not None:
            _check_not_prepacked(target, draft)
        self.device = execution_device(target)
        self.drafter: Drafter | None = None
        drafts = any(t.num_drafted_levels for t in tree.portfolio.values())
        if draft is not None and drafts:
            self._check_same_device(draft)
            vocabulary, d2t = shared_vocabulary(target, draft, tokenizer, draft_tokenizer)
            self.drafter = make_drafter(target, draft, vocabulary, d2t, backend)
        layers = self.drafter.aux_hidden_state_layers if self.drafter else ()
        self.target = TreeModel(target, probe(target), aux_hidden_state_layers=layers)
        if backend is not None:
            self.target.compile(backend)
        self.models = [model for model in (target, draft) if model is not None]
        self.context = self.target.context
        self.sequence = SequenceState(self.device)
        self.verifiers = VERIFIERS
        self._set_up_capture(target, draft, captured)
        self._use_all(tree)

    def with_tree(self, tree: TokenTree) -> TreeStep:
        """A step with another tree that shares models, sequence and graphs with this one.

        Only one of the two can be in the middle of a sequence.
        """
        step = copy.copy(self)
        step._use_all(tree)
        return step

    def for_match(self, match_length: int) -> TreeStep:
        """The step for a text whose match (artifacts/lookup.py) has so many tokens."""
        shortest = max((s for s in self.by_match if s <= match_length), default=0)
        return self.by_match.get(shortest, self)

    @torch.no_grad()
    def __call__(self, extent: int, sampling: Sampling) -> Tensor:
        """One decoding step: draft a tree, verify it, commit the accepted path.

        Returns int64 [1 + 2 * depth].
        """
        self.target.prefetch()
        drafted = self.draft(extent, sampling)
        logits = self.forward_target(extent)
        accepted = self.verify(logits, drafted, sampling)
        return self.commit(accepted)

    def draft(self, extent: int, sampling: Sampling) -> DraftedTree:
        """Draft the tree; its tokens are then in the sequence.

        Where the target is split over several processes, all take the first one's tokens.
        """
        sequence = self.sequence
        if self.tree.looks_up:
            chain = sequence.lookup_chain[: self.spine.numel()]
            sequence.tokens.index_copy_(0, sequence.length + self.spine, chain)
        if not self.drafter or not self.passes:
            nothing = sequence.tokens[:0]  # an empty tensor on the right device
            return DraftedTree(nothing, nothing)
        columns = self.tensors.columns(sequence.length, extent)
        bits = self.random_bits(sampling)
        drafted = draft_tree(
            self.drafter, self.passes, sequence, columns, sampling, bits, self.branching
        )
        if is_split(self.target.model):
            slots = sequence.length + self.tensors.nodes
            tokens = from_first(self.target.model, sequence.tokens[slots])
            sequence.tokens.index_copy_(0, slots, tokens)
        return drafted

    def forward_target(self, extent: int) -> Tensor:
        """The target's pass over the tree: logits [size, vocabulary].

        If the draft reads hidden states of the target, the sequence has those of the tree's nodes
        afterwards.
        """
        sequence, tensors = self.sequence, self.tensors
        slots = sequence.length + tensors.nodes
        positions = sequence.length + tensors.offsets
        mask = tensors.mask.index_select(1, tensors.columns(sequence.length, extent))
        output = self.target(sequence.target, sequence.tokens[slots], positions, slots, mask)
        if output.hidden_states is not None:
            sequence.aux_hidden_states.index_copy_(0, tensors.nodes, output.hidden_states)
        return output.logits

    def verify(self, logits: Tensor, drafted: DraftedTree, sampling: Sampling) -> AcceptedPath:
        """The accepted path and the bonus token.

        Where the target is split over several processes, all use the first one's result. `logits`
        [size, vocabulary].
        """
        accepted = self._verify_locally(logits, drafted, sampling)
        if not is_split(self.target.model):
            return accepted
        # one tensor, so that one message carries all: the path, one count, one bonus token
        own_result = torch.cat([accepted.path, accepted.count, accepted.bonus])
        first_result = from_first(self.target.model, own_result)
        return AcceptedPath(first_result[:-2], first_result[-2:-1], first_result[-1:])

    def commit(self, accepted: AcceptedPath) -> Tensor:
        """Commit the accepted path to caches, tokens and length.

        Entries of the path after the last accepted node are moved, too; the next step overwrites
        them. Returns int64 [1 + 2 * depth].
        """
        sequence, length = self.sequence, self.sequence.length
        slots = length + accepted.path
        places = self.tensors.nodes[: self.tree.depth]  # 0, 1, ..., depth - 1
        # the root was committed before: the step adds the tokens after it, and the bonus token
        next_on_path = sequence.tokens[slots].roll(-1)
        added = torch.where(places == accepted.count - 1, accepted.bonus, next_on_path)
        sequence.target.commit(slots, length)
        count = accepted.count
        if self.drafter and (self.passes or self.chain_length):
            self.drafter.commit(sequence, accepted.path)
            count = count.where(sequence.draft.finite, DRAFT_NOT_FINITE)
        sequence.tokens.index_copy_(0, length + 1 + places, added)
        length += accepted.count
        count = count.where(sequence.target.finite, TARGET_NOT_FINITE)
        if not self.chain_length:
            return torch.cat([count, accepted.path, added])
        return torch.cat([count, accepted.path, added, self.look_up()])

    def look_up(self) -> Tensor:
        """Find the next step's lookup chain; returns int64 [1], the length of the match.

        It reads all slots, so that its shape is that of the sequence's memory.
        """
        sequence = self.sequence
        max_match = max(MAX_MATCH, *self.by_match)  # a profile counts matches up to MAX_MATCH
        match_length, chain = look_up(
            sequence.tokens, sequence.length, max_match, self.chain_length
        )
        sequence.lookup_chain[: self.chain_length] = chain
        return match_length

    @torch.no_grad()
    def prefill(self, prompt: Tensor, max_new_tokens: int, seed: int | None = None) -> None:
        """Start a sequence: both caches hold the prompt without its last token, the first root.

        `prompt` int64 [n].
        """
        self._check_prompt(prompt)
        sequence, drafter = self.sequence, self.drafter
        seed = shared_seed(self.target.model) if seed is None else seed
        sequence.generator.manual_seed(seed)
        self._reserve(min(prompt.numel() + max_new_tokens, self.context))
        sequence.tokens[: prompt.numel()] = prompt
        sequence.length.fill_(prompt.numel() - 1)
        sequence.num_unread = 0
        on_chunk = None
        if drafter:
            drafter.prefill(sequence.draft, prompt[:-1])
            on_chunk = partial(drafter.prefill_hidden_states, sequence.draft)
        self.target.prefill(sequence.target, prompt[:-1], on_chunk)

    def extent(self, length: int) -> int:
        """How many slots of the cache attention looks at, with the root in slot `length`.

        They include the whole tree. The number is rounded up, so that passes have few shapes. Where
        attention finds the end of the text on the device, it is the whole cache: one graph serves
        all lengths.
        """
        needed = length + self.tree.size
        on_cuda = bool(self.graphs) or self.device.type == "cuda"
        multiple = EXTENT_MULTIPLE["cuda" if on_cuda else "cpu"]
        if self.graphs:
            # a quarter of a power of two in (needed, 2 * needed]: two extents for each doubling
            multiple = max(multiple, (1 << needed.bit_length()) // 4)
            capacity = self.sequence.target.capacity
            if needed <= capacity >= split_keys.MIN_EXTENT and self.splits_keys():
                return capacity
        return round_up(needed, multiple)

    def splits_keys(self) -> bool:
        """Do all passes of a step read no keys after the tree, whatever the extent?"""
        if self.can_split_keys is None:  # asking walks over all modules: once for a tree
            self.can_split_keys = self._can_split_keys()
        return self.can_split_keys and not has_failed(split_keys.KERNELS_NAME)

    def _can_split_keys(self) -> bool:
        """What `splits_keys` says as long as attention's kernels compile."""
        tokens = max(self.tree.size, *(p.input_slots.numel() for p in self.passes), 1)
        if self.drafter and not self.drafter.splits_keys(tokens):
            return False
        return self.target.splits_keys(tokens)

    def refill_random_numbers(self, sampling: Sampling) -> None:
        """Generate the random numbers of the next step, so that the step only reads tensors."""
        if not sampling.greedy:
            bits = self.num_inner_nodes * self.bits_per_node(sampling)
            self.sequence.refill_random_numbers(bits)

    def bits_per_node(self, sampling: Sampling) -> int:
        """How many random numbers drawing one node's children takes."""
        if not self.drafter:
            return 0
        return sampling.drawing.columns(self.drafter.vocabulary, self.branching)

    def random_bits(self, sampling: Sampling) -> Tensor:
        """This step's random numbers: int32 [inner nodes, numbers for each]; 0 each if greedy."""
        columns = 0 if sampling.greedy else self.bits_per_node(sampling)
        bits = self.sequence.bits[: self.num_inner_nodes * columns]
        return bits.view(self.num_inner_nodes, columns)

    def launch(self, length: int, sampling: Sampling) -> Callable[[], list[int]]:
        """Start a step whose root is in slot `length` or before it."""
        if self.drafter and self.chain_length:
            catch_up(self.drafter, self.sequence, self.tree, length, self.extent(length))
        self.refill_random_numbers(sampling)
        return read_back(self.run(self.extent(length), sampling))

    def run(self, extent: int, sampling: Sampling) -> Tensor:
        """A step as one CUDA graph where that is possible, else part by part.

        It returns what `__call__` returns. The next call overwrites that tensor.
        """
        if self.graphs is None or self.may_capture("step", extent, sampling):
            return self.replay("step", lambda: self(extent, sampling), extent, sampling)
        drafted = self.run_draft(extent, sampling)
        logits = self.run_target(extent)
        return self.run_verification(logits, drafted, sampling)

    def run_draft(self, extent: int, sampling: Sampling) -> DraftedTree:
        """`draft`, as a CUDA graph where that is possible."""
        return self.replay("draft", lambda: self.draft(extent, sampling), extent, sampling)

    def run_target(self, extent: int) -> Tensor:
        """`forward_target`, as a CUDA graph where that is possible."""
        return self.replay("target", lambda: self.forward_target(extent), extent)

    def run_verification(self, logits: Tensor, drafted: DraftedTree, sampling: Sampling) -> Tensor:
        """`verify` and `commit`, as a CUDA graph where that is possible."""

        def verify_and_commit(logits: Tensor, draft_probs: Tensor, drawn: Tensor) -> Tensor:
            """The part as a function of tensors alone, as a graph needs it."""
            return self.commit(self.verify(logits, DraftedTree(draft_probs, drawn), sampling))

        inputs = (logits, drafted.draft_probs, drafted.drawn)
        return self.replay("verify", verify_and_commit, sampling, inputs=inputs)

    def replay(
        self,
        part: str,
        function: Callable[..., T],
        *settings: Hashable,
        inputs: tuple[Tensor, ...] = (),
    ) -> T:
        """`function(*inputs)`, as a CUDA graph where that is possible."""
        if self.graphs is None or part in self.not_captured:
            return function(*inputs)
        if self.graphs.version != self.sequence.version:
            self.graphs.clear(self.sequence.version)
        key = (part, self.tree, *settings)
        return self.graphs(
            key, function, lambda: self.sequence.state_of_step(self.tree.size), inputs
        )

    def may_capture(self, part: str, *settings: Hashable) -> bool:
        """True unless capture failed or is excluded for this part."""
        has_failed = self.graphs and (part, self.tree, *settings) in self.graphs.failed
        return part not in self.not_captured and not has_failed

    def uses_fused_verifier(self, sampling: Sampling) -> bool:
        """True if kernels that walk on the device verify the tree, and not tensor operations."""
        if self.fused_verifier is None or self.verifiers != VERIFIERS:
            return False
        name = _verifier_name(sampling)
        if name not in ("greedy", *FUSED_VERIFIERS) or has_failed(name):
            return False
        # the kernels know no child that is looked up, which only sampling tells from the others
        return sampling.greedy or not self.tree.looks_up

    def _verify_locally(
        self, logits: Tensor, drafted: DraftedTree, sampling: Sampling
    ) -> AcceptedPath:
        """The accepted path and the bonus token as this process computes them.

        Kernels verify where they can, else tensor operations do. `logits` [size, vocabulary].
        """
        verify_by_kernels = partial(self._verify_by_kernels, logits, drafted, sampling)
        verify_by_tensors = partial(self._verify_by_tensors, logits, drafted, sampling)
        if not self.uses_fused_verifier(sampling):
            return verify_by_tensors()
        return kernel_or_tensors(_verifier_name(sampling), verify_by_kernels, verify_by_tensors)

    def _verify_by_kernels(
        self, logits: Tensor, drafted: DraftedTree, sampling: Sampling
    ) -> AcceptedPath:
        """`_verify_locally` by kernels."""
        assert self.fused_verifier is not None
        sequence = self.sequence
        if sampling.greedy:
            tokens = sequence.tokens[sequence.length + self.tensors.nodes]
            return self.fused_verifier.greedy(logits, tokens)
        return self.fused_verifier.verify(
            sampling.verifier,
            logits,
            sampling,
            drafted.draft_probs,
            drafted.drawn,
            sequence.uniforms,
        )

    def _verify_by_tensors(
        self, logits: Tensor, drafted: DraftedTree, sampling: Sampling
    ) -> AcceptedPath:
        """`_verify_locally` by tensor operations."""
        sequence = self.sequence
        if sampling.greedy:
            tokens = sequence.tokens[sequence.length + self.tensors.nodes]
            return greedy(logits.argmax(-1), tokens, self.index)

        def target_probs(nodes: Tensor) -> Tensor:
            """int64 [k] -> float [k, vocabulary]: the target's probabilities after these nodes."""
            return sampling.target_probs(logits.index_select(0, nodes))

        verifier = self.verifiers[sampling.verifier]
        d2t = self.drafter.d2t if self.drafter else None
        looked_up = None
        draft_probs, drawn = drafted.draft_probs, drafted.drawn
        if self.tree.looks_up:
            looked_up = looked_up_children(
                self.index.parents, self.spine, sequence.lookup_chain, sampling.verifier
            )
            vocabulary = self.drafter.vocabulary if self.drafter else logits.shape[1]
            draft_probs, drawn = with_rows_of_tail(
                draft_probs, drawn, self.num_tail_rows, self.branching, vocabulary
            )
        return verify_tree(
            verifier,
            target_probs,
            draft_probs,
            drawn,
            self.index,
            sequence.uniforms,
            d2t,
            looked_up,
        )

    def _use_all(self, tree: TokenTree) -> None:
        """Set everything that depends on the tree, and on the trees that take its place."""
        spines = [int((t.classes == 0).sum()) for t in tree.by_match.values() if t.looks_up]
        self.by_match: dict[int, TreeStep] = {}
        self.chain_length = max(spines, default=1) - 1 if tree.by_match else 0
        # with trees by match, the next step's tree is known after this step only
        self.launches_ahead = bool(self.graphs) and not tree.by_match
        if tree.by_match:
            self.chain_length = max(self.chain_length, 1)
            self.sequence.reserve_lookup_chain(self.chain_length)
        self._use(tree)
        for shortest, other in tree.by_match.items():
            step = copy.copy(self)
            step._use(other)
            self.by_match[shortest] = step
        for step in self.by_match.values():
            step.by_match = self.by_match

    def _use(self, tree: TokenTree) -> None:
        """Set everything that depends on this one tree."""
        self._check_tree(tree)
        self.tree, drafter = tree, self.drafter
        self.branching = tree.branching  # a plain int, which a trace of a step takes as constant
        self.tensors = TreeTensors.of(tree, self.device, self.target.model.dtype)
        self.index = TreeIndex.of(tree, self.device)
        self.passes: tuple[DraftPass, ...] = drafter.passes(tree, self.tensors) if drafter else ()
        self.can_split_keys = None
        self.num_inner_nodes = sum(draft_pass.num_parents for draft_pass in self.passes)
        # inner nodes on a looked-up spine below the last draft pass
        self.num_tail_rows = int(np.count_nonzero(tree.child_count)) - self.num_inner_nodes
        spine = np.flatnonzero(tree.classes == 0)[1:]  # the nodes on the spine below the root
        self.spine = torch.as_tensor(spine.tolist(), dtype=torch.long, device=self.device)
        self.fused_verifier: FusedVerifier | None = None
        if kernels_available(self.device) and is_on_one_cuda_device(self.target.model):
            d2t = drafter.d2t if drafter else None
            # the target's vocabulary is read only where the draft's is another
            vocabulary = vocabulary_size(self.target.model) if d2t is not None else 0
            self.fused_verifier = FusedVerifier(tree, self.device, d2t, vocabulary)

    def _set_up_capture(self, target: Any, draft: Any, captured: bool | None) -> None:
        """Decide which parts of a step are captured as CUDA graphs."""
        if captured and self.device.type != "cuda":
            raise ArgumentError(
                f"captured: found {captured!r:.60}, and CUDA graphs need a CUDA device; "
                "leave it out"
            )
        possible = {
            "draft": draft is None or can_capture(draft),
            "target": can_capture(target),
            "verify": is_on_one_cuda_device(target),
        }
        possible["step"] = all(possible.values())
        impossible = {part for part, is_possible in possible.items() if not is_possible}
        self.not_captured: set[str] = set() if captured else impossible
        if captured is None:
            captured = possible["verify"] and (possible["draft"] or possible["target"])
        self.graphs = Graphs(self.device) if captured else None

    def _reserve(self, max_length: int) -> None:
        """Reserve memory for a sequence of up to `max_length` tokens, and for the tree after it."""
        sequence, drafter = self.sequence, self.drafter
        shares_cache = drafter is not None and drafter.drafting.shares_cache
        new_draft_cache = drafter.new_cache if drafter and not shares_cache else None
        steps = (self, *self.by_match.values())
        capacity = max(step.extent(max_length) for step in steps)
        sequence.reserve(capacity, self.target.new_cache, new_draft_cache)
        if shares_cache:
            sequence.draft = sequence.target
        if drafter and drafter.aux_hidden_state_layers:
            model = self.target.model
            width = len(drafter.aux_hidden_state_layers) * text_config(model).hidden_size
            max_size = max(step.tree.size for step in steps)
            sequence.reserve_aux_hidden_states(max_size, width, model.dtype)
        if self.graphs:
            sequence.note_weight_addresses(weight_addresses(self.models))

    def _check_same_device(self, draft: Any) -> None:
        """Raise SequoiaPlanError unless the draft computes where the target takes its input."""
        draft_device = execution_device(draft)
        if draft_device != self.device:
            raise SequoiaPlanError(
                f"draft: on {draft_device}, the target takes its input on {self.device}; move the "
                "draft there"
            )

    def _check_tree(self, tree: TokenTree) -> None:
        """Check that the draft can draft `tree`, and that the decoder can hold it.

        The draft's vocabulary limits the children of one node, some drafts limit the number of
        levels, and `MAX_TREE_NODES` limits the number of nodes.
        """
        drafter = self.drafter
        if drafter is None and tree.num_drafted_levels:
            raise SequoiaPlanError(
                f"a tree of {tree.size} nodes needs a draft model; only a tree of one node decodes "
                "without"
            )
        if drafter and tree.branching > drafter.vocabulary:
            raise SequoiaPlanError(
                f"tree: {tree.branching} children of one node, more than the draft's vocabulary "
                "holds"
            )
        max_depth = drafter.drafting.max_depth if drafter else None  # None: any depth
        if max_depth and tree.num_drafted_levels >= max_depth:
            raise SequoiaPlanError(
                f"tree: {tree.depth} levels, the draft reaches {max_depth}; solve with its own "
                f"profile, or with --depth {max_depth}"
            )
        if tree.size > MAX_TREE_NODES:
            raise SequoiaPlanError(
                f"tree: {tree.size} nodes, expected at most {MAX_TREE_NODES} to decode with; solve "
                "with a smaller --budget"
            )

    def _check_prompt(self, prompt: Tensor) -> None:
        """Check that the target has the prompt's tokens, and room for one more in its context.

        `prompt` int64 [n].
        """
        lowest, highest = int(prompt.min()), int(prompt.max())
        max_token_id = self.target.max_token_id
        if lowest < 0 or highest > max_token_id:
            wrong = highest if highest > max_token_id else lowest
            raise ArgumentError(
                f"prompt: found the token {wrong}, expected 0 to {max_token_id}, the target's "
                "embeddings; was it made by another tokenizer?"
            )
        if prompt.numel() >= self.context:
            raise SequoiaPlanError(
                f"prompt: {prompt.numel()} tokens, expected at most {self.context - 1} (the "
                f"model's context less one new token{rope_reason(text_config(self.target.model))}"
                "); shorten it"
            )


def _check_not_prepacked(*models: Any) -> None:
    """Refuse prepacked weights, which torch.compile cannot trace."""
    for model in models:
        modules = model.modules() if hasattr(model, "modules") else ()
        if any(isinstance(module, PrepackedLinear) for module in modules):
            raise SequoiaPlanError(
                "compile: the linear layers are prepacked for this processor, which torch.compile "
                'cannot trace; load the models with placement="resident", or do not compile'
            )


def _verifier_name(sampling: Sampling) -> str:
    """The name of the kernels that would verify: the verifier, or greedy."""
    return "greedy" if sampling.greedy else sampling.verifier
