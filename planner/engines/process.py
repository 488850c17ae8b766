"""The engine's process: started in the user's own environment, asked by JSON lines, and gone when this program is."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from sequoia_plan.artifacts import SequoiaPlanError

DRIVER = Path(__file__).with_name("driver.py")
CAUSE = re.compile(r"\b(\w*(?:Error|Exception)): (?:\d+ validation errors? for .*\n\s*)?(.+?)(?: \[type=.*)?$", re.MULTILINE)
"""An error at the end of a traceback; pydantic says which one on the next line."""
WRAPPED = ("Engine core initialization failed", "EngineCore encountered an issue", "EngineDeadError", "cancelled")
"""What vLLM says of an error that another process has told in full before."""
HINTS = (
    ("vocab", "use a draft that shares the target's tokenizer"),
    ("memory", "give the engine less in --engine-args, or keep fewer with --together"),
    ("No such file|does not exist|not a valid model|find the requested files", "name folders or models that the engine can load"),
    ("", "its options are set by --engine-args and --speculative-args"),
)
"""What to do about an error with such words; the last holds for all others."""


class Engine:
    """A driver in a session of its own; `with Engine(...)` ends it, and so does the end of this program, whatever it dies of.

    Args:
        python: the interpreter that has the engine.
        driver: the script, which is given the number of a file descriptor that is closed when this program ends.
        environment: added to this program's own.
    """

    def __init__(self, python: str, driver: str | Path = DRIVER, environment: Mapping[str, str] | None = None) -> None:
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        reader, self._lifeline = os.pipe()  # our end is closed by the kernel when we die
        try:
            self.process = subprocess.Popen(
                [python, str(driver), str(reader)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.log,
                pass_fds=[reader],
                start_new_session=True,
                env=os.environ | (environment or {}),
            )
        except OSError as error:
            os.close(self._lifeline)
            raise SequoiaPlanError(f"--python {python}: cannot be run ({error.strerror}); give the Python that has the engine") from error
        finally:
            os.close(reader)

    def send(self, do: str, **arguments: Any) -> None:
        """Ask for something; `receive` gives the answer."""
        assert self.process.stdin
        with suppress(BrokenPipeError):  # `receive` says that it died, and of what
            self.process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self.process.stdin.flush()

    def receive(self, what: str) -> dict[str, Any]:
        """The answer to what was sent; `what` says in errors what the engine was doing.

        Raises:
            SequoiaPlanError: if the engine refuses or dies, with the cause that its log tells.
        """
        assert self.process.stdout
        line = self.process.stdout.readline()
        message: dict[str, Any] = json.loads(line) if line else {"died": self.process.wait()}
        if "answer" in message:
            answer: dict[str, Any] = message["answer"]
            return answer
        if "died" in message:
            self.process.wait()
            code = message["died"]
            how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            raise SequoiaPlanError(f"the engine died {how} while {what}: {_with_hint(self.cause())}")
        raise SequoiaPlanError(f"the engine failed while {what}: {_with_hint(self.cause(message['error']))}")

    def ask(self, what: str, do: str, **arguments: Any) -> dict[str, Any]:
        """`send` and `receive`."""
        self.send(do, **arguments)
        return self.receive(what)

    def cause(self, said: str = "") -> str:
        """The error that its log names, in one line: the first of the last traceback's that is not about another one."""
        self.log.seek(0, os.SEEK_END)
        self.log.seek(max(0, self.log.tell() - (1 << 17)))
        text = self.log.read().decode(errors="replace")
        named = [f"{kind}: {words.rstrip('.')}" for kind, words in CAUSE.findall(text) if not any(each in words or each in kind for each in WRAPPED)]
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        found = named[-1] if named else said or (lines[-1] if lines else "it printed nothing")
        return "".join(each if each.isprintable() else " " for each in found)[:400].strip()

    def close(self) -> None:
        """Kill it and every process that it has started."""
        if self._lifeline < 0:
            return
        os.close(self._lifeline)
        self._lifeline = -1
        if self.process.returncode is None:  # else the session is gone, and its number may be another's
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.log):
            with suppress(OSError):
                stream and stream.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _with_hint(cause: str) -> str:
    return f"{cause}; {next(hint for words, hint in HINTS if re.search(words, cause, re.IGNORECASE))}"
