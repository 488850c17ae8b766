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
from typing import Any, TypeVar
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import ProxyHandler, Request, build_opener

import msgspec
from msgspec import Struct
from msgspec.structs import astuple

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.artifacts.prompts import PromptText
from sequoia_plan.engines.chain_replay import ChainStep, Proposal
from sequoia_plan.engines.counters import parse
from sequoia_plan.engines.engine_process import ADVICE, EngineProcess, advised

START_SECONDS = 600
"""A server must be ready within this time."""
ANSWER_SECONDS = 600
"""A request must be answered within this time."""
END_SECONDS = 5
"""A server that does not answer may be ending, which takes no longer."""
LOG_SECONDS = 0.2
"""Another thread of the server writes its log, after so long at most."""
CANDIDATE = re.compile(rb"draft candidate\s+(\d), pos\s+(\d+):\s*(\d+) \(\s*([\d.]+)\)")
"""A likely token of a draft's pass in the debug log: its rank from 0 on, its position in the chain,
its id and its probability."""
DEVICE = re.compile(r"Available devices:\s*\n\s*(?!\(none\))\S")
NO_SPECULATION = re.compile(rb"(failed to initialize speculative|speculative decoding not supp).*")
URL_ADVICE = {
    r"Error 401": "the server needs a key: give --api-key",
    r"model name is missing|model '.*' not found": "name one of the router's models with --model",
    r"Connection refused": "no server answers there: start it, or name another --url",
    r"unknown url type": "--url begins with http:// or https://",
    r"timed out": "it hangs: see whether it answers /completion at all",
}
"""What to do, by what an error of a server that runs already says."""
OPENER = build_opener(ProxyHandler({}))
T = TypeVar("T")


@dataclass(frozen=True)
class Build:
    """A llama-server."""

    path: str
    has_device: bool


def find_build(server: str, types: str) -> Build:
    """Finds a llama-server that knows these types of speculation, and says if it has a device."""
    path = shutil.which(server)
    if not path:
        raise SequoiaPlanError(
            f"--server {server}: no such program; build llama.cpp and give its llama-server"
        )
    command = [path, "--spec-type", types, "--list-devices"]
    run = subprocess.run(command, capture_output=True, check=False)
    output = (run.stdout + run.stderr).decode(errors="replace")
    if run.returncode:
        ending = f"exit code {run.returncode}: {output or 'it printed nothing':.400}"
        raise SequoiaPlanError(advised(f"--server {server}: {ending}"))
    return Build(path, bool(DEVICE.search(output)))


class Properties(Struct):
    """What a llama-server says of itself at /props."""

    build_info: str


class Template(Struct):
    """A conversation as the text that the target reads."""

    prompt: str


class Tokens(Struct):
    """Token ids of a text."""

    tokens: list[int]


class Timings(Struct):
    """What a request took up to one of its tokens."""

    predicted_ms: float
    predicted_n: int
    draft_n: int = 0
    draft_n_accepted: int = 0


class Event(Struct):
    """A token of a stream, or an error in the middle of it."""

    timings: Timings | None = None
    error: Any = None


