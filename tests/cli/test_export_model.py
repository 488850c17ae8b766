"""The embedded models as folders that other engines load.

What a language model's head proposes there is tested, too.
"""

import pytest
import torch
from commands import call, refused
from transformers import AutoModelForCausalLM, AutoTokenizer

from drafts import PARTS, load, small_target, write
from sequoia_plan.artifacts import ArgumentError
from sequoia_plan.models.base.loading import Loading
from sequoia_plan.profiler.prompts import held_out
from sequoia_plan.runtime.draft.draft_file import save_as_folder
from sequoia_plan.runtime.pair import DEFAULT_DRAFT, LANGUAGE_MODEL, add_draft, embedded_draft

pytestmark = pytest.mark.slow


def export(*words):
    return call("export", *words)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of the embedded language model, as the command writes it."""
    path = tmp_path_factory.mktemp("export") / "draft"
    result = export("--format", "draft", "--draft", LANGUAGE_MODEL, "-o", path)
    assert f"wrote {path}: the draft {LANGUAGE_MODEL} with its tokenizer" in result.output
    assert [entry.name for entry in path.parent.iterdir()] == ["draft"]  # nothing is beside it
    return path


@pytest.fixture(scope="module")
@torch.no_grad()
def logits(folder, pair):
    """Logits [positions, vocabulary] over real prompts of the folder's model, of the embedded one,
    and the tokens that this one has."""
    draft = add_draft(pair, LANGUAGE_MODEL, Loading("resident", dtype="float32")).draft.module
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    texts = [torch.tensor([tokens]) for tokens in held_out(pair.tokenizer, 12)]
    whole = torch.cat([model(text).logits[0] for text in texts])
    return whole, torch.cat([draft(text).logits[0] for text in texts]), draft.d2t


def test_tokens_of_the_draft_have_the_drafts_logits(logits):
    whole, draft, d2t = logits
    assert whole.shape[1] == 49152 and len(d2t) == 8192
    torch.testing.assert_close(whole[:, d2t], draft, atol=5e-4, rtol=1e-4)


def test_tokens_that_the_draft_lacks_are_not_proposed(logits):
    """Never by a greedy draft, and hardly by one that samples.

    With a row of zeros both happen: the control.
    """
    whole, draft, d2t = logits
    rest = whole[:, torch.ones(whole.shape[1], dtype=torch.bool).index_fill(0, d2t, False)]
    highest = draft.amax(1, keepdim=True)
    assert (rest < highest - 1).all()
    mass = (whole.softmax(1).sum(1) - whole.softmax(1)[:, d2t].sum(1)).mean()
    assert mass < 0.02
    zeros = torch.cat([draft, torch.zeros_like(rest)], 1).softmax(1)[:, draft.shape[1] :].sum(1)
    assert zeros.mean() > 0.5 and (highest < 0).any()


def test_the_tokenizer_is_beside_it(folder, pair):
    text = "The capital of France is"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer(text)["input_ids"] == pair.tokenizer(text)["input_ids"]


@pytest.mark.parametrize("kind", [*PARTS, "language model"])
def test_a_draft_that_is_from_no_file_of_ours_is_refused(kind, tmp_path):
    """In one line, also where Python is used and the command line does not see to it."""
    target = small_target()
    if kind in PARTS:
        draft = load(write(tmp_path / "draft", *PARTS[kind](target)), target)
    else:
        draft = small_target(seed=1)
    message = f"found a {type(draft).__name__} that is not from a draft .safetensors file, expected"
    with pytest.raises(ArgumentError, match=f"^draft: {message} [^\n]*$"):
        save_as_folder(draft, None, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_the_target_is_written_as_well(tmp_path, plain_target):
    result = export("--format", "target", "-o", tmp_path / "target")
    assert "the target SmolLM2-135M-Instruct" in result.output
    ids = torch.tensor([[1, 5, 300, 17]])
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(written(ids).logits, plain_target(ids).logits)


def test_the_embedded_feature_draft_is_written_as_it_is(tmp_path):
    """It is the default."""
    result = export("--format", "draft", "-o", tmp_path / "out")
    assert f": the draft {DEFAULT_DRAFT}, bfloat16" in result.output
    for file in embedded_draft(DEFAULT_DRAFT).iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("tree.safetensors --format draft -o new", 2, "--format draft and target take no TREE"),
        ("a --format nxd --draft a -o new", 2, "--target and --draft name models"),
        ("--format target --draft a -o new", 2, "a tree or a target has no draft"),
        ("--format draft -o full", 1, "full: exists already"),
        ("--format draft --draft folder -o new", 2, "--draft folder: expected a draft .safeten"),
        ("--format draft --draft none.safetensors -o new", 1, "none.safetensors: no such file"),
    ],
)
def test_bad_input_is_one_line(tmp_path, monkeypatch, words, code, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    refused(export(*words.split()), code, message)
    assert [path.name for path in tmp_path.iterdir()] == ["full"]  # nothing was written
