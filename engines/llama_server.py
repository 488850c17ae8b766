"""A llama-server, of the user's own build of llama.cpp or one that runs already, and its requests.

The server's `timings` after each token give every step's time and how many tokens were drafted and
accepted in it. Its debug log gives the draft's probabilities.
"""

from __future__ import annotations

import json
import operator
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException
from itertools import pairwise
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.artifacts.prompts import PromptText
from sequoia_plan.engines.chain_replay import ChainStep, Proposal
from sequoia_plan.engines.engine_process import EngineProcess, advised

START_SECONDS = 600
"""A server must be ready within this time."""
ANSWER_SECONDS = 600
"""A request must be answered within this time."""
CANDIDATE = re.compile(rb"draft candidate\s+(\d), pos\s+(\d+):\s*(\d+) \(\s*([\d.]+)\)")
"""A likely token of a draft's pass in the debug log: its rank from 0 on, its position in the chain,
its id and its probability."""
TYPES = re.compile(r"--spec-type\s+(none\S*)")
NO_SPECULATION = re.compile(rb"(failed to initialize speculative|speculative decoding not supp).*")
OPENER = build_opener(ProxyHandler({}))  # no proxy reaches this machine


@dataclass(frozen=True)
class Build:
    """A llama-server."""

    path: str
    version: str
    has_device: bool
    types: tuple[str, ...] = ()
    """Its types of speculation."""


def find_build(server: str) -> Build:
    """Finds a llama-server, and what it says of itself."""
    path = shutil.which(server)
    if not path:
        raise SequoiaPlanError(
            f"--server {server}: no such program; build llama.cpp and give its llama-server"
        )
    version = re.search(r"version: (.*)|$", _output_of(path, "--version"))
    devices = re.search(
        r"Available devices:\s*\n\s*(?!\(none\))\S", _output_of(path, "--list-devices")
    )
    types = TYPES.search(_output_of(path, "--help"))
    if not types:
        raise SequoiaPlanError(
            f"--server {server}: this version has no --spec-type; build llama.cpp of 2026 or later"
        )
    return Build(path, (version and version[1]) or "", bool(devices), tuple(types[1].split(",")))


def _output_of(path: str, option: str) -> str:
    """What a program prints for an option, on either stream."""
    run = subprocess.run([path, option], capture_output=True, timeout=60, check=False)
    return (run.stdout + run.stderr).decode(errors="replace")


