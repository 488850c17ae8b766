"""One process of a tensor-parallel run, which torchrun starts. It writes its tokens as JSON."""

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


def disturb(step, rank):
    """Let this process draw other random numbers, unless it is the first one.

    Returns:
        A list that gets a bool for each step: whether the path or bonus token that all processes
        agree on differs from what this process would have chosen.
    """
    sequence = step.sequence
    refill_random_numbers = sequence.refill_random_numbers
    verify, verify_locally = step.verify, step.verifier._by_tensors
    overruled, local_choices = [], []

    def refill_differently(bits):
        refill_random_numbers(bits)
        if rank:
            sequence.bits.add_(12345).remainder_(2**31 - 1)
            sequence.uniforms.mul_(0.5)

    def choice(accepted):
        return [accepted.path.tolist(), accepted.bonus.tolist()]

    def verify_and_compare(logits, drafted, sampling):
        accepted = verify(logits, drafted, sampling)
        overruled.append(local_choices.pop() != choice(accepted))
        return accepted

    def verify_locally_and_record(*inputs):
        accepted = verify_locally(*inputs)
        local_choices.append(choice(accepted))
        return accepted

    sequence.refill_random_numbers = refill_differently
    step.verify, step.verifier._by_tensors = verify_and_compare, verify_locally_and_record
    return overruled


def decode_disturbed(target, rank):
    """Sample with processes that would not choose alike.

    Returns:
        The tokens, and in how many steps this process was overruled.
    """
    decoder = SequoiaDecoder(target, resembling(tiny("Llama")), TREE)
    overruled = disturb(decoder.step, rank)
    generation = decoder.generate(PROMPT, 32, 1.0, seed=3)
    return generation.sequences[0].tolist(), sum(overruled)


def decode(target):
    """Decode greedily, sampled with a seed, and sampled without one. Returns three token lists."""
    decoder = SequoiaDecoder(target, resembling(tiny("Llama")), TREE)
    generations = [
        decoder.generate(PROMPT, 32, temperature, seed=seed)
        for temperature, seed in ((0.0, None), (1.0, 3), (1.0, None))
    ]
    return [generation.sequences[0].tolist() for generation in generations]


def query_rows(target):
    """Return the numbers of query rows that this process holds of its layers, sorted."""
    weights = [layer.self_attn.q_proj.weight for layer in target.model.layers]
    # transformers 5.10 splits weights into plain tensors, newer versions into DTensors
    local_weights = [w.to_local() if hasattr(w, "to_local") else w for w in weights]
    return sorted({weight.shape[0] for weight in local_weights})


def main(model_folder, output_folder):
    """Decode with this process's share of the model, and write its file."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(
        model_folder, tp_plan="auto", dtype=torch.float32
    ).eval()
    rank = os.environ["RANK"]
    rows = query_rows(model)
    agreed, num_overruled = decode_disturbed(model, int(rank))
    with open(f"{output_folder}/{rank}.json", "w") as file:
        result = {
            "tokens": decode(model),
            "rows": rows,
            "agreed": agreed,
            "overruled": num_overruled,
        }
        json.dump(result, file)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
