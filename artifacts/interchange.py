"""Token trees in the formats of other engines.

docs/interchange.md says what each engine needs beyond the tree.
"""

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

MAX_NODES = 4096
"""These formats grow with the square of the size, and engines take some hundred nodes at most."""
MAX_FILE_BYTES = 1 << 28
GROWMAP_KEYS = ("roots", "branches", "Successors", "mask", "depth", "size")
GROWMAP_TENSORS = ("mask", "depth")
TORCH_SIGNATURES = (b"PK", b"\x80\x02")
"""First bytes of files by torch.save: a zip archive, or in old versions a pickle of protocol 2."""


def export_tree(tree: TokenTree, path: str | Path, format_name: str) -> None:
    """Write a tree for another engine."""
    if format_name not in FORMATS:
        raise ArgumentError(f"format: found {format_name!r}, expected one of {', '.join(FORMATS)}")
    if tree.size > MAX_NODES:
        raise SequoiaPlanError(
            f"a tree of {tree.size} nodes, expected at most {MAX_NODES} for the format "
            f"{format_name}; solve with a smaller --budget"
        )
    if format_name == "growmap" and Path(path).suffix.lower() != ".json":
        write_atomically(path, _growmap_as_torch_file(tree))
        return
    content = FORMATS[format_name](tree)
    text = content if isinstance(content, str) else json.dumps(content) + "\n"
    write_atomically(path, text.encode())


def import_tree(path: str | Path) -> TokenTree:
    """Read the tree in a file of another engine.

    The file holds Medusa choices, an NxD token tree, or a growmap as JSON or saved by torch; the
    content tells which.
    """
    expected = "Medusa choices, an NxD token tree or a growmap"
    try:
        return parse(read_bytes(path, expected, MAX_FILE_BYTES))
    except SequoiaPlanError as error:
        if str(error).startswith(f"{path}: "):
            raise
        raise SequoiaPlanError(f"{path}: {error}") from error


def parse(data: bytes) -> TokenTree:
    """Read the tree in the content of another engine's file; the content tells the format."""
    if data.startswith(TORCH_SIGNATURES):
        return from_growmap(_load_torch_file(data))
    if b'"__metadata__"' in data[:64]:
        raise SequoiaPlanError("this is a safetensors file; if it is a tree, it needs no import")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise SequoiaPlanError(
            "neither JSON nor a file saved by torch; expected Medusa choices, an NxD token tree or "
            "a growmap"
        ) from error
    if isinstance(document, list):
        return from_medusa(document)
    if isinstance(document, dict) and "Successors" in document:
        return from_growmap(document)
    if isinstance(document, dict) and "0" in document:
        return from_nxd(document)
    raise SequoiaPlanError(
        'unknown layout; expected a list of paths (Medusa), an object with "0" (NxD) or one with '
        '"Successors" (growmap)'
    )


def to_medusa(tree: TokenTree) -> list[list[int]]:
    """Medusa choices: for each node but the root, the 0-based ranks on the path to it.

    The nodes are in the order of the tree.
    """
    paths: list[list[int]] = [[]]
    for parent, rank in zip(tree.parents[1:].tolist(), tree.ranks[1:].tolist(), strict=True):
        paths.append([*paths[parent], rank - 1])
    return paths[1:]


def from_medusa(paths: Any) -> TokenTree:
    """The tree of Medusa choices: a list of paths, each of the 0-based ranks from the root on.

    The paths may be in any order. Inner nodes need no path of their own, because TensorRT-LLM takes
    the paths of leaves alone.
    """
    child_by_rank: list[dict[int, int]] = [{}]  # for each node, in the order of their discovery
    for index, path in enumerate(paths):
        if not isinstance(path, list) or not path or not all(_is_index(rank) for rank in path):
            raise SequoiaPlanError(
                f"Medusa choices: path {index} is {path!r:.60}, expected a non-empty list of "
                "0-based ranks"
            )
        node = 0
        for rank in path:
            if rank not in child_by_rank[node]:
                new_node = len(child_by_rank)
                _check_size(new_node + 1)
                child_by_rank[node][rank] = new_node
                child_by_rank.append({})
            node = child_by_rank[node][rank]
    for siblings in child_by_rank:
        missing_ranks = set(range(len(siblings))) - siblings.keys()
        if missing_ranks:
            raise SequoiaPlanError(
                f"Medusa choices: siblings of the ranks {_shortened(sorted(siblings))}, expected "
                f"0 to {len(siblings) - 1}: rank {min(missing_ranks)} is missing"
            )
    children = [[siblings[rank] for rank in range(len(siblings))] for siblings in child_by_rank]
    return _from_children(children)


