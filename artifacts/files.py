"""Reading files within limits, and writing files so that an old one is never lost."""

import atexit
import errno
import functools
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError

from sequoia_plan.artifacts.errors import ArgumentError, SequoiaPlanError

MAX_FILE_BYTES = 1 << 28
"""A tree of ten million nodes."""


def write_atomically(path: str | Path, data: bytes) -> None:
    """Replace a file by `data`, or leave it as it was.

    The data is written to a file beside it, which is then renamed. A symbolic link keeps pointing
    to its target, and a file that is replaced keeps its permissions.
    """
    target = Path(os.path.realpath(path))
    try:
        if os.path.isdir(target):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        is_file = os.path.isfile(target)
        if os.path.exists(target) and not is_file:
            target.write_bytes(data)  # a terminal or a pipe cannot be replaced
            return
        with _place_beside(target) as temporary:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if is_file:
                shutil.copymode(target, temporary)
            os.replace(temporary, target)
    except OSError as error:
        problem = error.strerror or error
        raise SequoiaPlanError(
            f"{path}: cannot be written ({problem}); name a file in a folder that exists and is "
            f"writable, with room for {len(data)} bytes"
        ) from error


@contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """Yield a temporary folder to write into, and rename it to `path` at the end.

    The folder is removed if anything fails.
    """
    check_new_folder(path)
    target = Path(os.path.realpath(path))
    try:
        with _place_beside(target) as temporary:
            temporary.mkdir()
            yield temporary
            os.replace(temporary, target)
    except (OSError, SafetensorError) as error:
        problem = getattr(error, "strerror", None) or error
        raise SequoiaPlanError(
            f"{path}: cannot be written ({problem}); name a folder within one that exists and is "
            "writable, with room"
        ) from error


def check_new_folder(path: str | Path) -> None:
    """Refuse a folder that holds something: it would be replaced."""
    if os.path.exists(path) and not (os.path.isdir(path) and not os.listdir(path)):
        raise SequoiaPlanError(f"{path}: exists already; name a new folder, or remove it")


def refuse_to_replace(output: str | Path, *inputs: str | Path | None) -> None:
    """Refuse an output file that is one of the input files, also by another path or a link."""
    for path in inputs:
        if path and all(map(os.path.exists, (path, output))) and os.path.samefile(path, output):
            raise ArgumentError(
                f"-o {output}: is the input {path} itself, which would be lost; name another file"
            )


def check_writable(path: str | Path) -> None:
    """Check, before any work is done for it, whether `write_atomically` could write to `path`."""
    folder = Path(os.path.realpath(path)).parent
    written = [folder, path] if os.path.exists(path) else [folder]
    if os.path.isdir(path) or not all(os.access(name, os.W_OK) for name in written):
        raise SequoiaPlanError(
            f"{path}: cannot be written; name a file in a folder that exists and is writable"
        )


@contextmanager
def _place_beside(target: Path) -> Iterator[Path]:
    """A path in a temporary folder beside `target`, for what takes its place once it is whole."""
    with tempfile.TemporaryDirectory(
        dir=target.parent, prefix=f".{target.name}.", ignore_cleanup_errors=True
    ) as folder:
        yield Path(folder) / target.name


def read_bytes(path: str | Path, expected: str, max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """Read a file, or an endless device, up to a limit."""
    chunks = []
    bytes_left = max_bytes
    try:
        with open(path, "rb") as file:
            while bytes_left >= 0 and (chunk := file.read(1 << 20)):
                chunks.append(chunk)
                bytes_left -= len(chunk)
    except OSError as error:
        raise SequoiaPlanError(
            f"{path}: cannot be read ({error.strerror}); expected {expected}"
        ) from error
    if bytes_left < 0:
        raise SequoiaPlanError(f"{path}: larger than {max_bytes} bytes; expected {expected}")
    return b"".join(chunks)


def read_text(path: str | Path, expected: str) -> str:
    """Read a file of UTF-8 text, without its byte-order mark."""
    try:
        return read_bytes(path, expected).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SequoiaPlanError(f"{path}: not UTF-8 text; expected {expected}") from error


def read_json(path: str | Path, expected: str) -> Any:
    """Read the document in a JSON file."""
    try:
        return msgspec.json.decode(read_bytes(path, expected))
    except (ValueError, RecursionError) as error:
        raise SequoiaPlanError(f"{path}: not JSON ({error}); expected {expected}") from error


@functools.cache
def _digest_of(folder: str) -> bytes:
    """The SHA-256 of all Python sources in a folder together."""
    sources = sorted(Path(folder).rglob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).digest()


def follow_sources(compiled: Any, *folders: str) -> Any:
    """Let numba compile a function anew once a source in these folders has changed; returns it.

    By itself it looks at the function's own file, and not at what that calls or inlines.
    """
    if file := getattr(compiled._cache, "_cache_file", None):
        file._source_stamp = file._source_stamp, *map(_digest_of, folders)
    return compiled


def keep_compiled_code() -> None:
    """Name a temporary folder for numba where it finds none, as it refuses to do without one.

    It looks where its variable says, beside the source, and in the user's cache.
    """
    user = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    own = f"{os.path.dirname(__file__)}/__pycache__"
    for folder in (os.environ.get("NUMBA_CACHE_DIR") or own, own, f"{user}/numba"):
        with suppress(OSError):
            os.makedirs(folder, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
            return
    os.environ["NUMBA_CACHE_DIR"] = temporary = tempfile.mkdtemp(prefix="sequoia-plan-")
    atexit.register(shutil.rmtree, temporary, True)
    if numba := sys.modules.get("numba"):
        numba.config.CACHE_DIR = temporary
