"""The same requests to a real llama-server: answers have its keys. `make llamacpp` builds one."""

import json
import os
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

FOLDER = Path(os.environ.get("SEQUOIA_PLAN_LLAMACPP", ""))
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not FOLDER.name, reason="needs a real llama.cpp: run make llamacpp"),
]
ADDRESS = "http://127.0.0.1:18089"
CHAT = '"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0'
SCRIPT = f"""
/v1/chat/completions {{{CHAT}}}
/v1/chat/completions {{{CHAT}, "stream": true}}
/v1/chat/completions {{{CHAT}, "stream": true, "stream_options": {{"include_usage": true}}}}
/v1/chat/completions {{{CHAT}, "logprobs": true, "top_logprobs": 2}}
/v1/chat/completions {{{CHAT}, "n": 2}}
/v1/chat/completions {{{CHAT}, "stop": ["o"]}}
/v1/chat/completions {{{CHAT}, "seed": 3, "top_k": 5, "top_p": 0.9, "min_p": 0.1}}
/v1/chat/completions {{{CHAT}, "response_format": {{"type": "json_object"}}}}
/v1/chat/completions {{{CHAT}, "presence_penalty": 1, "logit_bias": {{"28": -5}}}}
/v1/chat/completions {{"messages": "x"}}
/v1/completions {{"prompt": "Hi", "max_tokens": 3}}
/v1/completions {{"prompt": ["Hi", "Ho"], "max_tokens": 3}}
/v1/completions {{"prompt": [504, 28], "max_tokens": 3, "logprobs": 2}}
/completion {{"prompt": "Hi", "n_predict": 3}}
/completion {{"prompt": "Hi", "n_predict": 0}}
/completion {{"prompt": "Hi", "n_predict": 3, "stream": true}}
/completion {{"prompt": "Hi", "n_predict": 3, "n_probs": 2, "return_tokens": true}}
/completion {{"prompt": "Hi", "n_predict": 3, "response_fields": ["content", "timings/prompt_n"]}}
/tokenize {{"content": "Hi"}}
/detokenize {{"tokens": [504]}}
/apply-template {{{CHAT}}}
"""


def answers(address, line):
    """The objects of an answer, and of a stream its first, second and last ones."""
    path, _, body = line.partition(" ")
    request = Request(address + path, body.encode(), {"Authorization": "Bearer the key"})
    try:
        with urlopen(request, timeout=60) as answer:
            text = answer.read().decode()
    except OSError as error:
        text = error.read().decode()
    found = [json.loads(part.removeprefix("data: ")) for part in text.split("\n\n") if "{" in part]
    return [found[0], found[-1]]


def keys(value, path=""):
    """The names in an object, with those that they are in; settings are each server's own."""
    if isinstance(value, list):
        value = value[0] if value and isinstance(value[0], dict) else None
    if not isinstance(value, dict) or path.endswith("generation_settings"):
        return {path}
    return {path}.union(*(keys(part, f"{path}/{name}") for name, part in value.items()))


@pytest.fixture(scope="module")
def llama_server():
    words = f"-m {FOLDER}/target.gguf --port 18089 -t 1 -c 2048 --no-ui".split()
    with subprocess.Popen(
        [FOLDER / "bin" / "llama-server", *words], stderr=subprocess.DEVNULL
    ) as run:
        for _ in range(600):
            with suppress(OSError):
                urlopen(f"{ADDRESS}/health").close()
                break
            time.sleep(0.1)
        yield ADDRESS
        run.kill()


@pytest.mark.parametrize("line", SCRIPT.strip().splitlines())
def test_answers_have_the_keys_of_llama_servers(url, llama_server, line):
    for theirs, ours in zip(answers(llama_server, line), answers(url, line), strict=True):
        missing = keys(theirs) - keys(ours)
        assert not missing, missing
