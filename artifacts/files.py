"""Reading and writing without losing anything."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sequoia_plan.artifacts.errors import ArgumentError, SequoiaPlanError


def write_atomically(path: str | Path, data: bytes) -> None:
    """Replace `path` by `data`, or leave it as it was: write beside it, then rename. A link keeps pointing where it points, and a
    file that is replaced keeps its permissions.

    Raises:
        SequoiaPlanError: if `path` is a folder, its folder is missing or cannot be written, or the disk is full.
    """
    given, path, temporary = path, Path(os.path.realpath(path)), None
    try:
        kind = stat.S_IFMT(path.stat().st_mode) if os.path.exists(path) else None
        if kind == stat.S_IFDIR:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if kind not in (None, stat.S_IFREG):
            path.write_bytes(data)  # a terminal or a pipe cannot be replaced
            return
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            temporary = file.name
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, stat.S_IMODE(path.stat().st_mode) if kind else 0o666 & ~_umask())  # a temporary file is private
        os.replace(temporary, path)
    except OSError as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        problem = error.strerror or error
        raise SequoiaPlanError(
            f"{given}: cannot be written ({problem}); name a file in a folder that exists and is writable, with room for {len(data)} bytes"
        ) from error


@contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """A folder to write into, which becomes `path` when all is written, and is removed if anything fails.

    Raises:
        SequoiaPlanError: if `path` exists and is not an empty folder, or cannot be made.
    """
    final = Path(os.path.realpath(path))
    if final.exists() and not (final.is_dir() and not any(final.iterdir())):
        raise SequoiaPlanError(f"{path}: exists already; name a new folder, or remove it")
    try:
        temporary = Path(tempfile.mkdtemp(dir=final.parent, prefix=f".{final.name}."))
    except OSError as error:
        raise SequoiaPlanError(f"{path}: cannot be made ({error.strerror or error}); name a folder within one that exists and is writable") from error
    try:
        yield temporary
        os.chmod(temporary, 0o777 & ~_umask())  # a temporary folder is private
        os.replace(temporary, final)
    except OSError as error:
        raise SequoiaPlanError(f"{path}: cannot be written ({error.strerror or error}); free some space, or name another folder") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def refuse_to_replace(output: str | Path, *inputs: str | Path | None) -> None:
    """An output must not be one of the files that it is made from.

    Raises:
        ArgumentError: naming the file.
    """
    for given in inputs:
        if given is not None and os.path.exists(given) and os.path.exists(output) and os.path.samefile(given, output):
            raise ArgumentError(f"-o {output}: is the input {given} itself, which would be lost; name another file")


def check_writable(path: str | Path) -> None:
    """Try before the work whether `write_atomically` could write to `path`.

    Raises:
        SequoiaPlanError: if it could not.
    """
    folder = Path(os.path.realpath(path)).parent
    try:
        if os.path.isdir(path):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not os.path.exists(path):
            with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{Path(path).name}."):
                pass
        elif not os.access(path, os.W_OK) or not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise SequoiaPlanError(f"{path}: cannot be written ({error.strerror or error}); name a file in a folder that exists and is writable") from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


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
