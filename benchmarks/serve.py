"""What the endpoint costs beside `generate` on the same models, in one run.

    python benchmarks/serve.py -o benchmarks/results/serve.json

Each round decodes a prompt by a decoder in this process and by a stream of the server, in turn, so
ratios are free of drift. `stream over generate`: tokens/s, from the request to the last token.
`own ms`: what passes between a request and its first chunk, less the time in which the prompt is
read and the first step runs. `rest over rest`: the first token of a prompt of which a text before
has all but the last `rest` tokens, over the same by a decoder that goes on. Medians of rounds with
quartiles.
"""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import time

import numpy as np
from reports import new_parser, spread, write_report

from sequoia_plan.artifacts import load_tree
from sequoia_plan.artifacts.processor import processor_name
from sequoia_plan.artifacts.prompts import BUILT_IN, held_out_half, load
from sequoia_plan.profiler.prompts import encode
from sequoia_plan.runtime import SequoiaDecoder, load_pair

REST = 32


def streamed(address: str, prompt: list[int], tokens: int) -> dict[str, float]:
    """Seconds to the first chunk and to the end, and the server's own figures."""
    body = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "stream": True}
    connection = http.client.HTTPConnection(address)
    started = time.perf_counter()
    connection.request("POST", "/completion", json.dumps(body))
    answer, first, chunk = connection.getresponse(), 0.0, {}
    while line := answer.readline():
        if line.startswith(b"data: "):
            first = first or time.perf_counter() - started
            chunk = json.loads(line[6:])
    seconds = time.perf_counter() - started
    timings: dict[str, float] = chunk["timings"]
    return {"first": first, "seconds": seconds, **timings}


def first_token(decoder: SequoiaDecoder, prompt: list[int]) -> float:
    """Seconds until a decoder that goes on has a prompt's first token."""
    return decoder.generate(prompt, 1, reuse_prefix=True).seconds


def main() -> None:
    """Measure, print and write the figures."""
    parser = new_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="few and short texts")
    parser.add_argument("--target", help="as for generate")
    parser.add_argument("--tree", default="smollm2-135m-epyc-2-cores-t0")
    options = parser.parse_args()
    rounds, tokens, shared = (5, 32, 200) if options.quick else (24, 128, 3000)
    pair, tree = load_pair(options.target), load_tree(options.tree)
    decoder = SequoiaDecoder(pair.target, pair.draft, tree, tokenizer=pair.tokenizer)
    words = ["serve", "--port", "0", "--tree", options.tree]
    words += ["--target", options.target] if options.target else []
    command = [sys.executable, "-c", "from sequoia_plan.planner.cli import main; main()", *words]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout
    address = server.stdout.readline().strip().removeprefix("ready at http://")
    prompts = [encode(pair.tokenizer, each.text) for each in held_out_half(load(BUILT_IN))]
    figures: dict[str, list[float]] = {"stream over generate": [], "own ms": []}
    for prompt in prompts[: rounds + 1]:
        alone = decoder.generate(prompt, tokens)
        served = streamed(address, prompt, tokens)
        assert served["predicted_n"] == alone.new_tokens
        figures["stream over generate"].append(alone.seconds / served["seconds"])
        figures["own ms"].append(1000 * served["first"] - served["prompt_ms"])
    text = [token for prompt in prompts for token in prompt][: shared + (rounds + 1) * REST]
    streamed(address, text[:shared], 0)
    decoder.generate(text[:shared], 0)
    figures["rest over rest"] = []
    for number in range(1, rounds + 2):
        prompt = text[: shared + number * REST]
        served, alone_seconds = streamed(address, prompt, 1), first_token(decoder, prompt)
        assert served["prompt_n"] <= REST + 1
        figures["rest over rest"].append(served["first"] / alone_seconds)
    report = {name: spread(np.array(values[1:])) for name, values in figures.items()}
    for name, values in report.items():
        print(name, json.dumps(values), flush=True)
    about = {"processor": processor_name(), "tokens": tokens, "shared": shared, "rest": REST}
    write_report(options.output, about | {"figures": report})
    server.terminate()


if __name__ == "__main__":
    main()
