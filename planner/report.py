"""What bench found, for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def print_table(result: Mapping[str, Any]) -> None:
    """Measured and predicted figures of every contender, side by side."""
    from rich.console import Console
    from rich.table import Table

    settings, tree = result["settings"], result["tree"]
    chosen = [f"{name} {value}" for name, value in settings["sampling"].items() if value not in (None, 0, 1) or name == "temperature"]
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=140)
    console.print(f"{', '.join(chosen[:-1])}; {settings['dtype']}, {settings['prompts']} prompts x {settings['tokens']} tokens", end="; ")
    console.print(f"tree of {tree['size']} nodes, depth {tree['depth']}")
    over = [name for name in ("plain", "generate") if name in result["contenders"]]
    table = Table(box=None, pad_edge=False)
    columns = ["", "tokens/s", "first token", "tokens a step", "predicted", *(f"over {name}" for name in over)]
    for column in columns + ["predicted"] * ("plain" in over):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for arm in result["contenders"].values():
        rates, predicted = arm["tokens_per_second"], arm.get("predicted") or {}
        cells = [arm["title"], f"{rates['median']:.1f} ({rates['low']:.1f}-{rates['high']:.1f})", f"{arm['first_token_seconds']['median'] * 1000:.0f} ms"]
        cells += [_number(arm["tokens_per_step"]), _number(predicted.get("tokens_per_step"))]
        for ratio in (arm["speedup"][name] for name in over):
            cells.append(f"{ratio['median']:.2f}x ({ratio['interval_low']:.2f}-{ratio['interval_high']:.2f})")
        table.add_row(*cells, *([_number(predicted.get("speedup"), "x")] if "plain" in over else []))
    console.print(table)
    console.print("tokens/s: median and quartiles over prompts; over ...: median of ratios prompt by prompt, and its 95 % interval")


def _number(value: float | None, unit: str = "") -> str:
    return "-" if value is None else f"{value:.2f}{unit}"
