"""Builds the wheels and source distributions of a release: `python tools/build_release.py FOLDER`,
run from the repository root with `build` installed. A maintainers' script; it is not installed.

It builds the commit that is checked out, not what is uncommitted, and two runs give the same bytes.
"""

from __future__ import annotations

import gzip
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PARTS = (".", "weights")
"""Folders of the distributions, in the repository."""


def build(output: Path) -> None:
    """Build every distribution of HEAD into a folder; times within are the commit's."""
    epoch = subprocess.check_output(["git", "log", "-1", "--format=%ct"], text=True).strip()
    environment = os.environ | {"SOURCE_DATE_EPOCH": epoch}
    with tempfile.TemporaryDirectory() as source:
        archive = subprocess.check_output(["git", "archive", "HEAD"])
        subprocess.run(["tar", "-x", "-C", source], input=archive, check=True)
        for part in PARTS:
            command = [sys.executable, "-m", "build", "--outdir", str(output), f"{source}/{part}"]
            subprocess.run(command, check=True, env=environment)
    for path in output.glob("*.tar.gz"):
        path.write_bytes(normalised(path.read_bytes(), int(epoch)))


def normalised(data: bytes, seconds: int) -> bytes:
    """The .tar.gz file `data` with sorted members that have this time and no owner.

    setuptools gives the time of the build to the files that it generates.
    """
    unpacked = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(data)) as source,
        tarfile.open(fileobj=unpacked, mode="w", format=tarfile.PAX_FORMAT) as target,
    ):
        for member in sorted(source.getmembers(), key=lambda member: member.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = seconds, 0, 0, "", ""
            member.pax_headers = {}
            target.addfile(member, source.extractfile(member) if member.isfile() else None)
    return gzip.compress(unpacked.getvalue(), mtime=seconds)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/build_release.py FOLDER")
    build(Path(sys.argv[1]))
