"""`sequoia-plan engine`, with a stand-in for vLLM whose tokens are known, and bad input."""

from __future__ import annotations

import json
import re
import shlex
import sys

import pytest
import yaml
from click.testing import CliRunner
from msgspec.structs import replace
from paths import DATA, STAND_IN

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.engines import vllm
from sequoia_plan.engines.plan import EnginePlan, ScheduleEntry
from sequoia_plan.engines.planning import make_plan
from sequoia_plan.engines.settings import settings_of
from sequoia_plan.planner.cli import main
from sequoia_plan.planner.report.engine_page import engine_page
from sequoia_plan.planner.report.engine_table import findings, launch_groups, prediction_errors

COUNTERS = str(DATA / "vllm" / "counters-0.27.1.txt")


@pytest.fixture(autouse=True)
def logs_go_with_the_test(tmp_path, monkeypatch):
    """An engine that fails leaves its log in the folder for temporary files."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs `sequoia-plan engine ...` in an empty folder; this Python has the stand-in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(STAND_IN))
    return lambda *arguments: CliRunner().invoke(main, ["engine", *arguments])


@pytest.fixture(scope="module")
def measured_plan(tmp_path_factory):
    return measure_plan(tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="module")
def plan_by_context(tmp_path_factory):
    return measure_plan(tmp_path_factory.mktemp("contexts"), "--context", "900,300")


def measure_plan(folder, *options):
    """A plan measured and verified with the stand-in, its file, its page, and the output."""
    words = [
        *("--target", "works"),
        *("--draft", "d"),
        *("--python", sys.executable),
        *("--batch", "1,2"),
        *("--most", "3"),
        *("--limit", "12"),
        *("--tokens", "24"),
        "--verify",
        *("-o", "plan.yaml"),
        *("--report", "page.html"),
        *options,
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("PYTHONPATH", str(STAND_IN))
        patch.setattr(vllm, "IDLE_SECONDS", 0.0)  # the stand-in does not poll for work
        result = CliRunner().invoke(main, ["engine", "vllm", *words])
    assert result.exit_code == 0, result.output
    path = folder / "plan.yaml"
    plan = EnginePlan.load(path)
    assert EnginePlan.load(path) == plan and plan.to_yaml() == path.read_text()
    return plan, path, (folder / "page.html").read_text(), result.stdout


def assert_plans_best_cells(plan):
    """The plan chooses the fastest of the numbers 0 to 3, which it timed and verified."""
    timed = {(step.batch, step.speculative_tokens) for step in plan.steps}
    assert timed >= {(batch, length) for batch in (1, 2) for length in (0, 1, 3)}
    for batch in (1, 2):
        cells = plan.cells_at(batch)
        assert [cell.speculative_tokens for cell in cells] == [0, 1, 2, 3]
        best = plan.best_cell(batch)
        assert best.is_timed and best.measured and cells[0].measured
        assert best.throughput == max(cell.throughput for cell in cells)
        assert best.measured.low <= best.measured.throughput <= best.measured.high
        assert best.measured.runs == 3


def test_the_plan_holds_what_the_engine_counted(measured_plan):
    plan = measured_plan[0]
    assert (plan.engine, plan.version, plan.method) == ("vllm", "0.0.stand-in", "draft_model")
    assert (plan.target, plan.draft) == ("works", "d")
    # of eight steps the stand-in accepts 0 1 0 2 0 0 3 1
    assert plan.acceptance.survival == pytest.approx((4 / 8, 2 / 8, 1 / 8), abs=0.02)
    assert 0 < plan.acceptance.trials <= plan.acceptance.drafts
    assert_plans_best_cells(plan)


def test_what_is_said_can_be_pasted(measured_plan):
    plan, _, _, output = measured_plan
    assert plan.lines and all(line in output for line in plan.lines)
    option, value = shlex.split(plan.lines[-1])
    config = json.loads(value)
    assert option == "--speculative-config"
    assert config["method"] == "draft_model" and config["model"] == "d"
    max_length = max(entry.speculative_tokens for entry in plan.schedule)
    assert config["num_speculative_tokens"] == max_length > 0
    assert all(line in output for line in findings(plan))


def test_the_page_shows_both_curves(measured_plan):
    plan, _, html, _ = measured_plan
    assert html.count("<svg") == 2
    without_names = re.sub(r'(xmlns|about|resource)[:\w]*="[^"]*"|<!DOCTYPE[^>]*>', "", html)
    assert "http://" not in without_names.replace("http://www.w3.org", "")
    chosen = f"chosen: {plan.best_cell(1).speculative_tokens}"
    for text in ("predicted", "then measured", "Batch 1:", "Batch 2:", chosen):
        assert text in html
    assert engine_page(plan) == html


def test_a_plan_by_context_has_a_part_for_each(plan_by_context):
    plan, _, html, output = plan_by_context
    assert [choice.context for choice in plan.by_context] == [300, 900]
    assert plan.schedule == plan.lines == ()
    counts = [choice.acceptance for choice in plan.by_context]
    assert "12 prompts of 300 tokens" in counts[0].source
    assert "12 prompts of 900 tokens" in counts[1].source
    assert plan.acceptance == counts[0] != counts[1]
    assert [part.acceptance for part in plan.parts()] == counts
    assert "context 900:\nacceptance of the first" in output
    for part, context in zip(plan.parts(), (300, 900), strict=True):
        assert {step.context for step in part.steps} == {context}
        assert_plans_best_cells(part)
        for batch in (1, 2):
            assert f"Batch {batch}, context {context}:" in html
            assert f"batch {batch}, context {context}: " in output
    assert html.count("<svg") == 4
    assert all(line in output for choice in plan.by_context for line in choice.lines)
    assert "…" not in output  # no figure of the table is cut off


def test_settings_of_a_plan_by_context(run, plan_by_context):
    plan, path, _, _ = plan_by_context
    rows = json.loads(run("settings", str(path), "--json").stdout)
    assert {row["context"] for row in rows} == {300, 900}
    for part, context in zip(plan.parts(), (300, 900), strict=True):
        expected = [setting.text for setting in settings_of(part)]
        assert [row["text"] for row in rows if row["context"] == context] == expected
    assert "vLLM, server at a context of 900 tokens:" in run("settings", str(path)).stdout


def test_a_plan_by_context_is_made_anew_for_its_contexts(run, plan_by_context, tmp_path):
    plan, path, _, _ = plan_by_context
    sources = ["--metrics", COUNTERS, "--times", str(path)]
    result = run("vllm", *sources, "--batch", "1,2", "-o", "new.yaml")
    assert result.exit_code == 0, result.output
    new_plan = EnginePlan.load(tmp_path / "new.yaml")
    assert new_plan.steps == plan.steps and len(new_plan.parts()) == 2


def test_where_the_best_number_changes_is_said(plan_by_context):
    """Cells of 900 tokens without speculation become the fastest, and the options follow."""
    plan = plan_by_context[0]
    assert all(part.best_cell(1).speculative_tokens for part in plan.parts())
    cells = [
        replace(cell, throughput=1e6)
        if (cell.context, cell.speculative_tokens) == (900, 0)
        else cell
        for cell in plan.cells
    ]
    short, long = plan.by_context
    changed = replace(plan, cells=tuple(cells), by_context=(short, replace(long, lines=())))
    best = plan.parts()[0].best_cell(1).speculative_tokens
    sentence = f"batch 1: the best number changes with the context: {best} at 300, 0 at 900"
    assert sentence in findings(changed)
    assert launch_groups(changed) == [
        ("for a context of 300 tokens:", short.lines),
        ("for a context of 900 tokens:", ()),
    ]
    same = replace(plan, by_context=(short, replace(long, lines=short.lines)))
    assert launch_groups(same) == [("", short.lines)]


def test_a_plan_of_an_earlier_version_is_read_and_written_as_it_was():
    """Its steps and cells have no context, and it gets none."""
    path = DATA / "vllm" / "plan-without-contexts.yaml"
    plan = EnginePlan.load(path)
    assert plan.to_yaml() == path.read_text()
    assert plan.parts() == [plan] and len(plan.cells) == 4
    again = make_plan(plan.acceptance, plan.steps, [1], 3, lambda _: (), engine="vllm")
    assert again.cells == plan.cells and again.schedule == plan.schedule


def test_contexts_that_disagree_are_refused(plan_by_context):
    plan = plan_by_context[0]
    message = r"by_context: found the contexts \[300\], expected those of the cells, \[300, 900\]"
    with pytest.raises(SequoiaPlanError, match=message):
        replace(plan, by_context=plan.by_context[:1])
    with pytest.raises(SequoiaPlanError, match="tokens at context 300 twice, expected it once"):
        replace(plan, cells=(*plan.cells, plan.cells[0]))


def test_a_plan_is_made_anew_from_a_servers_counters(run, measured_plan, tmp_path):
    """The earlier plan's times and the acceptance of production need no engine."""
    plan, path, _, _ = measured_plan
    sources = ["--metrics", COUNTERS, "--times", str(path)]
    result = run("vllm", *sources, "--batch", "1,2", "-o", "new.yaml", "--json")
    assert result.exit_code == 0, result.output
    new_plan = EnginePlan.load(tmp_path / "new.yaml")
    assert json.loads(result.stdout) == new_plan.to_dict()
    assert new_plan.acceptance.accepted == (40, 16, 6)
    assert new_plan.steps == plan.steps and new_plan.draft == "d"
    new_best = new_plan.best_cell(1)
    earlier_cell = plan.cells_at(1)[new_best.speculative_tokens]
    assert new_best.tokens_per_step < earlier_cell.tokens_per_step  # fewer are accepted


