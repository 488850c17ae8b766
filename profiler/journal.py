"""Finished work on disk, so that a run that was killed goes on where it was."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.artifacts.files import read_bytes, write_atomically

LARGEST = 1 << 28


def journal_of(output: str | Path) -> Path:
    """Where the journal of the work for `output` is kept: beside it."""
    path = Path(output)
    return path.with_name(f".{path.name}.journal")


class Journal:
    """Results by name, written after each one, atomically. One process at a time may have a file open.

    Args:
        path: the file; None keeps nothing.
        facts: JSON that says what the work is. A file about other work, or a damaged one, counts as none.

    Raises:
        SequoiaPlanError: if another process has it open: both would write the same output.
    """

    def __init__(self, path: Path | None, facts: Any) -> None:
        self.path = path
        self.lock = None if path is None else _locked(path)
        self.work = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        self.done: dict[str, Any] = {}
        if path is not None and path.exists():
            with suppress(SequoiaPlanError, ValueError, KeyError, TypeError):
                found = json.loads(read_bytes(path, "a journal", LARGEST))
                self.done = dict(found["done"]) if found["work"] == self.work else {}

    def get(self, name: str, work: Callable[[], Any]) -> Any:
        """The result called `name`: as it was kept, else of doing the `work` now. Floats survive the file exactly."""
        if name not in self.done:
            self.done[name] = work()
            if self.path is not None:
                write_atomically(self.path, json.dumps({"work": self.work, "done": self.done}).encode())
        return self.done[name]

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        """Let another process have the file."""
        if self.lock is not None:
            self.lock.close()


def discard(path: Path | None) -> None:
    """Remove a journal: all is done, and the output is written."""
    if path is not None:
        path.unlink(missing_ok=True)
        _beside(path).unlink(missing_ok=True)


def _beside(path: Path) -> Path:
    """The file whose lock stands for the journal, which itself is replaced again and again."""
    return path.with_name(f"{path.name}.lock")


def _locked(path: Path) -> IO[str] | None:
    """A lock that lasts until it is closed or the process ends, however it ends."""
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    try:
        file = open(_beside(path), "w")  # noqa: SIM115
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        output = path.name.removeprefix(".").removesuffix(".journal")
        raise SequoiaPlanError(f"{output}: another sequoia-plan is measuring for this file; wait for it, or name another file with -o") from error
    except OSError as error:
        raise SequoiaPlanError(f"{_beside(path)}: cannot be written ({error.strerror}); name another file with -o") from error
    return file