def to_nxd(tree: TokenTree) -> dict[str, list[str]]:
    """NxD token tree: a mapping from each node to its children, by node numbers as text.

    Leaves have no entry, except for a root without children.
    """
    return {
        str(node): [str(child) for child in children]
        for node, children in enumerate(_children(tree))
        if children or node == 0
    }


def from_nxd(document: Mapping[str, Any]) -> TokenTree:
    """The tree of an NxD token tree, a mapping from each node to the list of its children.

    Nodes may be named by any numbers, as text, but the root must be "0". Leaves may be left out.
    """
    node_by_name = {"0": 0}
    children: list[list[int]] = [[]]
    queue = ["0"]
    for name in queue:  # the loop appends to the queue
        child_names = document.get(name, [])
        if not isinstance(child_names, list):
            raise SequoiaPlanError(
                f"NxD token tree: the children of {name!r:.60} are {child_names!r:.60}, "
                "expected a list"
            )
        for child in child_names:
            child_name = str(child) if _is_index(child) else child
            is_text = isinstance(child_name, str)
            if not is_text or not (child_name.isascii() and child_name.isdigit()):
                raise SequoiaPlanError(
                    f"NxD token tree: {child!r:.60} is a child of {name!r:.60}, expected the "
                    "number of a node"
                )
            if child_name in node_by_name:
                raise SequoiaPlanError(
                    f"NxD token tree: {child_name!r:.60} is a child twice or its own ancestor, "
                    "expected one parent"
                )
            new_node = len(node_by_name)
            _check_size(new_node + 1)
            children[node_by_name[name]].append(new_node)
            node_by_name[child_name] = new_node
            children.append([])
            queue.append(child_name)
    for name in document:
        if name not in node_by_name:
            raise SequoiaPlanError(f'NxD token tree: {name!r:.60} cannot be reached from "0"')
    return _from_children(children)


def to_growmap(tree: TokenTree) -> dict[str, Any]:
    """A growmap, the layout of Sequoia's authors, in plain lists.

    roots has the nodes of each level, branches their numbers of children, Successors the children
    of each node, mask the attention mask, depth the level of each node, and size the number of
    nodes.
    """
    child_count, offsets = tree.child_count.tolist(), tree.level_offsets.tolist()
    levels = [list(range(offsets[level], offsets[level + 1])) for level in range(tree.depth)]
    return {
        "roots": levels,
        "branches": [[child_count[node] for node in level] for level in levels],
        "Successors": _children(tree),
        "mask": tree.attention_mask.astype(int).tolist(),
        "depth": tree.position_ids.tolist(),
        "size": tree.size,
    }


def from_growmap(document: Any) -> TokenTree:
    """The tree of a growmap, the mapping that `to_growmap` gives.

    Mask and depth may be torch tensors. The tree is read from Successors, the children of each
    node, and all other keys must agree with it.
    """
    if not isinstance(document, Mapping) or any(key not in document for key in GROWMAP_KEYS):
        raise SequoiaPlanError(f"growmap: expected the keys {', '.join(GROWMAP_KEYS)}")
    successors = document["Successors"]
    if not _is_list_of_index_lists(successors):
        raise SequoiaPlanError(
            "growmap: Successors must be a non-empty list of lists of node numbers"
        )
    size = len(successors)
    _check_size(size)
    if [child for children in successors for child in children] != list(range(1, size)):
        raise SequoiaPlanError(
            "growmap: Successors must name the nodes 1, 2, ... once and in order (breadth-first, "
            "siblings adjacent)"
        )
    child_counts = [len(children) for children in successors]
    # each node is repeated once for each of its children, after -1 for the root's parent
    tree = TokenTree(np.repeat(np.arange(-1, size), [1, *child_counts]))
    tensor_shapes = {"mask": [size, size], "depth": [size]}
    for key, expected in to_growmap(tree).items():
        value = document[key]
        # A tensor becomes a list only after its shape is checked: strides of 0 may hide its size.
        if hasattr(value, "tolist") and list(value.shape) == tensor_shapes.get(key):
            value = value.tolist()
        if type(value) is not type(expected) or value != expected:
            raise SequoiaPlanError(f"growmap: {key} contradicts Successors")
    return tree


