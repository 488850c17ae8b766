"""The documentation agrees with the code.

Links lead somewhere, commands parse and run and print what the pages show, snippets run, lines are
short.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import click
import pytest
from cli_reference import commands as commands_of
from cli_reference import reference
from click.testing import CliRunner
from paths import ROOT

from sequoia_plan.artifacts import Acceptance, Latency, Profile, load_tree, save_tree
from sequoia_plan.planner.cli import main

FOLDERS_OF_PAGES = (ROOT, ROOT / "docs", ROOT / "examples")
PAGES = [page for folder in FOLDERS_OF_PAGES for page in sorted(folder.glob("*.md"))]
REGENERATE = "python tools/cli_reference.py > docs/cli.md"
COMMANDS = (
    "sequoia-plan ",
    "python -m ",
    "python benchmarks/",
    "python tests/",
    "python tools/",
    "make ",
)
"""How the commands in code blocks begin."""
TESTED_ELSEWHERE = (
    "tests/runtime/test_offload.py profiles, solves and generates with a streamed target"
)
OWN_MODELS = "tests/runtime/test_own_models.py runs the page with the folders that it makes"
NOT_RUN = {
    "sequoia-plan profile": "measures for minutes",
    "sequoia-plan bench": "decodes for minutes",
    "python -m sequoia_plan_drafts.recipe": "trains for hours",
    "python tools/build_catalog.py": "rewrites files; tests/artifacts/test_catalog.py makes them",
    "python tools/build_release.py": "needs the repository's history; tests/test_release.py",
    "python benchmarks/": "measures for minutes",
    "sequoia-plan engine vllm --target": "measures for minutes; tests/engines/test_vllm.py does",
    "sequoia-plan engine vllm --metrics": "needs a server; tests/engines/test_cli.py reads files",
    "sequoia-plan engine sglang": "reads files of a server; tests/engines/test_cli.py writes such",
    "sequoia-plan engine llamacpp": "measures for minutes; tests/engines/test_llamacpp.py does",
    "sequoia-plan engine settings": "reads such a plan; tests/engines/test_settings.py does",
    "sequoia-plan export --format hf": "tests/cli/test_export_model.py writes the folders",
    "make": "sets up an environment",
    "sequoia-plan solve own.yaml": OWN_MODELS,
    "sequoia-plan generate --target target": OWN_MODELS,
    "sequoia-plan solve streamed.yaml": TESTED_ELSEWHERE,
    "sequoia-plan generate --offload": TESTED_ELSEWHERE,
}
"""How the commands begin that are parsed but not run here, and why.

Every other command in the documentation runs."""

NAMES = {file.stem for file in (ROOT / "artifacts" / "catalog").glob("*.safetensors")}
"""What is also accepted in place of a tree's file name."""
OTHER_FOLDERS = ("benchmarks", "docs", "examples", "tests", "tools", "drafts", "engines")
"""Folders, beside the packages, whose files the pages name."""

each_page = pytest.mark.parametrize(
    "page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES]
)


def split(text):
    """(code blocks as (language, content), all other lines).

    A block is fenced, or indented by four spaces.
    """
    blocks, prose = [], []
    fenced = indented = False
    blank = True
    for line in text.splitlines():
        if line.startswith("```"):
            fenced = not fenced
            if fenced:
                blocks.append((line[3:].strip(), []))
        elif fenced:
            blocks[-1][1].append(line)
        elif line.startswith("    ") and (indented or blank):
            if not indented:
                blocks.append(("", []))
            blocks[-1][1].append(line[4:])
            indented = True
        elif indented and not line.strip():
            blocks[-1][1].append("")
        else:
            prose.append(line)
            indented = False
        blank = not line.strip()
    return [(language, "\n".join(lines)) for language, lines in blocks], prose


def code_blocks(text):
    """The lines of each code block; a line that ends in a backslash goes on in the next."""
    return [re.sub(r"\\\n *", "", block).splitlines() for _, block in split(text)[0]]


def words_of(line):
    """A command as words, without its comment and without what follows a `>`."""
    return shlex.split(line.split(" > ")[0], comments=True)


