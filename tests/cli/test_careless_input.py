"""What other people's hands do: outputs over inputs, keys and files given twice, odd bytes, full
disks. Each ends in one clear line, and nothing is lost."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner

from sequoia_plan.artifacts import (
    Latency,
    LevelCounts,
    Profile,
    SequoiaPlanError,
    TokenTree,
    save_tree,
)
from sequoia_plan.artifacts.files import write_atomically
from sequoia_plan.artifacts.prompts import Prompt, held_out_half, load, measuring_half
from sequoia_plan.planner.cli import main
from sequoia_plan.planner.cli.terminal import printable
from sequoia_plan.profiler.prompts import encode
from sequoia_plan.runtime.offload.memory import as_bytes

LEVELS = (LevelCounts(600, (300.25, 75.0)), LevelCounts(200, (99.75, 25.0)))
PROFILE = Profile(
    (0.5, 0.125),
    800,
    Latency({1: 0.04, 4: 0.042, 16: 0.05}, {1: 0.003, 16: 0.004}, 0.001, 128),
    levels=LEVELS,
)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a command in a folder that holds a profile and a tree."""
    monkeypatch.chdir(tmp_path)
    PROFILE.save("profile.yaml")
    save_tree(TokenTree.from_parents([-1, 0, 0, 1], {"acceptance": [0.5, 0.2]}), "tree.safetensors")
    return lambda *arguments, **options: CliRunner().invoke(main, arguments, **options)


def refused(result, code, *parts):
    """The command failed with `code`, and its last line holds all `parts`."""
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    line = result.stderr.strip().splitlines()[-1]
    assert all(part in line for part in parts), line


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        (("solve", "profile.yaml", "-o", "./profile.yaml"), "profile.yaml"),
        (("solve", "--acceptance", "p.json", "-o", "p.json"), "p.json"),
        (
            ("export", "tree.safetensors", "--format", "nxd", "-o", "tree.safetensors"),
            "tree.safetensors",
        ),
        (("import", "n.json", "-o", "n.json"), "n.json"),
        (("profile", "--prompts", "p.txt", "-o", "p.txt"), "p.txt"),
        (("bench", "--prompts", "p.txt", "-o", "p.txt"), "p.txt"),
        (("bench", "-o", "tree.safetensors"), "tree.safetensors"),
    ],
)
def test_an_output_never_replaces_what_it_is_made_from(run, tmp_path, arguments, given):
    (tmp_path / "p.json").write_text("[0.5, 0.2]")
    (tmp_path / "p.txt").write_text("What is rain?")
    (tmp_path / "n.json").write_text('{"0": ["1"]}')
    (tmp_path / "link.yaml").symlink_to("profile.yaml")
    Profile(PROFILE.acceptance, 8, levels=LEVELS[:1]).save("other.yaml")
    before = (tmp_path / given).read_bytes()
    refused(run(*arguments), 2, "is the input", given, "which would be lost; name another file")
    assert (tmp_path / given).read_bytes() == before


def test_a_key_that_stands_twice_and_numbers_of_base_sixty(run, tmp_path):
    text = PROFILE.to_yaml()
    for old, new, message in (
        ("trials: 800", "trials: 800\n  trials: 900", "the key 'trials' stands twice at line"),
        ("{1: 0.04,", "{1: 0.04, 1: 0.05,", "the key 1 stands twice"),
        (
            "trials: 800",
            "trials: 13:20",
            "acceptance.trials: found '13:20', expected a whole number >= 0",
        ),
        ("trials: 800", "trials: 1" + 30 * "0", "acceptance.trials: found 1000"),
        ("{1: 0.04,", "{1: 1" + 400 * "0" + ",", "latency.target[1]: found 1000"),
        (
            "settings: {}",
            "settings: {verifier: [x]}",
            "settings.verifier: found ['x'], expected text",
        ),
    ):
        assert old in text
        (tmp_path / "bad.yaml").write_text(text.replace(old, new, 1))
        refused(run("solve", "bad.yaml", "-o", "t"), 1, "bad.yaml", message)
    (tmp_path / "good.yaml").write_text(text.replace("0.04,", "4e-2,"))  # what YAML 1.1 calls text
    assert Profile.load("good.yaml").latency.target[1] == 0.04
    for written, meant in (("010", 10), ("09", 9), ("-0", None), ("+0800", 800), ("0o17", None)):
        (tmp_path / "zeros.yaml").write_text(text.replace("trials: 800", f"trials: {written}", 1))
        if meant is None and written != "-0":
            with pytest.raises(
                SequoiaPlanError, match=r"acceptance\.trials: found '0o17', expected"
            ):
                Profile.load("zeros.yaml")
        else:
            assert Profile.load("zeros.yaml").trials == (meant or 0)


