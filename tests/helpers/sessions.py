"""Sessions of processes, for tests of engines that must not outlive a program."""

import os
import signal
import subprocess
import sys
import time

from paths import ROOT


def session_pids(pid):
    """The processes of a session, those left out that have ended and were not waited for."""
    command = ["ps", "-o", "pid=,stat=", "-s", str(pid)]
    listing = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    rows = [line.split() for line in listing.splitlines()]
    return [int(process) for process, state in rows if not state.startswith("Z")]


def has_ended(pid):
    """True if the session is empty, now or within half a minute."""
    deadline = time.monotonic() + 30
    while session_pids(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not session_pids(pid)


def check_that_it_ends_with(script, signal_number=signal.SIGKILL):
    """Run a program that starts a session of three, prints its id and waits; a signal ends both."""
    program = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        pid = int(program.stdout.readline())
        assert len(session_pids(pid)) >= 3
        os.kill(program.pid, signal_number)
        program.wait()
        assert has_ended(pid)
    finally:
        program.kill()
        program.stdout.close()
        for session_pid in session_pids(pid):
            os.kill(session_pid, signal.SIGKILL)
