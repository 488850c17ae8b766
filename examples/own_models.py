"""Profile two models, solve for their tree, decode with it: about a minute on two cores.

python examples/own_models.py --target FOLDER --draft FOLDER --prompts prompts.jsonl

Without folders it takes the embedded pair. A profile to rely on has more prompts and more time:
`sequoia-plan profile` takes all of its built-in ones.
"""

import argparse

from sequoia_plan.artifacts import prompts, save_tree
from sequoia_plan.planner import solve
from sequoia_plan.profiler import measure
from sequoia_plan.runtime import Sampling, SequoiaDecoder, load_pair

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--target", help="folder or hub name [default: the embedded target]")
parser.add_argument("--draft", help="the same; or int8 [default: the embedded draft]")
parser.add_argument("--prompts", help=".jsonl or text [default: built-in]")
parser.add_argument("--num-prompts", type=int, default=16)
parser.add_argument("--tokens", type=int, default=32, help="new tokens a prompt")
parser.add_argument("--seconds", type=float, default=15, help="for repeating times of passes")
parser.add_argument("--max-size", type=int, default=64, help="nodes of a tree, at most")
parser.add_argument("-o", "--output", default="tree.safetensors")
options = parser.parse_args()

pair = load_pair(options.target, options.draft)
texts = prompts.load(options.prompts) if options.prompts else prompts.built_in()
profile = measure(
    pair,
    texts[: options.num_prompts],
    Sampling(temperature=0),
    latency_seconds=options.seconds,
    max_size=options.max_size,
    tokens_per_prompt=options.tokens,
)
print(
    "acceptance by rank:",
    *(f"{probability:.2f}" for probability in profile.acceptance.pooled()[:4]),
)

solution = solve(profile, budget=options.max_size, depth=16)
save_tree(solution.tree, options.output)
print(f"{solution.tree}, predicted {solution.plan.predicted_speedup:.2f}x plain decoding")

decoder = SequoiaDecoder(pair.target, pair.draft, solution.tree, tokenizer=pair.tokenizer)
messages = [{"role": "user", "content": "Why is the sky blue?"}]
prompt = pair.tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
)
result = decoder.generate(prompt, max_new_tokens=options.tokens)
print(result.text)
print(f"{result.tokens_per_step:.2f} tokens a step")
