"""The command line: its contract, and one clear line for bad input."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner
from msgspec.structs import replace

from sequoia_plan.artifacts import (
    Acceptance,
    Latency,
    LevelCounts,
    Profile,
    TokenTree,
    load_tree,
    save_tree,
)
from sequoia_plan.planner.cli import main
from sequoia_plan.planner.cli import pair as cli_pair
from sequoia_plan.profiler import latency
from sequoia_plan.profiler.hardware import fingerprint, idle_cores

PROFILE = Profile(
    Acceptance.given((0.5, 0.125, 0.05)),
    800,
    Latency({1: 0.04, 4: 0.042, 16: 0.05}, {1: 0.003, 16: 0.004}, 0.001, 128),
)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a command in a folder that holds a profile and a tree."""
    monkeypatch.chdir(tmp_path)
    PROFILE.save("profile.yaml")
    save_tree(
        TokenTree.from_parents(
            [-1, 0, 0, 1],
            {"acceptance": [0.5, 0.2], "settings": {"temperature": 0.0, "top_p": 1.0}},
        ),
        "tree.safetensors",
    )

    def invoke(*arguments, **options):
        return CliRunner().invoke(main, arguments, **options)

    return invoke


def one_line(result, code, *parts):
    """The command failed with `code` and one line that holds all `parts`."""
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    lines = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert len(lines) == 1
    for part in parts:
        assert part in lines[0]


def test_solve_json_is_the_contract(run):
    result = run("solve", "--budget", "16", "--depth", "5", "--json")
    assert result.exit_code == 0
    answer = json.loads(result.stdout)
    contract = {
        "size",
        "depth",
        "branching",
        "expected_tokens",
        "predicted_speedup",
        "parents",
        "solver",
        "seconds",
    }
    assert set(answer) == contract | {
        "upper_bound",
        "speedup_bound",
        "interval",
        "interval_new_kind",
        "verifier",
        "alternatives",
        "by_match",
        "tree_speedup",
        "replayed_speedup",
        "speedup_by_kind",
        "tokens_by_kind",
    }
    tree = load_tree("tree.safetensors")
    assert tree.parents.tolist() == answer["parents"]
    assert tree.plan.expected_tokens == answer["expected_tokens"]
    assert answer["predicted_speedup"] > 1


def test_solve_says_what_other_prompts_may_give(run):
    """From kinds that differ a wider interval, in the text as in the plan; from a profile without
    kinds that it is not known."""
    assert (
        "prompts of a new kind   not known: the profiled prompts name fewer than 4 kinds\n"
        in run("solve", "--budget", "16", "--depth", "5").stdout
    )
    kinds = {
        name: (LevelCounts(100, (accepted, 10.0)),)
        for name, accepted in (("a", 30.0), ("b", 40.0), ("c", 50.0), ("d", 60.0))
    }
    replace(
        Profile.load("profile.yaml"),
        acceptance=(0.45, 0.1),
        trials=300,
        levels=(LevelCounts(400, (180.0, 40.0)),),
        kinds=kinds,
    ).save("kinds.yaml")
    text = run("solve", "kinds.yaml", "--budget", "16", "--depth", "5").stdout
    plan = load_tree("tree.safetensors").plan
    (low, high), (slow, fast) = (
        plan.interval_new_kind.expected_tokens,
        plan.interval_new_kind.predicted_speedup,
    )
    assert (
        low
        < plan.interval.expected_tokens[0]
        < plan.expected_tokens
        < plan.interval.expected_tokens[1]
        < high
    )
    assert (
        f"prompts of a new kind   {low:.3f} to {high:.3f} tokens a step, "
        f"{slow:.3f} to {fast:.3f}x (95 %)\n" in text
    )
    assert "; of the one for prompts of a new kind: " in text


