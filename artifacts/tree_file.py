"""Token trees as files: one safetensors file, self-describing and byte-stable.

docs/format.md specifies the format.
"""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from sequoia_plan.artifacts.errors import SequoiaPlanError
from sequoia_plan.artifacts.files import read_bytes, write_atomically
from sequoia_plan.artifacts.plan import Plan
from sequoia_plan.artifacts.schema import Artifact, check_format
from sequoia_plan.artifacts.tree import TokenTree

FORMAT, VERSION, PORTFOLIO_VERSION = "sequoia-plan-tree", 1, 2
"""Files of one tree have the first version, and files with trees by match the second."""
METADATA_KEY = "sequoia_plan"
MADE_BY = "sequoia-plan solve"
MAX_NODES_WITH_MASK = 4096
"""Larger trees store no mask, because it grows with the square; readers derive it."""
CATALOG = Path(__file__).parent / "catalog"


Length = Annotated[int, Meta(ge=1, lt=2**31)]
Tensors = dict[str, NDArray[Any]]


class TreeHeader(Artifact, frozen=True):
    """What a file holds of a tree and its trees by match, beside their tensors."""

    plan: Plan
    by_match: tuple[tuple[Length, bool], ...] = ()
    """The match length of each tree beside the first, and whether its spine is looked up."""


class Header(TreeHeader, frozen=True):
    """What a tree file holds beside its tensors."""

    by_context: tuple[tuple[Length, TreeHeader], ...] = ()
    """Each tree by context, after the tokens of text from which it is for."""


def save_tree(tree: TokenTree, path: str | Path) -> None:
    """Write a tree and its plan. Equal trees with equal plans give equal bytes.

    Raises:
        SequoiaPlanError: if the file cannot be written.
    """
    write_atomically(path, to_bytes(tree))


def load_tree(path: str | Path) -> TokenTree:
    """Read and check a tree file, or the tree of that name in the catalog (docs/catalog.md).

    A file that exists takes precedence over a name in the catalog.

    Raises:
        SequoiaPlanError: if there is no such file or name, or the file is truncated, is of another
            format or version, or contradicts itself.
    """
    source, expected = path, f"a tree file written by {MADE_BY}"
    if not os.path.exists(path):
        expected += f", or a tree of the catalog: {', '.join(catalog())}"
        if str(path) in catalog():
            source = CATALOG / f"{path}.safetensors"
    return from_bytes(read_bytes(source, expected), str(path))


def catalog() -> list[str]:
    """The names of the trees that come with the package."""
    return sorted(file.stem for file in CATALOG.glob("*.safetensors"))


def to_bytes(tree: TokenTree) -> bytes:
    """The content of the tree's file."""
    if tree.looks_up:
        raise SequoiaPlanError(
            "token tree: found a looked-up spine, expected a tree for texts without a match that "
            "has this one in `by_match`"
        )
    version = PORTFOLIO_VERSION if tree.by_match else VERSION
    by_context = tuple((length, _header_of(t)) for length, t in tree.by_context.items())
    header = Header(tree.plan, _header_of(tree).by_match, by_context).to_dict()
    header |= {"format": FORMAT, "version": version}
    text = json.dumps(header, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return save_tensors(_all_tensors(tree), {METADATA_KEY: text})


def from_bytes(data: bytes, name: str) -> TokenTree:
    """Read and check the tree in a file's content.

    It needs a few times the memory of `data`, whatever sizes `data` claims.
    """
    header = _header(data, name)
    try:
        tensors = load_tensors(data)  # checks every offset and shape against the length of the data
    except (SafetensorError, OverflowError, KeyError) as error:
        raise SequoiaPlanError(f"{name}: damaged tree file ({error}); solve again") from error
    try:
        by_context = {
            length: _tree(part, tensors, f"by_context.{length}.")
            for length, part in header.by_context
        }
        tree = replace(_tree(header, tensors, ""), by_context=by_context)
        # all other tensors follow from the parents
        for key, derived in _all_tensors(tree).items():
            stored = tensors.get(key, derived[:0])
            if stored.dtype != derived.dtype or not np.array_equal(stored, derived):
                raise SequoiaPlanError(f"{key} contradicts parents; solve again")
    except SequoiaPlanError as error:
        raise SequoiaPlanError(f"{name}: {error}") from error
    return tree


def _header_of(tree: TokenTree) -> TreeHeader:
    """What the header says of a tree and its trees by match."""
    by_match = tuple((length, t.looks_up) for length, t in tree.by_match.items())
    return TreeHeader(tree.plan, by_match)


def _tree(header: TreeHeader, tensors: Tensors, prefix: str) -> TokenTree:
    """The tree whose tensors' names begin with `prefix`, with its trees by match."""
    by_match = {
        length: TokenTree(_parents(tensors, f"{prefix}by_match.{length}."), looks_up=looks_up)
        for length, looks_up in header.by_match
    }
    return TokenTree(_parents(tensors, prefix), header.plan, by_match=by_match)


def _header(data: bytes, name: str) -> Header:
    """The JSON object in the metadata of a tree file. It is read before any tensor.

    A safetensors file begins with the length of its own header in 8 bytes, and the header.
    """
    header_length = int.from_bytes(data[:8], "little")
    try:
        safetensors_header = msgspec.json.decode(data[8 : 8 + header_length])
        document = msgspec.json.decode(safetensors_header["__metadata__"][METADATA_KEY])
    except (ValueError, KeyError, TypeError, RecursionError):
        document = None
    has_portfolio = isinstance(document, dict) and "by_match" in document
    version = PORTFOLIO_VERSION if has_portfolio else VERSION
    check_format(document, FORMAT, version, name, MADE_BY)
    return Header.from_dict(document, name)


def _parents(tensors: Tensors, prefix: str) -> NDArray[Any]:
    """The parents of one of the file's trees, whose tensors' names begin with `prefix`."""
    parents = tensors.get(f"{prefix}parents", np.zeros(()))
    if parents.dtype != np.int32 or parents.ndim != 1:
        raise SequoiaPlanError(f"{prefix}parents: expected a tensor I32 [nodes]; solve again")
    return parents


def _all_tensors(tree: TokenTree) -> Tensors:
    """The tensors of the file by name: the tree's, and those of its trees by match and context."""
    tensors = _tensors(tree)
    for length, other in tree.by_match.items():
        tensors |= {f"by_match.{length}.{name}": t for name, t in _tensors(other).items()}
    for length, other in tree.by_context.items():
        tensors |= {f"by_context.{length}.{name}": t for name, t in _all_tensors(other).items()}
    return tensors


def _tensors(tree: TokenTree) -> Tensors:
    """The tensors of one tree by name. The parents decide all others."""
    names = ["parents", "ranks", "position_ids", "first_child", "child_count", "level_offsets"]
    tensors: Tensors = {name: getattr(tree, name) for name in names}
    if tree.size <= MAX_NODES_WITH_MASK:
        tensors["attention_mask"] = np.packbits(tree.attention_mask, axis=1, bitorder="little")
    return tensors
