"""Reading and writing without losing anything."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from sequoia_plan.artifacts.errors import SequoiaPlanError


def write_atomically(path: str | Path, data: bytes) -> None:
    """Replace `path` by `data`, or leave it as it was: write beside it, then rename. A link keeps pointing where it points.

    Raises:
        SequoiaPlanError: if the folder is missing or cannot be written, or the disk is full.
    """
    path = Path(os.path.realpath(path))
    temporary = None
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            path.write_bytes(data)  # a terminal or a pipe cannot be replaced
            return
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            temporary = file.name
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # a temporary file is private, an artifact is not
        os.replace(temporary, path)
    except OSError as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        problem = error.strerror or error
        raise SequoiaPlanError(f"{path}: cannot be written ({problem}); name a folder that exists and is writable, with room for {len(data)} bytes") from error


def read_bytes(path: str | Path, what: str, limit: int = 1 << 26) -> bytes:
    """The file's content; `what` names what it should be, for the error.

    Raises:
        SequoiaPlanError: if it cannot be read or holds more than `limit` bytes.
    """
    try:
        with open(path, "rb") as file:
            parts, left = [], limit
            while left >= 0 and (part := file.read(1 << 20)):
                parts.append(part)
                left -= len(part)
    except OSError as error:
        raise SequoiaPlanError(f"{path}: cannot be read ({error.strerror}); expected {what}") from error
    if left < 0:
        raise SequoiaPlanError(f"{path}: larger than {limit} bytes; expected {what}")
    return b"".join(parts)
