"""Token trees in the formats of other engines. What each engine needs besides the tree is in docs/interchange.md."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sequoia_plan.artifacts.errors import ArgumentError, SequoiaPlanError
from sequoia_plan.artifacts.files import read_bytes, write_atomically
from sequoia_plan.artifacts.tree import TokenTree

LARGEST = 4096
"""Nodes. These formats grow with the square of the size, and engines take some hundred nodes at most."""
LARGEST_FILE = 1 << 28
GROWMAP_KEYS = ("roots", "branches", "Successors", "mask", "depth", "size")


def export_tree(tree: TokenTree, path: str | Path, form: str) -> None:
    """Write `tree` for another engine.

    Args:
        form: a key of FORMATS. A growmap becomes JSON (UMbreLLa's variant) if `path` ends in .json, else a torch file (Sequoia's).

    Raises:
        ArgumentError: for another format.
        SequoiaPlanError: if the tree is too large for the format or the file cannot be written.
    """
    if form not in FORMATS:
        raise ArgumentError(f"format: found {form!r}, expected one of {', '.join(FORMATS)}")
    if tree.size > LARGEST:
        raise SequoiaPlanError(f"a tree of {tree.size} nodes, expected at most {LARGEST} for the format {form}; solve with a smaller --budget")
    if form == "growmap" and Path(path).suffix.lower() != ".json":
        write_atomically(path, _torch_growmap(tree))
    else:
        content = FORMATS[form](tree)
        write_atomically(path, (content if isinstance(content, str) else json.dumps(content) + "\n").encode())


def import_tree(path: str | Path) -> TokenTree:
    """The tree in a file of another engine: Medusa choices, NxD token tree, growmap as JSON or saved by torch. The content tells which.

    Raises:
        SequoiaPlanError: if it is none of these, or not a tree, or contradicts itself.
    """
    expected = "Medusa choices, an NxD token tree or a growmap"
    try:
        return parse(read_bytes(path, expected, LARGEST_FILE))
    except SequoiaPlanError as error:
        raise error if str(error).startswith(f"{path}: ") else SequoiaPlanError(f"{path}: {error}") from error


def parse(data: bytes) -> TokenTree:
    """The tree in the content of such a file. Raises as `import_tree` does."""
    if data[:2] in (b"PK", b"\x80\x02"):  # a zip archive, or a pickle of protocol 2: what torch.save writes and wrote
        return from_growmap(_load_torch(data))
    if b'"__metadata__"' in data[:64]:
        raise SequoiaPlanError("this is a safetensors file; if it is a tree, it needs no import")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise SequoiaPlanError("neither JSON nor a file saved by torch; expected Medusa choices, an NxD token tree or a growmap") from error
    if isinstance(document, list):
        return from_medusa(document)
    if isinstance(document, dict) and "Successors" in document:
        return from_growmap(document)
    if isinstance(document, dict) and "0" in document:
        return from_nxd(document)
    raise SequoiaPlanError('unknown layout; expected a list of paths (Medusa), an object with "0" (NxD) or one with "Successors" (growmap)')


def to_medusa(tree: TokenTree) -> list[list[int]]:
    """One path a node, the root left out: the 0-based ranks from the root to it, in our node order."""
    paths: list[list[int]] = [[]]
    for parent, rank in zip(tree.parents[1:].tolist(), tree.ranks[1:].tolist(), strict=True):
        paths.append([*paths[parent], rank - 1])
    return paths[1:]


def from_medusa(paths: Any) -> TokenTree:
    """The inverse, in any order. Nodes on the way to a path need no path of their own (TensorRT-LLM takes leaves alone).

    Raises:
        SequoiaPlanError: if a path is not a list of ranks, or ranks have gaps.
    """
    children: list[dict[int, int]] = [{}]
    for index, path in enumerate(paths):
        if not isinstance(path, list) or not path or not all(_is_index(rank) for rank in path):
            raise SequoiaPlanError(f"Medusa choices: path {index} is {path!r:.60}, expected a non-empty list of 0-based ranks")
        node = 0
        for rank in path:
            if rank not in children[node]:
                _check_size(len(children) + 1)
                children[node][rank] = len(children)
                children.append({})
            node = children[node][rank]
    for below in children:
        if missing := set(range(len(below))) - below.keys():
            raise SequoiaPlanError(
                f"Medusa choices: siblings of the ranks {_some(sorted(below))}, expected 0 to {len(below) - 1}: rank {min(missing)} is missing"
            )
    return _from_children([[below[rank] for rank in range(len(below))] for below in children])


def to_nxd(tree: TokenTree) -> dict[str, list[str]]:
    """Children of every node that has any; the root is always there."""
    first, count = tree.first_child.tolist(), tree.child_count.tolist()
    return {str(node): [str(child) for child in range(first[node], first[node] + count[node])] for node in range(tree.size) if count[node] or node == 0}


def from_nxd(document: Mapping[str, Any]) -> TokenTree:
    """The inverse. Nodes may have any number for a name; leaves may be left out.

    Raises:
        SequoiaPlanError: if it is not one tree with the root "0".
    """
    number = {"0": 0}
    children: list[list[int]] = [[]]
    reached = ["0"]
    for name in reached:  # grows while it is read
        below = document.get(name, [])
        if not isinstance(below, list):
            raise SequoiaPlanError(f"NxD token tree: the children of {name!r:.60} are {below!r:.60}, expected a list")
        for child in below:
            label = str(child) if _is_index(child) else child
            if not isinstance(label, str) or not (label.isascii() and label.isdigit()):
                raise SequoiaPlanError(f"NxD token tree: {child!r:.60} is a child of {name!r:.60}, expected the number of a node")
            if label in number:
                raise SequoiaPlanError(f"NxD token tree: {label!r:.60} is a child twice or its own ancestor, expected one parent")
            _check_size(len(number) + 1)
            children[number[name]].append(len(number))
            number[label] = len(number)
            children.append([])
            reached.append(label)
    if lost := [name for name in document if name not in number]:
        raise SequoiaPlanError(f'NxD token tree: {lost[0]!r:.60} cannot be reached from "0"')
    return _from_children(children)


def to_growmap(tree: TokenTree) -> dict[str, Any]:
    """The Sequoia authors' layout in plain lists: nodes a level, child counts a level, children a node, mask, depth, size."""
    first, count, offsets = tree.first_child.tolist(), tree.child_count.tolist(), tree.level_offsets.tolist()
    levels = [list(range(offsets[level], offsets[level + 1])) for level in range(tree.depth)]
    return {
        "roots": levels,
        "branches": [[count[node] for node in level] for level in levels],
        "Successors": [list(range(first[node], first[node] + count[node])) for node in range(tree.size)],
        "mask": tree.attention_mask.astype(int).tolist(),
        "depth": tree.position_ids.tolist(),
        "size": tree.size,
    }


