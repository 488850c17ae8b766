"""Functions that run in forks of this process."""

import os
import signal
import time
import traceback


def fork(function):
    """The number of a process that calls a function, and ends with 0 if that returns."""
    if process := os.fork():
        return process
    try:
        function()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def status_of(process, seconds=60):
    """How a process ends; it is killed if that takes longer."""
    end = time.monotonic() + seconds
    while not (ended := os.waitpid(process, os.WNOHANG))[0]:
        if time.monotonic() > end:
            os.kill(process, signal.SIGKILL)
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(ended[1])
