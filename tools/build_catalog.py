"""Write the trees of the catalog from artifacts/catalog/profiles.

A maintainers' script, which is not installed. It also prints the table of docs/catalog.md. Run it
from the repository root:

    python tools/build_catalog.py

A profile with latencies gives its fastest tree without prompt lookup, under the profile's name. One
without gives the best tree of every size and depth in PAPER_TOKENS.
"""

from __future__ import annotations

from sequoia_plan.artifacts import Profile, TokenTree
from sequoia_plan.artifacts.files import write_atomically
from sequoia_plan.artifacts.tree_file import CATALOG, to_bytes
from sequoia_plan.planner.solving.solve import solve

PAPER_TOKENS = {
    (64, 6): "4.28 (Vicuna-33B, C4, T = 0), 4.16 (T = 0.6)",
    (64, 7): "3.57 (Llama2-13B, C4, T = 0.6)",
    (64, 9): "4.20 (Llama2-13B, C4, T = 0)",
    (128, 6): "3.45 (Llama2-7B, CNN, T = 0.6)",
    (128, 7): "4.05 (Llama2-7B, CNN, T = 0), 3.92 (C4, T = 0.6)",
    (128, 10): "5.08 (Llama2-7B, C4, T = 0)",
    (768, 18): "11.68 (Llama3-70B, MT-Bench, T = 0), 11.37 (T = 0.6)",
}
"""Tokens a step of trees by (size, depth), from tables 1 and 2 of Sequoia, arXiv 2402.12374."""
MAX_SIZE, MAX_DEPTH = 768, 20
"""Limits for the fastest tree of a profile with latencies."""


def build() -> dict[str, TokenTree]:
    """Solve for every tree of the catalog; returns them by name."""
    trees = {}
    for file in sorted((CATALOG / "profiles").glob("*.yaml")):
        profile = Profile.load(file)
        if profile.latency:
            trees[file.stem] = solve(profile, budget=MAX_SIZE, depth=MAX_DEPTH, lookup=False).tree
            continue
        for size, depth in PAPER_TOKENS:
            solution = solve(profile, budget=size, depth=depth, objective="tokens")
            trees[f"{file.stem}-{size}x{depth}"] = solution.tree
    return trees


def table(trees: dict[str, TokenTree]) -> str:
    """The trees as a Markdown table, beside the paper's figures."""
    rows = [
        "| name | size | depth | level widths | expected tokens | published, same size and depth |",
        "|---|---|---|---|---|---|",
    ]
    for name, tree in trees.items():
        widths = " ".join(map(str, tree.level_widths))
        tokens = f"{tree.plan.expected_tokens:.3f}"
        paper_tokens = PAPER_TOKENS.get((tree.plan.budget or 0, tree.plan.depth or 0), "")
        cells = [f"`{name}`", str(tree.size), str(tree.depth), widths, tokens, paper_tokens]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows) + "\n"


def write(trees: dict[str, TokenTree]) -> None:
    """Replace all trees of the catalog."""
    for old_file in CATALOG.glob("*.safetensors"):
        old_file.unlink()
    for name, tree in trees.items():
        write_atomically(CATALOG / f"{name}.safetensors", to_bytes(tree))


if __name__ == "__main__":
    catalog_trees = build()
    write(catalog_trees)
    print(table(catalog_trees), end="")
