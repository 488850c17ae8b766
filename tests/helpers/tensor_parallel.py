"""One process of a tensor-parallel run, which torchrun starts. It writes its tokens as JSON."""

import json
import os
import sys
from pathlib import Path

import torch
from architectures import resembling, tiny
from toys import TREE
from transformers import AutoModelForCausalLM

from sequoia_plan.runtime import SequoiaDecoder

PROMPT = [5, 6, 7, 8]


def decode(target):
    """Decode greedily, sampled with a seed, and sampled without one. Returns three token lists."""
    decoder = SequoiaDecoder(target, resembling(tiny("Llama")), TREE)
    return [
        decoder.generate(PROMPT, 32, temperature, seed=seed).sequences[0].tolist()
        for temperature, seed in ((0.0, None), (1.0, 3), (1.0, None))
    ]


def decode_disturbed(target, rank):
    """Sample with processes that would not choose alike: all but the first one draw other numbers.

    Returns:
        The tokens, and how often this process was overruled.
    """
    decoder = SequoiaDecoder(target, resembling(tiny("Llama")), TREE)
    sequence, backend, overruled = decoder.step.sequence, decoder.step.target.backend, []
    from_first = backend.from_first
    refill_random_numbers = sequence.refill_random_numbers

    def refill_differently(bits):
        refill_random_numbers(bits)
        if rank:
            sequence.bits.add_(12345).remainder_(2**31 - 1)
            sequence.uniforms.mul_(0.5)

    def compared_from_first(values):
        agreed = from_first(values.clone())
        overruled.append(not agreed.equal(values))
        return agreed

    sequence.refill_random_numbers, backend.from_first = refill_differently, compared_from_first
    tokens = decoder.generate(PROMPT, 32, 1.0, seed=3).sequences[0].tolist()
    backend.from_first = from_first
    return tokens, sum(overruled)


def main(model_folder, output_folder):
    """Decode with this process's share of the model, and write its file."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(
        model_folder, tp_plan="auto", dtype=torch.float32
    ).eval()
    rank = os.environ["RANK"]
    weights = [layer.self_attn.q_proj.weight.to_local() for layer in model.model.layers]
    agreed, num_overruled = decode_disturbed(model, int(rank))
    result = {
        "tokens": decode(model),
        "rows": [weight.shape[0] for weight in weights],
        "agreed": agreed,
        "overruled": num_overruled,
    }
    Path(output_folder, f"{rank}.json").write_text(json.dumps(result))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
