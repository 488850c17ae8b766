"""Commands about trees as files. No model is loaded, except to export one."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import click

from sequoia_plan.planner.cli.options import json_option
from sequoia_plan.planner.cli.terminal import print_json

if TYPE_CHECKING:
    from sequoia_plan.artifacts import Profile, TokenTree

BRANCHING_HELP = "Children a node may have. [default: the acceptance vector's length]"
OBJECTIVE_HELP = "What to maximise. [default: speed with a profile, else tokens]"
ACCEPTANCE_HELP = (
    "Instead of a profile: JSON or YAML list p[1..B], or a list of such rows per level."
)
PLOT_HELP = (
    "Draw the tree, tokens against size, and speed over size and depth into a .png or .svg file; "
    "of trees by match, all trees and the speed by kind of prompts."
)
FORMAT_HELP = (
    "The format; dot is Graphviz, hf a folder with the draft (or the target) as transformers and "
    "vLLM load it."
)
EXPORT_OUTPUT_HELP = (
    "Write it there; a growmap is saved by torch, or as JSON if the name ends in .json."
)
EXPORT_DRAFT_HELP = (
    "With hf: a draft .safetensors file, or smollm2-135m-draft. [default: smollm2-135m-eagle3]"
)
LOOKUP_HELP = (
    "Take trees by how much of the text before a step occurs earlier in it, with tokens that are "
    "looked up there. [default: if the profile has counts for it and the objective is speed]"
)
NO_DRAFT_HELP = (
    "With --no-draft, plan prompt lookup alone; generate and bench then take --draft none."
)
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
)
"""Keys of the plan that `solve --json` prints beside the tree."""

tree_output_option = click.option(
    "-o",
    "--output",
    type=click.Path(),
    default="tree.safetensors",
    show_default=True,
    help="Write the tree there.",
)


@click.command()
@click.argument("profile_file", metavar="[PROFILE]", type=click.Path(), required=False)
@click.option(
    "--budget",
    type=click.IntRange(min=1),
    default=768,
    show_default=True,
    help="Nodes, the root included.",
)
@click.option(
    "--depth",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help="Levels, the root's included.",
)
@click.option("--branching", type=click.IntRange(min=1), help=BRANCHING_HELP)
@click.option("--objective", type=click.Choice(["speed", "tokens"]), help=OBJECTIVE_HELP)
@click.option("--acceptance", type=click.Path(), help=ACCEPTANCE_HELP)
@click.option("--lookup/--no-lookup", default=True, help=LOOKUP_HELP)
@click.option("--draft/--no-draft", default=True, help=NO_DRAFT_HELP)
@tree_output_option
@json_option
def solve(
    profile_file: str | None,
    budget: int,
    depth: int,
    branching: int | None,
    objective: str | None,
    acceptance: str | None,
    lookup: bool,
    draft: bool,
    output: str,
    as_json: bool,
) -> None:
    """Compile the best token tree for PROFILE (default: profile.yaml)."""
    if profile_file and acceptance:
        raise click.UsageError("give either PROFILE or --acceptance, not both")
    from sequoia_plan.artifacts import Profile, save_tree
    from sequoia_plan.artifacts.files import refuse_to_replace
    from sequoia_plan.planner.report.tree_summary import describe_by_match, describe_plan
    from sequoia_plan.planner.solving.solve import solve as solve_tree

    source = acceptance or profile_file or "profile.yaml"
    profile_or_probs = _read_acceptance(source) if acceptance else Profile.load(source)
    refuse_to_replace(output, source)
    solution = solve_tree(
        profile_or_probs,
        budget=budget,
        depth=depth,
        branching=branching,
        objective=objective,
        lookup=lookup,
        draft=draft,
    )
    tree, plan = solution.tree, solution.tree.plan
    save_tree(tree, output)
    if isinstance(profile_or_probs, Profile):
        _advise_to_count_again(profile_or_probs, tree.size, output)
    if as_json:
        plan_values = plan.to_dict()
        print_json(
            {
                "size": tree.size,
                "depth": tree.depth,
                "branching": tree.branching,
                "verifier": plan.settings.get("verifier"),
                **{key: plan_values.get(key) for key in PLAN_KEYS},
                "tree_speedup": plan.tree_speedup,
                "speedup_by_kind": plan.speedup_by_kind,
                "tokens_by_kind": plan.tokens_by_kind,
                "replayed_speedup": solution.replayed_speedup,
                "by_match": _by_match(tree),
                "parents": tree.parents.tolist(),
                "seconds": solution.seconds,
            }
        )
        return
    click.echo(f"{tree}, solved in {solution.seconds:.3f} s")
    for line in (*describe_plan(plan), *describe_by_match(tree)):
        click.echo(line)
    if solution.replayed_speedup is not None:
        click.echo(
            f"on the recorded texts   {solution.replayed_speedup:.3f}x over plain decoding, when "
            "they are decoded again on paper"
        )
    if plan.interval and plan.interval.lost:
        low, high = plan.interval.lost
        line = f"lost if the truth is at an end of the interval: {low:.2%} and {high:.2%}"
        if plan.interval_new_kind and plan.interval_new_kind.lost:
            low, high = plan.interval_new_kind.lost
            line += f"; of the one for prompts of a new kind: {low:.2%} and {high:.2%}"
        click.echo(line)
    if plan.predicted_speedup is not None and tree.size == 1 and not tree.by_match:
        click.echo(
            "no tree is faster than plain decoding with these measurements: do not speculate"
        )
    click.echo(f"wrote {output}")


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
@click.argument("tree_file", metavar="[TREE]", type=click.Path(), default="tree.safetensors")
@click.option("--plot", type=click.Path(), help=PLOT_HELP)
@json_option
def show(tree_file: str, plot: str | None, as_json: bool) -> None:
    """Show a compiled tree: a file (default: tree.safetensors) or a name of the catalog."""
    from sequoia_plan.artifacts import load_tree

    tree = load_tree(tree_file)
    if plot:
        from sequoia_plan.artifacts.files import refuse_to_replace

        refuse_to_replace(plot, tree_file)
        from sequoia_plan.planner.report.plot import draw

        draw(tree, plot)
    if as_json:
        print_json(
            {
                "size": tree.size,
                "depth": tree.depth,
                "branching": tree.branching,
                "level_widths": tree.level_widths.tolist(),
                "parents": tree.parents.tolist(),
                "by_match": _by_match(tree),
                "plan": tree.plan.to_dict(),
                "plot": plot,
            }
        )
        return
    from sequoia_plan.planner.report.tree_summary import print_summary

    print_summary(tree)
    if plot:
        click.echo(f"wrote {plot}")


def _by_match(tree: TokenTree) -> list[dict[str, Any]]:
    """What `--json` prints of each class of match; empty for a single tree without lookup."""
    summaries = []
    for part in tree.plan.by_match:
        class_tree = tree.for_match(part.match_length)
        summaries.append(
            {
                "match_length": part.match_length,
                "share": part.share,
                "size": class_tree.size,
                "depth": class_tree.depth,
                "looks_up": class_tree.looks_up,
                "expected_tokens": part.expected_tokens,
                "step_seconds": part.step_seconds,
                "parents": class_tree.parents.tolist(),
            }
        )
    return summaries


@click.command("export")
@click.argument("tree_file", metavar="[TREE]", type=click.Path(), required=False)
@click.option(
    "--format",
    "export_format",
    type=click.Choice(["medusa", "nxd", "growmap", "dot", "hf"]),
    required=True,
    help=FORMAT_HELP,
)
@click.option("-o", "--output", type=click.Path(), required=True, help=EXPORT_OUTPUT_HELP)
@click.option(
    "--model",
    type=click.Choice(["draft", "target"]),
    help="With hf: which model to write. [default: draft]",
)
@click.option(
    "--target",
    metavar="ID|DIR|FILE.gguf",
    help="With hf: the target. [default: the embedded SmolLM2-135M-Instruct]",
)
@click.option("--draft", metavar="FILE", help=EXPORT_DRAFT_HELP)
@json_option
def export_command(
    tree_file: str | None,
    export_format: str,
    output: str,
    model: str | None,
    target: str | None,
    draft: str | None,
    as_json: bool,
) -> None:
    """Write TREE (a file or a name of the catalog) for another engine, or with hf a model as a
    folder that other engines load."""
    from sequoia_plan.artifacts import load_tree
    from sequoia_plan.artifacts.files import refuse_to_replace
    from sequoia_plan.artifacts.interchange import export_tree

    if export_format == "hf":
        if tree_file:
            raise click.UsageError("--format hf writes a model, not a tree: leave TREE out")
        _export_model(output, model or "draft", target, draft, as_json)
        return
    if model or target or draft:
        raise click.UsageError(
            "--model, --target and --draft are for --format hf; "
            f"{export_format} is a format of trees"
        )
    if not tree_file:
        raise click.UsageError(
            f"--format {export_format} needs a TREE: a file or a name of the catalog"
        )
    tree = load_tree(tree_file)
    refuse_to_replace(output, tree_file)
    export_tree(tree, output, export_format)
    if as_json:
        print_json(
            {
                "output": output,
                "format": export_format,
                "size": tree.size,
                "depth": tree.depth,
            }
        )
        return
    click.echo(f"wrote {output}: {tree.size} nodes as {export_format}")


def _export_model(
    output: str, role: str, target: str | None, draft: str | None, as_json: bool
) -> None:
    """Write the target or the draft as a folder that transformers and vLLM load."""
    from sequoia_plan.artifacts import ArgumentError
    from sequoia_plan.artifacts.files import new_folder

    if role == "target" and draft is not None:
        raise ArgumentError(
            f"--draft {draft}: --model target writes the target, whose folder says nothing of a "
            "draft; leave --draft out"
        )
    if role == "draft" and draft == "int8":
        raise ArgumentError(
            "--draft int8: a copy of the target that is made when it loads, expected a draft "
            ".safetensors file; write --model target"
        )
    from sequoia_plan.runtime.pair import DEFAULT_DRAFT, EMBEDDED_DRAFTS, embedded_draft

    if role == "draft" and target is None:
        draft = draft or DEFAULT_DRAFT
    is_exportable = draft is None or draft in EMBEDDED_DRAFTS or draft.endswith(".safetensors")
    if role == "draft" and not is_exportable:
        raise ArgumentError(
            f"--draft {draft}: expected a draft .safetensors file; a folder can be given to other "
            "engines as it is"
        )
    with new_folder(output) as folder:
        from sequoia_plan.planner.cli.pair import load_pair

        # Target and draft are loaded together. To write the user's own target, any draft will do;
        # int8, a copy of the target in 8 bits, needs no file.
        draft_to_load = "int8" if role == "target" and target else draft
        pair = load_pair(target, draft_to_load, "cpu", "float32", placement="resident")
        from sequoia_plan.runtime.pair import save_model

        if draft == DEFAULT_DRAFT:
            shutil.copytree(embedded_draft(draft), folder, dirs_exist_ok=True)
        else:
            save_model(pair, role, folder)
    metadata = pair.metadata[role]
    if as_json:
        print_json(
            {
                "output": output,
                "format": "hf",
                "model": role,
                "name": metadata["name"],
                "parameters": metadata["parameters"],
            }
        )
        return
    contents = ", bfloat16" if draft == DEFAULT_DRAFT else " with its tokenizer, float32"
    click.echo(f"wrote {output}: the {role} {metadata['name']}{contents}")


@click.command("import")
@click.argument("file", metavar="FILE", type=click.Path())
@tree_output_option
@json_option
def import_command(file: str, output: str, as_json: bool) -> None:
    """Read a tree of another engine: Medusa choices, an NxD token tree, a growmap. The content
    tells which."""
    from sequoia_plan.artifacts import save_tree
    from sequoia_plan.artifacts.files import refuse_to_replace
    from sequoia_plan.artifacts.interchange import import_tree

    tree = import_tree(file)
    refuse_to_replace(output, file)
    save_tree(tree, output)
    if as_json:
        print_json(
            {
                "output": output,
                "size": tree.size,
                "depth": tree.depth,
                "branching": tree.branching,
                "parents": tree.parents.tolist(),
            }
        )
        return
    click.echo(f"wrote {output}: {tree}")


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
