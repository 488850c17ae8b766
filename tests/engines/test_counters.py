"""Counters of vLLM from metrics pages of several versions, and SGLang's responses and logs.

`data/vllm/counters-*.txt` are written by the counters' own class of these vLLM versions
(`SpecDecodingProm`, taken from their wheels and run alone with prometheus_client), after 100 drafts
of 3 tokens, of which 60, 24, 10 and 6 had 0, 1, 2 and 3 accepted. `data/vllm/server-0.32.0-*.txt`
are pages of real servers, without the buckets of histograms: with 4 speculative tokens after two
and four requests, without speculation, and with speculation and --disable-log-stats.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import re
import socket
import threading
import time

import pytest
from paths import DATA as TEST_DATA

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.engines import counters, sglang
from sequoia_plan.engines.chain import tokens_by_length

DATA = TEST_DATA / "vllm"
VERSIONS = sorted(DATA.glob("counters-*.txt"))


@pytest.mark.parametrize("page", VERSIONS, ids=[page.stem for page in VERSIONS])
def test_every_version_counts_the_same(page):
    after, text = counters.fetch(str(page))
    acceptance = counters.chain_acceptance(after, None, str(page), text)
    assert (acceptance.drafts, acceptance.accepted) == (100, (40, 16, 6))
    assert acceptance.source == page.name


def test_there_are_several_versions():
    assert len(VERSIONS) >= 6


def test_a_real_servers_page():
    before, _ = counters.fetch(str(DATA / "server-0.32.0-before.txt"))
    after, page = counters.fetch(str(DATA / "server-0.32.0-after.txt"))
    total = counters.chain_acceptance(after, page=page)
    since_before = counters.chain_acceptance(after, before)
    assert 0 < since_before.drafts < total.drafts and len(total.accepted) == 4
    assert sum(total.accepted) == after["vllm:spec_decode_num_accepted_tokens"]
    first = f"{counters.ACCEPTED_PER_POSITION}[0]"
    assert since_before.accepted[0] == after[first] - before[first]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("plain", "vLLM counts no speculation; start the server with"),
        ("silent", "holds no metrics of vLLM; start the"),
    ],
)
def test_a_real_server_that_counts_nothing(name, message):
    after, page = counters.fetch(str(DATA / f"server-0.32.0-{name}.txt"))
    with pytest.raises(SequoiaPlanError, match=message):
        counters.chain_acceptance(after, None, name, page)


def test_drafts_that_are_looked_up_are_not_in_every_step():
    """A server with ngram: of 300 steps 100 drafted, two of three tokens on average."""
    page = (DATA / "counters-0.27.1.txt").read_text().replace("} 300.0", "} 200.0")
    page += (
        "vllm:generation_tokens_total 372.0\n"
        "vllm:time_to_first_token_seconds_count 10.0\n"
        "vllm:time_to_first_token_seconds_sum 99.0\n"
    )
    acceptance = counters.chain_acceptance(counters.parse(page), None, "p")
    assert acceptance.drafting_share == pytest.approx(1 / 3, abs=1e-4)
    assert acceptance.source == "p; chains of 2.0 tokens on average, 3 at most"
    mean = tokens_by_length(acceptance, 3).mean
    assert mean[3] == pytest.approx(1 + 62 / 300, abs=0.005) and mean[0] == 1


def test_several_engines_add_up_and_labels_may_hold_anything():
    page = (DATA / "counters-0.27.1.txt").read_text()
    odd_name = r'model_name="a \"b\", position=\"9\"} 3"'
    odd_page = page.replace('engine="0"', 'engine="1"').replace('model_name="target"', odd_name)
    acceptance = counters.chain_acceptance(counters.parse(page + odd_page))
    assert acceptance.accepted == (80, 32, 12)


@pytest.mark.parametrize(
    ("page", "message"),
    [
        (
            "",
            "p: holds no metrics of vLLM; start the server without --disable-log-stats "
            "and read its /metrics page",
        ),
        ("# HELP python_info x\npython_info 1.0\n", "p: holds no metrics of vLLM"),
        (
            "vllm:num_requests_running 0.0\n",
            "p: vLLM counts no speculation; start the server with --speculative-config",
        ),
        # the counters of vLLM 0.9's first engine, vllm/engine/metrics.py there
        (
            "vllm:spec_decode_draft_acceptance_rate 0.4\n"
            "vllm:spec_decode_num_accepted_tokens_total 4.0\n"
            "vllm:spec_decode_num_emitted_tokens_total 9.0\n",
            "p: found vllm:spec_decode_draft_acceptance_rate, "
            "vllm:spec_decode_num_accepted_tokens, vllm:spec_decode_num_emitted_tokens, expected "
            "vllm:spec_decode_num_drafts and vllm:spec_decode_num_accepted_tokens_per_pos; "
            "this version counts otherwise",
        ),
        (
            "COUNTERS 100.0=0.0 40.0=0.0 16.0=0.0 6.0=0.0 62.0=0.0",
            "p: no drafts were counted; send the server requests",
        ),
        (
            'COUNTERS position="1"=position="7"',
            "p: vllm:spec_decode_num_accepted_tokens_per_pos has the positions [0, 2, 7], "
            "expected 0 to 2; read the whole",
        ),
        (
            "COUNTERS 62.0=99.0",
            "adds up to 62, vllm:spec_decode_num_accepted_tokens is 99; "
            "this version counts otherwise",
        ),
        (
            "COUNTERS 16.0=41.0 62.0=87.0",
            "p: acceptance.accepted: found 41 after 40, expected no more at a later position",
        ),
    ],
)
def test_pages_that_tell_nothing(page, message):
    if page.startswith("COUNTERS"):
        words, page = page.split()[1:], (DATA / "counters-0.27.1.txt").read_text()
        for word in words:
            if "position" in word:
                old, new = 'position="1"', 'position="7"'
            else:
                old, new = word.split("=")
            assert old in page
            page = page.replace(old, new)
    with pytest.raises(SequoiaPlanError) as caught:
        counters.chain_acceptance(counters.parse(page), None, "p", page)
    assert message in str(caught.value)


def test_a_server_that_was_started_anew():
    after = counters.parse((DATA / "counters-0.27.1.txt").read_text())
    before = {name: value + 1 for name, value in after.items()}
    message = "m: the counters are lower than before; the server was started anew"
    with pytest.raises(SequoiaPlanError, match=message):
        counters.chain_acceptance(after, before, "m")


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
    after, page = counters.fetch(server + path)
    assert counters.chain_acceptance(after, None, server, page).drafts == 100


@pytest.mark.parametrize(
    ("address", "message"),
    [
        (
            "SERVER/v1",
            r"/v1: .*/v1/metrics cannot be read \(Not Found\); name a running vLLM server",
        ),
        ("http://127.0.0.1:9", r"127.0.0.1:9/metrics cannot be read \(.*refused\)"),
        (
            "none.txt",
            r"none.txt: cannot be read \(No such file or directory\); "
            "expected a metrics page of vLLM",
        ),
    ],
)
def test_a_page_that_cannot_be_read(server, address, message):
    with pytest.raises(SequoiaPlanError, match=message):
        counters.fetch(address.replace("SERVER", server))


def served(answers):
    """The address of a server that sends these bytes, one after the other, a tenth of a second
    apart, whatever it is asked."""
    listening = socket.create_server(("127.0.0.1", 0))

    def answer():
        with listening, listening.accept()[0] as connection, contextlib.suppress(OSError):
            connection.recv(1 << 16)
            for data in answers:
                connection.sendall(data)
                time.sleep(0.1)

    threading.Thread(target=answer, daemon=True).start()
    return f"http://127.0.0.1:{listening.getsockname()[1]}"


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([b"SSH-2.0-OpenSSH_9.6\r\n"], "cannot be read (SSH-2.0-OpenSSH_9.6)"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nx"], "cannot be read (IncompleteRead"),
        ([], "cannot be read ("),
        ([b"HTTP/1.1 200 OK\r\n\r\n", *[b"x"] * 50], "cannot be read (no whole answer within"),
        ([b"HTTP/1.1 200 OK\r\nX: ", *[b"x"] * 50], "cannot be read (no whole answer within"),
    ],
)
def test_a_server_that_is_none_or_never_ends(monkeypatch, answers, message):
    """One deadline for the whole answer: the last two send something before each single one."""
    monkeypatch.setattr(counters, "TIMEOUT_SECONDS", 1)
    with pytest.raises(SequoiaPlanError) as refused:
        counters.fetch(served(answers))
    assert message in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("value", ["NaN", "+Inf", "1e999"])
def test_counters_that_are_no_numbers(tmp_path, value):
    page = (DATA / "counters-0.27.1.txt").read_text()
    lines = [
        re.sub(r"\S+$", value, line) if line.startswith(counters.NUM_DRAFTS) else line
        for line in page.splitlines()
    ]
    (tmp_path / "page").write_text("\n".join(lines))
    with pytest.raises(SequoiaPlanError, match=r"num_drafts\S* is (nan|inf), expected a count"):
        counters.fetch(str(tmp_path / "page"))


# No SGLang is run. The fields are those of its `tokenizer_manager.py`, and the lines are those that
# its `metrics_reporter.py` writes.


def response(histogram, name="spec_correct_drafts_histogram"):
    steps, drafts = sum(histogram), sum(n * count for n, count in enumerate(histogram))
    meta = {
        "id": "a",
        "prompt_tokens": 9,
        "completion_tokens": steps + drafts,
        "spec_verify_ct": steps,
        "spec_accept_length": (steps + drafts) / steps,
    }
    return {"text": "...", "meta_info": {**meta, name: histogram}}


@pytest.mark.parametrize("layout", ["lines", "list", "one", "chat"])
def test_responses_add_up(tmp_path, layout):
    responses = [response([60, 24, 10, 6]), response([30, 10], "spec_accept_histogram")]
    file = tmp_path / "r.json"
    if layout == "lines":
        file.write_text("\n".join(map(json.dumps, responses)))
    elif layout == "list":
        file.write_text(json.dumps(responses, indent=1))
    elif layout == "chat":
        file.write_text(json.dumps({"choices": responses}, indent=1))
    else:
        file.write_text(json.dumps({"choices": [responses[0]]}, indent=1))
    acceptance = sglang.read_responses(str(file))
    expected = (100, (40, 16, 6)) if layout == "one" else (140, (50, 16, 6))
    assert (acceptance.drafts, acceptance.accepted) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no", "r.json: not JSON; expected responses of SGLang"),
        (
            '{"text": "a", "meta_info": {"completion_tokens": 4}}',
            "r.json: no response has meta_info.spec_correct_drafts_histogram; "
            "ask a server that runs with",
        ),
        (
            '{"meta_info": {"spec_correct_drafts_histogram": [3, "x"]}}',
            "r.json: found the histogram [3, 'x'], expected a list of counts",
        ),
        (
            '{"meta_info": {"spec_correct_drafts_histogram": [7]}}',
            "r.json: no drafted token was accepted in 7 steps",
        ),
    ],
)
def test_responses_that_tell_nothing(tmp_path, text, message):
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(SequoiaPlanError) as caught:
        sglang.read_responses(str(tmp_path / "r.json"))
    assert message in str(caught.value)


SERVER_ARGS = (
    "[2026-11-02 05:49:01] server_args=ServerArgs(model_path='m', speculative_num_steps={}, "
    "speculative_eagle_topk={}, tp_size=1)\n"
)


def decode_line(batch, throughput, accept_length=None):
    acceptance = ""
    if accept_length:
        acceptance = f"accept len: {accept_length:.2f}, accept rate: 0.42, "
    return (
        f"[2026-11-02 05:49:05] Decode batch. #running-req: {batch}, #token: 541, "
        f"token usage: 0.03, {acceptance}cuda graph: True, "
        f"gen throughput (token/s): {throughput}, #queue-req: 0, \n"
    )


def test_lines_of_a_log_with_broken_numbers_are_left_out(tmp_path):
    """Processes write into each other's lines."""
    path = tmp_path / "s.log"
    broken = [
        decode_line(4, "1.2.3"),
        decode_line(4, "9" * 400),
        decode_line("9" * 5000, 3),
        decode_line(4, 9.0, 1.5).replace("1.50", "1.5.0"),
    ]
    path.write_text(SERVER_ARGS.format("None", "None") + "".join(broken) + decode_line(2, 30.0) * 3)
    (step,) = sglang.read_log(str(path)).steps
    assert (step.batch, step.seconds) == (2, pytest.approx(2 / 30))
    path.write_text(SERVER_ARGS.format("9" * 5000, 1) + decode_line(2, 30.0, 1.5) * 3)
    with pytest.raises(SequoiaPlanError, match=r"speculative_num_steps=9999.*expected at most"):
        sglang.read_log(str(path))


