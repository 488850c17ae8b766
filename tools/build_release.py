"""Builds the wheels and source distributions of a release: `python tools/build_release.py FOLDER`,
run from the repository root with `build` installed. A maintainers' script; it is not installed.

It builds the commit that is checked out, not what is uncommitted, and two runs give the same bytes.
A package index shows the README without the repository: with `--repository URL`, its links and
pictures lead there.
"""

from __future__ import annotations

import argparse
import gzip
import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PARTS = (".", "drafts")
"""Folders of the distributions, in the repository."""


def build(output: Path, repository: str | None = None) -> None:
    """Build every distribution of HEAD into a folder; times within are the commit's."""
    epoch = subprocess.check_output(["git", "log", "-1", "--format=%ct"], text=True).strip()
    environment = os.environ | {"SOURCE_DATE_EPOCH": epoch}
    os.umask(0o022)  # permissions of files are within, too
    with tempfile.TemporaryDirectory() as source:
        archive = subprocess.check_output(["git", "-c", "tar.umask=0022", "archive", "HEAD"])
        subprocess.run(["tar", "-x", "-C", source], input=archive, check=True)
        if repository:
            readme = Path(source, "README.md")
            revision = subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip()
            readme.write_text(with_absolute_links(readme.read_text(), repository, revision))
        for part in PARTS:
            command = [sys.executable, "-m", "build", "--outdir", str(output), f"{source}/{part}"]
            subprocess.run(command, check=True, env=environment)
    for path in output.glob("*.tar.gz"):
        path.write_bytes(normalised(path.read_bytes(), int(epoch)))


def with_absolute_links(text: str, repository: str, revision: str) -> str:
    """A page of the repository's root whose relative links lead to a revision on a forge.

    The paths are GitHub's: `blob` shows a file, and `raw` is the file, as a picture needs.
    """

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link[1] else "blob"
        return f"{link[1]}[{link[2]}]({repository.rstrip('/')}/{kind}/{revision}/{link[3]})"

    return re.sub(r"(!?)\[([^]]*)\]\((?!\w+:|#)([^)\s]+)\)", absolute, text)


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
    parser = argparse.ArgumentParser(description="Build the distributions of HEAD.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--repository", metavar="URL", help="where the README's links lead")
    arguments = parser.parse_args()
    build(arguments.folder, arguments.repository)