def test_solve_same_input_same_bytes(run, tmp_path):
    for name in ("a", "b"):
        assert (
            run(
                "solve",
                "profile.yaml",
                "--budget",
                "12",
                "--depth",
                "4",
                "--objective",
                "tokens",
                "-o",
                name,
            ).exit_code
            == 0
        )
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize(
    ("name", "text"), [("p.json", "[0.5, 0.2, 1e-5]"), ("p.yaml", "- [0.5, 0.2]\n- [0.4, 0.3]\n")]
)
def test_solve_acceptance_file(run, tmp_path, name, text):
    (tmp_path / name).write_text(text)
    answer = json.loads(
        run("solve", "--acceptance", name, "--budget", "6", "--depth", "4", "--json").stdout
    )
    assert answer["size"] == 6
    assert answer["predicted_speedup"] is None


def test_show(run, tmp_path):
    text = run("show").stdout
    assert "4 nodes, depth 3, level widths 1 2 1, branching 2" in text
    assert "0.250" in text
    for suffix in ("png", "svg"):
        assert run("show", "tree.safetensors", "--plot", f"t.{suffix}").exit_code == 0
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (tmp_path / "t.svg").read_bytes()
    assert json.loads(run("show", "--json").stdout)["parents"] == [-1, 0, 0, 1]
    one_line(run("show", "--plot", "t.pdf"), 2, "t.pdf", ".pdf", "expected .png or .svg")


@pytest.mark.parametrize(
    ("arguments", "code", "parts"),
    [
        (("solve", "--budget", "0"), 2, ["--budget", "0 is not in the range"]),
        (("solve", "--budget", "many"), 2, ["--budget", "many"]),
        (("solve", "--depth", "0"), 2, ["--depth"]),
        (("solve", "--depth", "1"), 2, ["depth 1 is the root alone", "allow a depth of 2"]),
        (("solve", "--budget", "1000000000000", "--objective", "tokens"), 2, ["budget", "1000000"]),
        (
            ("solve", "--budget", "100", "--depth", "3", "--objective", "tokens"),
            2,
            ["no tree of 100 nodes", "the largest has 13"],
        ),
        (("solve", "nothing.yaml"), 1, ["nothing.yaml", "No such file", "expected a profile"]),
        (("solve", "tree.safetensors"), 1, ["tree.safetensors", "not "]),
        (("solve", "profile.yaml", "--acceptance", "x.json"), 2, ["not both"]),
        (("solve", "--acceptance", "x.json"), 1, ["x.json", "No such file"]),
        (
            ("solve", "-o", "missing/t.safetensors"),
            1,
            ["missing/t.safetensors", "cannot be written"],
        ),
        (("show", "nothing"), 1, ["nothing", "No such file"]),
        (("show", "profile.yaml"), 1, ["profile.yaml", "not a tree file"]),
        (
            ("show", "llama3"),
            1,
            ["llama3", "No such file", "a tree of the catalog: ", "llama3-70b-8b-cnn-768x18"],
        ),
        (("export", "nothing", "--format", "nxd", "-o", "n.json"), 1, ["nothing", "No such file"]),
        (
            ("export", "tree.safetensors", "--format", "onnx", "-o", "n.json"),
            2,
            ["--format", "onnx", "medusa"],
        ),
        (("export", "tree.safetensors", "--format", "nxd"), 2, ["--output"]),
        (
            ("export", "tree.safetensors", "--format", "nxd", "-o", "missing/n.json"),
            1,
            ["missing/n.json", "cannot be written"],
        ),
        (("import", "nothing"), 1, ["nothing", "No such file", "expected Medusa choices"]),
        (("import", "profile.yaml"), 1, ["profile.yaml", "neither JSON nor a file saved by torch"]),
        (
            ("import", "tree.safetensors"),
            1,
            ["tree.safetensors", "this is a safetensors file; if it is a tree, it needs no import"],
        ),
        (("generate", "--tree", "nothing"), 1, ["nothing", "No such file"]),
        (("generate", "--temperature", "-1"), 2, ["temperature: found -1.0"]),
        (("generate", "--top-p", "2"), 2, ["top_p: found 2.0"]),
        (("generate", "--top-k", "-3"), 2, ["top_k: found -3"]),
        (("generate", "--min-p", "7"), 2, ["min_p: found 7.0"]),
        (("generate", "--draft-temperature", "0"), 2, ["draft_temperature: found 0.0"]),
        (("generate", "--verifier", "eagle"), 2, ["--verifier", "'eagle' is not one of"]),
        (("generate", "--target", "no/such/folder"), 1, ["no/such/folder"]),
        (("generate", "--target", "x.gguf"), 1, ["x.gguf", "no such file"]),
        (("generate", "--draft", "tree.safetensors"), 1, ["tree.safetensors", "not a draft"]),
        (
            ("generate", "--draft", "missing.safetensors"),
            1,
            ["missing.safetensors", "no such file"],
        ),
        (("profile", "--prompts", "nothing.jsonl"), 1, ["nothing.jsonl", "No such file"]),
        (("profile", "--temperature", "nan"), 2, ["temperature: found nan"]),
        (
            ("profile", "--also", "heat=1"),
            2,
            ["--also heat=1", "'heat=1'", "a NAME of temperature, top_p"],
        ),
        (("profile", "--also", "top_p=much"), 2, ["'top_p=much'", "NAME=VALUE"]),
        (("profile", "--also", "top_p=2"), 2, ["top_p: found 2.0"]),
        (("profile", "--precision", "much"), 2, ["--precision much", "a percentage"]),
        (("profile", "--merge", "nothing.yaml"), 1, ["nothing.yaml", "No such file"]),
        (
            ("profile", "--merge", "profile.yaml"),
            1,
            ["profile.yaml", "has no acceptance.levels", "profile again"],
        ),
        (("bench", "--tree", "nothing"), 1, ["nothing", "No such file"]),
    ],
)
def test_bad_input(run, arguments, code, parts):
    one_line(run(*arguments), code, *parts)


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("[0.9, 0.5]", "sums to 1.4"),
        ("[0.5, -0.1]", "p[2] is -0.1"),
        ("[NaN]", "p[1] is nan"),
        ("[]", "non-empty"),
        ("[[0.5], [0.1, 0.1]]", "equal lengths"),
        ("{", "p.json: not YAML at line 1; expected a JSON or YAML list"),
        ("5", "non-empty"),
    ],
)
def test_bad_acceptance(run, tmp_path, content, part):
    (tmp_path / "p.json").write_text(content)
    result = run("solve", "--acceptance", "p.json", "--budget", "4", "--depth", "3")
    assert result.exit_code in (1, 2)
    one_line(result, result.exit_code, part)


