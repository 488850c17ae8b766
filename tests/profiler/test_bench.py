"""Methods side by side: each decodes what it should, and the figures are what they are called."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch
from architectures import resembling, tiny
from click.testing import CliRunner
from msgspec.structs import replace
from torch import nn

from sequoia_plan.artifacts import (
    Acceptance,
    ArgumentError,
    BenchResult,
    Latency,
    LevelCounts,
    Plan,
    Profile,
    SequoiaPlanError,
    TokenTree,
    save_tree,
)
from sequoia_plan.artifacts.bench_result import BenchSettings, Prediction, Ratio, TreeShape
from sequoia_plan.artifacts.expected_tokens import expected_tokens
from sequoia_plan.artifacts.plan import MatchPlan
from sequoia_plan.artifacts.prediction import prediction_for
from sequoia_plan.planner import cli, solve
from sequoia_plan.planner.report.bench_table import finding, print_table, run_labels
from sequoia_plan.planner.report.html import INK, LINE
from sequoia_plan.planner.report.page import page
from sequoia_plan.planner.solving.baselines import bench_trees
from sequoia_plan.profiler.bench import (
    TITLES,
    PromptRun,
    bench,
    compare,
    make_methods,
    predicted_by_kind,
    summary,
    with_full_vocabulary,
)
from sequoia_plan.profiler.journal import Journal, discard
from sequoia_plan.runtime import Pair, Sampling, SequoiaDecoder
from sequoia_plan.runtime.pair import DEFAULT_DRAFT, LANGUAGE_MODEL

LATENCY = {"target": [[1, 0.04], [8, 0.05]], "draft": [[1, 0.002], [8, 0.003]]}
TREE = TokenTree.from_parents(
    [-1, 0, 0, 1, 1, 2, 3], {"acceptance": [0.5, 0.25], "latency": LATENCY}
)


@pytest.fixture(scope="module")
def models():
    """A tiny Llama, a draft that resembles it and covers part of its vocabulary, and what a
    tokenizer must know."""
    target = tiny("Llama")
    draft = resembling(target)
    draft_vocabulary = torch.arange(0, draft.lm_head.out_features, 2)
    head = nn.Linear(draft.lm_head.in_features, draft_vocabulary.numel(), bias=False)
    head.weight.data.copy_(draft.lm_head.weight.data[draft_vocabulary])
    draft.lm_head = head
    draft.register_buffer("d2t", draft_vocabulary, persistent=False)
    return Pair(
        target,
        draft,
        SimpleNamespace(eos_token_id=None, chat_template=None),
        {"target": {"name": "t"}, "draft": {"name": "d"}},
    )


def test_greedy_methods_say_the_same(models, monkeypatch):
    """Ours, and transformers' four ways: the same tokens, counted the same way."""
    said = {}
    generate = type(models.target).generate

    def remembering(model, *args, **options):
        said["now"] = generate(model, *args, **options)
        return said["now"]

    monkeypatch.setattr(type(models.target), "generate", remembering)
    decoders = make_methods(models, models, bench_trees(TREE, "traversal"), Sampling(), 24)
    same_as_sequoia = ("top-k", "tree", "traversal")  # when greedy, and without trees by match
    assert list(decoders) == [name for name in TITLES if name not in same_as_sequoia]
    prompt = list(range(3, 20))
    runs = {name: decode(prompt, 0) for name, decode in decoders.items()}
    assert {run.tokens for run in runs.values()} == {24}
    assert runs["plain"].passes == runs["generate"].passes == 24
    for name, run in runs.items():
        assert 0 < run.first_seconds < run.seconds, name
        assert 1 <= run.first_tokens <= run.tokens, name
        assert name in ("plain", "generate") or run.passes <= 24, name
    assert runs["sequoia"].passes < 24 and runs["assisted"].passes < 24
    texts = []
    for name in ("generate", "assisted", "lookup"):
        decoders[name](prompt, 0)
        texts.append(said["now"].tolist())
    assert texts[0] == texts[1] == texts[2]
    assert not models.target._forward_pre_hooks


def test_a_covering_draft_gets_a_full_head_and_stays_as_it_was(models):
    ids = torch.arange(5)[None]
    before = models.draft(ids).logits
    wide = with_full_vocabulary(models.draft)(ids).logits
    assert wide.shape[-1] == models.target.config.vocab_size
    assert torch.equal(wide[..., models.draft.d2t], before)
    assert wide.isneginf().sum() == wide.numel() - before.numel()
    assert torch.equal(models.draft(ids).logits, before)
    assert with_full_vocabulary(models.target) is models.target


