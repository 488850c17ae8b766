"""Folders of drafts as people share them.

What does not fit is one line that says why, and the command line needs no option but --draft.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from drafts import PARTS, dflash_parts, eagle1_parts, eagle3_parts, load, small_target, write
from sequoia_plan.artifacts import Profile, SequoiaPlanError, TokenTree, load_tree, save_tree
from sequoia_plan.runtime import SequoiaDecoder, load_pair
from sequoia_plan.runtime.models.pretrained import load_model

pytestmark = pytest.mark.usefixtures("one_thread")
TARGET = small_target()
NESTED = {"speculators_model_type": "eagle3", "draft_vocab_size": 16}


def eagle3(**changes):
    """A config with `changes`; None removes a key. Weights changed by names with a dot in them."""
    return changed(*eagle3_parts(TARGET), changes)


def dflash(**changes):
    return changed(*dflash_parts(TARGET), changes)


def changed(config, weights, changes):
    for name, value in changes.items():
        place = weights if name in weights or name.endswith("weight") else config
        if value is None:
            del place[name]
        else:
            place[name] = value
    return config, weights


def nested(**config):
    layers, weights = eagle3_parts(TARGET)
    return NESTED | {"transformer_layer_config": layers} | config, weights


BAD = {
    "another kind of draft": (
        lambda: eagle3(architectures=["MedusaModel"]),
        "found the architecture 'MedusaModel', which is a draft of another kind; expected one of",
    ),
    "the second DFlash": (
        lambda: dflash(architectures=["DFlash2DraftModel"]),
        "found the architecture 'DFlash2DraftModel', which is a draft of another kind",
    ),
    "another kind of speculators": (
        lambda: nested(speculators_model_type="mtp"),
        "found speculators_model_type 'mtp', which is a draft of another kind",
    ),
    "no d2t": (
        lambda: eagle3(d2t=None),
        "lm_head.weight has 16 rows for 48 target tokens and no d2t says which",
    ),
    "d2t of another length": (
        lambda: eagle3(d2t=torch.zeros(9, dtype=torch.long), t2d=None),
        "d2t has 9 entries, lm_head.weight has 16 rows",
    ),
    "d2t of token numbers": (
        lambda: eagle3(d2t=torch.arange(16) * 2),
        "d2t names other tokens than t2d marks",
    ),
    "d2t that was not filled": (
        lambda: eagle3(d2t=torch.zeros(16, dtype=torch.long)),
        "d2t names other tokens than t2d marks; one of them was not filled",
    ),
    "d2t twice": (
        lambda: eagle3(d2t=-torch.arange(16), t2d=None),
        "d2t does not name each target token at most once; expected offsets",
    ),
    "d2t of fractions": (
        lambda: eagle3(d2t=torch.zeros(16)),
        r"d2t is \(16,\) of torch.float32, expected one whole number for each token",
    ),
    "no head": (
        lambda: eagle3(**{"lm_head.weight": None}),
        "no lm_head.weight found, which every EAGLE-3 draft has",
    ),
    "another number of draft tokens": (
        lambda: eagle3(draft_vocab_size=20),
        "lm_head.weight has 16 rows, draft_vocab_size is 20",
    ),
    "another hidden size": (
        lambda: eagle3_parts(small_target(hidden=24)),
        "made for a target of hidden size 24, this one's is 16; use a draft made for this target",
    ),
    "another hidden size, said": (
        lambda: eagle3(target_hidden_size=32),
        "made for a target of hidden size 32, this one's is 16",
    ),
    "another vocabulary": (
        lambda: eagle3_parts(small_target(vocabulary=64)),
        r"made for a target of 64 tokens \(vocab_size\), this one has 48",
    ),
    "layers that are not there": (
        lambda: eagle3(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 5, 20]}),
        "reads the target's hidden states 2, 6, 21, this one has 0 to 4",
    ),
    "layers twice": (
        lambda: eagle3(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 1, 2]}),
        r"found \[1, 1, 2\], expected each layer once",
    ),
    "layers as text": (
        lambda: eagle3(eagle_config={"eagle_aux_hidden_state_layer_ids": "low"}),
        "found 'low', expected a list of layer numbers",
    ),
    "layers counted in an unknown way": (
        lambda: eagle3(eagle_aux_hidden_state_layer_ids=[1, 2, 3]),
        "found layer ids as eagle_aux_hidden_state_layer_ids, whose numbers no known trainer of "
        "this layout writes; expected eagle_config.",
    ),
    "layers of another layout": (
        lambda: nested(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}),
        "found layer ids as eagle_config.eagle_aux_hidden_state_layer_ids, whose numbers no known "
        "trainer of this layout writes",
    ),
    "too few layers": (
        lambda: eagle3(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2]}),
        "fc.weight is 16 x 48, which takes 3 hidden states of 16, its layer ids are 2",
    ),
    "a matrix of another shape": (
        lambda: eagle3(**{"midlayer.self_attn.q_proj.weight": torch.zeros(32, 16)}),
        "layers.0.self_attn.q_proj.weight is 32 x 16, expected 32 x 32 by its config.json and the "
        "target",
    ),
    "a tensor that is missing": (
        lambda: eagle3(**{"midlayer.hidden_norm.weight": None}),
        "no tensor layers.0.hidden_norm.weight found, expected 16",
    ),
    "a tensor too many": (
        lambda: eagle3(**{"fc_norm.0.weight": torch.ones(16)}),
        "found a tensor fc_norm.0.weight, which its config.json gives no place",
    ),
    "no fc": (
        lambda: eagle3(**{"fc.weight": None}),
        "no matrix fc.weight found, which every EAGLE-3 draft has",
    ),
    "layers of another architecture": (
        lambda: eagle3(model_type="gpt2"),
        "found layers of model_type 'gpt2', expected llama or qwen3",
    ),
    "heads that do not divide": (
        lambda: eagle3(num_attention_heads=5, head_dim=None),
        "config.json: cannot be read as a llama configuration|expected",
    ),
    "EAGLE-1 of another target": (
        lambda: eagle1_parts(small_target(hidden=24)),
        "fc.weight is 24 x 48 for a hidden size of 24, the target's is 16",
    ),
    "no block size": (
        lambda: dflash(block_size=None),
        "block_size: found None, expected a whole number of tokens, 2 or more",
    ),
    "a block of one": (lambda: dflash(block_size=1), "block_size: found 1, expected"),
    "no mask": (
        lambda: dflash(dflash_config={"target_layer_ids": [0, 2]}),
        "mask_token_id: found None, expected a token of the target, 0 to 47",
    ),
    "a mask beyond the embeddings": (
        lambda: dflash(dflash_config={"target_layer_ids": [0, 2], "mask_token_id": 99}),
        "mask_token_id: found 99, expected",
    ),
    "no layers": (
        lambda: dflash(dflash_config={"mask_token_id": 1}),
        "says no target_layer_ids, and a DFlash draft can be read with no others",
    ),
    "a variant of DFlash": (
        lambda: dflash(
            dflash_config={
                "mask_token_id": 1,
                "target_layer_ids": [0, 2],
                "projector_type": "domino",
            }
        ),
        "dflash_config.projector_type: found 'domino', a variant that is not known",
    ),
    "an activation that nobody knows": (
        lambda: eagle3(hidden_act="silver"),
        "config.json: hidden_act: found 'silver', expected an activation of transformers",
    ),
    "a rotary embedding that nobody knows": (
        lambda: eagle3(rope_parameters={"rope_type": "nope", "rope_theta": 1e4}),
        "config.json: ",
    ),
    "no layers of its own": (
        lambda: eagle3(num_hidden_layers=0),
        "config.json: num_hidden_layers: found 0, expected a whole number, 1 to",
    ),
    "layers without end": (
        lambda: dflash(num_hidden_layers=10**12),
        "config.json: num_hidden_layers: found 1000000000000, expected a whole number, 1 to 4096",
    ),
    "sizes in lists": (
        lambda: dflash(intermediate_size=[24]),
        "config.json: ",
    ),
    "fc of no number of hidden states": (
        lambda: eagle3(**{"fc.weight": torch.zeros(16, 50)}),
        "fc.weight is 16 x 50, which takes no whole number of hidden states of 16",
    ),
    "a window of no size": (
        lambda: dflash(layer_types=["sliding_attention"] * 2),
        "has layers of sliding_attention and sliding_window None, expected a number",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_one_line(name, tmp_path):
    parts, message = BAD[name]
    with pytest.raises(SequoiaPlanError, match=message) as error:
        load(write(tmp_path / "a-draft", *parts()), TARGET)
    assert "a-draft: " in str(error.value) and "\n" not in str(error.value)


ODD_VALUES = (0, -1, 1.5, 10**30, "x", [1], [], {"a": 1}, True, float("nan"))


@pytest.mark.parametrize("make", [eagle3, dflash, lambda: eagle1_parts(TARGET)])
def test_odd_values_in_config_json_are_one_line(make, tmp_path):
    """Each key in turn: an error of one line, or a draft that decodes what its target says."""
    config, weights = make()
    prompt = torch.tensor([[5, 6, 7, 8]])
    expected = SequoiaDecoder(TARGET, None, TokenTree.chain(1)).generate(prompt, 4).sequences
    refused = 0
    folder = tmp_path / "a-draft"
    names = {"hidden_act", "head_dim", "rope_scaling", "rope_parameters", "layer_types", *config}
    for name in sorted(names):
        for value in (*ODD_VALUES, {"rope_type": "nope", "rope_theta": 1e4}):
            write(folder, config, weights)
            (folder / "config.json").write_text(json.dumps({**config, name: value}))
            sequences = message = None
            try:
                draft = load(folder, TARGET)
                decoder = SequoiaDecoder(TARGET, draft, TokenTree.chain(2))
                sequences = decoder.generate(prompt, 4).sequences
            except SequoiaPlanError as error:
                message = str(error)
            except Exception as error:
                raise AssertionError(f"{name}: {value!r}") from error
            refused += message is not None
            assert sequences is None or sequences.equal(expected), (name, value)
            assert message is None or "\n" not in message, (name, value)
    assert refused > 50


def test_weights_that_cannot_be_read_are_one_line(tmp_path):
    folder = write(tmp_path / "draft", *eagle3())
    weights = tmp_path / "draft" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(SequoiaPlanError, match="its weights cannot be read"):
        load(folder, TARGET)
    weights.unlink()
    with pytest.raises(SequoiaPlanError, match="no weights found, expected model"):
        load(folder, TARGET)
    (tmp_path / "draft" / "pytorch_model.bin").write_bytes(b"no pickle")
    with pytest.raises(SequoiaPlanError, match=r"pytorch_model.bin: cannot be read"):
        load(folder, TARGET)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A small target with the embedded tokenizer, and a random draft of each algorithm for it."""
    root = tmp_path_factory.mktemp("folders")
    tokenizer = load_model(None, "cpu", torch.float32)[1]
    target = small_target(vocabulary=len(tokenizer), hidden=32)
    target.save_pretrained(root / "target")
    tokenizer.save_pretrained(root / "target")
    return {"target": str(root / "target")} | {
        algorithm: write(root / algorithm, *parts(target)) for algorithm, parts in PARTS.items()
    }