def test_truncated_foreign_and_future_tree_files(run, tmp_path):
    whole = (tmp_path / "tree.safetensors").read_bytes()
    (tmp_path / "cut").write_bytes(whole[:-10])
    (tmp_path / "future").write_bytes(whole.replace(b'\\"version\\":1', b'\\"version\\":7'))
    (tmp_path / "foreign").write_bytes(b"PK\x03\x04" + bytes(100))
    one_line(run("show", "cut"), 1, "cut", "damaged", "solve again")
    one_line(run("show", "future"), 1, "future", "version 7, expected 1")
    one_line(run("show", "foreign"), 1, "foreign", "not a tree file")


def test_export_and_import(run, tmp_path):
    for form, name in (
        ("medusa", "m.json"),
        ("nxd", "n.json"),
        ("growmap", "g.json"),
        ("growmap", "g.pt"),
    ):
        assert (
            run("export", "tree.safetensors", "--format", form, "-o", name).stdout
            == f"wrote {name}: 4 nodes as {form}\n"
        )
        answer = json.loads(run("import", name, "-o", "back.safetensors", "--json").stdout)
        assert answer == {
            "output": "back.safetensors",
            "size": 4,
            "depth": 3,
            "branching": 2,
            "parents": [-1, 0, 0, 1],
        }
        assert load_tree("back.safetensors") == load_tree("tree.safetensors")
        assert run("show", "back.safetensors").exit_code == 0
    assert (
        run("import", "n.json", "-o", "t").stdout
        == "wrote t: 4 nodes, depth 3, level widths 1 2 1\n"
    )
    assert (
        json.loads(
            run("export", "sequoia-example-64x6", "--format", "dot", "-o", "t.dot", "--json").stdout
        )["size"]
        == 64
    )


