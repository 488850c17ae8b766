"""Finished work on disk, so that a run that was killed continues where it was."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.artifacts.files import read_bytes, write_atomically


class Journal:
    """Results by name; a file with all of them is written anew after each one, atomically.

    A file of other work, or one that is damaged, is ignored. Floats survive exactly. Without a path
    nothing is written. `exclusive` keeps other processes out.
    """

    def __init__(self, path: Path | None, work: Any) -> None:
        self.path = path
        self.work_digest = hashlib.sha256(json.dumps(work, sort_keys=True).encode()).hexdigest()
        self.results: dict[str, Any] = {}
        if path is not None and path.exists():
            with suppress(SequoiaPlanError, ValueError, KeyError, TypeError):
                document = json.loads(read_bytes(path, "a journal"))
                if document["work"] == self.work_digest:
                    self.results = dict(document["done"])

    def result(self, name: str, measure: Callable[[], Any]) -> Any:
        """The result called `name`; if there is none yet, it is measured and remembered."""
        if self.results.get(name) is None:
            self.results[name] = measure()
            if self.path is not None:
                document = {"work": self.work_digest, "done": self.results}
                write_atomically(self.path, json.dumps(document).encode())
        return self.results[name]


@contextmanager
def exclusive(output: str | Path) -> Iterator[Path]:
    """Let no other process measure for this file until the context ends; yields its journal."""
    name = f".{Path(output).name}"
    path, journal = (Path(output).with_name(f"{name}.{kind}") for kind in ("lock", "journal"))
    lock = FileLock(path, timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise SequoiaPlanError(
            f"{output}: another sequoia-plan is measuring for this file; wait for it, or name "
            "another file with -o"
        ) from error
    try:
        yield journal
    finally:
        if os.name == "posix":  # Windows removes the file when the lock is released
            path.unlink(missing_ok=True)
        lock.release()
