"""What the endpoint refuses, and that it lives on: nothing is left in the next text."""

import http.client
import json
import socket
import threading

import pytest

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.server import serve

pytestmark = pytest.mark.slow

HEADERS = {"Authorization": "Bearer the key"}
CHAT, NATIVE = "/v1/chat/completions", "/completion"
HELLO = [{"role": "user", "content": "Hello"}]
LONG = {"prompt": "Once", "temperature": 1, "seed": 3, "n_predict": 4000, "stream": True}


@pytest.fixture
def connect(url):
    """A function: a new connection to the server."""
    return lambda: http.client.HTTPConnection(url.removeprefix("http://"), timeout=120)


@pytest.fixture
def ask(connect):
    """A function: status and JSON of an answer to a request on a connection of its own."""

    def ask_once(path, body=None, headers=HEADERS):
        data = json.dumps(body) if isinstance(body, dict) else body
        connection = connect()
        connection.request("GET" if body is None else "POST", path, data, headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())

    return ask_once


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        (CHAT, {}, 400, "messages: found []"),
        (CHAT, {"messages": "x"}, 400, "messages: found 'x': Expected `array`"),
        (CHAT, {"messages": [{"role": "user", "content": [{}]}]}, 400, "messages"),
        (CHAT, {"messages": HELLO, "temperature": "hot"}, 400, "temperature: found 'hot'"),
        (CHAT, {"messages": HELLO, "temperature": -1}, 400, "temperature: found -1"),
        (CHAT, {"messages": HELLO, "max_tokens": -2}, 400, "max_tokens: found -2"),
        (CHAT, {"messages": HELLO, "tool_choice": "required"}, 400, "tool_choice: found"),
        (CHAT, {"messages": HELLO, "response_format": {"type": "xml"}}, 400, "response_f"),
        (CHAT, {"messages": HELLO, "json_schema": {"type": "x"}}, 400, "json_schema: found"),
        (CHAT, {"messages": HELLO, "stop": [""]}, 400, "stop_strings: found ['']"),
        (CHAT, {"messages": HELLO, "n": 0}, 400, "n: found 0"),
        (CHAT, {"messages": HELLO, "logit_bias": {"99999": 1}}, 400, "tokens: found [99999]"),
        (NATIVE, {"prompt": ""}, 400, "prompt: found 0 tokens"),
        (NATIVE, {"prompt": [1, "x"]}, 400, "prompt: found 1, expected a text or token ids"),
        (NATIVE, {"prompt": [49152]}, 400, "tokens: found [49152]"),
        (NATIVE, {"prompt": [5] * 8192}, 400, "prompt: found 8192 tokens, expected 1 to 8191"),
        ("/infill", {"input_prefix": "x"}, 400, "suffix: the model has no markers"),
        (NATIVE, "{", 400, "body"),
        (NATIVE, "[" * 100_000, 400, "body"),
        (NATIVE, "[]", 400, "body"),
        (NATIVE, b'{"prompt": "\xff"}', 400, "body"),
        (NATIVE, b" " * (16 * 2**20 + 1), 413, "body: more than 16777216 bytes"),
        ("/nothing", None, 404, "Not Found"),
        (CHAT, None, 405, "Method Not Allowed"),
    ],
)  # fmt: skip
def test_wrong_requests_are_refused(ask, path, body, status, words):
    found, answer = ask(path, body)
    error = answer["error"]
    assert (found, error["code"]) == (status, status) and words in error["message"], error
    assert set(error) == {"message", "type", "param", "code"}


def test_the_key_is_asked_everywhere_but_at_health(ask):
    assert ask("/health", headers={}) == (200, {"status": "ok"})
    for path, body in (("/props", None), (NATIVE, {"prompt": "x"})):
        for headers in ({}, {"Authorization": "Bearer the kez"}, {"Authorization": "Bearer \xff"}):
            status, answer = ask(path, body, headers)
            assert status == 401 and answer["error"]["type"] == "authentication_error"


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


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_client_that_goes_away_ends_its_text_alone(worker, connect, ask, is_streamed):
    """Nothing of it is left: not its grammar, its seed, nor its sampling."""
    question = {"prompt": "The sky is", "n_predict": 12, "temperature": 0}
    before = ask(NATIVE, question)[1]["content"]
    count = worker.totals["generation_tokens_total"]
    connection = connect()
    body = LONG | {"stream": is_streamed, "grammar": 'root ::= ("a" | "b")*'}
    connection.request("POST", NATIVE, json.dumps(body), HEADERS)
    if is_streamed:
        assert connection.getresponse().readline().startswith(b"data: ")
    else:
        while worker.totals["generation_tokens_total"] == count:
            assert ask("/health")[0] == 200
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
    assert ask(NATIVE, question)[1]["content"] == before  # it waited for the other to end
    assert worker.totals["generation_tokens_total"] - count < LONG["n_predict"] / 2


def test_several_clients_at_once_are_answered_in_turn(ask):
    question = {"prompt": "The sky is", "n_predict": 12, "temperature": 0}
    expected, answers = ask(NATIVE, question)[1]["content"], []
    threads = [
        threading.Thread(target=lambda: answers.append(ask(NATIVE, question)[1]["content"]))
        for _ in range(5)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [expected] * 5


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
