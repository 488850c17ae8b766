"""The rejection of a child as a Triton kernel; `Residual._reject_by_tensors` is its oracle."""

from __future__ import annotations

import triton
import triton.language as tl

TINY, LARGEST = tl.constexpr(1.1754944e-38), tl.constexpr(3.4028234e38)


# fmt: off
@triton.jit(do_not_specialize=["first", "rank"])
def reject_child(
    p, q, uncovered_mass, child_terms, state, accept_probs, first, rank, num_nodes, vocabulary,
    masses, BLOCK: tl.constexpr, MAX_BLOCKS: tl.constexpr,
):
    """Test and reject the child of this `rank` of each node from row `first` on.

    The programs are [nodes, blocks of tokens]; a node's last one to end, by the count in `state`,
    adds up the masses of all. `masses` float [num_nodes, blocks]; the other tensors are those of a
    `Residual` of so many nodes.
    """
    row, block = first + tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_blocks = tl.num_programs(1)
    terms, state = child_terms + rank * 5 * num_nodes + row, state + row
    masses += row * num_blocks
    q_child, q_factor = tl.load(terms + num_nodes), tl.load(terms + 3 * num_nodes)
    old_c, old_e, scale = tl.load(state), tl.load(state + num_nodes), tl.load(state + 3 * num_nodes)
    divisor = tl.maximum(scale, TINY)
    c = tl.minimum(old_c + q_factor / divisor, LARGEST)
    e = old_e + tl.load(terms + 4 * num_nodes) / divisor
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    cells, inside = row * vocabulary + tokens, tokens < vocabulary
    p_of_block = tl.load(p + cells, mask=inside, other=0.0)
    q_of_block = tl.load(q + cells, mask=inside, other=0.0)
    tl.store(masses + block, tl.sum(tl.maximum(p_of_block - c * q_of_block - e, 0.0)))
    ended = state + 4 * num_nodes
    if tl.atomic_add(ended, 1.0) == num_blocks - 1:  # all others have read the state
        blocks = tl.arange(0, MAX_BLOCKS)
        all_masses = tl.load(masses + blocks, mask=blocks < num_blocks, other=0.0, volatile=True)
        mass = (tl.sum(all_masses) + tl.load(uncovered_mass + row)) * scale
        accept_prob = tl.maximum(tl.load(terms) - old_c * q_child - old_e, 0.0) * scale
        accept_prob *= tl.load(terms + 2 * num_nodes)
        tl.store(accept_probs + rank * num_nodes + row, tl.minimum(accept_prob, 1.0))
        total = tl.maximum((1 - tl.load(state + 2 * num_nodes)) + mass, TINY)
        tl.store(state, c)
        tl.store(state + num_nodes, e)
        tl.store(state + 2 * num_nodes, mass / total)
        tl.store(state + 3 * num_nodes, tl.minimum(scale / total, LARGEST))
        tl.store(ended, 0.0)
