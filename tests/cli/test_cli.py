"""The command line: its contract, what it prints, and one clear line for bad input."""

import json
import re
import subprocess
import sys
import warnings
from types import SimpleNamespace

import numba
import pytest
import torch
from commands import PROFILE
from msgspec.structs import replace

from sequoia_plan.artifacts import (
    Acceptance,
    Counts,
    Plan,
    Profile,
    TokenTree,
    load_tree,
    save_tree,
)
from sequoia_plan.artifacts.counts import ClassCounts
from sequoia_plan.planner.cli import pair as cli_pair
from sequoia_plan.planner.cli import profiling
from sequoia_plan.planner.cli.pair import when_numba_compiles
from sequoia_plan.planner.report import tree_summary
from sequoia_plan.profiler import latency
from sequoia_plan.profiler.hardware import fingerprint
from sequoia_plan.runtime import Sampling

SHORT = ("--max-new-tokens", "8", "--dtype", "float32", "--json")


def answer(result):
    """The JSON that a command printed."""
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def check_refused(result, code, message):
    """The command failed with `code` and one line like `message`."""
    assert result.exit_code == code, result.output
    lines = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert len(lines) == 1 and "Traceback" not in result.output
    assert re.search(message, lines[0]), lines[0]


LIMITS = ("--budget", "16", "--depth", "5")


def test_solve_json_is_the_contract(run):
    solved = answer(run("solve", *LIMITS, "--json"))
    contract = {"size", "depth", "branching", "expected_tokens", "predicted_speedup", "parents"}
    assert contract | {"solver", "seconds", "by_match", "interval"} <= set(solved)
    tree = load_tree("tree.safetensors")
    assert tree.parents.tolist() == solved["parents"]
    assert tree.plan.expected_tokens == solved["expected_tokens"]
    assert solved["predicted_speedup"] > 1


def test_what_solve_prints_fits_a_screen(run):
    lines = run("solve", *LIMITS).stdout.splitlines()
    titles = {line[:24].strip() for line in lines}
    assert {"expected tokens a step", "predicted speed-up", "proven"} <= titles
    assert len(lines) <= 12 and lines[-1].startswith("wrote tree.safetensors")


def test_show_says_what_other_prompts_may_give(run):
    """From kinds that differ a wider interval; from a profile without kinds that it is unknown."""
    run("solve", *LIMITS)
    unknown = "prompts of a new kind   not known: the profiled prompts name fewer than 4 kinds\n"
    assert unknown in run("show").stdout
    replace(
        Profile.load("profile.yaml"),
        acceptance=Acceptance.counted(Counts([[400]], [[[180, 40]]])),
        prompts={
            name: [ClassCounts(50, (5 * int(name) + n, 5)) for n in (-1, 1)] for name in "3456"
        },
    ).save("profile.yaml")
    lines = run("solve", *LIMITS).stdout.splitlines()
    plan = load_tree("tree.safetensors").plan
    low, high = plan.interval_new_kind.predicted_speedup
    inner_low, inner_high = plan.interval.predicted_speedup
    assert low < inner_low < plan.median_speedup < inner_high < high
    assert lines[1].startswith(f"predicted speed-up      {low:.2f}x to {high:.2f}x over plain")
    ends = f"(95 %: {inner_low:.2f} to {inner_high:.2f})"
    assert (
        lines[2]
        == f"for the profiled mix    {plan.median_speedup:.2f}x {ends}, the median over prompts"
    )
    assert lines[3].startswith(f"  3                     {plan.speedup_by_kind['3']:.2f}x (95 %: ")


def test_profile_says_which_prompts_it_used():
    prompts = {kind: [ClassCounts(9, (4.0,))] * 8 for kind in ("chat", "code")}
    text = profiling._describe_prompts(replace(PROFILE, prompts=prompts), 20, 40)
    assert text.startswith("prompts     16 of 40 (8 chat, 8 code); 4 left out (known well")
    assert text.endswith("; every second one is for bench")