def test_permissions_stay(tmp_path):
    path, mask = tmp_path / "t", os.umask(0o027)
    try:
        write_atomically(path, b"1")
        assert stat.S_IMODE(path.stat().st_mode) == 0o640  # new: as any program would make it
        for mode in (0o600, 0o664):
            path.chmod(mode)
            write_atomically(path, b"2")
            assert stat.S_IMODE(path.stat().st_mode) == mode
    finally:
        os.umask(mask)


def test_a_full_disk_behind_stdout(run):
    """A real process that prints to a device without room."""
    command = [sys.executable, "-m", "sequoia_plan", "show"]
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    message = "output: No space left on device; free some space, or name another file"
    assert (result.returncode, result.stderr) == (1, f"Error: {message}\n")


class Words:
    """A tokenizer without a chat template: one token a word."""

    chat_template = None

    def __call__(self, text):
        return {"input_ids": [len(word) for word in text.split()]}


def test_prompt_files(tmp_path):
    (tmp_path / "p.jsonl").write_text(
        '{"text": "a line\u2028separator"}\r\n'
        '{"messages": [{"role": "system", "content": "Be brief."}, '
        '{"role": "user", "content": [{"type": "text", "text": "Why "}, '
        '{"type": "text", "text": "rain?"}]}, {"role": "assistant", "content": "Because."}]}\n'
        "\n"
        '{"question_id": 81, "category": "writing", "turns": ["Compose a post.", "Rewrite it."]}\n'
        '{"kind": "numbers", "category": 3, "messages": [{"role": "user", "content": "one"}, '
        '{"role": "assistant", "content": "two"}, {"role": "user", "content": "three"}]}\n'
    )
    conversation = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Why rain?"},
    ]
    turns = [
        {"role": role, "content": text}
        for role, text in (("user", "one"), ("assistant", "two"), ("user", "three"))
    ]
    found = load(tmp_path / "p.jsonl")
    assert [prompt.text for prompt in found] == [
        "a line\u2028separator",
        conversation,
        "Compose a post.",
        turns,
    ]
    assert [prompt.kind for prompt in found] == [None, None, "writing", "numbers"]
    for odd in (
        '""',
        "7",
        '["a"]',
        "null",
        '"a\\u001b[2J"',
        f'"{61 * "k"}"',
    ):  # nothing that a profile could hold: as if it were not there
        (tmp_path / "odd.jsonl").write_text(f'{{"text": "fine", "kind": {odd}}}\n')
        assert load(tmp_path / "odd.jsonl") == [Prompt("fine")]
    assert encode(Words(), conversation) == [2, 6, 3, 5]
    assert measuring_half(found) == [found[0], found[2]] and held_out_half(found) == [
        found[1],
        found[3],
    ]
    assert measuring_half(found[:1]) == held_out_half(found[:1]) == found[:1]
    (tmp_path / "p.txt").write_bytes("\ufeffFirst\r\nprompt.\r\n\r\nSecond.\r\n".encode())
    assert load(tmp_path / "p.txt") == [Prompt("First\nprompt."), Prompt("Second.")]
    for line in (
        '{"messages": []}',
        '{"messages": [{"role": "assistant", "content": "x"}]}',
        '{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
        '{"turns": []}',
        '{"text": 3}',
        "[" * 5000,
        "3",
    ):
        (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n' + line + "\n")
        with pytest.raises(SequoiaPlanError, match=r"bad\.jsonl: line 2 is no prompt; expected"):
            load(tmp_path / "bad.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["profile", "bench"])
def test_a_prompt_that_is_too_long_is_named_before_anything_is_measured(run, tmp_path, command):
    (tmp_path / "p.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in ("short", "fine", "word " * 9000))
    )
    refused(
        run(command, "--prompts", "p.jsonl", "-o", "out"),
        1,
        "p.jsonl: prompt 3 has 90",
        "expected at most 8191 (the model's context less one new token)",
    )
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("x.json", b'{"text": "a"}\n', "holds JSON and is not named .jsonl"),
        ("x.JSON", b"not even JSON", "holds JSON and is not named .jsonl"),
        ("x.txt", b'{"text": "a"}\n{"text": "b"}\n', "holds JSON and is not named .jsonl"),
        ("x", b'[\n{"text": "a"}\n]', "holds JSON and is not named .jsonl"),
        ("x.txt", "What is rain?".encode("utf-16-le"), "holds NUL characters, as UTF-16 does"),
        ("x.jsonl", '{"text": "a"}'.encode("utf-16-be"), "holds NUL characters, as UTF-16 does"),
        ("x.jsonl", b'{"text": "\\ud800"}', "line 1 is no prompt"),
        ("x.jsonl", b'{"messages": [{"role": "user", "content": "\\udfff"}]}', "line 1 is no"),
        ("x.jsonl", b'{"messages": [{"role": "user", "content": ["a"]}]}', "line 1 is no prompt"),
        ("x.jsonl", b'{"messages": [{"role": 5, "content": "a"}]}', "line 1 is no prompt"),
    ],
)
def test_prompt_files_that_would_be_misread(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(SequoiaPlanError, match=message):
        load(tmp_path / name)


def test_prompt_files_by_any_case_of_the_name(tmp_path):
    for name in ("X.JSONL", "x.ndjson"):
        (tmp_path / name).write_text('{"text": "What is rain?"}\n')
        assert load(tmp_path / name) == [Prompt("What is rain?")]
    (tmp_path / "x.txt").write_text("[1, 2\n\n{curly} braces")  # looks like JSON, and is none
    assert load(tmp_path / "x.txt") == [Prompt("[1, 2"), Prompt("{curly} braces")]


@pytest.mark.parametrize(
    "arguments",
    [("bench",), ("engine", "vllm", "--metrics", "m"), ("engine", "sglang", "--responses", "m")],
)
def test_two_outputs_are_two_files(run, arguments):
    result = run(*arguments, "-o", "same.html", "--report", "./same.html")
    refused(result, 2, "--report ./same.html: is the file of -o as well; name another one")


def test_a_plot_does_not_replace_its_tree(run, tmp_path):
    before = (tmp_path / "tree.safetensors").read_bytes()
    (tmp_path / "tree.png").symlink_to("tree.safetensors")
    refused(run("show", "--plot", "tree.png"), 2, "is the input tree.safetensors itself")
    assert (tmp_path / "tree.safetensors").read_bytes() == before


MEASURING = """
import sys, time
from sequoia_plan.profiler.journal import exclusive
with exclusive(sys.argv[1]):
    print("locked", flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.parametrize("command", ["profile", "bench"])
def test_two_that_measure_for_one_file(run, tmp_path, command):
    """The lock is held by a process whose journal is already gone, and is taken over afterwards."""
    with subprocess.Popen(
        [sys.executable, "-c", MEASURING, "out"],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as first:
        assert first.stdout.readline() == "locked\n"
        (tmp_path / ".out.journal").write_text("{}")  # another run's work
        refused(run(command, "-o", "out"), 1, "out: another sequoia-plan is measuring for this")
        assert (tmp_path / ".out.journal").exists()
        first.stdin.close()
    (tmp_path / ".out.journal").unlink()
    assert not list(tmp_path.glob(".out*"))  # the first removed its lock
    # the next one gets the lock, and releases it when it fails
    refused(run(command, "-o", "out", "--prompts", "missing.txt"), 1, "missing.txt")
    assert not list(tmp_path.glob(".out*"))


def shell(command, cwd, **variables):
    """A command line that runs `sequoia-plan`, written as `$S`, in bash."""
    variables = os.environ | {"S": f"{sys.executable} -m sequoia_plan"} | variables
    return subprocess.run(
        ["bash", "-c", command], cwd=cwd, capture_output=True, check=False, env=variables
    )


@pytest.mark.parametrize("command", ["$S show >&-", "$S --help >&-"])
def test_a_closed_stdout(run, tmp_path, command):
    """Nobody reads the output, and the command does its work."""
    result = shell(command, tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (0, b"", b"")


@pytest.mark.parametrize("command", ["$S show $'a\\xff'", "$S show $'\\e[31m'", "$S solve é"])
@pytest.mark.parametrize("encoding", ["ascii:strict", "utf-8:strict"])
def test_names_that_no_encoding_has(run, tmp_path, command, encoding):
    result = shell(command, tmp_path, PYTHONIOENCODING=encoding)
    assert result.returncode == 1 and b"\x1b" not in result.stderr
    assert result.stderr.count(b"\n") == 1 and b": cannot be read (No such" in result.stderr


@pytest.mark.parametrize("size", ["99999999999999999999GB", "1e400", "inf"])
def test_memory_that_no_machine_has(size):
    with pytest.raises(SequoiaPlanError, match="more than any machine has; expected less than"):
        as_bytes(size, torch.device("cpu"))


@pytest.mark.parametrize("seconds", ["1e308", "1e-320"])
def test_latencies_that_no_machine_has(run, tmp_path, seconds):
    text = PROFILE.to_yaml()
    assert "{1: 0.04," in text
    (tmp_path / "odd.yaml").write_text(text.replace("{1: 0.04,", f"{{1: {seconds},"))
    refused(run("solve", "odd.yaml"), 1, "odd.yaml: latency.target[1]: found 1e", "1e-12 to 1e12")


def test_a_terminal_obeys_no_text_of_a_model():
    assert printable("a\x1b[2J\x07\x9b1m\r\x00b\tc\n日") == (
        "a\\x1b[2J\\x07\\x9b1m\\r\\x00b\tc\n日"
    )
