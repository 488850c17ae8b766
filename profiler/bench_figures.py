"""What bench reports of its runs: speeds, speed-ups with intervals, and predictions by kind."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from msgspec import structs

from sequoia_plan.artifacts import Plan
from sequoia_plan.artifacts.bench_result import KindResult, MethodResult, Prediction, Ratio, Spread
from sequoia_plan.artifacts.counts import ALL_KINDS
from sequoia_plan.artifacts.plan import Interval
from sequoia_plan.artifacts.promise import RESAMPLES, promise
from sequoia_plan.profiler.decoding_methods import PromptRun

TITLES = {
    "plain": "plain decoding",
    "generate": "Hugging Face generate",
    "assisted": "Hugging Face assisted",
    "lookup": "Hugging Face prompt lookup",
    "chain": "chain",
    "tree": "our tree without lookup",
    "sequoia": "our tree, Sequoia",
    "traversal": "our tree, traversal",
}
"""The title of every method; `sequoia_plan.planner.solving.baselines` has the trees."""
NEW_KINDS = "new kinds"
"""The kind of prompts that the plan has no figures for."""
BASELINES = ("plain", "generate", "assisted", "sequoia", "traversal")
"""Methods over which speed-ups are reported."""


def summary(
    runs: Mapping[str, list[PromptRun]], over: Sequence[str] = BASELINES
) -> dict[str, MethodResult]:
    """Each method's figures, and its speed-up over each method of `over` that took part."""
    results = {}
    for name, method_runs in runs.items():
        steady = [round(_steady_tokens_per_second(run), 3) for run in method_runs]
        results[name] = MethodResult(
            title=TITLES.get(name, name),
            tokens_per_second=_spread([run.tokens / run.seconds for run in method_runs]),
            first_token_seconds=_spread([run.first_seconds for run in method_runs]),
            tokens_per_step=_tokens_per_step(method_runs),
            tokens_per_second_by_prompt=tuple(steady),
            speedup={
                baseline: _speedup(method_runs, runs[baseline])
                for baseline in over
                if baseline in runs
            },
        )
    return results


def predicted_by_kind(
    result: MethodResult,
    plan: Plan,
    kinds: Sequence[str | None],
    runs: Sequence[PromptRun],
    plain_runs: Sequence[PromptRun] | None,
) -> MethodResult:
    """A method's result with what the plan promises for exactly these prompts, and kind by kind."""
    # what is predicted for all profiled prompts together
    mixture, speedups = result.prediction or Prediction(), dict(plan.text_speedups)
    default = ALL_KINDS if ALL_KINDS in speedups else NEW_KINDS
    names = [kind if kind in speedups else default for kind in map(str, kinds)]
    speedups.setdefault(NEW_KINDS, tuple(chain.from_iterable(speedups.values())))
    new_kind = plan.interval_new_kind or Interval()
    tokens, step_tokens = mixture.tokens_per_step, plan.tokens_by_kind

    def predicted(names: Sequence[str], tokens: float | None) -> Prediction:
        """What is promised for prompts of these kinds."""
        median, interval = promise(speedups, names)
        if NEW_KINDS in names:
            return Prediction(tokens, median, None, new_kind.predicted_speedup)
        return Prediction(tokens, median, interval)

    by_kind = {}
    for name in dict.fromkeys(names) if set(names) != {default} else ():
        chosen = [i for i, other in enumerate(names) if other == name]
        kind_runs = [runs[i] for i in chosen]
        by_kind[name] = KindResult(
            len(chosen),
            _tokens_per_step(kind_runs),
            _speedup(kind_runs, [plain_runs[i] for i in chosen]) if plain_runs else None,
            predicted([name] * len(chosen), step_tokens.get(name)),
        )
    if tokens and step_tokens:
        new_tokens = np.array([run.tokens for run in runs])
        steps = new_tokens / [step_tokens.get(name, tokens) for name in names]
        tokens = float(new_tokens.sum() / steps.sum())
    return structs.replace(result, prediction=predicted(names, tokens), by_kind=by_kind)


def _tokens_per_step(runs: Sequence[PromptRun]) -> float:
    """New tokens a pass of the target, over all prompts."""
    return round(sum(run.tokens for run in runs) / sum(run.passes for run in runs), 4)


def _speedup(runs: Sequence[PromptRun], baseline_runs: Sequence[PromptRun]) -> Ratio:
    """The ratios of two methods' speeds over the prompts, with the interval of their median."""
    ratios = np.array(
        [
            _steady_tokens_per_second(run) / _steady_tokens_per_second(baseline_run)
            for run, baseline_run in zip(runs, baseline_runs, strict=True)
        ]
    )
    resampled = np.random.default_rng(0).choice(ratios, (RESAMPLES, ratios.size))
    interval = np.quantile(np.median(resampled, 1), [0.025, 0.975]).round(4).tolist()
    return Ratio(*structs.astuple(_spread(ratios)), *interval)


def _steady_tokens_per_second(run: PromptRun) -> float:
    """Tokens/s after the first tokens came; tokens/s of the whole run if no others followed."""
    if run.tokens > run.first_tokens:
        return (run.tokens - run.first_tokens) / (run.seconds - run.first_seconds)
    return run.tokens / run.seconds


def _spread(numbers: Any) -> Spread:
    """The median and the quartiles, to four digits."""
    return Spread(*np.quantile(numbers, [0.5, 0.25, 0.75]).round(4).tolist())
