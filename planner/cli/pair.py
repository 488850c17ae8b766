"""The models that a command works with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from sequoia_plan.planner.cli.terminal import status

if TYPE_CHECKING:
    from sequoia_plan.artifacts import Plan
    from sequoia_plan.runtime import Pair


PLACED = ("placement", "resident_layers")
"""What a model's facts say of where its weights are."""


def load_pair(
    target: str | None, draft: str | None, device: str | None, dtype: str, offload: str | None = None, memory: str | None = None, placement: str = "auto"
) -> Pair:
    with status("loading models"):
        import torch

        from sequoia_plan.runtime.pair import load_pair

        pair = load_pair(target, draft, device or ("cuda" if torch.cuda.is_available() else "cpu"), dtype, placement, offload, memory)
    for remark in pair.remarks:
        click.echo(f"Warning: {remark}", err=True)
    return pair


def warn_if_foreign(plan: Plan, pair: Pair) -> None:
    """A tree stays exact with any pair, but its promise holds for the one it was measured on."""
    for role, facts in plan.models.items():
        ours = pair.facts.get(role, {})
        if facts.get("digest") != ours.get("digest"):
            click.echo(f"Warning: the tree was solved for the {role} {facts.get('name')}, this is {ours.get('name')}; its predictions do not apply", err=True)
        elif facts.get("dtype") != ours.get("dtype"):
            click.echo(
                f"Warning: the tree was solved for the {role} in {facts.get('dtype')}, this is {ours.get('dtype')}; its speed is not as predicted", err=True
            )
        elif any(facts.get(name) != ours.get(name) for name in PLACED):
            click.echo(f"Warning: the tree was solved for the {role} {_placed(facts)}, this is {_placed(ours)}; its speed is not as predicted", err=True)
    if plan.latency:
        from sequoia_plan.profiler.hardware import differences, fingerprint

        for line in differences(plan.hardware, fingerprint(pair.target.device)):
            click.echo(f"Warning: the tree was solved for another machine ({line}); its speed is not as predicted", err=True)


def _placed(facts: Mapping[str, Any]) -> str:
    """repacked, or streamed from disk with 6 of 30 layers in memory"""
    layers = f" with {facts['resident_layers']} of {facts.get('layers')} layers in memory" if "resident_layers" in facts else ""
    return f"{facts.get('placement', 'in memory')}{layers}"
