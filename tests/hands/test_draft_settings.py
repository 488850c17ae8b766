"""Settings of draft folders: what trainers write is read, and what is another model is refused."""

import pytest
import torch
from refusals import refusal

from drafts import dflash_parts, eagle1_parts, eagle3_parts, load, small_target, write
from sequoia_plan.artifacts import TokenTree
from sequoia_plan.models.backends import loaded
from sequoia_plan.models.vocabulary import shared_vocabulary
from sequoia_plan.runtime import SequoiaDecoder

TARGET = small_target(layers=8)
IDS = "eagle_aux_hidden_state_layer_ids"
MODEL_OPT = {
    IDS: [0, 3, 4],
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "parallel_draft_heads_num_layers": 1,
}
WHOLE_VOCABULARY = {"d2t": None, "t2d": None, "lm_head.weight": None}


def draft(folder, parts, settings, weights=()):
    """A draft with these settings; those of None, and weights of None, are taken out."""
    config, tensors = parts(TARGET)
    merged = [{**config, **settings}, {**tensors, **dict(weights)}]
    kept = ({name: v for name, v in each.items() if v is not None} for each in merged)
    return load(write(folder, *kept), TARGET)


@pytest.mark.parametrize(
    ("settings", "layers"),
    [
        ({"eagle_config": None}, (2, 4, 5)),
        ({"eagle_config": MODEL_OPT}, (1, 4, 5)),
        ({"eagle_config": None, "aux_hidden_states_layer_ids": [0, 3, 4]}, (1, 4, 5)),
        ({"eagle_config": {IDS: [0, 3, 4]}, "aux_hidden_states_layer_ids": [0, 3, 4]}, (1, 4, 5)),
    ],
)
def test_layer_ids_are_read_where_their_meaning_is_known(settings, layers, tmp_path):
    assert draft(tmp_path / "draft", eagle3_parts, settings).aux_hidden_state_layers == layers


VARIANTS = {
    **{
        f"eagle_config.{key}": (eagle3_parts, {"eagle_config": {IDS: [0, 1, 2], key: value}}, key)
        for key, value in (
            ("aux_layer_ids", [1, 2, 3]),
            ("use_mtp_layernorm", True),
            ("parallel_draft_step", 4),
            ("norm_before_residual", "false"),
            ("something_new", 2),
            ("section", {"layer_ids": [1, 2, 3]}),
        )
    },
    **{
        key: (eagle3_parts, {key: value}, key)
        for key, value in (
            ("use_aux_hidden_state", False),
            ("norm_output", 1),
            ("aux_hidden_state_layers", [1, 2, 3]),
            ("section", {"eagle_config": {IDS: [1, 2, 3]}}),
            ("eagle_config", [1, 2, 3]),
            (IDS, [1, 2, 3]),
        )
    },
    "others": (eagle3_parts, {"aux_hidden_states_layer_ids": [0, 1, 3]}, "distinct numbers"),
    "EAGLE-1": (eagle1_parts, {"aux_hidden_states_layer_ids": [1]}, "aux_hidden_states_layer_ids"),
    "DFlash": (dflash_parts, {"causal": "false"}, "causal"),
    "DFlash's anchor": (dflash_parts, {"sample_from_anchor": 1}, "sample_from_anchor"),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_are_refused_by_name(name, tmp_path):
    parts, settings, key = VARIANTS[name]
    with refusal(key) as error:
        draft(tmp_path / "a-draft", parts, settings)
    assert "a-draft: " in str(error.value)


def test_a_draft_without_a_head_shares_the_targets(tmp_path):
    """As long as it says nothing of a smaller vocabulary, whose head was lost then."""
    shared = draft(tmp_path / "draft", eagle3_parts, {"draft_vocab_size": 48}, WHOLE_VOCABULARY)
    assert shared.lm_head is None
    prompt = torch.tensor([[5, 6, 7, 8]])
    expected = SequoiaDecoder(TARGET, None, TokenTree.chain(1)).generate(prompt, 9).sequences
    tree = TokenTree.from_parents([-1, 0, 0, 1])
    assert SequoiaDecoder(TARGET, shared, tree).generate(prompt, 9).sequences.equal(expected)
    with refusal(r"lm_head\.weight"):
        draft(tmp_path / "draft", eagle3_parts, {"draft_vocab_size": 16}, WHOLE_VOCABULARY)


@pytest.mark.parametrize("d2t", [[0, 2, -1], [0, 48], [3, 3], [0.0, 2.0], [[0, 2]], []], ids=str)
def test_maps_that_name_no_tokens_of_the_target_are_refused(d2t):
    """Of a model that somebody passes in; those of files are in test_damaged_drafts.py."""
    other = small_target(seed=1)
    other.d2t = torch.tensor(d2t)
    with refusal(r"draft: (covers token|d2t must name)"):
        shared_vocabulary(loaded(TARGET), loaded(other))


def test_maps_may_be_in_any_order(tmp_path):
    """Offsets below 0 are right where the tokens that they lead to are the target's."""
    d2t = torch.randperm(48, generator=torch.Generator().manual_seed(0))[:16]
    model = draft(
        tmp_path / "draft",
        lambda target: eagle3_parts(target, d2t=d2t.tolist()),
        {"eagle_config": {IDS: [0, 3, 4]}},
    )
    assert model.d2t.equal(d2t)
    tree = TokenTree.from_parents([-1, 0, 0, 1])
    SequoiaDecoder(TARGET, model, tree).generate(torch.tensor([5, 6, 7]), 9, 1.0, seed=0)