def test_bad_prompts_file(run, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"text": "fine"}\n{"txt": "not fine"}\n')
    one_line(run("profile", "--prompts", "p.jsonl"), 1, "p.jsonl", "line 2")


def test_a_failed_solve_leaves_the_old_tree(run, tmp_path):
    before = (tmp_path / "tree.safetensors").read_bytes()
    (tmp_path / "profile.yaml").write_text(PROFILE.to_yaml().replace("0.04,", "-0.04,", 1))
    one_line(run("solve"), 1, "profile.yaml", "latency.target[1]: found -0.04")
    assert (tmp_path / "tree.safetensors").read_bytes() == before


def test_the_command_line_offers_the_runtimes_verifiers_and_links():
    from sequoia_plan.planner.cli.options import LINKS, VERIFIERS
    from sequoia_plan.runtime.pair import LINKS as OFFLOADS
    from sequoia_plan.runtime.verify import VERIFIERS as RULES

    assert list(RULES) == VERIFIERS and list(OFFLOADS) == LINKS


def test_generate_takes_settings_from_the_tree_and_warns_of_another_verifier(run, tmp_path):
    settings = {"temperature": 0.8, "top_p": 0.9, "verifier": "traversal"}
    save_tree(
        TokenTree.from_parents([-1, 0, 0, 1], {"acceptance": [0.5, 0.2], "settings": settings}),
        "warm.safetensors",
    )
    arguments = (
        "generate",
        "--tree",
        "warm.safetensors",
        "--prompt",
        "Hi",
        "--max-new-tokens",
        "8",
        "--dtype",
        "float32",
        "--json",
    )
    as_made, same, other = (
        run(*arguments),
        run(*arguments, "--verifier", "traversal", "--top-p", "0.9"),
        run(*arguments, "--verifier", "topk", "--top-k", "9"),
    )
    assert as_made.exit_code == same.exit_code == other.exit_code == 0, other.output
    assert json.loads(as_made.stdout)["tokens"] == json.loads(same.stdout)["tokens"]
    assert "Warning: the tree" not in as_made.stderr
    assert (
        "the tree was solved for the verifier traversal, this is topk; its predictions do not apply"
        in other.stderr
    )


