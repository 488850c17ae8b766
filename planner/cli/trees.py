"""Commands about trees as files; no model is loaded."""

from __future__ import annotations

import json
import shutil
from typing import Any

import click

from sequoia_plan.planner.cli.options import json_option, verifier_option
from sequoia_plan.planner.cli.terminal import print_json

FORMAT_HELP = "The format; dot is Graphviz, hf a folder with the draft (or the target) as transformers and vLLM load it."
PROMISED = ("expected_tokens", "upper_bound", "predicted_speedup", "speedup_bound", "interval", "interval_new_kind", "solver", "alternatives")
"""Of the plan, what `solve --json` says beside the tree."""


@click.command()
@click.argument("profile_file", metavar="[PROFILE]", type=click.Path(), required=False)
@click.option("--budget", type=click.IntRange(min=1), default=768, show_default=True, help="Nodes, the root included.")
@click.option("--depth", type=click.IntRange(min=1), default=20, show_default=True, help="Levels, the root's included.")
@click.option("--branching", type=click.IntRange(min=1), help="Children a node may have. [default: the acceptance vector's length]")
@click.option(
    "--objective",
    type=click.Choice(["speed", "tokens", "paper"]),
    help="What to maximise. [default: speed with a profile, else tokens]",
)
@click.option("--acceptance", type=click.Path(), help="Instead of a profile: JSON or YAML list p[1..B], or a list of such rows per level.")
@click.option("--solver", type=click.Choice(["best-first", "hull", "dp"]), help="For tokens and paper. [default: best-first where it is exact, else hull]")
@click.option("--smooth", is_flag=True, help="Assume that rarer ranks are not likelier: the closest non-increasing vector is solved for.")
@click.option("--one-vector", is_flag=True, help="One acceptance vector for all levels, as in the paper. [default: by level, as the profile counts]")
@click.option("--baseline", metavar="NAME", help="Do not solve: chain, chains:K, k-ary:K, specinfer:K1,K2,..., random:SEED or parents:FILE.")
@verifier_option("the one of those in the profile whose tree is the fastest")
@click.option("-o", "--output", type=click.Path(), default="tree.safetensors", show_default=True, help="Write the tree there.")
@json_option
def solve(
    profile_file: str | None,
    budget: int,
    depth: int,
    branching: int | None,
    objective: str | None,
    acceptance: str | None,
    solver: str | None,
    smooth: bool,
    one_vector: bool,
    baseline: str | None,
    verifier: str | None,
    output: str,
    as_json: bool,
) -> None:
    """Compile the best token tree for PROFILE (default: profile.yaml)."""
    if profile_file and acceptance:
        raise click.UsageError("give either PROFILE or --acceptance, not both")
    from sequoia_plan.artifacts import Profile, save_tree
    from sequoia_plan.artifacts.files import refuse_to_replace
    from sequoia_plan.planner.report.tree_summary import promises
    from sequoia_plan.planner.solving.solve import solve as run

    source = acceptance or profile_file or "profile.yaml"
    measured = _read_acceptance(source) if acceptance else Profile.load(source)
    refuse_to_replace(output, source)
    solution = run(measured, budget, depth, branching, objective, solver, smooth, baseline, one_vector, verifier)
    save_tree(solution.tree, output)
    tree = solution.tree
    if as_json:
        facts = tree.plan.facts()
        print_json(
            {
                "size": tree.size,
                "depth": tree.depth,
                "branching": tree.branching,
                "verifier": tree.plan.settings.get("verifier"),
                **{name: facts.get(name) for name in PROMISED},
                "parents": tree.parents.tolist(),
                "seconds": solution.seconds,
            }
        )
        return
    click.echo(f"{tree}, solved in {solution.seconds:.3f} s")
    for line in promises(tree.plan):
        click.echo(line)
    if lost := tree.plan.interval and tree.plan.interval.lost:
        there = tree.plan.interval_new_kind and tree.plan.interval_new_kind.lost
        more = "; of the one for prompts of a new kind: {:.2%} and {:.2%}".format(*there) if there else ""
        click.echo("lost if the truth is at an end of the interval: {:.2%} and {:.2%}".format(*lost) + more)
    if tree.plan.predicted_speedup is not None and tree.size == 1:
        click.echo("no tree is faster than plain decoding with these measurements: do not speculate")
    click.echo(f"wrote {output}")


@click.command()
@click.argument("tree_file", metavar="[TREE]", type=click.Path(), default="tree.safetensors")
@click.option("--plot", type=click.Path(), help="Draw the tree, tokens against size, and speed over size and depth into a .png or .svg file.")
@json_option
def show(tree_file: str, plot: str | None, as_json: bool) -> None:
    """Show a compiled tree: a file (default: tree.safetensors) or a name of the catalog."""
    from sequoia_plan.artifacts import load_tree

    tree = load_tree(tree_file)
    if plot:
        from sequoia_plan.planner.report.plot import draw

        draw(tree, plot)
    if as_json:
        facts = {"size": tree.size, "depth": tree.depth, "branching": tree.branching, "level_widths": tree.level_widths.tolist()}
        print_json({**facts, "parents": tree.parents.tolist(), "plan": tree.plan.facts(), "plot": plot})
        return
    from sequoia_plan.planner.report.tree_summary import summarise

    summarise(tree)
    if plot:
        click.echo(f"wrote {plot}")


