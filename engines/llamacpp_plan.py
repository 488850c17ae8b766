"""Plans how llama.cpp should draft, from step times and replayed texts, and verifies the plan."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from msgspec.structs import replace

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.artifacts.plan import tool_version
from sequoia_plan.artifacts.uncertainty import Z95, median_with_error
from sequoia_plan.engines.chain import StepTimes, effective_trials
from sequoia_plan.engines.drafting import (
    HIDDEN_STATE_TYPES,
    LOOKUP,
    NEVER,
    NONE,
    Drafting,
    candidates,
    defaults,
    launch_options,
    neighbours,
    timed_draftings,
)
from sequoia_plan.engines.llamacpp import ServerPool
from sequoia_plan.engines.plan import (
    Cell,
    ChainAcceptance,
    ContextChoice,
    EnginePlan,
    StepSeconds,
)
from sequoia_plan.engines.replay import (
    ChainStep,
    DraftedText,
    FirstTokens,
    LookupText,
    replay_draft,
    replay_lookup,
)
from sequoia_plan.engines.vllm import EngineRun, measured_cell

EXTRA_LENGTH = 4
"""Tokens of a recorded chain beyond the longest one that is planned."""
TIMING_ROUNDS = 3
"""Rounds in which steps are timed."""
PROMPTS_PER_ROUND = 4
LOOKUPS_PER_ROUND = 2
"""Texts of a round that times lookups, each with several drafts."""
VERIFY_REPEATS = 3
"""How often `verify_plan` runs each way of drafting."""
MIN_PERIOD = 16
"""Tokens of a text that is repeated to time lookups, at least."""
PERIOD_MARGIN = 8
"""Tokens of such a text beyond those that are drafted."""


@dataclass(frozen=True)
class Measurements:
    """What every way of drafting of one type is predicted from, at one context."""

    texts: Sequence[DraftedText | LookupText]
    acceptance: ChainAcceptance
    times: Times

    @property
    def context(self) -> int:
        """Tokens of every prompt; 0 if prompts were decoded as they are."""
        return self.times.steps.context


def measure(
    pool: ServerPool,
    spec_type: str,
    max_length: int,
    prompts: Sequence[int],
    contexts: Sequence[int] = (0,),
) -> tuple[list[Measurements], float]:
    """Records texts, and times steps, at each context.

    Args:
        pool: the servers.
        spec_type: llama.cpp's name of the type.
        max_length: maximum number of drafted tokens to plan for.
        prompts: indices of the prompts to measure on.
        contexts: tokens of every prompt; 0 decodes prompts as they are.

    Returns:
        What was measured at each context, and the seconds that all of it took.
    """
    start_time = time.perf_counter()
    recordings = {
        context: record(pool, spec_type, max_length, prompts, context) for context in contexts
    }
    timing_prompts = {
        (drafting, context): _prompts_to_time(pool, drafting, texts, prompts, context)
        for context, (texts, _) in recordings.items()
        for drafting in timed_draftings(spec_type, max_length)
    }
    rounds = pool.time_steps(timing_prompts, TIMING_ROUNDS)
    measurements = []
    for context, (texts, recorded) in recordings.items():
        source = f"{len(prompts)} prompts" + (f" of {context} tokens" if context else "")
        acceptance = acceptance_of(recorded, source)
        tokens_by_text = [[step.tokens for step in steps] for steps in recorded]
        trials = round(effective_trials(acceptance, tokens_by_text), 1)
        measurements.append(
            Measurements(
                texts,
                replace(acceptance, trials=trials),
                times_of_rounds(
                    {drafting: steps for (drafting, at), steps in rounds.items() if at == context},
                    context,
                ),
            )
        )
    return measurements, time.perf_counter() - start_time


def _prompts_to_time(
    pool: ServerPool,
    drafting: Drafting,
    texts: Sequence[DraftedText | LookupText],
    prompts: Sequence[int],
    context: int,
) -> list[list[int]]:
    """Indices of the prompts of each round that steps of a way of drafting are timed with.

    Lookups are timed in texts that repeat themselves, about as long as the prompts are: a step
    takes longer after a longer text. With a context it is one text, which the server then has in
    its cache.
    """
    if drafting.spec_type != LOOKUP:
        chosen, per_round = prompts, PROMPTS_PER_ROUND
    else:
        size = context or int(np.median([len(pool.prompt(i)) for i in prompts]))
        lookup_texts = [text for text in texts if isinstance(text, LookupText)]
        chosen = pool.add_prompts(
            [
                repeated(text, drafting.max_length, size)
                for text in lookup_texts[: 1 if context else LOOKUPS_PER_ROUND]
            ]
        )
        per_round = LOOKUPS_PER_ROUND
    return [
        [chosen[(i * per_round + j) % len(chosen)] for j in range(per_round)]
        for i in range(TIMING_ROUNDS)
    ]


def record(
    pool: ServerPool,
    spec_type: str,
    max_length: int,
    prompts: Sequence[int],
    context: int = 0,
) -> tuple[Sequence[DraftedText | LookupText], Sequence[Sequence[ChainStep]]]:
    """Records what is replayed, and the steps of chains that are longer than those planned for."""
    if spec_type == LOOKUP:
        lookup_texts = pool.record_lookup(prompts, context)
        longest = Drafting(LOOKUP, max_length, lookup_size=min(2, max_length))
        return lookup_texts, [replay(longest, text) for text in lookup_texts]
    longest = Drafting(spec_type, max_length + EXTRA_LENGTH)
    texts, recorded = pool.record_draft(longest, prompts, context)
    if spec_type in HIDDEN_STATE_TYPES:
        first_tokens = pool.record_first_tokens(spec_type, prompts, context)
        texts = list(map(with_first_tokens, texts, first_tokens))
    return texts, recorded


def make_plan(
    pool: ServerPool,
    spec_type: str,
    max_length: int,
    measurements: Sequence[Measurements],
    seconds: float,
) -> EnginePlan:
    """Predicts every way of drafting, and writes the plan with the best one of each context."""
    draftings = candidates(spec_type, max_length)
    shown: list[Cell] = []
    choices: list[ContextChoice] = []
    lines: tuple[str, ...] = ()
    for measured in measurements:
        cells = predict_cells(draftings, measured.texts, measured.times, spec_type != LOOKUP)
        shown += [cells[drafting] for drafting in worth_showing(cells, spec_type)]
        best = launch_options(best_drafting(cells), pool.draft)
        if measured.context:
            choices.append(ContextChoice(measured.context, (), best, measured.acceptance))
        else:
            lines = best
    pass_seconds = {m.context: round(m.times.pass_seconds, 7) for m in measurements}
    return EnginePlan(
        engine="llamacpp",
        version=pool.build.version,
        method=spec_type,
        target=pool.target,
        draft=pool.draft or "",
        acceptance=measurements[0].acceptance,
        steps=tuple(chain.from_iterable(m.times.steps.steps for m in measurements)),
        cells=tuple(shown),
        lines=lines,
        by_context=tuple(choices),
        settings={
            "temperature": pool.workload.temperature,
            "tokens": pool.workload.tokens,
            "prompts": len(measurements[0].texts),
            "server_args": list(pool.arguments),
            "draft_pass_seconds": pass_seconds.get(0)
            if not choices
            else {str(context): value for context, value in pass_seconds.items()},
        },
        seconds=round(seconds, 1),
        tool=tool_version(),
    )


def predict_cells(
    draftings: Iterable[Drafting],
    texts: Sequence[DraftedText | LookupText],
    times: Times,
    has_draft: bool,
) -> dict[Drafting, Cell]:
    """Predicts every way of drafting."""
    predictions = {
        drafting: predict(
            [replay(drafting, text) for text in texts], times, has_draft and drafting != NONE
        )
        for drafting in draftings
    }
    plain = predictions[NONE].throughput
    return {
        drafting: make_cell(drafting, prediction, plain, times)
        for drafting, prediction in predictions.items()
    }


def best_drafting(cells: Mapping[Drafting, Cell]) -> Drafting:
    """The way of drafting with the highest predicted throughput, and of equal ones the first."""
    return max(cells, key=lambda drafting: cells[drafting].throughput)


def worth_showing(cells: Mapping[Drafting, Cell], spec_type: str) -> list[Drafting]:
    """Which of all predictions a plan holds.

    For each maximum length those without a further setting and with the best one, and what
    `verify_plan` measures.
    """
    best_of_length: dict[int, Drafting] = {}
    for drafting, cell in cells.items():
        length = drafting.max_length
        if (
            length not in best_of_length
            or cell.throughput > cells[best_of_length[length]].throughput
        ):
            best_of_length[length] = drafting
    without = [drafting for drafting in cells if not drafting.variant]
    return list(dict.fromkeys([*without, *best_of_length.values(), *to_verify(cells, spec_type)]))


def to_verify(cells: Mapping[Drafting, Cell], spec_type: str) -> list[Drafting]:
    """None, the best way of drafting, its neighbours, and llama.cpp's defaults.

    If none is best, it is the best of the others that counts.
    """
    speculative = {drafting: cell for drafting, cell in cells.items() if drafting != NONE}
    best = best_drafting(speculative)
    near = neighbours(best, speculative)
    return list(dict.fromkeys([NONE, best, *near, defaults(spec_type)]))


def verify_plan(pool: ServerPool, plan: EnginePlan, prompts: Sequence[int]) -> EnginePlan:
    """Measures the cells of a plan that `to_verify` names, on other prompts."""
    kinds = []
    for part in plan.parts():
        cells = {drafting_of(cell, plan.method): cell for cell in part.cells}
        kinds += [(drafting, part.context) for drafting in to_verify(cells, plan.method)]
    runs = run_draftings(pool, kinds, prompts, VERIFY_REPEATS)
    measured = {
        kind: measured_cell([engine_run(texts) for texts in repeats], 1)
        for kind, repeats in runs.items()
    }
    return replace(
        plan,
        cells=tuple(
            replace(cell, measured=measured.get((drafting_of(cell, plan.method), cell.context)))
            for cell in plan.cells
        ),
    )


def run_draftings(
    pool: ServerPool,
    kinds: Sequence[tuple[Drafting, int]],
    prompts: Sequence[int],
    repeats: int,
) -> dict[tuple[Drafting, int], list[list[list[ChainStep]]]]:
    """Decodes prompts with several ways of drafting, in turn, in every second repeat backwards."""
    runs: dict[tuple[Drafting, int], list[list[list[ChainStep]]]] = {kind: [] for kind in kinds}
    draftings = list(dict.fromkeys(drafting for drafting, _ in kinds))
    for i in range(repeats):
        for group in pool.groups(draftings[:: -1 if i % 2 else 1]):
            pool.report_status(f"verifying, run {i + 1} of {repeats}")
            pool.ensure_running(group)
            for drafting, context in sorted(kinds, key=lambda kind: kind[1]):
                if drafting in group:
                    runs[drafting, context].append(pool.run(drafting, prompts, context))
    return runs


def drafting_of(cell: Cell, spec_type: str) -> Drafting:
    """The way of drafting that a cell of a plan predicts."""
    if not cell.speculative_tokens:
        return NONE
    value = float(cell.variant.split()[1]) if cell.variant else 0.0
    if spec_type == LOOKUP:
        return Drafting(LOOKUP, cell.speculative_tokens, lookup_size=int(value))
    return Drafting(spec_type, cell.speculative_tokens, value)


def with_first_tokens(text: DraftedText, first: FirstTokens) -> DraftedText:
    """The text with what the draft proposes at the begin of a chain."""
    return dataclasses.replace(text, first=first)


def repeated(text: LookupText, length: int, size: int) -> list[int]:
    """A prompt that repeats the end of a text, and that a model goes on to repeat."""
    period = max(length + PERIOD_MARGIN, MIN_PERIOD)
    tokens = [*text.prompt, *text.tokens]
    end = (tokens * -(-period // len(tokens)))[-period:]
    size = max(size, 3 * period)
    return (end * -(-size // period))[-size:]


@dataclass(frozen=True)
class Times:
    """Seconds of a server's steps."""

    steps: StepTimes
    pass_seconds: float

    def seconds(self, step: ChainStep, has_draft: bool) -> float:
        """Seconds of a step.

        A server with a draft has the draft read the verified tokens, too, which takes about a pass
        if nothing was drafted.
        """
        passes = step.passes - step.drafted + (has_draft and not step.drafted)
        seconds = self.steps.seconds_and_error(1, step.drafted)[0]
        return seconds + (passes * self.pass_seconds if has_draft else 0.0)

    def error(self, length: int) -> float:
        """Relative standard error of the time of steps with that many drafted tokens."""
        return self.steps.seconds_and_error(1, length)[1]


