"""Decode with a tree of the catalog: the embedded pair, ten lines."""

from sequoia_plan.artifacts import load_tree
from sequoia_plan.runtime import SequoiaDecoder, load_pair

pair = load_pair()
tree = load_tree("smollm2-135m-epyc-2-cores-t0")
decoder = SequoiaDecoder(pair.target, pair.draft, tree, tokenizer=pair.tokenizer)
result = decoder.generate("The capital of France is", max_new_tokens=32)
print(result.text)
print(f"{result.new_tokens} tokens in {result.steps} passes of the target")
