"""How far `traversal` gets in a tree where `sequoia` verifies the same draws."""

from collections.abc import Callable

import torch
from torch import Tensor

from sequoia_plan.runtime.verify import VERIFIERS, DrawnTree, TreeIndex, traversal


def adding_to(reached: Tensor) -> Callable[[DrawnTree], None]:
    """A function for `TreeVerifier.observe`, which adds to `reached` what each drawn tree gives.

    `reached` float64 [2, depth]: the probabilities that the accepted path gets to each level, of
    `sequoia` and of `traversal`, on the same draws.
    """

    def add(tree: DrawnTree) -> None:
        """Add the probabilities of one drawn tree."""
        index, residual = tree.index, traversal.residual_after_children(tree)
        subtree_probs = traversal.subtree_probs(residual, index).double().cpu()
        levels = index.levels.cpu()  # of each node
        end_probs = torch.zeros_like(reached[0])  # that sequoia's path ends on each level
        end_probs.index_add_(0, levels, VERIFIERS["sequoia"](tree).end_probs.cpu())
        # the path gets to a level if it ends there or below
        reached[0] += end_probs.flip(0).cumsum(0).flip(0)
        reached[1].index_add_(0, levels, path_probs(subtree_probs, index))

    return add


def path_probs(subtree_probs: Tensor, index: TreeIndex) -> Tensor:
    """float64 [size]: the probability that `traversal`'s accepted path goes through each node.

    It is averaged over what is drawn below the node. `subtree_probs` float64 [size].
    """
    # for each node, the probability that no earlier sibling's subtree holds the path's end
    passed_by = torch.ones_like(subtree_probs)
    parents = index.parents.tolist()
    # the parent of node n is parents[n - 1]; siblings have consecutive numbers
    for node in range(2, index.size):
        if parents[node - 1] == parents[node - 2]:
            passed_by[node] = passed_by[node - 1] * (1 - subtree_probs[node - 1])
    return subtree_probs * passed_by[index.paths.cpu()].prod(-1)
