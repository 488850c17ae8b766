"""The models that a command works with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from sequoia_plan.planner.cli.terminal import status, warn

if TYPE_CHECKING:
    from sequoia_plan.artifacts import Plan
    from sequoia_plan.runtime import Pair


TOLERATED_LOAD = 0.4
"""So much of one core may be busy without a warning."""
COMPILING = "compiling the passes for this processor, once: about 20 seconds"
NOT_PREDICTED = "its predictions do not apply"


def load_pair(**models: Any) -> Pair:
    """The models that the options name, loaded while a spinner is shown; warns about them."""
    with status("loading models") as show, when_numba_compiles(partial(show, COMPILING)):
        import torch

        from sequoia_plan.artifacts.processor import usable_cores
        from sequoia_plan.profiler.hardware import default_device
        from sequoia_plan.runtime.pair import load_pair

        threads = min(torch.get_num_threads(), usable_cores())
        source = click.get_current_context().get_parameter_source("threads")
        if source is not ParameterSource.COMMANDLINE:
            torch.set_num_threads(threads)  # PyTorch's own passes know no quotas

        models["device"] = models["device"] or default_device()
        busy = ""
        if models["device"] == "cpu" and "placement" not in models:
            busy = _busy_text(threads)  # before loading makes cores busy

        def on_bytes(done: int, total: int) -> None:
            """Show how many bytes of a model are packed."""
            show(f"packing weights, once: {done / 1e6:.0f} of {total / 1e6:.0f} MB")

        pair = load_pair(**models, on_bytes=on_bytes)
    for remark in filter(None, [busy, *pair.remarks]):
        warn(remark)
    return pair


@contextmanager
def when_numba_compiles(act: Callable[[], None]) -> Iterator[None]:
    """A context in which `act` is called when a function is compiled that no cache has."""
    from numba.core.event import Listener, install_listener

    class Compilations(Listener):
        def on_start(self, event: Any) -> None:
            act()

        def on_end(self, event: Any) -> None:
            pass

    with install_listener("numba:compile", Compilations()):
        yield


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
    from sequoia_plan.profiler.hardware import MODEL_KEYS, TIME_KEYS, differences, fingerprint

    for role, planned in plan.models.items():
        loaded = pair.metadata.get(role, {})
        # only the first: a model in another dtype has other contents and another digest as well
        for difference in differences(planned, loaded, MODEL_KEYS)[:1]:
            other = f"another {role} than {loaded.get('name')}"
            warn(f"the tree was solved for {other} ({difference}); {NOT_PREDICTED}")
    if plan.latency:
        for difference in differences(plan.hardware, fingerprint(pair.target.device), TIME_KEYS):
            warn(f"the tree was solved for another machine ({difference}); {NOT_PREDICTED}")
