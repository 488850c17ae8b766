"""Methods side by side: each decodes what it should, and the figures are what they are called."""

import json
from types import SimpleNamespace

import pytest
import torch
from architectures import plain_text, resembling, tiny
from bench_results import KINDS_PLAN, TREE, decoded_by_kind
from commands import call, succeed
from msgspec.structs import replace
from torch import nn

from sequoia_plan.artifacts import Acceptance, ArgumentError, BenchResult, TokenTree, save_tree
from sequoia_plan.artifacts.bench_result import Prediction, Ratio
from sequoia_plan.artifacts.expected_tokens import expected_tokens
from sequoia_plan.artifacts.plan import MatchPlan
from sequoia_plan.artifacts.prediction import prediction_for
from sequoia_plan.models.backends import RESIDENT, loaded_as
from sequoia_plan.planner import cli
from sequoia_plan.planner.solving.baselines import bench_trees
from sequoia_plan.profiler.bench import compare, make_methods
from sequoia_plan.profiler.bench_figures import TITLES, summary
from sequoia_plan.profiler.decoding_methods import PromptRun, with_full_vocabulary
from sequoia_plan.runtime import Pair, Sampling, SequoiaDecoder, sequoia
from sequoia_plan.runtime.pair import DEFAULT_DRAFT, LANGUAGE_MODEL, _remarks

pytestmark = pytest.mark.slow

TREES = bench_trees(TREE, "traversal")
TOKENS = expected_tokens(TREE, Acceptance.given([0.5, 0.25]).rates)
PARTS = ("step", "draft", "target", "verify", "host", "share_not_model")


@pytest.fixture(scope="module")
def models():
    """A tiny Llama, and a draft that resembles it and covers part of its vocabulary."""
    target = tiny("Llama")
    draft = resembling(target)
    d2t = torch.arange(0, draft.lm_head.out_features, 2)
    head = nn.Linear(draft.lm_head.in_features, d2t.numel(), bias=False)
    head.weight.data.copy_(draft.lm_head.weight.data[d2t])
    draft.lm_head = head
    draft.register_buffer("d2t", d2t, persistent=False)
    tokenizer = SimpleNamespace(eos_token_id=None, chat_template=None)
    target, draft = loaded_as(target, RESIDENT), loaded_as(draft, RESIDENT)
    return Pair(target, draft, tokenizer, {"target": {"name": "t"}, "draft": {"name": "d"}})


@pytest.fixture
def run_bench(models, tmp_path, monkeypatch):
    """The command with tiny models, in a folder with the tree."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli.decoding, "load_pair", lambda *args, **options: models)
    monkeypatch.setattr(
        "sequoia_plan.profiler.prompts.encode", lambda _, text: [ord(c) % 50 for c in text[:9]]
    )
    figures = dict.fromkeys(PARTS, 0.01)
    monkeypatch.setattr("sequoia_plan.profiler.breakdown.breakdown", lambda *_: figures)
    save_tree(TREE, "tree.safetensors")
    return lambda words: call("bench", "--tokens", "4", *words.split())


@pytest.fixture
def texts(models, monkeypatch):
    """What `generate` returned, ours and transformers'."""
    returned = []

    def remember(owner):
        generate = owner.generate

        def remembering(*args, **options):
            result = generate(*args, **options)
            returned.append(getattr(result, "sequences", result).tolist())
            return result

        monkeypatch.setattr(owner, "generate", remembering)

    remember(SequoiaDecoder)
    remember(type(models.target.module))
    return returned


def test_greedy_methods_say_the_same(models, texts):
    """Ours, and transformers' ways: the same tokens, counted the same way."""
    methods = make_methods(models, models, TREES, Sampling(), 24)
    same_as_sequoia = ("tree", "traversal")  # when greedy, and without trees by match
    assert list(methods) == [name for name in TITLES if name not in same_as_sequoia]
    runs, said = {}, []
    for name, decode in methods.items():
        runs[name] = run = decode(list(range(3, 20)), 0)
        said.append(texts[-1])  # the last to return: an assistant's own calls came before
        assert run.tokens == 24 and 1 <= run.first_tokens <= run.tokens, name
        assert 0 < run.first_seconds < run.seconds, name
        assert run.passes == 24 if name in ("plain", "generate") else run.passes <= 24, name
    assert all(text == said[0] for text in said)
    assert runs["sequoia"].passes < 24 and runs["assisted"].passes < 24
    assert not models.target.module._forward_pre_hooks


