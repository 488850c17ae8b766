"""The command line and the files that benchmarks share, and how they summarise measurements."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from sequoia_plan.artifacts.files import write_atomically


def new_parser(description: str | None) -> argparse.ArgumentParser:
    """A command line that names the output."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, required=True)
    return parser


def write_report(path: Path, report: Any) -> None:
    """Write a report as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(report, indent=1) + "\n").encode())


def spread(values: ArrayLike, digits: int = 3) -> list[float]:
    """Median, first and third quartile, rounded to so many digits after the point."""
    quartiles = np.quantile(np.asarray(values, float), [0.5, 0.25, 0.75])
    return [round(float(quartile), digits) for quartile in quartiles]
