"""Measures in a llama-server of the user's own build of llama.cpp.

The server's `timings` after each token give every step's time and how many tokens were drafted and
accepted in it. Its debug log gives the draft's probabilities, from which `replay` predicts every
maximum length (n-max) and threshold (p-min).
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
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from sequoia_plan.artifacts import ArgumentError, SequoiaPlanError
from sequoia_plan.engines.drafting import LOOKUP, NEVER, NONE, Drafting
from sequoia_plan.engines.driver import padded
from sequoia_plan.engines.process import EngineProcess, Hints
from sequoia_plan.engines.replay import (
    ChainStep,
    DraftedText,
    FirstTokens,
    LookupText,
    drafted_text,
)
from sequoia_plan.engines.vllm import ReportStatus, Workload

CONTEXT = 4096
"""Size of a server's context, at least, unless --server-args sets it."""
ROOM = 512
"""Room in a server's context beyond the largest prompt and its tokens: chains that are recorded
are longer, and a text to time lookups in, too."""
COPIED_DRAFTS = 4
"""Drafts of a lookup that are timed in a text."""
START_SECONDS = 600
"""A server must be ready within this time."""
ANSWER_SECONDS = 600
"""A request must be answered within this time."""
CANDIDATE = re.compile(rb"draft candidate\s+0, pos\s+(\d+):\s*(\d+) \(\s*([\d.]+)\)")
"""The likeliest token of a draft's pass in the debug log: its position in the chain, id and
probability."""
HINTS: Hints = (
    ("vocab", "use a draft that shares the target's tokenizer"),
    ("memory|alloc", "set a smaller context with --server-args '-c N', or keep fewer servers "
     "with --together"),
    ("invalid argument|unknown", "see which options this build has with llama-server --help"),
    ("No such file|cannot be run", "name the program with --server"),
    ("", "its options are set by --server-args"),
)  # fmt: skip


@dataclass(frozen=True)
class Build:
    """A llama-server."""

    path: str
    version: str
    help_text: str
    has_device: bool


def find_build(server: str | None, spec_type: str) -> tuple[Build, str]:
    """Finds a llama-server and checks that it has the options of a type."""
    path = shutil.which(server or "llama-server")
    if not path:
        raise SequoiaPlanError(
            f"--server {server or 'llama-server'}: no such program; build llama.cpp "
            "and give the path of its llama-server"
        )
    help_text = _output_of(path, "--help")
    named = set(re.findall(r"[a-z0-9-]+", help_text))
    names = [name for name in (spec_type, f"draft-{spec_type}") if name in named]
    if "--spec-type" not in named or not names:
        option = "--spec-type" + (f" {spec_type}" if "--spec-type" in named else "")
        raise SequoiaPlanError(
            f"--server {path}: this build has no {option}; build a later llama.cpp, "
            "or choose a type that llama-server --help names"
        )
    for option in Drafting(names[0], 1, 0.5, 1 if names[0] == LOOKUP else 0).flags("draft"):
        if option.startswith("--") and option not in named:
            raise SequoiaPlanError(
                f"--server {path}: this build has no {option}; build a later llama.cpp"
            )
    version_text = _output_of(path, "--version")
    version = re.search(r"version: (.+)", version_text)
    devices = re.search(
        r"Available devices:\s*\n\s*(?!\(none\))\S", _output_of(path, "--list-devices")
    )
    build = Build(path, version[1].strip() if version else "", help_text, bool(devices))
    return build, names[0]