@pytest.mark.parametrize(
    ("name", "value"),
    [("repetition_penalty", 1.8), ("no_repeat_ngram_size", 1), ("suppress_tokens", None)],
)
def test_a_models_own_generation_config_counts_in_no_method(
    models, texts, name, value, monkeypatch
):
    """In `generate` it counts."""
    target, ids = models.target.module, torch.arange(3, 20)[None]
    greedy = plain_text(target, ids, 24)
    value = value or greedy[0, 17:21].tolist()
    monkeypatch.setattr(target.generation_config, name, value)
    assert not plain_text(target, ids, 24).equal(greedy)
    [remark] = _remarks(models.target)
    assert remark.startswith(f"target: its generation config has {name} {value}")
    for decode in make_methods(models, models, TREES, Sampling(), 24).values():
        decode(ids[0].tolist(), 0)
        assert texts[-1] == greedy.tolist()
    ours = plain_text(target, ids, 24, custom_generate=sequoia, draft=models.draft, tree=TREE)
    assert ours.equal(plain_text(target, ids, 24))


def test_a_covering_draft_gets_a_full_head_and_stays_as_it_was(models):
    ids = torch.arange(5)[None]
    draft = models.draft.module
    before = draft(ids).logits
    wide = with_full_vocabulary(draft)(ids).logits
    assert wide.shape[-1] == models.target.config.vocab_size
    assert wide[..., draft.d2t].equal(before)
    assert wide.isneginf().sum() == wide.numel() - before.numel()
    assert draft(ids).logits.equal(before)
    assert with_full_vocabulary(models.target.module) is models.target.module


@pytest.mark.parametrize(
    ("filters", "keeps_one"),
    [({"top_p": 0.001}, True), ({"top_p": 0.9, "top_k": 20, "min_p": 0.01}, False)],
)
def test_sampling_methods_apply_every_filter(models, texts, filters, keeps_one):
    """Where a filter keeps one token, every method says the same at any temperature.

    Where the filters keep several tokens (the control), they do not.
    """
    methods = make_methods(models, models, TREES, Sampling(0.8, **filters), 12)
    assert list(methods) == [name for name in TITLES if name != "tree"]
    said = set()
    for decode in methods.values():
        decode([1, 2, 3], 0)
        said.add(str(texts[-1]))
    assert (len(said) == 1) == keeps_one


def test_names_and_trees_of_methods(models):
    """Those asked for, in the order of `TITLES`; no tree is larger than the one under test."""

    def names(tree, only=(), pair=models):
        return list(make_methods(pair, pair, bench_trees(tree, "traversal"), Sampling(), 4, only))

    assert names(TREE, ["traversal", "plain"]) == ["plain", "traversal"]
    assert names(TokenTree.chain(1)) == ["plain", "generate", "assisted", "lookup"]
    reads_hidden_states = Pair(models.target, object(), models.tokenizer, {})
    with pytest.raises(ArgumentError, match="transformers cannot use this draft"):
        names(TREE, ["assisted"], reads_hidden_states)
    assert set(TREES) == set(TITLES) - {"generate", "assisted", "lookup", "tree"}
    assert all(tree.size <= TREE.size and tree.depth <= TREE.depth for tree, _ in TREES.values())
    by_match = TokenTree(TREE.parents, by_match={2: TokenTree(TREE.parents, looks_up=True)})
    trees = bench_trees(by_match, "traversal")
    assert trees["tree"][0] == TREE  # without those that look up
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
    assert figures["plain"].speedup["sequoia"].median == 0.5
    varied = [PromptRun(12, 4, 6.0 + i, 2, 1.0) for i in range(16)]
    ratio = summary({"plain": slow * 8, "sequoia": varied})["sequoia"].speedup["plain"]
    assert ratio.interval_low < ratio.median < ratio.interval_high


WARM = {"temperature": 0.6, "top_p": 0.9, "verifier": "sequoia"}


