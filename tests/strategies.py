"""What hypothesis draws: trees and acceptance vectors, with the awkward cases likely."""

from __future__ import annotations

import itertools

from hypothesis import strategies as st

from sequoia_plan.artifacts import TokenTree

probabilities = st.one_of(st.just(0.0), st.just(1.0), st.sampled_from([0.1, 0.25, 0.5]), st.floats(0, 1))


@st.composite
def trees(draw, largest=24):
    """Any token tree of up to `largest` nodes."""
    size = draw(st.integers(1, largest))
    return TokenTree.from_parents([-1, *(draw(st.integers(0, node - 1)) for node in range(1, size))])


@st.composite
def acceptance_vectors(draw, longest=4, non_increasing=False):
    """p[1..B] with sum at most 1: zeros, ties and rises included unless `non_increasing`."""
    values = draw(st.lists(probabilities, min_size=1, max_size=longest))
    total = sum(values)
    values = [v / total for v in values] if total > 1 else values
    return sorted(values, reverse=True) if non_increasing else values


@st.composite
def rows_by_class(draw, longest=3, non_increasing=False, favouring=False):
    """p[level][class][rank] of one to three levels: with `favouring` the first b children of a node on the spine are as likely as of one off it."""
    ranks = draw(st.integers(1, longest))
    vectors = acceptance_vectors(longest=ranks, non_increasing=non_increasing)
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        spine, off = ([*vector, *[0.0] * (ranks - len(vector))] for vector in (draw(vectors), draw(vectors)))
        if favouring and any(a < b for a, b in zip(itertools.accumulate(spine), itertools.accumulate(off), strict=True)):
            kept = draw(st.integers(0, ranks))  # the spine has no more than these, so off it they are at most as likely
            off = [min(a, b) if rank < kept else 0.0 for rank, (a, b) in enumerate(zip(spine, off, strict=True))]
        rows.append([spine, off])
    return rows


def all_trees(size):
    """Every token tree of `size` nodes, each once: parents never decrease."""
    for choice in itertools.product(*(range(node) for node in range(1, size))):
        if all(a <= b for a, b in itertools.pairwise(choice)):
            yield TokenTree.from_parents([-1, *choice])