def test_solve_says_when_to_count_again(run):
    """For trees of more than 16 nodes, unless a tree of at least half their size wrote the text."""
    counts = Counts([[600], [200]], [[[300, 120, 60]], [[100, 40, 20]]])
    counted = Profile(Acceptance.counted(counts))
    for profile, size, note in (
        (counted, 16, ""),
        (counted, 17, "counted with a small tree, which"),
        (replace(counted, tree_size=24), 48, ""),
        (replace(counted, tree_size=24), 49, "counted with a tree of 24 nodes, which"),
        (Profile(counted.acceptance.without_counts()), 49, ""),  # rates have no text
    ):
        profile.save("profile.yaml")
        result = run("solve", "--budget", str(size), "--json")
        assert answer(result)["size"] == size
        assert bool(result.stderr) == bool(note) and note in result.stderr


@pytest.mark.parametrize(
    ("name", "text"), [("p.json", "[0.5, 0.2, 1e-5]"), ("p.yaml", "- [0.5, 0.2]\n- [0.4, 0.3]\n")]
)
def test_solve_acceptance_file(run, tmp_path, name, text):
    (tmp_path / name).write_text(text)
    arguments = ("--acceptance", name, "--budget", "6", "--depth", "4", "--json")
    solved = answer(run("solve", *arguments))
    assert solved["size"] == 6 and solved["predicted_speedup"] is None


def test_show_says_whether_a_tree_fits_this_machine(run):
    name, again = "smollm2-135m-epyc-2-cores-t0", "run profile and solve again for its times"
    with pytest.MonkeyPatch.context() as patch:
        for processor, is_other in (("AMD EPYC", False), ("another", True)):
            patch.setattr(tree_summary, "processor_name", lambda name=processor: name)
            patch.setattr(tree_summary, "usable_cores", lambda: 2)
            line = next(x for x in run("show", name).stdout.splitlines() if x[:7] == "machine")
            assert "AMD EPYC, 2 threads" in line and (again in line) == is_other


def test_show(run, tmp_path):
    text = run("show").stdout
    assert "4 nodes, depth 3, level widths 1 2 1, branching 2" in text and "0.250" in text
    for name, start in (("t.png", b"\x89PNG"), ("t.svg", b"<?xml")):
        assert answer(run("show", "--plot", name, "--json"))["parents"] == [-1, 0, 0, 1]
        assert (tmp_path / name).read_bytes().startswith(start)


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        ("solve --budget 100 --depth 3 --objective tokens", 2, "no tree of 100 nodes"),
        ("solve tree.safetensors", 1, "tree.safetensors"),
        ("solve profile.yaml --acceptance x.json", 2, "not both"),
        ("show nothing", 1, "nothing.*No such file.*catalog"),
        ("show profile.yaml", 1, "profile.yaml.*found no format.*sequoia-plan solve"),
        ("show --plot t.pdf", 2, "t.pdf.*expected .png or .svg"),
        ("export tree.safetensors --format onnx -o n.json", 2, "--format.*onnx.*nxd"),
        ("import tree.safetensors", 1, "tree.safetensors: not JSON"),
        ("generate --temperature -1", 2, "temperature.*-1.0"),
        ("generate --sampling top_p=1", 2, "--sampling.*'top_p=1'.*top_k, min_p"),
        ("generate --sampling top_k=some", 2, "'top_k=some'.*NAME=VALUE"),
        ("generate --draft tree.safetensors", 1, "tree.safetensors.*not a draft"),
        ("profile --prompts nothing.jsonl", 1, "nothing.jsonl.*No such file"),
        ("profile --precision much", 2, "--precision.*'much'.*a percentage"),
        ("profile --context 512;4096", 2, "--context.*'512;4096'.*with commas between"),
        ("profile --tree root.safetensors", 2, "found a tree of 1 node"),
        ("bench -o tree.safetensors", 2, "tree.safetensors: is the input"),
        ("bench --only nope --target none", 2, "'nope'.*plain"),
    ],
)
def test_bad_input(run, command, code, message):
    save_tree(TokenTree.chain(1), "root.safetensors")
    check_refused(run(*command.split()), code, message)


