"""Coverage-guided fuzzing of every reader with atheris, for longer runs than the test suite's.

    pip install atheris
    python tests/fuzz/fuzz_readers.py tree corpus/ -max_total_time=600      # or profile, or foreign

It runs the checks of tests/test_fuzz.py on every input: a reader raises SequoiaPlanError, or
returns what an independent reader also finds. Whatever libFuzzer reports is a bug. Without a corpus
it starts from one valid file.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["sequoia_plan.artifacts", "yaml", "json"]):
    sys.path.insert(0, str(Path(__file__).parent.parent))
    import test_fuzz

from sequoia_plan.artifacts.interchange import to_growmap
from sequoia_plan.artifacts.tree_file import to_bytes

READERS = {
    "tree": (test_fuzz.read_tree, to_bytes(test_fuzz.TREE)),
    "profile": (test_fuzz.read_profile, test_fuzz.PROFILE.to_yaml().encode()),
    "foreign": (test_fuzz.read_foreign, json.dumps(to_growmap(test_fuzz.TREE)).encode()),
}

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in READERS:
        sys.exit(f"expected {', '.join(READERS)}, then options of libFuzzer")
    read, seed = READERS[sys.argv.pop(1)]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "seed").write_bytes(seed)
        atheris.Setup([*sys.argv, folder], lambda data: bool(read(data)) and 0)
        atheris.Fuzz()
