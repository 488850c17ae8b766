"""A llama-server of the user's own build of llama.cpp: what it can do, and its requests.

The server's `timings` after each token give every step's time and how many tokens were drafted and
accepted in it. Its debug log gives the draft's probabilities.
"""

from __future__ import annotations

import http.client
import json
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.artifacts.prompts import PromptText
from sequoia_plan.engines.chain_replay import ChainStep
from sequoia_plan.engines.engine_process import EngineProcess, Hints
from sequoia_plan.engines.spec_types import flags
from sequoia_plan.engines.workload import Drafting

START_SECONDS = 600
"""A server must be ready within this time."""
ANSWER_SECONDS = 600
"""A request must be answered within this time."""
CANDIDATE = re.compile(rb"draft candidate\s+0, pos\s+(\d+):\s*(\d+) \(\s*([\d.]+)\)")
"""The likeliest token of a draft's pass in the debug log: its position in the chain, id and
probability."""
HINTS: Hints = (
    ("vocab", "use a draft that shares the target's tokenizer"),
    ("memory|alloc", "set a smaller context with --server-args '-c N'"),
    ("invalid argument|unknown", "see which options this build has with llama-server --help"),
    ("No such file|cannot be run", "name the program with --server"),
    ("", "its options are set by --server-args"),
)


@dataclass(frozen=True)
class Build:
    """A llama-server, and its name of the type of speculation that is planned."""

    path: str
    version: str
    spec_type: str
    options: frozenset[str]
    has_device: bool


def find_build(server: str | None, spec_type: str) -> Build:
    """Finds a llama-server and checks that it has the options of a type."""
    path = shutil.which(server or "llama-server")
    if not path:
        raise SequoiaPlanError(
            f"--server {server or 'llama-server'}: no such program; build llama.cpp "
            "and give the path of its llama-server"
        )
    words = frozenset(re.findall(r"[a-z0-9-]+", _output_of(path, "--help")))
    names = [name for name in (spec_type, f"draft-{spec_type}") if name in words]
    needed = flags(Drafting(1, lookup_size=1), names[0] if names else spec_type, "draft")
    missing = [option for option in needed if option.startswith("--") and option not in words]
    if not names:
        missing.append(f"--spec-type {spec_type}")
    if missing:
        raise SequoiaPlanError(
            f"--server {path}: this build has no {missing[0]}; build a later llama.cpp, "
            "or choose a type that llama-server --help names"
        )
    version = re.search(r"version: (.+)", _output_of(path, "--version"))
    devices = re.search(
        r"Available devices:\s*\n\s*(?!\(none\))\S", _output_of(path, "--list-devices")
    )
    return Build(path, version[1].strip() if version else "", names[0], words, bool(devices))


