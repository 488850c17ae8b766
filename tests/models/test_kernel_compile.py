"""Every kernel compiles to machine code for GPUs that are not present, with several Tritons.

The installed Triton compiles a few variants. Each folder in SEQUOIA_PLAN_TRITONS holds another one,
which compiles them all: `make kernels` installs those that the supported versions of torch bring.
"""

import json
import os
import subprocess
import sys

import pytest
from compile_kernels import DRAWING, VERIFY, Variant, all_variants
from paths import ROOT

from sequoia_plan.models.layers.split_keys import keys_of_a_block
from sequoia_plan.runtime.sampling.drawing import BLOCK, WARPS

pytestmark = pytest.mark.slow

pytest.importorskip(
    "triton", reason="Triton is not installed, which compiles the kernels", exc_type=ImportError
)
TRITONS = list(filter(None, os.environ.get("SEQUOIA_PLAN_TRITONS", "").split(os.pathsep)))
REGISTERS = 65536
SHARED_BYTES = {80: 164 << 10, 89: 100 << 10, 90: 228 << 10}
"""Of a multiprocessor, by architecture; it keeps 1 KB of them for each program."""
SPILLED_BYTES = 0
"""Budget a thread: nothing is kept in memory for want of registers."""


def compile_all(variants, folder, triton=None, root=ROOT):
    """What `compile_kernels.py` prints for each variant.

    Args:
        folder: of the compiled kernels.
        triton: folder of the Triton that compiles; None for the installed one.
    """
    environment = os.environ | {"TRITON_CACHE_DIR": str(folder)}
    environment.pop("TRITON_INTERPRET", None)
    if triton:
        environment["PYTHONPATH"] = triton
    run = subprocess.run(
        [sys.executable, str(ROOT / "tests/helpers/compile_kernels.py"), str(root)],
        input=json.dumps(variants),
        env=environment,
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    results = [json.loads(line) for line in run.stdout.splitlines()]
    assert [tuple(result.pop("variant")) for result in results] == variants
    return results


def faults(variants, results):
    """The variants that were not compiled or whose machine code is not as it should be."""
    return [
        (variant, result)
        for variant, result in zip(variants, results, strict=True)
        if "error" in result
        or result["approximate_logarithm"]
        or result["spilled_bytes"] > SPILLED_BYTES
        or programs_at_once(variant, result) < (2 if variant.name == "attend_to_part" else 1)
        or (variant.name == "attend_to_part" and not loads_overlap(variant, result))
    ]


def programs_at_once(variant, result):
    """How many programs fit a multiprocessor."""
    registers = -(-result["registers"] // 8) * 8 * result["threads"]
    shared_bytes = result["shared_bytes"] + 1024
    return min(REGISTERS // registers, SHARED_BYTES[variant.architecture] // shared_bytes)


def loads_overlap(variant, result):
    """Do keys, values and mask come by asynchronous copies, in blocks as they are launched?"""
    rows, keys = result["block"]
    assert keys == keys_of_a_block(rows, variant.architecture // 10)
    return result["wide_asynchronous_copies"] * result["threads"] * 16 >= 2 * keys * 2 * 128 * 2


def test_kernels_compile_with_the_installed_triton(tmp_path):
    """Few of the settings, to be quick."""
    variants = [
        *all_variants(["bf16"], [90], ["any"], block=BLOCK, warps=WARPS),
        *all_variants(["fp16"], [80], ["1"], block=BLOCK, warps=WARPS)[::7],
    ]
    assert faults(variants, compile_all(variants, tmp_path)) == []


@pytest.mark.parametrize("triton", TRITONS)
def test_kernels_compile_with_other_tritons(triton, tmp_path):
    """Every variant."""
    variants = all_variants(block=BLOCK, warps=WARPS)
    variants += all_variants(["bf16"], [90], ["any"], block=2, warps=WARPS)
    assert faults(variants, compile_all(variants, tmp_path, triton)) == []


def test_faults_of_machine_code_are_seen(tmp_path):
    """Controls: too many warps for the registers, an approximate logarithm, and a wrong type."""
    for file in (VERIFY, DRAWING):
        (tmp_path / file).parent.mkdir(parents=True)
    step, wrong_step = "tl.sum(all_masses)", "tl.sum(all_masses, 1)"
    approximate = 'tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [y], tl.float32, '
    (tmp_path / DRAWING).write_text(
        (ROOT / DRAWING).read_text().replace("tl.log(y)", f"{approximate}True, 1)")
    )
    (tmp_path / VERIFY).write_text((ROOT / VERIFY).read_text().replace(step, wrong_step))
    variants = [
        Variant("race", "bf16", 90),
        Variant("reject_child", "bf16", 90),
        Variant("race", "bf16", 90, block=16384, warps=32),
    ]
    race, reject, wide_race = compile_all(variants, tmp_path, root=tmp_path)
    assert race["approximate_logarithm"] and race["spilled_bytes"] == 0
    assert reject["error"].startswith("CompilationError")
    assert wide_race["spilled_bytes"] > SPILLED_BYTES
