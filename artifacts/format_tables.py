"""Writes the tables of docs/format.md from what artifacts declare: `python -m sequoia_plan.artifacts.format_tables docs/format.md`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from sequoia_plan.artifacts import bench_result, engine_plan, latency, plan, profile
from sequoia_plan.artifacts.drafting import Drafting
from sequoia_plan.artifacts.files import write_atomically
from sequoia_plan.artifacts.schema import Artifact, table

TABLES: dict[str, tuple[type[Artifact], str]] = {
    "plan": (plan.Plan, ""),
    "plan.interval": (plan.Interval, "interval"),
    "plan.alternatives": (plan.Alternative, "alternatives.NAME"),
    "profile": (profile.Profile, ""),
    "settings": (profile.Settings, "settings"),
    "acceptance.levels[]": (profile.LevelCounts, "acceptance.levels[]"),
    "acceptance.lift": (profile.Lift, "acceptance.lift"),
    "verifiers": (profile.Judged, "verifiers.NAME"),
    "latency": (latency.Latency, "latency"),
    "latency.verification": (latency.Verification, "latency.verification"),
    "latency.stream": (latency.Stream, "latency.stream"),
    "drafting": (Drafting, "drafting"),
    "bench": (bench_result.BenchResult, ""),
    "bench.settings": (bench_result.BenchSettings, "settings"),
    "bench.tree": (bench_result.Shape, "tree"),
    "bench.contenders": (bench_result.Contender, "contenders.NAME"),
    "bench.speedup": (bench_result.Ratio, "contenders.NAME.speedup.OTHER"),
    "bench.predicted": (bench_result.Prediction, "contenders.NAME.predicted"),
    "bench.breakdown": (bench_result.Breakdown, "breakdown"),
    "engine": (engine_plan.EnginePlan, ""),
    "engine.acceptance": (engine_plan.ChainAcceptance, "acceptance"),
    "engine.steps": (engine_plan.StepSeconds, "steps[]"),
    "engine.cells": (engine_plan.Cell, "cells[]"),
    "engine.measured": (engine_plan.MeasuredCell, "cells[].measured"),
    "engine.schedule": (engine_plan.Range, "schedule[]"),
}
"""What stands between `<!-- table NAME -->` and `<!-- end -->`: the fields of which struct, and what their keys begin with."""


def with_tables(text: str) -> str:
    """The page with every table as it is declared now."""

    def filled(match: re.Match[str]) -> str:
        return f"<!-- table {match[1]} -->\n{table(*TABLES[match[1]])}<!-- end -->"

    return re.sub(r"<!-- table (\S+) -->\n.*?<!-- end -->", filled, text, flags=re.DOTALL)


if __name__ == "__main__":
    page = Path(sys.argv[1])
    write_atomically(page, with_tables(page.read_text()).encode())
