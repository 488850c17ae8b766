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


def disturb(decoder, rank):
    """Let this process, unless it is the first, draw other random numbers; returns how often it was overruled so far."""
    refill, verdict, judge = decoder.sequence.refill_random_numbers, decoder.verdict, decoder.judge
    overruled, own = [], []

    def other(bits):
        refill(bits)
        if rank:
            decoder.sequence.bits.add_(12345).remainder_(2**31 - 1)
            decoder.sequence.uniforms.mul_(0.5)

    def seen(logits, growth, sampling):
        agreed = judge(logits, growth, sampling)
        overruled.append(own.pop() != [agreed.path.tolist(), agreed.bonus.tolist()])
        return agreed

    def noted(logits, growth, sampling):
        accepted = verdict(logits, growth, sampling)
        own.append([accepted.path.tolist(), accepted.bonus.tolist()])
        return accepted

    decoder.sequence.refill_random_numbers, decoder.judge, decoder.verdict = other, seen, noted
    return overruled


def disturbed(target, rank):
    """Tokens sampled by processes that would not decide alike, and how often this one was overruled."""
    decoder = SequoiaDecoder(target, resembling(tiny("Llama")), TREE)
    overruled = disturb(decoder, rank)
    return decoder.generate(PROMPT, 32, 1.0, seed=3).sequences[0].tolist(), sum(overruled)


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
    agreed, overruled = disturbed(model, int(rank))
    with open(f"{sys.argv[2]}/{rank}.json", "w") as file:
        json.dump({"tokens": decode(model), "rows": sorted(heads), "agreed": agreed, "overruled": overruled}, file)
    torch.distributed.destroy_process_group()