class Server:
    """A running server for one request at a time: a llama-server, or one with counters."""

    def __init__(
        self,
        address: str,
        key: str | None = None,
        model: str | None = None,
        engine: EngineProcess | None = None,
        bonus: int = 1,
    ) -> None:
        """`model` names one of a router's; `bonus` is as of `DraftedText`."""
        self.address = re.sub("(/v1|/metrics)?/*$", "", address)
        self.bonus = bonus
        self._model = {"model": model} if model else {}
        self._key = {"Authorization": f"Bearer {key}"} if key else {}
        self._engine = engine
        self._log_offset = 0

    @classmethod
    def start(cls, build: Build, arguments: Sequence[str], bonus: int = 1) -> Server:
        """Starts a server at a free port."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        command = [build.path, *arguments, "--host", "127.0.0.1", "--port", port]
        engine = EngineProcess(sys.executable, command)
        return cls(f"http://127.0.0.1:{port}", engine=engine, bonus=bonus)

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
    def _answer(self, path: str, body: Mapping[str, Any] | None = None) -> Iterator[Any]:
        """The answer to a request; where there is none, the error has the server's own words.

        Every request has the key and the model's name, and none goes through a proxy.
        """
        query = f"?{urlencode(self._model)}" * bool(self._model)
        data = None if body is None else json.dumps({**self._model, **body}).encode()
        headers = {"Content-Type": "application/json", **self._key}
        try:
            request = Request(self.address + path + query, data, headers)
            with OPENER.open(request, timeout=ANSWER_SECONDS) as answer:
                yield answer
        except (OSError, ValueError, HTTPException) as error:
            reason = str(error) or repr(error)
            if isinstance(error, HTTPError):
                with suppress(OSError, HTTPException):
                    reason += f": {error.read(2000).decode(errors='replace')}"
            elif self._engine:
                with suppress(subprocess.TimeoutExpired):
                    self._engine.process.wait(timeout=END_SECONDS)
                    self._engine.receive(f"answering {path}")
            advice = ADVICE if self._engine else URL_ADVICE
            raise SequoiaPlanError(
                advised(f"{self.address}{path}: {reason:.300}", advice)
            ) from error

    def _ask(self, path: str, kind: type[T], body: Mapping[str, Any] | None = None) -> T:
        """Sends a request, and returns the whole answer; without a body it is a GET."""
        with self._answer(path, body) as answer:
            text = answer.read()
            try:
                return msgspec.json.decode(text, type=kind)
            except ValueError as error:
                raise ValueError(f"no llama-server's answer ({error}): {text[:100]!r}") from error

    def version(self) -> str:
        """What build of llama.cpp it is."""
        return self._ask("/props", Properties).build_info

    def counters(self) -> dict[str, float]:
        """The counters on the metrics page of a vLLM or SGLang."""
        with self._answer("/metrics") as answer:
            if counters := parse(answer.read().decode(errors="replace"), self._model.get("model")):
                return counters
            raise ValueError("no counters of vLLM, nor of SGLang, which needs --enable-metrics")

    def encode(self, prompt: PromptText) -> list[int]:
        """Token ids of a text or a conversation in the target's chat template."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        text = self._ask("/apply-template", Template, {"messages": messages}).prompt
        body = {"content": text, "add_special": True, "parse_special": True}
        return self._ask("/tokenize", Tokens, body).tokens

    def generate(
        self, prompt: Sequence[int], tokens: int, only_first: bool = False, **options: Any
    ) -> list[ChainStep]:
        """The steps of a greedy request to /completion, after the pass over the prompt.

        If only the first one is wanted the request is given up after it, and does not end earlier.
        The begin of a prompt may be in the server's cache.
        """
        options |= {"ignore_eos": only_first, "stream": True, "timings_per_token": True}
        timings: dict[float, Timings] = {}  # by the time when a step ended
        with self._answer("/completion", {**greedy(prompt, tokens), **options}) as answer:
            for line in filter(lambda line: line.startswith(b"data: {"), answer):
                event = msgspec.json.decode(line[6:], type=Event)
                if event.error:
                    raise ValueError(event.error)
                if event.timings:
                    timings[event.timings.predicted_ms] = event.timings
                if only_first and len(timings) > 1:
                    break
            if not timings:
                raise ValueError("no timings of tokens: needs a llama-server of 2025 or later")
        return steps_of_timings(timings.values(), self.bonus)

    def text(self, prompt: Sequence[int], tokens: int) -> list[int]:
        """Token ids that follow a prompt, all of them: a stream leaves out parts of characters."""
        body = {**greedy(prompt, tokens), "return_tokens": True}
        return self._ask("/completion", Tokens, body).tokens

    def logged_chains(self) -> list[list[Proposal]]:
        """What was proposed in each drafted chain since the last call, from the debug log."""
        assert self._engine
        time.sleep(LOG_SECONDS)  # the log is written later than the answer
        with self._engine.log.open("rb") as file:
            file.seek(self._log_offset)
            log = file.read()
        chains: list[list[Proposal]] = []
        for rank, position, token, prob in CANDIDATE.findall(log):
            if int(rank):
                chains[-1][-1].candidates.append(int(token))
                continue
            if not int(position):
                chains.append([])
            chains[-1].append(Proposal(float(prob), False, [int(token)]))
        self._log_offset += len(log)
        return chains


def greedy(prompt: Sequence[int], tokens: int) -> dict[str, Any]:
    """A request for at most so many tokens."""
    return {"prompt": [*prompt], "n_predict": tokens, "temperature": 0.0, "cache_prompt": True}


def steps_of_timings(timings: Iterable[Timings], bonus: int = 1) -> list[ChainStep]:
    """Steps from what the server had counted and timed at the end of each.

    `bonus`: tokens of a step beside the accepted ones. One whose tokens make no whole character is
    reported with the next, which then is not single.
    """
    steps = []
    for before, after in pairwise(map(astuple, timings)):
        ms, tokens, drafted, accepted = map(operator.sub, after, before)
        if tokens:
            is_single = tokens <= accepted + bonus
            steps.append(ChainStep(drafted, accepted, tokens, 0, ms / 1000, is_single))
    return steps