def test_counters_alone_say_what_they_can(run):
    result = run("vllm", "--metrics", COUNTERS)
    assert result.exit_code == 0
    assert "0.400 0.160 0.060  (100 chains; counters-0.27.1.txt)" in result.stdout
    assert "which number is best depends on step times, too" in result.stdout
    answer = json.loads(run("vllm", "--metrics", COUNTERS, "--json").stdout)
    assert answer["survival"] == [0.4, 0.16, 0.06]
    assert len(answer["tokens_per_step"]) == 4 and answer["plan"] is None


def test_the_lines_of_every_kind_of_schedule():
    speculative = vllm.speculative_config("draft_model", "it's", {"x": 1})
    schedule = (ScheduleEntry(1, 2, 3), ScheduleEntry(3, 8, 1), ScheduleEntry(9, 16, 0))
    with_schedule = vllm.launch_options(speculative, schedule, accepts_schedule=True)
    assert json.loads(shlex.split(with_schedule[-1])[1]) == {
        "method": "draft_model",
        "model": "it's",
        "x": 1,
        "num_speculative_tokens": 3,
        vllm.SCHEDULE_KEY: [[1, 2, 3], [3, 8, 1], [9, 16, 0]],
    }
    without_schedule = vllm.launch_options(speculative, schedule, accepts_schedule=False)
    configs = [json.loads(shlex.split(line)[1]) for line in without_schedule]
    assert [config["num_speculative_tokens"] for config in configs] == [3, 1]
    assert vllm.SCHEDULE_KEY not in configs[0]
    assert with_schedule[:-1] == without_schedule
    assert len(vllm.launch_options(speculative, (ScheduleEntry(1, 16, 2),), True)) == 1
    assert vllm.launch_options(speculative, (ScheduleEntry(1, 16, 0),), True) == ()


