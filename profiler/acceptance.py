"""How often the child of each rank is accepted, by level: measured prompt by prompt."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from sequoia_plan.artifacts import SequoiaPlanError, TokenTree
from sequoia_plan.profiler.forced import ForcedAcceptance, uses_traversal
from sequoia_plan.profiler.journal import Journal
from sequoia_plan.profiler.observed import ObservedAcceptance, collect
from sequoia_plan.runtime import Pair, Sampling

RANKS = 16
"""Number of children drawn at a node."""
OnPrompt = Callable[[int, int, ObservedAcceptance], None]
"""Called after each prompt with the number of prompts so far, the most there may be, and what was
observed so far."""


def measure_acceptance(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    precision: float = 0.07,
    tokens_per_prompt: int = 32,
    ranks: int = RANKS,
    tree: TokenTree | None = None,
    journal: Path | None = None,
    on_prompt: OnPrompt = lambda num_prompts, max_prompts, observed: None,
) -> ObservedAcceptance:
    """Measure on one prompt after the other, until acceptance is known to within `precision`."""
    work = [
        pair.metadata,
        [list(map(int, prompt)) for prompt in prompts],
        sampling.settings(),
        tokens_per_prompt,
        ranks,
        None if tree is None else tree.parents.tolist(),
    ]
    results = Journal(journal, work)
    measure_prompt = ForcedAcceptance(pair, ranks, uses_traversal(sampling), tree)
    tallies = []
    for number, prompt in enumerate(prompts):
        measure = partial(measure_prompt, torch.tensor(prompt), sampling, tokens_per_prompt, number)
        tallies.append(results.result(str(number), measure))
        observed = collect(tallies, measure_prompt.tree)
        on_prompt(len(tallies), len(prompts), observed)
        if observed.precision() <= precision:
            break
    if not observed.trials.any():
        raise SequoiaPlanError(
            "acceptance: no step was decoded; the prompts leave no room in the model's context"
        )
    return observed