def commands(text):
    """Every line of a code block that is a command, as words."""
    lines = [line.strip().removeprefix("$ ") for block in code_blocks(text) for line in block]
    return [words_of(line) for line in lines if line.startswith(COMMANDS)]


def sessions(text):
    """Every command after a `$`, as (words, the lines of output that the page shows).

    "..." stands for lines that are left out, or for the end of a line.
    """
    shown = []
    for block in code_blocks(text):
        lines = []  # those before the first command belong to none
        for line in block:
            if line.startswith("$ "):
                lines = []
                shown.append((words_of(line.removeprefix("$ ")), lines))
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


def why_not_run(words):
    """The reason in NOT_RUN; None for a command that runs."""
    command = " ".join(words)
    return next((reason for start, reason in NOT_RUN.items() if command.startswith(start)), None)


def test_split_finds_every_kind_of_block():
    text = (
        "Text\n    goes on.\n\n    import a\n\n    a()\n\nText.\n```python\nb()\n```\n\n"
        "    $ make \\\n        test  # all\n    done > by hand\n"
    )
    assert split(text) == (
        [
            ("", "import a\n\na()\n"),
            ("python", "b()"),
            ("", "$ make \\\n    test  # all\ndone > by hand"),
        ],
        ["Text", "    goes on.", "", "Text.", ""],
    )
    assert snippets(text) == ["import a\n\na()\n", "b()"]
    assert commands(text) == [["make", "test"]]
    assert sessions(f"{text}\nText.\n\n    more\n") == [(["make", "test"], ["done > by hand"])]


# Links


def headings(text):
    """The anchors of a page's headings in their order, as GitHub makes them."""
    anchors, repeats = [], Counter()
    for line in split(text)[1]:
        if heading := re.match(r"#+ (.*)", line):
            title = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading[1])
            anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
            anchors.append(f"{anchor}-{repeats[anchor]}" if repeats[anchor] else anchor)
            repeats[anchor] += 1
    return anchors


def dead_links(text, page):
    """The relative links in `text`, of the file `page`, that lead to no file or to no heading."""
    dead = []
    prose = re.sub(r"`[^`]*`", "", "\n".join(split(text)[1]))
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"\w+:", link):
            continue  # a web page
        name, _, anchor = link.partition("#")
        file = page.parent / name if name else page
        if file.exists() and anchor:
            anchors = headings(text if file == page else file.read_text())
            is_dead = anchor not in anchors
        else:
            is_dead = not file.exists()
        if is_dead:
            dead.append(link)
    return dead


@each_page
def test_links_lead_somewhere(page):
    assert dead_links(page.read_text(), page) == []


def test_dead_links_are_found():
    text = (
        "# A `title`, twice\n# A title twice\n[1](none.md) [2](#none) [3](planner.md#none)\n\n"
        "    [4](none.md)\n\n`[5](none.md)`\n"
        "[6](planner.md) [7](#a-title-twice) [8](#a-title-twice-1) [9](https://example.org/none) "
        "[10](planner.md#the-certificate)"
    )
    dead = ["none.md", "#none", "planner.md#none"]
    assert dead_links(text, ROOT / "docs" / "cli.md") == dead


def test_every_decision_is_in_the_index():
    text = (ROOT / "docs" / "decisions.md").read_text()
    index = text.partition("\n## ")[0]
    assert re.findall(r"\]\(#([^)]+)\)", index) == headings(text)[1:]


def missing_names(text):
    """Paths of this repository and dotted names of its packages, in prose, that do not exist."""
    prose = "\n".join(split(text)[1])
    packages = [folder.name for folder in ROOT.iterdir() if (folder / "__init__.py").exists()]
    folders = "|".join(sorted([*packages, *OTHER_FOLDERS]))
    paths = re.findall(rf"`((?:{folders})/[\w./-]*)`", prose)
    tests = re.findall(r"`(tests/\w+\.py)::(\w+)`", prose)
    names = re.findall(r"\bsequoia_plan(?:\.\w+)+", prose)
    missing_paths = [path for path in paths if not (ROOT / path).exists()]
    missing_tests = [f"{file}::{test}" for file, test in tests if not defines(ROOT / file, test)]
    return missing_paths + missing_tests + [name for name in names if not exists(name)]