@pytest.mark.parametrize(
    ("method", "settings", "sampling", "is_predicted"),
    [
        ("sequoia", {}, None, True),
        ("traversal", {"temperature": 0.6, "verifier": "traversal"}, None, True),
        ("sequoia", {"temperature": 0.6, "verifier": "traversal"}, None, False),  # yields less
        ("chain", {"temperature": 0.0, "verifier": "traversal"}, None, True),
        ("sequoia", WARM, WARM | {"top_k": 0, "verifier": "traversal"}, True),
        ("sequoia", WARM, {"temperature": 0.6, "top_p": 1.0}, False),
    ],
)
def test_predictions_are_the_plans(method, settings, sampling, is_predicted):
    plan = replace(TREE.plan, settings=settings)
    prediction = prediction_for(*TREES[method], plan, sampling)
    if not is_predicted:
        assert prediction == Prediction()
    elif method == "chain":
        assert prediction.tokens_per_step > 1
    else:
        assert prediction.tokens_per_step == TOKENS
        assert prediction.speedup > 1
    assert prediction_for(*TREES["plain"], plan, {"temperature": 0.3}) == Prediction(1.0, 1.0)


def test_the_command(run_bench, tmp_path):
    """Table, JSON, file and page from tiny models."""
    words = "--limit 2 --only plain --only sequoia --only generate"
    result = run_bench(f"{words} -o out.json --json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert json.loads((tmp_path / "out.json").read_text()) == answer
    methods = BenchResult.load(tmp_path / "out.json").methods
    assert list(methods) == ["plain", "generate", "sequoia"]
    assert methods["sequoia"].prediction.tokens_per_step == TOKENS
    assert answer["settings"]["prompts"] == 2 and answer["tree"]["size"] == 7
    text = run_bench(f"{words} --report page.html").stdout
    for part in ("our tree, Sequoia", "over plain", "10.0 ms (draft 10.0", "tree of 7 nodes"):
        assert part in " ".join(text.split())
    assert "<svg" in (tmp_path / "page.html").read_text()
    wrong = run_bench("--only medusa")
    assert wrong.exit_code == 2 and "only: found 'medusa'" in wrong.stderr


def test_transformers_has_an_assistant_where_it_cannot_use_the_draft(tmp_path, monkeypatch):
    """That is the embedded language model for the embedded draft that reads hidden states."""
    monkeypatch.chdir(tmp_path)
    save_tree(TREE, "tree.safetensors")
    words = "bench --limit 1 --tokens 16 --only assisted --dtype float32 --json"
    answer = json.loads(succeed(*words.split()).stdout)
    names = {role: model["name"] for role, model in answer["models"].items() if role != "target"}
    assert names == {"draft": DEFAULT_DRAFT, "assistant": LANGUAGE_MODEL}
    assert answer["contenders"]["assisted"]["tokens_per_step"] > 1.2


def test_transformers_methods_are_beside_a_copy_in_8_bits(tmp_path, monkeypatch):
    """Without it: modules are loaded for them, and the copy is none."""
    monkeypatch.chdir(tmp_path)
    save_tree(TREE, "tree.safetensors")
    words = "bench --limit 1 --tokens 8 --draft int8 --only generate --only sequoia --json"
    answer = json.loads(succeed(*words.split()).stdout)
    assert list(answer["contenders"]) == ["generate", "sequoia"]
    assert answer["contenders"]["sequoia"]["tokens_per_step"] > 2


def test_an_interrupted_bench_goes_on(run_bench, tmp_path, monkeypatch):
    """Stopped within the third prompt, started again: the first two are not decoded again."""
    decoded, stop = [], [7]
    generate = SequoiaDecoder.generate

    def counting(self, prompt, *args, **options):
        decoded.append(tuple(prompt))
        if len(decoded) == stop[0]:
            raise KeyboardInterrupt
        return generate(self, prompt, *args, **options)

    monkeypatch.setattr(SequoiaDecoder, "generate", counting)
    words = "--limit 4 --only plain --only sequoia -o out.json"
    # two calls to warm up, two for each of two prompts, and one more
    assert run_bench(words).exit_code == 1 and not (tmp_path / "out.json").exists()
    assert list(json.loads((tmp_path / ".out.json.journal").read_text())["done"]) == ["0", "1"]
    stop[0] = -1
    decoded.clear()
    assert run_bench(words).exit_code == 0
    assert len(decoded) == 2 + 2 * 2  # warm again, then the two prompts that were left
    assert BenchResult.load(tmp_path / "out.json").settings.prompts == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json", "tree.safetensors"]


@pytest.mark.parametrize(
    ("kinds", "speedup", "tokens"),
    [
        (["copy"], 3.0, 6.0),
        (["copy", "chat", "chat"], 1.2, 180 / (30 / 6 + 150 / 2)),
        (["copy", "copy", None], 3.0, 180 / (90 / 6 + 90 / 4)),
        (["copy", "poem", None], 3.0, 180 / (30 / 6 + 150 / 4)),
    ],
)
def test_the_promise_is_that_of_the_prompts_kinds(kinds, speedup, tokens):
    """Prompts that are as their kinds promise are measured exactly as predicted.

    The mixture's figures are not what was measured, and its intervals are not claimed. Prompts of
    new kinds count as all profiled ones, with the interval of a new kind.
    """
    result = decoded_by_kind(kinds)
    names = [kind if kind in KINDS_PLAN.text_speedups else "new kinds" for kind in kinds]
    new_interval = (1.0, 4.0) if "new kinds" in names else None
    assert result.prediction == Prediction(
        pytest.approx(tokens), pytest.approx(speedup), None, new_interval
    )
    if new_interval is None:
        assert speedup == pytest.approx(result.speedup["plain"].median, rel=1e-3)
        assert tokens == pytest.approx(result.tokens_per_step, rel=1e-3)
    assert list(result.by_kind) == list(dict.fromkeys(names))
    for kind, figures in result.by_kind.items():
        assert figures.prompts == names.count(kind)
        if kind != "new kinds":
            assert figures.tokens_per_step == figures.prediction.tokens_per_step
            assert figures.prediction.speedup == pytest.approx(KINDS_PLAN.text_speedups[kind][0])


def test_the_promise_is_that_of_the_tree_for_the_prompts_length(models):
    """Prompts of 5 tokens on average are below 8, those of 10 are not."""
    long = TokenTree(TREE.parents, replace(TREE.plan, acceptance=Acceptance.given([0.1])))
    tree = TokenTree(TREE.parents, TREE.plan, by_context={8: long})
    for length, planned in ((5, TREE), (10, long)):
        prompts = [list(range(1, length)), list(range(1, length + 2))]
        trees = bench_trees(tree, "sequoia")
        result = compare(models, None, tree, trees, Sampling(), prompts, 4, ["plain", "sequoia"])
        predicted = prediction_for(planned, "sequoia", planned.plan)
        assert result.methods["sequoia"].prediction == predicted
    assert prediction_for(long, "sequoia", long.plan) != prediction_for(TREE, "sequoia", TREE.plan)


def test_only_the_tree_under_test_is_predicted_by_kind(models, tmp_path):
    """Through compare and the file: the tree by match, and not plain decoding or the tree alone."""
    acceptance = TREE.plan.acceptance
    by_kind = replace(
        KINDS_PLAN,
        by_match=tuple(MatchPlan(length, 0.5, acceptance, TOKENS, 0.06) for length in (0, 2)),
        acceptance=acceptance,
        latency=TREE.plan.latency,
        expected_tokens=TOKENS,
        predicted_speedup=3.0,
    )
    for plan in (by_kind, replace(by_kind, text_speedups={})):
        tree = TokenTree(TREE.parents, plan, by_match={2: TokenTree(TREE.parents, looks_up=True)})
        trees, names = bench_trees(tree, "sequoia"), ["plain", "tree", "sequoia"]
        prompts, kinds = [[1, 2, 3], [4, 5], [6, 7]], ["copy", "copy", "chat"]
        result = compare(models, None, tree, trees, Sampling(), prompts, 4, names, kinds=kinds)
        result.save(tmp_path / "bench.json")
        assert BenchResult.load(tmp_path / "bench.json") == result
        plain, alone, ours = (result.methods[name] for name in names)
        assert (plain.prediction, alone.prediction) == (Prediction(1.0, 1.0), Prediction())
        counts = {kind: figures.prompts for kind, figures in ours.by_kind.items()}
        if plan is by_kind:
            assert ours.prediction.speedup == pytest.approx(3.0) and counts == {
                "copy": 2,
                "chat": 1,
            }
        else:
            assert counts == {}