def times_of_rounds(
    rounds: Mapping[Drafting, Sequence[Sequence[ChainStep]]], context: int = 0
) -> Times:
    """Computes the time of a step by the number of its drafted tokens."""
    timed: dict[int, list[tuple[float, int]]] = {}
    stopped: list[float] = []
    for drafting, drafting_rounds in rounds.items():
        is_stopped = drafting.min_prob == NEVER
        length = 0 if is_stopped else drafting.max_length
        for steps in drafting_rounds:
            seconds = [step.seconds for step in steps if step.is_single and step.drafted == length]
            if not seconds:
                continue
            if is_stopped:
                stopped.append(float(np.mean(seconds)))
            else:
                timed.setdefault(length, []).append((sum(seconds), len(seconds)))
    rows = []
    for length, values in sorted(timed.items()):
        median, error = median_with_error(np.array([total / count for total, count in values]))
        row = StepSeconds(
            batch=1,
            speculative_tokens=length,
            seconds=round(median, 7),
            error=round(error, 5),
            steps=sum(count for _, count in values),
            context=context,
        )
        rows.append(row)
    if not rows or rows[0].speculative_tokens or len(rows) < 2:
        raise SequoiaPlanError(
            "no step drafted as many tokens as it may; give more --tokens or prompts"
        )
    # a step whose draft proposes nothing: a pass that drafts, and one that reads the new token
    pass_seconds = (float(np.median(stopped)) - rows[0].seconds) / 2 if stopped else 0.0
    return Times(StepTimes(tuple(rows)), max(pass_seconds, 0.0))


