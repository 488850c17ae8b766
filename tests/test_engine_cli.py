"""`sequoia-plan engine`: from the command line to a plan, with a stand-in for vLLM whose tokens are known, and every kind of bad input."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from msgspec.structs import replace

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.artifacts.engine_plan import EnginePlan, Range
from sequoia_plan.planner.cli import main
from sequoia_plan.planner.engines import vllm
from sequoia_plan.planner.report.engine_page import page
from sequoia_plan.planner.report.engine_table import findings, misses

HERE = Path(__file__).parent
COUNTERS = str(HERE / "data" / "vllm" / "counters-0.27.1.txt")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs `sequoia-plan engine ...` in an empty folder; this Python has the stand-in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(HERE / "stand_in"))
    return lambda *arguments: CliRunner().invoke(main, ["engine", *arguments])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A plan that was measured with the stand-in, its file, its page, and what the command said."""
    folder = tmp_path_factory.mktemp("engine")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("PYTHONPATH", str(HERE / "stand_in"))
        patch.setattr(vllm, "REST", 0.0)  # the stand-in does not look for work in a loop
        words = [
            "--target",
            "works",
            "--draft",
            "d",
            "--python",
            sys.executable,
            "--batch",
            "1,2",
            "--most",
            "3",
            "--limit",
            "12",
            "--tokens",
            "24",
            "--verify",
        ]
        result = CliRunner().invoke(main, ["engine", "vllm", *words, "-o", "plan.yaml", "--report", "page.html"])
    assert result.exit_code == 0, result.output
    return EnginePlan.load(folder / "plan.yaml"), folder / "plan.yaml", (folder / "page.html").read_text(), result.stdout


def test_the_plan_holds_what_the_engine_counted(made):
    plan, file, _, _ = made
    assert (plan.engine, plan.version, plan.method, plan.target, plan.draft) == ("vllm", "0.0.stand-in", "draft_model", "works", "d")
    # of eight steps the stand-in accepts 0 1 0 2 0 0 3 1
    assert plan.acceptance.survival == pytest.approx((4 / 8, 2 / 8, 1 / 8), abs=0.02)
    assert 0 < plan.acceptance.trials <= plan.acceptance.drafts
    assert {(step.batch, step.speculative_tokens) for step in plan.steps} >= {(batch, length) for batch in (1, 2) for length in (0, 1, 3)}
    for batch in (1, 2):
        assert [cell.speculative_tokens for cell in plan.at(batch)] == [0, 1, 2, 3]
        best = plan.best(batch)
        assert best.timed and best.measured and plan.at(batch)[0].measured
        assert best.throughput == max(cell.throughput for cell in plan.at(batch))
        assert best.measured.low <= best.measured.throughput <= best.measured.high and best.measured.runs == 3
    assert EnginePlan.load(file) == plan and plan.to_yaml() == file.read_text()


def test_what_is_said_can_be_pasted(made):
    plan, _, _, said = made
    assert plan.lines and all(line in said for line in plan.lines)
    option, value = shlex.split(plan.lines[-1])
    found = json.loads(value)
    assert option == "--speculative-config" and found["method"] == "draft_model" and found["model"] == "d"
    assert found["num_speculative_tokens"] == max(each.speculative_tokens for each in plan.schedule) > 0
    assert all(line in said for line in findings(plan))


def test_the_page_shows_both_curves(made):
    plan, _, html, _ = made
    assert html.count("<svg") == 2 and "http://" not in re.sub(r'(xmlns|about|resource)[:\w]*="[^"]*"|<!DOCTYPE[^>]*>', "", html).replace(
        "http://www.w3.org", ""
    )
    for text in ("predicted", "then measured", "Batch 1:", "Batch 2:", f"chosen: {plan.best(1).speculative_tokens}"):
        assert text in html
    assert page(plan) == html


def test_a_plan_is_made_anew_from_a_servers_counters(run, made, tmp_path):
    """The earlier plan's times, the acceptance of production: no engine is needed."""
    plan, file, _, _ = made
    result = run("vllm", "--metrics", COUNTERS, "--times", str(file), "--batch", "1,2", "-o", "new.yaml", "--json")
    assert result.exit_code == 0, result.output
    new = EnginePlan.load(tmp_path / "new.yaml")
    assert json.loads(result.stdout) == new.facts()
    assert new.acceptance.accepted == (40, 16, 6) and new.steps == plan.steps and new.draft == "d"
    assert new.best(1).tokens_per_step < plan.at(1)[new.best(1).speculative_tokens].tokens_per_step  # fewer are accepted


