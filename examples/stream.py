"""Stream a target that does not fit: every pass reads the layers that memory has no room for.

A pass then takes as long for a tree of 64 nodes as for one token, so a large tree pays.
"""

import argparse

from sequoia_plan.artifacts import TokenTree, load_tree
from sequoia_plan.runtime import SequoiaDecoder, load_pair

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--target", help="folder or hub name [default: the embedded target]")
parser.add_argument("--draft", help="the same; or int8 [default: the embedded draft]")
parser.add_argument("--dtype", default="float32", help="or bfloat16, with half the memory")
parser.add_argument("--memory", default="450MB", help="for weights and caches; less streams more")
parser.add_argument("--tree", default="sequoia-example-64x6", help="file or name")
parser.add_argument("--tokens", type=int, default=64)
options = parser.parse_args()

pair = load_pair(
    options.target, options.draft, dtype=options.dtype, offload="disk", memory=options.memory
)
placement = pair.metadata["target"]
print(f"{placement['resident_layers']} of {placement['layers']} layers stay in memory")

prompt = "The refrigerator keeps food cold by"
tree = load_tree(options.tree)
decoder = SequoiaDecoder(pair.target, pair.draft, tree, tokenizer=pair.tokenizer)
plain_decoder = decoder.with_tree(TokenTree.chain(1))  # a tree of the root alone drafts nothing
for name, method in (("plain", plain_decoder), ("tree", decoder)):
    result = method.generate(prompt, max_new_tokens=options.tokens)
    print(f"{name}: {result.new_tokens / result.seconds:.1f} tokens/s, {result.steps} passes")
print(result.text)