@pytest.mark.parametrize(
    ("filters", "keeps_one"),
    [
        ({"top_p": 0.001}, True),
        ({"top_k": 1}, True),
        ({"min_p": 1.0}, True),
        ({"top_p": 0.9, "top_k": 20, "min_p": 0.01}, False),
    ],
)
def test_sampling_methods_apply_every_filter(models, monkeypatch, filters, keeps_one):
    """Where a filter keeps one token, every method says the same at any temperature; where the
    filters keep several tokens (the control), they do not."""
    returned = []

    def remember(owner):
        generate = owner.generate

        def remembering(*args, **options):
            result = generate(*args, **options)
            returned.append(getattr(result, "sequences", result).tolist())
            return result

        monkeypatch.setattr(owner, "generate", remembering)

    remember(SequoiaDecoder)
    remember(type(models.target))
    decoders = make_methods(
        models, models, bench_trees(TREE, "traversal"), Sampling(0.8, **filters), 12
    )
    assert list(decoders) == [name for name in TITLES if name != "tree"]
    texts = set()
    for decode in decoders.values():
        decode([1, 2, 3], 0)
        texts.add(str(returned[-1]))  # the last to return: an assistant's own calls came before
    assert (len(texts) == 1) == keeps_one


def test_only_and_unknown_names(models):
    assert list(
        make_methods(
            models, models, bench_trees(TREE, "traversal"), Sampling(), 4, ["traversal", "plain"]
        )
    ) == ["plain", "traversal"]
    assert list(
        make_methods(models, models, bench_trees(TokenTree.chain(1), "traversal"), Sampling(), 4)
    ) == ["plain", "generate", "assisted", "lookup"]
    with pytest.raises(ArgumentError, match="only: found 'medusa', expected plain, generate"):
        make_methods(models, models, bench_trees(TREE, "traversal"), Sampling(), 4, ["medusa"])
    with pytest.raises(ArgumentError, match="0 methods"):
        bench({}, [[1]])


def test_trees_of_methods_stay_within_the_tree():
    found = bench_trees(TREE, "traversal")
    assert set(found) == set(TITLES) - {"generate", "assisted", "lookup", "tree"}
    for name, (tree, _) in found.items():
        assert tree.size <= TREE.size and tree.depth <= TREE.depth, name
    assert found["chains"][0].parents.tolist() == [-1, 0, 0, 1, 2, 3, 4]
    by_match = TokenTree(TREE.parents, by_match={2: TokenTree(TREE.parents, looks_up=True)})
    trees = bench_trees(by_match, "traversal")
    assert set(trees) == set(TITLES) - {"generate", "assisted", "lookup"}
    assert trees["tree"][0] == trees["top-k"][0] == TREE  # without those that look up
    assert trees["sequoia"][0] == trees["traversal"][0] == by_match


def test_figures_are_what_they_are_called():
    """Known runs: ratios by prompt, speed after the first tokens, passes over all prompts."""
    slow = [PromptRun(10, 9, 10.0, 1, 1.0), PromptRun(10, 9, 20.0, 1, 2.0)]
    fast = [PromptRun(12, 4, 6.0, 2, 1.0), PromptRun(12, 4, 12.0, 2, 2.0)]
    figures = summary({"plain": slow, "sequoia": fast})
    assert figures["plain"].tokens_per_second.median == 0.75
    assert figures["sequoia"].tokens_per_step == 3
    assert figures["sequoia"].first_token_seconds.median == 1.5
    assert figures["sequoia"].tokens_per_second_by_prompt == (2.0, 1.0)
    assert figures["sequoia"].speedup["plain"] == Ratio(2.0, 2.0, 2.0, 2.0, 2.0)
    assert (
        set(figures["sequoia"].speedup) == {"plain", "sequoia"}
        and figures["plain"].speedup["sequoia"].median == 0.5
    )
    assert figures["plain"].speedup["plain"].median == 1
    wild = summary(
        {"plain": slow * 8, "sequoia": [PromptRun(12, 4, 6.0 + i, 2, 1.0) for i in range(16)]}
    )["sequoia"].speedup["plain"]
    assert wild.interval_low < wild.median < wild.interval_high


