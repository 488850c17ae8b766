"""transformers' own `generate`, with our tree: fewer passes of the target.

With --dtype float32 the tokens are the same. In 16 bits passes over trees round otherwise, and two
tokens that are almost equally probable may change places.
"""

import argparse
import time

from sequoia_plan.artifacts import load_tree
from sequoia_plan.runtime import load_pair, sequoia

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--target", help="folder or hub name [default: the embedded target]")
parser.add_argument("--draft", help="the same [default: the embedded draft]")
parser.add_argument("--dtype", default="auto", help="float32, bfloat16, float16")
parser.add_argument("--tree", default="smollm2-135m-epyc-2-cores-t0", help="file or name")
parser.add_argument("--tokens", type=int, default=64)
options = parser.parse_args()

# "resident": `module` is the model as transformers' from_pretrained loads it
pair = load_pair(options.target, options.draft, dtype=options.dtype, placement="resident")
messages = [{"role": "user", "content": "Explain how a refrigerator keeps food cold."}]
prompt = pair.tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
)
tree = {"custom_generate": sequoia, "draft": pair.draft, "tree": load_tree(options.tree)}
pair.target.module.generate(**prompt, **tree, max_new_tokens=1)  # the first call makes the decoder

for name, arguments in (("generate alone", {}), ("with the tree", tree)):
    started = time.perf_counter()
    output = pair.target.module.generate(
        **prompt, **arguments, do_sample=False, max_new_tokens=options.tokens
    )
    seconds = time.perf_counter() - started
    tokens = output[0, prompt["input_ids"].shape[1] :]
    print(f"{name}: {len(tokens) / seconds:.1f} tokens/s")
    print(pair.tokenizer.decode(tokens, skip_special_tokens=True))