def test_counters_alone_say_what_they_can(run):
    result = run("vllm", "--metrics", COUNTERS)
    assert result.exit_code == 0 and "0.400 0.160 0.060  (100 chains; counters-0.27.1.txt)" in result.stdout
    assert "which number is best depends on step times, too" in result.stdout
    found = json.loads(run("vllm", "--metrics", COUNTERS, "--json").stdout)
    assert found["survival"] == [0.4, 0.16, 0.06] and len(found["tokens_per_step"]) == 4 and found["plan"] is None


def test_the_lines_of_every_kind_of_schedule():
    speculative = vllm.config("draft_model", "it's", {"x": 1})
    ranges = (Range(1, 2, 3), Range(3, 8, 1), Range(9, 16, 0))
    whole = json.loads(shlex.split(vllm.lines(speculative, ranges, True)[-1])[1])
    assert whole == {"method": "draft_model", "model": "it's", "x": 1, "num_speculative_tokens": 3, vllm.SCHEDULE: [[1, 2, 3], [3, 8, 1], [9, 16, 0]]}
    each = [json.loads(shlex.split(line)[1]) for line in vllm.lines(speculative, ranges, False)]
    assert [one["num_speculative_tokens"] for one in each] == [3, 1] and vllm.SCHEDULE not in each[0]
    assert vllm.lines(speculative, ranges, True)[:-1] == vllm.lines(speculative, ranges, False)
    assert len(vllm.lines(speculative, (Range(1, 16, 2),), True)) == 1 and vllm.lines(speculative, (Range(1, 16, 0),), True) == ()


def test_findings_and_misses(made):
    plan = made[0]
    cell = plan.best(1)
    slow = replace(
        cell, measured=replace(cell.measured, throughput=cell.throughput / 1.5, low=0, tokens_per_step=cell.tokens_per_step, seconds=cell.seconds * 1.5)
    )
    missed = misses(replace(plan, cells=(slow,)))
    assert missed == [f"batch 1 with {cell.speculative_tokens}: predicted +50% off (tokens a step +0%, step -33%)"]
    plain = [replace(each, throughput=each.throughput / 100) if each.speculative_tokens else each for each in plan.cells]
    assert findings(replace(plan, cells=tuple(plain)))[0].startswith("batch 1: do not speculate (")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["vllm"], 2, "name the models with --target and --draft, or a server with --metrics"),
        (["vllm", "--target", "works"], 2, "--method draft_model: needs a draft model; name it with --draft, or use one of ngram"),
        (["vllm", "--target", "t", "--draft", "d", "--batch", "1,x"], 2, "--batch 1,x: expected batch sizes from 1 to 4096 with commas between, as 1,4,16"),
        (["vllm", "--target", "t", "--draft", "d", "--engine-args", "[1]"], 2, "--engine-args [1]: not a JSON object; expected one as"),
        (["vllm", "--target", "t", "--draft", "d", "--times", "p.yaml"], 2, "--times has no acceptance: add --metrics"),
        (["vllm", "--metrics-before", "a"], 2, "--metrics-before needs the later reading"),
        (["vllm", "--metrics", "none.txt"], 1, "none.txt: cannot be read (No such file or directory); expected a metrics page of vLLM"),
        (["vllm", "--metrics", COUNTERS, "--times", "none.yaml"], 1, "none.yaml: cannot be read (No such file or directory); expected a plan written by"),
        (["vllm", "--metrics", COUNTERS, "--times", COUNTERS], 1, "expected a plan for an engine"),
        (["vllm", "--target", "t", "--draft", "d", "--python", "/none"], 1, "--python /none: cannot be run (No such file or directory); give the Python that"),
        (
            ["vllm", "--target", "wrong vocabulary", "--draft", "d", "--python", sys.executable],
            1,
            "Value error, Target and draft model should have the same vocabulary size; use",
        ),
        (["vllm", "--target", "dies", "--draft", "d", "--python", sys.executable], 1, "the engine died by signal SIGSEGV while decoding 16 requests at a time"),
        (["vllm", "--target", "no counters", "--draft", "d", "--python", sys.executable], 1, "vLLM counts no speculation; start the server with"),
        (["vllm", "--target", "t", "--draft", "d", "-o", "none/p.yaml"], 1, "none/p.yaml: cannot be written"),
        (["sglang"], 2, "give --responses of a server with speculation, and --log of servers with and without it"),
    ],
)
def test_bad_input_is_one_line(run, words, code, message):
    result = run(*words)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output and message in result.stderr.strip().splitlines()[-1]


