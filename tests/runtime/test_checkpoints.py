"""Folders of drafts as people share them.

What does not fit is one line that says why, and the command line needs no option but --draft.
"""

import gguf
import pytest
import torch
from gguf_files import add_metadata, by_neighbours, names_of, settings_of
from gguf_files import write as write_gguf
from refusals import refusal
from toys import TREE
from transformers import LlamaConfig

from drafts import PARTS, eagle3_parts, load, small_target, write
from sequoia_plan.artifacts import Profile, load_tree, save_tree
from sequoia_plan.models.files.pretrained import find_model
from sequoia_plan.runtime import SequoiaDecoder, load_pair

pytestmark = pytest.mark.slow
TARGET = small_target()
LAYERS, WEIGHTS = eagle3_parts(TARGET)
NESTED = {"speculators_model_type": "eagle3", "draft_vocab_size": 16}


def nested(**config):
    return NESTED | {"transformer_layer_config": LAYERS} | config, WEIGHTS


def parts_of(algorithm, **changes):
    """(a config with `changes`, weights)."""
    config, weights = PARTS[algorithm](TARGET)
    return config | changes, weights


def flat_as_nested(config, weights, **settings):
    """A block draft in speculators' layout."""
    names = ("block_size", "mask_token_id", "markov_rank")
    ids = {"aux_hidden_state_layer_ids": [n + 1 for n in config.pop("target_layer_ids")]}
    settings |= {name: config[name] for name in names} | ids
    return settings | {"transformer_layer_config": config}, weights


