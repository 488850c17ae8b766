"""Token trees as files: one safetensors file, self-describing and byte-stable.

docs/format.md specifies the format.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save as save_tensors

from sequoia_plan.artifacts.errors import SequoiaPlanError
from sequoia_plan.artifacts.files import read_bytes, write_atomically
from sequoia_plan.artifacts.plan import MatchPlan, Plan
from sequoia_plan.artifacts.prediction import (
    TreePrediction,
    predict,
    predict_class,
    predict_portfolio,
)
from sequoia_plan.artifacts.step_time import StepTime
from sequoia_plan.artifacts.tree import TokenTree

FORMAT, VERSION, PORTFOLIO_VERSION = "sequoia-plan-tree", 1, 2
"""Files of one tree have the first version, and files with trees by match the second."""
METADATA_KEY = "sequoia_plan"
MAX_NODES_WITH_MASK = 4096
"""Larger trees store no mask, because it grows with the square; readers derive it."""
MAX_FILE_BYTES = 1 << 28
"""A tree of ten million nodes."""
ROUNDING_TOLERANCE = 1e-9
"""Relative difference below which two figures are equal: computed on different machines."""
CATALOG = Path(__file__).parent / "catalog"


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
    if str(path) in catalog() and not os.path.exists(path):
        return from_bytes((CATALOG / f"{path}.safetensors").read_bytes(), str(path))
    expected = "a tree file written by sequoia-plan solve"
    if not os.path.exists(path):
        expected += f", or a tree of the catalog: {', '.join(catalog())}"
    return from_bytes(read_bytes(path, expected, MAX_FILE_BYTES), str(path))


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
    header: dict[str, Any] = {"format": FORMAT, "version": VERSION, "plan": tree.plan.to_dict()}
    if tree.by_match:
        header["version"] = PORTFOLIO_VERSION
        header["by_match"] = [[length, t.looks_up] for length, t in tree.by_match.items()]
    text = json.dumps(header, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return save_tensors(_all_tensors(tree), {METADATA_KEY: text})


def from_bytes(data: bytes, name: str) -> TokenTree:
    """Read and check the tree in a file's content.

    It needs a few times the memory of `data`, whatever sizes `data` claims.
    """
    header = _header(data, name)
    version = header.get("version")
    if version not in (VERSION, PORTFOLIO_VERSION) or isinstance(version, bool):
        raise SequoiaPlanError(
            f"{name}: tree file version {version!r:.60}, expected {VERSION} or "
            f"{PORTFOLIO_VERSION}; solve again with this sequoia-plan"
        )
    try:
        # deserialize checks every offset and shape against the length of the data
        stored_tensors = dict(deserialize(data))
    except (SafetensorError, OverflowError) as error:
        raise SequoiaPlanError(f"{name}: damaged tree file ({error}); solve again") from error
    if "plan" not in header or "parents" not in stored_tensors:
        missing = "parents" if "plan" in header else "plan"
        raise SequoiaPlanError(f"{name}: tree file without its {missing}; solve again")
    try:
        by_match = {
            length: TokenTree(_parents(stored_tensors, f"by_match.{length}."), looks_up=looks_up)
            for length, looks_up in _match_lengths(header)
        }
        plan = Plan.from_dict(header["plan"])
        tree = TokenTree(_parents(stored_tensors, ""), plan, by_match=by_match)
        # all other tensors follow from the parents, and what is stored must be equal to that
        for tensor_name, derived in _all_tensors(tree).items():
            _check_tensor(tensor_name, stored_tensors.get(tensor_name), derived)
        check_prediction(tree)
    except SequoiaPlanError as error:
        raise SequoiaPlanError(f"{name}: {error}") from error
    return tree


def _match_lengths(header: dict[str, Any]) -> list[tuple[int, bool]]:
    """The match length of each tree beside the first, and whether its spine is looked up."""
    entries = header.get("by_match", [])
    is_list = isinstance(entries, list)
    if not is_list or not all(
        isinstance(entry, list) and [type(value) for value in entry] == [int, bool]
        for entry in entries
    ):
        raise SequoiaPlanError(
            f"by_match: found {entries!r:.60}, expected a list of [match length, true or false]; "
            "solve again"
        )
    return [(length, looks_up) for length, looks_up in entries]


def _parents(stored_tensors: dict[str, Any], prefix: str) -> NDArray[Any]:
    """The parents of one of the file's trees, whose tensors' names begin with `prefix`."""
    name = f"{prefix}parents"
    if name not in stored_tensors:
        raise SequoiaPlanError(f"{name} is missing; solve again")
    parents = stored_tensors[name]
    if parents["dtype"] != "I32" or len(parents["shape"]) != 1:
        raise SequoiaPlanError(
            f"{name} is {parents['dtype']} {parents['shape']}, expected I32 [nodes]; solve again"
        )
    return np.frombuffer(parents["data"], "<i4")


def _all_tensors(tree: TokenTree) -> dict[str, NDArray[Any]]:
    """The tensors of the file by name: the tree's, and those of the trees in its `by_match`."""
    tensors = _tensors(tree)
    for length, other in tree.by_match.items():
        tensors |= {f"by_match.{length}.{name}": t for name, t in _tensors(other).items()}
    return tensors


