"""What hypothesis draws: trees, acceptance vectors and latencies, with awkward cases likely."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import strategies as st

from sequoia_plan.artifacts import Latency, StreamCost, TokenTree, VerificationCost

probabilities = st.one_of(
    st.just(0.0), st.just(1.0), st.sampled_from([0.1, 0.25, 0.5]), st.floats(0, 1)
)


@st.composite
def trees(draw, largest=24):
    """Any token tree of up to `largest` nodes."""
    size = draw(st.integers(1, largest))
    return TokenTree.from_parents(
        [-1, *(draw(st.integers(0, node - 1)) for node in range(1, size))]
    )


@st.composite
def acceptance_vectors(draw, longest=4, non_increasing=False):
    """p[1..B] with sum at most 1: zeros, ties and rises included unless `non_increasing`."""
    values = draw(st.lists(probabilities, min_size=1, max_size=longest))
    total = sum(values)
    values = [v / total for v in values] if total > 1 else values
    return sorted(values, reverse=True) if non_increasing else values


@st.composite
def rows_by_class(draw, longest=3, non_increasing=False, favouring=False):
    """p[level][class][rank] of one to three levels.

    With `favouring`, for every b one of the first b children is accepted at least as likely if the
    parent is on the spine as if it is off it.
    """
    ranks = draw(st.integers(1, longest))
    vectors = acceptance_vectors(longest=ranks, non_increasing=non_increasing)
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        spine, off_spine = (padded(vector, ranks) for vector in (draw(vectors), draw(vectors)))
        if favouring and not favours(spine, off_spine):
            # Off the spine only the first few ranks remain, each at most as likely as on it.
            ranks_left = draw(st.integers(0, ranks))
            off_spine = [
                min(p_spine, p_off) if rank < ranks_left else 0.0
                for rank, (p_spine, p_off) in enumerate(zip(spine, off_spine, strict=True))
            ]
        rows.append([spine, off_spine])
    return rows


def padded(vector, ranks):
    """The vector with zeros up to `ranks` entries."""
    return [*vector, *[0.0] * (ranks - len(vector))]


def favours(spine, off_spine):
    """Whether every sum of the first entries is at least as large on the spine as off it."""
    sums = zip(itertools.accumulate(spine), itertools.accumulate(off_spine), strict=True)
    return all(on_spine >= off for on_spine, off in sums)


@st.composite
def level_rows(draw, non_increasing):
    """One to three rows of up to four ranks."""
    vectors = acceptance_vectors(longest=4, non_increasing=non_increasing)
    rows = draw(st.lists(vectors, min_size=1, max_size=3))
    ranks = max(map(len, rows))
    return [padded(row, ranks) for row in rows]


@st.composite
def latencies(draw):
    """Curves that never decrease, for up to seven nodes, with any verification.

    The target is in memory or streamed.
    """
    increments = st.lists(st.floats(0.0005, 0.02), min_size=7, max_size=7)
    target, drafts = (np.cumsum(draw(increments)).tolist() for _ in range(2))
    sizes = {1, *draw(st.lists(st.integers(2, 7)))}
    widths = {2, *draw(st.lists(st.integers(1, 6)))}
    costs = VerificationCost(0.001, draw(st.sampled_from([0.0, 0.0001, 0.002])))
    target_seconds = {n: 0.02 + target[n - 1] for n in sorted(sizes)}
    draft_seconds = {n: drafts[n - 1] for n in sorted(widths)}
    streams = [StreamCost(seconds, 1000) for seconds in (0.01, 0.04, 0.06, 0.1, 1.0)]
    stream = draw(st.sampled_from([None, *streams]))
    verification = draw(st.sampled_from([None, costs]))
    return Latency(
        target_seconds, draft_seconds, 0.001, 0, verification=verification, stream=stream
    )


def all_trees(size):
    """Every token tree of `size` nodes, each once: parents never decrease."""
    for choice in itertools.product(*(range(node) for node in range(1, size))):
        if all(a <= b for a, b in itertools.pairwise(choice)):
            yield TokenTree.from_parents([-1, *choice])
