"""The engine's process in the user's own environment.

Requests and answers are JSON lines, and the process ends when this program does.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from sequoia_plan.artifacts import SequoiaPlanError

DRIVER = Path(__file__).with_name("driver.py")
ERROR_LINE = re.compile(
    r"\b(\w*(?:Error|Exception)): "  # class
    r"(?:\d+ validation errors? for .*\n\s*)?"  # pydantic names the error on the next line
    r"(.+?)(?: \[type=.*)?$",  # message
    re.MULTILINE,
)
"""The error at the end of a traceback."""
WRAPPER_TEXTS = (
    "Engine core initialization failed",
    "EngineCore encountered an issue",
    "EngineDeadError",
    "cancelled",
)
"""vLLM's words for an error that another of its processes has already printed in full."""
MAX_LOG_BYTES = 1 << 17
"""The end of the log in which the cause of an error is searched."""
Hints = Sequence[tuple[str, str]]
"""Patterns of error messages and what to do about each. The last pattern matches all messages."""


def names_no_cause(message: str) -> bool:
    """Whether an error only says that another of vLLM's processes failed."""
    return any(text in message for text in WRAPPER_TEXTS)


class EngineProcess:
    """A driver script in a session of its own; see `driver.py`.

    The session ends with `with EngineProcess(...)`, and with this program, however it ends.
    """

    def __init__(
        self,
        python: str,
        driver: str | Path = DRIVER,
        command: Sequence[str] = (),
        hints: Hints = (("", "see the engine's log"),),
    ) -> None:
        """Starts the driver, or a `command` in its place, with stderr in a temporary file."""
        self._hints = hints
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        read_fd, self._lifeline_fd = os.pipe()  # the kernel closes this end when the program ends
        try:
            self.process = subprocess.Popen(
                [python, str(driver), str(read_fd), *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.log,
                pass_fds=[read_fd],
                start_new_session=True,
            )
        except OSError as error:
            os.close(self._lifeline_fd)
            raise SequoiaPlanError(
                f"--python {python}: cannot be run ({error.strerror}); "
                "give the Python that has the engine"
            ) from error
        finally:
            os.close(read_fd)

    def send(self, command: str, **arguments: Any) -> None:
        """Sends a command, a method of `driver.Driver`. `receive` returns its answer."""
        assert self.process.stdin
        with suppress(BrokenPipeError):  # `receive` reports that the engine died, and why
            request = json.dumps({"command": command, **arguments})
            self.process.stdin.write(request.encode() + b"\n")
            self.process.stdin.flush()

    def receive(self, activity: str) -> dict[str, Any]:
        """Waits for the answer to the oldest command that has none."""
        assert self.process.stdout
        line = self.process.stdout.readline()
        message: dict[str, Any] = json.loads(line) if line else {"exit_code": self.process.wait()}
        if "answer" in message:
            answer: dict[str, Any] = message["answer"]
            return answer
        event, reported = "failed", message.get("error", "")
        if "exit_code" in message:
            self.process.wait()
            code = message["exit_code"]
            event = f"died with exit code {code}"
            if code < 0:
                event = f"died by signal {signal.Signals(-code).name}"
        cause = self._cause(reported)
        hint = next(text for pattern, text in self._hints if re.search(pattern, cause, re.I))
        raise SequoiaPlanError(
            f"the engine {event} while {activity}: {cause}; {hint}{self._kept_log()}"
        )

    def ask(self, activity: str, command: str, **arguments: Any) -> dict[str, Any]:
        """Sends a command and waits for its answer."""
        self.send(command, **arguments)
        return self.receive(activity)

    def _kept_log(self) -> str:
        """Copies the log to a file that stays, and says where; "" if it is empty."""
        self.log.seek(0)
        log = self.log.read()
        if not log:
            return ""
        try:
            with tempfile.NamedTemporaryFile(
                prefix="sequoia-plan-engine-", suffix=".log", delete=False
            ) as file:
                file.write(log)
        except OSError:  # a full disk must not hide the engine's error
            return ""
        return f" (its log: {file.name})"

    def _cause(self, reported: str = "") -> str:
        """The cause of a failure in one printable line: the last error in the log.

        Errors that only say that another of vLLM's processes failed are left out. If no error
        remains, the cause is the `reported` one, and the log's last line if none was reported.
        """
        self.log.seek(0, os.SEEK_END)
        self.log.seek(max(0, self.log.tell() - MAX_LOG_BYTES))
        log_text = self.log.read().decode(errors="replace")
        errors = [
            f"{error_class}: {message.rstrip('.')}"
            for error_class, message in ERROR_LINE.findall(log_text)
            if not names_no_cause(f"{error_class}: {message}")
        ]
        log_lines = [line.strip() for line in log_text.splitlines() if line.strip()]
        last_line = log_lines[-1] if log_lines else "it printed nothing"
        cause = errors[-1] if errors else reported or last_line
        printable = "".join(char if char.isprintable() else " " for char in cause)
        return printable[:400].strip()

    def close(self) -> None:
        """Kills the driver and every process that it has started."""
        if self._lifeline_fd < 0:
            return
        os.close(self._lifeline_fd)
        self._lifeline_fd = -1
        # once the driver was waited for, the session is gone and its id may be in use again
        if self.process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.log):
            with suppress(OSError):
                if stream:
                    stream.close()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
