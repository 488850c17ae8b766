"""Products of all formats, attention and a whole tiny pass on this processor, without torch.

    python tools/arm/check.py build/arm-tiles

The first run writes what it packed, computed and summed; a later one, on another processor, must
get the same bits: of products in whole numbers and in floating point, and of float32 attention and
passes up to the last bits of what each processor's exponential and square root give.
"""

import importlib
import platform
import sys
import types
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {
    "sequoia_plan": "planner/package",
    "sequoia_plan.artifacts": "artifacts",
    "sequoia_plan.models": "models",
    "sequoia_plan.models.base": "models/base",
    "sequoia_plan.models.packed": "models/packed",
}
for name, folder in FOLDERS.items():  # packages whose __init__, which may import torch, is not run
    package = types.ModuleType(name)
    package.__path__ = [str(ROOT / folder)]
    sys.modules[name] = package


def packed(name):
    """A module of packed weights."""
    return importlib.import_module(f"sequoia_plan.models.packed.{name}")


formats, products, encoding, tiles = map(packed, ("formats", "products", "encoding", "tiles"))
forward, attention, workers = map(packed, ("forward", "attention", "workers"))
OWN = packed("instructions").OWN
OUTPUTS, INPUTS, ROWS = 64, 512, 11


def main() -> None:
    """Compute, and compare with what another processor wrote, or write it."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    print(platform.machine(), OWN.name, flush=True)
    wrong = []
    for format in formats.FORMATS:
        results = {"products": products_of(format, folder / f"{format.name}.npz")}
        wrong += compare(folder / f"{format.name}-results.npz", results, exact=True)
    wrong += compare(folder / "pass.npz", {"logits": logits_of_a_pass()}, exact=False)
    sys.exit(f"differ: {', '.join(wrong)}" if wrong else 0)


def compare(path, results, exact):
    """The names of results that differ from those in a file, which is written if there is none."""
    if not path.exists():
        np.savez(path, **results)
        print(path.stem, "written", flush=True)
        return []
    names = []
    with np.load(path) as written:
        for name, result in results.items():
            difference = float(np.abs(result - written[name]).max())
            scale = float(np.abs(result).max())
            same = np.array_equal(result, written[name])
            right = same if exact else difference < 2e-5 * scale
            print(path.stem, name, "same bits" if same else f"{difference / scale:.1e}", flush=True)
            names += [] if right else [f"{path.stem} {name}"]
    return names


def products_of(format, path):
    """Of random rows by random tiles, float32 [ROWS, OUTPUTS]; tiles and rows are from the file."""
    number, rng = formats.FORMATS.index(format), np.random.default_rng(0)
    shape = formats.num_tiles(OUTPUTS), formats.tile_bytes(number, INPUTS)
    memory = tiles.aligned_zeros((shape[0] * shape[1] + products.AHEAD,))
    tiled = memory[: shape[0] * shape[1]].reshape(shape)
    if not path.exists():
        rows = rng.integers(0, 256, (OUTPUTS, formats.row_bytes(number, INPUTS)), dtype=np.uint8)
        if format.is_float:
            kinds = {"F32": np.float32, "F16": np.float16}
            numbers = rng.standard_normal((OUTPUTS, INPUTS)).astype(kinds.get(format.name, "f4"))
            rows = numbers.view(np.uint8).reshape(OUTPUTS, -1)
            if format.name == "BF16":
                rows = np.ascontiguousarray(numbers.view(np.uint16)[:, 1::2]).view(np.uint8)
        else:
            blocks = rows.reshape(OUTPUTS, -1, format.block_bytes)
            for place in format.factors:
                if format.name == "MXFP4":
                    blocks[..., place] = rng.integers(110, 130, blocks.shape[:2])
                else:
                    factors = (rng.random(blocks.shape[:2]) * 0.01).astype(np.float16)
                    blocks[..., place : place + 2] = factors[..., None].view(np.uint8)
        tiles.pack_rows(number, rows, INPUTS, tiled)
        np.savez(path, tiles=tiled, rows=rng.standard_normal((ROWS, INPUTS)).astype(np.float32))
    with np.load(path) as written:
        tiled[:], rows = written["tiles"], written["rows"]
    matrix = tiles.Matrix(number, OUTPUTS, INPUTS, tiled)
    results = np.zeros((ROWS, OUTPUTS), np.float32)
    forward.project(described(matrix), rows, results)
    return results


def described(matrix):
    """A matrix as the pass reads it: `weights.describe`, which needs torch."""
    encode = encoding.encoder(*products.encoding_for(matrix.format))
    size = products.encoded_bytes(matrix.format, matrix.inputs)
    return np.array([
        encode.address, products.multiplier(matrix.format).address, matrix.tiles.ctypes.data,
        *matrix.tiles.shape, formats.num_steps(matrix.format, matrix.inputs), matrix.inputs, size,
    ])  # fmt: skip


def logits_of_a_pass():
    """A pass of a Llama-like model of one layer in Q4_0 over four tokens, float32."""
    rng, width, inner, heads, head_dim, slots, rows = np.random.default_rng(1), 64, 96, 2, 32, 32, 4
    kept = []

    def matrix(outputs, inputs):
        blocks = rng.integers(0, 256, (outputs, inputs // 32, 18), dtype=np.uint8)
        blocks[..., :2] = np.frombuffer(np.float16(0.02).tobytes(), np.uint8)
        number = formats.format_number("Q4_0")
        shape = formats.num_tiles(outputs), formats.tile_bytes(number, inputs)
        kept.append(tiles.aligned_zeros((shape[0] * shape[1] + products.AHEAD,)))
        tiled = kept[-1][: shape[0] * shape[1]].reshape(shape)
        tiles.pack_rows(number, blocks.reshape(outputs, -1), inputs, tiled)
        return described(tiles.Matrix(number, outputs, inputs, tiled))

    sizes = [(64, 64), (32, 64), (32, 64), (64, 64), (96, 64), (96, 64), (64, 96)]
    model = forward.Model(
        matrices=np.array([[matrix(*size) for size in sizes]]), head=np.array([matrix(160, 64)]),
        norms=np.ones((1, 2, width), np.float32), final_norm=np.ones(width, np.float32),
        head_norms=np.zeros((0, 2, 0), np.float32), biases=np.zeros((0, 0), np.float32),
        epsilon=np.float32(1e-5), attend=attention.attender(4).address, heads=heads,
        head_dim=head_dim,
    )  # fmt: skip
    angles = np.arange(slots)[:, None] / 100.0 ** np.linspace(0, 1, head_dim // 2)
    zeros = lambda *shape: tiles.aligned_zeros(shape, np.float32)  # noqa: E731
    order = np.arange(rows)
    seen = np.tri(rows, slots, dtype=np.bool_)
    row_bytes = int(max(model.matrices[..., forward.ROW_BYTES].max(), model.head[0, -1]))
    batches = attention.QUERIES * attention.BATCHES
    x = zeros(1, rows, width)
    x[0] = rng.standard_normal((rows, width)).astype(np.float32)
    reader = forward.Reader(
        model=model, rotary=np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32),
        keys=np.zeros((1, 1, 1, head_dim, attention.BLOCK, 2), np.uint16),
        values=np.zeros((1, 1, slots, head_dim, 2), np.uint16), logits=zeros(rows, 160),
        hidden=zeros(0, rows, width), state_layers=np.zeros(0, np.int64), largest=zeros(1, rows),
        best=np.zeros((1, rows), np.int64), vocabulary=160, x=x, normed=zeros(1, rows, width),
        attention=zeros(1, batches, 16 + 2 * head_dim + slots), heads=zeros(rows, 4, head_dim),
        attended=zeros(rows, heads, head_dim), added=zeros(rows, width), gate=zeros(rows, inner),
        up=zeros(rows, inner), encoded=tiles.aligned_zeros((1, rows, row_bytes)),
        attended_first=zeros(rows, 0), positions=order, slots=order, visible=seen,
        spans=np.stack([0 * order, order + 1], 1), tokens=np.zeros(0, np.int64),
        read_slots=np.zeros(0, np.int64), last=np.zeros(0, np.int64),
    )  # fmt: skip
    counter = tiles.aligned_zeros((workers.COUNTER_WORDS,), np.int64)
    forward.forward(0, 1, counter.ctypes.data, 1, reader, rows, 0, rows, 0, 2)
    assert "torch" not in sys.modules
    return reader.logits


if __name__ == "__main__":
    main()
