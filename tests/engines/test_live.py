"""`sequoia-plan diagnose --url` with servers as they are: llama-servers, vLLM, SGLang, and others.

`data/vllm/server-0.32.0-*.txt` are pages of real servers, without the buckets of histograms: with 4
speculative tokens after two and four requests, without speculation, and with --disable-log-stats.
"""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from commands import call, engine_plan
from paths import DATA

from sequoia_plan.engines import live
from sequoia_plan.planner.cli import main

PAGES = {path.stem[14:]: path.read_text() for path in DATA.glob("vllm/server-0.32.0-*.txt")}
SERVERS_OWN = {"--enable-metrics", "--speculative-config", "--disable-log-stats"}


def stream(*counts):
    """Events with timings of so many tokens and drafted ones, after 1, 2, ... milliseconds."""
    timings = (
        {"predicted_n": tokens, "draft_n": drafted, "predicted_ms": ms}
        for ms, (tokens, drafted) in enumerate(counts, 1)
    )
    return "".join(f"data: {json.dumps({'timings': timing})}\n\n" for timing in timings)


def completion(body):
    """A step, which drafts a token where there is room for it."""
    return stream((1, 0), (2, int(json.loads(body)["n_predict"] > 2)))


LLAMA_SERVER = {
    "/props": '{"build_info": "b1"}',
    "/apply-template": '{"prompt": "Hi"}',
    "/tokenize": '{"tokens": [1, 2]}',
    "/completion": completion,
}


@pytest.fixture
def diagnose(monkeypatch):
    """Runs the command against a server with answers by path, or functions of requests."""
    monkeypatch.setattr(live, "WATCH_SECONDS", 0.01)
    servers = []

    def run(answers, *words, status=200, path="", code=1):
        requests = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                requests.append((self.path, self.headers["Authorization"], body))
                answer = answers.get(self.path.partition("?")[0], answers.get("*"))
                answer = answer(body) if callable(answer) else answer
                self.send_response(404 if answer is None else status)
                self.end_headers()
                self.wfile.write((answer or "").encode())

            do_POST = do_GET

            def log_message(self, *_):
                pass

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{servers[-1].server_port}{path}"
        result = call("diagnose", "--url", url, *words)
        assert (result.exit_code, "Traceback" in result.output) == (code, False), result.output
        if code:
            options = {name for param in main.commands["diagnose"].params for name in param.opts}
            assert {*re.findall(r"--[a-z-]+", result.stderr)} <= options | SERVERS_OWN
            return result.stderr.strip().splitlines()[-1]
        return result, requests

    yield run
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        *(({"*": text}, text) for text in ("[1]", '{"status": "ok"}', "<p>hello</p>", '"ok"')),
        ({**LLAMA_SERVER, "/apply-template": "[]"}, "/apply-template: no llama-server's answer"),
        ({**LLAMA_SERVER, "/tokenize": '{"tokens": "a"}'}, r"`array`, got `str` - at `\$.tokens"),
        ({**LLAMA_SERVER, "/completion": "data: {}\n\n"}, "no timings of tokens: needs a llama-"),
        ({**LLAMA_SERVER, "/completion": 'data: {"timings": []}\n\n'}, "Expected `object"),
        ({**LLAMA_SERVER, "/completion": 'data: {"error": "no room"}\n\n'}, ": no room"),
        ({**LLAMA_SERVER, "/completion": stream((1, 0), (2, 0))}, "nothing was drafted on these t"),
        ({**LLAMA_SERVER, "/completion": stream((1, 0), (2, 1))}, "it drafts in every step, so no"),
        ({"/metrics": "up 1\n"}, "no counters of vLLM, nor of SGLang, which needs --enable-m"),
        ({"/metrics": "vllm:x 1..2\n"}, "could not convert string to float"),
        ({"/metrics": PAGES["plain"]}, "to rise, expected vllm:inter_token_latency_seconds_count"),
        ({"/metrics": PAGES["silent"]}, "no counters of vLLM"),
    ],
)
def test_a_server_that_answers_otherwise_is_one_line(diagnose, answers, message):
    assert re.search(message, diagnose(answers))


@pytest.mark.parametrize(
    ("status", "text", "message"),
    [
        (400, '{"error": {"message": "model name is missing from the request"}}', "; name one of"),
        (401, '{"error": {"message": "Invalid API Key"}}', "; the server needs a key: give --api"),
        (500, '{"detail": "out of memory"}', "HTTP Error 500: Internal Server Error"),
    ],
)
def test_an_error_has_the_servers_own_words(diagnose, status, text, message):
    line = diagnose({"*": text}, status=status)
    assert text in line and message in line


