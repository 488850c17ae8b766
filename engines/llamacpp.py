"""llama.cpp in a build of the user's: how its servers are started, measured, and told how to draft.

The draft's proposals are recorded along texts, from which `chain_replay` predicts every maximum
length (n-max), threshold (p-min), and lookup.
"""

import shlex
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.engines.chain_replay import (
    NOTHING_DRAFTED,
    ChainStep,
    DraftedText,
    Proposal,
    ReplayModel,
    acceptance_of,
    drafted_text,
)
from sequoia_plan.engines.driver import fill_up
from sequoia_plan.engines.llama_server import Build, Server
from sequoia_plan.engines.plan import NONE, ContextPlan, Drafting, StepSeconds
from sequoia_plan.engines.pool import EnginePool
from sequoia_plan.engines.prediction import best_drafting
from sequoia_plan.engines.spec_types import (
    BLOCK_TYPES,
    HIDDEN_STATE_TYPES,
    candidates,
    flags,
    lookups,
)
from sequoia_plan.engines.timing import StepTimes, step_seconds
from sequoia_plan.engines.workload import EngineRun, RunKind, text_before

SERVER_CONTEXT = 4096
"""Size of a server's context, at least, unless --server-args sets it."""
ROOM = 512
"""Room in a server's context beyond the largest prompt and its tokens: chains that are recorded
are longer, and a text to time lookups in, too."""
EXTRA_LENGTH = 4
"""Tokens of a recorded chain beyond the longest one that is planned."""
NEVER = 1.01
"""A threshold that no token reaches: the draft makes one pass and proposes nothing."""
TIMING_ROUNDS = 4
SHORT_CHAINS = 4
"""Chains that show the time of a pass of the draft."""
PLAIN_TOKENS = 20
"""Tokens of a request that times steps without speculation."""
TIMED_WIDTHS = (2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 17, 25, 33, 49)
"""Tokens of the target's passes that are timed besides 1: kernels change with the batch."""
PERIOD = 64
"""Tokens of a text that is repeated to time lookups: more than are looked up."""
COPIED = Drafting(lookup_size=3, lookup_length=TIMED_WIDTHS[-1] - 1)
"""In a text that repeats, a pattern of three tokens is found one period before."""
DEFAULT_CHAIN, DEFAULT_LOOKUP = Drafting(3), Drafting(lookup_size=12, lookup_length=48)
"""What llama.cpp does if only a type is named (common.h, ggml 0.25.3)."""


class Logged(NamedTuple):
    """Names a server that logs the chains that it drafts."""

    drafting: Drafting


