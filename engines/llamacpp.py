"""llama.cpp in a build of the user's: how its servers are started, measured, and told how to draft.

The draft's proposals are recorded along texts, from which `chain_replay` predicts every maximum
length (n-max), threshold (p-min), and lookup.
"""

import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, cycle, islice
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
    with_proposals,
)
from sequoia_plan.engines.driver import fill_up
from sequoia_plan.engines.llama_server import Build, Server
from sequoia_plan.engines.plan import NONE, ContextPlan, Drafting, StepSeconds
from sequoia_plan.engines.pool import MAX_CPU_ENGINES, EnginePool, EngineRun, RunKind, text_before
from sequoia_plan.engines.prediction import StepTimes, best_drafting, step_seconds
from sequoia_plan.engines.spec_types import BLOCK_TYPES, HIDDEN_STATE_TYPES, candidates, flags

NEVER = 1.01
"""A threshold that no token reaches: the draft makes one pass and proposes nothing."""
TIMING_ROUNDS = 12
"""Rounds in which steps of every length are timed, spread over the recording of texts."""
PLAIN_TOKENS = 20
"""Tokens of a request that times steps without speculation."""
TIMED_WIDTHS = (2, 3, 4, 5, 6, 7, 8, 9, 13, 17, 33, 49)
"""Tokens of the target's passes that are timed besides 1: kernels change with the batch."""
PERIOD = 64
"""Tokens of a text that is repeated to time lookups: more than are looked up and drafted."""
COPIED = Drafting(lookup_size=3, lookup_length=TIMED_WIDTHS[-1] - 1)
"""In a text that repeats, a pattern of three tokens is found one period before."""


class Recorded(NamedTuple):
    """What was recorded of a prompt in one way of drafting, and steps that were timed meanwhile."""

    answer: list[Any]
    """The steps that decoded the prompt, or token ids; empty where only times are needed."""
    chains: list[list[Proposal]]
    timed: list[ChainStep]


