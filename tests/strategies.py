"""What hypothesis draws: trees, acceptance vectors and latencies, with the awkward cases likely."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import strategies as st
from msgspec import structs

from sequoia_plan.artifacts import Latency, Stream, TokenTree, Verification

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


@st.composite
def level_rows(draw, non_increasing):
    """One to three rows of up to four ranks."""
    rows = draw(st.lists(acceptance_vectors(longest=4, non_increasing=non_increasing), min_size=1, max_size=3))
    ranks = max(map(len, rows))
    return [row + [0.0] * (ranks - len(row)) for row in rows]


def has_proof(costs):
    """Whether the search ends with a proof where verification costs this."""
    return costs is None or costs.by_round == 0 or costs.rounds in ("tree", "level")


@st.composite
def latencies(draw, proven=False):
    """Curves that never decrease, for up to seven nodes, any kind of verification, and a target in memory or streamed.

    `proven`: verification of the kinds for which the search ends with a proof.
    """
    target, drafts = (np.cumsum(draw(st.lists(st.floats(0.0005, 0.02), min_size=7, max_size=7))).tolist() for _ in range(2))
    sizes, widths = {1, *draw(st.lists(st.integers(2, 7)))}, {2, *draw(st.lists(st.integers(1, 6)))}
    each = st.sampled_from([0.0, 0.0001, 0.002])
    costs = Verification(
        0.001, draw(each), draw(each), draw(each), draw(st.sampled_from(["tree", "level", "walk"] if proven else ["tree", "level", "walk", "path"]))
    )
    if proven and costs.rounds == "walk":
        costs = structs.replace(costs, by_round=0.0)  # greedy decoding: rejections cost nothing
    curves = {n: 0.02 + target[n - 1] for n in sorted(sizes)}, {n: drafts[n - 1] for n in sorted(widths)}
    stream = draw(st.sampled_from([None, *(Stream(seconds, 1000) for seconds in (0.01, 0.04, 0.06, 0.1, 1.0))]))
    return Latency(*curves, 0.001, 0, verification=draw(st.sampled_from([None, costs])), stream=stream)


def all_trees(size):
    """Every token tree of `size` nodes, each once: parents never decrease."""
    for choice in itertools.product(*(range(node) for node in range(1, size))):
        if all(a <= b for a, b in itertools.pairwise(choice)):
            yield TokenTree.from_parents([-1, *choice])
