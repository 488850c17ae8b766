"""`sequoia-plan diagnose vllm`, with a stand-in for vLLM whose tokens are known, and bad input."""

import json
import shlex
import sys
from html import escape
from itertools import product
from types import SimpleNamespace

import pytest
from commands import call, engine_plan, refused, succeed
from msgspec.structs import replace
from paths import STAND_IN

from sequoia_plan.engines import vllm
from sequoia_plan.engines.plan import ScheduleEntry
from sequoia_plan.engines.vllm import VllmPool
from sequoia_plan.planner.report.engine_table import print_plan, sentences

pytestmark = pytest.mark.slow
DRAFT = ("--speculative-config", '{"method": "draft_model", "model": "d"}')


@pytest.fixture(scope="module")
def measured_plan(tmp_path_factory):
    """A plan by context, measured and verified, its page, and the output."""
    words = f"vllm --target works --python {sys.executable} --batch 1,2 --most 3 "
    words += "--limit 12 --tokens 24 --context 900,300 --verify --report page.html"
    folder = tmp_path_factory.mktemp("engine")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("PYTHONPATH", str(STAND_IN))
        patch.setattr(vllm, "IDLE_SECONDS", 0.0)  # the stand-in does not poll for work
        result = succeed("diagnose", *words.split(), "--json", *DRAFT)
    plan = engine_plan(result)
    return plan, (folder / "page.html").read_text()


def test_the_plan_holds_what_the_engine_counted(measured_plan):
    plan = measured_plan[0]
    assert (plan.engine, plan.engine_version) == ("vllm", "0.0.stand-in")
    assert (plan.target, plan.draft) == ("works", "d")
    assert [part.context for part in plan.contexts] == [300, 900]
    for part in plan.contexts:
        # of eight steps the stand-in accepts 0 1 0 2 0 0 3 1
        assert part.acceptance.survival == pytest.approx((4 / 8, 2 / 8, 1 / 8), abs=0.02)
        assert 0 < part.acceptance.error < 0.1
        assert part.acceptance.source.endswith(f"12 prompts of {part.context} tokens")


def test_it_chooses_the_fastest_numbers_and_verifies_them(measured_plan):
    for part in measured_plan[0].contexts:
        timed = {(step.batch, step.speculative_tokens): step.seconds for step in part.steps}
        for kind in product((1, 2), (0, 1, 3)):
            assert timed[kind] == pytest.approx(0.001 * (1 + 0.1 * kind[1]))
        for batch in (1, 2):
            cells = part.cells_at(batch)
            assert [cell.speculative_tokens for cell in cells] == [0, 1, 2, 3]
            best = part.best_cell(batch)
            assert best.measured and cells[0].measured
            assert best.throughput == max(cell.throughput for cell in cells)


def test_what_is_said_can_be_pasted_and_is_on_the_page(measured_plan, capsys):
    plan, html = measured_plan
    print_plan(plan)
    output = capsys.readouterr().out
    for part in plan.contexts:
        assert part.lines and all(line in output for line in part.lines)
        option, value = shlex.split(part.lines[-1])
        config = json.loads(value)
        assert option == "--speculative-config"
        assert config["method"] == "draft_model" and config["model"] == "d"
        longest = max(entry.speculative_tokens for entry in part.schedule)
        assert config["num_speculative_tokens"] == longest > 0
    assert all(line in output and escape(line) in html for line in sentences(plan))
    assert "predicted" in output and "…" not in output  # no figure of the table is cut off


def test_do_not_speculate_is_said(measured_plan):
    part = measured_plan[0].contexts[0]
    plain, *others = part.cells
    changed = replace(part, cells=(replace(plain, throughput=1e6), *others), lines=())
    lines = [*sentences(replace(measured_plan[0], contexts=(changed,)))]
    assert any(line.startswith("batch 1, context 300: do not speculate; ") for line in lines)
    assert lines[-1] == "start the engine without speculation"


def test_options_for_each_number_and_the_schedule(measured_plan):
    speculative = {"method": "draft_model", "model": "it's"}
    schedule = (ScheduleEntry(1, 2, 3), ScheduleEntry(3, 8, 1), ScheduleEntry(9, 16, 0))
    part = replace(measured_plan[0].contexts[0], schedule=schedule)
    lines = VllmPool.launch_options(SimpleNamespace(speculative=speculative), part)
    configs = [
        {"num_speculative_tokens": 3},
        {"num_speculative_tokens": 1},
        {"num_speculative_tokens": 3, vllm.SCHEDULE_KEY: [[1, 2, 3], [3, 8, 1], [9, 16, 0]]},
    ]
    options = [json.loads(shlex.split(line)[1]) for line in lines]
    assert options == [speculative | config for config in configs]


def test_what_another_program_takes_is_not_in_a_steps_time():
    """Five of 24 steps take longer; where every second step drafts, both kinds count."""
    disturbed = [1.0] * 9 + [7.0] * 5 + [1.0] * 10
    assert vllm.typical_seconds(disturbed) == 1 and vllm.typical_seconds([1.0, 3.0] * 6) == 2
    assert vllm.typical_seconds(disturbed[7:10]) == 3  # a run of one portion


MODELS = ["--target", "t", *DRAFT]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([], 2, "Missing option '--target'"),
        ([*MODELS, "--batch", "²"], 2, "found '²', expected numbers from 1 to 4096"),
        ([*MODELS, "--engine-args", "[1]"], 2, "found [1], expected a JSON object"),
        ([*MODELS, "--python", "/none"], 1, "/none: No such file or directory"),
        (
            ["--target", "no counters", *DRAFT, "--python", sys.executable],
            1,
            "found no counters of speculation",
        ),
    ],
)
def test_bad_input_is_one_line(tmp_path, monkeypatch, words, code, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(STAND_IN))
    refused(call("diagnose", "vllm", *words), code, message)
