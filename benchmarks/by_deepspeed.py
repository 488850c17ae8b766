"""Decodes with DeepSpeed's ZeRO stage 3, with the weights on disk.

It is a child process of `offload.py --deepspeed PYTHON`, where PYTHON has deepspeed and
sequoia-plan. DeepSpeed compiles its op for reading on first use, which needs a C++ compiler and
libaio's headers:

    DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed==0.19.8 ninja

It reads a JSON list [prompt, seed] from each line of its standard input, and answers each with the
timing of the decoded prompt (the fields of `profiler.bench.PromptRun`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict, replace
from typing import Any

os.environ |= {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
    "DS_ACCELERATOR": "cpu",
}

import deepspeed
import torch
from transformers import AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig

from sequoia_plan.profiler.bench import transformers_method
from sequoia_plan.runtime import Sampling, load_pair
from sequoia_plan.runtime.models.load import local_folder, resolve_dtype

MAX_LIVE_PARAMETERS = 40_000_000
"""Parameters in memory at a time: the embeddings and a few layers of the embedded target."""


def main() -> None:
    """Load the embedded target, then decode each prompt that is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--temperature", type=float, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--folder", required=True, help="where the weights are written")
    options = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    pair = load_pair(dtype=options.dtype, placement="resident")
    target = load_offloaded_target(resolve_dtype(options.dtype, "cpu"), options.folder)
    sampling = Sampling(options.temperature)
    decode = transformers_method(replace(pair, target=target), sampling, options.tokens)
    print(json.dumps({"deepspeed": deepspeed.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        prompt, seed = json.loads(line)
        print(json.dumps(asdict(decode(prompt, seed))), file=answers, flush=True)


def load_offloaded_target(dtype: torch.dtype, folder: str) -> Any:
    """The embedded target, with its weights in files in `folder`."""
    torch.distributed.init_process_group(
        "gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1
    )
    deepspeed.init_distributed("gloo")
    settings = deepspeed_settings(dtype, folder)
    config = HfDeepSpeedConfig(settings)  # transformers needs one to be alive while it loads
    model = AutoModelForCausalLM.from_pretrained(local_folder(None), dtype=dtype)
    engine = deepspeed.initialize(model=model, config_params=settings)[0]
    del config
    return engine.module.eval()


def deepspeed_settings(dtype: torch.dtype, folder: str) -> dict[str, Any]:
    """DeepSpeed's configuration: two reading threads, and no layer stays in memory."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {
                "device": "nvme",
                "nvme_path": folder,
                "pin_memory": False,
                "buffer_count": 8,
                "buffer_size": MAX_LIVE_PARAMETERS,
            },
            "stage3_prefetch_bucket_size": MAX_LIVE_PARAMETERS // 4,
            "stage3_max_live_parameters": MAX_LIVE_PARAMETERS,
            "stage3_max_reuse_distance": 0,
        },
        "aio": {
            "block_size": 1 << 20,
            "queue_depth": 8,
            "thread_count": 2,
            "single_submit": False,
            "overlap_events": True,
        },
    }


if __name__ == "__main__":
    main()
