"""docs/own-models.md, from model folders to bench, with the folders that the page itself makes.

Drafts with padded vocabularies are tested, too.
"""

import copy
import hashlib
import re
import shlex

import pytest
import torch
from architectures import PACKED, plain_text, tiny
from commands import call, refused, succeed
from paths import ROOT
from refusals import refusal
from toys import PLAIN, TREE
from transformers import LlamaConfig, LlamaForCausalLM

from sequoia_plan.artifacts import (
    ArgumentError,
    BenchResult,
    Profile,
    TokenTree,
    load_tree,
)
from sequoia_plan.models.backends import loaded
from sequoia_plan.models.files.gguf import embedded_gguf
from sequoia_plan.models.files.pretrained import find_model
from sequoia_plan.models.offload.memory import own_bytes
from sequoia_plan.runtime import SequoiaDecoder, load_pair
from sequoia_plan.runtime.pair import CODER_DRAFT, DEFAULT_DRAFT, DRAFT_OF_FILE

pytestmark = pytest.mark.slow

PAGE = ROOT / "docs" / "own-models.md"
SNIPPET = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.S)[1]
COMMANDS = [
    shlex.split(line)[1:]
    for line in PAGE.read_text().splitlines()
    if line.startswith("    sequoia-plan ")
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the page's first two commands wrote `target` and `draft`."""
    folder = tmp_path_factory.mktemp("own")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for words in COMMANDS[:2]:
            succeed(*words)
    assert sorted(path.name for path in folder.iterdir()) == ["draft", "target"]
    return folder


def test_the_page_from_profile_to_bench(folder, monkeypatch, run_briefly):
    """The commands after those that write the folders, made short: two prompts, few sizes."""
    monkeypatch.chdir(folder)
    (folder / "p.txt").write_text(
        "What is rain?\n\nName three birds.\n\nWhat is two plus two?\n\nWho wrote Hamlet?\n"
    )
    short = {
        "profile": ["--prompts", "p.txt", "--tokens", "8"],
        "generate": ["--max-new-tokens", "6"],
        "bench": ["--prompts", "p.txt", "--tokens", "8", "-o", "b.json"],
    }
    assert [words[0] for words in COMMANDS[2:]] == ["profile", "solve", "generate", "bench"]
    for words in COMMANDS[2:]:
        run_briefly(*words, *short.get(words[0], []))
    profile, result = Profile.load("own.yaml"), BenchResult.load("b.json")
    assert all(profile.models[role]["name"] == role for role in ("target", "draft"))
    tree = load_tree("own.safetensors")
    assert tree.plan.models == profile.models == result.models
    tree_methods = ["sequoia"] if tree.size > 1 else []
    assert list(result.methods) == ["plain", "generate", *tree_methods]
    assert result.settings.prompts == 2


def test_the_pages_python(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    exec(SNIPPET, {})
    assert "Paris" in capsys.readouterr().out


@pytest.mark.parametrize("extra", [64, -100])
def test_a_draft_with_a_padded_or_shorter_vocabulary_loads_from_a_folder(
    folder, pair, tmp_path, extra
):
    """Tokenizers decide, and padding does not matter."""
    size = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1)
    config = LlamaConfig(**size, vocab_size=49152 + extra)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "other")
    pair.tokenizer.save_pretrained(tmp_path / "other")
    loaded = load_pair(str(folder / "target"), str(tmp_path / "other"), dtype="float32")
    decoder = SequoiaDecoder(loaded.target, loaded.draft, TokenTree.star(3))
    assert decoder.step.drafter.vocabulary == min(49152, 49152 + extra)
    target = find_model(str(folder / "target")).module(torch.float32)
    expected = plain_text(target, torch.tensor([[1, 5, 300]]), 8)
    assert decoder.generate([1, 5, 300], 8).sequences.equal(expected)


def test_what_cannot_be_loaded_is_one_line(monkeypatch, tmp_path):
    """A hub name without a network, no name at all, a broken folder: each says what to do."""

    def unreachable(name, **options):
        raise OSError("no network\nand more")

    monkeypatch.setattr("sequoia_plan.models.files.pretrained.snapshot_download", unreachable)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text(
        '{"model_type": "llama", "hidden_size": "many", "num_hidden_layers": [1]}'
    )
    for name, part in (
        ("some/model", "some/model: no such folder, and it cannot be downloaded (no network);"),
        ("not a name!", "not a name!: no such folder"),
        ("broken", "broken: cannot be loaded as a causal language model"),
    ):
        words = ["generate", "--tree", "sequoia-example-64x6", "--target", name, "--draft", "other"]
        refused(call(*words), 1, f"Error: {part}")


def test_a_draft_made_from_the_target_needs_no_other_model(folder, tmp_path, monkeypatch):
    """`int8` names it, which is said without one; a folder of that name is another draft."""
    with refusal("or use --draft int8", ArgumentError):
        load_pair(str(folder / "target"))
    monkeypatch.chdir(tmp_path)
    for name, model in (("target", "target"), ("int8", "draft")):
        (tmp_path / name).symlink_to(folder / model)
    from_target = load_pair("target", "int8", dtype="float32")
    from_folder = load_pair("target", "./int8", dtype="float32", placement="fused")
    drafts = [pair.metadata["draft"] for pair in (from_target, from_folder)]
    assert [draft["name"] for draft in drafts] == ["target int8", "int8"]
    assert [draft.get("weights") for draft in drafts] == ["Q8_0", None]
    target = from_target.metadata["target"]
    assert drafts[0]["content"] == target["content"] and target["weights"] == "F32"


def test_a_draft_is_cut_to_the_tokens_of_another():
    """Its logits are those of the whole head, and greedy text stays the target's."""
    file = str(embedded_gguf())
    whole, cut = (load_pair(draft=file, draft_vocabulary=x) for x in (None, DEFAULT_DRAFT))
    states = torch.randn(3, cut.target.config.hidden_size)
    d2t = cut.draft.d2t
    assert len(d2t) == cut.draft.vocabulary < whole.draft.vocabulary
    for draft in (cut.draft, copy.deepcopy(cut.draft)):
        assert draft.backend.head(states).equal(whole.draft.backend.head(states)[:, d2t])
    assert whole.metadata["draft"] != cut.metadata["draft"]
    texts = [
        SequoiaDecoder(cut.target, draft, tree, tokenizer=cut.tokenizer).generate("The sky", 24)
        for draft, tree in ((cut.draft, TREE), (None, PLAIN))
    ]
    assert texts[0].text == texts[1].text and texts[0].steps < texts[1].steps
    draft = loaded(tiny("Llama", **PACKED))
    whole_bytes = own_bytes(draft, cut.target)
    draft.cut_vocabulary(torch.arange(16))
    assert own_bytes(draft, cut.target) < whole_bytes
    with refusal("expected an EAGLE-3 draft that covers", ArgumentError):
        load_pair(draft=file, draft_vocabulary=file)
    with refusal("covers token"):  # another target's tokens
        load_pair(draft=file, draft_vocabulary=CODER_DRAFT)


def test_a_targets_file_has_its_draft(monkeypatch, tmp_path):
    """By the begin of the file's SHA-256; other files need a name."""
    file = tmp_path / "renamed.gguf"
    file.symlink_to(embedded_gguf())
    with refusal("name a draft for it", ArgumentError):
        load_pair(str(file))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:32]
    monkeypatch.setitem(DRAFT_OF_FILE, digest, DEFAULT_DRAFT)
    assert load_pair(str(file)).metadata["draft"]["name"] == DEFAULT_DRAFT
