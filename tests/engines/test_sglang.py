"""Plans from SGLang's responses and logs.

No SGLang is run. The fields are those of its `tokenizer_manager.py`.
"""

import json

import pytest
from click.testing import CliRunner
from sglang_logs import SERVER_ARGS, decode_line, write_log

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.engines import sglang
from sequoia_plan.engines.plan import EnginePlan
from sequoia_plan.planner.cli import main


def response(histogram):
    meta_info = {"id": "a", "spec_correct_drafts_histogram": histogram}
    return {"text": '"spec_correct_drafts_histogram": [9, 9]', "meta_info": meta_info}


@pytest.mark.parametrize("layout", ["lines", "list", "chat"])
def test_responses_add_up(tmp_path, layout):
    responses = [response([60, 24, 10, 6]), response([30, 10])]
    text = {
        "lines": "\n".join(map(json.dumps, responses)),
        "list": json.dumps(responses, indent=1),
        "chat": json.dumps({"choices": responses}),
    }[layout]
    (tmp_path / "r.json").write_text(text)
    acceptance = sglang.read_responses(str(tmp_path / "r.json"))
    assert (acceptance.drafts, acceptance.accepted) == (140, (50, 16, 6))


@pytest.mark.parametrize(
    ("histogram", "message"),
    [(None, "no response has a list of counts"), ([3, -1], "no response"), ([7], "accepted: foun")],
)
def test_responses_that_tell_nothing(tmp_path, histogram, message):
    (tmp_path / "r.json").write_text(json.dumps(response(histogram)))
    with pytest.raises(SequoiaPlanError, match=message):
        sglang.read_responses(str(tmp_path / "r.json"))


def test_a_log_gives_step_times(tmp_path):
    """Also where processes write into each other's lines."""
    lines = [
        decode_line(1, 3.1, 1.9),  # the first line after a change of the number of requests
        decode_line(1, 40.0, 2.0),
        decode_line(4, 9.9, 1.5),
        decode_line(4, 120.0, 1.5),
        decode_line(4, "1.2.3", 1.5),
        decode_line("9" * 5000, 3, 1.5),
        decode_line(4, "9" * 400, 1.5),
        decode_line(4, 125.0, 1.5),
        decode_line(4, 9.0, "1.5.0"),
    ]
    (tmp_path / "s.log").write_text(SERVER_ARGS.format(3, 1) + "".join(lines) + "INFO: x\n")
    log = sglang.read_log(str(tmp_path / "s.log"))
    assert log.speculative_tokens == 3 and log.accept_lengths == {1: 2.0, 4: 1.5}
    first, second = log.steps
    assert (first.batch, first.speculative_tokens, first.steps) == (1, 3, 40)
    assert (second.batch, second.speculative_tokens, second.steps) == (4, 3, 80)
    assert first.seconds == pytest.approx(1 * 2.0 / 40)
    assert second.seconds == pytest.approx((4 * 1.5 / 120 + 4 * 1.5 / 125) / 2, rel=1e-5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (decode_line(1, 4.0, 2.0) * 2, "found None, None; expected the log"),
        (SERVER_ARGS.format(3, 4) + decode_line(1, 4.0, 2.0) * 2, "found .*3, .*topk=4; expected"),
        (SERVER_ARGS.format(3, 1) + decode_line(1, 4.0) * 2, "with speculation, an 'accept len'"),
        (
            SERVER_ARGS.format(3, 1) + decode_line(1, 4.0, 2.0) + decode_line(2, 4.0, 2.0),
            "in a row with the same #running-req",
        ),
    ],
)
def test_logs_that_tell_nothing(tmp_path, text, message):
    (tmp_path / "s.log").write_text(text)
    with pytest.raises(SequoiaPlanError, match=message):
        sglang.read_log(str(tmp_path / "s.log"))


@pytest.mark.parametrize(
    ("tokens", "survival"),
    [(1 + 0.6 + 0.36 + 0.216, (0.6, 0.36, 0.216)), (0.9, (0, 0, 0)), (4, (1, 1, 1))],
)
def test_one_rate_for_all_positions(tokens, survival):
    acceptance = sglang.acceptance_from_mean(tokens, 3, 1000)
    assert acceptance.survival == pytest.approx(survival, abs=1e-3)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the command beside logs and responses of servers with 4 requests."""
    monkeypatch.chdir(tmp_path)
    write_log(tmp_path / "plain.log", None, 4, 100.0, None)  # a step takes 40 ms
    write_log(tmp_path / "three.log", 3, 4, 4 * 1.7 / 0.05, 1.7)  # 50 ms
    (tmp_path / "r.jsonl").write_text(json.dumps(response([600, 240, 100, 60])))
    return lambda *words: CliRunner().invoke(main, ["engine", "sglang", *words])


LOGS = ["--log", "plain.log", "--log", "three.log"]


def test_a_plan_from_logs_and_responses(run):
    result = run(*LOGS, "--responses", "r.jsonl", "--batch", "4", "-o", "plan.yaml")
    assert result.exit_code == 0, result.output
    plan = EnginePlan.load("plan.yaml")
    (part,) = plan.contexts
    assert plan.engine == "sglang" and part.acceptance.accepted == (400, 160, 60)
    cells = part.cells_at(4)
    assert [cells[0].seconds, cells[3].seconds] == pytest.approx([0.04, 0.05])
    options = "--speculative-num-steps 3 --speculative-eagle-topk 1 "
    assert part.lines == (f"{options}--speculative-num-draft-tokens 4",)
    assert part.lines[0] in result.stdout and "no SGLang was run" in result.stdout


def test_a_plan_from_logs_alone(run):
    plan = EnginePlan.from_dict(json.loads(run(*LOGS, "--json").stdout), "")
    (part,) = plan.contexts
    assert part.batches == [4]  # those that were timed
    assert part.cells_at(4)[3].tokens_per_step == pytest.approx(1.7, abs=0.01)
    assert "one rate for all positions" in part.acceptance.source


def test_options_and_findings_say_the_same(run, tmp_path):
    """Speculation pays for 1 request and not for 16: only what was asked for has options."""
    for batch, plain, three in ((1, 25.0, 1.7 / 0.042), (16, 400.0, 16 * 1.7 / 0.2)):
        write_log(tmp_path / f"plain{batch}.log", None, batch, plain, None)
        write_log(tmp_path / f"three{batch}.log", 3, batch, three, 1.7)
    logs = [f"--log={name}{batch}.log" for name in ("plain", "three") for batch in (1, 16)]
    both = run(*logs, "--batch", "1,16").stdout
    assert "batch 16: do not speculate" in both and "--speculative-num-steps" in both
    alone = run(*logs, "--batch", "16").stdout
    assert "batch 16: do not speculate" in alone and "--speculative-num-steps" not in alone
    assert "start the engine without speculation" in alone


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([], 2, "Missing option '--log'"),
        ([*LOGS, "--batch", "5"], 2, "--batch 5: steps were timed with 4 to 4 requests; time"),
        (["--log", "plain.log"], 2, "no server ran with speculation"),
        (["--log", "three.log"], 1, "expected 0 and others"),
    ],
)
def test_bad_input_is_one_line(run, words, code, message):
    result = run(*words)
    assert result.exit_code == code and message in result.stderr.strip().splitlines()[-1]
