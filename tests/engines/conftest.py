"""What the tests of engines share."""

import pytest


@pytest.fixture(autouse=True)
def logs_go_with_the_test(tmp_path, monkeypatch):
    """An engine that fails leaves its log in the folder for temporary files."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