@dataclass(frozen=True)
class Prediction:
    """What a way of drafting yields on recorded texts."""

    tokens: list[int]
    seconds: list[float]
    steps: list[int]
    mean_drafted: float

    @property
    def throughput(self) -> float:
        """Tokens a second."""
        return sum(self.tokens) / sum(self.seconds)

    def error(self) -> float:
        """Relative standard error of the throughput, from a jackknife over texts."""
        tokens, seconds = np.array(self.tokens, float), np.array(self.seconds)
        count = len(tokens)
        if count < 2:
            return 0.0
        others = (tokens.sum() - tokens) / (seconds.sum() - seconds)
        variance = (count - 1) / count * ((others - others.mean()) ** 2).sum()
        return float(math.sqrt(variance) / self.throughput)


def predict(replays: Iterable[Sequence[ChainStep]], times: Times, has_draft: bool) -> Prediction:
    """Sums the tokens and the seconds of replayed texts. Texts without steps do not count."""
    replayed = [steps for steps in replays if steps]
    num_steps = [len(steps) for steps in replayed]
    return Prediction(
        tokens=[sum(step.tokens for step in steps) for steps in replayed],
        seconds=[sum(times.seconds(step, has_draft) for step in steps) for steps in replayed],
        steps=num_steps,
        mean_drafted=sum(step.drafted for steps in replayed for step in steps) / sum(num_steps),
    )


