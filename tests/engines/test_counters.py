"""Counters of vLLM from metrics pages of several versions.

`data/vllm/counters-*.txt` are written by the counters' own class of these vLLM versions
(`SpecDecodingProm`, taken from their wheels and run alone with prometheus_client), after 100 drafts
of 3 tokens, of which 60, 24, 10 and 6 had 0, 1, 2 and 3 accepted. `data/vllm/server-0.32.0-*.txt`
are pages of real servers, without the buckets of histograms: with 4 speculative tokens after two
and four requests, without speculation, and with speculation and --disable-log-stats.
"""

from __future__ import annotations

import contextlib
import http.server
import socket
import threading

import pytest
from paths import DATA as TEST_DATA

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.engines.chain import ChainModel
from sequoia_plan.engines.counters import NUM_ACCEPTED, chain_acceptance, fetch, parse

DATA = TEST_DATA / "vllm"
VERSIONS = sorted(DATA.glob("counters-*.txt"))
PAGE = (DATA / "counters-0.27.1.txt").read_text()


@pytest.mark.parametrize("page", VERSIONS, ids=[page.stem for page in VERSIONS])
def test_every_version_counts_the_same(page):
    acceptance = chain_acceptance(fetch(str(page)), str(page))
    assert (acceptance.drafts, acceptance.accepted) == (100, (40, 16, 6))
    assert acceptance.source == page.name and len(VERSIONS) >= 6


def test_a_real_servers_page():
    counters = fetch(str(DATA / "server-0.32.0-after.txt"))
    acceptance = chain_acceptance(counters, "page")
    assert len(acceptance.accepted) == 4 and 0 < acceptance.drafting_share <= 1
    assert sum(acceptance.accepted) == counters[NUM_ACCEPTED]


@pytest.mark.parametrize("name", ["plain", "silent"])
def test_a_real_server_that_counts_nothing(name):
    with pytest.raises(SequoiaPlanError, match="counts no speculation there; start the server"):
        chain_acceptance(fetch(str(DATA / f"server-0.32.0-{name}.txt")), name)


def test_drafts_that_are_looked_up_are_not_in_every_step():
    """A server with ngram: of 300 steps 100 drafted, two of three tokens on average."""
    page = PAGE.replace("} 300.0", "} 200.0")
    page += (
        "vllm:generation_tokens_total 372.0\n"
        "vllm:time_to_first_token_seconds_count 10.0\n"
        "vllm:time_to_first_token_seconds_sum 99.0\n"
    )
    acceptance = chain_acceptance(parse(page), "p")
    assert acceptance.drafting_share == pytest.approx(1 / 3, abs=1e-4)
    assert acceptance.source == "p; chains of 2.0 tokens on average, 3 at most"
    mean = ChainModel(acceptance, 3).tokens_by_length.mean
    assert mean[3] == pytest.approx(1 + 62 / 300, abs=0.005) and mean[0] == 1


def test_several_engines_add_up_and_labels_may_hold_anything():
    odd_name = r'model_name="a \"b\", position=\"9\"} 3"'
    odd_page = PAGE.replace('engine="0"', 'engine="1"').replace('model_name="target"', odd_name)
    assert chain_acceptance(parse(PAGE + odd_page), "p").accepted == (80, 32, 12)


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("# HELP python_info x\npython_info 1.0\nversion 1.2.3\n", "p: vLLM counts no speculation"),
        # the counters of vLLM 0.9's first engine, vllm/engine/metrics.py there
        (
            "vllm:spec_decode_draft_acceptance_rate 0.4\n"
            "vllm:spec_decode_num_accepted_tokens_total 4.0\n",
            "p: found vllm:spec_decode_draft_acceptance_rate, .*this version counts otherwise",
        ),
        (PAGE.replace('position="1"', 'position="7"'), "from position 0 on"),
        (PAGE.replace("} 62.0", "} 99.0"), "this version counts otherwise"),
        (PAGE.replace("} 16.0", "} 41.0").replace("} 62.0", "} 87.0"), "found 41 after 40"),
        (
            PAGE.replace("} 100.0", "} 0.0")
            .replace("} 40.0", "} 0.0")
            .replace("} 16.0", "} 0.0")
            .replace("} 6.0", "} 0.0")
            .replace("} 62.0", "} 0.0"),
            "p: no drafts were counted; send the server requests",
        ),
    ],
)
def test_pages_that_tell_nothing(page, message):
    assert page != PAGE
    with pytest.raises(SequoiaPlanError, match=message):
        chain_acceptance(parse(page), "p")


@pytest.fixture
def server():
    """A web server that answers /metrics with a page."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write((DATA / "counters-0.20.2.txt").read_bytes())

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("path", ["", "/", "/metrics"])
def test_a_server_is_read_by_its_address(server, path):
    assert chain_acceptance(fetch(server + path), server).drafts == 100


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("SERVER/v1", r"/v1/metrics cannot be read \(Not Found\); name a running vLLM server"),
        ("http://127.0.0.1:9", r"127.0.0.1:9/metrics cannot be read \(.*refused\)"),
        ("none.txt", r"none.txt: cannot be read \(No such file or directory\)"),
    ],
)
def test_a_page_that_cannot_be_read(server, address, message):
    with pytest.raises(SequoiaPlanError, match=message):
        fetch(address.replace("SERVER", server))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", r"cannot be read \(SSH-2.0-OpenSSH_9.6\)"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nx", r"cannot be read \(IncompleteRead"),
        (b"", r"cannot be read \("),
    ],
)
def test_a_server_that_is_none_or_ends_early(answer, message):
    listening = socket.create_server(("127.0.0.1", 0))

    def reply():
        with listening, listening.accept()[0] as connection, contextlib.suppress(OSError):
            connection.recv(1 << 16)
            connection.sendall(answer)

    threading.Thread(target=reply, daemon=True).start()
    with pytest.raises(SequoiaPlanError, match=message) as refused:
        fetch(f"http://127.0.0.1:{listening.getsockname()[1]}")
    assert "\n" not in str(refused.value)
