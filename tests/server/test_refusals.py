"""What the endpoint refuses, and that it lives on: nothing is left in the next text."""

import http.client
import json
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.server import serve

pytestmark = pytest.mark.slow

HEADERS = {"Authorization": "Bearer the key"}
CHAT, NATIVE = "/v1/chat/completions", "/completion"
QUESTION = '{"prompt": "The sky is", "n_predict": 12, "temperature": 0}'
LONG = '{"prompt": "Once", "temperature": 1, "seed": 3, "n_predict": 4000, "stream": %s, %s}'
GRAMMAR = '"grammar": "root ::= (\\"a\\" | \\"b\\")*"'


@pytest.fixture
def connect(url):
    """A function: a new connection to the server."""
    return lambda: http.client.HTTPConnection(url.removeprefix("http://"), timeout=120)


@pytest.fixture
def ask(connect):
    """A function: status and JSON of an answer to a request on a connection of its own."""

    def ask_once(path, body=None, headers=HEADERS):
        connection = connect()
        connection.request("POST" if body else "GET", path, body, headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())

    return ask_once


WRONG = """
chat | {} | 400 | messages: found []
chat | {"messages": "x"} | 400 | messages: found 'x': Expected `array`
chat | {"messages": [{"role": "user", "content": [{}]}]} | 400 | messages: found
chat | {"messages": [{"role": "user"}], "temperature": "hot"} | 400 | temperature: found 'hot'
chat | {"messages": [{"role": "user"}], "temperature": -1} | 400 | temperature: found -1
chat | {"messages": [{"role": "user"}], "max_tokens": -2} | 400 | max_tokens: found -2
chat | {"messages": [{"role": "user"}], "tool_choice": "required"} | 400 | tool_choice: found 'requ
chat | {"messages": [{"role": "user"}], "response_format": {"type": "xml"}} | 400 | response_format
chat | {"messages": [{"role": "user"}], "json_schema": {"type": "x"}} | 400 | json_schema: found
chat | {"messages": [{"role": "user"}], "stop": [""]} | 400 | stop_strings: found ['']
chat | {"messages": [{"role": "user"}], "n": 0} | 400 | n: found 0
chat | {"messages": [{"role": "user"}], "logit_bias": {"99999": 1}} | 400 | tokens: found [99999]
text | {"prompt": ""} | 400 | prompt: found 0 tokens
text | {"prompt": [1, "x"]} | 400 | prompt: found 1, expected a text or token ids
text | {"prompt": [49152]} | 400 | tokens: found [49152]
infill | {"input_prefix": "x"} | 400 | suffix: the model has no markers
text | { | 400 | body
text | [] | 400 | body
text | {"prompt": "\\ud800"} | 400 | body
nothing | {} | 404 | Not Found
health | {} | 405 | Method Not Allowed
"""
PATHS = {"chat": CHAT, "text": NATIVE}


@pytest.mark.parametrize("line", WRONG.strip().splitlines())
def test_wrong_requests_are_refused(ask, line):
    path, body, status, words = line.split(" | ")
    found, answer = ask(PATHS.get(path, f"/{path}"), body)
    error = answer["error"]
    assert found == error["code"] == int(status) and words in error["message"], error
    assert set(error) == {"message", "type", "param", "code"}


def test_large_bodies_are_refused(ask):
    assert ask(NATIVE, "[" * 100_000)[0] == 400
    assert ask(NATIVE, " " * (16 * 2**20 + 1))[0] == 413
    assert ask(NATIVE, json.dumps({"prompt": [5] * 8192}))[0] == 400


def test_the_key_is_asked_everywhere_but_at_health(ask):
    assert ask("/health", headers={}) == (200, {"status": "ok"})
    for path, body in (("/props", None), (NATIVE, QUESTION)):
        for headers in ({}, {"Authorization": "Bearer the kez"}, {"Authorization": "Bearer \xff"}):
            status, answer = ask(path, body, headers)
            assert status == 401 and answer["error"]["param"] == "Authorization"


def test_only_the_named_origin_may_ask_from_a_browser(connect):
    for origin, allowed in (("http://page.example", True), ("http://other.example", False)):
        connection = connect()
        connection.request("GET", "/health", headers={"Origin": origin})
        headers = connection.getresponse().headers
        assert (headers["Access-Control-Allow-Origin"] == origin) is allowed


def test_a_flood_of_headers_ends_the_connection_alone(connect, ask):
    connection = connect()
    with pytest.raises(OSError, match=r"reset|pipe"):
        connection.request("GET", "/health", headers={f"X-{i}": "x" * 1000 for i in range(9999)})
    assert ask("/health")[0] == 200


@pytest.mark.parametrize("is_streamed", ["true", "false"])
def test_a_client_that_goes_away_ends_its_text_alone(worker, connect, ask, is_streamed):
    """Nothing of it is left: not its grammar, its seed, nor its sampling."""
    before = ask(NATIVE, QUESTION)[1]["content"]
    count = worker.totals["generation_tokens_total"]
    connection = connect()
    connection.request("POST", NATIVE, LONG % (is_streamed, GRAMMAR), HEADERS)
    while worker.totals["generation_tokens_total"] == count:
        assert ask("/health")[0] == 200
    connection.sock.shutdown(socket.SHUT_RDWR)
    with ThreadPoolExecutor(5) as pool:  # clients that wait for it to end, and for each other
        answers = [*pool.map(lambda _: ask(NATIVE, QUESTION)[1]["content"], range(5))]
    assert answers == [before] * 5
    assert worker.totals["generation_tokens_total"] - count < 2000


def test_health_says_so_while_models_are_loaded():
    """And an address that is taken is refused before they are."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SequoiaPlanError, match=f"--port {port}.*name another --port"):
            serve(pytest.fail, port=port)
    statuses = []

    def load():
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", "/health")
        statuses.append(connection.getresponse().status)
        raise InterruptedError

    with pytest.raises(InterruptedError):
        serve(load, port=port)
    assert statuses == [503]