def defines(file, function):
    """Whether a file of Python exists and defines the function."""
    return file.exists() and f"\ndef {function}(" in file.read_text()


def exists(name):
    """Whether `name` is a module or something in one."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            value = getattr(value, part, None)
        return value is not None
    return False


@each_page
def test_files_and_names_exist(page):
    assert missing_names(page.read_text()) == []


def test_missing_names_are_found():
    text = (
        "`runtime/none.py` `runtime/decoder.py` `runtime/` `tools/none.py` `drafts/` "
        "`tests/test_docs.py::test_missing_names_are_found` `tests/test_docs.py::test_none` "
        "sequoia_plan.runtime.none sequoia_plan.runtime.decoder.SequoiaDecoder sequoia_plan.none"
    )
    missing = ["runtime/none.py", "tools/none.py", "tests/test_docs.py::test_none"]
    missing += ["sequoia_plan.runtime.none", "sequoia_plan.none"]
    assert missing_names(text) == missing


# Commands


class Parsed(Exception):
    """A script has read its arguments."""


@pytest.fixture
def problem(monkeypatch):
    """A function: what is wrong with a command, None if nothing is.

    It parses with the command's own parser and runs nothing.
    """

    def stop(parser, arguments=None, namespace=None):
        unknown = parser.parse_known_args(arguments, namespace)[1]
        raise Parsed(f"unrecognized arguments: {' '.join(unknown)}" if unknown else "")

    def fail(parser, message):
        raise Parsed(message)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    monkeypatch.setattr(argparse.ArgumentParser, "error", fail)

    def of_click(words):
        try:
            context = click.Context(main, info_name="sequoia-plan")
            command, rest = main, words
            while isinstance(command, click.Group):
                name, command, rest = command.resolve_command(context, rest)
                if isinstance(command, click.Group):
                    context = click.Context(command, context, name)
            params = command.make_context(name, rest, parent=context).params
        except click.UsageError as error:
            return error.format_message()
        writes_folder = params.get("export_format") == "hf"  # a model is written as a folder
        values = [
            params[param.name]
            for param in command.params
            if isinstance(param.type, click.Path) and not (writes_folder and param.name == "output")
        ]
        files = [
            str(file)
            for value in values
            for file in (value if isinstance(value, tuple) else [value])
            if file
        ]
        wrong = [file for file in files if "." not in file and file not in NAMES]
        return f"{wrong[0]} is no file name" if wrong else None

    def of_python(words):
        is_module = words[0] == "-m"
        name, arguments = words[is_module], words[is_module + 1 :]
        if is_module and name in ("sequoia_plan", "sequoia_plan.planner.cli"):
            return of_click(arguments)
        if is_module and name.partition(".")[0] in sys.stdlib_module_names:
            return None
        if not (exists(name) if is_module else (ROOT / name).is_file()):
            return f"no {'module' if is_module else 'file'} {name}"
        specification = importlib.util.find_spec(name) if is_module else None
        if specification and specification.submodule_search_locations:
            specification = importlib.util.find_spec(f"{name}.__main__")
            if specification is None:
                return f"{name} cannot be run: it has no __main__"
        file = Path(specification.origin) if specification else ROOT / name
        source = file.read_text()
        if "argparse" not in source:
            takes_arguments = "sys.argv" in source
            return f"{name} takes no arguments" if arguments and not takes_arguments else None
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        with pytest.raises(Parsed) as stopped:
            runpy.run_path(str(file), run_name="__main__")
        return str(stopped.value) or None

    def of_make(words):
        targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return next((f"no target {word}" for word in words if word not in targets), None)

    parsers = {"sequoia-plan": of_click, "python": of_python, "make": of_make}
    return lambda words: parsers[words[0]](words[1:])


def test_commands_of_the_makefile_parse(problem):
    makefile = (ROOT / "Makefile").read_text()
    lines = re.findall(r"^\t\$\(BIN\)/(sequoia-plan .*)$", re.sub(r"\\\n\t*", "", makefile), re.M)
    problems = {line: problem(shlex.split(re.sub(r"\$[@<]", "a.file", line))) for line in lines}
    assert problems and set(problems.values()) == {None}, problems


@each_page
def test_commands_parse(page, problem):
    problems = {" ".join(words): problem(words) for words in commands(page.read_text())}
    assert {command: why for command, why in problems.items() if why} == {}


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("sequoia-plan solve --bugdet 8", "--bugdet"),
        ("sequoia-plan solve --budget many", "'many' is not a valid integer range"),
        ("sequoia-plan slove", "slove"),
        ("sequoia-plan show 20", "20 is no file name"),
        ("sequoia-plan profile --merge a.yaml --merge 20", "20 is no file name"),
        (
            "sequoia-plan export tree.safetensors --format onnx -o tree.onnx",
            "'onnx' is not one of",
        ),
        ("sequoia-plan export tree.safetensors --format nxd -o tree", "tree is no file name"),
        ("sequoia-plan export tree.safetensors", "Missing option '--format'"),
        ("sequoia-plan engine vlm", "vlm"),
        ("sequoia-plan engine vllm --bach 1", "--bach"),
        ("sequoia-plan engine vllm --metrics a.txt -o 20", "20 is no file name"),
        ("python -m sequoia_plan solve --bugdet 8", "--bugdet"),
        ("python benchmarks/solver.py --fast", "unrecognized arguments: --fast"),
        (
            "python benchmarks/verifiers.py",
            "the following arguments are required: -o/--output",
        ),
        ("python benchmarks/none.py -o a.json", "no file benchmarks/none.py"),
        (
            "python -m sequoia_plan_drafts.recipe train --text a --fast -o b",
            "unrecognized arguments: --fast",
        ),
        (
            "python -m sequoia_plan.planner.cli.none",
            "no module sequoia_plan.planner.cli.none",
        ),
        ("python -m sequoia_plan.planner.solving", "has no __main__"),
        ("python tools/cli_reference.py --fast", "takes no arguments"),
        ("make everything", "no target everything"),
    ],
)
def test_wrong_commands_are_found(command, why, problem):
    assert why in str(problem(*commands(f"Text.\n\n    $ {command}  # a comment\n")))


def unknown_options(text):
    """Options of `sequoia-plan` in the inline code of `text` that the named command lacks."""
    unknown = []
    all_commands = main.commands | dict(commands_of(main))
    prose = "\n".join(split(text)[1])
    for name, rest in re.findall(r"`sequoia-plan ((?:engine )?[a-z]+)([^`]*)`", prose):
        if name not in all_commands:
            unknown.append(name)
            continue
        options = {opt for option in all_commands[name].params for opt in option.opts}
        for option in re.findall(r"(?<![\w-])--?[a-z][a-z-]*", rest):
            if option not in options | {"--help"}:
                unknown.append(f"{name} {option}")
    return unknown


@each_page
def test_options_in_sentences_exist(page):
    assert unknown_options(page.read_text()) == []


def test_unknown_options_are_found():
    text = (
        "`sequoia-plan solve --bugdet 8 --depth 4`, `sequoia-plan slove`, "
        "`sequoia-plan bench -o x`, `sequoia-plan COMMAND --help`"
        "`sequoia-plan engine vllm --verify --bach 1`"
    )
    assert unknown_options(text) == ["solve --bugdet", "slove", "engine vllm --bach"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, which holds the files that the documentation's commands read."""
    monkeypatch.chdir(tmp_path)
    profiles = ROOT / "artifacts" / "catalog" / "profiles"
    for name in ("profile.yaml", "large.yaml"):
        shutil.copy(profiles / "smollm2-135m-epyc-2-cores-t0.yaml", name)
    save_tree(load_tree("smollm2-135m-epyc-2-cores-t0"), "tree.safetensors")
    # docs/planner.md describes the next three
    (tmp_path / "acceptance.json").write_text("[0.6, 0.2, 0.1]")
    shutil.copy(profiles / "smollm2-135m-epyc-2-cores-t06.yaml", "t06.yaml")
    vector = Profile.load(profiles / "llama3-70b-8b-cnn.yaml").acceptance
    latency = Latency({1: 5.7, 1024: 5.7}, {1: 0.025, 1024: 0.025}, 0.0, 0)
    Profile(Acceptance.given(vector), 0, latency).save("offload.yaml")
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "format.md", "docs/format.md")
    return tmp_path


