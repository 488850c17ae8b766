"""What is written and read: token trees, profiles and their files. Needs numpy, safetensors and pyyaml only."""

from sequoia_plan.artifacts.errors import ArgumentError, SequoiaPlanError
from sequoia_plan.artifacts.profile import Latency, LevelCounts, Profile
from sequoia_plan.artifacts.tree import TokenTree
from sequoia_plan.artifacts.tree_file import load_tree, save_tree

__all__ = ["ArgumentError", "Latency", "LevelCounts", "Profile", "SequoiaPlanError", "TokenTree", "load_tree", "save_tree"]
