"""The files of weights in the cache: found, or made on first use by one process at a time."""

import errno
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from filelock import FileLock
from msgspec import structs

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.models.base.loading import OnBytes
from sequoia_plan.models.files.stored import content_of, fingerprint
from sequoia_plan.models.offload.weight_file import (
    Fill,
    WeightFile,
    WeightLayout,
    unfinished_path,
    write_weights,
)

MAX_NAME_BYTES = 100  # of a model's name in that of its file; file systems take 255 in all
OTHER_FOLDER = "set SEQUOIA_PLAN_CACHE to another folder, which can be written"


def cached_weights(
    name: str,
    ending: str,
    files: Sequence[Path],
    plan: Callable[[], tuple[WeightLayout, Fill]],
    on_bytes: OnBytes = lambda done, total: None,
) -> WeightFile:
    """The file of weights that were made from `files`, in the cache; it is written on first use.

    Its name begins with the begin of `name`, and has a hash of samples of the files. If the system
    says that they were touched since, their whole content is compared. `plan` gives the layout, and
    what fills it.

    Raises:
        SequoiaPlanError: if it cannot be written.
    """
    source, content = fingerprint(files), ""
    start = os.fsencode(name)[:MAX_NAME_BYTES].decode(errors="ignore")
    path = cache_folder() / f"{start}-{source.fingerprint}-{ending}"
    for is_locked in (False, True):
        with _errors_of(path), ExitStack() as stack:
            if is_locked:
                path.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(FileLock(path.with_name(f".{path.name}.lock")))
                unfinished_path(path).unlink(missing_ok=True)  # of a process that was killed
            with suppress(SequoiaPlanError):  # none, or not whole
                file = WeightFile(path, source.fingerprint)
                if file.index.source.times == source.times:
                    return file
                content = content or content_of(files)
                if file.index.source.content == content:
                    return file
                file.close()
            if is_locked:
                layout, fill = plan()
                made_from = stack.enter_context(ThreadPoolExecutor(1)).submit(
                    lambda: structs.replace(source, content=content_of(files))
                )
                write_weights(path, layout, fill, made_from.result, on_bytes)
    return WeightFile(path, source.fingerprint)


def cache_folder() -> Path:
    """The folder of weights: $SEQUOIA_PLAN_CACHE, else in the user's cache folder."""
    if chosen_folder := os.environ.get("SEQUOIA_PLAN_CACHE"):
        return Path(chosen_folder)
    variable, own = {
        "win32": ("LOCALAPPDATA", "AppData/Local"), "darwin": ("", "Library/Caches"),
    }.get(sys.platform, ("XDG_CACHE_HOME", ".cache"))  # fmt: skip
    try:
        return Path(os.environ.get(variable) or Path.home() / own) / "sequoia-plan"
    except RuntimeError as error:
        raise SequoiaPlanError(
            f"cache of weights: this user has no home; {OTHER_FOLDER}"
        ) from error


@contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    """A context that turns OSError while `path` is written into SequoiaPlanError with advice."""
    try:
        yield
    except OSError as error:
        reason, advice = error.strerror, OTHER_FOLDER
        place = next(parent for parent in path.parents if os.path.lexists(parent))
        if not place.is_dir():
            reason = f"{place} is a {'file' if place.exists() else 'link that leads nowhere'}"
        elif error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            advice = f"it takes as much room as the weights: free some, or {advice}"
        raise SequoiaPlanError(f"{path}: cannot be written ({reason}); {advice}") from error