def test_an_input_is_never_replaced(run, made, tmp_path):
    (tmp_path / "p.yaml").write_text(made[1].read_text())
    result = run("vllm", "--metrics", COUNTERS, "--times", "p.yaml", "-o", "p.yaml")
    assert result.exit_code == 2 and "is the input p.yaml itself" in result.stderr


def test_an_edited_plan_without_a_speculative_config(run, made, tmp_path):
    edited = yaml.safe_load(made[1].read_text())
    edited["settings"]["speculative"] = "eagle"
    (tmp_path / "p.yaml").write_text(yaml.safe_dump(edited))
    result = run("vllm", "--metrics", COUNTERS, "--times", "p.yaml")
    assert result.exit_code == 2 and "settings.speculative: found 'eagle', expected a mapping" in result.stderr.strip().splitlines()[-1], result.output


def test_a_python_without_vllm(run, monkeypatch):
    monkeypatch.delenv("PYTHONPATH")
    result = run("vllm", "--target", "t", "--draft", "d", "--python", sys.executable)
    assert result.exit_code == 1 and re.search(r"vLLM is not installed for .*; give the Python of its environment with --python PATH", result.stderr)


def test_damaged_plans_are_refused(made, tmp_path):
    text = made[1].read_text()
    for old, new, message in (
        ("version: 1\n", "version: 9\n", "engine plan version 9, expected 1"),
        ("speculative_tokens: 1,", "speculative_tokens: 0,", "found batch 1 with 0 speculative tokens twice"),
        ("trials:", "trials: x #", "acceptance.trials: found 'x', expected a number >= 0"),
        ("seconds:", "seconds: -1 #", "expected"),
    ):
        (tmp_path / "bad.yaml").write_text(text.replace(old, new, 1))
        with pytest.raises(SequoiaPlanError, match=re.escape(message)):
            EnginePlan.load(tmp_path / "bad.yaml")


# SGLang


def log(path, length, batch, throughput, accepted):
    more = f"accept len: {accepted}, accept rate: 0.4, " if accepted else ""
    decode = f"[2026-11-02 05:49:05] Decode batch. #running-req: {batch}, #token: 9, {more}gen throughput (token/s): {throughput}, #queue-req: 0, "
    args = f"server_args=ServerArgs(model_path='m', speculative_num_steps={length}, speculative_eagle_topk={1 if length else None}, tp_size=1)"
    path.write_text("\n".join([args, *[decode] * 4]) + "\n")


def test_sglang_from_logs_and_responses(run, tmp_path):
    log(tmp_path / "plain.log", None, 4, 100.0, None)  # a step takes 40 ms
    log(tmp_path / "three.log", 3, 4, 4 * 1.7 / 0.05, 1.7)  # 50 ms
    (tmp_path / "r.jsonl").write_text(json.dumps({"meta_info": {"spec_correct_drafts_histogram": [600, 240, 100, 60]}}))
    logs = ["--log", "plain.log", "--log", "three.log"]
    result = run("sglang", *logs, "--responses", "r.jsonl", "--batch", "4", "-o", "plan.yaml")
    assert result.exit_code == 0, result.output
    plan = EnginePlan.load(tmp_path / "plan.yaml")
    assert plan.engine == "sglang" and plan.acceptance.accepted == (400, 160, 60)
    assert plan.at(4)[0].seconds == pytest.approx(0.04) and plan.at(4)[3].seconds == pytest.approx(0.05)
    assert plan.lines == ("--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4",)
    assert plan.lines[0] in result.stdout and "no SGLang was run" in result.stdout
    alone = EnginePlan.read(json.loads(run("sglang", *logs, "--batch", "4", "--json").stdout), "")
    assert alone.at(4)[3].tokens_per_step == pytest.approx(1.7, abs=0.01) and "one rate for all positions" in alone.acceptance.source
    only = run("sglang", "--responses", "r.jsonl")
    assert only.exit_code == 0 and "0.400 0.160 0.060  (1000 chains; 1 responses of SGLang)" in only.stdout
    for words, message in ((["--log", "plain.log"], "no server ran with speculation"), (["--log", "three.log"], "needs times with and without speculation")):
        refused = run("sglang", *words, "--batch", "4")
        assert refused.exit_code == 2 and message in refused.stderr
