"""Write the tables of docs/format.md from the declared fields of artifacts.

A maintainers' script, which is not installed. Run it from the repository root:

    python tools/format_tables.py docs/format.md
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from sequoia_plan.artifacts import bench_result, counts, latency, lookup, plan, profile
from sequoia_plan.artifacts.drafting import Drafting
from sequoia_plan.artifacts.files import write_atomically
from sequoia_plan.artifacts.schema import Artifact, markdown_table
from sequoia_plan.engines import plan as engine_plan

TABLES: dict[str, tuple[type[Artifact], str]] = {
    "plan": (plan.Plan, ""),
    "plan.interval": (plan.Interval, "interval"),
    "plan.by_match": (plan.MatchPlan, "by_match[]"),
    "profile": (profile.Profile, ""),
    "settings": (profile.Settings, "settings"),
    "acceptance[]": (counts.LevelCounts, "acceptance[]"),
    "lookup": (lookup.LookupCounts, "lookup"),
    "lookup.classes": (lookup.MatchClass, "lookup.classes[]"),
    "latency": (latency.Latency, "latency"),
    "latency.verification": (latency.VerificationCost, "latency.verification"),
    "latency.stream": (latency.StreamCost, "latency.stream"),
    "drafting": (Drafting, "drafting"),
    "bench": (bench_result.BenchResult, ""),
    "bench.settings": (bench_result.BenchSettings, "settings"),
    "bench.tree": (bench_result.TreeShape, "tree"),
    "bench.contenders": (bench_result.MethodResult, "contenders.NAME"),
    "bench.speedup": (bench_result.Ratio, "contenders.NAME.speedup.OTHER"),
    "bench.predicted": (bench_result.Prediction, "contenders.NAME.predicted"),
    "bench.by_kind": (bench_result.KindResult, "contenders.NAME.by_kind.KIND"),
    "bench.breakdown": (bench_result.Breakdown, "breakdown"),
    "engine": (engine_plan.EnginePlan, ""),
    "engine.acceptance": (engine_plan.ChainAcceptance, "contexts[].acceptance"),
    "engine.contexts": (engine_plan.ContextPlan, "contexts[]"),
    "engine.steps": (engine_plan.StepSeconds, "contexts[].steps[]"),
    "engine.cells": (engine_plan.Cell, "contexts[].cells[]"),
    "engine.measured": (engine_plan.MeasuredCell, "contexts[].cells[].measured"),
    "engine.schedule": (engine_plan.ScheduleEntry, "contexts[].schedule[]"),
}
"""For each `<!-- table NAME -->` of the page: the struct to describe, and its keys' prefix."""

TABLE = re.compile(r"<!-- table (\S+) -->\n.*?<!-- end -->", flags=re.DOTALL)


def with_tables(text: str) -> str:
    """The page with every table as its struct declares it."""

    def replacement(match: re.Match[str]) -> str:
        name = match[1]
        return f"<!-- table {name} -->\n{markdown_table(*TABLES[name])}<!-- end -->"

    return TABLE.sub(replacement, text)


if __name__ == "__main__":
    page = Path(sys.argv[1])
    write_atomically(page, with_tables(page.read_text()).encode())