def test_an_error_that_nobody_foresaw_is_a_line(run, monkeypatch):
    def fail(path):
        raise ZeroDivisionError("no\nidea")

    monkeypatch.setattr("sequoia_plan.artifacts.load_tree", fail)
    check_refused(run("show"), 1, r"ZeroDivisionError: no \(test_cli.py, line.*sequoia-plan doctor")


def test_a_prompt_that_is_no_text(run):
    result = run("generate", "--prompt", "-", input=b"ab\xff")
    check_refused(result, 1, "--prompt -.*not UTF-8.*byte 2")


@pytest.mark.parametrize("form", ["nxd", "growmap"])
def test_export_and_import(run, form):
    text = run("export", "tree.safetensors", "--format", form, "-o", "tree.json").stdout
    assert text == f"wrote tree.json: 4 nodes as {form}\n"
    text = run("import", "tree.json", "-o", "back.safetensors").stdout
    assert text == "wrote back.safetensors: 4 nodes, depth 3, level widths 1 2 1\n"
    assert load_tree("back.safetensors") == load_tree("tree.safetensors")


def test_the_command_line_offers_what_the_runtime_has():
    from sequoia_plan.planner.cli.options import LINKS, RARE_SETTINGS, VERIFIERS
    from sequoia_plan.runtime.pair import LINKS as OFFLOADS
    from sequoia_plan.runtime.verify import VERIFIERS as RULES

    assert list(RULES) == VERIFIERS and list(OFFLOADS) == LINKS
    assert set(RARE_SETTINGS) < set(Sampling().settings())


MODEL = {"name": "m", "digest": "0", "content": "0", "dtype": "bfloat16"}
COMPILED = MODEL | {"placement": "compiled", "weights": "Q4_1"}
FUSED = MODEL | {"placement": "fused", "fused_layers": 3}
STREAMED = FUSED | {"placement": "streamed from disk", "resident_layers": 2, "layers": 9}


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize(
    ("planned", "loaded", "said"),
    [
        (COMPILED, COMPILED | {"weights": "BF16"}, "weights Q4_1, here BF16"),
        (COMPILED, FUSED, "placement compiled, here fused"),
        (FUSED, FUSED | {"fused_layers": 4}, "fused_layers 3, here 4"),
        (STREAMED, STREAMED | {"resident_layers": 3}, "resident_layers 2, here 3"),
        (FUSED, STREAMED, "placement fused, here streamed from disk"),
        (MODEL, MODEL | {"digest": "1", "dtype": "float32"}, "dtype bfloat16, here float32"),
        (MODEL, MODEL | {"digest": "1"}, "digest 0, here 1"),
        (MODEL, MODEL | {"content": "1", "name": "n"}, "content 0, here 1"),
    ],
)
def test_a_tree_that_was_solved_for_another_pair(capsys, role, planned, loaded, said):
    """Each difference is said once, in both directions, and no difference is not."""
    for first, second in ((planned, loaded), (loaded, planned), (planned, planned)):
        pair = SimpleNamespace(metadata={role: second})
        cli_pair.warn_if_foreign(Plan(models={role: first}), pair)
        printed = capsys.readouterr().err
        assert printed.count("Warning: ") == (first is not second)
        if second is loaded:
            assert f"another {role} than {second['name']} ({said}); its" in printed


def test_a_warning_is_one_line(run, monkeypatch):
    """Without the place in the code, which says nothing to those who run a command."""

    def warned(path):
        warnings.warn("the disk is slow", stacklevel=1)
        return load_tree(path)

    monkeypatch.setattr("sequoia_plan.artifacts.load_tree", warned)
    assert run("show", "tree.safetensors").stderr == "Warning: the disk is slow\n"


@pytest.mark.slow
def test_generate_takes_settings_from_the_tree_and_warns_of_another_verifier(run):
    settings = {"temperature": 0.8, "top_p": 0.9, "verifier": "traversal"}
    plan = {"acceptance": [0.5, 0.2], "settings": settings}
    save_tree(TokenTree([-1, 0, 0, 1], plan), "warm.safetensors")
    arguments = ("generate", "--tree", "warm.safetensors", "--prompt", "Hi", "--seed", "0", *SHORT)
    as_made = run(*arguments)
    same = run(*arguments, "--verifier", "traversal", "--top-p", "0.9")
    other = run(*arguments, "--verifier", "topk", "--sampling", "top-k=9,min_p=0.1")
    assert answer(as_made)["tokens"] == answer(same)["tokens"] and answer(other)["new_tokens"] == 8
    warning = "solved for the verifier traversal, this is topk; its predictions do not apply"
    assert "Warning: the tree" not in as_made.stderr and warning in other.stderr


