"""Whatever happens while a file is written, the old one is whole or the new one is."""

import os
import signal
import stat
import subprocess
import sys

import pytest
from refusals import refusal

from sequoia_plan.artifacts import SequoiaPlanError, TokenTree, files, load_tree, save_tree
from sequoia_plan.artifacts.files import read_bytes, write_atomically

OLD = TokenTree.chain(2)


def test_a_kill_before_the_rename_leaves_the_old_file(tmp_path):
    """SIGKILL while the new content is on its way to the disk."""
    save_tree(OLD, tmp_path / "t")
    code = (
        "import os, sys, time\n"
        "from sequoia_plan.artifacts import TokenTree, save_tree\n"
        "os.fsync = lambda descriptor: (print('writing', flush=True), time.sleep(600))\n"
        "save_tree(TokenTree.star(3000), sys.argv[1])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path / "t"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "writing\n"
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert load_tree(tmp_path / "t") == OLD
    save_tree(
        TokenTree.chain(3), tmp_path / "t"
    )  # what the dead process left behind is in nobody's way
    assert load_tree(tmp_path / "t") == TokenTree.chain(3)


def test_an_error_while_writing_is_one_line_and_cleans_up(tmp_path, monkeypatch):
    save_tree(OLD, tmp_path / "t")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SequoiaPlanError) as error:
        save_tree(TokenTree.chain(3), tmp_path / "t")
    assert str(error.value) == (
        f"{tmp_path / 't'}: cannot be written (No space left on device); name a file in a folder "
        "that exists and is writable, with room for 639 bytes"
    )
    assert load_tree(tmp_path / "t") == OLD
    assert os.listdir(tmp_path) == ["t"]


def test_folders_links_and_pipes(tmp_path):
    with pytest.raises(
        SequoiaPlanError, match=r"none/t: cannot be written \(No such file or directory\)"
    ):
        write_atomically(tmp_path / "none" / "t", b"")
    with refusal(r"cannot be written \(Is a directory\)"):
        write_atomically(tmp_path, b"")
    write_atomically(tmp_path / "real", b"1")
    assert stat.S_IMODE((tmp_path / "real").stat().st_mode) == 0o644
    (tmp_path / "link").symlink_to("real")
    write_atomically(tmp_path / "link", b"2")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"2"
    write_atomically("/dev/null", b"3")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)  # a device is written to, not replaced


def test_endless_input_is_refused():
    with refusal("/dev/zero: larger than 1000 bytes; expected"):
        read_bytes("/dev/zero", "a tree", 1000)


def test_permissions_stay(tmp_path):
    path, mask = tmp_path / "t", os.umask(0o027)
    try:
        write_atomically(path, b"1")
        assert stat.S_IMODE(path.stat().st_mode) == 0o640  # new: as any program would make it
        for mode in (0o600, 0o664):
            path.chmod(mode)
            write_atomically(path, b"2")
            assert stat.S_IMODE(path.stat().st_mode) == mode
    finally:
        os.umask(mask)


def test_numba_gets_a_temporary_folder_where_it_finds_no_other(monkeypatch):
    """As of a user without a home, whose installation cannot be written; without it, it refuses."""
    numba, names = pytest.importorskip("numba"), {}
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    for variable in ("HOME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR"):
        monkeypatch.setenv(variable, "/proc/self/nowhere")
    exec(compile("def next(x): return x + 1", "/proc/self/status", "exec"), names)
    with pytest.raises(RuntimeError, match="no locator"):
        numba.njit(cache=True)(names["next"])
    monkeypatch.setattr(files, "__file__", "/proc/self/nowhere/files.py")
    files.keep_compiled_code()
    assert numba.njit(cache=True)(names["next"])(1) == 2


@pytest.mark.slow
def test_compiled_code_is_renewed_when_a_source_beside_it_changes(tmp_path):
    """Without `follow_sources`, numba goes on with what it has compiled of the old source."""
    pytest.importorskip("numba")
    (tmp_path / "outer.py").write_text(
        "import numba, sys, inner\n"
        "from sequoia_plan.artifacts.files import follow_sources\n"
        "def call(): return inner.value()\n"
        "kept, followed = numba.njit(cache=True), lambda f: follow_sources(kept(f), sys.path[0])\n"
        "print((followed if sys.argv[1] == 'follows' else kept)(call)())\n"
    )
    found = {}
    for number in (1, 2):
        source = f"import numba\n@numba.njit\ndef value(): return {number}\n"
        (tmp_path / "inner.py").write_text(source)
        for name in ("follows", "kept"):
            cache = {"NUMBA_CACHE_DIR": str(tmp_path / name), "PYTHONDONTWRITEBYTECODE": "1"}
            command = [sys.executable, "outer.py", name]
            done = subprocess.run(
                command, cwd=tmp_path, env=os.environ | cache, capture_output=True, check=True
            )
            found[name, number] = int(done.stdout)
    assert (found["follows", 1], found["follows", 2]) == (1, 2)
    assert (found["kept", 1], found["kept", 2]) == (1, 1)  # the control


@pytest.mark.slow
def test_processes_agree_on_the_sources_of_compiled_code():
    """Whatever order their sets have: else each would compile again what the last one kept."""
    pytest.importorskip("numba")
    code = (
        "from sequoia_plan.models.packed import records\n"
        "from sequoia_plan.runtime.compiled import step\n"
        "stamp = step.decode._cache._cache_file._source_stamp\n"
        "print(stamp, [*{records.__name__, step.__name__}], sep='\\n')"
    )
    found = set()
    for seed in range(3):
        environment = os.environ | {"PYTHONHASHSEED": str(seed)}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=environment, capture_output=True, check=True)
        found.add(tuple(done.stdout.decode().splitlines()))
    assert len({stamp for stamp, _ in found}) == 1 < len({order for _, order in found})
