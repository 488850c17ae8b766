"""transformers 5.24 renamed the argument `past_key_values` of its models and layers to `cache`.

Models and fused layers take part in both ways, whichever version is installed.
"""

from __future__ import annotations

import pytest
import torch
from architectures import tiny
from toys import ToyModel
from transformers import DynamicCache

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.runtime import SequoiaDecoder
from sequoia_plan.runtime.models.fuse import fuse
from sequoia_plan.runtime.models.fused_layer import plain_linear

TREE = TokenTree.from_parents([-1, 0, 0, 1, 1])


class RenamedModel(ToyModel):
    """A toy with the argument's new name, and no other."""

    def forward(
        self,
        input_ids,
        position_ids=None,
        attention_mask=None,
        cache=None,
        use_cache=None,
        logits_to_keep=0,
    ):
        return super().forward(
            input_ids, position_ids, attention_mask, cache, use_cache, logits_to_keep
        )


def test_decoding_with_models_of_both_names_is_the_same():
    old, new = (
        SequoiaDecoder(model_class(0), model_class(1), TREE).generate([1, 2, 3], 20).sequences
        for model_class in (ToyModel, RenamedModel)
    )
    assert torch.equal(old, new) and len(old.unique()) > 3


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_fused_layer_keeps_keys_under_both_names(name):
    model = tiny("Llama")
    assert fuse(model, plain_linear) == len(model.model.layers)
    states = torch.randn(1, 3, model.config.hidden_size)
    angles = model.model.rotary_emb(states, torch.arange(3)[None])
    cache = DynamicCache()
    with torch.inference_mode():
        model.model.layers[0](states, None, angles, **{name: cache})
    assert cache.get_seq_length() == 3