def test_a_log_gives_step_times(tmp_path):
    path = tmp_path / "s.log"
    lines = [
        decode_line(1, 3.1, 1.9),
        decode_line(1, 40.0, 2.0),
        decode_line(4, 9.9, 1.5),
        decode_line(4, 120.0, 1.5),
        decode_line(4, 125.0, 1.5),
    ]
    path.write_text(SERVER_ARGS.format(3, 1) + "".join(lines) + "INFO: x\n")
    log = sglang.read_log(str(path))
    assert log.speculative_tokens == 3 and log.accept_lengths == {1: 2.0, 4: 1.5}
    first, second = log.steps
    # the first line after a change of the number of requests is a mix
    assert (first.batch, first.speculative_tokens, first.steps) == (1, 3, 40)
    assert (second.batch, second.speculative_tokens, second.steps) == (4, 3, 80)
    assert first.seconds == pytest.approx(1 * 2.0 / 40)
    assert second.seconds == pytest.approx((4 * 1.5 / 120 + 4 * 1.5 / 125) / 2)
    path.write_text(SERVER_ARGS.format("None", "None") + decode_line(2, 30.0) * 3)
    log = sglang.read_log(str(path))
    assert log.speculative_tokens == 0
    (step,) = log.steps
    assert step.seconds == pytest.approx(2 / 30)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing\n", "no line 'Decode batch ... gen throughput (token/s)'"),
        (
            decode_line(1, 4.0, 2.0) * 2,
            "does not say speculative_num_steps; expected a log from the server's start on",
        ),
        (
            SERVER_ARGS.format(3, 4) + decode_line(1, 4.0, 2.0) * 2,
            "ran with --speculative-eagle-topk 4, a tree; expected 1, a chain",
        ),
        (
            SERVER_ARGS.format(3, 1) + decode_line(1, 4.0) * 2,
            "ran with 3 speculative tokens, but no line has 'accept len'",
        ),
        (
            SERVER_ARGS.format(3, 1) + decode_line(1, 4.0, 2.0) + decode_line(2, 4.0, 2.0),
            "no two 'Decode batch' lines in a row with the same #running-req",
        ),
    ],
)
def test_logs_that_tell_nothing(tmp_path, text, message):
    (tmp_path / "s.log").write_text(text)
    with pytest.raises(SequoiaPlanError) as caught:
        sglang.read_log(str(tmp_path / "s.log"))
    assert message in str(caught.value)


def test_one_rate_for_all_positions():
    acceptance = sglang.acceptance_from_mean(1 + 0.6 + 0.36 + 0.216, 3, 1000)
    assert acceptance.survival == pytest.approx((0.6, 0.36, 0.216), abs=1e-3)
    for wrong in (1.0, 4.0, 0.5):
        with pytest.raises(SequoiaPlanError, match="expected more than 1 and less than 4"):
            sglang.acceptance_from_mean(wrong, 3, 1000)
