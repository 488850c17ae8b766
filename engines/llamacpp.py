"""llama.cpp in a build of the user's: how its servers are started, measured, and told how to draft.

The draft's proposals are recorded along texts, from which `chain_replay` predicts every maximum
length (n-max), threshold (p-min), and lookup.
"""

import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, product
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
TIMING_ROUNDS = 12
"""Rounds in which steps of every length are timed, spread over the recording of texts."""
PLAIN_TOKENS = 20
"""Tokens of a request that times steps without speculation."""
TIMED_WIDTHS = (2, 3, 4, 5, 6, 7, 8, 9, 13, 17, 33)
"""Tokens of the target's passes that are timed besides 1: kernels change with the batch."""
PERIOD = 48
"""Tokens of a text that is repeated to time lookups: more than are looked up."""
COPIED = Drafting(lookup_size=3, lookup_length=TIMED_WIDTHS[-1] - 1)
"""In a text that repeats, a pattern of three tokens is found one period before."""


Chains = list[list[Proposal]]
TimedSteps = defaultdict[Drafting, list[ChainStep]]
"""Steps of each server."""


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
        """Decodes prompts. A step takes the median of those that drafted as much.

        Other work on the machine makes a few steps in a row take a third longer.
        """
        steps = [*chain.from_iterable(self.decode(kind.drafting, prompts, kind.context))]
        usual = {each.speculative_tokens: each.seconds for each in timed_steps(steps)}
        seconds = sum(usual[step.drafted] if step.is_single else step.seconds for step in steps)
        return EngineRun(seconds, len(steps), sum(step.tokens for step in steps))

    def measure(self, max_length: int, context: int) -> tuple[ReplayModel, StepTimes]:
        """Measures what is replayed; of lookups before a draft, those before its best chain."""
        recording = Drafting(max_length + 4)
        texts, recorded, timed = self.record(context, recording)
        times = self._step_times(timed, context, recording)
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
    ) -> tuple[list[DraftedText], list[list[ChainStep]], TimedSteps]:
        """Decodes the prompts to measure on: their texts, steps with long chains, and timed steps.

        Servers alternate, so that a drift of the machine's speed affects all.
        """
        timed: TimedSteps = defaultdict(list)
        begins = Drafting(recording.length, NEVER)
        self.logged |= {recording, begins}
        reads_states = self.draft_type in HIDDEN_STATE_TYPES
        drafts = [recording] * bool(self.draft_type) + [begins] * reads_states
        rooms: dict[Drafting, Sequence[int]] = {
            NONE: [PLAIN_TOKENS],
            COPIED: [width - 1 for width in TIMED_WIDTHS],
            recording: range(recording.length + 1),
        }
        notes: defaultdict[Drafting, list[Any]] = defaultdict(list)
        num_prompts = self.workload.num_measuring
        rounds = [i * num_prompts // TIMING_ROUNDS for i in range(TIMING_ROUNDS)]
        for group in self.groups([NONE, COPIED, *drafts]):
            for index in self.workload.measuring:
                self.report_status(f"recording and timing, text {index + 1} of {num_prompts}")
                self.ensure_running(group)
                prompt = self.prompt(index, context)
                for _, key in product(range(rounds.count(index)), group):
                    timed[key] += self._timed(key, rooms.get(key, ()), prompt, context)
                for key in {*group} - {COPIED}:
                    notes[key].append(self._record(key, prompt))
        bonus = 1 + is_recurrent(self.target)
        texts = [
            DraftedText(self.workload.tokens, self.prompt(index, context), tokens, bonus=bonus)
            for index, (tokens, _) in enumerate(notes[NONE])
        ]
        if not self.draft_type:
            return texts, [text.replay(COPIED) for text in texts], timed
        texts = [*map(with_proposals, texts, notes[recording])]
        if reads_states:
            texts = [*map(with_first_tokens, texts, notes[begins])]
        return texts, [steps for steps, _ in notes[recording]], timed

    def _record(self, key: Drafting, prompt: Sequence[int]) -> tuple[list[Any], Chains]:
        """The token ids or the steps after a prompt, and the chains that the server has logged."""
        server, tokens = self.running[key], self.workload.tokens
        if key == NONE:
            return server.text(prompt, tokens), []
        server.logged_chains()  # of steps that were timed
        decode = server.text if key.min_prob == NEVER else server.generate
        return decode(prompt, tokens), server.logged_chains()

    def _timed(
        self, key: Drafting, rooms: Iterable[int], prompt: Sequence[int], context: int
    ) -> Iterator[ChainStep]:
        """Steps of a server in requests that have no room for longer chains than so many tokens."""
        server = self.running[key]
        text = repeated(prompt, context or len(prompt)) if key == COPIED else prompt
        for room in rooms:
            steps = server.generate(text, room + 2, key != NONE)
            if key == COPIED and not steps[0].drafted:  # it must go on to repeat
                bias = [[text[-PERIOD], 100.0]]
                steps = server.generate(text, room + 2, True, logit_bias=bias)
            yield from steps

    def _step_times(self, timed: TimedSteps, context: int, recording: Drafting) -> StepTimes:
        """Steps of every length, without a draft and with it."""
        plain, copied, drafted = (timed_steps(timed[key]) for key in (NONE, COPIED, recording))
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


def with_proposals(text: DraftedText, note: tuple[list[ChainStep], Chains]) -> DraftedText:
    """Adds what a draft proposed along a text. Some log nothing: no p-min can be planned."""
    steps, logged = note
    unknown = ([Proposal(1.0, False)] * step.drafted for step in steps if step.drafted)
    drafted = drafted_text(steps, iter(logged or unknown), text.limit)
    return replace(text, proposals=drafted.proposals, tails=drafted.tails)


def with_first_tokens(text: DraftedText, note: tuple[list[int], Chains]) -> DraftedText:
    """Adds the first token that the draft proposes at each position.

    The threshold let no token through: every position began a chain, and the log has its token.
    """
    tokens, chains = note
    # the first token of a text is the prompt's, and the last one of a whole text is not drafted
    proposed = zip(tokens[1 : text.limit - 1], chains, strict=False)
    first = [one._replace(agrees=one.candidates[0] == token) for token, (one, *_) in proposed]
    return replace(text, first=first)


def timed_steps(steps: Iterable[ChainStep]) -> list[StepSeconds]:
    """The median seconds of single steps by their drafted tokens."""
    seconds: defaultdict[int, list[float]] = defaultdict(list)
    for step in filter(lambda step: step.is_single, steps):
        seconds[step.drafted].append(step.seconds)
    return [step_seconds(1, n, np.array(times)) for n, times in sorted(seconds.items())]


def repeated(tokens: Sequence[int], size: int) -> list[int]:
    """A prompt that repeats the end of a text, and that a model goes on to repeat."""
    end = ([*tokens] * -(-PERIOD // len(tokens)))[-PERIOD:]
    size = max(size, 3 * PERIOD)
    return (end * -(-size // PERIOD))[-size:]
