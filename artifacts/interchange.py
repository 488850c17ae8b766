"""Token trees in the formats of other engines.

docs/interchange.md says what each engine needs beyond the tree.
"""

import json
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import ValidationError

from sequoia_plan.artifacts.errors import SequoiaPlanError
from sequoia_plan.artifacts.files import read_json, write_atomically
from sequoia_plan.artifacts.tree import TokenTree, children_of

MAX_NODES = 4096
"""These formats grow with the square of the size, and engines take some hundred nodes at most."""
EXPECTED = 'an NxD token tree (an object with "0") or a growmap (an object with "Successors")'


def export_tree(tree: TokenTree, path: str | Path, format_name: str) -> None:
    """Write a tree for another engine."""
    if tree.size > MAX_NODES:
        raise SequoiaPlanError(
            f"a tree of {tree.size} nodes, expected at most {MAX_NODES} for the format "
            f"{format_name}; solve with a smaller --budget"
        )
    write_atomically(path, (json.dumps(FORMATS[format_name](tree)) + "\n").encode())


def import_tree(path: str | Path) -> TokenTree:
    """Read the tree in a file of another engine; the content tells the format."""
    document = read_json(path, EXPECTED)
    try:
        return parse(document)
    except SequoiaPlanError as error:
        raise SequoiaPlanError(f"{path}: {error}") from error


def parse(document: Any) -> TokenTree:
    """Read the tree in the JSON document of another engine."""
    if isinstance(document, dict) and "Successors" in document:
        return from_growmap(document)
    if isinstance(document, dict) and "0" in document:
        return from_nxd(document)
    raise SequoiaPlanError(f"unknown layout; expected {EXPECTED}")


def to_nxd(tree: TokenTree) -> dict[str, list[str]]:
    """NxD token tree: a mapping from each node to its children, by node numbers as text.

    Leaves have no entry, except for a root without children.
    """
    return {
        str(node): list(map(str, children))
        for node, children in enumerate(children_of(tree))
        if children or node == 0
    }


def from_nxd(document: Any) -> TokenTree:
    """The tree of an NxD token tree, a mapping from each node to the list of its children.

    Nodes may be named by any numbers, also as text, but the root must be "0". Leaves may be left
    out.
    """
    by_name = _converted(document, dict[str, list[str | int]], "NxD token tree")
    queue, names, parents = ["0"], {"0"}, [-1]
    for node, name in enumerate(queue):  # breadth-first: the loop appends to the queue
        for child in map(str, by_name.get(name, ())):
            if not child.isdecimal() or child in names:
                raise SequoiaPlanError(
                    f"NxD token tree: found {child!r:.60} below {name!r:.60}, expected the number "
                    "of a node with no other parent"
                )
            names.add(child)
            queue.append(child)
            parents.append(node)
    if unreachable := by_name.keys() - names:
        raise SequoiaPlanError(
            f'NxD token tree: {min(unreachable)!r:.60} cannot be reached from "0"'
        )
    return TokenTree(np.array(parents))


def to_growmap(tree: TokenTree) -> dict[str, Any]:
    """A growmap, the layout of Sequoia's authors, in plain lists.

    roots has the nodes of each level, branches their numbers of children, Successors the children
    of each node, mask the attention mask, depth the level of each node, and size the number of
    nodes.
    """
    children = children_of(tree)
    levels = [list(range(*ends)) for ends in pairwise(tree.level_offsets.tolist())]
    return {
        "roots": levels,
        "branches": [[len(children[node]) for node in level] for level in levels],
        "Successors": children,
        "mask": tree.attention_mask.astype(int).tolist(),
        "depth": tree.position_ids.tolist(),
        "size": tree.size,
    }


def from_growmap(document: Mapping[str, Any]) -> TokenTree:
    """The tree of a growmap, the mapping that `to_growmap` gives.

    The tree is read from Successors, the children of each node, and all other keys must agree.
    """
    successors = _converted(document["Successors"], list[list[int]], "growmap: Successors")
    # each node is repeated once for each of its children, after -1 for the root's parent
    tree = TokenTree(np.repeat(np.arange(-1, len(successors)), [1, *map(len, successors)]))
    for key, value in to_growmap(tree).items():
        if document.get(key) != value:
            raise SequoiaPlanError(
                f"growmap: {key} is not as Successors says, with the nodes 1, 2, ... once and in "
                "order (breadth-first, siblings adjacent)"
            )
    return tree


FORMATS: dict[str, Callable[[TokenTree], Any]] = {"nxd": to_nxd, "growmap": to_growmap}
"""For each format of `export_tree`, the function that gives its JSON document."""


def _converted(document: Any, expected: Any, name: str) -> Any:
    """The document of a format, if it has the expected type."""
    try:
        return msgspec.convert(document, expected)
    except ValidationError as error:
        raise SequoiaPlanError(f"{name}: {error}") from error
