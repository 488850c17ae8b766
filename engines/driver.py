"""Runs vLLM for `engine_process.EngineProcess`, as a script for the Python that has vLLM.

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


class Driver:
    """One engine and its prompts. Its public methods are the commands."""

    def start(
        self, model: str, speculative: dict[str, Any] | None, options: dict[str, Any]
    ) -> tuple[str, str]:
        """Loads the models, and returns vLLM's version and the kind of device."""
        import vllm

        config = {"speculative_config": speculative} if speculative else {}
        self.vllm = vllm
        self.llm = vllm.LLM(model=model, **config, **{"disable_log_stats": False, **options})
        self.engine = self.llm.llm_engine
        self.request_ids = count()
        return vllm.__version__, vllm.platforms.current_platform.device_type

    def encode(self, prompts: list[Any]) -> list[list[int]]:
        """Token ids of prompts, in the tokenizer's chat template if it has one."""
        tokenizer = self.llm.get_tokenizer()
        encoded = []
        for prompt in prompts:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            text = "\n\n".join(message["content"] for message in messages)
            options = {}
            if getattr(tokenizer, "chat_template", None):
                text = tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, tokenize=False
                )
                options = {"add_special_tokens": False}
            encoded.append(tokenizer.encode(text, **options))
        return encoded

    def run(
        self,
        prompts: list[list[int]],
        texts_before: list[list[int]],
        tokens: int,
        steps: int | None = None,
        temperature: float = 0.0,
    ) -> dict[str, Any]:
        """Decodes prompts, as many requests at a time as there are slots, and times the full steps.

        In a full step every slot decodes. Of the result, `steps` has (seconds, tokens) of each of
        these, and `tokens_by_prompt` the new tokens of each prompt step by step. The next prompt
        starts when a request ends. The run ends with the last request, or after so many full
        `steps`. `texts_before` has for each slot the tokens that fill up its prompts.
        """
        counters_before = self._read_counters()
        waiting = list(enumerate(prompts))
        free_slots = list(range(len(texts_before)))
        requests: dict[str, tuple[int, int]] = {}  # a prompt's index and its slot
        sampling = self.vllm.SamplingParams(
            temperature=temperature,
            max_tokens=tokens,
            # where only times are wanted: what follows such a context may be the end of the text
            ignore_eos=bool(texts_before[0]) and steps is not None,
        )
        num_tokens = [0] * len(prompts)
        tokens_by_prompt: list[list[int]] = [[] for _ in prompts]
        full_steps: list[tuple[float, int]] = []  # seconds and tokens
        last_time = time.perf_counter()
        while (waiting or requests) and (steps is None or len(full_steps) < steps):
            while waiting and free_slots:
                index, token_ids = waiting.pop(0)
                slot = free_slots.pop(0)
                request_id = str(next(self.request_ids))
                filled = {"prompt_token_ids": fill_up(token_ids, texts_before[slot])}
                self.engine.add_request(request_id, filled, sampling)
                requests[request_id] = index, slot
            is_full = not free_slots
            num_before = sum(num_tokens)
            outputs = self.engine.step()
            end_time = time.perf_counter()
            for output in outputs:
                index, slot = requests[output.request_id]
                num_new = len(output.outputs[0].token_ids) - num_tokens[index]
                if num_tokens[index]:
                    tokens_by_prompt[index].append(num_new)
                else:  # the step had the request's prefill in it
                    is_full = False
                num_tokens[index] += num_new
                if output.finished:
                    free_slots.append(slot)
                    del requests[output.request_id]
            if is_full and len(outputs) == len(texts_before):
                full_steps.append((end_time - last_time, sum(num_tokens) - num_before))
            last_time = end_time
        self.engine.abort_request(list(requests))
        while self.engine.has_unfinished_requests():
            self.engine.step()
        counters = self._read_counters()
        counters.subtract(counters_before)
        return {"steps": full_steps, "tokens_by_prompt": tokens_by_prompt, "counters": counters}

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