ANOTHER_KIND = "found a draft of another kind"
BAD = {
    "Medusa": (lambda: parts_of("EAGLE-3", architectures=["MedusaModel"]), ANOTHER_KIND),
    "DSpark of unknown rows": (
        lambda: parts_of("DSpark", architectures=["DSparkDraftModel"]),
        ANOTHER_KIND,
    ),
    "a DFlash without a selector": (
        lambda: parts_of("DFlash", architectures=["DFlash2DraftModel"]),
        "conv_kernel_size.*: None",
    ),
    "scaled embeddings": (
        lambda: parts_of("DFlash 2", input_embedding_scale=2),
        "embedding_scale: found 2",
    ),
    "a Markov head of either kind": (
        lambda: flat_as_nested(*parts_of("DSpark"), speculators_model_type="dspark"),
        "sample_from_anchor: missing",
    ),
    "a gate": (lambda: parts_of("DSpark", markov_head_type="gated"), "markov_head_type: found"),
    "another type of speculators": (lambda: nested(speculators_model_type="mtp"), ANOTHER_KIND),
    "another hidden size": (
        lambda: eagle3_parts(small_target(hidden=24)),
        "its weights do not fit its config.json and this target: .*fc.weight",
    ),
    "scales of another kind": (
        lambda: (LAYERS, WEIGHTS | {"fc.weight_scale": torch.ones(1)}),
        "its scales do not fit its weights: IndexError",
    ),
    "another vocabulary": (
        lambda: eagle3_parts(small_target(vocabulary=64)),
        "made for a target of 64 tokens",
    ),
    "layers that are not there": (
        lambda: parts_of("EAGLE-3", eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 5, 20]}),
        "hidden states, -1 to 3",
    ),
    "layers of another layout": (
        lambda: nested(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}),
        "found layer ids as eagle_config.eagle_aux_hidden_state_layer_ids",
    ),
}
"""tests/hands/test_damaged_drafts.py has odd settings, and tensors that do not fit."""


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_one_line(name, tmp_path):
    parts, message = BAD[name]
    with refusal(message) as error:
        load(write(tmp_path / "a-draft", *parts()), TARGET)
    assert "a-draft: " in str(error.value) and "\n" not in str(error.value)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A small target with the embedded tokenizer, and a random draft of each algorithm for it."""
    root = tmp_path_factory.mktemp("folders")
    tokenizer = find_model(None).tokenizer()
    target = small_target(vocabulary=len(tokenizer), hidden=32)
    target.save_pretrained(root / "target")
    tokenizer.save_pretrained(root / "target")
    return {"target": str(root / "target")} | {
        algorithm: write(root / algorithm, *parts(target)) for algorithm, parts in PARTS.items()
    }


@pytest.mark.parametrize("algorithm", ["EAGLE-3", "DFlash 2"])
def test_profile_solve_generate_with_no_option_but_the_draft(
    algorithm, folders, run_briefly, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    models = ("--target", folders["target"], "--draft", folders[algorithm])
    run_briefly("profile", *models, "--tokens", "8", "--precision", "40%", "--temperature", "1")
    profile = Profile.load("profile.yaml")
    is_block = algorithm == "DFlash 2"
    assert profile.drafting.draft_type == ("block draft" if is_block else "feature draft")
    assert min(profile.latency.draft) == (5 if is_block else 1)
    assert profile.models["draft"]["name"] == algorithm
    run_briefly("solve")
    assert load_tree("tree.safetensors").plan.drafting == profile.drafting
    save_tree(TREE, "wide.safetensors")
    for tree in ("tree.safetensors", "wide.safetensors"):
        run_briefly("generate", *models, "--tree", tree, "--max-new-tokens", "12")


def test_remarks(folders, tmp_path):
    """What loads although something is to be said of it."""
    layers, weights = eagle3_parts(small_target(vocabulary=49152, hidden=32))
    del layers["eagle_config"]
    layers["max_position_embeddings"] = 64
    config = NESTED | {
        "transformer_layer_config": layers,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    }
    pair = load_pair(folders["target"], write(tmp_path / "draft", config, weights), dtype="float32")
    not_compiled, draft_neither, short = sorted(pair.remarks, reverse=True)
    assert not_compiled.startswith("target: PyTorch runs it")
    assert pair.placement == "fused" and "is not compiled: heads of 8 numbers" in not_compiled
    assert "draft: PyTorch runs it, its pass is not compiled: " in draft_neither
    assert "trained on up to 64 tokens (max_position_embeddings), the target reads 256" in short


def test_a_streamed_target_gives_its_hidden_states_too(folders, tmp_path):
    """Layers whose weights are read in every pass have hooks like any others."""
    for algorithm in ("EAGLE-3", "DFlash"):
        names = (folders["target"], folders[algorithm])
        pairs = [
            load_pair(*names, dtype="float32"),
            load_pair(*names, dtype="float32", offload="disk", memory="40MB"),
        ]
        first, second = (
            SequoiaDecoder(pair.target, pair.draft, TREE)
            .generate(list(range(5, 30)), 20, 1.0, seed=0)
            .sequences
            for pair in pairs
        )
        assert "streamed" in pairs[1].placement and first.equal(second)


def write_gguf_draft(path, permutes=True, **more):
    """The EAGLE-3 draft as llama.cpp's converter writes it; with `more` metadata."""
    config, writer = LlamaConfig(**LAYERS), gguf.GGUFWriter(path, "eagle3")
    settings = {"block_count": 1, "norm_before_residual": False, "target_layers": [1, 2, 3]}
    add_metadata(writer, "eagle3", settings_of(config) | settings | more)
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
    names = {"midlayer.hidden_norm.weight": "blk.0.attn_norm_2.weight"}
    names["norm.weight"] = "output_norm.weight"
    for name, weight in WEIGHTS.items():
        if name == "t2d":
            continue
        if name == "d2t":
            weight = weight + torch.arange(weight.numel())
        values, count = weight.numpy(), heads.get(name[-13:-12])
        if permutes and count and name.endswith("_proj.weight"):
            values = by_neighbours(values, count)
        theirs = name.replace("midlayer.", "model.layers.0.")
        theirs = names_of("llama").get_name(theirs, (".weight",))
        writer.add_tensor(names.get(name) or theirs or name, values)
    write_gguf(writer)
    return str(path)


def test_a_gguf_draft_is_its_folders(tmp_path):
    """Weights, tokens and hidden states; unpermuted heads, as of another writer, would differ."""
    folder = write(tmp_path / "folder", LAYERS, WEIGHTS)
    expected, draft = load(folder, TARGET), load(write_gguf_draft(tmp_path / "d.gguf"), TARGET)
    state = draft.state_dict()
    assert draft.d2t.equal(expected.d2t) and draft.norms == expected.norms
    assert draft.aux_hidden_state_layers == (1, 2, 3)
    assert all(state[n].equal(tensor) for n, tensor in expected.state_dict().items())
    other = load(write_gguf_draft(tmp_path / "o.gguf", permutes=False), TARGET).state_dict()
    assert [n for n in state if not state[n].equal(other[n])] == [
        f"layers.0.self_attn.{name}_proj.weight" for name in "qk"
    ]
    path = tmp_path / "more.gguf"
    with refusal(r"more\.gguf: .*expert_count"):
        load(write_gguf_draft(path, expert_count=3), TARGET)
    data = (tmp_path / "d.gguf").read_bytes()
    path.write_bytes(data.replace(b"embedding_length", b"embedding_lengtH"))
    with refusal(r"more\.gguf: no whole EAGLE-3 draft"):
        load(path, TARGET)
    path.write_bytes(data[:-999])
    with refusal(r"more\.gguf: no whole GGUF file"):
        load(path, TARGET)