@dataclass(kw_only=True)
class LlamaCppPool(EnginePool):
    """Servers that decode one request at a time."""

    name = "llamacpp"

    build: Build
    draft_type: str = ""
    """llama.cpp's type of the draft; empty without one."""
    other_types: Sequence[str] = ()
    """Types of n-gram that are measured as they are by default."""
    is_recurrent: bool = False
    """Whether the target has layers with a state."""
    arguments: Sequence[str] = ()
    """Further options of llama-server."""

    @property
    def recording(self) -> Drafting:
        """How chains are drafted that are recorded."""
        return Drafting(self.max_length + 4)

    def most_running(self) -> int:
        """One if this build lists a device other than the CPU."""
        return 1 if self.build.has_device else MAX_CPU_ENGINES

    def start(self, key: Drafting) -> Server:
        """Starts a server, which logs the chains that it drafts if they are recorded."""
        self.report_status("starting llama-server")
        # room for chains that are recorded, and for a text to time lookups in
        size = max(4096, max(self.contexts) + self.workload.tokens + 512)
        logs_chains = "--verbosity 5" * (key.length == self.recording.length)
        options = [
            *("-m", self.target),
            *f"-np 1 -c {size} --offline {logs_chains}".split(),
            *flags(key, self.draft_type, self.draft),
            *self.arguments,
        ]
        server = Server.start(self.build, options, bonus=1 + self.is_recurrent)
        self.callback(server.close)
        server.wait()
        self.version = server.version()
        return server

    def encode(self, engine: Server) -> list[list[int]]:
        """Token ids of the prompts, by the target's tokenizer."""
        return [*map(engine.encode, self.workload.prompts)]

    def prompt(self, index: int, context: int = 0) -> list[int]:
        """Token ids of a prompt, with texts before it so that it has `context` tokens.

        The texts are the prompts of the other half: a prompt that came twice would be looked up.
        They are the same for all of a half, so a server that has decoded one has the begin of the
        next in its cache.
        """
        middle = self.workload.num_measuring
        others = self.prompts[middle:] if index < middle else self.prompts[:middle]
        return fill_up(self.prompts[index], text_before(others or self.prompts, 0, context))

    def decode(
        self, key: Drafting, prompts: Iterable[int], context: int = 0
    ) -> list[list[ChainStep]]:
        """Decodes prompts, one at a time, and returns each one's steps."""
        self.ensure_running([key])
        server, tokens = self.running[key], self.workload.tokens
        return [server.generate(self.prompt(index, context), tokens) for index in prompts]

    def run(self, kind: RunKind, prompts: Sequence[int]) -> EngineRun:
        """Decodes prompts by number; a step counts as the median of those that drafted as much."""
        steps = [*chain(*self.decode(kind.drafting, prompts, kind.context))]
        usual = timed_steps(steps)
        seconds = sum(
            usual[step.drafted].seconds if step.is_single else step.seconds for step in steps
        )
        return EngineRun(seconds, len(steps), sum(step.tokens for step in steps))

    def measure(self) -> list[tuple[ReplayModel, StepTimes]]:
        """Measures what is replayed; of lookups before a draft, those before its best chain."""
        return [*map(self._measure_at, self.contexts)]

    def _measure_at(self, context: int) -> tuple[ReplayModel, StepTimes]:
        """What predicts every way of drafting at one context, and the times of its steps."""
        texts, recorded = self.record(context)
        times = self._step_times(recorded, context)
        draftings = candidates(self.max_length * bool(self.draft_type))
        # without steps of a run that drafted, those of copying by lookup
        steps = [text.answer for text in recorded.get(self.recording, ())]
        counted = acceptance_of(
            steps or [text.replay(COPIED) for text in texts], self.source(context)
        )
        model = ReplayModel(texts, draftings, counted)
        best = NONE
        if self.draft_type:
            chains = [drafting for drafting in draftings if drafting.is_chain]
            best = best_drafting(replace(model, draftings=chains), times, batch=1)
            # where nothing is looked up, the draft's best chain
            draftings += [
                structs.replace(lookup, length=best.length, min_prob=best.min_prob)
                for lookup in draftings
                if lookup.lookup_size
            ]
        decoded = {  # types that are not replayed
            drafting: self.decode(drafting, self.workload.measuring, context)
            for name in self.other_types
            for drafting in {structs.replace(other, types=name) for other in (NONE, best)}
        }
        return replace(model, draftings=[*draftings, *decoded], recorded=decoded), times

    def record(self, context: int) -> tuple[list[DraftedText], dict[Drafting, list[Recorded]]]:
        """The texts of the prompts to measure on, and what each server recorded of each prompt."""
        begins = Drafting(self.recording.length, NEVER)
        reads_states = self.draft_type in HIDDEN_STATE_TYPES
        drafts = [self.recording] * bool(self.draft_type) + [begins] * reads_states
        kinds = [RunKind(key, context=context) for key in (NONE, COPIED, *drafts)]
        rounds = self.run_in_rounds(kinds, self._record, self.workload.num_measuring)
        recorded = {kind.drafting: answers for kind, answers in rounds.items()}
        texts = []
        for index, plain in enumerate(recorded[NONE]):
            prompt, bonus = self.prompt(index, context), 1 + self.is_recurrent
            text = DraftedText(self.workload.tokens, prompt, plain.answer, bonus=bonus)
            if self.draft_type:
                drafted = recorded[self.recording][index]
                text = with_proposals(text, drafted.answer, drafted.chains)
            if reads_states:
                first = recorded[begins][index]
                text = with_first_tokens(text, first.answer, first.chains)
            texts.append(text)
        return texts, recorded

    def _record(self, kind: RunKind, index: int) -> Recorded:
        """Decodes the prompt of this index in one way, and in some rounds times its steps."""
        key, _, context = kind
        count = self.workload.num_measuring
        self.report_status(f"recording and timing, text {index + 1} of {count}")
        server, prompt = self.running[key], self.prompt(index, context)
        num_rounds = (index + 1) * TIMING_ROUNDS // count - index * TIMING_ROUNDS // count
        timed = [step for _ in range(num_rounds) for step in self._timed(key, prompt, context)]
        tokens = self.workload.tokens
        if not key.length:
            return Recorded(server.text(prompt, tokens) if key == NONE else [], [], timed)
        server.text(prompt, 1)  # begins when the timed requests, which were given up, have ended
        server.logged_chains()
        decode = server.generate if key == self.recording else server.text
        return Recorded(decode(prompt, tokens), server.logged_chains(), timed)

    def _timed(self, key: Drafting, prompt: Sequence[int], context: int) -> Iterator[ChainStep]:
        """Steps that time a server: plain ones, or for each number of drafted tokens one."""
        server = self.running[key]
        if key == NONE:
            yield from server.generate(prompt, PLAIN_TOKENS)
        if key == self.recording:
            for num_drafted in range(key.length + 1):  # of n + 2 tokens the first step drafts n
                yield from server.generate(prompt, num_drafted + 2, only_first=True)
        text = repeated(prompt, context or len(prompt))
        for width in TIMED_WIDTHS if key == COPIED else ():
            steps = server.generate(text, width + 1, only_first=True)
            if not steps[0].drafted:  # the answer did not go on to repeat the text: make it do so
                bias = [[text[-PERIOD], 100.0]]
                steps = server.generate(text, width + 1, only_first=True, logit_bias=bias)
            yield from steps

    def _step_times(self, recorded: Mapping[Drafting, list[Recorded]], context: int) -> StepTimes:
        """The median seconds of steps at one context, and of the parts that they are made of.

        A draft that reads hidden states drafts its whole chain and reads a token, before the chain
        is cut off.
        """
        plain, copied, drafted = (
            timed_steps(step for text in recorded.get(key, ()) for step in text.timed)
            for key in (NONE, COPIED, self.recording)
        )
        passes = {num + 1: step.seconds for num, step in (copied | plain).items()}
        steps = (*plain.values(), *(step for num, step in drafted.items() if num))
        times = StepTimes(steps, context, target_seconds=passes)
        # what a step takes besides the target's pass, by its drafted tokens
        rest = {num: step.seconds - times.target_pass(num + 1) for num, step in drafted.items()}
        if not self.draft_type:
            return times
        if {*rest} <= {0}:
            raise SequoiaPlanError(f"{NOTHING_DRAFTED}, or more --tokens")
        idle, longest = rest.pop(0, 0.0), max(rest)
        if self.draft_type in BLOCK_TYPES:  # one pass drafts all tokens
            return replace(times, rest_seconds=rest)
        reads = self.draft_type in HIDDEN_STATE_TYPES
        num_passes = {num: longest if reads else num for num in rest}  # that draft
        per_pass = [(rest[num] - idle) / (num_passes[num] + reads) for num in (*rest,)[:4]]
        pass_seconds = max(float(np.median(per_pass)), 0.0)
        rest = {num: seconds - pass_seconds * num_passes[num] for num, seconds in rest.items()}
        return replace(times, pass_seconds=pass_seconds, rest_seconds={0: idle, **rest})

    def launch_options(self, plan: ContextPlan) -> tuple[str, ...]:
        """The options of llama-server for the best way of drafting, as one line for a shell."""
        options = flags(plan.best_cell(1).drafting, self.draft_type, self.draft)
        return (shlex.join(options),) if options else ()