def run(*words, cwd):
    """The command line, in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "sequoia_plan.planner.cli", *words],
        capture_output=True,
        text=True,
        cwd=cwd,
    )


@pytest.mark.parametrize("algorithm", PARTS)
def test_profile_solve_generate_with_no_option_but_the_draft(algorithm, folders, tmp_path):
    models = ("--target", folders["target"], "--draft", folders[algorithm])
    short = ("--tokens", "8", "--latency-seconds", "0.2", "--precision", "40%")
    done = run("profile", *models, *short, "--temperature", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    profile = Profile.load(tmp_path / "profile.yaml")
    if algorithm == "DFlash":
        assert profile.drafting.draft_type == "block draft"
        assert list(profile.latency.draft) == [5]
    else:
        assert profile.drafting.draft_type == "feature draft"
        assert 1 in profile.latency.draft
    assert profile.models["draft"]["name"] == algorithm
    done = run("solve", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert load_tree(tmp_path / "tree.safetensors").plan.drafting == profile.drafting
    save_tree(TokenTree.from_parents([-1, 0, 0, 1, 1, 3]), tmp_path / "wide.safetensors")
    for tree in ("tree.safetensors", "wide.safetensors"):
        done = run(
            "generate", *models, "--tree", tree, "--max-new-tokens", "12", "--json", cwd=tmp_path
        )
        assert done.returncode == 0 and json.loads(done.stdout)["new_tokens"] <= 12, done.stderr


def test_a_foreign_draft_is_one_line_and_exit_code_1(folders, tmp_path):
    models = ("--target", folders["target"], "--draft", write(tmp_path / "foreign", *eagle3()))
    done = run("generate", *models, "--tree", "sequoia-example-64x6", cwd=tmp_path)
    assert done.returncode == 1 and done.stdout == ""
    message = (
        "foreign: made for a target of hidden size 16, this one's is 32; use a draft made for this "
        "target"
    )
    assert done.stderr.strip().endswith(message)
    assert len(done.stderr.strip().splitlines()) == 1


def test_remarks(folders, tmp_path):
    """What loads although something is to be said of it."""
    target = small_target(vocabulary=49152, hidden=32)
    layers, weights = eagle3_parts(target)
    verifier = {"name_or_path": "some/Qwen3", "architectures": ["Qwen3ForCausalLM"]}
    layers["max_position_embeddings"] = 64
    config = NESTED | {
        "transformer_layer_config": layers,
        "speculators_config": {"verifier": verifier},
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    }
    pair = load_pair(folders["target"], write(tmp_path / "draft", config, weights), dtype="float32")
    assert len(pair.remarks) == 2
    other_target = "made for some/Qwen3 (Qwen3ForCausalLM), this target is a LlamaForCausalLM"
    assert other_target in pair.remarks[0]
    shorter_context = (
        "trained on up to 64 tokens (max_position_embeddings), the target reads 256; acceptance "
        "falls beyond that"
    )
    assert shorter_context in pair.remarks[1]


@pytest.mark.parametrize("algorithm", ["EAGLE-3", "DFlash"])
def test_greedy_text_of_the_embedded_target_is_unchanged(algorithm, plain_target, tmp_path):
    """Random drafts in the shapes of the real target: mostly rejected, and never in the text."""
    shape = dict(heads=9, kv_heads=3, head_dim=64, intermediate=1536)
    settings = {
        "EAGLE-3": dict(d2t=range(0, 49152, 12)),
        "DFlash": dict(ids=(1, 9, 17, 25), mask=2, block=8),
    }
    parts = PARTS[algorithm](plain_target, **shape, **settings[algorithm])
    draft = load(write(tmp_path / "draft", *parts), plain_target)
    prompt = torch.tensor([[504, 3575, 282, 4649, 314, 253, 1194, 30, 1073, 506, 260]])
    expected = plain_target.generate(prompt, max_new_tokens=24, do_sample=False, eos_token_id=None)
    tree = TokenTree.from_parents([-1, 0, 0, 0, 1, 1, 2, 4])
    generation = SequoiaDecoder(plain_target, draft, tree).generate(prompt, 24, eos_token_id=())
    assert torch.equal(generation.sequences, expected)


def test_a_streamed_target_gives_its_hidden_states_too(folders, tmp_path):
    """Layers whose weights are read in every pass have hooks like any others."""
    for algorithm in ("EAGLE-3", "DFlash"):
        names = (folders["target"], folders[algorithm])
        pairs = [
            load_pair(*names, dtype="float32"),
            load_pair(*names, dtype="float32", offload="disk", memory="40MB"),
        ]
        tree, prompt = TokenTree.from_parents([-1, 0, 0, 1, 1, 3]), list(range(5, 30))
        decoders = [SequoiaDecoder(pair.target, pair.draft, tree) for pair in pairs]
        first, second = (
            decoder.generate(prompt, 20, 1.0, seed=0).sequences for decoder in decoders
        )
        assert "streamed" in pairs[1].placement and torch.equal(first, second)