def to_dot(tree: TokenTree) -> str:
    """Graphviz text: a line for each node with its rank, and one for each edge."""
    nodes = [
        f'  {node} [label="{rank or "root"}"];' for node, rank in enumerate(tree.ranks.tolist())
    ]
    edges = [f"  {parent} -> {node};" for node, parent in enumerate(tree.parents.tolist()) if node]
    return "\n".join(["digraph tree {", *nodes, *edges, "}", ""])


def to_networkx(tree: TokenTree) -> Any:
    """A networkx.DiGraph with edges from parent to child. Needs networkx.

    Nodes have the attributes `rank` and `depth`.
    """
    import networkx

    graph = networkx.DiGraph()
    ranks, depths = tree.ranks.tolist(), tree.position_ids.tolist()
    for node, parent in enumerate(tree.parents.tolist()):
        graph.add_node(node, rank=ranks[node], depth=depths[node])
        if node:
            graph.add_edge(parent, node)
    return graph


FORMATS: dict[str, Callable[[TokenTree], Any]] = {
    "medusa": to_medusa,
    "nxd": to_nxd,
    "growmap": to_growmap,
    "dot": to_dot,
}
"""For each format of `export_tree`, the function that gives its JSON document or its text."""


def _growmap_as_torch_file(tree: TokenTree) -> bytes:
    """A growmap as torch.save writes it, with int64 tensors for mask and depth."""
    import torch  # only here and below: artifacts work without it

    document = to_growmap(tree)
    for key in GROWMAP_TENSORS:
        document[key] = torch.tensor(document[key], dtype=torch.int64)
    buffer = io.BytesIO()
    torch.save(document, buffer)
    return buffer.getvalue()


def _load_torch_file(data: bytes) -> Any:
    """The document in a file by torch.save, which must hold only plain values and tensors."""
    import torch

    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # a restricted unpickler may raise anything on a foreign file
        raise SequoiaPlanError(
            "not a growmap that torch.load reads with weights_only=True"
        ) from error


def _children(tree: TokenTree) -> list[list[int]]:
    """The children of every node."""
    first_child, child_count = tree.first_child.tolist(), tree.child_count.tolist()
    return [
        list(range(first, first + count))
        for first, count in zip(first_child, child_count, strict=True)
    ]


def _from_children(children: list[list[int]]) -> TokenTree:
    """The tree whose node n has the children `children[n]`, renumbered breadth-first."""
    queue, parents = [0], [-1]
    for position, node in enumerate(queue):  # breadth-first: the loop appends to the queue
        queue.extend(children[node])
        parents.extend([position] * len(children[node]))
    return TokenTree(np.array(parents))


def _is_index(value: Any) -> bool:
    """Whether `value` is a whole number >= 0. True and False are none."""
    return type(value) is int and value >= 0


def _is_list_of_index_lists(value: Any) -> bool:
    """Whether `value` is a list, not empty, of lists of whole numbers >= 0."""
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(row, list) and all(map(_is_index, row)) for row in value)


def _check_size(size: int) -> None:
    """Refuse a tree that is too large while it is still being read."""
    if size > MAX_NODES:
        raise SequoiaPlanError(
            f"more than {MAX_NODES} nodes, expected at most that many in an exchange format"
        )


def _shortened(ranks: list[int]) -> str:
    """The first eight ranks, with an ellipsis for the rest."""
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
