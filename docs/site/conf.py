"""The documentation site, which `make docs` builds from the Markdown files where they lie.

README.md is the home page, so the links between the files are the same as in the repository.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx

from sequoia_plan.artifacts import BenchResult, load_tree
from sequoia_plan.engines.plan import EnginePlan
from sequoia_plan.planner.report.engine_page import engine_page
from sequoia_plan.planner.report.page import page

RESULTS = Path(__file__).parent.parent.parent / "benchmarks" / "results"

SHORT_CELL = 24
"""Characters of a table's cell that does not wrap; a figure with its interval has up to 20."""

NAVIGATION = {
    "Use": [
        ("Start here", "docs/start"),
        ("When to use it", "docs/when"),
        ("Own models", "docs/own-models"),
        ("Models and drafts", "docs/models"),
        ("Examples", "examples/README"),
        ("Command line", "build/reference/cli"),
        ("Python API", "build/reference/api"),
    ],
    "How it works": [
        ("Architecture", "docs/architecture"),
        ("Planner", "docs/planner"),
        ("Prompt lookup", "docs/lookup"),
        ("Profiling and bench", "docs/profiling"),
        ("Results", "docs/results"),
        ("Models of 1.5B and .5B", "docs/sizes"),
        ("Speed", "docs/speed"),
        ("Verifiers and sampling", "docs/verifiers"),
        ("Targets that do not fit", "docs/offloading"),
        ("An endpoint for editors", "docs/serve"),
    ],
    "With other software": [
        ("llama.cpp and vLLM", "docs/engines"),
        ("transformers", "docs/huggingface"),
    ],
    "Files": [
        ("File formats", "docs/format"),
        ("Other engines' formats", "docs/interchange"),
        ("Catalog of trees", "docs/catalog"),
    ],
    "Drafts": [
        ("The embedded drafts", "docs/draft"),
    ],
    "Contribute": [
        ("Contributing", "CONTRIBUTING"),
        ("Add a drafter", "docs/add-a-drafter"),
        ("Add a verifier", "docs/add-a-verifier"),
        ("Add an engine", "docs/add-an-engine"),
        ("Release", "RELEASING"),
        ("Decisions", "docs/decisions"),
        ("Changes", "CHANGELOG"),
    ],
}
"""Every page beside the home page, in a reader's order: its title, and its file without ".md"."""

project = "sequoia-plan"
extensions = ["myst_parser", "sphinx_copybutton"]
root_doc = "README"
include_patterns = ["*.md", "docs/*.md", "examples/*.md", "build/reference/*.md"]
exclude_patterns = [".*", "typings"]
highlight_language = "none"  # `name_languages` says which language a block is in
myst_heading_anchors = 4  # with GitHub's anchors

html_theme = "furo"
html_title = project
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
html_use_index = False
smartquotes = False  # text stays as it is written
copybutton_prompt_text = "$ "  # of a session, only its commands are copied
copybutton_copy_empty_lines = False
pygments_style = "default"
pygments_dark_style = "github-dark"


def setup(app: Sphinx) -> None:
    """Register what Sphinx calls while it builds."""
    app.connect("source-read", add_site_text)
    app.connect("doctree-read", name_languages)
    app.connect("doctree-read", mark_short_cells)
    app.connect("build-finished", write_pages)


def add_site_text(app: Sphinx, name: str, source: list[str]) -> None:
    """Show the comments of a page that are for the site; the home page gets the navigation."""
    source[0] = re.sub(r"<!-- site: (.*?) -->", r"\1", source[0], flags=re.DOTALL)
    if name == root_doc:
        for caption, pages in NAVIGATION.items():
            entries = "\n".join(f"{title} <{file}>" for title, file in pages)
            source[0] += f"\n\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{entries}\n```\n"


def name_languages(app: Sphinx, doctree: nodes.document) -> None:
    """Blocks of code that are indented name no language."""
    for block in doctree.findall(nodes.literal_block):
        if block.get("language", "none") == "none":
            text = block.astext()
            if re.match(r"(from|import) ", text):
                block["language"] = "python"
            elif re.match(r"\s*\$ ", text):
                block["language"] = "console"
            elif re.match(r"(sequoia-plan|python|pip|make) ", text):
                block["language"] = "bash"


def mark_short_cells(app: Sphinx, doctree: nodes.document) -> None:
    """Figures and names in a table stay on one line; the style sheet gives sentences room."""
    for cell in doctree.findall(nodes.entry):
        cell["classes"].append("short" if len(cell.astext()) <= SHORT_CELL else "long")


def write_pages(app: Sphinx, error: Exception | None) -> None:
    """Write index.html, and the reports of bench and of engine for committed measurements."""
    if error:
        return
    reports = app.outdir / "reports"
    reports.mkdir(exist_ok=True)
    tree = load_tree(RESULTS / "tree.safetensors")
    result = BenchResult.load(RESULTS / "bench-bfloat16-t0-1-kinds.json")
    (reports / "bench.html").write_text(page(tree, result))
    plan = json.loads((RESULTS / "engine-vllm.json").read_text())["plan"]
    (reports / "engine.html").write_text(engine_page(EnginePlan.from_dict(plan, "plan")))
    home = f'<meta http-equiv="refresh" content="0; url={root_doc}.html">'
    (app.outdir / "index.html").write_text(f"<!doctype html>{home}<title>{project}</title>\n")