def test_the_verifier_is_chosen_recorded_and_used(run, tmp_path, monkeypatch):
    """The whole way on the embedded pair at temperature 0.6, short: both are measured, one is
    taken, everything goes by it, an option overrides."""
    monkeypatch.setattr(latency, "SIZES", (1, 2, 4))
    lines = [
        json.dumps({"text": text})
        for text in ("Write a story.", "Held out.", "What is rain?", "Held out, too.")
    ]
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    measuring = (
        "--prompts",
        "p.jsonl",
        "--tokens",
        "8",
        "--latency-seconds",
        "0",
        "--dtype",
        "float32",
        "--temperature",
        "0.6",
    )
    text = run("profile", *measuring, "-o", "both.yaml")
    assert text.exit_code == 0 and ", sequoia)" in text.stdout and ", traversal)" in text.stdout, (
        text.output
    )
    profile = Profile.load("both.yaml")
    assert profile.all_verifiers == ("traversal", "sequoia")
    solved = json.loads(
        run(
            "solve", "both.yaml", "--objective", "tokens", "--budget", "4", "--depth", "3", "--json"
        ).stdout
    )
    (other,) = solved["alternatives"]
    assert {solved["verifier"], other} == {"traversal", "sequoia"} and solved["alternatives"][
        other
    ]["advantage"] >= 1
    said = run("solve", "both.yaml").stdout
    tree = load_tree("tree.safetensors")
    taken, (other,) = tree.plan.settings["verifier"], tree.plan.alternatives
    assert (
        f"verifier                {taken}: " in said and f" of the best tree for {other} (" in said
    )
    assert f"verifier                {taken}: " in run("show").stdout
    forced = json.loads(
        run("solve", "both.yaml", "--verifier", other, "--json", "-o", "other.safetensors").stdout
    )
    assert (
        forced["verifier"] == other
        and not forced["alternatives"]
        and forced["size"] == tree.plan.alternatives[other].size
    )
    one_line(
        run("solve", "both.yaml", "--verifier", "spectr"),
        2,
        "verifier: found 'spectr', expected traversal or sequoia",
        "profile --verifier",
    )
    short = ("--prompt", "Hi", "--max-new-tokens", "4", "--dtype", "float32")
    made = [
        run("generate", "--tree", name, *short)
        for name in ("tree.safetensors", "other.safetensors")
    ]
    assert all(
        each.exit_code == 0 and "Warning: the tree was solved for the verifier" not in each.stderr
        for each in made
    ), made
    bench = (
        "bench",
        "--tree",
        "other.safetensors",
        "--prompts",
        "p.jsonl",
        "--limit",
        "1",
        "--tokens",
        "4",
        "--only",
        "plain",
        "--dtype",
        "float32",
        "--json",
    )
    assert json.loads(run(*bench).stdout)["settings"]["sampling"]["verifier"] == other
    assert (
        json.loads(run(*bench, "--verifier", taken).stdout)["settings"]["sampling"]["verifier"]
        == taken
    )
    alone = run("profile", *measuring, "--verifier", "sequoia", "-o", "one.yaml", "--json")
    assert Profile.load("one.yaml").all_verifiers == ("sequoia",) and "verifiers" not in json.loads(
        alone.stdout
    )


def sequoia_plan(*arguments, cwd, **options):
    """The installed command, in a process of its own."""
    command = [sys.executable, "-m", "sequoia_plan.planner.cli", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, **options)


def test_generate_with_the_embedded_pair(run, tmp_path):
    result = sequoia_plan(
        "generate",
        "--prompt",
        "-",
        "--max-new-tokens",
        "12",
        "--dtype",
        "float32",
        "--json",
        cwd=tmp_path,
        input="What is two plus two?",
    )
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    assert set(answer) == {
        "text",
        "tokens",
        "new_tokens",
        "steps",
        "tokens_per_step",
        "seconds",
        "finish_reason",
    }
    assert 0 < answer["new_tokens"] <= 12
    assert answer["new_tokens"] == len(answer["tokens"])
    streamed = sequoia_plan(
        "generate",
        "--prompt",
        "What is two plus two?",
        "--max-new-tokens",
        "12",
        "--dtype",
        "float32",
        cwd=tmp_path,
    )
    assert streamed.stdout.strip() == answer["text"].strip()
    assert "tokens a step" in streamed.stderr