@pytest.mark.slow
def test_generate_with_the_embedded_pair(run):
    """The installed command, in a process of its own, streams what JSON has."""
    command = ("generate", "--prompt", "-", *SHORT)
    generated = answer(run(*command, input="Hi!"))
    streamed = subprocess.run(
        [sys.executable, "-m", "sequoia_plan", *command[:-1]],
        capture_output=True, text=True, check=True, input="Hi!",
    )  # fmt: skip
    names = {"text", "tokens", "new_tokens", "steps", "tokens_per_step", "seconds", "finish_reason"}
    assert set(generated) == names
    assert 0 < generated["new_tokens"] == len(generated["tokens"]) <= 8
    assert streamed.stdout.strip() == generated["text"].strip()
    assert "tokens a step" in streamed.stderr


@pytest.mark.slow
def test_a_prompt_longer_than_the_context(run):
    result = run("generate", "--prompt", "-", input="word " * 9000)
    check_refused(result, 1, "prompt: 90.*expected at most 8191")


@pytest.mark.slow
def test_profile_command_on_the_embedded_pair(run, tmp_path, monkeypatch):
    """The whole command, short, and solve and bench take what it wrote."""
    monkeypatch.setattr(latency, "SIZES", (1, 2, 4, 8))
    monkeypatch.setattr(profiling, "LATENCY_SECONDS", 0)
    texts = ("Write a short story about a robot.", "Held out.", "What is rain?", "Held out, too.")
    (tmp_path / "p.txt").write_text("\n\n".join(texts))
    options = ("--prompts", "p.txt", "--tokens", "12", "--temperature", "0.7")
    options += ("--sampling", "top_k=40", "--context", "128,40")
    printed = answer(run("profile", *options, "-o", "measured.yaml", "--json"))
    profile = Profile.load("measured.yaml")
    assert [each.context for each in (profile.latency, *profile.longer)] == [40, 128]
    assert printed["prompts"] == {"all": 2}
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert profile.settings == Sampling(temperature=0.7, top_k=40, verifier="traversal").settings()
    assert answer(run("solve", "measured.yaml", "--json"))["predicted_speedup"] >= 1
    plan = load_tree("tree.safetensors").plan
    assert (plan.models, plan.settings) == (profile.models, profile.settings)
    short = ("--prompts", "p.txt", "--limit", "1", "--tokens", "4", "--only", "plain", "--json")
    measured = answer(run("bench", *short))["settings"]["sampling"]
    assert measured["verifier"] == "traversal" and measured["top_k"] == 40


@pytest.mark.parametrize(("idle", "said"), [(2.0, ""), (1.7, ""), (None, ""), (0.9, "0.9 cores")])
def test_a_busy_machine_is_told(monkeypatch, idle, said):
    """With fewer idle cores than threads, every pass waits for the thread that waits for a core."""
    monkeypatch.setattr("sequoia_plan.profiler.hardware.idle_cores", lambda: idle)
    warning = cli_pair._busy_text(2)
    assert bool(warning) == bool(said) and said in warning
    assert not said or "or use --threads 1" in warning


def test_threads(run):
    """The number is torch's own, and so it is in profiles."""
    run("generate", "--threads", "2", "--tree", "missing")
    threads = fingerprint("cpu")["threads"], torch.get_num_threads()
    torch.set_num_threads(1)
    assert threads == (2, 2)


def test_compiling_is_announced_once():
    announced = []
    with when_numba_compiles(lambda: announced.append(1)):
        function = numba.njit(lambda number: number + 1)
        assert function(1) == function(2) - 1
    function(1.5)  # compiled anew, outside
    assert announced == [1]
