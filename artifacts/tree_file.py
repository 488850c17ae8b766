"""Token trees as files: one safetensors file, self-describing and byte-stable. The format is in docs/format.md."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save as save_tensors

from sequoia_plan.artifacts.cost import check_promise
from sequoia_plan.artifacts.errors import SequoiaPlanError
from sequoia_plan.artifacts.files import read_bytes, write_atomically
from sequoia_plan.artifacts.plan import Plan
from sequoia_plan.artifacts.tree import TokenTree

FORMAT, VERSION = "sequoia-plan-tree", 1
METADATA_KEY = "sequoia_plan"
LARGEST_STORED_MASK = 4096
"""Trees of more nodes carry no mask (it grows with the square); readers derive it from the parents."""
LARGEST_FILE = 1 << 28
"""Bytes; a tree of ten million nodes."""
CATALOG = Path(__file__).parent / "catalog"


def save_tree(tree: TokenTree, path: str | Path) -> None:
    """Write `tree` and its plan to `path`. Same tree and plan, same bytes.

    Raises:
        SequoiaPlanError: if the file cannot be written.
    """
    write_atomically(path, to_bytes(tree))


def load_tree(path: str | Path) -> TokenTree:
    """Read and validate a tree file, or the tree of that name in the catalog (docs/catalog.md). A file that exists wins.

    Raises:
        SequoiaPlanError: if there is no such file or name, or the file is truncated, of another format or version, or
            contradicts itself.
    """
    if str(path) in catalog() and not os.path.exists(path):
        return from_bytes((CATALOG / f"{path}.safetensors").read_bytes(), str(path))
    expected = "a tree file written by sequoia-plan solve"
    if not os.path.exists(path):
        expected += f", or a tree of the catalog: {', '.join(catalog())}"
    return from_bytes(read_bytes(path, expected, LARGEST_FILE), str(path))


def catalog() -> list[str]:
    """The names of the trees that come with the package."""
    return sorted(file.stem for file in CATALOG.glob("*.safetensors"))


def to_bytes(tree: TokenTree) -> bytes:
    """The content of the tree's file."""
    header = {"format": FORMAT, "version": VERSION, "plan": tree.plan.facts()}
    return save_tensors(_tensors(tree), {METADATA_KEY: json.dumps(header, sort_keys=True, separators=(",", ":"), allow_nan=False)})


def from_bytes(data: bytes, name: str) -> TokenTree:
    """The tree in a file's content; `name` says which file in errors. Needs a few times the memory of `data`, whatever `data` claims.

    Raises:
        SequoiaPlanError: if it is not a tree file, or of another version, or contradicts itself.
    """
    header = _header(data, name)
    if header.get("version") != VERSION or isinstance(header["version"], bool):
        raise SequoiaPlanError(f"{name}: tree file version {header.get('version')!r:.60}, expected {VERSION}; solve again with this sequoia-plan")
    try:
        stored = dict(deserialize(data))  # checks every offset and shape against the length of the data
    except (SafetensorError, OverflowError) as error:
        raise SequoiaPlanError(f"{name}: damaged tree file ({error}); solve again") from error
    if "plan" not in header or "parents" not in stored:
        raise SequoiaPlanError(f"{name}: tree file without its {'parents' if 'plan' in header else 'plan'}; solve again")
    try:
        plan, parents = Plan.read(header["plan"]), stored["parents"]
        if parents["dtype"] != "I32" or len(parents["shape"]) != 1:
            raise SequoiaPlanError(f"parents is {parents['dtype']} {parents['shape']}, expected I32 [nodes]; solve again")
        tree = TokenTree(np.frombuffer(parents["data"], "<i4"), plan)
        for tensor, derived in _tensors(tree).items():
            _compare(tensor, stored.get(tensor), derived)
        check_promise(tree)
    except SequoiaPlanError as error:
        raise SequoiaPlanError(f"{name}: {error}") from error
    return tree


def _tensors(tree: TokenTree) -> dict[str, NDArray[Any]]:
    tensors: dict[str, NDArray[Any]] = {
        "parents": tree.parents,
        "ranks": tree.ranks,
        "position_ids": tree.position_ids,
        "first_child": tree.first_child,
        "child_count": tree.child_count,
        "level_offsets": tree.level_offsets,
    }
    if tree.size <= LARGEST_STORED_MASK:
        tensors["attention_mask"] = np.packbits(tree.attention_mask, axis=1, bitorder="little")
    return tensors


def _compare(name: str, stored: dict[str, Any] | None, derived: NDArray[Any]) -> None:
    if stored is None:
        raise SequoiaPlanError(f"{name} is missing; solve again")
    expected = ("I32" if derived.dtype == np.int32 else "U8", list(derived.shape))
    if (stored["dtype"], stored["shape"]) != expected:
        raise SequoiaPlanError(f"{name} is {stored['dtype']} {stored['shape']}, expected {expected[0]} {expected[1]}; solve again")
    if stored["data"] != derived.astype(derived.dtype.newbyteorder("<"), copy=False).tobytes():
        raise SequoiaPlanError(f"{name} contradicts parents; solve again")


def _header(data: bytes, name: str) -> dict[str, Any]:
    """The metadata JSON, read before any tensor is touched."""
    length = int.from_bytes(data[:8], "little")
    try:
        outer = json.loads(data[8 : 8 + length].decode())
        header = json.loads(outer["__metadata__"][METADATA_KEY], parse_constant=_refuse)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SequoiaPlanError(f"{name}: not a tree file (expected safetensors written by sequoia-plan solve)") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise SequoiaPlanError(f"{name}: not a tree file (expected safetensors written by sequoia-plan solve)")
    return header


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