def test_predictions_are_the_plans():
    trees = bench_trees(TREE, "traversal")
    planned = prediction_for(*trees["sequoia"], TREE.plan)
    assert planned.tokens_per_step == expected_tokens(TREE, Acceptance.given([0.5, 0.25]).rates)
    assert prediction_for(*trees["plain"], TREE.plan) == Prediction(1.0, 1.0)
    assert prediction_for(*trees["traversal"], TREE.plan) == planned
    over = replace(TREE.plan, settings={"temperature": 0.6, "verifier": "traversal"})
    assert prediction_for(*trees["traversal"], over) == planned
    assert prediction_for(*trees["sequoia"], over).tokens_per_step is None  # it yields less
    greedy = replace(over, settings={"temperature": 0.0, "verifier": "traversal"})
    assert prediction_for(*trees["chains"], greedy).tokens_per_step > 1
    assert prediction_for(*trees["chains"], TREE.plan) == Prediction()
    assert prediction_for(*trees["top-k"], TREE.plan) == Prediction()
    without_latency = Plan(acceptance=Acceptance.given((0.5, 0.25)))
    expected = Prediction(planned.tokens_per_step, None)
    assert prediction_for(*trees["sequoia"], without_latency) == expected
    assert prediction_for(*trees["sequoia"], Plan()).tokens_per_step is None
    warm = replace(TREE.plan, settings={"temperature": 0.6, "top_p": 0.9, "verifier": "sequoia"})
    same = {"temperature": 0.6, "top_p": 0.9, "top_k": 0, "verifier": "traversal"}
    assert prediction_for(*trees["sequoia"], warm, same) == planned
    unfiltered = {"temperature": 0.6, "top_p": 1.0}
    assert prediction_for(*trees["sequoia"], warm, unfiltered) == Prediction()
    assert prediction_for(*trees["plain"], warm, {"temperature": 0.0}) == Prediction(1.0, 1.0)


def check_page(text, plots):
    """One file that needs nothing else, its plots in the page's own colours, every id unique and
    every tag closed."""
    assert text.count("<svg") == text.count("</svg>") == text.count("<figure>") == plots
    assert (
        INK not in text
        and LINE not in text
        and "currentColor" in text
        and "prefers-color-scheme:dark" in text
    )
    links = {
        link
        for link in re.findall(r'(?:href|src)="([^"]*)"|url\(([^)]*)\)', text)
        for link in link
        if link
    }
    assert all(link.startswith(("#", "data:")) for link in links)
    ids = re.findall(r' id="([^"]*)"', text)
    assert {link[1:] for link in links if link.startswith("#")} <= set(ids)
    clips = re.findall(r'<clipPath id="([^"]*)"', text)
    assert len(clips) == len(set(clips))
    for svg in re.findall(r"<svg.*?</svg>", text, re.S):
        ElementTree.fromstring(svg)


def figures_of(tree, /, sampling=None, **speedups):
    """bench's result with these speed-ups over plain decoding, each with an interval of 0.1 to
    both sides."""
    runs = {name: [PromptRun(4, 3, 2.0, 1, 1.0)] for name in ("plain", *speedups)}
    methods = summary(runs)
    for name, method in methods.items():
        ratios = {}
        for reference in method.speedup:
            ratio = speedups.get(name, 1.0) / speedups.get(reference, 1.0)
            ratios[reference] = Ratio(ratio, ratio, ratio, ratio - 0.1, ratio + 0.1)
        methods[name] = replace(method, speedup=ratios)
    settings = BenchSettings((sampling or Sampling()).settings(), "float32", 1, 4)
    return BenchResult(
        settings,
        {"target": {"name": "<script>alert(1)</script>"}},
        {},
        methods,
        TreeShape(tree.size, tree.depth),
    )


def test_a_page_says_what_it_knows():
    """Without acceptance there is the tree and the speed-ups; text from files is never markup."""
    result = figures_of(TREE, sequoia=1.5)
    text = page(TokenTree(TREE.parents), [result])
    check_page(text, plots=2)
    assert "<script" not in text and "&lt;script&gt;" in text
    assert "our tree, Sequoia" in text and page(TokenTree(TREE.parents), [result]) == text
    assert "1.50x <small>1.40-1.60</small>" in text and finding(result) in text
    with_rank = TokenTree.from_parents([-1, 0], {"acceptance": [0.5], "trials": 90})
    text = page(with_rank, [result])
    check_page(text, plots=4)
    assert "power law" not in text
    by_level = TokenTree(
        TREE.parents, replace(TREE.plan, acceptance=((0.6, 0.2), (0.5, 0.0), (0.3, 0.3)))
    )
    text = page(by_level, [result, figures_of(TREE, Sampling(0.6), sequoia=1.2, traversal=1.3)])
    check_page(text, plots=6)
    assert (
        all(f"children of level {level}" in text for level in range(3))
        and "power law: rank^-1.58" in text
    )
    assert "off the spine" not in text
    by_class = TokenTree(
        TREE.parents,
        replace(TREE.plan, acceptance=(((0.6, 0.2), (0.0, 0.0)), ((0.7, 0.1), (0.2, 0.1)))),
    )
    text = page(by_class, [result])
    check_page(text, plots=6)
    assert all(
        f"children of level {level}" in text
        for level in ("0<", "1, on the spine<", "1, off the spine<")
    )
    assert "level 0, off" not in text and "Dashed: children of nodes off the spine" in text
    alone = page(TokenTree.from_parents([-1], TREE.plan), [figures_of(TokenTree.chain(1))])
    check_page(alone, plots=4)
    assert "nothing is speculated" in alone


