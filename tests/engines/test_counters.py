"""Counters of vLLM from metrics pages of several versions.

`data/vllm/counters-*.txt` are written by the counters' own class of these vLLM versions
(`SpecDecodingProm`, taken from their wheels and run alone with prometheus_client), after 100 drafts
of 3 tokens, of which 60, 24, 10 and 6 had 0, 1, 2 and 3 accepted. `data/vllm/server-0.32.0-*.txt`
are pages of real servers, without the buckets of histograms: with 4 speculative tokens after two
and four requests, without speculation, and with speculation and --disable-log-stats.
"""

import contextlib
import socket
import threading
from dataclasses import replace

import pytest
from paths import DATA as TEST_DATA

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.engines.chain import ChainModel
from sequoia_plan.engines.counters import chain_acceptance, fetch, parse, watch
from sequoia_plan.engines.live import diagnose_steps

DATA = TEST_DATA / "vllm"
VERSIONS = sorted(DATA.glob("counters-*.txt"))
PAGE = (DATA / "counters-0.27.1.txt").read_text()


@pytest.mark.parametrize("page", VERSIONS, ids=[page.stem for page in VERSIONS])
def test_every_version_counts_the_same(page):
    acceptance = chain_acceptance(parse(page.read_text()), str(page))
    assert (acceptance.drafts, acceptance.accepted) == (100, (40, 16, 6))
    assert len(VERSIONS) >= 6


def test_a_real_servers_page():
    counters = parse((DATA / "server-0.32.0-after.txt").read_text())
    acceptance = chain_acceptance(counters, "page")
    assert len(acceptance.accepted) == 4 and 0 < acceptance.drafting_share <= 1
    assert sum(acceptance.accepted) == counters["vllm:spec_decode_num_accepted_tokens"]


def test_drafts_that_are_looked_up_are_not_in_every_step():
    """A server with ngram: of 300 steps 100 drafted."""
    page = f"{PAGE}vllm:inter_token_latency_seconds_count 300\n"
    acceptance = chain_acceptance(parse(page), "p")
    assert acceptance.drafting_share == pytest.approx(1 / 3, abs=1e-4)
    tokens = ChainModel(acceptance, 3).tokens_and_error
    assert tokens[3][0] == pytest.approx(1 + 62 / 300, abs=0.005) and tokens[0][0] == 1


def test_several_engines_add_up_and_labels_may_hold_anything():
    odd_name = r'model_name="a \"b\", position=\"9\"} 3"'
    odd_page = PAGE.replace('engine="0"', 'engine="1"').replace('model_name="target"', odd_name)
    assert chain_acceptance(parse(PAGE + odd_page), "p").accepted == (80, 32, 12)


@pytest.mark.parametrize(
    ("page", "message"),
    [
        *(
            ((DATA / f"server-0.32.0-{name}.txt").read_text(), "p: found no counters of speculat")
            for name in ("plain", "silent")
        ),
        # the counters of vLLM 0.9's first engine, vllm/engine/metrics.py there
        ("vllm:spec_decode_draft_acceptance_rate 0.4\n", "found vllm:spec_decode_draft_acceptance"),
        (PAGE.replace('position="0"', 'position="7"'), "from position 0 on"),
        (PAGE.replace("} 100.0", "} 0.0"), "expected vllm:spec_decode_num_drafts above 0"),
        (
            PAGE.replace("} 16.0", "} 41.0").replace("} 62.0", "} 87.0"),
            "found .40, 41, 6. of 100 drafts",
        ),
    ],
)
def test_pages_that_tell_nothing(page, message):
    assert page != PAGE
    with pytest.raises(SequoiaPlanError, match=message):
        chain_acceptance(parse(page), "p")


@pytest.fixture
def answering():
    """Starts a server that gives each connection an answer, and returns its address."""

    def start(*answers):
        listening = socket.create_server(("127.0.0.1", 0))

        def reply():
            for answer in answers:
                with listening.accept()[0] as connection, contextlib.suppress(OSError):
                    is_page = connection.recv(1 << 16).startswith(b"GET /metrics ")
                    connection.sendall(answer if is_page else b"HTTP/1.1 404 Not Found\r\n\r\n")
            listening.close()

        threading.Thread(target=reply, daemon=True).start()
        return f"http://127.0.0.1:{listening.getsockname()[1]}"

    return start


def page_of(name):
    return b"HTTP/1.1 200 OK\r\n\r\n" + (DATA / f"{name}.txt").read_bytes()


def test_the_steps_between_two_readings(answering):
    """The server decoded two requests of 40 tokens; 48 chains of 4, 34 tokens accepted."""
    steps = watch(answering(page_of("server-0.32.0-before"), page_of("server-0.32.0-after")), 0.01)
    assert steps.seconds == pytest.approx((134.431 - 57.111) / 48, rel=1e-4)
    assert steps.tokens == pytest.approx(78 / 48) and steps.requests > 2
    (part,) = diagnose_steps(steps, "http://x").contexts
    assert (part.acceptance.drafts, part.acceptance.accepted) == (48, (21, 9, 3, 1))
    assert part.break_even_seconds == pytest.approx(steps.seconds / steps.tokens)
    with pytest.raises(SequoiaPlanError, match="nothing is drafted, and a step of"):
        diagnose_steps(replace(steps, acceptance=None), "http://x")
    with pytest.raises(SequoiaPlanError, match="no token was decoded in 0"):
        watch(answering(*[page_of("server-0.32.0-plain")] * 2), 0.01)


@pytest.mark.parametrize("path", ["", "/", "/metrics"])
def test_a_server_is_read_by_its_address(answering, path):
    address = answering(page_of("counters-0.20.2"))
    assert chain_acceptance(fetch(address + path), "s").drafts == 100


@pytest.mark.parametrize(
    ("path", "answer", "message"),
    [
        ("/v1", b"", r"/v1/metrics cannot be read \(.*Not Found"),
        ("", b"SSH-2.0-OpenSSH_9.6\r\n", r"cannot be read \(.*SSH-2.0-OpenSSH_9.6"),
        ("", b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nx", r"cannot be read \(IncompleteRead"),
        ("", b"", r"cannot be read \(.*; name a running vLLM server"),
    ],
)
def test_a_server_that_is_none_or_ends_early(answering, path, answer, message):
    with pytest.raises(SequoiaPlanError, match=message) as refused:
        fetch(answering(answer) + path)
    assert "\n" not in str(refused.value)