def test_findings_and_prediction_errors(measured_plan):
    plan = measured_plan[0]
    cell = plan.best_cell(1)
    slow_measurement = replace(
        cell.measured,
        throughput=cell.throughput / 1.5,
        low=0,
        tokens_per_step=cell.tokens_per_step,
        seconds=cell.seconds * 1.5,
    )
    slow_cell = replace(cell, measured=slow_measurement)
    assert prediction_errors(replace(plan, cells=(slow_cell,))) == [
        f"batch 1 with {cell.speculative_tokens}: predicted +50% off (tokens a step +0%, step -33%)"
    ]
    cells = [
        replace(cell, throughput=cell.throughput / 100) if cell.speculative_tokens else cell
        for cell in plan.cells
    ]
    sentences = findings(replace(plan, cells=tuple(cells)))
    assert sentences[0].startswith("batch 1: do not speculate (")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["vllm"], 2, "name the models with --target and --draft, or a server with --metrics"),
        (
            ["vllm", "--target", "works"],
            2,
            "--method draft_model: needs a draft model; name it with --draft, or use one of ngram",
        ),
        (
            ["vllm", "--target", "t", "--draft", "d", "--batch", "²"],
            2,
            "--batch ²: expected batch sizes from 1 to 4096",
        ),
        (
            ["vllm", "--target", "t", "--draft", "d", "--batch", "1,x"],
            2,
            "--batch 1,x: expected batch sizes from 1 to 4096 with commas between, as 1,4,16",
        ),
        (
            ["vllm", "--target", "t", "--draft", "d", "--context", "0"],
            2,
            "--context 0: expected numbers of tokens from 1 to 1048576 with commas between, as 512",
        ),
        (
            ["vllm", "--metrics", COUNTERS, "--times", "p.yaml", "--context", "512"],
            2,
            "--context is for timing an engine: name the models with --target and --draft",
        ),
        (
            ["vllm", "--target", "t", "--draft", "d", "--context", "9,4090"],
            2,
            "--context 4090: with 64 new tokens it is above vLLM's max_model_len of 4096; give a",
        ),
        (
            ["vllm", "--target", "t", "--draft", "d", "--engine-args", "[1]"],
            2,
            "--engine-args [1]: not a JSON object; expected one as",
        ),
        (
            ["vllm", "--target", "t", "--draft", "d", "--times", "p.yaml"],
            2,
            "--times has no acceptance: add --metrics",
        ),
        (["vllm", "--metrics-before", "a"], 2, "--metrics-before needs the later reading"),
        (
            ["vllm", "--metrics", "none.txt"],
            1,
            "none.txt: cannot be read (No such file or directory); expected a metrics page of vLLM",
        ),
        (
            ["vllm", "--metrics", COUNTERS, "--times", "none.yaml"],
            1,
            "none.yaml: cannot be read (No such file or directory); expected a plan written by",
        ),
        (["vllm", "--metrics", COUNTERS, "--times", COUNTERS], 1, "expected a plan for an engine"),
        (
            ["vllm", "--target", "t", "--draft", "d", "--python", "/none"],
            1,
            "--python /none: cannot be run (No such file or directory); give the Python that",
        ),
        (
            ["vllm", "--target", "wrong vocabulary", "--draft", "d", "--python", sys.executable],
            1,
            "Value error, Target and draft model should have the same vocabulary size; use",
        ),
        (
            ["vllm", "--target", "dies", "--draft", "d", "--python", sys.executable],
            1,
            "the engine died by signal SIGSEGV while decoding 16 requests at a time",
        ),
        (
            ["vllm", "--target", "no counters", "--draft", "d", "--python", sys.executable],
            1,
            "vLLM counts no speculation; start the server with",
        ),
        (
            ["vllm", "--target", "t", "--draft", "d", "-o", "none/p.yaml"],
            1,
            "none/p.yaml: cannot be written",
        ),
        (
            ["sglang"],
            2,
            "give --responses of a server with speculation, "
            "and --log of servers with and without it",
        ),
    ],
)
def test_bad_input_is_one_line(run, words, code, message):
    result = run(*words)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output and message in result.stderr.strip().splitlines()[-1]


