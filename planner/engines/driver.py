"""Runs vLLM for `process.Engine`: a script for the Python that has vLLM, which imports nothing of this package.

It reads requests from stdin, a JSON object a line, and answers each with a line on what was stdout when it began; all that the engine prints
goes to stderr. The first process only watches: when the file descriptor in its first argument is closed, because the program that started it
has ended in whatever way, or when the engine has ended, it kills its whole session, the engine's own child processes included.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from typing import Any, NoReturn

if sys.path and os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
    del sys.path[0]  # this folder's files are not what the engine imports by their names


def watch(lifeline: int, engine: int) -> NoReturn:
    """Wait until the other end of `lifeline` is closed, or the process `engine` has ended; then kill every process of this session."""
    while not select.select([lifeline], [], [], 0.2)[0]:
        ended, status = os.waitpid(engine, os.WNOHANG)
        if ended:
            answer({"died": os.waitstatus_to_exitcode(status)})
            break
    os.killpg(0, signal.SIGKILL)  # this process, too
    raise SystemExit


def answer(message: dict[str, Any], where: int = 1) -> None:
    """Write one line to a file descriptor."""
    line = json.dumps(message).encode() + b"\n"
    while line:
        line = line[os.write(where, line) :]


class Driver:
    """One engine and the prompts that it was given."""

    def start(self, model: str, speculative: dict[str, Any] | None, options: dict[str, Any]) -> dict[str, Any]:
        """Load the models. `speculative` is the speculative config, None for none; `options` are further arguments of `vllm.LLM`."""
        began = time.perf_counter()
        import vllm
        from vllm.config import SpeculativeConfig

        self.vllm: Any = vllm
        self.llm: Any = vllm.LLM(model=model, **({"speculative_config": speculative} if speculative else {}), **{"disable_log_stats": False, **options})
        self.engine: Any = self.llm.llm_engine
        self.prompts: list[list[int]] = []
        self.number = 0
        fields = getattr(SpeculativeConfig, "__dataclass_fields__", {})
        return {
            "version": vllm.__version__,
            "device": str(getattr(vllm.platforms.current_platform, "device_type", "")),
            "schedule": "num_speculative_tokens_per_batch_size" in fields,
            "seconds": time.perf_counter() - began,
        }

    def encode(self, prompts: list[Any]) -> dict[str, Any]:
        """Keep prompts as token ids, in the chat template if the tokenizer has one. A prompt is a text or a list of messages."""
        tokenizer = self.llm.get_tokenizer()
        for prompt in prompts:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            if getattr(tokenizer, "chat_template", None):
                text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
                self.prompts.append(list(tokenizer.encode(text, add_special_tokens=False)))
            else:
                self.prompts.append(list(tokenizer.encode("\n\n".join(message["content"] for message in messages))))
        return {"lengths": [len(prompt) for prompt in self.prompts]}

    def run(self, batch: int, prompts: list[int], tokens: int, steps: int | None = None, temperature: float = 0.0, drain: bool = False) -> dict[str, Any]:
        """Decode with `batch` requests at a time; the next prompt follows one that ends, and when none is left the run ends, or drains.

        A step counts when every one of `batch` requests got tokens in it and none its first: prefills and the end of the run are left out.

        Args:
            prompts: numbers of prompts, in the order they are taken.
            tokens: new tokens a prompt, at most.
            steps: end after so many steps that count.
            drain: go on until every prompt has its tokens.

        Returns:
            seconds and tokens of each step that counts; for each prompt, how many tokens each of its steps but the first gave; vLLM's own
            counters before and after; seconds and tokens of the whole run.
        """
        before, waiting, flying = self.counters(), list(prompts), dict[str, list[int]]()
        gave: dict[int, list[int]] = {number: [] for number in prompts}
        seconds, given, whole, began = list[float](), list[int](), 0, time.perf_counter()
        last = began
        while waiting or len(flying) == batch or (drain and flying):
            while waiting and len(flying) < batch:
                name, number = f"{self.number}", waiting.pop(0)
                self.number += 1
                settings = self.vllm.SamplingParams(temperature=temperature, max_tokens=tokens)
                self.engine.add_request(name, {"prompt_token_ids": self.prompts[number]}, settings)
                flying[name] = [number, 0]
            full = len(flying) == batch
            outputs = self.engine.step()
            now, counts, first = time.perf_counter(), 0, False
            for output in outputs:
                request = flying[output.request_id]
                new = len(output.outputs[0].token_ids) - request[1]
                if request[1]:
                    gave[request[0]].append(new)
                first, request[1], counts = first or not request[1], request[1] + new, counts + new
                if output.finished:
                    del flying[output.request_id]
            if full and not first and len(outputs) == batch:
                seconds.append(now - last)
                given.append(counts)
            whole, last = whole + counts, now
            if steps is not None and len(seconds) >= steps:
                break
        took = last - began
        self.engine.abort_request(list(flying))
        while self.engine.has_unfinished_requests():
            self.engine.step()
        after = self.counters()
        return {"seconds": seconds, "tokens": given, "gave": list(gave.values()), "before": before, "after": after, "whole": [took, whole]}

    def counters(self) -> dict[str, float]:
        """vLLM's counters of speculation, as `name[position]`: value; those of several engines added up."""
        found: dict[str, float] = {}
        for metric in self.llm.get_metrics():
            if "spec_decode" not in metric.name:
                continue
            for place, value in enumerate(getattr(metric, "values", [getattr(metric, "value", 0)])):
                name = f"{metric.name}[{place}]" if hasattr(metric, "values") else metric.name
                found[name] = found.get(name, 0) + value
        return found


def main() -> None:
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    lifeline = int(sys.argv[1])
    engine = os.fork()
    if engine:
        watch(lifeline, engine)
    os.close(lifeline)
    answers = os.dup(1)
    os.set_inheritable(answers, False)
    os.dup2(2, 1)  # what the engine prints is not an answer
    driver = Driver()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer({"answer": getattr(driver, request.pop("do"))(**request)}, answers)
        except Exception as error:
            import traceback

            traceback.print_exc()
            answer({"error": f"{type(error).__name__}: {error}"}, answers)


if __name__ == "__main__":
    main()
