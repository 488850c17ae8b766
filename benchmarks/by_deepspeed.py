"""Decodes with DeepSpeed's ZeRO stage 3, weights on disk: a child process of `offload.py --deepspeed PYTHON`, where PYTHON has deepspeed and sequoia-plan.

    DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed==0.19.8 ninja     # and a C++ compiler and libaio's headers: its op is compiled on first use

It reads a JSON list from its standard input, [prompt, seed] a line, and answers each with what was timed (the fields of `profiler.bench.Run`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict, replace

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "DS_ACCELERATOR": "cpu"}

import deepspeed
import torch
from transformers import AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig

from sequoia_plan.profiler.bench import hugging_face
from sequoia_plan.runtime import Sampling, load_pair
from sequoia_plan.runtime.models.load import local_folder, resolve_dtype

LIVE = 40_000_000
"""Parameters in memory at a time: the embeddings and a few layers of the embedded target."""


def main() -> None:
    """Load the embedded target, then decode what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--temperature", type=float, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--folder", required=True, help="where the weights are written")
    options = parser.parse_args()
    dtype = resolve_dtype(options.dtype, "cpu")
    weights = {"device": "nvme", "nvme_path": options.folder, "pin_memory": False, "buffer_count": 8, "buffer_size": LIVE}
    stage = {"stage": 3, "offload_param": weights, "stage3_prefetch_bucket_size": LIVE // 4, "stage3_max_live_parameters": LIVE, "stage3_max_reuse_distance": 0}
    reads = {"block_size": 1 << 20, "queue_depth": 8, "thread_count": 2, "single_submit": False, "overlap_events": True}
    settings = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": dtype == torch.bfloat16}, "zero_optimization": stage, "aio": reads}
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print is no answer
    pair = load_pair(dtype=options.dtype, placement="resident")
    torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    deepspeed.init_distributed("gloo")
    kept = HfDeepSpeedConfig(settings)  # transformers looks whether one is alive while it loads
    engine = deepspeed.initialize(model=AutoModelForCausalLM.from_pretrained(local_folder(None), dtype=dtype), config_params=settings)[0]
    del kept
    decode = hugging_face(replace(pair, target=engine.module.eval()), Sampling(options.temperature), options.tokens)
    print(json.dumps({"deepspeed": deepspeed.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        prompt, seed = json.loads(line)
        print(json.dumps(asdict(decode(prompt, seed))), file=answers, flush=True)


if __name__ == "__main__":
    main()
