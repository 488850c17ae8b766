"""Finished work on disk, so that a run that was killed goes on where it was."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.artifacts.files import read_bytes, write_atomically

LARGEST = 1 << 28


class Journal:
    """Results by name, written after each one, atomically.

    Args:
        path: the file; None keeps nothing.
        facts: JSON that says what the work is. A file about other work, or a damaged one, counts as none.
    """

    def __init__(self, path: Path | None, facts: Any) -> None:
        self.path = path
        self.work = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        self.done: dict[str, Any] = {}
        if path is not None and path.exists():
            try:
                found = json.loads(read_bytes(path, "a journal", LARGEST))
                self.done = found["done"] if found["work"] == self.work else {}
            except (SequoiaPlanError, ValueError, KeyError, TypeError):
                pass

    def get(self, name: str, work: Callable[[], Any]) -> Any:
        """The result called `name`: as it was kept, else of doing the `work` now. Floats survive the file exactly."""
        if name not in self.done:
            self.done[name] = work()
            if self.path is not None:
                write_atomically(self.path, json.dumps({"work": self.work, "done": self.done}).encode())
        return self.done[name]
