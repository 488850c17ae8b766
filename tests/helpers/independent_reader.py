"""A reader of token tree files, written from docs/format.md alone, with numpy and json."""

import json

import numpy as np

NAMES = ("parents", "ranks", "position_ids", "first_child", "child_count", "level_offsets")


def check(condition, problem):
    if not condition:
        raise ValueError(problem)


def read(data):
    """Tensors by name, and the plan. Raises ValueError or KeyError for an invalid tree file."""
    check(len(data) >= 8, "no header length")
    begin = 8 + int.from_bytes(data[:8], "little")
    check(begin <= len(data), "header beyond the end")
    entries = json.loads(data[8:begin].decode("utf-8"))
    check(isinstance(entries, dict), "header")
    header = json.loads(entries.pop("__metadata__")["sequoia_plan"])
    check(header["format"] == "sequoia-plan-tree" and header["version"] == 1, "format")
    check(isinstance(header["plan"], dict), "plan")
    tensors = {name: read_tensor(entries[name], data[begin:], "I32", 1) for name in NAMES}
    if len(tensors["parents"]) <= 4096:
        tensors["attention_mask"] = read_tensor(entries["attention_mask"], data[begin:], "U8", 2)
    check_tree(tensors)
    return tensors, header["plan"]


def read_tensor(entry, data, dtype, dimensions):
    shape, (start, end) = entry["shape"], entry["data_offsets"]
    check(entry["dtype"] == dtype and len(shape) == dimensions, "dtype or dimensions")
    numpy_dtype, item_bytes = {"I32": ("<i4", 4), "U8": ("u1", 1)}[dtype]
    check(0 <= start <= end <= len(data), "offsets")
    check(end - start == item_bytes * int(np.prod(shape, dtype=object)), "length")
    return np.frombuffer(data[start:end], numpy_dtype).reshape(shape)


def check_tree(tensors):
    parents, ranks, depths, first, count, offsets = (tensors[name].tolist() for name in NAMES)
    n = len(parents)
    check(n > 0 and parents[0] == -1, "root")
    children, derived_depths, masks = [[] for _ in parents], [0], [1]
    for node in range(1, n):
        check(0 <= parents[node] < node and parents[node] >= parents[node - 1], "parents")
        children[parents[node]].append(node)
        derived_depths.append(derived_depths[parents[node]] + 1)
        masks.append(masks[parents[node]] | 1 << node)
    check(count == [len(siblings) for siblings in children], "child_count")
    check(first == [1 + sum(count[:node]) for node in range(n)], "first_child")
    derived_ranks = [children[parents[node]].index(node) + 1 for node in range(1, n)]
    check(ranks == [0, *derived_ranks], "ranks")
    check(depths == derived_depths, "position_ids")
    check(offsets == [*map(depths.index, range(depths[-1] + 1)), n], "level_offsets")
    if "attention_mask" in tensors:
        mask = tensors["attention_mask"]  # as little-endian integers, bit j of a row is node j
        check(mask.shape == (n, (n + 7) // 8), "shape of attention_mask")
        check([int.from_bytes(row.tobytes(), "little") for row in mask] == masks, "attention_mask")
