"""Where the tests find the files of the repository."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
STAND_IN = ROOT / "tests" / "stand_in"
