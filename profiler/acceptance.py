"""How often the child of each rank is the one accepted, measured while decoding.

As in Sequoia (arXiv 2402.12374, App. F.1): decode with a one-level tree, count which of the root's children is accepted.
It is the decoder itself that is counted, so whatever it does (verifier, settings, precision) is in the numbers.

For `traversal` these are the acceptances of the root's children. Below the root it accepts at least as often (docs/decisions.md),
so what the planner predicts for it is a lower bound.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sequoia_plan.artifacts import SequoiaPlanError, TokenTree
from sequoia_plan.runtime import Pair, Sampling, SequoiaDecoder

RANKS = 16


@dataclass(frozen=True)
class AcceptanceCounts:
    """counts[k - 1] of `trials` steps accepted the child of rank k."""

    counts: tuple[int, ...]
    trials: int

    def vector(self) -> tuple[float, ...]:
        """p[1..B], to six digits, from which the counts can be had back."""
        return tuple(round(count / self.trials, 6) for count in self.counts)


def measure_acceptance(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    seconds: float,
    tokens_per_prompt: int = 64,
    seed: int = 0,
    ranks: int = RANKS,
    on_prompt: Callable[[AcceptanceCounts], None] = lambda counts: None,
) -> AcceptanceCounts:
    """Decode prompts with a one-level tree of `ranks` children for about `seconds`, at least one prompt, and count.

    Args:
        prompts: token ids; taken in order, and again with other seeds once all were used.
        on_prompt: called after each prompt with the counts so far.

    Raises:
        SequoiaPlanError: if nothing could be measured.
    """
    decoder = SequoiaDecoder(pair.target, pair.draft, TokenTree.star(ranks))
    counts, trials, used = [0] * (ranks + 1), 0, 0
    deadline = time.perf_counter() + seconds
    eos = {pair.tokenizer.eos_token_id}
    rounds = 1 if sampling.greedy else 1_000
    while used < rounds * len(prompts) and (used == 0 or time.perf_counter() < deadline):
        made = 0
        for step in decoder.steps(torch.tensor(prompts[used % len(prompts)]), tokens_per_prompt, sampling, seed + used):
            counts[step.path[1] if len(step.path) > 1 else 0] += 1
            trials += 1
            made += len(step.tokens)
            if made >= tokens_per_prompt or eos.intersection(step.tokens):
                break
        used += 1
        if trials:
            on_prompt(AcceptanceCounts(tuple(counts[1:]), trials))
    if trials == 0:
        raise SequoiaPlanError("acceptance: no step was decoded; the prompts leave no room in the model's context")
    return AcceptanceCounts(tuple(counts[1:]), trials)
