"""The source distribution of a release has the same bytes however often it is built."""

import io
import tarfile

import pytest
from build_release import normalised

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


@pytest.fixture
def builds():
    """Two archives with the same files, but other orders, times and owners."""
    return archive(list(FILES), 1_700_000_000, "a"), archive(list(FILES)[::-1], 1_700_000_500, "b")


def test_times_owners_and_order_do_not_remain(builds):
    assert builds[0] != builds[1]
    assert normalised(builds[0], 1_600_000_000) == normalised(builds[1], 1_600_000_000)


def test_contents_remain(builds):
    with tarfile.open(fileobj=io.BytesIO(normalised(builds[0], 1_600_000_000))) as release:
        members = {member.name: member for member in release.getmembers()}
        assert members.keys() == {"p-1", *FILES}
        assert members["p-1"].isdir()
        assert {name: release.extractfile(members[name]).read() for name in FILES} == FILES
        assert {member.mtime for member in members.values()} == {1_600_000_000}


def test_other_contents_give_other_bytes(builds):
    changed = archive(["p-1/p.py"], 1_700_000_000, "a")
    assert normalised(builds[0], 1_600_000_000) != normalised(changed, 1_600_000_000)
