"""Which drafted tokens to accept, so that the output follows the target's law exactly.

What `sequoia` (arXiv 2402.12374, Algorithm 1) does at a node depends on that node alone, not on how it was reached. So
all nodes are judged at once, child by child, and the accepted path is read off afterwards: a fixed sequence of tensor
operations on fixed shapes, with no decision on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.runtime.sampling import draw


@dataclass(frozen=True)
class TreeIndex:
    """A token tree's structure as int64 tensors on one device.

    Args:
        size, depth: nodes and levels.
        inner: [inner], the nodes that have children.
        inner_row: [size], each node's place in `inner`; 0 for a leaf.
        first_child, child_count: [size].
        holders: for each rank, the places in `inner` of the nodes that have a child of that rank.
    """

    size: int
    depth: int
    inner: Tensor
    inner_row: Tensor
    first_child: Tensor
    child_count: Tensor
    holders: tuple[Tensor, ...]

    @classmethod
    def of(cls, tree: TokenTree, device: torch.device | str = "cpu") -> TreeIndex:
        """The structure of `tree` on `device`."""

        def tensor(values: object) -> Tensor:
            return torch.as_tensor(np.asarray(values, np.int64), device=device)

        inner = np.flatnonzero(tree.child_count)
        inner_row = np.zeros(tree.size, np.int64)
        inner_row[inner] = np.arange(inner.size)
        holders = tuple(tensor(np.flatnonzero(tree.child_count[inner] > rank)) for rank in range(tree.branching))
        return cls(tree.size, tree.depth, tensor(inner), tensor(inner_row), tensor(tree.first_child), tensor(tree.child_count), holders)


@dataclass(frozen=True)
class Accepted:
    """What a step yields, in fixed shapes.

    Args:
        path: int64 [depth], the accepted nodes from the root on, padded with the root.
        count: int64 [1], how many nodes of `path` are accepted, the root included.
        bonus: int64 [1], the token the target adds after the last of them.
    """

    path: Tensor
    count: Tensor
    bonus: Tensor


def greedy(choices: Tensor, tokens: Tensor, index: TreeIndex) -> Accepted:
    """Temperature 0: follow the child that holds the target's choice while there is one.

    Args:
        choices: int64 [size], the target's most probable token after each node.
        tokens: int64 [size], each node's token; siblings differ.
    """
    ranks = torch.arange(len(index.holders), device=tokens.device)
    children = (index.first_child[:, None] + ranks).clamp(max=index.size - 1)
    exists = ranks < index.child_count[:, None]
    path, count = _descend(exists & (tokens[children] == choices[:, None]), index)
    return Accepted(path, count, choices[path[count - 1]])


def sequoia(target: Tensor, draft: Tensor, drawn: Tensor, index: TreeIndex, uniforms: Tensor, covered: Tensor | None = None) -> Accepted:
    """Sequoia verification for children drawn without replacement.

    Args:
        target: float [size, vocabulary], the target's law after each node.
        draft: float [inner, draft vocabulary], the law each inner node's children were drawn from.
        drawn: int64 [inner, branching], the children's tokens as indices into the draft's vocabulary, in draw order.
        uniforms: float [inner * branching + 1] in [0, 1): one for each child, the last for the bonus token.
        covered: int64 [draft vocabulary], the target's token for each of the draft's; None if they are the same.
    """
    if not index.holders:
        path, count = _descend(target.new_zeros((index.size, 0), dtype=torch.bool), index)
        return Accepted(path, count, draw(target[0], uniforms[-1]).view(1))
    accept, inside, outside = judge(target, draft, drawn, index, covered)
    hits = torch.zeros((index.size, accept.shape[1]), dtype=torch.bool, device=accept.device)
    hits[index.inner] = uniforms[:-1].view_as(accept) < accept
    path, count = _descend(hits, index)
    last = path[count - 1]
    law = residual_law(target, inside, outside, last, index, covered)
    return Accepted(path, count, draw(law, uniforms[-1]).view(1))


def judge(target: Tensor, draft: Tensor, drawn: Tensor, index: TreeIndex, covered: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Algorithm 1 at every inner node at once: R = target's law, D = draft's; for each child s in draw order
    accept with min(1, R[s] / D[s]), else R <- norm(max(R - D, 0)), D[s] <- 0, D <- norm(D), and once the draft's
    support is exhausted D is uniform over the undrawn tokens.

    Returns:
        accept: float [inner, branching], each child's probability of acceptance once its elder siblings are rejected;
            0 where there is no child.
        inside: float [inner, draft vocabulary], R on the draft's vocabulary after the last child.
        outside: float [inner, 1], R / target's law on the rest of the vocabulary, which rejections only rescale.
    """
    laws = target[index.inner]
    inside = laws if covered is None else laws[:, covered]
    uncovered = (laws.sum(-1, keepdim=True) - inside.sum(-1, keepdim=True)).clamp(min=0) if covered is not None else None
    outside = torch.ones_like(laws[:, :1])
    inside, remaining = inside.clone(), draft.clone()
    undrawn = torch.ones_like(draft, dtype=torch.bool)
    accept = draft.new_zeros(drawn.shape)
    smallest = torch.finfo(draft.dtype).tiny
    for rank, rows in enumerate(index.holders):
        child = drawn[rows, rank][:, None]
        r, d = inside[rows], remaining[rows]
        r_child, d_child = r.gather(1, child), d.gather(1, child)
        accept[rows, rank] = torch.where(d_child > 0, (r_child / d_child).clamp(max=1), (r_child > 0).to(d.dtype))[:, 0]
        r = (r - d).clamp(min=0)
        mass = r.sum(-1, keepdim=True) if uncovered is None else r.sum(-1, keepdim=True) + uncovered[rows] * outside[rows]
        mass = mass.clamp(min=smallest)  # 0 only where the child was certain to be accepted
        inside[rows], outside[rows] = r / mass, outside[rows] / mass
        free = undrawn[rows].scatter(1, child, False)
        d = d.scatter(1, child, 0.0)
        d = torch.where(d.sum(-1, keepdim=True) > 0, d, free.to(d.dtype))
        undrawn[rows], remaining[rows] = free, d / d.sum(-1, keepdim=True).clamp(min=smallest)
    return accept, inside, outside


def residual_law(target: Tensor, inside: Tensor, outside: Tensor, node: Tensor, index: TreeIndex, covered: Tensor | None = None) -> Tensor:
    """float [vocabulary]: the bonus token's law after `node` (int64 [1]), all its children rejected; the target's at a leaf."""
    row = index.inner_row[node]
    law = target[node][0]
    rest = inside[row][0] if covered is None else (law * outside[row][0]).index_copy(0, covered, inside[row][0])
    return torch.where(index.child_count[node] > 0, rest, law)


def _descend(hits: Tensor, index: TreeIndex) -> tuple[Tensor, Tensor]:
    """Follow each node's first hit (bool [size, branching]) from the root; path [depth] and count [1] of `Accepted`."""
    none = index.size
    ranks = torch.arange(hits.shape[1] + 1, device=hits.device)
    first = torch.where(torch.nn.functional.pad(hits, (0, 1), value=True), ranks, ranks[-1]).amin(-1)
    chosen = torch.where(first < hits.shape[1], index.first_child + first, none)
    chosen = torch.nn.functional.pad(chosen, (0, 1), value=none)
    nodes = [torch.zeros(1, dtype=torch.long, device=hits.device)]
    for _ in range(index.depth - 1):
        nodes.append(chosen[nodes[-1]])
    path = torch.cat(nodes)
    accepted = path < none
    return path.where(accepted, 0), accepted.sum(0, keepdim=True)
