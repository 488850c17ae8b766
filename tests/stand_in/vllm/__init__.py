"""Stands in for vLLM where its process, its errors and its counters are tested without it: it decodes nothing, and yields known numbers of tokens.

What it does is told by the name of the model: "dies", "wrong vocabulary", "no counters", or any other for a working engine.
"""

import itertools
import multiprocessing
import os
import signal
import time
from types import SimpleNamespace

__version__ = "0.0.stand-in"
platforms = SimpleNamespace(current_platform=SimpleNamespace(device_type="cpu"))
PATTERN = (0, 1, 0, 2, 0, 0, 3, 1)
"""Accepted tokens of each step, one after the other."""


def SamplingParams(temperature, max_tokens):
    return max_tokens


class LLM:
    def __init__(self, model, speculative_config=None, disable_log_stats=False, **options):
        if model == "wrong vocabulary":
            raise type("ValidationError", (ValueError,), {})(
                "1 validation error for SpeculativeConfig\n"
                "  Value error, Target and draft model should have the same vocabulary size. [type=value_error, input_value=1]\n"
                "    For further information visit a page"
            )  # as vLLM 0.32 says it, through pydantic
        self.dies, self.silent = model == "dies", model == "no counters"
        self.length = (speculative_config or {}).get("num_speculative_tokens", 0)
        self.child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        self.child.start()  # as vLLM's EngineCore
        print("this line is no answer", self.child.pid, flush=True)
        self.llm_engine, self.requests, self.pattern = self, {}, itertools.cycle(PATTERN)
        self.drafts, self.accepted = 0, [0] * self.length

    def get_tokenizer(self):
        return SimpleNamespace(chat_template=None, encode=lambda text: list(text.encode()))

    def add_request(self, name, prompt, most):
        self.requests[name] = [0, most]

    def abort_request(self, names):
        for name in names:
            self.requests.pop(name, None)

    def has_unfinished_requests(self):
        return bool(self.requests)

    def step(self):
        if self.dies:
            os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(0.0005 * (1 + 0.2 * self.length))
        outputs = []
        for name, request in list(self.requests.items()):
            new = 1
            if request[0] and self.length:
                accepted = min(next(self.pattern), self.length)
                self.drafts += 1
                for place in range(accepted):
                    self.accepted[place] += 1
                new += accepted
            request[0] = min(request[0] + new, request[1])
            outputs.append(SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=[0] * request[0])], finished=request[0] == request[1]))
            if request[0] == request[1]:
                del self.requests[name]
        return outputs

    def get_metrics(self):
        if not self.length or self.silent:
            return []
        return [
            SimpleNamespace(name="vllm:spec_decode_num_drafts", value=self.drafts),
            SimpleNamespace(name="vllm:spec_decode_num_accepted_tokens", value=sum(self.accepted)),
            SimpleNamespace(name="vllm:spec_decode_num_accepted_tokens_per_pos", values=list(self.accepted)),
        ]