def _output_of(path: str, option: str) -> str:
    """What a program prints for an option, on either stream."""
    try:
        run = subprocess.run([path, option], capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise SequoiaPlanError(
            f"--server {path}: cannot be run ({error}); give the path of a llama-server"
        ) from error
    return (run.stdout + run.stderr).decode(errors="replace")


def check_model(option: str, path: str) -> None:
    """Raises if a file is no GGUF. Models are never downloaded, so a name of one is no file."""
    begin = b""
    try:
        with Path(path).open("rb") as file:
            begin = file.read(4)
        problem = f"begins with {begin!r}"
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    if begin != b"GGUF":
        raise SequoiaPlanError(
            f"{option} {path}: {problem}; expected a GGUF file, as llama.cpp's "
            "convert_hf_to_gguf.py writes it"
        )


class Server:
    """A running llama-server for one request at a time; it ends with the context."""

    def __init__(self, build: Build, arguments: Sequence[str]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        address = ["--host", "127.0.0.1", "--port", str(port)]
        self._process = EngineProcess(
            sys.executable, command=[build.path, *arguments, *address], hints=HINTS
        )
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_SECONDS)

    def wait(self) -> None:
        """Waits until the models are loaded."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process.process.poll() is not None:
                self._process.receive("starting")  # raises, with the cause from the log
            try:
                self._connection.request("GET", "/health")
                response = self._connection.getresponse()
                response.read()
                if response.status == 200:
                    return
            except (OSError, http.client.HTTPException):
                self._connection.close()
            time.sleep(0.05)
        raise SequoiaPlanError(
            f"llama-server was not ready within {START_SECONDS} s; start it by hand to see why"
        )

    def _send(
        self, activity: str, path: str, body: Mapping[str, Any] | None = None
    ) -> http.client.HTTPResponse:
        """Sends a request, and returns the answer before it is read."""
        self._connection.close()  # the server may have closed it, too, while it was idle
        try:
            headers = {"Content-Type": "application/json"}
            method, text = ("POST", json.dumps(body)) if body else ("GET", None)
            self._connection.request(method, path, text, headers)
            response = self._connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise self._failure(activity, error) from error
        if response.status != 200:
            text = response.read(2000).decode(errors="replace")
            raise SequoiaPlanError(
                f"llama-server failed while {activity}: {text:.300}; "
                "its options are set by --server-args"
            )
        return response

    def _failure(self, activity: str, error: Exception) -> SequoiaPlanError:
        """The error of a connection that broke: why the server died, if it did."""
        try:
            self._process.process.wait(timeout=5)
            self._process.receive(activity)
        except subprocess.TimeoutExpired:
            pass
        except SequoiaPlanError as cause:
            return cause
        return SequoiaPlanError(
            f"llama-server failed while {activity}: {error or type(error).__name__}; "
            "see what it says when it is started by hand"
        )

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Sends a request, and returns the whole answer."""
        answer: dict[str, Any] = json.loads(self._send(f"answering {path}", path, body).read())
        return answer

    def encode(self, prompt: PromptText) -> tuple[list[int], list[int]]:
        """Token ids of a text or a conversation in the target's chat template, and without it."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        text = self.ask("/apply-template", {"messages": messages})["prompt"]
        body = {"content": text, "add_special": True, "parse_special": True}
        plain = "\n\n".join(message["content"] for message in messages)
        return (
            self.ask("/tokenize", body)["tokens"],
            self.ask("/tokenize", {"content": plain})["tokens"],
        )

    def context_size(self) -> int:
        """Most tokens of a request, new ones included."""
        return int(self.ask("/props")["default_generation_settings"]["n_ctx"])

    def generate(self, completion: Mapping[str, Any], ignores_end: bool = False) -> list[ChainStep]:
        """The steps of a request to /completion, after the pass over the prompt."""
        body = {"ignore_eos": ignores_end, "stream": True, "timings_per_token": True}
        response = self._send("decoding", "/completion", {**completion, **body})
        timings = []
        try:
            for line in response:
                if line.startswith(b"data: {"):
                    timings.append(json.loads(line[6:]).get("timings") or {})
        except (OSError, http.client.HTTPException) as error:
            raise self._failure("decoding", error) from error
        return steps_of_timings(timings)

    def text(self, completion: Mapping[str, Any]) -> list[int]:
        """Token ids that follow a prompt, all of them: a stream leaves out parts of characters."""
        answer = self.ask("/completion", {**completion, "return_tokens": True})
        tokens: list[int] = answer["tokens"]
        return tokens

    def logged_chains(self) -> list[list[tuple[int, float]]]:
        """The token ids and probabilities of each drafted chain so far, from the debug log."""
        time.sleep(0.5)  # another thread of the server writes its log
        self._process.log.seek(0)
        chains: list[list[tuple[int, float]]] = []
        for position, token, prob in CANDIDATE.findall(self._process.log.read()):
            if int(position) == 0:
                chains.append([])
            chains[-1].append((int(token), float(prob)))
        return chains

    def close(self) -> None:
        """Ends the server."""
        self._connection.close()
        self._process.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def steps_of_timings(timings: Iterable[Mapping[str, Any]]) -> list[ChainStep]:
    """Steps from the server's timings after each token.

    The tokens of one step have the same time. A step whose tokens make no whole character has no
    event of its own, and is reported together with the next one.
    """
    ends: dict[float, tuple[int, int, int]] = {}  # by time, what is counted at the step's end
    for timing in timings:
        if timing:
            drafted, accepted = timing.get("draft_n", 0), timing.get("draft_n_accepted", 0)
            ends[timing["predicted_ms"]] = (timing["predicted_n"], drafted, accepted)
    moments = sorted(ends)
    steps = []
    for begin, end in pairwise(moments):
        tokens, drafted, accepted = np.subtract(ends[end], ends[begin]).tolist()
        is_single = tokens <= accepted + 1
        steps.append(ChainStep(drafted, accepted, tokens, 0, (end - begin) / 1000, is_single))
    return [step for step in steps if step.tokens]
