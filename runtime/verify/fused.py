"""Verification by the kernels of `kernels.py`, for one tree on one CUDA device. The tensor versions are for every other device, and their oracle."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.runtime.verify.index import TreeIndex
from sequoia_plan.runtime.verify.verdict import Accepted

BLOCK, WARPS = 4096, 16
LOW_BIT = {torch.bfloat16: 16, torch.float16: 13}
"""The lowest bit that a number of the dtype has as float32."""
RULES = ("sequoia", "traversal")


def available(device: torch.device) -> bool:
    """Can kernels run on `device`? PyTorch for CUDA brings Triton along."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


@dataclass(frozen=True)
class Filters:
    """What of `Sampling` says how the target's law follows from its logits."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


class Fused:
    """A tree as the kernels read it.

    Args:
        covered: int64 [draft vocabulary], the target's token for each of the draft's; None if they are the same.
        vocabulary: the target's; not needed if they are the same.
        block: tokens that a program reads at once, a power of two.
    """

    def __init__(self, tree: TokenTree, device: torch.device | str, covered: Tensor | None = None, vocabulary: int = 0, block: int = BLOCK) -> None:
        self.tree, self.block = tree, block
        index = TreeIndex.of(tree, device)
        self.paths, self.offsets, self.post_order, self.child_count = index.paths, index.offsets, index.post_order, index.child_count
        inner = np.flatnonzero(tree.child_count)
        row_of, start = np.zeros(tree.size, np.int64), np.zeros(tree.size, np.int64)
        row_of[inner] = np.arange(inner.size)
        for node in range(1, tree.size):
            start[node] = start[tree.parents[node]] + tree.ranks[node]  # the round after the one that its parent judges it in

        def tensor(values: Any) -> Tensor:
            return torch.as_tensor(np.asarray(values, np.int64), device=device)

        self.inner, self.row_of, self.first_child = tensor(inner), tensor(row_of), tensor(tree.first_child)
        row = np.repeat(np.arange(inner.size), tree.child_count[inner])  # one entry a child
        rank = np.concatenate([np.arange(0), *map(np.arange, tree.child_count[inner])])
        turn = start[inner[row]] + rank
        self.rounds = [(tensor(row[turn == now]), tensor(rank[turn == now])) for now in np.unique(turn)]
        self.token_of, self.draft_of = self.inner, self.inner  # not read
        self.reduced = covered is not None
        if covered is not None:
            self.token_of = covered = covered.to(device)
            self.draft_of = torch.full((vocabulary,), -1, dtype=torch.int64, device=device)
            self.draft_of[covered] = torch.arange(covered.numel(), device=device)
        self.levels, self.children = _power(tree.depth), _power(tree.branching)

    def greedy(self, logits: Tensor, tokens: Tensor) -> Accepted:
        """As `greedy.greedy` of the logits' argmax: logits [size, vocabulary], tokens int64 [size]."""
        out = self._out(logits)
        kernels().greedy[(1,)](
            logits.contiguous(), tokens, self.child_count, self.first_child, self.paths, self.offsets, out, logits.shape[1], self.tree.depth,
            BLOCK=self.block, CHILDREN=self.children, LEVELS=self.levels, num_warps=WARPS,
        )  # fmt: skip
        return self._accepted(out)

    def verify(self, rule: str, logits: Tensor, filters: Filters, laws: Tensor, drawn: Tensor, uniforms: Tensor) -> Accepted:
        """As `verify` of the laws that `filters` make of logits [size, vocabulary]; the rest as there.

        Args:
            rule: "sequoia" or "traversal".
        """
        logits, laws, drawn, out = logits.contiguous(), laws.contiguous(), drawn.contiguous(), self._out(logits)
        number = logits.dtype if logits.dtype == torch.float64 else torch.float32
        vocabulary, draft_vocabulary = logits.shape[1], laws.shape[1] if self.rounds else 0
        law = (filters.temperature, filters.top_k, filters.top_p, filters.min_p)
        filtered = filters.top_k > 0 or filters.top_p < 1 or filters.min_p > 0
        numbers: dict[str, Any] = {"NUMBER": getattr(kernels().tl, str(number).removeprefix("torch.")), "BLOCK": self.block, "num_warps": WARPS}
        one_law = numbers | {"LOW_BIT": LOW_BIT.get(logits.dtype, 0), "FILTER": filtered}
        if rule == "sequoia" or not self.rounds:
            kernels().sequoia[(1,)](
                logits, laws, drawn, uniforms, self.child_count, self.first_child, self.row_of, self.paths, self.offsets, self.draft_of, self.token_of, out,
                vocabulary, draft_vocabulary, self.tree.branching, self.tree.depth, *law,
                REDUCED=self.reduced, CHILDREN=self.children, LEVELS=self.levels, **one_law,
            )  # fmt: skip
            return self._accepted(out)
        state = torch.empty(self.inner.numel(), 6, dtype=number, device=logits.device)
        floors = torch.empty(self.inner.numel(), dtype=torch.int64, device=logits.device)
        accepted = torch.empty(self.tree.size, dtype=torch.float64, device=logits.device)
        sizes = (vocabulary, draft_vocabulary, self.tree.branching)
        kernels().prepare[(self.inner.numel(),)](logits, laws, drawn, self.inner, self.child_count, state, floors, *sizes, *law, **one_law)
        for rows, ranks in self.rounds:
            kernels().judge[(rows.numel(),)](
                logits, laws, drawn, self.inner, self.child_count, self.first_child, self.row_of, state, floors, accepted, self.draft_of, self.token_of,
                rows, ranks, *sizes, filters.temperature, filters.min_p, REDUCED=self.reduced, CHILDREN=self.children, **numbers,
            )  # fmt: skip
        kernels().settle[(1,)](
            logits, laws, uniforms, accepted, self.post_order, self.child_count, self.row_of, state, floors, self.paths, self.offsets, self.draft_of, out,
            self.tree.size, vocabulary, draft_vocabulary, self.tree.depth, *law,
            REDUCED=self.reduced, NODES=_power(self.tree.size), LEVELS=self.levels, **one_law,
        )  # fmt: skip
        return self._accepted(out)

    def _out(self, logits: Tensor) -> Tensor:
        return torch.empty(self.tree.depth + 2, dtype=torch.int64, device=logits.device)

    def _accepted(self, out: Tensor) -> Accepted:
        return Accepted(out[:-2], out[-2:-1], out[-1:])


def race(logits: Tensor, temperature: float, count: int, bits: Tensor, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """The draft's laws float32 [nodes, vocabulary] of its logits, and `drawing.without_replacement` from them: int64 [nodes, count]."""
    laws = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    keys = torch.empty_like(laws)
    kernels().race[(logits.shape[0],)](logits.contiguous(), bits, laws, keys, logits.shape[1], temperature, BLOCK=block, num_warps=WARPS)
    return laws, keys.topk(count, -1).indices


def kernels() -> ModuleType:
    """`kernels.py`, which only a machine with Triton can import."""
    return importlib.import_module("sequoia_plan.runtime.verify.kernels")


def _power(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()