def test_an_input_is_never_replaced(run, measured_plan, tmp_path):
    (tmp_path / "p.yaml").write_text(measured_plan[1].read_text())
    result = run("vllm", "--metrics", COUNTERS, "--times", "p.yaml", "-o", "p.yaml")
    assert result.exit_code == 2 and "is the input p.yaml itself" in result.stderr


def test_an_edited_plan_without_a_speculative_config(run, measured_plan, tmp_path):
    edited = yaml.safe_load(measured_plan[1].read_text())
    edited["settings"]["speculative"] = "eagle"
    (tmp_path / "p.yaml").write_text(yaml.safe_dump(edited))
    result = run("vllm", "--metrics", COUNTERS, "--times", "p.yaml")
    assert result.exit_code == 2, result.output
    message = "settings.speculative: found 'eagle', expected a mapping"
    assert message in result.stderr.strip().splitlines()[-1]


def test_a_python_without_vllm(run, monkeypatch):
    monkeypatch.delenv("PYTHONPATH")
    result = run("vllm", "--target", "t", "--draft", "d", "--python", sys.executable)
    message = r"vLLM is not installed for .*; give the Python of its environment with --python PATH"
    assert result.exit_code == 1 and re.search(message, result.stderr)


def test_damaged_plans_are_refused(measured_plan, tmp_path):
    text = measured_plan[1].read_text()
    for old, new, message in (
        ("version: 1\n", "version: 9\n", "engine plan version 9, expected 1"),
        (
            "speculative_tokens: 1,",
            "speculative_tokens: 0,",
            "found batch 1 with 0 speculative tokens twice",
        ),
        ("trials:", "trials: x #", "acceptance.trials: found 'x', expected a number >= 0"),
        ("seconds:", "seconds: -1 #", "expected"),
    ):
        (tmp_path / "bad.yaml").write_text(text.replace(old, new, 1))
        with pytest.raises(SequoiaPlanError, match=re.escape(message)):
            EnginePlan.load(tmp_path / "bad.yaml")


# SGLang