def from_growmap(document: Any) -> TokenTree:
    """The inverse; mask and depth may be torch tensors.

    Raises:
        SequoiaPlanError: if a key is missing, Successors is not a tree in breadth-first order, or another key contradicts it.
    """
    if not isinstance(document, Mapping) or any(key not in document for key in GROWMAP_KEYS):
        raise SequoiaPlanError(f"growmap: expected the keys {', '.join(GROWMAP_KEYS)}")
    successors = document["Successors"]
    if (
        not isinstance(successors, list)
        or not successors
        or not all(isinstance(below, list) and all(_is_index(child) for child in below) for below in successors)
    ):
        raise SequoiaPlanError("growmap: Successors must be a non-empty list of lists of node numbers")
    _check_size(len(successors))
    if [child for below in successors for child in below] != list(range(1, len(successors))):
        raise SequoiaPlanError("growmap: Successors must name the nodes 1, 2, ... once and in order (breadth-first, siblings adjacent)")
    tree = TokenTree(np.repeat(np.arange(-1, len(successors)), [1, *map(len, successors)]))
    for key, expected in to_growmap(tree).items():
        shape = {"mask": [tree.size, tree.size], "depth": [tree.size]}.get(key)
        found = document[key]
        if hasattr(found, "tolist") and list(found.shape) == shape:  # a tensor's shape is checked before it becomes a list
            found = found.tolist()
        if type(found) is not type(expected) or found != expected:
            raise SequoiaPlanError(f"growmap: {key} contradicts Successors")
    return tree


def to_dot(tree: TokenTree) -> str:
    """Graphviz: one line a node with its rank, one an edge."""
    nodes = [f'  {node} [label="{rank or "root"}"];' for node, rank in enumerate(tree.ranks.tolist())]
    edges = [f"  {parent} -> {node};" for node, parent in enumerate(tree.parents.tolist()) if node]
    return "\n".join(["digraph tree {", *nodes, *edges, "}", ""])


def to_networkx(tree: TokenTree) -> Any:
    """A networkx.DiGraph, edges from parent to child, the attributes `rank` and `depth` on nodes. Needs networkx."""
    import networkx

    graph = networkx.DiGraph()
    for node, (parent, rank, depth) in enumerate(zip(tree.parents.tolist(), tree.ranks.tolist(), tree.position_ids.tolist(), strict=True)):
        graph.add_node(node, rank=rank, depth=depth)
        if node:
            graph.add_edge(parent, node)
    return graph


FORMATS: dict[str, Callable[[TokenTree], Any]] = {"medusa": to_medusa, "nxd": to_nxd, "growmap": to_growmap, "dot": to_dot}


def _torch_growmap(tree: TokenTree) -> bytes:
    import torch  # only here and below: artifacts work without it

    document = to_growmap(tree)
    buffer = io.BytesIO()
    torch.save(document | {key: torch.tensor(document[key], dtype=torch.int64) for key in ("mask", "depth")}, buffer)
    return buffer.getvalue()


def _load_torch(data: bytes) -> Any:
    import torch

    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a restricted unpickler meets in a foreign file
        raise SequoiaPlanError("not a growmap that torch.load reads with weights_only=True") from error


def _from_children(children: list[list[int]]) -> TokenTree:
    order, parents = [0], [-1]
    for position, node in enumerate(order):  # grows while it is read: breadth-first
        order.extend(children[node])
        parents.extend([position] * len(children[node]))
    return TokenTree(np.array(parents))


def _is_index(value: Any) -> bool:
    return type(value) is int and value >= 0


def _check_size(nodes: int) -> None:
    if nodes > LARGEST:
        raise SequoiaPlanError(f"more than {LARGEST} nodes, expected at most that many in an exchange format")


def _some(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
