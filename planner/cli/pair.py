"""The models that a command works with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from sequoia_plan.planner.cli.terminal import status

if TYPE_CHECKING:
    from sequoia_plan.artifacts import Plan
    from sequoia_plan.runtime import Pair


TOLERATED_LOAD = 0.4
"""So much of one core may be busy without a warning."""
PLACEMENT_KEYS = ("placement", "resident_layers", "fused_layers")
"""Keys of a model's metadata that say where its weights are."""


def load_pair(
    target: str | None,
    draft: str | None,
    device: str | None,
    dtype: str,
    offload: str | None = None,
    memory: str | None = None,
    placement: str = "auto",
) -> Pair:
    """Load target and draft while a spinner is shown, and print warnings about them on stderr.

    Args:
        target, draft: what --target and --draft name; None for the embedded models.
        device: "cpu" or "cuda"; None for "cuda" where there is one.
        dtype: of the weights; "auto" takes what suits the machine.
        offload: where the target's layers are streamed from, "host" or "disk"; None keeps all of
            them in memory.
        memory: with `offload`, what weights and caches may take, as "24GB"; None for what is free.
        placement: "auto" may store weights in a layout that is faster on this machine; "resident"
            leaves them as they were loaded.
    """
    with status("loading models"):
        import torch

        from sequoia_plan.runtime.pair import load_pair

        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        busy = ""
        if device == "cpu" and placement == "auto":  # before loading makes cores busy
            busy = _busy_text(torch.get_num_threads())
        pair = load_pair(target, draft, device, dtype, placement, offload, memory)
    for remark in (*filter(None, [busy]), *pair.remarks):
        _warn(remark)
    return pair


def _busy_text(threads: int) -> str:
    """A warning if fewer cores are idle than threads will compute; "" if there are enough.

    The threads of a pass wait for each other, so one that waits for a core holds up all.
    """
    from sequoia_plan.profiler.hardware import idle_cores

    idle = idle_cores()
    if idle is None or idle >= threads - TOLERATED_LOAD:
        return ""
    fewer = max(1, round(idle))
    advice = f", or use --threads {fewer}" if fewer < threads else ""
    return (
        f"{idle:.1f} cores are idle, and {threads} threads compute and wait for each other: "
        "decoding may be many times slower, and measured times are worthless; stop other "
        f"work{advice}"
    )


def warn_if_foreign(plan: Plan, pair: Pair) -> None:
    """Warn where models or machine differ from those that the tree was solved for.

    Decoding stays exact with any pair; only the tree's predictions do not apply.
    """
    from sequoia_plan.artifacts.metadata import is_same_model

    for role, planned_metadata in plan.models.items():
        loaded_metadata = pair.metadata.get(role, {})
        if not is_same_model(planned_metadata, loaded_metadata):
            _warn(
                f"the tree was solved for the {role} {planned_metadata.get('name')}, "
                f"this is {loaded_metadata.get('name')}; its predictions do not apply"
            )
        elif planned_metadata.get("dtype") != loaded_metadata.get("dtype"):
            _warn(
                f"the tree was solved for the {role} in {planned_metadata.get('dtype')}, "
                f"this is {loaded_metadata.get('dtype')}; its speed is not as predicted"
            )
        elif any(planned_metadata.get(key) != loaded_metadata.get(key) for key in PLACEMENT_KEYS):
            _warn(
                f"the tree was solved for the {role} {_placement_text(planned_metadata)}, "
                f"this is {_placement_text(loaded_metadata)}; its speed is not as predicted"
            )
    if plan.latency:
        from sequoia_plan.profiler.hardware import differences, fingerprint

        for difference in differences(plan.hardware, fingerprint(pair.target.device)):
            _warn(
                f"the tree was solved for another machine ({difference}); "
                "its speed is not as predicted"
            )


def _placement_text(metadata: Mapping[str, Any]) -> str:
    """Describe where a model's weights are, as "repacked with 30 fused layers" or "streamed from
    disk with 6 of 30 layers in memory and 30 fused layers"."""
    layers = f"{metadata.get('fused_layers', 0)} fused layers"
    if "resident_layers" in metadata:
        resident, total = metadata["resident_layers"], metadata.get("layers")
        layers = f"{resident} of {total} layers in memory and {layers}"
    return f"{metadata.get('placement', 'in memory')} with {layers}"


def _warn(message: str) -> None:
    """Print a warning on stderr."""
    click.echo(f"Warning: {message}", err=True)
