"""One process of a tensor-parallel run: prints what each decoding gave, as JSON. Started by torchrun."""

from __future__ import annotations

import json
import os
import sys

import torch
from architectures import resembling, tiny
from transformers import AutoModelForCausalLM

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.runtime import SequoiaDecoder

TREE = TokenTree.from_parents([-1, 0, 0, 1, 1, 2, 3])
PROMPT = [5, 6, 7, 8]


def decode(target):
    """Tokens: greedy, sampled with a seed, sampled without one."""
    decoder = SequoiaDecoder(target, resembling(tiny("Llama")), TREE)
    runs = [decoder.generate(PROMPT, 32, temperature, seed=seed) for temperature, seed in ((0.0, None), (1.0, 3), (1.0, None))]
    return [run.sequences[0].tolist() for run in runs]


if __name__ == "__main__":
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], tp_plan="auto", dtype=torch.float32).eval()
    rank = os.environ["RANK"]
    heads = {layer.self_attn.q_proj.weight.to_local().shape[0] for layer in model.model.layers if hasattr(layer.self_attn.q_proj.weight, "to_local")}
    with open(f"{sys.argv[2]}/{rank}.json", "w") as file:
        json.dump({"tokens": decode(model), "rows": sorted(heads)}, file)
    torch.distributed.destroy_process_group()
