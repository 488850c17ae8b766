"""What the processor that numba compiles for can do, and LLVM's integers."""

import platform
import sys

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import config
from numba.core.registry import cpu_target

from sequoia_plan.artifacts.processor import instruction_sets

BYTE, HALF_WORD, WORD, LONG = (ir.IntType(bits) for bits in (8, 16, 32, 64))


def _compiled_for() -> set[str]:
    """The features of the processor that numba compiles for."""
    if platform.machine() in ("aarch64", "arm64") and not config.CPU_FEATURES:
        # LLVM does not report these two of the processor that it runs on
        names = ["asimddp"] if sys.platform == "darwin" else instruction_sets() or []
        own = {"asimddp": "+dotprod", "i8mm": "+i8mm"}
        features = [llvm.get_host_cpu_features().flatten(), *(own[n] for n in names if n in own)]
        config.CPU_FEATURES = ",".join(features)
    features = cpu_target.target_context.codegen().magic_tuple()[2].split(",")
    return {feature[1:] for feature in features if feature.startswith("+")}


FEATURES = _compiled_for()
"""As LLVM names them."""


def multiplies_bfloats(lanes: int) -> bool:
    """Whether vdpbf16ps adds products of pairs of bfloat16 numbers, in vectors of so many."""
    return "avx512bf16" in FEATURES and lanes == 16
