"""Verification by the kernels of `kernels.py`, for one tree on one CUDA device.

The tensor versions serve all other devices, and are the kernels' oracle.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.runtime.base.drawing import BLOCK, LAUNCH
from sequoia_plan.runtime.base.sampling import Sampling
from sequoia_plan.runtime.verify.acceptance import AcceptedPath
from sequoia_plan.runtime.verify.tree_index import TreeIndex

LOW_BIT = {torch.bfloat16: 16, torch.float16: 13}
"""The lowest bit in which two numbers of the dtype can differ when they are float32; else 0."""

FUSED_VERIFIERS = ("sequoia", "traversal")
"""The verifiers that have kernels, besides greedy verification."""


class FusedVerifier:
    """A tree in the form that the kernels read.

    `d2t` int64 [draft vocabulary].
    """

    def __init__(
        self,
        tree: TokenTree,
        device: torch.device | str,
        d2t: Tensor | None = None,
        vocabulary: int = 0,
        block: int = BLOCK,
    ) -> None:
        self.tree, self.block = tree, block
        index = TreeIndex.of(tree, device)
        self.paths, self.offsets = index.paths, index.offsets
        self.post_order, self.child_count = index.post_order, index.child_count
        inner = np.flatnonzero(tree.child_count)
        row_of_node = np.zeros(tree.size, np.int64)
        row_of_node[inner] = np.arange(inner.size)

        def tensor(values: Any) -> Tensor:
            """The values as int64, on the tree's device."""
            return torch.as_tensor(np.asarray(values, np.int64), device=device)

        self.inner_nodes, self.row_of_node = tensor(inner), tensor(row_of_node)
        self.first_child = tensor(tree.first_child)
        self.rounds = [(tensor(rows), tensor(ranks)) for rows, ranks in _rounds(tree)]
        self.has_d2t = d2t is not None
        if d2t is None:
            self.d2t = self.t2d = self.inner_nodes  # any tensor: the kernels do not read it
        else:
            self.d2t = d2t.to(device)
            self.t2d = torch.full((vocabulary,), -1, dtype=torch.int64, device=device)
            self.t2d[self.d2t] = torch.arange(d2t.numel(), device=device)
        self.max_children = _next_power_of_two(tree.branching)
        self.max_levels = _next_power_of_two(tree.depth)

    def greedy(self, logits: Tensor, tokens: Tensor) -> AcceptedPath:
        """`greedy.greedy` of the argmax of the logits.

        `logits` [size, vocabulary]; `tokens` int64 [size].
        """
        out = self._new_output(logits)
        with torch.cuda.device_of(logits):  # Triton launches on the current device
            kernels().greedy[(1,)](
                logits.argmax(-1), tokens, self.child_count, self.first_child, self.paths,
                self.offsets, out, self.tree.depth,
                MAX_CHILDREN=self.max_children, MAX_LEVELS=self.max_levels, **LAUNCH,
            )  # fmt: skip
        return _accepted_path(out)

    def verify(
        self,
        logits: Tensor,
        sampling: Sampling,
        draft_probs: Tensor,
        drawn: Tensor,
        uniforms: Tensor,
    ) -> AcceptedPath:
        """`verify` of the probabilities that `sampling` computes from the logits.

        `logits` [size, vocabulary]; `draft_probs` float [inner nodes, draft vocabulary]; `drawn`
        int64 [inner nodes, branching]; `uniforms` float64 [2].
        """
        has_children = bool(self.rounds)
        if sampling.verifier == "sequoia" or not has_children:
            launch = self._launch_sequoia
        else:
            launch = self._launch_traversal
        out = self._new_output(logits)
        tensors = (logits.contiguous(), draft_probs.contiguous(), drawn.contiguous())
        with torch.cuda.device_of(logits):  # Triton launches on the current device
            launch(*tensors, uniforms, sampling, out)
        return _accepted_path(out)

    def _launch_sequoia(
        self,
        logits: Tensor,
        draft_probs: Tensor,
        drawn: Tensor,
        uniforms: Tensor,
        sampling: Sampling,
        out: Tensor,
    ) -> None:
        """Run the kernel that walks from the root down; it writes `out`. Arguments: `verify`."""
        draft_vocabulary = draft_probs.shape[1] if self.rounds else 0
        max_logits, thresholds, totals = self.target_statistics(logits, sampling)
        kernels().sequoia[(1,)](
            logits, max_logits, thresholds, totals, draft_probs, drawn, uniforms, self.child_count,
            self.first_child, self.row_of_node, self.paths, self.offsets, self.t2d, self.d2t, out,
            logits.shape[1], draft_vocabulary, self.tree.branching, self.tree.depth,
            sampling.temperature, sampling.min_p,
            HAS_D2T=self.has_d2t, MAX_CHILDREN=self.max_children, MAX_LEVELS=self.max_levels,
            **self._constants(logits),
        )  # fmt: skip

    def _launch_traversal(
        self,
        logits: Tensor,
        draft_probs: Tensor,
        drawn: Tensor,
        uniforms: Tensor,
        sampling: Sampling,
        out: Tensor,
    ) -> None:
        """Run the kernels of `traversal`; the last one writes `out`. Arguments: `verify`.

        The first one starts the state of every inner node, each round then tests and rejects some
        children side by side, and the last one finds the end of the path.
        """
        num_inner, columns = self.inner_nodes.numel(), kernels().STATE_COLUMNS.value
        max_logits, thresholds, totals = self.target_statistics(logits, sampling)
        state = totals.new_empty(num_inner, columns)
        accept_probs = torch.empty(self.tree.size, dtype=torch.float64, device=logits.device)
        vocabularies = logits.shape[1], draft_probs.shape[1]
        filters, constants = (sampling.temperature, sampling.min_p), self._constants(logits)
        kernels().traversal_start[(num_inner,)](
            totals, draft_probs, drawn, self.inner_nodes, self.child_count, state,
            draft_probs.shape[1], self.tree.branching, **constants,
        )  # fmt: skip
        for rows, ranks in self.rounds:
            kernels().traversal_round[(rows.numel(),)](
                logits, max_logits, thresholds, draft_probs, drawn, self.inner_nodes,
                self.child_count, self.first_child, self.row_of_node, state, accept_probs,
                self.t2d, self.d2t, rows, ranks, *vocabularies, self.tree.branching, *filters,
                HAS_D2T=self.has_d2t, MAX_CHILDREN=self.max_children, **constants,
            )  # fmt: skip
        kernels().traversal_finish[(1,)](
            logits, max_logits, thresholds, draft_probs, uniforms, accept_probs, self.post_order,
            self.child_count, self.row_of_node, state, self.paths, self.offsets, self.t2d, out,
            self.tree.size, *vocabularies, self.tree.depth, *filters,
            HAS_D2T=self.has_d2t, MAX_NODES=_next_power_of_two(self.tree.size),
            MAX_LEVELS=self.max_levels, **constants,
        )  # fmt: skip

    def target_statistics(
        self, logits: Tensor, sampling: Sampling
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The largest logit, the filters' threshold and the total weight of every node.

        The thresholds of top-k and top-p are found by radix selection over `sort_keys`, four bits a
        pass, with a program for each node and block of tokens. The kernels' file has the words.
        `logits` [size, vocabulary].
        """
        size, vocabulary = logits.shape
        max_logits = logits.amax(-1).to(_arithmetic_dtype(logits))
        constants = self._constants(logits)
        num_blocks = -(-vocabulary // self.block)
        thresholds = logits.new_zeros(size, dtype=torch.int64)  # 0 keeps all

        def totals(min_p: float = 0.0) -> Tensor:
            """The total weight of the tokens from the threshold on."""
            masses = max_logits.new_empty(size, num_blocks)
            kernels().kept_masses[(size, num_blocks)](
                logits, max_logits, thresholds, masses, vocabulary, sampling.temperature, min_p,
                **constants,
            )  # fmt: skip
            return masses.sum(-1)

        def select(goals: Tensor, counts: bool) -> Tensor:
            """The highest thresholds that leave a mass, or a count, of `goals`."""
            selected = torch.zeros_like(thresholds)
            masses = max_logits.new_empty(size, num_blocks, kernels().NUM_DIGITS.value)
            for shift in range(28, LOW_BIT.get(logits.dtype, 0) - 4, -4):
                kernels().digit_masses[(size, num_blocks)](
                    logits, max_logits, selected, masses, shift, vocabulary, sampling.temperature,
                    COUNTS=counts, **constants,
                )  # fmt: skip
                kernels().select_digit[(size,)](
                    masses, goals, selected, shift, num_blocks,
                    MAX_BLOCKS=_next_power_of_two(num_blocks), **LAUNCH,
                )  # fmt: skip
            return selected

        if sampling.top_k:
            top_k = torch.full_like(max_logits, min(sampling.top_k, vocabulary))
            thresholds = select(top_k, counts=True)
        if sampling.top_p < 1:
            # the goal is reached among the tokens that top-k keeps, except for rounding
            top_p_thresholds = select(totals() * sampling.top_p, counts=False)
            thresholds = torch.maximum(thresholds, top_p_thresholds)
        return max_logits, thresholds, totals(sampling.min_p)

    def _constants(self, logits: Tensor) -> dict[str, Any]:
        """What all kernels are compiled for: arithmetic, block size and warps."""
        name = str(_arithmetic_dtype(logits)).removeprefix("torch.")
        return {"DTYPE": getattr(kernels().tl, name), "BLOCK": self.block, **LAUNCH}

    def _new_output(self, logits: Tensor) -> Tensor:
        """Memory for a result: the path, its number of nodes, and the bonus token."""
        return torch.empty(self.tree.depth + 2, dtype=torch.int64, device=logits.device)


def kernels() -> ModuleType:
    """`kernels.py`, which only a machine with Triton can import."""
    return importlib.import_module("sequoia_plan.runtime.verify.kernels")


def _rounds(tree: TokenTree) -> list[tuple[np.ndarray, np.ndarray]]:
    """The children that each round of `traversal` tests: their parents' rows, and their ranks.

    A child is tested one round after its earlier sibling, and a first child one round after its
    parent.
    """
    first_round = np.zeros(tree.size, np.int64)  # the round that tests a node's first child
    for node in range(1, tree.size):
        first_round[node] = first_round[tree.parents[node]] + tree.ranks[node]
    parents, ranks = tree.parents[1:], tree.ranks[1:] - 1
    rows = np.searchsorted(np.flatnonzero(tree.child_count), parents)
    rounds = first_round[parents] + ranks
    return [(rows[rounds == number], ranks[rounds == number]) for number in np.unique(rounds)]


def _arithmetic_dtype(logits: Tensor) -> torch.dtype:
    """The dtype that the kernels compute in."""
    return logits.dtype if logits.dtype == torch.float64 else torch.float32


def _accepted_path(out: Tensor) -> AcceptedPath:
    """The path, count and bonus token that `store_path` of the kernels wrote."""
    return AcceptedPath(out[:-2], out[-2:-1], out[-1:])


def _next_power_of_two(count: int) -> int:
    """The smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()
