"""Runs vLLM for `process.EngineProcess`, as a script for the Python that has vLLM.

The script imports nothing of this package. It reads requests from stdin, a JSON object a line, and
writes a line for each to the original stdout. Everything that the engine prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NoReturn

if sys.path and os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
    del sys.path[0]  # `import vllm` must not find the vllm.py of this folder


def watch(lifeline_fd: int, engine_pid: int) -> NoReturn:
    """Kills every process of this session once the lifeline closes or the engine ends."""
    while not select.select([lifeline_fd], [], [], 0.2)[0]:
        ended_pid, status = os.waitpid(engine_pid, os.WNOHANG)
        if ended_pid:
            print(json.dumps({"exit_code": os.waitstatus_to_exitcode(status)}), flush=True)
            break
    os.killpg(0, signal.SIGKILL)  # includes this process
    raise SystemExit


def fill_up(prompt: Sequence[int], before: Sequence[int]) -> list[int]:
    """A prompt filled up to the length of `before` with its begin; a longer one loses its own."""
    own = prompt[-len(before) :] if before else prompt
    return [*before[: len(before) - len(own)], *own]


@dataclass
class Request:
    """A prompt that the engine decodes, by its index."""

    prompt: int
    slot: int
    num_tokens: int = 0


class Driver:
    """One engine and its prompts. Its public methods are the commands."""

    def start(
        self, model: str, speculative: dict[str, Any] | None, options: dict[str, Any]
    ) -> dict[str, Any]:
        """Loads the models."""
        import vllm
        from vllm.config import SpeculativeConfig

        config = {"speculative_config": speculative} if speculative else {}
        self.vllm: Any = vllm
        self.llm: Any = vllm.LLM(model=model, **config, **{"disable_log_stats": False, **options})
        self.engine: Any = self.llm.llm_engine
        self.request_ids = count()
        schedule = "num_speculative_tokens_per_batch_size"
        return {
            "version": vllm.__version__,
            "device": vllm.platforms.current_platform.device_type,
            "accepts_schedule": schedule in SpeculativeConfig.__dataclass_fields__,
        }

    def encode(self, prompts: list[Any]) -> list[list[list[int]]]:
        """Token ids of prompts in the tokenizer's chat template if it has one, and without it."""
        tokenizer = self.llm.get_tokenizer()
        encoded, texts = [], []
        for prompt in prompts:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            token_ids = tokenizer.encode("\n\n".join(message["content"] for message in messages))
            texts.append(token_ids)
            if getattr(tokenizer, "chat_template", None):
                text = tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, tokenize=False
                )
                token_ids = tokenizer.encode(text, add_special_tokens=False)
            encoded.append(token_ids)
        return [encoded, texts]

    def run(
        self,
        prompts: list[list[int]],
        texts_before: list[list[int]],
        tokens: int,
        steps: int | None = None,
        temperature: float = 0.0,
        drain: bool = False,
    ) -> dict[str, Any]:
        """Decodes prompts, as many requests at a time as there are slots, and times the full steps.

        The next prompt starts when a request ends. The run ends when fewer requests than slots are
        left, or, with `drain`, when none is left. `texts_before` has for each slot the tokens that
        fill up its prompts.
        """
        counters_before = self._read_counters()
        batch = len(texts_before)
        waiting = list(enumerate(prompts))
        requests: dict[str, Request] = {}
        free_slots = list(range(batch))
        sampling = self.vllm.SamplingParams(
            temperature=temperature,
            max_tokens=tokens,
            # where only times are wanted: what follows such a context may be the end of the text
            ignore_eos=bool(texts_before[0]) and steps is not None,
        )
        tokens_by_prompt: list[list[int]] = [[] for _ in prompts]
        step_seconds: list[float] = []
        step_tokens: list[int] = []
        last_time = time.perf_counter()
        while waiting or len(requests) == batch or (drain and requests):
            while waiting and len(requests) < batch:
                index, token_ids = waiting.pop(0)
                request = Request(index, free_slots.pop(0))
                request_id = str(next(self.request_ids))
                filled = {"prompt_token_ids": fill_up(token_ids, texts_before[request.slot])}
                self.engine.add_request(request_id, filled, sampling)
                requests[request_id] = request
            is_full = len(requests) == batch
            outputs = self.engine.step()
            end_time = time.perf_counter()
            num_new_tokens = 0
            for output in outputs:
                request = requests[output.request_id]
                num_tokens = len(output.outputs[0].token_ids)
                num_new = num_tokens - request.num_tokens
                if request.num_tokens:
                    tokens_by_prompt[request.prompt].append(num_new)
                else:  # the step had the request's prefill in it
                    is_full = False
                request.num_tokens = num_tokens
                num_new_tokens += num_new
                if output.finished:
                    free_slots.append(request.slot)
                    del requests[output.request_id]
            if is_full and len(outputs) == batch:
                step_seconds.append(end_time - last_time)
                step_tokens.append(num_new_tokens)
            last_time = end_time
            if steps is not None and len(step_seconds) >= steps:
                break
        self.engine.abort_request(list(requests))  # those that `steps` or the end left unfinished
        while self.engine.has_unfinished_requests():
            self.engine.step()
        counters = self._read_counters()
        counters.subtract(counters_before)
        return {
            "step_seconds": step_seconds,
            "step_tokens": step_tokens,
            "tokens_by_prompt": tokens_by_prompt,
            "counters": counters,
        }

    def _read_counters(self) -> Counter[str]:
        """vLLM's counters of speculation by name, or `name[position]`, summed over engines."""
        counters: Counter[str] = Counter()
        for metric in self.llm.get_metrics():
            if "spec_decode" not in metric.name:
                continue
            if hasattr(metric, "values"):  # a vector: one value for each position of a chain
                counters.update({f"{metric.name}[{i}]": n for i, n in enumerate(metric.values)})
            else:
                counters[metric.name] += metric.value
        return counters


def main() -> None:
    """Starts the engine's process, and answers in it the commands that stdin has, a line each."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    lifeline_fd = int(sys.argv[1])
    engine_pid = os.fork()
    if engine_pid:
        watch(lifeline_fd, engine_pid)
    os.close(lifeline_fd)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the engine prints is not an answer
    if command_line := sys.argv[2:]:
        os.execvp(command_line[0], command_line)
    driver = Driver()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            message = {"answer": getattr(driver, request.pop("command"))(**request)}
        except Exception as error:
            import traceback

            traceback.print_exc()
            message = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(message), file=answers, flush=True)


if __name__ == "__main__":
    main()
