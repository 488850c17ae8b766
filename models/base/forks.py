"""What the child of a fork makes anew: it has none of its parent's threads, but what they held."""

import os
from typing import Any, TypeVar
from weakref import WeakSet

T = TypeVar("T")
_renewed: WeakSet[Any] = WeakSet()


def renewed_in_forks(thing: T) -> T:
    """Let each fork's child call `thing._at_fork_reinit()`, as of Python's locks; returns it."""
    _renewed.add(thing)
    return thing


def _renew() -> None:
    for thing in list(_renewed):
        thing._at_fork_reinit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
