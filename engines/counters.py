"""The counters of vLLM and SGLang, from a metrics page (Prometheus text) or an engine."""

import re
from collections import defaultdict
from collections.abc import Mapping

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.engines.plan import ChainAcceptance

PREFIX = "vllm:spec_decode_"
NUM_DRAFTS = f"{PREFIX}num_drafts"
ACCEPTED_PER_POSITION = f"{PREFIX}num_accepted_tokens_per_pos"
STEPS = ("inter_token_latency_seconds", "time_per_output_token_seconds")
"""Histograms of the seconds between a request's outputs, the newer one first; the passes over
prompts are not in them. vLLM counts steps, SGLang tokens."""
ACCEPT_LENGTH = "sglang:spec_accept_length"
"""A gauge of each process: tokens of a step and request; 0 without speculation."""
SAMPLE = re.compile(r"^((?:vllm|sglang):\w+?)(?:_total)?(?:\{(.*)\})? (\S+)", re.MULTILINE)
"""Name, labels and value. vLLM's own snapshot (`LLM.get_metrics`) has names without `_total`."""
POSITION = re.compile(r'(?:^|,)position="(\d+)"')


def parse(page: str, model: str | None = None) -> dict[str, float]:
    """Values by name, with positions in brackets, summed over engines and processes.

    Of several models on a page only that of this name counts, if there is a name.
    """
    counters: dict[str, float] = defaultdict(float)
    lengths = []
    for name, labels, value in SAMPLE.findall(page):
        if model and f'model_name="{model}"' not in labels:
            continue
        position = POSITION.search(labels)
        counters[f"{name}[{position[1]}]" if position else name] += float(value)
        if name == ACCEPT_LENGTH and float(value):
            lengths.append(float(value))
    if lengths:
        counters[ACCEPT_LENGTH] = sum(lengths) / len(lengths)
    return counters


def chain_acceptance(counters: Mapping[str, float], source: str) -> ChainAcceptance:
    """Computes how far chains were accepted, from counts since the server's start or of a run.

    `source` is where the counts are from: a server's address, a file, or words.
    """
    accepted: list[float] = []
    while (name := f"{ACCEPTED_PER_POSITION}[{len(accepted)}]") in counters:
        accepted.append(counters[name])
    drafts = counters.get(NUM_DRAFTS)
    if not drafts or not accepted:
        names = sorted(name for name in counters if name.startswith(PREFIX))
        raise SequoiaPlanError(
            f"{source}: found {', '.join(names)[:300] or 'no counters of speculation'}, expected "
            f"{NUM_DRAFTS} above 0, and {ACCEPTED_PER_POSITION} from position 0 on; use vLLM V1, "
            "0.8.5 or later, with --speculative-config and without --disable-log-stats"
        )
    num_steps = next(filter(None, (counters.get(f"vllm:{name}_count") for name in STEPS)), drafts)
    return ChainAcceptance(
        drafts=round(drafts),
        accepted=tuple(map(round, accepted)),
        # looked-up chains are not in every step; without counts of steps they are taken to be
        drafting_share=round(min(1.0, drafts / num_steps), 4),
        source=source,
    )
