"""What a grammar costs and gains with a tree, and what a conversation saves that goes on.

    python benchmarks/constrained.py -o benchmarks/results/constrained.json

Twelve prompts ask for JSON, which a schema shapes. Every method decodes a prompt before any decodes
the next one; tokens a second count from the start of the request to its end. transformers runs its
own layers with xgrammar's own processor. Then a conversation of ten turns, whose last answer's
first token is timed with what the turns before it left in the caches, and with nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import xgrammar
from reports import new_parser, spread, write_report
from xgrammar.contrib.hf import LogitsProcessor

from sequoia_plan.artifacts import TokenTree, load_tree
from sequoia_plan.profiler.hardware import fingerprint
from sequoia_plan.profiler.prompts import encode
from sequoia_plan.runtime import Grammar, SequoiaDecoder, load_pair

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "year": {"type": "integer"},
        "kind": {"enum": ["person", "place", "thing"]},
        "description": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 2, "maxItems": 4},
    },
    "required": ["name", "year", "kind", "description", "tags"],
}
SUBJECTS = (
    "Marie Curie", "the Eiffel Tower", "a bicycle", "Paris", "Albert Einstein", "the telephone",
    "Mount Everest", "a violin", "Leonardo da Vinci", "the Amazon river", "coffee", "Rome",
)  # fmt: skip
TOKENS, TURNS, ROUNDS = 96, 10, 3


def by_method(pair: Any, resident: Any, tree: TokenTree) -> dict[str, Callable[[Any], Any]]:
    """Each method: token ids of a prompt -> (new tokens, seconds, steps)."""
    plain = SequoiaDecoder(pair.target, None, TokenTree.chain(1), tokenizer=pair.tokenizer)
    drafted = SequoiaDecoder(pair.target, pair.draft, tree, tokenizer=pair.tokenizer)
    constraint = Grammar(pair.tokenizer, json_schema=SCHEMA)
    info = xgrammar.TokenizerInfo.from_huggingface(
        resident.tokenizer, vocab_size=resident.target.config.vocab_size
    )
    compiled = xgrammar.GrammarCompiler(info).compile_json_schema(SCHEMA)

    def ours(decoder: SequoiaDecoder, grammar: Grammar | None) -> Callable[[Any], Any]:
        def decode(ids: list[int]) -> tuple[int, float, int]:
            result = decoder.generate(ids, TOKENS, constraint=grammar)
            return result.new_tokens, result.seconds, result.steps

        return decode

    def transformers(ids: list[int]) -> tuple[int, float, int]:
        started = time.perf_counter()
        output = resident.target.module.generate(
            torch.tensor([ids]), max_new_tokens=TOKENS, do_sample=False,
            logits_processor=[LogitsProcessor(compiled)], pad_token_id=0,
        )  # fmt: skip
        new_tokens = output.shape[1] - len(ids)
        return new_tokens, time.perf_counter() - started, new_tokens

    return {
        "plain": ours(plain, None),
        "tree": ours(drafted, None),
        "plain, grammar": ours(plain, constraint),
        "tree, grammar": ours(drafted, constraint),
        "transformers, grammar": transformers,
    }


def conversation(pair: Any, tree: TokenTree) -> dict[str, Any]:
    """Seconds to the first token of the last of ten turns."""
    decoder = SequoiaDecoder(pair.target, pair.draft, tree, tokenizer=pair.tokenizer)
    going_on, anew, length = [], [], 0
    for number in range(ROUNDS):
        messages: list[dict[str, str]] = []
        for turn in range(TURNS):
            subject = SUBJECTS[(number + turn) % len(SUBJECTS)]
            messages.append({"role": "user", "content": f"Tell me something about {subject}."})
            ids = encode(pair.tokenizer, messages)
            if turn == TURNS - 1:
                going_on.append(decoder.generate(ids, 1, reuse_prefix=True).seconds)
                anew.append(decoder.generate(ids, 1).seconds)
                length = len(ids)
            else:
                answer = decoder.generate(ids, 64, reuse_prefix=True).text
                messages.append({"role": "assistant", "content": str(answer)})
    ratios = [new / old for new, old in zip(anew, going_on, strict=True)]
    return {
        "tokens": length,
        "going_on_seconds": spread(going_on, 4),
        "anew_seconds": spread(anew, 4),
        "anew_over_going_on": spread(ratios),
    }


@torch.inference_mode()
def main() -> None:
    """Measure, print and write the figures."""
    parser = new_parser(__doc__)
    parser.add_argument("--tree", default="smollm2-135m-epyc-2-cores-t0")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    pair, resident = (
        load_pair(dtype=options.dtype, placement=placement) for placement in ("auto", "resident")
    )
    tree = load_tree(options.tree)
    methods = by_method(pair, resident, tree)
    runs: dict[str, list[tuple[int, float, int]]] = {name: [] for name in methods}
    for number, subject in enumerate(("warm up", *SUBJECTS)):
        text = f"Describe {subject} as JSON with name, year, kind, description and tags."
        ids = encode(pair.tokenizer, text)
        for name, decode in methods.items():
            run = decode(ids)
            if number:
                runs[name].append(run)
    speeds = {name: [run[0] / run[1] for run in runs[name]] for name in methods}
    report = {
        "hardware": fingerprint("cpu"),
        "settings": {"dtype": options.dtype, "threads": options.threads, "tree": options.tree},
        "methods": {
            name: {
                "tokens_per_second": spread(speeds[name], 1),
                "tokens_per_step": round(
                    sum(run[0] for run in runs[name]) / sum(run[2] for run in runs[name]), 3
                ),
            }
            for name in methods
        },
        "ratios": {
            f"{name} over {other}": spread(
                [a / b for a, b in zip(speeds[name], speeds[other], strict=True)]
            )
            for name, other in (
                ("tree", "plain"),
                ("tree, grammar", "plain, grammar"),
                ("tree, grammar", "transformers, grammar"),
            )
        },
        "last_of_ten_turns": conversation(pair, tree),
    }
    print(report)
    write_report(options.output, report)


if __name__ == "__main__":
    main()
