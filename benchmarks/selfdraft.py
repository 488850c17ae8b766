"""What a draft out of the target costs and how often it is accepted: a copy of the embedded target in 8 bits, its layers and its head in several forms.

    python benchmarks/selfdraft.py -o benchmarks/results/selfdraft.json
    python benchmarks/selfdraft.py --quick -o build/selfdraft.json     # fewer rounds and prompts, to see that it runs

Passes take turns, so their ratios are free of drift. A pass is timed alone and with the drawing of its nodes' children. Acceptance is that of a
node's first child: the probability that a token drawn from the draft is accepted, along answers that the target wrote at temperature 0.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.artifacts.files import write_atomically
from sequoia_plan.profiler.hardware import fingerprint
from sequoia_plan.profiler.latency import CONTEXT, SizeTimer, random_prompt, timed
from sequoia_plan.profiler.prompts import built_in, encode
from sequoia_plan.runtime import Pair, Sampling, SequoiaDecoder, load_pair
from sequoia_plan.runtime.draft import self_draft
from sequoia_plan.runtime.draft.file import load_draft
from sequoia_plan.runtime.models.int8 import Int8Linear
from sequoia_plan.runtime.pair import EMBEDDED, LANGUAGE_MODEL

WIDTHS = (1, 2, 4, 8)
HEADS = (8192, 16384, 24576, 32768)
TEMPERATURE = 0.6
REFERENCE = "target, repacked"


def with_head(draft: Any, covered: Tensor, target: Any) -> Any:
    """The same layers under a head for some of the target's tokens."""
    twin = copy.copy(draft)
    twin._modules = dict(draft._modules)
    twin.lm_head = Int8Linear(target.get_output_embeddings().weight[covered], None, draft.dtype)
    twin.covered_tokens = covered
    return twin


def variants(pair: Pair) -> dict[str, Any]:
    """Models by name: the target as transformers loads it and repacked, and drafts out of it. The first is the target as loaded."""
    target, draft = pair.target, pair.draft
    with patch.object(self_draft, "can_be_lean", lambda *_: False):
        modules = self_draft.self_draft(target)
    heads = {f"int8, head of the first {size:,} tokens": with_head(draft, torch.arange(size), target) for size in HEADS}
    frequent = load_draft(EMBEDDED[LANGUAGE_MODEL], target).covered_tokens
    heads[f"int8, head of the {len(frequent):,} tokens used most"] = with_head(draft, frequent, target)
    repacked = load_pair(draft=self_draft.INT8, dtype="bfloat16", placement="repacked").target
    return {"target, as loaded": target, REFERENCE: repacked, "int8, transformers' layers": modules, "int8": draft} | heads


