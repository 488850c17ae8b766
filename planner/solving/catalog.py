"""Makes the trees of the catalog from artifacts/catalog/profiles: `python -m sequoia_plan.planner.solving.catalog`.

A profile with latencies gives its fastest tree, under its own name; one without gives the best tree of every size and
depth in PUBLISHED, for which Sequoia's paper reports what its own tree of that shape achieved. Prints the table of docs/catalog.md.
"""

from __future__ import annotations

from sequoia_plan.artifacts import Profile, TokenTree
from sequoia_plan.artifacts.files import write_atomically
from sequoia_plan.artifacts.tree_file import CATALOG, to_bytes
from sequoia_plan.planner.solving.solve import solve

PUBLISHED = {
    (64, 6): "4.28 (Vicuna-33B, C4, T = 0), 4.16 (T = 0.6)",
    (64, 7): "3.57 (Llama2-13B, C4, T = 0.6)",
    (64, 9): "4.20 (Llama2-13B, C4, T = 0)",
    (128, 6): "3.45 (Llama2-7B, CNN, T = 0.6)",
    (128, 7): "4.05 (Llama2-7B, CNN, T = 0), 3.92 (C4, T = 0.6)",
    (128, 10): "5.08 (Llama2-7B, C4, T = 0)",
    (768, 18): "11.68 (Llama3-70B, MT-Bench, T = 0), 11.37 (T = 0.6)",
}
"""(size, depth) -> tokens a step that Sequoia, arXiv 2402.12374, measured with its tree of that shape (tables 1 and 2)."""
BUDGET, DEPTH = 768, 20


def build() -> dict[str, TokenTree]:
    """Every tree of the catalog by name."""
    trees = {}
    for file in sorted((CATALOG / "profiles").glob("*.yaml")):
        profile = Profile.load(file)
        if profile.latency:
            trees[file.stem] = solve(profile, BUDGET, DEPTH).tree
        else:
            trees |= {f"{file.stem}-{size}x{depth}": solve(profile, size, depth, objective="tokens").tree for size, depth in PUBLISHED}
    return trees


def table(trees: dict[str, TokenTree]) -> str:
    """The trees as a Markdown table, with the published figures."""
    rows = ["| name | size | depth | level widths | expected tokens | published, same size and depth |", "|---|---|---|---|---|---|"]
    for name, tree in trees.items():
        widths = " ".join(map(str, tree.level_widths))
        published = PUBLISHED.get((tree.plan.budget or 0, tree.plan.depth or 0), "")
        rows.append(f"| `{name}` | {tree.size} | {tree.depth} | {widths} | {tree.plan.expected_tokens:.3f} | {published} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    made = build()
    for stale in CATALOG.glob("*.safetensors"):
        stale.unlink()
    for name, tree in made.items():
        write_atomically(CATALOG / f"{name}.safetensors", to_bytes(tree))
    print(table(made), end="")
