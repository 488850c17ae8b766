"""llama.cpp in a build of the user's: how its servers are started, measured, and told how to draft.

The draft's proposals are recorded along texts, from which `chain_replay` predicts every maximum
length (n-max), threshold (p-min), and lookup.
"""

import shlex
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from typing import Any

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
    is_recurrent,
    lookups,
)
from sequoia_plan.engines.timing import StepTimes, step_seconds
from sequoia_plan.engines.workload import EngineRun, RunKind, text_before

NEVER = 1.01
"""A threshold that no token reaches: the draft makes one pass and proposes nothing."""
TIMING_ROUNDS = 3
PLAIN_TOKENS = 20
"""Tokens of a request that times steps without speculation."""
TIMED_WIDTHS = (2, 3, 4, 5, 6, 7, 8, 9, 13, 17, 33)
"""Tokens of the target's passes that are timed besides 1: kernels change with the batch."""
PERIOD = 48
"""Tokens of a text that is repeated to time lookups: more than are looked up."""
COPIED = Drafting(lookup_size=3, lookup_length=TIMED_WIDTHS[-1] - 1)
"""In a text that repeats, a pattern of three tokens is found one period before."""


@dataclass(kw_only=True)
class LlamaCppPool(EnginePool):
    """Servers that decode one request at a time."""

    name = "llamacpp"

    build: Build
    draft_type: str = ""
    """llama.cpp's type of the draft; empty without one."""
    other_types: Sequence[str] = ()
    """Types of n-gram that are measured as they are by default."""
    arguments: Sequence[str] = ()
    """Further options of llama-server."""
    logged: set[Drafting] = field(default_factory=set)
    """Ways of drafting whose servers log the chains that they draft."""

    @property
    def has_device(self) -> bool:
        """Whether this build lists a device other than the CPU."""
        return self.build.has_device

    def start(self, key: Drafting) -> Server:
        """Starts a server."""
        self.report_status("starting llama-server")
        self.version = self.build.version
        # room for chains that are recorded, and for a text to time lookups in
        size = max(4096, self.max_context + self.workload.tokens + 512)
        options = [
            *("-m", self.target, "-np", "1", "-c", str(size), "--offline"),
            *flags(key, self.draft_type, self.draft),
            *self.arguments,
            *(["--verbosity", "5"] if key in self.logged else []),
        ]
        server = Server.start(self.build, options)
        server.bonus += is_recurrent(self.target)
        self.exit_stack.callback(server.close)
        server.wait()
        return server

    def encode(self, engine: Server) -> tuple[list[list[int]], list[list[int]]]:
        """Token ids of the prompts, by the target's tokenizer, also for those before others."""
        prompts = [engine.encode(prompt) for prompt in self.workload.prompts]
        return prompts, prompts

    def prompt(self, index: int, context: int = 0) -> list[int]:
        """Token ids of a prompt, with texts before it so that it has `context` tokens.

        The texts are those that the prompts to measure on, or to verify on, do not have: a prompt
        that came twice would be looked up. They are the same for all of these prompts, so a server
        that has decoded one has the begin of the next in its cache.
        """
        middle = self.workload.num_measuring
        others = self.texts[middle:] if index < middle else self.texts[:middle]
        return fill_up(self.prompts[index], text_before(others or self.texts, 0, context))

    def decode(
        self, key: Drafting, prompts: Iterable[int], context: int = 0
    ) -> list[list[ChainStep]]:
        """Decodes prompts, one at a time, and returns each one's steps."""
        self.ensure_running([key])
        server, tokens = self.running[key], self.workload.tokens
        return [server.generate(self.prompt(i, context), tokens) for i in prompts]

    def run(self, kind: RunKind, prompts: Sequence[int]) -> EngineRun:
        """Decodes prompts."""
        steps = [*chain.from_iterable(self.decode(kind.drafting, prompts, kind.context))]
        tokens = sum(step.tokens for step in steps)
        return EngineRun(sum(step.seconds for step in steps), len(steps), tokens)

    def measure(self, max_length: int, context: int) -> tuple[ReplayModel, StepTimes]:
        """Times steps, and records what is replayed.

        Of lookups before a draft, those before the best chain are predicted.
        """
        recording = Drafting(max_length + 4)
        self.logged |= {recording, Drafting(recording.length, NEVER)}
        times = self._time(context, recording)
        texts, recorded = self.record(context, recording)
        draftings = candidates(max_length if self.draft_type else 0)
        model = ReplayModel(texts, draftings, acceptance_of(recorded, self.source(context)))
        best = NONE
        if self.draft_type:
            chains = [drafting for drafting in draftings if drafting.is_chain]
            best = best_drafting(replace(model, draftings=chains), times, 1)
            draftings += [
                structs.replace(each, length=best.length, min_prob=best.min_prob)
                for each in lookups()
            ]
        as_they_are = {
            drafting: self.decode(drafting, self.workload.measuring, context)
            for name in self.other_types
            for drafting in {structs.replace(each, types=name) for each in (NONE, best)}
        }
        return replace(model, draftings=[*draftings, *as_they_are], recorded=as_they_are), times

    def record(
        self, context: int, recording: Drafting
    ) -> tuple[list[DraftedText], list[list[ChainStep]]]:
        """Decodes the prompts to measure on: their texts, and steps with long chains."""
        self.report_status("recording texts and chains")
        measuring, limit = self.workload.measuring, self.workload.tokens
        prompts = [self.prompt(i, context) for i in measuring]
        tokens = self._texts(NONE, prompts)
        if not self.draft_type:
            texts = [*map(DraftedText, repeat(limit), prompts, tokens)]
            return texts, [text.replay(COPIED) for text in texts]
        self._logged(recording)  # of another context, and of steps that were timed
        recorded = self.decode(recording, measuring, context)
        # some drafts log nothing: no threshold can be planned for them
        chains = iter(
            self._logged(recording)
            or [[Proposal(1.0, False)] * step.drafted for step in chain(*recorded) if step.drafted]
        )
        bonus = self.running[recording].bonus
        texts = [
            replace(drafted_text(steps, chains, limit), prompt=prompt, tokens=own, bonus=bonus)
            for steps, prompt, own in zip(recorded, prompts, tokens, strict=True)
        ]
        if self.draft_type in HIDDEN_STATE_TYPES:
            texts = self._with_first_tokens(texts, recording)
        return texts, recorded

    def _logged(self, key: Drafting) -> list[list[Proposal]]:
        """The chains that a server has logged since the last call."""
        self.ensure_running([key])
        return self.running[key].logged_chains()

    def _texts(self, key: Drafting, prompts: Iterable[Sequence[int]]) -> list[list[int]]:
        """The token ids that a server writes after prompts."""
        self.ensure_running([key])
        return [self.running[key].text(prompt, self.workload.tokens) for prompt in prompts]

    def _with_first_tokens(
        self, texts: Sequence[DraftedText], recording: Drafting
    ) -> list[DraftedText]:
        """Adds the first token that the draft proposes at each position.

        The server's threshold lets no token through, so that every position is the begin of a
        chain, but the log has the token that would have been drafted.
        """
        key = Drafting(recording.length, NEVER)
        self._logged(key)
        tokens = self._texts(key, [text.prompt for text in texts])
        chains = iter(self._logged(key))
        # the first token of a text is the prompt's, and the last one of a whole text is not drafted
        last = self.workload.tokens - 1
        return [
            replace(
                text,
                first=[
                    proposed._replace(agrees=proposed.candidates[0] == token)
                    for token, (proposed, *_) in zip(own[1:last], chains, strict=False)
                ],
            )
            for text, own in zip(texts, tokens, strict=True)
        ]

    def _time(self, context: int, recording: Drafting) -> StepTimes:
        """Times steps of every length.

        A request has no room for longer chains than its tokens, so that one server shows the steps
        of all lengths. Servers alternate, so that a drift of the machine's speed affects all.
        """
        rooms: dict[Any, Sequence[int]] = {
            NONE: [PLAIN_TOKENS],
            COPIED: [width - 1 for width in TIMED_WIDTHS],
        }
        if self.draft_type:
            rooms[recording] = range(recording.length + 1)
        seconds: defaultdict[tuple[Any, int], list[float]] = defaultdict(list)
        for group in self.groups(rooms):
            for round_index in range(TIMING_ROUNDS):
                self.report_status(f"timing steps, round {round_index + 1} of {TIMING_ROUNDS}")
                self.ensure_running(group)
                index = round_index % self.workload.num_measuring
                prompt = self.prompt(index, context)
                text = repeated(prompt, context or len(prompt))
                for key, room in chain.from_iterable(zip(repeat(k), rooms[k]) for k in group):
                    server = self.running[key]
                    start = text if key == COPIED else prompt
                    steps = server.generate(start, room + 2, key != NONE)
                    if key == COPIED and not steps[0].drafted:  # it must go on to repeat
                        bias = [[text[-PERIOD], 100.0]]
                        steps = server.generate(start, room + 2, True, logit_bias=bias)
                    for step in filter(lambda step: step.is_single, steps):
                        seconds[key, step.drafted].append(step.seconds)

        def timed(server: Drafting) -> list[StepSeconds]:
            return timed_steps({n: taken for (key, n), taken in seconds.items() if key == server})

        plain, copied, drafted = timed(NONE), timed(COPIED), timed(recording)
        passes = {step.speculative_tokens + 1: step.seconds for step in (*copied, *plain)}
        times = StepTimes(tuple(plain), context, target_seconds=passes)
        return self._with_draft(times, *drafted) if self.draft_type else times

    def _with_draft(self, times: StepTimes, idle: StepSeconds, *timed: StepSeconds) -> StepTimes:
        """The times with those of a draft, from steps that drafted none, one and more tokens.

        A draft that reads hidden states drafts its whole chain and reads a token, before the chain
        is cut off, so a pass for each token that is missing is taken off.
        """
        if not timed:
            raise SequoiaPlanError(NOTHING_DRAFTED)
        longest = len(timed)
        is_block = self.draft_type in BLOCK_TYPES
        drafts_all = self.draft_type in HIDDEN_STATE_TYPES
        in_passes = [
            (step.seconds - idle.seconds - times.target_pass(n + 1) + times.target_pass(1))
            / (1 if is_block else longest + 1 if drafts_all else n)
            for n, step in enumerate(timed[:4], 1)
        ]
        one_pass = max(float(np.median(in_passes)), 0.0)
        steps = (
            structs.replace(step, seconds=step.seconds - (longest - n) * one_pass)
            if drafts_all and not is_block
            else step
            for n, step in enumerate(timed, 1)
        )
        return replace(
            times,
            steps=(*times.steps, *steps),
            pass_seconds=0.0 if is_block else one_pass,
            idle_seconds=idle.seconds + one_pass * is_block,
        )

    def launch_options(self, plan: ContextPlan) -> tuple[str, ...]:
        """The options of llama-server for the best way of drafting, as one line for a shell."""
        words = flags(plan.best_cell(1).drafting, self.draft_type, self.draft)
        return (shlex.join(words),) if words else ()


def timed_steps(seconds: Mapping[int, Sequence[float]]) -> list[StepSeconds]:
    """The median seconds of steps by their drafted tokens."""
    return [step_seconds(1, n, np.array(times)) for n, times in sorted(seconds.items())]


def repeated(tokens: Sequence[int], size: int) -> list[int]:
    """A prompt that repeats the end of a text, and that a model goes on to repeat."""
    end = ([*tokens] * -(-PERIOD // len(tokens)))[-PERIOD:]
    size = max(size, 3 * PERIOD)
    return (end * -(-size // PERIOD))[-size:]
