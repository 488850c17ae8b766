"""A reader of token tree files written from docs/format.md alone, with numpy and json and nothing of the package."""

import json

import numpy as np

ITEM = {"I32": 4, "U8": 1}


def read(data):
    """Tensors by name, and the plan. Raises ValueError or KeyError for what is not a valid tree file."""

    def check(condition, what):
        if not condition:
            raise ValueError(what)

    check(len(data) >= 8, "no header length")
    begin = 8 + int.from_bytes(data[:8], "little")
    check(begin <= len(data), "header beyond the end")
    entries = json.loads(data[8:begin].decode("utf-8"))
    check(isinstance(entries, dict), "header")
    header = json.loads(entries.pop("__metadata__")["sequoia_plan"])
    check(header["format"] == "sequoia-plan-tree" and header["version"] == 1 and isinstance(header["plan"], dict), "format")
    names = ("parents", "ranks", "position_ids", "first_child", "child_count", "level_offsets")
    tensors = {}
    for name in (*names, "attention_mask"):
        if name == "attention_mask" and len(tensors["parents"]) > 4096:
            break
        dtype, shape, (start, end) = (entries[name][key] for key in ("dtype", "shape", "data_offsets"))
        check(dtype == ("U8" if name == "attention_mask" else "I32") and len(shape) == (2 if name == "attention_mask" else 1), name)
        check(0 <= start <= end <= len(data) - begin and end - start == ITEM[dtype] * int(np.prod(shape, dtype=object)), name)
        tensors[name] = np.frombuffer(data[begin + start : begin + end], "<i4" if dtype == "I32" else "u1").reshape(shape)
    parents, ranks, depths, first, count, offsets = (tensors[name].tolist() for name in names)
    n = len(parents)
    check(n > 0 and parents[0] == -1, "root")
    children = [[] for _ in parents]
    for node in range(1, n):
        check(0 <= parents[node] < node and parents[node] >= parents[node - 1], "parents")
        children[parents[node]].append(node)
    check(count == [len(c) for c in children], "child_count")
    check(first == [1 + sum(count[:node]) for node in range(n)], "first_child")
    check(ranks == [0] + [children[parents[node]].index(node) + 1 for node in range(1, n)], "ranks")
    derived = [0]
    for node in range(1, n):
        derived.append(derived[parents[node]] + 1)
    check(depths == derived, "position_ids")
    check(offsets == [derived.index(level) for level in range(derived[-1] + 1)] + [n], "level_offsets")
    if "attention_mask" in tensors:
        check(tensors["attention_mask"].shape == (n, (n + 7) // 8), "attention_mask")
        bits = [[row[j // 8] >> j % 8 & 1 for j in range(8 * len(row))] for row in tensors["attention_mask"].tolist()]
        for node in range(n):
            above = bits[parents[node]] if node else [0] * len(bits[0])
            check(bits[node] == [int(a or j == node) for j, a in enumerate(above)], "attention_mask")
    return tensors, header["plan"]
