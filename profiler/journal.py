"""Finished work on disk, so that a run that was killed continues where it was."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.artifacts.files import read_bytes, write_atomically

MAX_FILE_BYTES = 1 << 28


def journal_of(output: str | Path) -> Path:
    """The path of the journal for `output`, beside it."""
    path = Path(output)
    return path.with_name(f".{path.name}.journal")


class Journal:
    """Results by name; a file with all of them is written anew after each one, atomically.

    Only one process at a time may have the file open. With it, an interrupted run can continue.
    """

    def __init__(self, path: Path | None, work: Any) -> None:
        self.path = path
        self.lock_file = None if path is None else _lock(path)
        self.work_digest = hashlib.sha256(json.dumps(work, sort_keys=True).encode()).hexdigest()
        self.results: dict[str, Any] = {}
        if path is not None and path.exists():
            with suppress(SequoiaPlanError, ValueError, KeyError, TypeError):
                document = json.loads(read_bytes(path, "a journal", MAX_FILE_BYTES))
                if document["work"] == self.work_digest:
                    self.results = dict(document["done"])

    def get(self, name: str, compute: Callable[[], Any]) -> Any:
        """The result called `name`: from the file, or computed now. Floats survive exactly."""
        if name not in self.results:
            self.results[name] = compute()
            if self.path is not None:
                document = {"work": self.work_digest, "done": self.results}
                write_atomically(self.path, json.dumps(document).encode())
        return self.results[name]

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        """Release the lock."""
        if self.lock_file is not None:
            self.lock_file.close()


def discard(path: Path | None) -> None:
    """Remove a journal and its lock file, once the output that it was for is written."""
    if path is not None:
        path.unlink(missing_ok=True)
        _lock_path(path).unlink(missing_ok=True)


@contextmanager
def exclusive(*outputs: str | Path) -> Iterator[None]:
    """Let no other process measure for one of these files until the context ends.

    A journal is locked while its own part of the work is done; this covers what follows, too.
    """
    with ExitStack() as stack:
        for output in map(Path, outputs):
            path = output.with_name(f".{output.name}")
            lock_file = _lock(path)
            if lock_file is not None:
                stack.enter_context(lock_file)
                # runs before the file is closed, and so before another process gets the lock
                stack.callback(_lock_path(path).unlink, missing_ok=True)
        yield


def _lock_path(path: Path) -> Path:
    """The file that is locked in place of the journal, which is replaced with every result."""
    return path.with_name(f"{path.name}.lock")


def _lock(path: Path) -> IO[str] | None:
    """Lock a journal until the returned file is closed, or the process ends."""
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    try:
        while True:
            lock_file = open(_lock_path(path), "w")  # noqa: SIM115
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock_file.fileno()).st_nlink:
                return lock_file
            lock_file.close()  # its last owner has removed it meanwhile
    except BlockingIOError as error:
        output = path.name.removeprefix(".").removesuffix(".journal")
        raise SequoiaPlanError(
            f"{output}: another sequoia-plan is measuring for this file; wait for it, or name "
            "another file with -o"
        ) from error
    except OSError as error:
        raise SequoiaPlanError(
            f"{_lock_path(path)}: cannot be written ({error.strerror}); name another file with -o"
        ) from error
