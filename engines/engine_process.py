"""The engine's process in the user's own environment.

Requests and answers are JSON lines, and the process ends when this program does.
"""

import json
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from sequoia_plan.artifacts import SequoiaPlanError

DRIVER = Path(__file__).with_name("driver.py")
ERROR_LINE = re.compile(
    r"\b(\w*(?:Error|Exception): )"  # class
    r"(?:\d+ validation errors? for .*\n\s*)?"  # pydantic names the error on the next line
    r"(.+?)(?: \[type=.*)?$",  # message
    re.MULTILINE,
)
"""The error at the end of a traceback."""
WRAPPER_TEXTS = re.compile(
    "Engine core initialization failed|EngineCore encountered an issue|EngineDeadError|cancelled"
)
"""vLLM's words for an error that another of its processes has already printed in full."""
ADVICE = {
    r"vocab|not eagle3|incompatible": "the draft does not pair with this target: take one that was "
    "made for it",
    r"alloc|out of memory|KV cache": "not enough memory: a shorter context (-c in --server-args, "
    "max_model_len in --engine-args) takes less, and fewer layers on the device (-ngl)",
    r"No module named .vllm": "name the Python that has vLLM with --python",
    r"invalid argument": "this llama-server has no such option: build a newer one",
    r"exit code -4\b": "it was built for another processor: build it with "
    "-DGGML_NATIVE=OFF and the instructions that this one runs",
    r"timed out": "it hangs: see whether it answers /completion at all",
}
"""What to do, by what an error of an engine that was started here says."""
MAX_LOG_BYTES = 1 << 17
"""The end of the log in which the cause of an error is searched."""


def advised(text: str, advice: Mapping[str, str] = ADVICE) -> str:
    """An error in one line, with what to do about it where that is known."""
    hints = [f"; {hint}" for pattern, hint in advice.items() if re.search(pattern, text)]
    return "".join([" ".join(text.split()), *hints[:1]])


class EngineProcess:
    """A driver script in a session of its own; see `driver.py`.

    The session ends with `close`, and with this program, however it ends.
    """

    def __init__(self, python: str, command: Sequence[str] = ()) -> None:
        """Starts the driver, or a `command` in its place, with stderr in a temporary file."""
        if not hasattr(os, "fork"):
            raise SequoiaPlanError(
                "engine: found a system without process groups (fork), which end an engine with "
                "this program; start a server yourself, and name it with --url"
            )
        log_fd, log_path = tempfile.mkstemp(".log", "sequoia-plan-engine-")
        self.log = Path(log_path)
        self._has_failed = False
        read_fd, self._lifeline_fd = os.pipe()  # the kernel closes this end when the program ends
        self.process = subprocess.Popen(
            [python, str(DRIVER), str(read_fd), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log_fd,
            pass_fds=[read_fd],
            start_new_session=True,
        )
        os.close(read_fd)
        os.close(log_fd)

    def ask(self, activity: str, command: str, **arguments: Any) -> Any:
        """Sends a command, a method of `driver.Driver`, and waits for its answer."""
        assert self.process.stdin
        with suppress(BrokenPipeError):  # `receive` says why the engine died
            self.process.stdin.write(json.dumps({"command": command, **arguments}).encode() + b"\n")
            self.process.stdin.flush()
        return self.receive(activity)

    def receive(self, activity: str) -> Any:
        """Waits for an answer; raises with the cause if the engine failed or ended."""
        assert self.process.stdout
        line = self.process.stdout.readline()
        message = json.loads(line) if line else {"exit_code": self.process.wait()}
        if "answer" in message:
            return message["answer"]
        event = "failed"
        if "exit_code" in message:
            self.process.wait()
            event = f"died with exit code {message['exit_code']}"
        self._has_failed = True
        cause = self._cause(str(message.get("error", "")))
        raise SequoiaPlanError(
            advised(f"the engine {event} while {activity}: {cause} (log: {self.log})")
        )

    def _cause(self, reported: str) -> str:
        """The cause of a failure: the last error in the log.

        Errors that only say that another of vLLM's processes failed are left out. If no error
        remains, the cause is the `reported` one, and the log's last line if none was reported.
        """
        log = self.log.read_bytes()[-MAX_LOG_BYTES:].decode(errors="replace")
        errors = [
            text for text in map("".join, ERROR_LINE.findall(log)) if not WRAPPER_TEXTS.search(text)
        ]
        causes = [*log.strip().splitlines()[-1:], *filter(None, [reported]), *errors]
        return causes[-1][:400].strip() if causes else "it printed nothing"

    def close(self) -> None:
        """Kills the driver and every process that it has started. Keeps the log of a failure."""
        if self._lifeline_fd < 0:
            return
        os.close(self._lifeline_fd)
        self._lifeline_fd = -1
        # once the driver was waited for, the session is gone and its id may be in use again
        if self.process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(OSError), self.process:
            pass  # closes its streams, and waits for it
        if not self._has_failed:
            self.log.unlink(missing_ok=True)
