"""Sessions of processes, for tests of engines that must not outlive a program."""

from __future__ import annotations

import subprocess
import time


def session_pids(pid):
    """The processes of a session, those left out that have ended and were not waited for."""
    command = ["ps", "-o", "pid=,stat=", "-s", str(pid)]
    listing = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    rows = [line.split() for line in listing.splitlines()]
    return [int(process) for process, state in rows if not state.startswith("Z")]


def has_ended(pid, timeout=30.0):
    """True if the session is empty, now or within the timeout."""
    deadline = time.monotonic() + timeout
    while session_pids(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not session_pids(pid)