@click.command("export")
@click.argument("tree_file", metavar="[TREE]", type=click.Path(), required=False)
@click.option("--format", "form", type=click.Choice(["medusa", "nxd", "growmap", "dot", "hf"]), required=True, help=FORMAT_HELP)
@click.option("-o", "--output", type=click.Path(), required=True, help="Write it there; a growmap is saved by torch, or as JSON if the name ends in .json.")
@click.option("--model", type=click.Choice(["draft", "target"]), help="With hf: which model to write. [default: draft]")
@click.option("--target", metavar="ID|DIR|FILE.gguf", help="With hf: the target. [default: the embedded SmolLM2-135M-Instruct]")
@click.option("--draft", metavar="FILE", help="With hf: a draft .safetensors file, or smollm2-135m-draft. [default: smollm2-135m-eagle3]")
@json_option
def export_command(tree_file: str | None, form: str, output: str, model: str | None, target: str | None, draft: str | None, as_json: bool) -> None:
    """Write TREE (a file or a name of the catalog) for another engine, or with hf a model as a folder that other engines load."""
    from sequoia_plan.artifacts import load_tree
    from sequoia_plan.artifacts.files import refuse_to_replace
    from sequoia_plan.artifacts.interchange import export_tree

    if form == "hf":
        if tree_file:
            raise click.UsageError("--format hf writes a model, not a tree: leave TREE out")
        _export_model(output, model or "draft", target, draft, as_json)
        return
    if model or target or draft:
        raise click.UsageError(f"--model, --target and --draft are for --format hf; {form} is a format of trees")
    if not tree_file:
        raise click.UsageError(f"--format {form} needs a TREE: a file or a name of the catalog")
    tree = load_tree(tree_file)
    refuse_to_replace(output, tree_file)
    export_tree(tree, output, form)
    if as_json:
        print_json({"output": output, "format": form, "size": tree.size, "depth": tree.depth})
        return
    click.echo(f"wrote {output}: {tree.size} nodes as {form}")


def _export_model(output: str, model: str, target: str | None, draft: str | None, as_json: bool) -> None:
    """A folder as transformers writes them, with the tokenizer."""
    from sequoia_plan.artifacts import ArgumentError
    from sequoia_plan.artifacts.files import new_folder

    if model == "target" and draft is not None:
        raise ArgumentError(f"--draft {draft}: --model target writes the target, whose folder says nothing of a draft; leave --draft out")
    if model == "draft" and draft == "int8":
        raise ArgumentError("--draft int8: a copy of the target that is made when it loads, expected a draft .safetensors file; write --model target")
    from sequoia_plan.runtime.pair import DEFAULT_DRAFT, EMBEDDED

    if model == "draft" and target is None:
        draft = draft or DEFAULT_DRAFT
    if model == "draft" and draft is not None and draft not in EMBEDDED and not draft.endswith(".safetensors"):
        raise ArgumentError(f"--draft {draft}: expected a draft .safetensors file; a folder can be given to other engines as it is")
    with new_folder(output) as folder:
        from sequoia_plan.planner.cli.pair import load_pair

        pair = load_pair(target, "int8" if model == "target" and target else draft, "cpu", "float32", placement="resident")
        from sequoia_plan.runtime.pair import save_model

        if draft == DEFAULT_DRAFT:
            shutil.copytree(EMBEDDED[draft], folder, dirs_exist_ok=True)
        else:
            save_model(pair, model, folder)
    facts = pair.facts[model]
    if as_json:
        print_json({"output": output, "format": "hf", "model": model, "name": facts["name"], "parameters": facts["parameters"]})
        return
    click.echo(f"wrote {output}: the {model} {facts['name']}" + (", bfloat16" if draft == DEFAULT_DRAFT else " with its tokenizer, float32"))


@click.command("import")
@click.argument("file", metavar="FILE", type=click.Path())
@click.option("-o", "--output", type=click.Path(), default="tree.safetensors", show_default=True, help="Write the tree there.")
@json_option
def import_command(file: str, output: str, as_json: bool) -> None:
    """Read a tree of another engine: Medusa choices, an NxD token tree, a growmap. The content tells which."""
    from sequoia_plan.artifacts import save_tree
    from sequoia_plan.artifacts.files import refuse_to_replace
    from sequoia_plan.artifacts.interchange import import_tree

    tree = import_tree(file)
    refuse_to_replace(output, file)
    save_tree(tree, output)
    if as_json:
        print_json({"output": output, "size": tree.size, "depth": tree.depth, "branching": tree.branching, "parents": tree.parents.tolist()})
        return
    click.echo(f"wrote {output}: {tree}")


def _read_acceptance(path: str) -> Any:
    """A JSON or YAML list; JSON first, because YAML does not take all of it."""
    from sequoia_plan.artifacts.files import read_bytes
    from sequoia_plan.artifacts.yaml_text import load

    expected = "a JSON or YAML list of probabilities p[1], p[2], ..."
    data = read_bytes(path, expected)
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return load(data, path, expected)