def test_what_bench_found_in_a_sentence():
    """Who wins, and by how much, is said as it was measured."""
    good = figures_of(TREE, sequoia=1.5, traversal=1.6, generate=0.8)
    good.methods["traversal"] = replace(good.methods["traversal"], prediction=Prediction(2.0, 1.55))
    warm = figures_of(TREE, Sampling(0.6, 0.9), sequoia=1.3)
    text = finding(good, [warm])
    assert text.startswith(
        "Recommended is the tree of 7 nodes and depth 4, verified with traversal: "
        "1.60 times the speed of plain decoding at temperature 0 "
    )
    assert text.endswith(
        "(95 % interval 1.50 to 1.70; predicted 1.55); 1.30 at temperature 0.6, top-p 0.9."
    )
    both = figures_of(TREE, Sampling(0.6), sequoia=1.3, traversal=1.4)
    greedy = figures_of(TREE, sequoia=1.5)  # there sequoia stands for every verifier
    assert "; 1.40 at temperature 0.6" in finding(greedy, [both])
    assert "; 1.30 at temperature 0.6" in finding(
        figures_of(TREE, Sampling(0.9), sequoia=1.5), [both]
    )
    beaten = finding(figures_of(TREE, sequoia=1.5, lookup=1.7))
    assert beaten.startswith("Not the fastest is the tree") and beaten.endswith(
        "Faster was Hugging Face prompt lookup: 1.13 times our tree (1.03 to 1.23)."
    )
    close = finding(figures_of(TREE, sequoia=1.5, lookup=1.6))
    assert close.startswith("Recommended is the tree") and close.endswith(
        "Faster, but not certainly, was Hugging Face prompt lookup: "
        "1.07 times our tree (0.97 to 1.17)."
    )
    assert finding(figures_of(TREE, sequoia=1.05)).startswith("No gain is certain")
    assert finding(figures_of(TREE, sequoia=0.8)).startswith(
        "Recommended is plain decoding: the tree"
    )
    assert "Faster was chain" in finding(figures_of(TREE, sequoia=0.8, chain=1.2))
    assert "was not measured" in finding(figures_of(TREE, chain=1.2))
    apart = run_labels([good, figures_of(TokenTree.chain(1))])
    assert apart == ["temperature 0 (7 nodes, depth 4)", "temperature 0 (1 nodes, depth 1)"]