@dataclass(kw_only=True)
class LlamaCppPool(EnginePool):
    """Servers that decode one request at a time."""

    starts_each_round = True

    build: Build
    draft_type: str = ""
    """llama.cpp's type of the draft; empty without one."""
    other_types: Sequence[str] = ()
    """Types of n-gram that are measured as they are by default."""
    arguments: Sequence[str] = ()
    """Further options of llama-server."""

    @property
    def has_device(self) -> bool:
        """Whether this build lists a device other than the CPU."""
        return self.build.has_device

    @property
    def default_drafting(self) -> Drafting:
        """What llama.cpp does if only the type is named."""
        return DEFAULT_CHAIN if self.draft_type else DEFAULT_LOOKUP

    def start(self, key: Drafting | Logged) -> Server:
        """Starts a server."""
        self.report_status("starting llama-server")
        logs_chains = isinstance(key, Logged)
        drafting = key.drafting if isinstance(key, Logged) else key
        size = max(SERVER_CONTEXT, self.max_context + self.workload.tokens + ROOM)
        options = [
            *("-m", self.target, "-np", "1", "-c", str(size), "--offline"),
            *flags(drafting, self.draft_type, self.draft),
            *self.arguments,
            *(["--verbosity", "5"] if logs_chains else []),
        ]
        server = Server.start(self.build, options)
        self.exit_stack.callback(server.close)
        server.wait()
        return server

    def encode(self, engine: Server) -> tuple[list[list[int]], list[list[int]]]:
        """Token ids of the prompts, by the target's tokenizer."""
        encoded = [engine.encode(prompt) for prompt in self.workload.prompts]
        return [prompt for prompt, _ in encoded], [text for _, text in encoded]

    def prompt(self, index: int, context: int = 0) -> list[int]:
        """Token ids of a prompt, with texts before it so that it has `context` tokens.

        The texts are those that the prompts to measure on, or to verify on, do not have: a prompt
        that came twice would be looked up. They are the same for all of these prompts, so a server
        that has decoded one has the begin of the next in its cache.
        """
        middle = self.workload.num_measuring
        others = self.texts[middle:] if index < middle else self.texts[:middle]
        return fill_up(self.prompts[index], text_before(others or self.texts, 0, context))

    def _completion(self, prompt: Sequence[int], tokens: int, context: int) -> dict[str, Any]:
        """A request to decode a prompt. With a context, its begin may be in the server's cache."""
        return {
            "prompt": list(prompt),
            "n_predict": tokens,
            "temperature": self.workload.temperature,
            "cache_prompt": context > 0,
        }

    def decode(
        self, key: Drafting | Logged, prompts: Iterable[int], context: int = 0
    ) -> list[list[ChainStep]]:
        """Decodes prompts, one at a time, and returns each one's steps."""
        self.ensure_running([key])
        server, tokens = self.running[key], self.workload.tokens
        return [
            server.generate(self._completion(self.prompt(i, context), tokens, context))
            for i in prompts
        ]

    def run(self, kind: RunKind, prompts: Sequence[int]) -> EngineRun:
        """Decodes prompts."""
        return engine_run(chain.from_iterable(self.decode(kind.drafting, prompts, kind.context)))

    def measure(self, max_length: int, context: int) -> tuple[ReplayModel, StepTimes]:
        """Records what is replayed, and times steps.

        Of lookups before a draft, those before the best chain are predicted.
        """
        times = self._time(context, max_length)
        texts, recorded = self.record(context, max_length)
        draftings = candidates(max_length if self.draft_type else 0)
        model = ReplayModel(texts, draftings, acceptance_of(recorded, self.source(context)))
        best_chain = NONE
        if self.draft_type:
            chains = replace(model, draftings=[each for each in draftings if each.is_chain])
            best_chain = best_drafting(chains, times, 1)
            joined = [
                structs.replace(each, length=best_chain.length, min_prob=best_chain.min_prob)
                for each in lookups()
            ]
            draftings = [*draftings, *joined]
        as_they_are = [
            structs.replace(chain, types=name)
            for name in self.other_types
            for chain in dict.fromkeys((NONE, best_chain))
        ]
        steps = {each: self.decode(each, self.workload.measuring, context) for each in as_they_are}
        return replace(model, draftings=[*draftings, *as_they_are], recorded=steps), times

    def record(
        self, context: int, max_length: int
    ) -> tuple[list[DraftedText], list[list[ChainStep]]]:
        """Decodes the prompts to measure on: their texts, and steps with long chains."""
        self.report_status("decoding texts without speculation")
        limit = self.workload.tokens
        prompts = [self.prompt(i, context) for i in self.workload.measuring]
        texts = [
            DraftedText(limit, prompt, self._text(NONE, prompt, context)) for prompt in prompts
        ]
        if not self.draft_type:
            longest = Drafting(lookup_size=2, lookup_length=max_length)
            return texts, [text.replay(longest) for text in texts]
        key = Logged(Drafting(max_length + EXTRA_LENGTH))
        length = key.drafting.length
        self.report_status(f"recording chains of {length} tokens")
        self.ensure_running([key])
        self.running[key].logged_chains()  # of another context, and of steps that were timed
        recorded = self.decode(key, self.workload.measuring, context)
        chains = self.running[key].logged_chains()
        if not chains:  # some drafts log nothing: no threshold can be planned for them
            steps = chain.from_iterable(recorded)
            chains = [[Proposal(1.0, False)] * step.drafted for step in steps if step.drafted]
        remaining = iter(chains)
        drafted = [drafted_text(steps, remaining, limit) for steps in recorded]
        firsts: list[Sequence[Proposal]] = [()] * len(texts)
        if self.draft_type in HIDDEN_STATE_TYPES:
            firsts = [*self._record_first_tokens(prompts, context, length)]
        return [
            replace(of_draft, prompt=text.prompt, tokens=text.tokens, first=first)
            for text, of_draft, first in zip(texts, drafted, firsts, strict=True)
        ], recorded

    def _text(self, key: Drafting | Logged, prompt: Sequence[int], context: int) -> list[int]:
        """The token ids that a server writes after a prompt."""
        self.ensure_running([key])
        return self.running[key].text(self._completion(prompt, self.workload.tokens, context))

    def _record_first_tokens(
        self, prompts: Sequence[Sequence[int]], context: int, length: int
    ) -> list[list[Proposal]]:
        """Decodes prompts, and records the first token that a draft proposes at each position.

        The server's threshold lets no token through, so that every position is the begin of a
        chain, but the log has the token that would have been drafted.
        """
        self.report_status("recording the first token of a chain at each position")
        key = Logged(Drafting(length, NEVER))
        self.ensure_running([key])
        self.running[key].logged_chains()
        texts = [self._text(key, prompt, context) for prompt in prompts]
        chains = iter(self.running[key].logged_chains())
        # the first token of a text is the prompt's, and the last one of a whole text is not drafted
        return [
            [
                proposed._replace(agrees=proposed.candidates[0] == own)
                for own, (proposed, *_) in zip(
                    tokens[1 : self.workload.tokens - 1], chains, strict=False
                )
            ]
            for tokens in texts
        ]

    def _time(self, context: int, max_length: int) -> StepTimes:
        """Times steps of every length.

        A request has no room for longer chains than its tokens, so that one server shows the steps
        of all lengths. Servers alternate, so that a drift of the machine's speed affects all.
        """
        drafts = Logged(Drafting(max_length + EXTRA_LENGTH))
        rooms: dict[Any, Sequence[int]] = {
            NONE: [PLAIN_TOKENS],
            COPIED: [width - 1 for width in TIMED_WIDTHS],
        }
        if self.draft_type:
            rooms[drafts] = range(drafts.drafting.length + 1)
        seconds: dict[Any, defaultdict[int, list[float]]] = {
            key: defaultdict(list) for key in rooms
        }
        for group in self.groups(rooms):
            for round_index in range(TIMING_ROUNDS):
                self.report_status(f"timing steps, round {round_index + 1} of {TIMING_ROUNDS}")
                self.ensure_running(group)
                index = round_index % self.workload.num_measuring
                prompt = self.prompt(index, context)
                text = repeated(self.texts[index] or prompt, context or len(prompt))
                for key in group[:: -1 if round_index % 2 else 1]:
                    for room in rooms[key]:
                        body = self._completion(text if key == COPIED else prompt, room + 2, 1)
                        steps = self.running[key].generate(body, ignores_end=True)
                        if key == COPIED and not steps[0].drafted:  # it must go on to repeat
                            body["logit_bias"] = [[text[-PERIOD], 100.0]]
                            steps = self.running[key].generate(body, ignores_end=True)
                        for step in steps:
                            if step.is_single:
                                seconds[key][step.drafted].append(step.seconds)
        plain, *_ = timed_steps(seconds[NONE])
        passes = {
            step.speculative_tokens + 1: step.seconds for step in timed_steps(seconds[COPIED])
        }
        times = StepTimes((plain,), context, target_seconds={**passes, 1: plain.seconds})
        if not self.draft_type:
            return times
        idle, *timed = timed_steps(seconds[drafts])
        if not timed:
            raise SequoiaPlanError(NOTHING_DRAFTED)
        return self._with_draft(times, idle.seconds, timed)

    def _with_draft(
        self, times: StepTimes, idle_seconds: float, timed: Sequence[StepSeconds]
    ) -> StepTimes:
        """The times with those of a draft, from steps that drafted a token and more.

        A draft that reads hidden states drafts its whole chain and reads a token, before the chain
        is cut off, so a pass for each token that is missing is taken off.
        """
        is_block = self.draft_type in BLOCK_TYPES
        drafts_all = self.draft_type in HIDDEN_STATE_TYPES
        longest = len(timed)
        in_passes = [
            (step.seconds - idle_seconds - times.target_pass(n + 1) + times.target_pass(1))
            / (1 if is_block else longest + 1 if drafts_all else n)
            for n, step in enumerate(timed[:SHORT_CHAINS], 1)
        ]
        pass_seconds = max(float(np.median(in_passes)), 0.0)
        if is_block:
            idle_seconds, pass_seconds = idle_seconds + pass_seconds, 0.0
        missing = pass_seconds * drafts_all
        steps = (
            structs.replace(step, seconds=step.seconds - (longest - n) * missing)
            for n, step in enumerate(timed, 1)
        )
        return replace(
            times,
            steps=(*times.steps, *steps),
            pass_seconds=pass_seconds,
            idle_seconds=idle_seconds,
        )

    def launch_options(self, plan: ContextPlan) -> tuple[str, ...]:
        """The options of llama-server for the best way of drafting, as one line for a shell."""
        words = flags(plan.best_cell(1).drafting, self.draft_type, self.draft)
        return (shlex.join(words),) if words else ()

    def metadata(self) -> dict[str, Any]:
        """The build's version and options."""
        return {
            "engine": "llamacpp",
            "engine_version": self.build.version,
            "method": ",".join(filter(None, (*self.other_types, self.draft_type))),
            "settings": {"server_args": [*self.arguments], "tokens": self.workload.tokens},
        }


def timed_steps(seconds: Mapping[int, Sequence[float]]) -> list[StepSeconds]:
    """The median seconds of steps by their drafted tokens."""
    return [step_seconds(1, n, np.array(times), len(times)) for n, times in sorted(seconds.items())]


def engine_run(steps: Iterable[ChainStep]) -> EngineRun:
    """The tokens and seconds of several steps."""
    taken = [*steps]
    seconds = sum(step.seconds for step in taken)
    return EngineRun(seconds, len(taken), sum(step.tokens for step in taken))


def repeated(tokens: Sequence[int], size: int) -> list[int]:
    """A prompt that repeats the end of a text, and that a model goes on to repeat."""
    end = ([*tokens] * -(-PERIOD // len(tokens)))[-PERIOD:]
    size = max(size, 3 * PERIOD)
    return (end * -(-size // PERIOD))[-size:]