def make_cell(drafting: Drafting, prediction: Prediction, plain: float, times: Times) -> Cell:
    """The prediction for one way of drafting, as a cell of a plan."""
    error = math.hypot(prediction.error() if drafting.max_length else 0.0,
                       times.error(drafting.max_length))  # fmt: skip
    throughput, num_steps = prediction.throughput, sum(prediction.steps)
    return Cell(
        batch=1,
        speculative_tokens=drafting.max_length,
        variant=drafting.variant,
        tokens_per_step=round(max(sum(prediction.tokens) / num_steps, 1.0), 4),
        seconds=round(sum(prediction.seconds) / num_steps, 7),
        throughput=round(throughput, 3),
        low=round(throughput * math.exp(-Z95 * error), 3),
        high=round(throughput * math.exp(Z95 * error), 3),
        speedup=round(throughput / plain, 4),
        is_timed=times.steps.is_measured(1, drafting.max_length),
        context=times.steps.context,
    )


def acceptance_of(texts: Iterable[Sequence[ChainStep]], source: str) -> ChainAcceptance:
    """Counts how far chains were accepted, in those steps that drafted the longest chains."""
    steps = [*chain.from_iterable(texts)]
    length = max((step.drafted for step in steps), default=0)
    if not length:
        raise SequoiaPlanError(
            "nothing was drafted on these texts; give more --tokens or other prompts"
        )
    full = [step for step in steps if step.drafted == length]
    return ChainAcceptance(
        drafts=len(full),
        accepted=tuple(sum(step.accepted > i for step in full) for i in range(length)),
        drafting_share=round(sum(step.drafted > 0 for step in steps) / len(steps), 4),
        source=source,
    )


def engine_run(texts: Sequence[Sequence[ChainStep]]) -> EngineRun:
    """The tokens and seconds of the steps of several texts."""
    steps = [*chain.from_iterable(texts)]
    return EngineRun(
        seconds=sum(step.seconds for step in steps),
        steps=len(steps),
        tokens=sum(step.tokens for step in steps),
        tokens_by_prompt=[],
        counters_before={},
        counters_after={},
    )


def replay(drafting: Drafting, text: DraftedText | LookupText) -> list[ChainStep]:
    """Decodes a recorded text again with a way of drafting."""
    if isinstance(text, LookupText):
        return replay_lookup(text, drafting.lookup_size, drafting.max_length)
    return replay_draft(text, drafting.max_length, drafting.min_prob)