def missing_lines(shown, output):
    """The lines that a page shows of a command's output and that it did not print.

    Seconds are those of the machine; "..." ends a line, or stands for lines left out.
    """

    def without_seconds(line):
        return re.sub(r"solved in [\d.]+ s", "solved in", line).rstrip()

    printed = list(map(without_seconds, output.splitlines()))
    missing = []
    for line in map(without_seconds, shown):
        start = line.removesuffix("...")
        if not any(
            other == line or (start != line and other.startswith(start)) for other in printed
        ):
            missing.append(line)
    return [line for line in missing if line]


def test_missing_lines_are_found():
    output = "a tree, solved in 0.1 s\n1 2 3\nend\n"
    assert missing_lines(["a tree, solved in 9.25 s", "1 2 ...", "...", "", "end"], output) == []
    assert missing_lines(["another tree", "1 3 ...", "en"], output) == [
        "another tree",
        "1 3 ...",
        "en",
    ]


RUN = [
    page for page in PAGES if any(not why_not_run(words) for words in commands(page.read_text()))
]


@pytest.mark.parametrize("page", RUN, ids=[page.name for page in RUN])
def test_quick_commands_run(page, folder):
    """In the order of the page, in one folder, as a reader would run them.

    After a `$`, the page shows lines that the command prints.
    """
    text = page.read_text()
    shown_output = {" ".join(words): lines for words, lines in sessions(text)}
    for words in commands(text):
        if why_not_run(words):
            continue
        command = " ".join(words)
        if words[0] == "sequoia-plan":
            result = CliRunner().invoke(main, words[1:])
            assert result.exit_code == 0, f"{command}: {result.output}"
            assert missing_lines(shown_output.get(command, []), result.output) == [], command
        else:
            arguments = words[1:]
            if arguments[0] != "-m":  # a script of this repository
                arguments[0] = str(ROOT / arguments[0])
            process = subprocess.run(
                [sys.executable, *arguments],
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            assert process.returncode == 0, f"{command}: {process.stderr}"


def test_every_reason_not_to_run_is_needed():
    all_commands = [" ".join(words) for page in PAGES for words in commands(page.read_text())]
    unused = [
        start for start in NOT_RUN if not any(command.startswith(start) for command in all_commands)
    ]
    assert unused == []


def test_the_command_line_reference_is_current():
    assert (ROOT / "docs" / "cli.md").read_text() == reference(), f"run: {REGENERATE}"
    assert REGENERATE in (ROOT / "CONTRIBUTING.md").read_text()


# Python, and the text itself


WITH_SNIPPETS = [
    page for page in PAGES if snippets(page.read_text()) and page.name != "own-models.md"
]
"""tests/runtime/test_own_models.py runs own-models.md."""


@pytest.mark.parametrize("page", WITH_SNIPPETS, ids=[page.name for page in WITH_SNIPPETS])
def test_snippets_run(page, folder, pair, monkeypatch, capsys):
    """All blocks of a page one after the other, with the embedded pair."""
    monkeypatch.setattr("sequoia_plan.runtime.load_pair", lambda: pair)
    names = {}
    for snippet in snippets(page.read_text()):
        exec(snippet, names)
        assert capsys.readouterr().out.strip(), snippet  # every snippet shows something


def test_pages_have_snippets():
    expected = {"README.md", "huggingface.md"}
    expected |= {"add-a-drafter.md", "add-a-verifier.md", "add-an-engine.md"}
    assert expected <= {page.name for page in WITH_SNIPPETS}


def long_lines(text):
    """Lines of more than 120 columns; tables and what links lead to do not count."""
    return [
        line
        for line in text.splitlines()
        if not line.startswith("|") and len(re.sub(r"\]\([^)]*\)", "]", line)) > 120
    ]


@each_page
def test_lines_are_short(page):
    assert long_lines(page.read_text()) == []


def test_long_lines_are_found():
    text = "a" * 121 + "\n" + "b" * 120 + "\n| " + "c" * 200 + "\n[d](" + "e" * 120 + ")"
    assert long_lines(text) == ["a" * 121]
