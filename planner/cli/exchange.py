"""Commands that write files for other engines, and read theirs."""

import shutil

import click

from sequoia_plan.planner.cli.options import PATH, name_option, output_option, target_option
from sequoia_plan.planner.cli.pair import load_pair


@click.command("export")
@click.argument("tree_file", metavar="[TREE]", type=PATH, required=False)
@click.option(
    "--format",
    "export_format",
    type=click.Choice(["nxd", "growmap", "draft", "target"]),
    required=True,
    help="The format; draft and target are folders with that model as transformers and vLLM load "
    "it.",
)
@click.option("-o", "--output", type=PATH, required=True, help="Write it there.")
@target_option
@name_option(
    "--draft",
    metavar="FILE",
    text="With --format draft: a draft .safetensors file, or smollm2-135m-draft. [default: "
    "smollm2-135m-eagle3]",
)
def export_command(
    tree_file: str | None, export_format: str, output: str, target: str | None, draft: str | None
) -> None:
    """Write TREE (a file or a name of the catalog) for another engine, or a model as a folder that
    other engines load."""
    from sequoia_plan.artifacts import load_tree
    from sequoia_plan.artifacts.files import refuse_to_replace
    from sequoia_plan.artifacts.interchange import export_tree

    is_model = export_format in ("draft", "target")
    if is_model == bool(tree_file):
        raise click.UsageError("--format draft and target take no TREE; others need one")
    if (target and not is_model) or (draft and export_format != "draft"):
        raise click.UsageError("--target and --draft name models; a tree or a target has no draft")
    if is_model:
        _export_model(output, export_format, target, draft)
        return
    assert tree_file
    tree = load_tree(tree_file)
    refuse_to_replace(output, tree_file)
    export_tree(tree, output, export_format)
    click.echo(f"wrote {output}: {tree.size} nodes as {export_format}")


def _export_model(output: str, role: str, target: str | None, draft: str | None) -> None:
    """Write the target or the draft as a folder that transformers and vLLM load."""
    from sequoia_plan.artifacts.files import new_folder
    from sequoia_plan.runtime.pair import DEFAULT_DRAFT, EMBEDDED_DRAFTS, embedded_draft, save_model

    if role == "target":
        draft = "none"
    else:
        draft = draft or ("" if target else DEFAULT_DRAFT)  # which fits its own target only
        if draft not in EMBEDDED_DRAFTS and not draft.endswith(".safetensors"):
            raise click.UsageError(
                f"--draft {draft}: expected a draft .safetensors file; other engines load a folder "
                "as it is"
            )
    with new_folder(output) as folder:
        if draft == DEFAULT_DRAFT:  # a folder that other engines load already
            for file in embedded_draft(draft).iterdir():
                shutil.copy(file, folder)
            name, contents = draft, ", bfloat16"
        else:
            pair = load_pair(
                target=target, draft=draft, device="cpu", dtype="float32", placement="resident"
            )
            save_model(pair, role, folder)
            name, contents = pair.metadata[role]["name"], " with its tokenizer, float32"
    click.echo(f"wrote {output}: the {role} {name}{contents}")


@click.command("import")
@click.argument("file", metavar="FILE", type=PATH)
@output_option("tree.safetensors", "tree")
def import_command(file: str, output: str) -> None:
    """Read a tree of another engine: an NxD token tree, a growmap. The content tells which."""
    from sequoia_plan.artifacts import save_tree
    from sequoia_plan.artifacts.files import refuse_to_replace
    from sequoia_plan.artifacts.interchange import import_tree

    tree = import_tree(file)
    refuse_to_replace(output, file)
    save_tree(tree, output)
    click.echo(f"wrote {output}: {tree}")