@torch.inference_mode()
def time_passes(pair: Pair, models: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Milliseconds of a draft pass over each of `WIDTHS` tokens, alone and with drawing at each temperature: median, first and third quartile."""
    prompt = random_prompt(pair, CONTEXT)
    samplings = {"pass": None, "T=0": Sampling(), f"T={TEMPERATURE}": Sampling(TEMPERATURE)}
    found: dict[str, Any] = {name: {kind: {} for kind in samplings} for name in models}
    for width in WIDTHS:
        timers = {name: SizeTimer(SequoiaDecoder(pair.target, model, TokenTree.chain(2)), width, Sampling(), prompt) for name, model in models.items()}
        times: dict[tuple[str, str], list[float]] = {(name, kind): [] for name in models for kind in samplings}
        for _ in range(rounds + 1):  # the first is not counted
            for name, timer in timers.items():
                for kind, sampling in samplings.items():
                    timer.sampling = sampling or timer.sampling
                    times[name, kind].append(timed(pair.target.device, (lambda t=timer: read(t)) if sampling is None else timer.draft_pass)[1])
        for (name, kind), each in times.items():
            found[name][kind][width] = [round(1000 * float(q), 3) for q in np.quantile(each[1:], [0.5, 0.25, 0.75])]
    return found


def read(timer: SizeTimer) -> Tensor:
    """The pass without the drawing."""
    decoder = timer.decoder
    assert decoder.drafter is not None
    return decoder.drafter.read(timer.drafted, decoder.sequence, timer.columns, timer.before).logits


@torch.inference_mode()
def accept(pair: Pair, models: dict[str, Any], prompts: Sequence[list[int]], tokens: int) -> dict[str, Any]:
    """Acceptance of a node's first child at temperature 0 and at `TEMPERATURE`, over the answers' positions."""
    decoder = SequoiaDecoder(pair.target, None, TokenTree.chain(1))
    sums = {name: np.zeros(2) for name in models}
    positions = 0
    for prompt in prompts:
        answer = decoder.generate(torch.tensor(prompt), tokens, eos_token_id=pair.end_tokens).sequences
        places = slice(len(prompt) - 1, answer.shape[1] - 1)
        said = answer[0, len(prompt) :]
        law = torch.softmax(pair.target(answer).logits[0, places].float() / TEMPERATURE, -1)
        positions += len(said)
        for name, model in models.items():
            logits = narrow_logits(model, answer)[places].float()
            covered = getattr(model, "covered_tokens", None)
            best = logits.argmax(-1) if covered is None else covered[logits.argmax(-1)]
            overlap = torch.minimum(torch.softmax(logits / TEMPERATURE, -1), law if covered is None else law[:, covered]).sum()
            sums[name] += [float((best == said).sum()), float(overlap)]
    return {"positions": positions} | {
        name: {"T=0": round(same / positions, 4), f"T={TEMPERATURE}": round(both / positions, 4)} for name, (same, both) in sums.items()
    }


def narrow_logits(model: Any, text: Tensor) -> Tensor:
    """[tokens, vocabulary], read eight tokens at a time, as a draft reads them."""
    from transformers import DynamicCache

    cache = DynamicCache()
    return torch.cat([model(part, past_key_values=cache, use_cache=True).logits[0] for part in text.split(8, 1)])


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="how often each pass is timed (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=16, help="for acceptance (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer, at most (default: %(default)s)")
    parser.add_argument("--only", choices=["passes", "acceptance"], help="leave the other part of the output file as it is")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    rounds, prompts, tokens = (2, 1, 16) if options.quick else (options.rounds, options.prompts, options.tokens)
    pair = load_pair(draft=self_draft.INT8, dtype="bfloat16", placement="resident")
    models = variants(pair)
    before = json.loads(options.output.read_text()) if options.only and options.output.exists() else {}
    report: dict[str, Any] = before | {"hardware": fingerprint("cpu"), "models": pair.facts}
    if options.only != "acceptance":
        report["milliseconds"] = time_passes(pair, models, rounds)
    if options.only != "passes":
        texts = [encode(pair.tokenizer, prompt.text) for prompt in built_in()[:prompts]]
        report["acceptance"] = accept(pair, models, texts, tokens)
    write_atomically(options.output, (json.dumps(report, indent=1) + "\n").encode())
    show(report)


def show(report: dict[str, Any]) -> None:
    """Medians of passes alone, of passes with drawing at one width, and acceptance."""
    table = Table(title="draft passes, ms; and the first child's acceptance", box=None)
    for column in ("", *map(str, WIDTHS), "4, T=0", f"4, T={TEMPERATURE}", "p[1], T=0", f"p[1], T={TEMPERATURE}"):
        table.add_column(column, justify="right" if column else "left")
    times, accepted = report.get("milliseconds", {}), report.get("acceptance", {})
    for name in times or accepted:
        if name == "positions":
            continue
        of = {kind: {int(width): spread[0] for width, spread in by.items()} for kind, by in times.get(name, {}).items()}
        row = [of.get("pass", {}).get(width) for width in WIDTHS] + [of.get(kind, {}).get(4) for kind in ("T=0", f"T={TEMPERATURE}")]
        cells = ["" if value is None else f"{value:.1f}" for value in row] + [f"{value:.3f}" for value in accepted.get(name, {}).values()]
        table.add_row(name, *cells)
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