def _tensors(tree: TokenTree) -> dict[str, NDArray[Any]]:
    """The tensors of one tree by name. The parents decide all others."""
    tensors: dict[str, NDArray[Any]] = {
        "parents": tree.parents,
        "ranks": tree.ranks,
        "position_ids": tree.position_ids,
        "first_child": tree.first_child,
        "child_count": tree.child_count,
        "level_offsets": tree.level_offsets,
    }
    if tree.size <= MAX_NODES_WITH_MASK:
        tensors["attention_mask"] = np.packbits(tree.attention_mask, axis=1, bitorder="little")
    return tensors


def _check_tensor(name: str, stored: dict[str, Any] | None, derived: NDArray[Any]) -> None:
    """Refuse a stored tensor that differs from the one derived from the parents."""
    if stored is None:
        raise SequoiaPlanError(f"{name} is missing; solve again")
    dtype = "I32" if derived.dtype == np.int32 else "U8"
    shape = list(derived.shape)
    if (stored["dtype"], stored["shape"]) != (dtype, shape):
        raise SequoiaPlanError(
            f"{name} is {stored['dtype']} {stored['shape']}, expected {dtype} {shape}; solve again"
        )
    little_endian = derived.astype(derived.dtype.newbyteorder("<"), copy=False)
    if stored["data"] != little_endian.tobytes():
        raise SequoiaPlanError(f"{name} contradicts parents; solve again")


def _header(data: bytes, name: str) -> dict[str, Any]:
    """The JSON object in the metadata of a tree file. It is read before any tensor.

    A safetensors file begins with the length of its own header in 8 bytes, and the header.
    """
    header_length = int.from_bytes(data[:8], "little")
    try:
        safetensors_header = json.loads(data[8 : 8 + header_length].decode())
        text = safetensors_header["__metadata__"][METADATA_KEY]
        header = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _not_a_tree_file(name) from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise _not_a_tree_file(name)
    return header


def _not_a_tree_file(name: str) -> SequoiaPlanError:
    """The error for a file that is no tree file."""
    return SequoiaPlanError(
        f"{name}: not a tree file (expected safetensors written by sequoia-plan solve)"
    )


def _refuse_constant(constant: str) -> NoReturn:
    """Refuse NaN and infinities, which Python's JSON parser takes by default."""
    raise ValueError(f"{constant} is not JSON")


def check_prediction(tree: TokenTree) -> None:
    """Refuse a tree whose plan contradicts its own acceptance and latencies."""
    plan = tree.plan
    times = StepTime.from_measured(plan)
    if plan.by_match and times:
        prediction = predict_portfolio(tree, plan.by_match, times)
    else:
        prediction = predict(tree, plan.acceptance, times)
    _check_figures("plan", plan, prediction)
    _check_by_match(tree, times)
    _check_bound("upper_bound", plan.upper_bound, prediction.expected_tokens)
    _check_bound("speedup_bound", plan.speedup_bound, prediction.predicted_speedup)


def _check_figures(place: str, recorded_in: Plan | MatchPlan, prediction: TreePrediction) -> None:
    """Refuse recorded figures that differ from those predicted."""
    for name, predicted in prediction._asdict().items():
        recorded = getattr(recorded_in, name, None)
        if recorded is None:
            continue
        if predicted is None or not math.isclose(recorded, predicted, rel_tol=ROUNDING_TOLERANCE):
            consequence = "nothing in the plan gives one"
            if predicted:
                consequence = f"its tree, acceptance and latencies give {predicted:.6g}"
            raise SequoiaPlanError(
                f"{place}.{name}: found {recorded:.6g}, {consequence}; solve again"
            )


def _check_by_match(tree: TokenTree, times: StepTime | None) -> None:
    """Refuse classes of match whose figures do not follow from their trees, and trees of none."""
    parts = tree.plan.by_match
    unknown_lengths = set(tree.by_match) - {part.match_length for part in parts}
    if parts and unknown_lengths:
        raise SequoiaPlanError(
            f"plan.by_match: found no entry for matches of {min(unknown_lengths)} tokens, which "
            "have a tree of their own; solve again"
        )
    for number, part in enumerate(parts):
        class_tree = tree.for_match(part.match_length)
        prediction = TreePrediction(*predict_class(class_tree, part, times))
        _check_figures(f"plan.by_match[{number}]", part, prediction)


def _check_bound(name: str, bound: float | None, predicted: float | None) -> None:
    """Refuse an upper bound that the tree itself exceeds."""
    if bound is None or predicted is None:
        return
    if bound < predicted * (1 - ROUNDING_TOLERANCE):
        raise SequoiaPlanError(
            f"plan.{name}: found {bound:.6g}, the tree itself has {predicted:.6g}; solve again"
        )
