"""What other people's hands do: outputs over inputs, keys and files given twice, odd bytes, full
disks. Each ends in one clear line, and nothing is lost."""

import os
import subprocess
import sys
from unittest.mock import Mock

import pytest
from commands import refused

from sequoia_plan.planner.cli import main
from sequoia_plan.planner.cli.terminal import printable


def test_a_full_disk_behind_stdout(run, tmp_path):
    """A real process that prints to a device without room."""
    result = shell("$S show > /dev/full", tmp_path)
    message = b"output: No space left on device; free some space, or name another file"
    assert (result.returncode, result.stderr) == (1, b"Error: " + message + b"\n")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("no compiled object yet for <Library 'f'>"), "Aborted!"),
        (PermissionError(13, "Permission denied", "f"), "f: Permission denied; name another file"),
    ],
)
def test_a_signal_that_numba_lost_and_a_disk_that_has_room(run, monkeypatch, error, said):
    """numba compiles in a callback, which drops the exception of a signal's handler."""
    monkeypatch.setattr(main.commands["show"], "callback", Mock(side_effect=error))
    refused(run("show"), 1, said)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["profile", "bench"])
def test_a_prompt_that_is_too_long_is_named_before_anything_is_measured(run, tmp_path, command):
    (tmp_path / "p.txt").write_text("\n\n".join(["short", "fine", "word " * 9000]))
    refused(
        run(command, "--prompts", "p.txt", "-o", "out"),
        1,
        "p.txt: prompt 3 has 90",
        "expected at most 8191 (the model's context less one new token)",
    )
    assert not list(tmp_path.glob("*out*"))


def test_two_outputs_are_two_files(run):
    result = run("bench", "-o", "same.html", "--report", "./same.html")
    refused(result, 2, "--report ./same.html: is the file of -o as well; name another one")


MEASURING = """
import sys, time
from sequoia_plan.profiler.journal import exclusive
with exclusive(sys.argv[1]):
    print("locked", flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_two_that_measure_for_one_file(run, tmp_path):
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
        for command in ("profile", "bench"):
            refused(run(command, "-o", "out"), 1, "out: another sequoia-plan is measuring for this")
        assert (tmp_path / ".out.journal").exists()
        first.stdin.close()
    (tmp_path / ".out.journal").unlink()
    assert not list(tmp_path.glob(".out*"))  # the first removed its lock
    # the next one gets the lock, and releases it when it fails
    for command in ("profile", "bench"):
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


@pytest.mark.slow
def test_a_closed_stdin(run, tmp_path):
    result = shell("$S generate --prompt - <&-", tmp_path)
    message = b"Error: --prompt -: stdin is closed; expected text\n"
    assert (result.returncode, result.stdout, result.stderr) == (1, b"", message)


@pytest.mark.parametrize("command", ["$S show $'a\\xff'", "$S show $'\\e[31m'", "$S solve é"])
@pytest.mark.parametrize("encoding", ["ascii:strict", "utf-8:strict"])
def test_names_that_no_encoding_has(run, tmp_path, command, encoding):
    result = shell(command, tmp_path, PYTHONIOENCODING=encoding)
    assert result.returncode == 1 and b"\x1b" not in result.stderr
    assert result.stderr.count(b"\n") == 1 and b": cannot be read (No such" in result.stderr


def test_a_terminal_obeys_no_text_of_a_model():
    assert printable("a\x1b[2J\x07\x9b1m\r\x00b\tc\n日") == (
        "a\\x1b[2J\\x07\\x9b1m\\r\\x00b\tc\n日"
    )
