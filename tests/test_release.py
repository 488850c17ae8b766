"""The source distribution of a release has the same bytes however often it is built.

The README that a package index shows has no relative links.
"""

import io
import re
import tarfile

from build_release import normalised, with_absolute_links
from paths import ROOT

FILES = {"p-1/setup.cfg": b"[egg_info]\n", "p-1/p.py": b"x = 1\n"}


def archive(names, seconds, owner):
    """A .tar.gz with these of FILES in a folder, all with this time and owner."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as target:
        for name in ["p-1", *names]:
            member = tarfile.TarInfo(name)
            member.mtime, member.uname = seconds, owner
            member.type = tarfile.DIRTYPE if name == "p-1" else tarfile.REGTYPE
            member.size = len(FILES.get(name, b""))
            target.addfile(member, io.BytesIO(FILES.get(name, b"")))
    return data.getvalue()


def test_times_owners_and_order_do_not_remain():
    first = archive([*FILES], 1_700_000_000, "a")
    second = archive([*FILES][::-1], 1_700_000_500, "b")
    release = normalised(first, 1_600_000_000)
    assert first != second and release == normalised(second, 1_600_000_000)
    assert release != normalised(archive(["p-1/p.py"], 1_700_000_000, "a"), 1_600_000_000)
    with tarfile.open(fileobj=io.BytesIO(release)) as files:
        members = {member.name: member for member in files.getmembers()}
        assert members.keys() == {"p-1", *FILES} and members["p-1"].isdir()
        assert {name: files.extractfile(members[name]).read() for name in FILES} == FILES
        assert {member.mtime for member in members.values()} == {1_600_000_000}


def test_relative_links_lead_to_the_repository():
    text = "![p](docs/p.png) [a `b`](docs/a.md#b) [w](https://w.org/x) [h](#h) `[0]` (y)"
    assert with_absolute_links(text, "https://forge/a/b/", "c0ffee") == (
        "![p](https://forge/a/b/raw/c0ffee/docs/p.png) "
        "[a `b`](https://forge/a/b/blob/c0ffee/docs/a.md#b) [w](https://w.org/x) [h](#h) `[0]` (y)"
    )


def test_every_link_of_the_readme_is_absolute_then():
    readme = (ROOT / "README.md").read_text()
    absolute = with_absolute_links(readme, "https://forge/a/b", "c0ffee")
    relative = re.compile(r"\]\((?!https?://|#)")
    assert relative.search(readme) and not relative.search(absolute)
    prefixes = "https://forge/a/b/raw/c0ffee/", "https://forge/a/b/blob/c0ffee/"
    assert absolute.replace(prefixes[0], "").replace(prefixes[1], "") == readme
