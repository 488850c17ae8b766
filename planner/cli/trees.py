"""`sequoia-plan solve` and `show`: no model is loaded."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from sequoia_plan.planner.cli.options import (
    PATH,
    count_option,
    file_option,
    json_option,
    output_option,
)
from sequoia_plan.planner.cli.pair import when_numba_compiles
from sequoia_plan.planner.cli.terminal import print_json, status

if TYPE_CHECKING:
    from sequoia_plan.artifacts import Profile, TokenTree

COMPILING = "compiling the solver, once: about 10 seconds"
LARGE_SIZE = 16
"""Nodes up to which acceptance counted with the profile's small tree holds."""
PLAN_KEYS = (
    "expected_tokens",
    "upper_bound",
    "predicted_speedup",
    "speedup_bound",
    "interval",
    "interval_new_kind",
    "solver",
    "tree_speedup",
    "median_speedup",
    "speedup_by_kind",
    "interval_by_kind",
    "tokens_by_kind",
)
"""Fields of the plan that `solve --json` prints beside the tree."""


@click.command()
@click.argument("profile_file", metavar="[PROFILE]", type=PATH, required=False)
@count_option("--budget", default=768, text="Nodes, the root included.")
@count_option("--depth", default=20, text="Levels, the root's included.")
@click.option(
    "--objective",
    type=click.Choice(["speed", "tokens"]),
    help="What to maximise. [default: speed with a profile, else tokens]",
)
@file_option(
    "--acceptance",
    text="Instead of a profile: JSON or YAML list p[1..B], or a list of such rows per level.",
)
@click.option(
    "--lookup/--no-lookup",
    default=True,
    help="Take trees by how much of the text before a step occurs earlier in it, with tokens that "
    "are looked up there, if the profile has counts for it and the objective is speed.",
)
@click.option(
    "--draft/--no-draft",
    default=True,
    help="With --no-draft, plan prompt lookup alone; generate and bench then take --draft none.",
)
@output_option("tree.safetensors", "tree")
@json_option
def solve(
    profile_file: str | None, acceptance: str | None, output: str, as_json: bool, **limits: Any
) -> None:
    """Compile the best token tree for PROFILE (default: profile.yaml)."""
    if profile_file and acceptance:
        raise click.UsageError("give either PROFILE or --acceptance, not both")
    from sequoia_plan.artifacts import Profile, save_tree
    from sequoia_plan.artifacts.files import refuse_to_replace
    from sequoia_plan.planner.report.tree_summary import describe
    from sequoia_plan.planner.solving.solve import solve as solve_tree

    source = acceptance or profile_file or "profile.yaml"
    measured = _read_acceptance(source) if acceptance else Profile.load(source)
    refuse_to_replace(output, source)
    with status("solving") as show, when_numba_compiles(partial(show, COMPILING)):
        solution = solve_tree(measured, **limits)
    tree, plan = solution.tree, solution.tree.plan
    save_tree(tree, output)
    if isinstance(measured, Profile):
        _advise_to_count_again(measured, tree.size, output)
    if as_json:
        plan_values = plan.to_dict()
        print_json(
            _shape(tree)
            | {key: plan_values.get(key) for key in PLAN_KEYS}
            | {"verifier": plan.settings.get("verifier"), "seconds": solution.seconds}
        )
        return
    click.echo(f"{tree}, solved in {solution.seconds:.3f} s")
    for line in describe(tree):
        click.echo(line)
    if plan.predicted_speedup is not None and tree.size == 1 and not tree.by_match:
        click.echo(
            "no tree is faster than plain decoding with these measurements: do not speculate"
        )
    click.echo(f"wrote {output}; sequoia-plan show {output} says more")


def _advise_to_count_again(profile: Profile, size: int, output: str) -> None:
    """Say so if the tree is too large for how the profile's acceptance was counted.

    The text of a profile is written with a tree, and steps of a larger one begin elsewhere. So a
    tree of more than `LARGE_SIZE` nodes, and more than twice those of the one that wrote, is
    promised too many tokens.
    """
    if not profile.acceptance.counts or size <= max(LARGE_SIZE, 2 * (profile.tree_size or 0)):
        return
    counted_with = f"a tree of {profile.tree_size} nodes" if profile.tree_size else "a small tree"
    click.echo(
        f"Note: acceptance was counted with {counted_with}, which promises larger ones a few "
        f"percent too much; count again with profile --tree {output}, then solve again",
        err=True,
    )


@click.command()
@click.argument("tree_file", metavar="[TREE]", type=PATH, default="tree.safetensors")
@file_option(
    "--plot", text="Draw the tree, or the trees by match side by side, into a .png or .svg file."
)
@json_option
def show(tree_file: str, plot: str | None, as_json: bool) -> None:
    """Show a compiled tree: a file (default: tree.safetensors) or a name of the catalog."""
    from sequoia_plan.artifacts import load_tree

    tree = load_tree(tree_file)
    if plot:
        from sequoia_plan.artifacts.files import refuse_to_replace
        from sequoia_plan.planner.report.plot import draw

        refuse_to_replace(plot, tree_file)
        draw(tree, plot)
    if as_json:
        widths = tree.level_widths.tolist()
        plan = tree.plan.to_dict()
        print_json(_shape(tree) | {"level_widths": widths, "plan": plan, "plot": plot})
        return
    from sequoia_plan.planner.report.tree_summary import print_summary

    print_summary(tree)
    if plot:
        click.echo(f"wrote {plot}")


def _shape(tree: TokenTree) -> dict[str, Any]:
    """What `--json` prints of a tree, and of its trees by match and by context."""
    by_match = [
        {
            "match_length": match_plan.match_length,
            "share": match_plan.share,
            "looks_up": class_tree.looks_up,
            "expected_tokens": match_plan.expected_tokens,
            "step_seconds": match_plan.step_seconds,
            "size": class_tree.size,
            "depth": class_tree.depth,
            "parents": class_tree.parents.tolist(),
        }
        for match_plan in tree.plan.by_match
        for class_tree in [tree.for_match(match_plan.match_length)]
    ]
    return {
        "size": tree.size,
        "depth": tree.depth,
        "branching": tree.branching,
        "parents": tree.parents.tolist(),
        "by_match": by_match,
        "by_context": {start: _shape(other) for start, other in tree.by_context.items()},
    }


def _read_acceptance(path: str) -> Any:
    """Read a JSON or YAML list; JSON is tried first, because YAML does not take all of it."""
    from sequoia_plan.artifacts.files import read_bytes
    from sequoia_plan.artifacts.yaml_text import load

    expected = "a JSON or YAML list of probabilities p[1], p[2], ..."
    data = read_bytes(path, expected)
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return load(data, path, expected)
