"""Token trees as files: one safetensors file, self-describing and byte-stable. The format is in docs/format.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from sequoia_plan.artifacts.errors import SequoiaPlanError
from sequoia_plan.artifacts.files import read_bytes, write_atomically
from sequoia_plan.artifacts.tree import TokenTree

FORMAT, VERSION = "sequoia-plan-tree", 1
METADATA_KEY = "sequoia_plan"
LARGEST_STORED_MASK = 4096
"""Trees of more nodes carry no mask (it grows with the square); readers derive it from the parents."""


def save_tree(tree: TokenTree, path: str | Path) -> None:
    """Write `tree` and its plan to `path`. Same tree and plan, same bytes.

    Raises:
        SequoiaPlanError: if the file cannot be written or the plan is not JSON.
    """
    header = {"format": FORMAT, "version": VERSION, "plan": dict(tree.plan)}
    try:
        metadata = json.dumps(header, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise SequoiaPlanError(f"{path}: the tree's plan cannot be written as JSON ({error})") from error
    write_atomically(path, save_tensors(_tensors(tree), {METADATA_KEY: metadata}))


def load_tree(path: str | Path) -> TokenTree:
    """Read and validate a tree file.

    Raises:
        SequoiaPlanError: if the file is missing, truncated, of another format or version, or contradicts itself.
    """
    data = read_bytes(path, "a tree file written by sequoia-plan solve")
    header = _header(path, data)
    if header.get("version") != VERSION:
        raise SequoiaPlanError(f"{path}: tree file version {header.get('version')!r}, expected {VERSION}; solve again with this sequoia-plan")
    try:
        stored = load_tensors(data)
    except SafetensorError as error:
        raise SequoiaPlanError(f"{path}: damaged tree file ({error}); solve again") from error
    if "parents" not in stored or not isinstance(header.get("plan"), dict):
        raise SequoiaPlanError(f"{path}: tree file without its parents or plan; solve again")
    try:
        tree = TokenTree(stored["parents"], header["plan"])
    except SequoiaPlanError as error:
        raise SequoiaPlanError(f"{path}: {error}") from error
    for name, derived in _tensors(tree).items():
        found = stored.get(name)
        if found is None or found.dtype != derived.dtype or not np.array_equal(found, derived):
            raise SequoiaPlanError(f"{path}: {name} {'is missing' if found is None else 'contradicts parents'}; solve again")
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


def _header(path: str | Path, data: bytes) -> dict[str, Any]:
    """The metadata JSON, read before any tensor is touched."""
    foreign = SequoiaPlanError(f"{path}: not a tree file (expected safetensors written by sequoia-plan solve)")
    length = int.from_bytes(data[:8], "little")
    try:
        header = json.loads(json.loads(data[8 : 8 + length])["__metadata__"][METADATA_KEY])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise foreign from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise foreign
    return header