def test_every_request_has_the_key_and_the_models_name_and_none_goes_through_a_proxy(
    diagnose, monkeypatch
):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    words = ("--api-key", "secret", "--model", "a b")
    result, requests = diagnose(LLAMA_SERVER, *words, path="/v1/", code=0)
    assert "a chain of 1" in result.output and len(requests) > 40
    assert {key for _, key, _ in requests} == {"Bearer secret"}
    assert all(path.endswith("?model=a+b") for path, _, _ in requests)
    assert all(json.loads(body)["model"] == "a b" for _, _, body in requests if body)
    pages = turns(PAGES["before"], PAGES["after"])
    _, requests = diagnose({"/metrics": pages}, *words[:2], code=0)
    assert [key for _, key, _ in requests] == ["Bearer secret"] * 3
    _, requests = diagnose(LLAMA_SERVER, code=0)
    assert {key for _, key, _ in requests} == {None} and b"model" not in requests[-1][2]


def turns(*answers):
    """Answers in turn."""
    remaining = iter(answers)
    return lambda _: next(remaining)


def plan_of(diagnose, before, after, *words):
    """The diagnosis between two pages."""
    result, _ = diagnose({"/metrics": turns(before, after)}, "--json", *words, code=0)
    plan = engine_plan(result)
    return plan.engine, *plan.contexts, *plan.contexts[0].cells


@pytest.mark.parametrize("histogram", ["inter_token_latency", "time_per_output_token"])
def test_the_steps_of_a_vllm(diagnose, histogram):
    """It decoded two requests of 40 tokens; 48 chains of 4, 34 tokens accepted."""
    pages = [
        PAGES[name].replace(":inter_token_latency", f":{histogram}") for name in ("before", "after")
    ]
    engine, part, cell = plan_of(diagnose, *pages)
    assert engine == "vllm" and cell.speculative_tokens == 4
    assert cell.seconds == pytest.approx((134.431 - 57.111) / 48, rel=1e-4)
    assert cell.tokens_per_step == pytest.approx(78 / 48)
    assert (part.acceptance.drafts, part.acceptance.accepted) == (48, (21, 9, 3, 1))
    assert part.break_even_seconds == pytest.approx(cell.seconds / cell.tokens_per_step)


def sglang(tokens, seconds, length=2.5, model="m"):
    """A page of SGLang, whose latencies have an observation for each token."""
    return "".join(
        f'sglang:{name}{{model_name="{model}",tp_rank="0"}} {value}\n'
        for name, value in {
            "inter_token_latency_seconds_count": tokens,
            "inter_token_latency_seconds_sum": seconds,
            "spec_accept_length": length,
        }.items()
    )


def test_the_steps_of_an_sglang(diagnose):
    """100 tokens in 2 seconds of all requests: 40 steps of 2.5 tokens, 20 ms a token."""
    engine, part, cell = plan_of(diagnose, sglang(50, 1.0), sglang(150, 3.0))
    assert engine == "sglang" and not part.acceptance
    assert (cell.tokens_per_step, cell.seconds) == (2.5, pytest.approx(0.05))
    assert part.break_even_seconds == pytest.approx(0.02)
    others = (sglang(50, 1.0) + sglang(0, 0, 9, "b"), sglang(150, 3.0) + sglang(900, 9, 9, "b"))
    assert plan_of(diagnose, *others, "--model", "m")[2].seconds == cell.seconds
    of_requests = [
        page.replace("inter_token_latency", "time_per_output_token")
        for page in (sglang(50, 1.0), sglang(150, 3.0))
    ]
    message = "found sglang:time_per_output_token_seconds_count, .* to rise, expected sglang:inter_"
    assert re.search(message, diagnose({"/metrics": turns(*of_requests)}))
    pages = turns(sglang(50, 1.0, 0), sglang(150, 3.0, 0))
    assert "nothing is drafted, and a step of" in diagnose({"/metrics": pages})
    result, _ = diagnose({"/metrics": turns(sglang(50, 1.0), sglang(150, 3.0))}, code=0)
    assert "speculation pays if a step without it takes more than 20.0 ms" in result.output
    assert "start the engine without speculation" not in result.output