def test_a_prompt_longer_than_the_context(run, tmp_path):
    result = sequoia_plan("generate", "--prompt", "-", cwd=tmp_path, input="word " * 9000)
    assert result.returncode == 1
    assert "prompt: 90" in result.stderr
    assert "expected at most 8191 (the model's context less one new token)" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_draft_with_another_vocabulary(run, tmp_path, pair):
    """A real folder with a real tokenizer that knows one token fewer under the same number."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        vocab_size=49152,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "other")
    pair.tokenizer.save_pretrained(tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    a, b = list(vocabulary)[1000:1002]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    file.write_text(json.dumps(tokenizer))
    result = run("generate", "--draft", str(tmp_path / "other"))
    one_line(
        result,
        1,
        "draft: its tokenizer differs from the target's at",
        "shares the target's tokenizer",
    )


def test_profile_command_on_the_embedded_pair(run, tmp_path, monkeypatch):
    """The whole command, short; solve takes what it wrote, and the counts can be added up."""
    monkeypatch.setattr(latency, "SIZES", (1, 2, 4, 8))
    (tmp_path / "p.txt").write_text(
        "Write a short story about a robot.\n\nHeld out.\n\nWhat is rain?\n\nHeld out, too.\n"
    )
    chosen = ("--temperature", "0.7", "--top-k", "40", "--verifier", "traversal")
    short = ("--tokens", "12", "--latency-seconds", "0", "--also", "temperature=0,verifier=topk")
    short += ("--context", "128,40")
    result = run("profile", "--prompts", "p.txt", "-o", "measured.yaml", "--json", *chosen, *short)
    assert result.exit_code == 0, result.output
    greedy_name = "measured-temperature=0,verifier=topk"
    profile, greedy = Profile.load("measured.yaml"), Profile.load(f"{greedy_name}.yaml")
    for name, short_profile in (("measured", profile), (greedy_name, greedy)):
        long_profile = Profile.load(f"{name}-context=128.yaml")
        assert (short_profile.latency.context, long_profile.latency.context) == (40, 128)
        assert short_profile.latency.target != long_profile.latency.target
        assert replace(long_profile, latency=short_profile.latency) == short_profile
    answer = json.loads(result.stdout)
    assert answer["trials"] == profile.trials == sum(level.trials for level in profile.levels) >= 24
    assert (
        answer["also"][0]["output"].endswith("topk.yaml")
        and answer["also"][0]["trials"] == greedy.trials
        and answer["also"][1]["output"].endswith("context=128.yaml")
    )
    assert {p.name for p in tmp_path.iterdir() if "journal" in p.name} == set()
    assert greedy.settings == profile.settings | {"temperature": 0.0, "verifier": "topk"}
    doubled = tuple(
        LevelCounts(2 * level.trials, tuple(2 * count for count in level.counts))
        for level in profile.levels
    )
    replace(profile, levels=doubled, trials=2 * profile.trials).save("more.yaml")
    merged = json.loads(
        run(
            "profile",
            "--merge",
            "measured.yaml",
            "--merge",
            "more.yaml",
            "-o",
            "both.yaml",
            "--json",
        ).stdout
    )
    assert merged["trials"] == 3 * profile.trials and merged["acceptance"] == pytest.approx(
        profile.acceptance, abs=2e-6
    )
    one_line(
        run("profile", "--merge", "measured.yaml", "--merge", answer["also"][0]["output"]),
        1,
        "its settings differ from those of measured.yaml",
    )
    assert profile.latency is not None
    assert profile.latency.target.keys() == profile.latency.draft.keys()
    expected = {
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": 40,
        "min_p": 0.0,
        "draft_temperature": None,
        "verifier": "traversal",
    }
    assert profile.settings == expected
    assert profile.models["target"]["name"] == "SmolLM2-135M-Instruct"
    solved = run("solve", "measured.yaml", "--json")
    assert json.loads(solved.stdout)["predicted_speedup"] >= 1
    plan = load_tree("tree.safetensors").plan
    assert plan.models == profile.models
    assert plan.settings == expected


@pytest.mark.parametrize(("idle", "said"), [(2.0, ""), (1.7, ""), (None, ""), (0.9, "0.9 cores")])
def test_a_busy_machine_is_told(monkeypatch, idle, said):
    """With fewer idle cores than threads, every pass waits for the thread that waits for a core."""
    monkeypatch.setattr("sequoia_plan.profiler.hardware.idle_cores", lambda: idle)
    warning = cli_pair._busy_text(2)
    assert bool(warning) == bool(said) and said in warning
    assert (
        not said or "measured times are worthless; stop other work, or use --threads 1" in warning
    )


def test_idle_cores_are_counted():
    assert 0 <= idle_cores(0.05) <= os.cpu_count() + 1


def test_threads(run):
    """The number is torch's own, and so it is in profiles."""
    threads = torch.get_num_threads()
    try:
        result = run("generate", "--threads", "1", "--tree", "missing")
        assert result.exit_code == 1 and torch.get_num_threads() == 1
        assert fingerprint("cpu")["threads"] == 1
    finally:
        torch.set_num_threads(threads)
    one_line(run("generate", "--threads", "0"), 2, "--threads", "0 is not in the range")
