"""Compiles Triton kernels for GPUs that need not be present: a program that runs with any Triton.

    PYTHONPATH=FOLDER_OF_A_TRITON python tests/helpers/compile_kernels.py ROOT < variants.json

ROOT is the repository's folder, and variants.json a list of `Variant`s. It prints one line of JSON
for each: the variant, and either what the machine code says (registers a thread, bytes of registers
spilled to memory, asynchronous copies, whether a logarithm is approximate) or the error. The
kernels' files are loaded by path, so that neither torch nor this package is needed.
"""

import functools
import importlib.util
import itertools
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

VERIFY, DRAWING = "runtime/verify/residual_kernels.py", "runtime/sampling/drawing_kernels.py"
ATTENTION, LAYER = "models/layers/split_key_kernels.py", "models/layers/layer_kernels.py"
KERNELS = {
    "reject_child": VERIFY,
    "race_totals": DRAWING,
    "race": DRAWING,
    "attend_to_part": ATTENTION,
    "merge_parts": ATTENTION,
    "rms_norm": LAYER,
    "rotate_and_cache": LAYER,
    "silu_mul": LAYER,
}
"""The file of each kernel that is launched."""
SIZES = "first rank num_nodes num_tokens group num_parts count"
LAUNCHES = {
    "attend_to_part": (None, 4),
    "merge_parts": (None, 4),
    "rms_norm": (4096, 8),
    "rotate_and_cache": (64, 1),
    "silu_mul": (1024, 4),
}
"""BLOCK and the warps of kernels that are not launched with those of verification and drawing."""
ALIGNED_SIZES = (
    "vocabulary extent query_head_stride query_token_stride key_head_stride key_slot_stride "
    "value_head_stride value_slot_stride mask_token_stride token_stride head_stride width"
)
"""Sizes that are multiples of 16 in practice, which Triton makes use of."""
LOGITS = (
    "logits query key value mask attended x addend total weight heads q_weight k_weight cos sin "
    "queries keys values gate_up"
)
"""Arguments in the models' dtype."""
TYPES = {
    "fp32": "temperature scale epsilon",
    "i32": f"{SIZES} {ALIGNED_SIZES} query_heads key_heads",
    "*fp32": "p q uncovered_mass child_terms state accept_probs masses max_logits totals probs "
    "best_keys part_sums part_totals part_max",
    "*i32": "bits",
}
"""The arguments of Triton's types; others are pointers to int64."""


class Variant(NamedTuple):
    """A kernel and what it is compiled for.

    Args:
        name: of the kernel.
        dtype: Triton's name of the dtype of the logits.
        architecture: of the GPU, 90 for compute capability 9.0.
        block, warps: the constant BLOCK, and the warps of a program.
        sizes: "any", or "1" where `SIZES` are 1: Triton makes constants of such arguments.
    """

    name: str
    dtype: str
    architecture: int
    block: int = 4096
    warps: int = 16
    sizes: str = "any"


def all_variants(
    dtypes=("bf16", "fp16", "fp32"), architectures=(80, 89, 90), sizes=("any", "1"), **settings
):
    """Every kernel for each of these."""
    return [
        Variant(name, dtype, architecture, sizes=size, **settings)
        for name, file in KERNELS.items()
        for dtype, architecture, size in itertools.product(dtypes, architectures, sizes)
        if file != ATTENTION or dtype in ("bf16", "fp16")  # PyTorch attends with others
    ]


def compile_variant(root, variant):
    """Compile one kernel of the repository in the folder `root`; returns what its code says."""
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(load(root / KERNELS[variant.name]), variant.name)
    dtype, is_of_a_pass = variant.dtype, variant.name in LAUNCHES
    block, warps = LAUNCHES.get(variant.name, (variant.block, variant.warps))
    rows = 16 if variant.sizes == "1" else 64
    constants = {
        "DTYPE": tl.float32,
        "BLOCK": block,
        "HEAD_DIM": 128,
        "BLOCK_DIM": 128,
        "MAX_PARTS": 64,
        "MAX_TOKENS": 64,
        "MAX_BLOCKS": 32,
        "BLOCK_ROWS": rows,
        "BLOCK_KEYS": 64 if rows < 64 or variant.architecture == 90 else 32,
        "HIDDEN": -6e4 if dtype == "fp16" else -1e30,
        **dict.fromkeys(("ADDS", "NORMS", "ROTATES"), True),
    }
    if variant.sizes == "1":
        constants |= dict.fromkeys(SIZES.split(), 1)
    in_dtype = f"{LOGITS} out" if is_of_a_pass else LOGITS
    types = {
        argument: type_name
        for type_name, names in (*TYPES.items(), (f"*{dtype}", in_dtype))
        for argument in names.split()
    }
    arguments = kernel.arg_names
    signature = {
        argument: "constexpr" if argument in constants else types.get(argument, "*i64")
        for argument in arguments
    }
    # as at a launch: PyTorch aligns memory
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, argument in enumerate(arguments)
        if signature[argument].startswith("*") or argument in ALIGNED_SIZES.split()
    }
    used = {argument: constants[argument] for argument in arguments if argument in constants}
    registers = None if is_of_a_pass else 65536 // (32 * warps)
    compiled = triton.compile(
        ASTSource(kernel, signature, used, aligned),
        target=GPUTarget("cuda", variant.architecture, 32),
        options={"num_warps": warps, "num_stages": 2, "maxnreg": registers},
    )
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = output_of(tools / "cuobjdump", "--dump-resource-usage", file.name)
        instructions = output_of(tools / "cuobjdump", "--dump-sass", file.name)
    resources = {key: int(value) for key, value in re.findall(r"\b([A-Z]+):(\d+)", usage)}
    return {
        "threads": 32 * warps,
        "registers": resources["REG"],
        "spilled_bytes": resources["STACK"] + resources["LOCAL"],
        "shared_bytes": compiled.metadata.shared,
        "block": (constants["BLOCK_ROWS"], constants["BLOCK_KEYS"]),
        "wide_asynchronous_copies": len(re.findall(r"LDGSTS\S*\.128", instructions)),
        "approximate_logarithm": "lg2.approx" in compiled.asm["ptx"] or "MUFU.LG2" in instructions,
    }


@functools.cache
def load(path):
    """The module in a file, whatever package it belongs to."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def output_of(*command):
    """What a program prints."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main():
    for variant in json.load(sys.stdin):
        try:
            result = compile_variant(Path(sys.argv[1]), Variant(*variant))
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[-300:]}"}
        print(json.dumps({"variant": variant} | result), flush=True)


if __name__ == "__main__":
    main()
