"""A stand-in for vLLM, to test its process, errors and counters without it.

It decodes nothing, and yields a known number of tokens in each step. The name of the model selects
what it does: "dies", "broken", "wrong vocabulary", "no counters", "strict", which refuses requests
that share their first token with one that runs, or any other for a working one.
"""

import itertools
import multiprocessing
import os
import signal
import sys
import time
from types import SimpleNamespace

__version__ = "0.0.stand-in"
platforms = SimpleNamespace(current_platform=SimpleNamespace(device_type="cpu"))
ACCEPTED_PER_STEP = (0, 1, 0, 2, 0, 0, 3, 1)
"""Accepted tokens of successive steps; the pattern repeats."""

clock = [0.0]
time.perf_counter = lambda: clock[0]  # the driver's steps take no more than is said here


def SamplingParams(temperature, max_tokens, ignore_eos):
    return max_tokens


class LLM:
    def __init__(self, model, speculative_config=None, disable_log_stats=False, **options):
        print("the engine's own words", file=sys.stderr, flush=True)
        if model == "wrong vocabulary":
            raise type("ValidationError", (ValueError,), {})(
                "1 validation error for SpeculativeConfig\n"
                "  Value error, Target and draft model should have the same vocabulary size. "
                "[type=value_error, input_value=1]\n"
                "    For further information visit a page"
            )  # vLLM 0.32 prints this text, through pydantic
        if model == "broken":  # as if another process of the engine had failed
            raise RuntimeError("Engine core initialization failed. See root cause above.")
        self.dies, self.is_strict = model == "dies", model == "strict"
        self.has_counters = model != "no counters"
        self.length = (speculative_config or {}).get("num_speculative_tokens", 0)
        # vLLM has such a child process too, its EngineCore
        self.child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        self.child.start()
        print("this line is no answer", self.child.pid, flush=True)
        self.llm_engine = self
        self.requests = {}
        self.accepted_per_step = itertools.cycle(ACCEPTED_PER_STEP)
        self.num_drafts = 0
        self.num_accepted_per_position = [0] * self.length

    def get_tokenizer(self):
        return SimpleNamespace(chat_template=None, encode=lambda text: list(text.encode()))

    def add_request(self, request_id, prompt, max_tokens):
        begin, *_ = prompt["prompt_token_ids"]
        together = [request.begin for request in self.requests.values()]
        if begin in together and self.is_strict:
            raise ValueError("requests that run together share their begin")
        self.requests[request_id] = SimpleNamespace(
            num_tokens=0, max_tokens=max_tokens, begin=begin
        )

    def abort_request(self, request_ids):
        for request_id in request_ids:
            self.requests.pop(request_id, None)

    def has_unfinished_requests(self):
        return bool(self.requests)

    def step(self):
        if self.dies:
            os.kill(os.getpid(), signal.SIGSEGV)
        clock[0] += 0.001 * (1 + 0.1 * self.length)
        outputs = []
        for request_id, request in list(self.requests.items()):
            num_new = 1
            if request.num_tokens and self.length:
                num_accepted = min(next(self.accepted_per_step), self.length)
                self.num_drafts += 1
                for position in range(num_accepted):
                    self.num_accepted_per_position[position] += 1
                num_new += num_accepted
            request.num_tokens = min(request.num_tokens + num_new, request.max_tokens)
            is_finished = request.num_tokens == request.max_tokens
            sequence = SimpleNamespace(token_ids=[0] * request.num_tokens)
            outputs.append(
                SimpleNamespace(request_id=request_id, outputs=[sequence], finished=is_finished)
            )
            if is_finished:
                del self.requests[request_id]
        return outputs

    def get_metrics(self):
        if not self.length or not self.has_counters:
            return []
        prefix = "vllm:spec_decode_num"
        per_position = list(self.num_accepted_per_position)
        return [
            SimpleNamespace(name=f"{prefix}_drafts", value=self.num_drafts),
            SimpleNamespace(name=f"{prefix}_draft_tokens", value=self.num_drafts * self.length),
            SimpleNamespace(name=f"{prefix}_accepted_tokens", value=sum(per_position)),
            SimpleNamespace(name=f"{prefix}_accepted_tokens_per_pos", values=per_position),
        ]