class Server:
    """A running llama-server for one request at a time."""

    def __init__(self, address: str, key: str = "", engine: EngineProcess | None = None) -> None:
        self.address = address.rstrip("/")
        self._headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        self._engine = engine
        self._log_offset = 0
        self.bonus = 1
        """Tokens that a step of a rejected draft yields besides accepted ones: two of a recurrent
        target, which then reads the accepted ones again."""

    @classmethod
    def start(cls, build: Build, arguments: Sequence[str]) -> Server:
        """Starts a server at a free port."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        command = [build.path, *arguments, "--host", "127.0.0.1", "--port", port]
        return cls(f"http://127.0.0.1:{port}", engine=EngineProcess(sys.executable, command))

    def close(self) -> None:
        """Ends a server that was started here."""
        if self._engine:
            self._engine.close()

    def wait(self) -> None:
        """Waits until the models are loaded."""
        assert self._engine
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._engine.process.poll() is not None:
                self._engine.receive("starting")
            with suppress(OSError), OPENER.open(f"{self.address}/health", timeout=ANSWER_SECONDS):
                if reason := NO_SPECULATION.search(self._engine.log.read_bytes()):
                    raise SequoiaPlanError(advised(reason[0].decode(errors="replace")))
                return
            time.sleep(0.02)
        raise SequoiaPlanError(f"llama-server was not ready within {START_SECONDS} s")

    @contextmanager
    def _answer(self, path: str, body: Mapping[str, Any] | None) -> Iterator[Any]:
        """The answer to a request; where there is none, the error says why."""
        data = None if body is None else json.dumps(body).encode()
        try:
            request = Request(self.address + path, data, self._headers)
            with OPENER.open(request, timeout=ANSWER_SECONDS) as answer:
                yield answer
        except (OSError, ValueError, HTTPException) as error:
            reason = repr(error)
            if isinstance(error, HTTPError):
                reason = f"{error.code} {error.read(2000).decode(errors='replace')}"
            elif self._engine:
                with suppress(subprocess.TimeoutExpired):
                    self._engine.process.wait(timeout=5)
                    self._engine.receive(f"answering {path}")
            raise SequoiaPlanError(
                advised(f"{self.address}: the server failed at {path}: {reason:.300}")
            ) from error

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Sends a request, and returns the whole answer; without a body it is a GET."""
        with self._answer(path, body) as answer:
            return json.load(answer)

    def encode(self, prompt: PromptText) -> list[int]:
        """Token ids of a text or a conversation in the target's chat template."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        text = self.ask("/apply-template", {"messages": messages})["prompt"]
        body = {"content": text, "add_special": True, "parse_special": True}
        return self.ask("/tokenize", body)["tokens"]

    def generate(
        self, prompt: Sequence[int], tokens: int, only_first: bool = False, **options: Any
    ) -> list[ChainStep]:
        """The steps of a greedy request to /completion, after the pass over the prompt.

        If only the first one is wanted the request is given up after it, and does not end earlier.
        The begin of a prompt may be in the server's cache.
        """
        options |= {"ignore_eos": only_first, "stream": True, "timings_per_token": True}
        timings: dict[float, Mapping[str, Any]] = {}  # by the time when a step ended
        with self._answer("/completion", {**greedy(prompt, tokens), **options}) as answer:
            for line in filter(lambda line: line.startswith(b"data: {"), answer):
                if timing := json.loads(line[6:]).get("timings"):
                    timings[timing["predicted_ms"]] = timing
                if only_first and len(timings) > 1:
                    break
        return steps_of_timings(timings.values(), self.bonus)

    def text(self, prompt: Sequence[int], tokens: int) -> list[int]:
        """Token ids that follow a prompt, all of them: a stream leaves out parts of characters."""
        return self.ask("/completion", {**greedy(prompt, tokens), "return_tokens": True})["tokens"]

    def logged_chains(self) -> list[list[Proposal]]:
        """What was proposed in each drafted chain since the last call, from the debug log."""
        assert self._engine
        time.sleep(0.2)  # another thread of the server writes its log
        with self._engine.log.open("rb") as file:
            file.seek(self._log_offset)
            log = file.read()
        chains: list[list[Proposal]] = []
        for rank, position, token, prob in CANDIDATE.findall(log):
            if int(rank):
                likelier = chains[-1].pop()
                candidates = (*likelier.candidates, int(token))
                chains[-1].append(likelier._replace(candidates=candidates))
                continue
            if not int(position):
                chains.append([])
            chains[-1].append(Proposal(float(prob), False, (int(token),)))
        self._log_offset += len(log)
        return chains


def greedy(prompt: Sequence[int], tokens: int) -> dict[str, Any]:
    """A request for at most so many tokens."""
    return {"prompt": [*prompt], "n_predict": tokens, "temperature": 0.0, "cache_prompt": True}


def steps_of_timings(timings: Iterable[Mapping[str, Any]], bonus: int = 1) -> list[ChainStep]:
    """Steps from the server's timings at the end of each.

    A step whose tokens make no whole character has no event of its own, and is reported together
    with the next one.
    """
    names = ("predicted_ms", "predicted_n", "draft_n", "draft_n_accepted")
    counts = ([timing.get(name, 0) for name in names] for timing in timings)
    steps = []
    for before, after in pairwise(counts):
        ms, tokens, drafted, accepted = map(operator.sub, after, before)
        if tokens:
            is_single = tokens <= accepted + bonus
            steps.append(ChainStep(drafted, accepted, tokens, 0, ms / 1000, is_single))
    return steps
