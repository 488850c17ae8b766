"""The documentation agrees with the code.

Links lead somewhere, commands parse, quick ones run and print what the pages show, snippets run.
"""

import importlib.util
import re
import shlex
import shutil
from collections import Counter

import click
import pytest
from commands import call
from paths import ROOT

from sequoia_plan.artifacts import EAGLE_DRAFT, Acceptance, Latency, Profile, load_tree, save_tree
from sequoia_plan.planner.cli import main

PAGES = [page for name in (".", "docs", "examples") for page in sorted((ROOT / name).glob("*.md"))]
COMMANDS = ("sequoia-plan ", "python -m ", "python benchmarks/", "python tools/", "make ")
"""How the commands in code blocks begin."""
MODELS = "moe|hybrid|--target|--draft|--offload|--metrics|--format (draft|target)"
NOT_RUN = re.compile(
    rf"sequoia-plan (profile|bench|diagnose|doctor|serve|solve (own|streamed)\.yaml|.*({MODELS}))"
)
"""Commands of `sequoia-plan` that are parsed and not run here: they measure or need models. Tests
of their own run them."""
FOLDERS = (
    "artifacts|planner|engines|profiler|models|runtime|drafts|benchmarks|docs|examples|tests|tools"
)

each_page = pytest.mark.parametrize(
    "page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES]
)


def split(text):
    """(code blocks as (language, content), the other text).

    A block is fenced, or indented by four spaces after an empty line.
    """
    pattern = re.compile(
        r"^```(\w*)\n(.*?)^```$|(?:(?<=\n\n)|\A)((?:(?: {4}[^\n]*)?\n)+)", re.M | re.S
    )
    blocks = []
    for language, fenced, indented in pattern.findall(text):
        if fenced or indented.strip():
            content = fenced or re.sub(r"^ {4}", "", indented, flags=re.M)
            blocks.append((language, re.sub(r"\\\n *", "", content.strip("\n"))))
    return blocks, pattern.sub("\n", text)


def sessions(text):
    """Every command of a page as (words, the lines of output that the page shows after it)."""
    shown = []
    for _, block in split(text)[0]:
        lines = []  # those before the first command belong to none
        for line in block.splitlines():
            command = line.strip().removeprefix("$ ")
            if command.startswith(COMMANDS):
                lines = []
                words = shlex.split(command.split(" > ")[0], comments=True)
                shown.append((words, lines if line.startswith("$ ") else []))
            else:
                lines.append(line)
    return shown


def snippets(text):
    """Every code block in Python."""
    return [
        block
        for language, block in split(text)[0]
        if language == "python" or re.match(r"(from|import) ", block)
    ]


def headings(text):
    """The anchors of a page's headings in their order, as GitHub makes them."""
    anchors, repeats = [], Counter()
    for heading in re.findall(r"^#+ (.*)", split(text)[1], re.M):
        title = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        anchors.append(f"{anchor}-{repeats[anchor]}" if repeats[anchor] else anchor)
        repeats[anchor] += 1
    return anchors


def dead_links(text, page):
    """Links of a page that lead to no file or heading, and paths and tests that do not exist."""
    prose, dead = split(text)[1], []
    for path, test in re.findall(rf"`((?:{FOLDERS})/[\w./-]*)(?:::(\w+))?`", prose):
        file = ROOT / path
        if not file.exists() or (test and f"def {test}(" not in file.read_text()):
            dead.append(test or path)
    for link in re.findall(r"\]\((?!\w+:)([^)\s]+)\)", re.sub(r"`[^`]*`", "", prose)):
        name, _, anchor = link.partition("#")
        file = page.parent / name if name else page
        if not file.exists() or (anchor and anchor not in headings(file.read_text())):
            dead.append(link)
    return dead


@each_page
def test_links_lead_somewhere(page):
    assert dead_links(page.read_text(), page) == []


def test_dead_links_are_found():
    text = "[1](none.md) [2](#none) [3](planner.md#none) [4](planner.md#the-planner) `docs/no.md`"
    text += " `tests/test_docs.py::test_dead_links_are_found` `tests/test_docs.py::test_none`"
    page = ROOT / "docs" / "engines.md"
    dead = ["docs/no.md", "test_none", "none.md", "#none", "planner.md#none"]
    assert dead_links(text, page) == dead


def test_every_decision_is_in_the_index():
    text = (ROOT / "docs" / "decisions.md").read_text()
    index = text.partition("\n## ")[0]
    assert re.findall(r"\]\(#([^)]+)\)", index) == headings(text)[1:]


def problem(words):
    """What is wrong with a command; None if nothing is."""
    program, *arguments = words
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
        return next((f"no target {word}" for word in arguments if word not in targets), None)
    if program == "python":
        name = arguments[arguments[0] == "-m"]
        is_there = (
            importlib.util.find_spec(name) if arguments[0] == "-m" else (ROOT / name).exists()
        )
        return None if is_there else f"{name} cannot be run"
    context, command = click.Context(main, info_name="sequoia-plan"), main
    try:
        while isinstance(command, click.Group) and arguments[:1] != ["--url"]:
            name, command, arguments = command.resolve_command(context, arguments)
            context = click.Context(command, context, name)
        command.make_context(name, arguments, parent=context)
    except click.UsageError as error:
        return error.format_message()
    return None


@each_page
def test_commands_parse(page):
    problems = {" ".join(words): problem(words) for words, _ in sessions(page.read_text())}
    assert {command: why for command, why in problems.items() if why} == {}


