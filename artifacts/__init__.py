"""Everything that is written to files and read from them, and the cost model.

Artifacts are token trees, plans, profiles, and the results of bench. This package needs numpy,
safetensors, msgspec and pyyaml.
"""

from sequoia_plan.artifacts.acceptance import Acceptance
from sequoia_plan.artifacts.bench_result import BenchResult
from sequoia_plan.artifacts.counts import Counts
from sequoia_plan.artifacts.drafting import EAGLE_DRAFT, LANGUAGE_MODEL, Drafting, dflash_draft
from sequoia_plan.artifacts.errors import ArgumentError, SequoiaPlanError
from sequoia_plan.artifacts.latency import Latency, StreamCost, VerificationCost
from sequoia_plan.artifacts.plan import Plan
from sequoia_plan.artifacts.profile import Profile
from sequoia_plan.artifacts.tree import TokenTree
from sequoia_plan.artifacts.tree_file import load_tree, save_tree

__all__ = [
    "EAGLE_DRAFT",
    "LANGUAGE_MODEL",
    "Acceptance",
    "ArgumentError",
    "BenchResult",
    "Counts",
    "Drafting",
    "Latency",
    "Plan",
    "Profile",
    "SequoiaPlanError",
    "StreamCost",
    "TokenTree",
    "VerificationCost",
    "dflash_draft",
    "load_tree",
    "save_tree",
]
