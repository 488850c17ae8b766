"""The rejection of a child as a Triton kernel; `Residual._reject_by_tensors` is its oracle."""

from __future__ import annotations

import triton
import triton.language as tl

TINY, LARGEST = tl.constexpr(1.1754944e-38), tl.constexpr(3.4028234e38)


# fmt: off
@triton.jit(do_not_specialize=["first", "rank"])
def reject_child(
    p, q, uncovered_mass, child_terms, state, accept_probs, first, rank, num_nodes, vocabulary,
    BLOCK: tl.constexpr,
):
    """Test and reject the child of this `rank` of each node from place `first` on.

    There is one program for each node. The tensors are those of a `Residual` of so many nodes.
    """
    place = first + tl.program_id(0).to(tl.int64)
    terms, state = child_terms + rank * 5 * num_nodes + place, state + place
    p_child, q_child = tl.load(terms), tl.load(terms + num_nodes)
    inverse_d, q_factor = tl.load(terms + 2 * num_nodes), tl.load(terms + 3 * num_nodes)
    c, e = tl.load(state), tl.load(state + num_nodes)
    a, scale = tl.load(state + 2 * num_nodes), tl.load(state + 3 * num_nodes)
    accept_prob = tl.maximum(p_child - c * q_child - e, 0.0) * scale * inverse_d
    tl.store(accept_probs + rank * num_nodes + place, tl.minimum(accept_prob, 1.0))
    divisor = tl.maximum(scale, TINY)
    c = tl.minimum(c + q_factor / divisor, LARGEST)
    e += tl.load(terms + 4 * num_nodes) / divisor
    masses = tl.zeros([BLOCK], p.dtype.element_ty)
    for start in range(0, vocabulary, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        cells, inside = place * vocabulary + tokens, tokens < vocabulary
        p_of_block = tl.load(p + cells, mask=inside, other=0.0)
        q_of_block = tl.load(q + cells, mask=inside, other=0.0)
        masses += tl.maximum(p_of_block - c * q_of_block - e, 0.0)
    mass = (tl.sum(masses) + tl.load(uncovered_mass + place)) * scale
    total = tl.maximum((1 - a) + mass, TINY)
    tl.store(state, c)
    tl.store(state + num_nodes, e)
    tl.store(state + 2 * num_nodes, mass / total)
    tl.store(state + 3 * num_nodes, tl.minimum(scale / total, LARGEST))
