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
from dataclasses import dataclass
from typing import Any, NoReturn

if sys.path and os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
    del sys.path[0]  # `import vllm` must not find the vllm.py of this folder


def watch(lifeline_fd: int, engine_pid: int) -> NoReturn:
    """Kills every process of this session once the lifeline closes or the engine ends."""
    while not select.select([lifeline_fd], [], [], 0.2)[0]:
        ended_pid, status = os.waitpid(engine_pid, os.WNOHANG)
        if ended_pid:
            write_line({"exit_code": os.waitstatus_to_exitcode(status)})
            break
    os.killpg(0, signal.SIGKILL)  # includes this process
    raise SystemExit


def write_line(message: dict[str, Any], fd: int = 1) -> None:
    """Writes a JSON line to a file descriptor."""
    unwritten = json.dumps(message).encode() + b"\n"
    while unwritten:
        unwritten = unwritten[os.write(fd, unwritten) :]


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
        self.num_requests = 0
        config_fields = getattr(SpeculativeConfig, "__dataclass_fields__", {})
        return {
            "version": vllm.__version__,
            "device": str(getattr(vllm.platforms.current_platform, "device_type", "")),
            "accepts_schedule": "num_speculative_tokens_per_batch_size" in config_fields,
            "max_model_len": self.engine.model_config.max_model_len,
        }

    def encode(self, prompts: list[Any]) -> dict[str, Any]:
        """Token ids of prompts in the tokenizer's chat template if it has one, and without it."""
        tokenizer = self.llm.get_tokenizer()
        encoded: dict[str, list[list[int]]] = {"prompts": [], "texts": []}
        for prompt in prompts:
            messages = prompt
            if isinstance(prompt, str):
                messages = [{"role": "user", "content": prompt}]
            text = "\n\n".join(message["content"] for message in messages)
            token_ids = tokenizer.encode(text)
            encoded["texts"].append(list(token_ids))
            if getattr(tokenizer, "chat_template", None):
                text = tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, tokenize=False
                )
                token_ids = tokenizer.encode(text, add_special_tokens=False)
            encoded["prompts"].append(list(token_ids))
        return encoded

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
                before = texts_before[request.slot]
                if before:
                    own = token_ids[-len(before) :]
                    token_ids = before[: len(before) - len(own)] + own
                requests[self._add_request(token_ids, sampling)] = request
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
        return {
            "step_seconds": step_seconds,
            "step_tokens": step_tokens,
            "tokens_by_prompt": tokens_by_prompt,
            "counters": {
                name: value - counters_before.get(name, 0)
                for name, value in self._read_counters().items()
            },
        }

    def _add_request(self, token_ids: list[int], sampling: Any) -> str:
        """Gives a prompt's tokens to the engine, and returns the request's id."""
        request_id = str(self.num_requests)
        self.num_requests += 1
        self.engine.add_request(request_id, {"prompt_token_ids": token_ids}, sampling)
        return request_id

    def _read_counters(self) -> dict[str, float]:
        """vLLM's counters of speculation by name, or `name[position]`, summed over engines."""
        counters: dict[str, float] = {}
        for metric in self.llm.get_metrics():
            if "spec_decode" not in metric.name:
                continue
            if hasattr(metric, "values"):  # a vector: one value for each position of a chain
                values = {f"{metric.name}[{i}]": value for i, value in enumerate(metric.values)}
            else:
                values = {metric.name: getattr(metric, "value", 0)}
            for name, value in values.items():
                counters[name] = counters.get(name, 0) + value
        return counters


def main() -> None:
    """Starts the engine's process, and answers in it the commands that stdin has, a line each."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    lifeline_fd = int(sys.argv[1])
    engine_pid = os.fork()
    if engine_pid:
        watch(lifeline_fd, engine_pid)
    os.close(lifeline_fd)
    answers_fd = os.dup(1)
    os.set_inheritable(answers_fd, False)
    os.dup2(2, 1)  # what the engine prints is not an answer
    if command_line := sys.argv[2:]:
        try:
            os.execvp(command_line[0], command_line)
        except OSError as error:
            print(f"OSError: {error.strerror}: {command_line[0]}", file=sys.stderr, flush=True)
            os._exit(127)
    driver = Driver()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            command = getattr(driver, request.pop("command"))
            write_line({"answer": command(**request)}, answers_fd)
        except Exception as error:
            import traceback

            traceback.print_exc()
            write_line({"error": f"{type(error).__name__}: {error}"}, answers_fd)


if __name__ == "__main__":
    main()
