"""What is written and read: token trees, plans, profiles and figures, with the cost model. Needs numpy, safetensors, msgspec and pyyaml."""

from sequoia_plan.artifacts.bench_result import BenchResult
from sequoia_plan.artifacts.drafting import FEATURE_DRAFT, LANGUAGE_MODEL, Drafting, block_draft
from sequoia_plan.artifacts.errors import ArgumentError, SequoiaPlanError
from sequoia_plan.artifacts.latency import Latency, Stream, Verification
from sequoia_plan.artifacts.plan import Plan
from sequoia_plan.artifacts.profile import Judged, LevelCounts, Lift, Profile
from sequoia_plan.artifacts.tree import TokenTree
from sequoia_plan.artifacts.tree_file import load_tree, save_tree

__all__ = [
    "FEATURE_DRAFT",
    "LANGUAGE_MODEL",
    "ArgumentError",
    "BenchResult",
    "Drafting",
    "Judged",
    "Latency",
    "LevelCounts",
    "Lift",
    "Plan",
    "Profile",
    "SequoiaPlanError",
    "Stream",
    "TokenTree",
    "Verification",
    "block_draft",
    "load_tree",
    "save_tree",
]