def write_log(path, length, batch, throughput, accept_length):
    server_args = (
        f"server_args=ServerArgs(model_path='m', speculative_num_steps={length}, "
        f"speculative_eagle_topk={1 if length else None}, tp_size=1)"
    )
    acceptance = f"accept len: {accept_length}, accept rate: 0.4, " if accept_length else ""
    decode_line = (
        f"[2026-11-02 05:49:05] Decode batch. #running-req: {batch}, #token: 9, {acceptance}"
        f"gen throughput (token/s): {throughput}, #queue-req: 0, "
    )
    path.write_text("\n".join([server_args, *[decode_line] * 4]) + "\n")


@pytest.fixture
def sglang_files(tmp_path):
    write_log(tmp_path / "plain.log", None, 4, 100.0, None)  # a step takes 40 ms
    write_log(tmp_path / "three.log", 3, 4, 4 * 1.7 / 0.05, 1.7)  # 50 ms
    response = {"meta_info": {"spec_correct_drafts_histogram": [600, 240, 100, 60]}}
    (tmp_path / "r.jsonl").write_text(json.dumps(response))


LOGS = ["--log", "plain.log", "--log", "three.log"]


def test_sglang_from_logs_and_responses(run, sglang_files, tmp_path):
    result = run("sglang", *LOGS, "--responses", "r.jsonl", "--batch", "4", "-o", "plan.yaml")
    assert result.exit_code == 0, result.output
    plan = EnginePlan.load(tmp_path / "plan.yaml")
    assert plan.engine == "sglang" and plan.acceptance.accepted == (400, 160, 60)
    cells = plan.cells_at(4)
    assert cells[0].seconds == pytest.approx(0.04)
    assert cells[3].seconds == pytest.approx(0.05)
    assert plan.lines == (
        "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4",
    )
    assert plan.lines[0] in result.stdout and "no SGLang was run" in result.stdout


def test_sglang_from_logs_alone(run, sglang_files):
    output = run("sglang", *LOGS, "--batch", "4", "--json").stdout
    plan = EnginePlan.from_dict(json.loads(output), "")
    assert plan.cells_at(4)[3].tokens_per_step == pytest.approx(1.7, abs=0.01)
    assert "one rate for all positions" in plan.acceptance.source


@pytest.mark.parametrize("batch", ["4096", "9", "1"])
def test_batches_far_from_those_that_were_timed(run, sglang_files, batch):
    result = run("sglang", *LOGS, "--batch", batch)
    assert result.exit_code == 2
    line = f"--batch {batch}: steps were timed with 4 to 4 requests, expected 2 to 8; time such"
    assert line in result.stderr


def test_the_batches_that_were_timed_are_the_default(run, sglang_files):
    output = run("sglang", *LOGS, "--json").stdout
    assert EnginePlan.from_dict(json.loads(output), "").batches == [4]


def test_flags_and_findings_say_the_same(run, tmp_path):
    """Speculation pays for 1 request and not for 16: only what was asked for has flags."""
    for batch, plain, three in ((1, 25.0, 1.7 / 0.042), (16, 400.0, 16 * 1.7 / 0.2)):
        write_log(tmp_path / f"plain{batch}.log", None, batch, plain, None)
        write_log(tmp_path / f"three{batch}.log", 3, batch, three, 1.7)
    logs = [f"--log={name}{batch}.log" for name in ("plain", "three") for batch in (1, 16)]
    both = run("sglang", *logs, "--batch", "1,16").stdout
    assert "batch 16: do not speculate" in both and "--speculative-num-steps" in both
    alone = run("sglang", *logs, "--batch", "16").stdout
    assert "batch 16: do not speculate" in alone
    assert "start the engine without speculation" in alone
    assert "--speculative-num-steps" not in alone


def test_times_of_another_engine(run, sglang_files):
    assert run("sglang", *LOGS, "--batch", "4", "-o", "sglang.yaml").exit_code == 0
    result = run("vllm", "--metrics", COUNTERS, "--times", "sglang.yaml")
    assert result.exit_code == 2
    assert "--times sglang.yaml: holds step times of sglang, expected a plan for vllm" in (
        result.stderr
    )


def test_sglang_from_responses_alone(run, sglang_files):
    result = run("sglang", "--responses", "r.jsonl")
    assert result.exit_code == 0
    assert "0.400 0.160 0.060  (1000 chains; 1 responses of SGLang)" in result.stdout


@pytest.mark.parametrize(
    ("log", "message"),
    [
        ("plain.log", "no server ran with speculation"),
        ("three.log", "needs times with and without speculation"),
    ],
)
def test_sglang_needs_logs_with_and_without_speculation(run, sglang_files, log, message):
    result = run("sglang", "--log", log, "--batch", "4")
    assert result.exit_code == 2 and message in result.stderr