def _output_of(path: str, option: str) -> str:
    """What a program prints for an option, on either stream."""
    try:
        run = subprocess.run([path, option], capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SequoiaPlanError(
            f"--server {path}: cannot be run ({reason}); give the path of a llama-server"
        ) from error
    return (run.stdout + run.stderr).decode(errors="replace")


def check_model(option: str, path: str) -> None:
    """Raises if a file is no GGUF. Models are never downloaded, so a name of one is no file."""
    try:
        with Path(path).open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise SequoiaPlanError(
            f"{option} {path}: cannot be read ({error.strerror}); name a GGUF file"
        ) from error
    if magic != b"GGUF":
        raise SequoiaPlanError(
            f"{option} {path}: begins with {magic!r}, expected a GGUF file; "
            "convert the model with llama.cpp's convert_hf_to_gguf.py"
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

    def _post(self, path: str, body: Mapping[str, Any]) -> http.client.HTTPResponse:
        """Sends a request, and returns the answer before it is read."""
        activity = f"answering {path}"
        self._connection.close()  # the server may have closed it, too, while it was idle
        try:
            headers = {"Content-Type": "application/json"}
            self._connection.request("POST", path, json.dumps(body), headers)
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

    def ask(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Sends a request, and returns the whole answer."""
        answer: dict[str, Any] = json.loads(self._post(path, body).read())
        return answer

    def encode(self, prompt: Any) -> tuple[list[int], list[int]]:
        """Token ids of a text or a conversation in the target's chat template, and without it."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        text = self.ask("/apply-template", {"messages": messages})["prompt"]
        body = {"content": text, "add_special": True, "parse_special": True}
        plain = "\n\n".join(message["content"] for message in messages)
        token_ids: list[int] = self.ask("/tokenize", body)["tokens"]
        return token_ids, self.ask("/tokenize", {"content": plain})["tokens"]

    def context_size(self) -> int:
        """Most tokens of a request, new ones included."""
        self._connection.close()  # the server may have closed it, too, while it was idle
        try:
            self._connection.request("GET", "/props")
            properties = json.loads(self._connection.getresponse().read())
            return int(properties["default_generation_settings"]["n_ctx"])
        except (OSError, http.client.HTTPException, LookupError, ValueError) as error:
            raise self._failure("answering /props", error) from error

    def generate(
        self,
        prompt: Sequence[int],
        tokens: int,
        temperature: float,
        ignores_end: bool = False,
        reuses_cache: bool = False,
    ) -> list[ChainStep]:
        """Decodes a prompt, and returns its steps after the pass over the prompt."""
        body = {
            "prompt": list(prompt),
            "n_predict": tokens,
            "temperature": temperature,
            "ignore_eos": ignores_end,
            "stream": True,
            "timings_per_token": True,
            "cache_prompt": reuses_cache,
        }
        response = self._post("/completion", body)
        timings = []
        try:
            for line in response:
                if line.startswith(b"data: {"):
                    timings.append(json.loads(line[6:]).get("timings") or {})
        except (OSError, http.client.HTTPException) as error:
            raise self._failure("decoding", error) from error
        return steps_of_timings(timings)

    def text(
        self, prompt: Sequence[int], tokens: int, temperature: float, reuses_cache: bool = False
    ) -> list[int]:
        """Token ids that follow a prompt, all of them: a stream leaves out parts of characters."""
        body = {
            "prompt": list(prompt),
            "n_predict": tokens,
            "temperature": temperature,
            "return_tokens": True,
            "cache_prompt": reuses_cache,
        }
        token_ids: list[int] = self.ask("/completion", body)["tokens"]
        return token_ids

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
            counts = (timing["predicted_n"], timing.get("draft_n", 0),
                      timing.get("draft_n_accepted", 0))  # fmt: skip
            ends[timing["predicted_ms"]] = counts
    moments = sorted(ends)
    steps = []
    for begin, end in pairwise(moments):
        tokens, drafted, accepted = np.subtract(ends[end], ends[begin]).tolist()
        is_single = tokens <= accepted + 1
        steps.append(
            ChainStep(drafted, accepted, tokens, 0, (end - begin) / 1000, is_single)
        )  # fmt: skip
    return [step for step in steps if step.tokens]


@dataclass
class ServerPool:
    """Servers of one target and draft that draft in different ways."""

    build: Build
    target: str
    draft: str | None
    workload: Workload
    arguments: Sequence[str] = ()
    max_servers: int | None = None
    report_status: ReportStatus = lambda text: None
    max_context: int = 0
    prompts: list[list[int]] = field(default_factory=list)
    """Token ids of the workload's prompts, once the first server runs."""
    texts: list[list[int]] = field(default_factory=list)
    """The same without the chat template."""
    _servers: dict[tuple[Drafting, bool], Server] = field(default_factory=dict)
    _exit_stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> ServerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self._exit_stack.close()

    def groups(self, draftings: Sequence[Drafting]) -> list[list[Drafting]]:
        """Splits ways of drafting into groups whose servers fit in memory together."""
        size = self.max_servers or (1 if self.build.has_device else 4)
        return [list(draftings[start : start + size]) for start in range(0, len(draftings), size)]

    def ensure_running(self, draftings: Sequence[Drafting], logs_chains: bool = False) -> None:
        """Starts the servers that do not run yet, and closes those that are not named."""
        keys = [(drafting, logs_chains) for drafting in draftings]
        for key in [key for key in self._servers if key not in keys]:
            self._servers.pop(key).close()
        missing = [key for key in keys if key not in self._servers]
        if missing:
            self.report_status(f"starting {len(missing)} of llama-server")
        for key in missing:
            self._servers[key] = self._exit_stack.enter_context(
                Server(self.build, self._arguments(*key))
            )
        for key in missing:
            self._servers[key].wait()
        if not self.prompts:
            server = self._servers[keys[0]]
            self._check_context(server)
            for prompt in self.workload.prompts:
                token_ids, text = server.encode(prompt)
                self.prompts.append(token_ids)
                self.texts.append(text)

    def _check_context(self, server: Server) -> None:
        """Raises if the largest context and the new tokens are more than a server takes."""
        needed = self.max_context + self.workload.tokens + ROOM
        if self.max_context and needed > (size := server.context_size()):
            raise ArgumentError(
                f"--context {self.max_context}: needs a server with a context of {needed} tokens, "
                f"this one has {size}; give a smaller one, or see -c in --server-args and the "
                "model's own limit"
            )

    def prompt(self, index: int, context: int = 0) -> list[int]:
        """Token ids of a prompt, with texts before it so that it has `context` tokens.

        The texts are those of the other half of the workload's prompts: a prompt that came twice
        would be looked up. They are the same for all prompts of a half, so a server that has
        decoded one has the begin of the next in its cache.
        """
        if not context:
            return self.prompts[index]
        half = -(-len(self.texts) // 2)
        others = self.texts[half:] if index < half else self.texts[:half]
        return padded(self.prompts[index], others or self.texts, 0, context)

    def add_prompts(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Adds prompts as token ids, and returns their indices."""
        self.prompts += map(list, prompts)
        return list(range(len(self.prompts) - len(prompts), len(self.prompts)))

    def _arguments(self, drafting: Drafting, logs_chains: bool) -> list[str]:
        """All options of a server but its address."""
        offline = ["--offline"] if "--offline" in self.build.help_text else []
        verbosity = ["--verbosity", "5"] if logs_chains else []
        size = max(CONTEXT, self.max_context and self.max_context + self.workload.tokens + ROOM)
        return [
            *("-m", self.target, "-np", "1", "-c", str(size), *offline),
            *drafting.flags(self.draft),
            *self.arguments,
            *verbosity,
        ]

    def run(
        self,
        drafting: Drafting,
        prompts: Sequence[int],
        context: int = 0,
        logs_chains: bool = False,
    ) -> list[list[ChainStep]]:
        """Decodes prompts, one at a time, in a server that runs, and returns each one's steps."""
        server = self._servers[drafting, logs_chains]
        tokens = self.workload.tokens + (drafting.max_length if logs_chains else 0)
        temperature = self.workload.temperature
        return [
            server.generate(
                self.prompt(i, context), tokens, temperature, reuses_cache=context > 0
            )
            for i in prompts
        ]  # fmt: skip

    def _run_timed(
        self, drafting: Drafting, prompts: Sequence[int], context: int
    ) -> list[ChainStep]:
        """Decodes prompts to time steps. Lookups copy a text that repeats, for a few drafts."""
        server, temperature = self._servers[drafting, False], self.workload.temperature
        copies = drafting.spec_type == LOOKUP
        tokens = self.workload.tokens
        if copies:
            tokens = max(tokens, COPIED_DRAFTS * (drafting.max_length + 1))
        ignores_end = copies or context > 0  # what follows such a context may be the text's end
        texts = [
            server.generate(self.prompt(i, context), tokens, temperature, ignores_end, context > 0)
            for i in prompts
        ]
        return [*chain.from_iterable(texts)]

    def record_draft(
        self, drafting: Drafting, prompts: Sequence[int], context: int = 0
    ) -> tuple[list[DraftedText], list[list[ChainStep]]]:
        """Decodes prompts and records the draft's probabilities along their texts."""
        self.report_status(f"recording chains of {drafting.max_length} tokens")
        self.ensure_running([drafting], logs_chains=True)
        server = self._servers[drafting, True]
        num_before = len(server.logged_chains())  # of another context
        steps_by_text = self.run(drafting, prompts, context, logs_chains=True)
        logged = server.logged_chains()[num_before:]
        chains = [[prob for _, prob in candidates] for candidates in logged]
        texts = []
        for steps in steps_by_text:
            text_chains = []
            for step in steps:
                num_missing = step.drafted
                while num_missing > 0:  # several chains where the timings report several steps
                    if not chains:
                        raise SequoiaPlanError(
                            f"--server {self.build.path}: its debug log has fewer drafted tokens "
                            "than its timings; this build logs otherwise than ggml 0.25"
                        )
                    num_missing -= len(chains[0])
                    text_chains.append(chains.pop(0))
            texts.append(drafted_text(steps, text_chains, self.workload.tokens))
        return texts, steps_by_text

    def record_first_tokens(
        self, spec_type: str, prompts: Sequence[int], context: int = 0
    ) -> list[FirstTokens]:
        """Decodes prompts, and records the first token that a draft proposes at each position.

        The server's threshold lets no token through, so that every position is the begin of a
        chain, but the log has the token that would have been drafted.
        """
        self.report_status("recording the first token of a chain at each position")
        drafting = Drafting(spec_type, 1, NEVER)
        self.ensure_running([drafting], logs_chains=True)
        server = self._servers[drafting, True]
        recorded, num_before = [], len(server.logged_chains())
        for i in prompts:
            tokens = self._text(server, self.prompt(i, context), context)
            chains = server.logged_chains()
            # the first token of a text is the prompt's, and the last one may not be drafted
            pairs = zip(tokens[1:], chains[num_before:], strict=False)
            first = [(token == drafted[0][0], drafted[0][1]) for token, drafted in pairs]
            recorded.append(FirstTokens(*zip(*first, strict=True)) if first else FirstTokens())
            num_before = len(chains)
        return recorded

    def record_lookup(self, prompts: Sequence[int], context: int = 0) -> list[LookupText]:
        """Decodes prompts without speculation, for their tokens."""
        self.report_status("decoding texts to look tokens up in")
        self.ensure_running([NONE])
        server = self._servers[NONE, False]
        texts = []
        for i in prompts:
            prompt = self.prompt(i, context)
            tokens = self._text(server, prompt, context)
            texts.append(LookupText(tuple(prompt), tuple(tokens), self.workload.tokens))
        return texts

    def _text(self, server: Server, prompt: Sequence[int], context: int) -> list[int]:
        """The token ids that a server writes after a prompt of `context` tokens (0: as it is)."""
        workload = self.workload
        return server.text(prompt, workload.tokens, workload.temperature, context > 0)

    def time_steps(
        self, prompts: Mapping[tuple[Drafting, int], Sequence[Sequence[int]]], rounds: int
    ) -> dict[tuple[Drafting, int], list[list[ChainStep]]]:
        """Decodes some prompts with each way of drafting at each context, in rounds.

        Every second round goes through the ways in the opposite order, so that a drift of the
        machine's speed affects all of them.
        """
        steps: dict[tuple[Drafting, int], list[list[ChainStep]]] = {kind: [] for kind in prompts}
        draftings = list(dict.fromkeys(drafting for drafting, _ in prompts))
        for i in range(rounds):
            self.report_status(f"timing steps, round {i + 1} of {rounds}")
            for group in self.groups(draftings[:: -1 if i % 2 else 1]):
                self.ensure_running(group)
                for (drafting, context), by_round in prompts.items():
                    if drafting in group:
                        run = self._run_timed(drafting, by_round[i], context)
                        steps[drafting, context].append(run)
        return steps