@pytest.mark.parametrize("columns", [80, 140])
def test_the_table_fits_the_terminal(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("FORCE_COLOR", "1")
    result = figures_of(TREE, **dict.fromkeys(set(TITLES) - {"plain"}, 1.5))
    print_table(result)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= columns
    assert (
        not any("…" in line for line in lines)
        and sum("1.50x (1.40-1.60)" in line for line in lines) == len(TITLES) - 1
    )
    assert any("first token" in line for line in lines) == (columns == 140)


def test_the_command(models, tmp_path, monkeypatch):
    """Table, JSON and file from tiny models; the prompts are the held-out ones, in another
    tokenizer's words."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli.decoding, "load_pair", lambda *args, **options: models)
    monkeypatch.setattr(
        "sequoia_plan.profiler.prompts.encode",
        lambda tokenizer, text: [ord(c) % 50 for c in text[:9]],
    )
    parts = {
        "step": 0.01,
        "draft": 0.002,
        "target": 0.006,
        "verify": 0.001,
        "commit": 0.0007,
        "host": 0.0003,
        "draw": 0.0005,
        "share_not_model": 0.2,
    }
    monkeypatch.setattr("sequoia_plan.profiler.breakdown.breakdown", lambda *_: parts)
    save_tree(TREE, "tree.safetensors")
    arguments = [
        "bench",
        "--limit",
        "2",
        "--tokens",
        "4",
        "--only",
        "plain",
        "--only",
        "sequoia",
        "--only",
        "generate",
    ]
    result = CliRunner().invoke(cli.main, [*arguments, "-o", "found.json", "--json"])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert json.loads((tmp_path / "found.json").read_text()) == answer
    assert list(answer["contenders"]) == ["plain", "generate", "sequoia"]
    assert answer["settings"]["prompts"] == 2 and answer["tree"]["size"] == 7
    key_in_file = {"commit": "keep"}
    assert answer["breakdown"] == {key_in_file.get(part, part): s for part, s in parts.items()}
    assert answer["contenders"]["sequoia"]["predicted"]["tokens_per_step"] == expected_tokens(
        TREE, Acceptance.given([0.5, 0.25]).rates
    )
    text = CliRunner().invoke(cli.main, arguments).stdout
    assert "our tree, Sequoia" in text and "Hugging Face generate" in text and "over plain" in text
    parts_text = (
        "10.0 ms (draft 2.0, target 6.0, verify 1.0, commit 0.7, host 0.3); "
        "20.0% of it is not model time"
    )
    assert parts_text in " ".join(text.split())
    assert "tree of 7 nodes" in text and "plain decoding" in text
    warm = [
        *arguments,
        "--temperature",
        "0.8",
        "--with",
        "found.json",
        "--report",
        "page.html",
        "--json",
    ]
    assert CliRunner().invoke(cli.main, warm).exit_code == 0
    check_page((tmp_path / "page.html").read_text(), plots=6)
    (tmp_path / "other.json").write_text("{}")
    foreign = CliRunner().invoke(cli.main, [*arguments, "--with", "other.json"])
    assert foreign.exit_code == 1 and "other.json: not figures of bench" in foreign.stderr
    wrong = CliRunner().invoke(cli.main, ["bench", "--only", "medusa"])
    assert wrong.exit_code == 2 and "only: found 'medusa'" in wrong.stderr


def test_transformers_has_an_assistant_where_it_cannot_use_the_draft(tmp_path, monkeypatch):
    """That is the embedded language model for the embedded draft that reads hidden states; a draft
    that reads them is refused."""
    monkeypatch.chdir(tmp_path)
    save_tree(TREE, "tree.safetensors")
    arguments = [
        "bench",
        "--limit",
        "1",
        "--tokens",
        "16",
        "--only",
        "assisted",
        "--dtype",
        "float32",
        "--json",
    ]
    result = CliRunner().invoke(cli.main, arguments)
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert {
        role: facts["name"] for role, facts in answer["models"].items() if role != "target"
    } == {"draft": DEFAULT_DRAFT, "assistant": LANGUAGE_MODEL}
    assert answer["contenders"]["assisted"]["tokens_per_step"] > 1.2
    refused = CliRunner().invoke(cli.main, [*arguments, "--assistant", DEFAULT_DRAFT])
    assert (
        refused.exit_code == 2
        and "transformers cannot use this draft; name a language model with --assistant"
        in refused.stderr
    )


def test_figures_survive_and_are_checked(tmp_path):
    result = figures_of(TREE, sequoia=1.5)
    result.save(tmp_path / "b.json")
    assert BenchResult.load(tmp_path / "b.json") == result
    text = (tmp_path / "b.json").read_text()
    for old, new, message in (
        (
            '"tokens_per_step": 1.3333',
            '"tokens_per_step": "many"',
            "contenders.plain.tokens_per_step: found 'many', expected a number >= 0",
        ),
        ('"prompts": 1', '"prompts": 0', "settings.prompts: found 0, expected a whole number >= 1"),
        (
            '"interval_low"',
            '"low_end"',
            "contenders.plain.speedup.plain.interval_low: found None, expected a number >= 0",
        ),
        (
            '"contenders"',
            '"contestants"',
            "not figures of bench; expected what sequoia-plan bench -o wrote",
        ),
        ("{", "", "not figures of bench; expected"),
    ):
        assert old in text
        (tmp_path / "b.json").write_text(text.replace(old, new, 1))
        with pytest.raises(SequoiaPlanError) as error:
            BenchResult.load(tmp_path / "b.json")
        assert str(error.value).startswith(f"{tmp_path / 'b.json'}: ") and message in str(
            error.value
        )


def test_an_interrupted_bench_goes_on(models, tmp_path, monkeypatch):
    """Stopped within the third prompt, started again: the first two are not decoded again, and the
    figures are those of one run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli.decoding, "load_pair", lambda *args, **options: models)
    monkeypatch.setattr(
        "sequoia_plan.profiler.prompts.encode",
        lambda tokenizer, text: [ord(c) % 50 for c in text[:9]],
    )
    save_tree(TREE, "tree.safetensors")
    decoded, stop = [], [7]
    generate = SequoiaDecoder.generate

    def counting(self, prompt, *args, **options):
        decoded.append(tuple(prompt))
        if len(decoded) == stop[0]:
            raise KeyboardInterrupt
        return generate(self, prompt, *args, **options)

    monkeypatch.setattr(SequoiaDecoder, "generate", counting)
    arguments = [
        "bench",
        "--limit",
        "4",
        "--tokens",
        "4",
        "--only",
        "plain",
        "--only",
        "sequoia",
        "-o",
        "found.json",
    ]
    # two calls to warm up, two for each of two prompts, and one more
    first = CliRunner().invoke(cli.main, arguments)
    assert (
        first.exit_code == 1
        and "Aborted!" in first.stderr
        and not (tmp_path / "found.json").exists()
    )
    kept = json.loads((tmp_path / ".found.json.journal").read_text())["done"]
    assert list(kept) == ["0", "1"]
    stop[0] = -1
    decoded.clear()
    second = CliRunner().invoke(cli.main, arguments)
    assert second.exit_code == 0, second.output
    assert len(decoded) == 2 + 2 * 2  # warm again, then the two prompts that were left
    result = BenchResult.load(tmp_path / "found.json")
    rates = [
        round((run["tokens"] - run["first_tokens"]) / (run["seconds"] - run["first_seconds"]), 3)
        for run in (kept["0"]["plain"], kept["1"]["plain"])
    ]
    assert (
        list(result.methods["plain"].tokens_per_second_by_prompt[:2]) == rates
        and result.settings.prompts == 4
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["found.json", "tree.safetensors"]


def test_times_of_another_number_of_threads_are_not_pooled(models, monkeypatch, tmp_path):
    """What a killed run left is used again on the same machine only, with as many threads."""
    decoded, decode = [], SequoiaDecoder.generate

    def counting(self, *args, **options):
        decoded.append(threads)
        return decode(self, *args, **options)

    monkeypatch.setattr(SequoiaDecoder, "generate", counting)
    tree, journal = TokenTree.chain(2), tmp_path / "journal"
    counts = []
    for threads in (1, 1, 2):
        monkeypatch.setattr(
            "sequoia_plan.profiler.bench.fingerprint",
            lambda device, threads=threads: {"threads": threads},
        )
        decoded.clear()
        compare(
            models,
            None,
            tree,
            {"sequoia": (tree, "sequoia")},
            Sampling(),
            [[3, 4], [5, 6]],
            4,
            only=["sequoia"],
            journal=journal,
        )
        counts.append(len(decoded))
    assert counts == [3, 1, 3]  # one warms up, and two prompts


def test_a_journal_belongs_to_one_process_at_a_time(tmp_path):
    path = tmp_path / ".profile.yaml.journal"
    with Journal(path, "work") as kept:
        assert kept.get("a", lambda: 1) == 1
        with pytest.raises(
            SequoiaPlanError,
            match=r"^profile\.yaml: another sequoia-plan is measuring for this file; "
            "wait for it, or name another",
        ):
            Journal(path, "work")
    with Journal(path, "work") as again:
        assert again.get("a", lambda: 2) == 1
    with Journal(path, "other work") as other:
        assert other.get("a", lambda: 3) == 3
    discard(path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("interval", "new_kind", "said"),
    [
        (None, None, ""),
        ((1.45, 1.80), None, ""),
        ((1.10, 1.41), (1.00, 1.60), ""),  # the intervals meet: 1.40 to 1.60 was measured
        (
            (1.61, 1.90),
            None,
            " The prediction is 17% too high, and its interval (1.61 to 1.90) does not meet the "
            "measured one: profile again with --prompts",
        ),
        ((1.05, 1.39), None, " The prediction is 17% too high, and its interval (1.05 to 1.39)"),
        (
            (1.61, 1.90),
            (1.50, 2.00),
            "the measured one; that for prompts of a new kind (1.50 to 2.00) does: "
            "for a closer prediction profile again with --prompts",
        ),
        (
            (1.62, 1.90),
            (1.61, 2.00),
            "the measured one, nor does that for prompts of a new kind (1.61 to 2.00): "
            "profile again with --prompts",
        ),
    ],
)
def test_a_promise_that_was_not_kept_is_said(interval, new_kind, said):
    result = figures_of(TREE, sequoia=1.5)
    result.methods["sequoia"] = replace(
        result.methods["sequoia"], prediction=Prediction(2.0, 1.75, interval, new_kind)
    )
    text = finding(result)
    assert ("The prediction is" in text) == bool(said) and said in text


def test_the_tree_under_test_carries_its_plans_interval(models):
    kinds = {
        name: (LevelCounts(25, (accepted, 6.25)),)
        for name, accepted in (("a", 10.0), ("b", 11.5), ("c", 13.5), ("d", 15.0))
    }
    levels = (LevelCounts(100, (50.0, 25.0)),)
    plan = solve(
        Profile(
            (0.5, 0.25),
            100,
            Latency({1: 0.04, 8: 0.05}, {1: 0.002, 8: 0.003}),
            levels=levels,
            kinds=kinds,
        ),
        budget=8,
        depth=4,
    ).tree
    result = compare(
        models,
        lambda: models,
        plan,
        bench_trees(plan, "sequoia"),
        Sampling(),
        [[1, 2, 3]],
        4,
        ["plain", "sequoia", "chain"],
    )
    prediction = result.methods["sequoia"].prediction
    assert prediction.interval is not None and prediction.interval_new_kind is not None
    assert prediction.interval == plan.plan.interval.predicted_speedup
    assert prediction.interval_new_kind == plan.plan.interval_new_kind.predicted_speedup
    assert result.methods["plain"].prediction.interval is None


KINDS_PLAN = Plan(
    speedup_by_kind={"copy": 3.0, "chat": 1.2}, tokens_by_kind={"copy": 6.0, "chat": 2}
)
MIXTURE = Prediction(4.0, 2.0, (1.9, 2.1), (1.0, 3.0))


def decoded_by_kind(kinds, plan=KINDS_PLAN):
    """The tree's result on prompts of these kinds, each as fast as its kind and as long as its
    number in the list says; with the mixture's prediction until the kinds are known."""
    new_tokens = [30 * (number + 1) for number in range(len(kinds))]
    plain = [PromptRun(n, n, float(n), 0, 0.0) for n in new_tokens]
    speedups = [plan.speedup_by_kind.get(kind, 2.0) for kind in kinds]
    steps = [
        n // plan.tokens_by_kind.get(kind, 4.0) for n, kind in zip(new_tokens, kinds, strict=True)
    ]
    ours = [
        PromptRun(n, int(passes), n / speedup, 0, 0.0)
        for n, passes, speedup in zip(new_tokens, steps, speedups, strict=True)
    ]
    result = replace(summary({"plain": plain, "sequoia": ours})["sequoia"], prediction=MIXTURE)
    return predicted_by_kind(result, plan, kinds, ours, plain)


@pytest.mark.parametrize(
    ("kinds", "speedup", "tokens", "num_as_mixture"),
    [
        (["copy"], 3.0, 6.0, 0),
        (["copy", "chat", "chat"], 1.2, 180 / (30 / 6 + 150 / 2), 0),
        (["chat", "copy"], 2.1, 90 / (30 / 2 + 60 / 6), 0),
        (["copy", "copy", None], 3.0, 180 / (90 / 6 + 90 / 4), 1),
        (["copy", "poem", None], 2.0, 180 / (30 / 6 + 150 / 4), 2),
    ],
)
def test_the_promise_is_that_of_the_prompts_kinds(kinds, speedup, tokens, num_as_mixture):
    """Prompts that are as their kinds promise are measured exactly as predicted, which the
    mixture's figures are not; and the mixture's intervals are not claimed for them."""
    result = decoded_by_kind(kinds)
    prediction = result.prediction
    assert prediction == Prediction(
        prediction.tokens_per_step, prediction.speedup, prompts_as_mixture=num_as_mixture
    )
    assert prediction.speedup == pytest.approx(speedup)
    assert prediction.tokens_per_step == pytest.approx(tokens)
    assert result.prediction.speedup == pytest.approx(result.speedup["plain"].median, rel=1e-3)
    if num_as_mixture == 0:
        assert result.prediction.tokens_per_step == pytest.approx(result.tokens_per_step, rel=1e-3)
        assert result.tokens_per_step != pytest.approx(MIXTURE.tokens_per_step, rel=0.05)
    assert list(result.by_kind) == [
        kind for kind in dict.fromkeys(kinds) if kind in ("copy", "chat")
    ]
    for kind, figures in result.by_kind.items():
        assert figures.prompts == kinds.count(kind)
        assert figures.speedup.median == pytest.approx(KINDS_PLAN.speedup_by_kind[kind], rel=1e-3)
        assert figures.tokens_per_step == figures.prediction.tokens_per_step
        assert figures.prediction.speedup == KINDS_PLAN.speedup_by_kind[kind]


@pytest.mark.parametrize(
    ("kinds", "speedup"),
    [
        (["chat"], 1.4),  # and not 1.6, the speed-up of the three texts together
        (["copy"], 2.5),
        (["copy", "chat"], 2.0),  # 1.2 and 1.4 are less than half of both kinds' texts
        (["chat", "chat", "chat", "copy"], 1.7),  # they are just half of these
        (["poem", "copy", "copy"], 2.0),
    ],
)
def test_the_promise_is_a_median_over_texts(kinds, speedup):
    """One text of a kind that is much faster than the others does not raise it."""
    plan = replace(
        KINDS_PLAN,
        speedup_by_kind={"copy": 2.6, "chat": 1.6},
        text_speedups={"copy": (2.0, 3.0), "chat": (1.2, 1.4, 5.0)},
    )
    result = decoded_by_kind(kinds, plan)
    assert result.prediction.speedup == pytest.approx(speedup)
    if "chat" in kinds:
        assert result.by_kind["chat"].prediction.speedup == pytest.approx(1.4)


def test_prompts_of_no_known_kind_have_the_mixtures_promise():
    result = decoded_by_kind(["poem", None])
    assert result.prediction == replace(MIXTURE, prompts_as_mixture=2)
    assert result.by_kind == {}


def test_a_plan_without_tokens_by_kind_predicts_the_speed_alone():
    result = decoded_by_kind(["copy", "chat"], replace(KINDS_PLAN, tokens_by_kind={}))
    assert result.prediction == Prediction(4.0, 2.1, prompts_as_mixture=0)
    assert [figures.prediction.tokens_per_step for figures in result.by_kind.values()] == [None] * 2


@pytest.mark.parametrize(
    ("kinds", "note", "is_listed"),
    [
        (["copy", "chat[/b]"], "predicted for our tree: from the kind of each prompt\n", True),
        (["copy", "copy"], "predicted for our tree: from the kind of each prompt\n", False),
        (["copy", "poem"], "of each prompt, and for 1 of 2 from all profiled prompts", False),
        ([None, "poem"], "predicted for our tree: from all profiled prompts together, b", False),
    ],
)
def test_bench_says_for_which_prompts_it_predicts(kinds, note, is_listed, capsys):
    """And lists kinds if there are several, names as they are; not one line more without kinds."""
    by_kind = {"copy": 3.0, "chat[/b]": 1.2}
    plan = Plan(speedup_by_kind=by_kind, tokens_by_kind={"copy": 6.0, "chat[/b]": 2})
    result = figures_of(TREE, sequoia=1.5)
    print_table(result)
    assert "predicted for" not in capsys.readouterr().out
    result = replace(result, settings=replace(result.settings, prompts=2))
    result.methods["sequoia"] = decoded_by_kind(kinds, plan)
    print_table(result)
    text = capsys.readouterr().out
    assert note in text
    rows = [line.split() for line in text.splitlines()]
    assert (["copy", "1", "3.00x", "3.00x", "6.00", "6.00"] in rows) == is_listed
    assert (["chat[/b]", "1", "1.20x", "1.20x", "2.00", "2.00"] in rows) == is_listed


def test_only_the_tree_under_test_is_predicted_by_kind(models, tmp_path):
    """Through compare and the file: the tree by match, and not plain decoding or the tree alone."""
    latency = Latency({1: 0.04, 8: 0.05}, {1: 0.002, 8: 0.003})
    classes = tuple(
        MatchPlan(
            length,
            0.5,
            Acceptance.given((0.5, 0.25)),
            expected_tokens(TREE, Acceptance.given([0.5, 0.25]).rates),
            0.06,
        )
        for length in (0, 2)
    )
    plan = replace(KINDS_PLAN, acceptance=(0.5, 0.25), latency=latency, by_match=classes)
    tree = TokenTree(TREE.parents, plan, by_match={2: TokenTree(TREE.parents, looks_up=True)})
    trees = bench_trees(tree, "sequoia")
    names = ["plain", "tree", "sequoia"]

    def decode(kinds, tree=tree):
        prompts = [[1, 2, 3], [4, 5], [6, 7]]
        return compare(
            models, lambda: models, tree, trees, Sampling(), prompts, 4, names, kinds=kinds
        )

    result = decode(["copy", "copy", "chat"])
    ours = result.methods["sequoia"]
    assert ours.prediction.speedup == 3.0 and ours.prediction.prompts_as_mixture == 0
    assert {kind: figures.prompts for kind, figures in ours.by_kind.items()} == {
        "copy": 2,
        "chat": 1,
    }
    assert result.methods["plain"].prediction == Prediction(1.0, 1.0)
    assert result.methods["tree"].prediction == Prediction()
    result.save(tmp_path / "bench.json")
    assert BenchResult.load(tmp_path / "bench.json") == result
    mixture = prediction_for(tree, "sequoia", plan)
    assert mixture.speedup and mixture.speedup != 3.0
    for kinds in ((), [None, "poem", None]):
        ours = decode(kinds).methods["sequoia"]
        assert ours.prediction == replace(mixture, prompts_as_mixture=3) and not ours.by_kind
    old = TokenTree(tree.parents, replace(plan, speedup_by_kind={}), by_match=tree.by_match)
    ours = decode(["copy", "copy", "chat"], old).methods["sequoia"]
    assert ours.prediction == mixture and not ours.by_kind