def with_first_tokens(
    text: DraftedText, tokens: Sequence[int], chains: Sequence[Sequence[Proposal]]
) -> DraftedText:
    """Adds the first token that the draft proposes at each position.

    The threshold let no token through: every position began a chain, and the log has its token.
    """
    # the first token of a text is the prompt's, and the last one of a whole text is not drafted
    proposed = zip(tokens[1 : text.limit - 1], chains, strict=False)
    first = [one._replace(agrees=one.candidates[0] == token) for token, (one, *_) in proposed]
    return replace(text, first=first)


def timed_steps(steps: Iterable[ChainStep]) -> dict[int, StepSeconds]:
    """The median seconds of single steps, by their drafted tokens in ascending order."""
    seconds: defaultdict[int, list[float]] = defaultdict(list)
    for step in steps:
        if step.is_single:
            seconds[step.drafted].append(step.seconds)
    return {num: step_seconds(1, num, seconds[num]) for num in sorted(seconds)}


def repeated(tokens: Sequence[int], size: int) -> list[int]:
    """A prompt that repeats the end of a text, and that a model goes on to repeat."""
    end = [*islice(cycle(reversed(tokens)), PERIOD)][::-1]
    return [*islice(cycle(reversed(end)), max(size, 3 * PERIOD))][::-1]
