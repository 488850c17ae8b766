"""What hypothesis draws: trees, acceptance vectors and latencies, with awkward cases likely; also
all small trees, and trees that look up."""

import itertools

import numpy as np
from hypothesis import strategies as st

from sequoia_plan.artifacts import Acceptance, Latency, StreamCost, TokenTree, VerificationCost

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
def rates(draw, longest=4, non_increasing=False, favouring=False):
    """Rates as in `Acceptance`, of one to three levels and up to `longest` ranks.

    With `favouring`, for every b one of the first b children is accepted at least as likely if the
    parent is on the spine as if it is off it.
    """
    ranks = draw(st.integers(1, longest))
    vectors = acceptance_vectors(longest=ranks, non_increasing=non_increasing)
    num_levels, classes = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    rows = np.zeros((num_levels, classes, ranks))
    for row in rows.reshape(-1, ranks):
        vector = draw(vectors)
        row[: len(vector)] = vector
    if favouring and classes > 1:
        sums = rows.cumsum(-1)
        is_favoured = (sums[:, 0] >= sums[:, 1]).all(-1)
        rows[~is_favoured, 1] = rows[~is_favoured].min(1)
    return rows


@st.composite
def latencies(draw):
    """Curves that never decrease, for up to seven nodes, in memory or streamed."""
    increments = st.lists(st.floats(0.0005, 0.02), min_size=7, max_size=7)
    target, drafts = (np.cumsum(draw(increments)).tolist() for _ in range(2))
    sizes = {1, *draw(st.lists(st.integers(2, 7)))}
    widths = {2, *draw(st.lists(st.integers(1, 6)))}
    cost = VerificationCost(0.001, draw(st.sampled_from([0.0, 0.0001, 0.002])))
    streams = [StreamCost(seconds, 1000) for seconds in (0.01, 0.04, 0.06, 0.1, 1.0)]
    return Latency(
        {n: 0.02 + target[n - 1] for n in sorted(sizes)},
        {n: drafts[n - 1] for n in sorted(widths)},
        0.001,
        verification=draw(st.sampled_from([None, cost])),
        stream=draw(st.sampled_from([None, *streams])),
    )


def looking_up(*parents):
    """The tree with these parents whose spine is looked up."""
    return TokenTree(TokenTree.from_parents([-1, *parents]).parents, looks_up=True)


def all_trees(size):
    """Every token tree of `size` nodes, each once: parents never decrease."""
    for choice in itertools.product(*(range(node) for node in range(1, size))):
        if all(a <= b for a, b in itertools.pairwise(choice)):
            yield TokenTree.from_parents([-1, *choice])


def at_depth(rates, depth, branching=None):
    """Rates, as `Acceptance.given` takes them, for trees of this depth."""
    return Acceptance.given(rates).at_depth(depth, branching)


def places(document, path=()):
    """Every place in a document of lists and mappings."""
    yield path
    items = enumerate(document) if isinstance(document, list) else ()
    for key, item in document.items() if isinstance(document, dict) else items:
        yield from places(item, (*path, key))