def test_commands_of_the_makefile_parse():
    makefile = re.sub(r"\\\n\t*", "", (ROOT / "Makefile").read_text())
    lines = re.findall(r"^\t\$\(BIN\)/(sequoia-plan .*)$", makefile, re.M)
    assert lines and [problem(shlex.split(line)) for line in lines] == [None] * len(lines)


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("sequoia-plan solve --bugdet 8", "--bugdet"),
        ("sequoia-plan slove", "slove"),
        ("sequoia-plan export tree.safetensors", "--format"),
        ("sequoia-plan diagnose vllm --bach 1", "--bach"),
        ("python benchmarks/none.py -o a.json", "benchmarks/none.py"),
        ("make everything", "no target everything"),
    ],
)
def test_wrong_commands_are_found(command, why):
    [(words, _)] = sessions(f"Text.\n\n    $ {command}  # a comment\n")
    assert why in problem(words)


@each_page
def test_options_in_sentences_exist(page):
    for text in re.findall(r"`(sequoia-plan [^`]*)`", split(page.read_text())[1]):
        if not re.search(r"COMMAND|NAME|\d|\||\.\.\.", text):
            context, command = click.Context(main), main
            names = [word for word in text.split()[1:] if not word.startswith("-")]
            while names and isinstance(command, click.Group):
                command = command.get_command(context, names.pop(0))
            assert command, text
            known = {option for parameter in command.params for option in parameter.opts}
            assert set(re.findall(r"(?<![\w-])--[a-z-]+", text)) <= known | {"--help"}, text


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, which holds the files that the documentation's commands read."""
    monkeypatch.chdir(tmp_path)
    profiles = ROOT / "artifacts" / "catalog" / "profiles"
    for name in ("profile.yaml", "large.yaml"):
        shutil.copy(profiles / "smollm2-135m-epyc-2-cores-t0.yaml", name)
    (tmp_path / "build").mkdir()
    for path in ("tree.safetensors", "build/tree.safetensors"):
        save_tree(load_tree("smollm2-135m-epyc-2-cores-t0"), path)
    # docs/planner.md describes the next three
    (tmp_path / "acceptance.json").write_text("[0.6, 0.2, 0.1]")
    shutil.copy(profiles / "smollm2-135m-epyc-2-cores-t06.yaml", "t06.yaml")
    vector = Profile.load(profiles / "llama3-70b-8b-cnn.yaml").acceptance
    latency = Latency({1: 5.7, 1024: 5.7}, {1: 0.025, 1024: 0.025}, 0.0, 0)
    Profile(Acceptance.given(vector), latency).save("offload.yaml")


def missing_lines(shown, output):
    """The lines that a page shows of a command's output and that it did not print.

    Seconds are those of the machine; "..." ends a line, or stands for lines left out.
    """
    text = re.sub(r"solved in [\d.]+ s", "solved in", output)
    lines = {line.rstrip() for line in text.splitlines()}
    missing = []
    for line in shown:
        line = re.sub(r"solved in [\d.]+ s", "solved in", line).rstrip()
        start = line.removesuffix("...")
        if line not in lines and (
            start == line or not any(other.startswith(start) for other in lines)
        ):
            missing.append(line)
    return [line for line in missing if line]


def test_missing_lines_are_found():
    output = "a tree, solved in 0.1 s\n1 2 3\nend\n"
    assert missing_lines(["a tree, solved in 9.25 s", "1 2 ...", "...", "", "end"], output) == []
    assert missing_lines(["another", "1 3 ...", "en"], output) == ["another", "1 3 ...", "en"]


QUICK = {
    page: [
        (words, shown)
        for words, shown in sessions(page.read_text())
        if words[0] == "sequoia-plan" and not NOT_RUN.match(" ".join(words))
    ]
    for page in PAGES
}


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page, commands in QUICK.items() if commands], ids=str)
def test_quick_commands_run(page, folder):
    """In the order of the page, in one folder, as a reader would run them."""
    for words, shown in QUICK[page]:
        result = call(*words[1:])
        assert result.exit_code == 0, f"{words}: {result.output}"
        assert missing_lines(shown, result.output) == [], words


WITH_SNIPPETS = [
    page for page in PAGES if snippets(page.read_text()) and "models.md" not in page.name
]
"""tests/models/test_own_models.py runs own-models.md, and the test below this one models.md."""


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_SNIPPETS, ids=[page.name for page in WITH_SNIPPETS])
def test_snippets_run(page, folder, pair, monkeypatch, capsys):
    """All blocks of a page one after the other, with the embedded pair.

    A comment after `print` is what it prints.
    """
    from sequoia_plan.runtime import load_pair

    monkeypatch.setattr(
        "sequoia_plan.runtime.load_pair",
        lambda **options: load_pair(**options) if options else pair,
    )
    names = {}
    for snippet in snippets(page.read_text()):
        exec(snippet, names)
        out = capsys.readouterr().out
        assert out.strip(), snippet  # every snippet shows something
        assert missing_lines(re.findall(r"^print\(.*\)  # (.+)", snippet, re.M), out) == []


@pytest.mark.slow
def test_tiny_models_from_end_to_end(tmp_path, monkeypatch, run_briefly):
    """The last section of docs/models.md, with brief measurements."""
    monkeypatch.chdir(tmp_path)
    _, _, text = (ROOT / "docs" / "models.md").read_text().partition("\n## From end to end")
    exec(snippets(text)[0], {})
    brief = {"profile": ["--tokens", "8", "--precision", "40%"], "bench": ["--limit", "2"]}
    for (_, command, *options), _ in sessions(text):
        run_briefly(command, *options, *brief.get(command, []))
    assert Profile.load("moe.yaml").drafting == EAGLE_DRAFT
    assert load_tree("hybrid.safetensors").plan.branching == 1
