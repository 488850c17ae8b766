"""Small models in folders, whose target is streamed, for the tests of offloading."""

import os
from functools import cache
from pathlib import Path

import torch
from architectures import TREE, tiny, words

from sequoia_plan.models.backends import COMPILED, OffloadedModel, load_model
from sequoia_plan.models.base.loading import Loading
from sequoia_plan.models.offload.memory import SLOTS, cache_bytes, own_bytes
from sequoia_plan.runtime import SequoiaDecoder, load_pair

PROMPT = torch.arange(3, 20)
LAYERS = 8


def save_models(folder, name="Llama", **changes):
    """A target of eight layers and a draft, as transformers saves them; the folder of both."""
    for role, layers in (("target", LAYERS), ("draft", 1)):
        model = tiny(name, num_hidden_layers=layers, tie_word_embeddings=True, **changes)
        model.save_pretrained(folder / role)
        words().save_pretrained(folder / role)
    return folder


def models_in(folder):
    return [str(folder / role) for role in ("target", "draft")]


@cache
def memory_for(target_folder, draft_folder, resident):
    """Bytes with which so many layers of a target stay in memory, beside its draft."""
    how = Loading(COMPILED, dtype="float32")
    offloaded = OffloadedModel(target_folder, how, "disk", None)
    target, draft = offloaded.model, load_model(draft_folder, how)
    caches = cache_bytes(target) + cache_bytes(draft)
    fixed_bytes = offloaded.loader.outside_bytes + own_bytes(draft, target) + caches
    return fixed_bytes + (SLOTS + resident) * max(offloaded.loader.layer_sizes())


def streamed(folder, resident=2, placement="auto"):
    """The pair with so many resident layers."""
    models = models_in(folder)
    memory = memory_for(*models, resident)
    return load_pair(*models, dtype="float32", placement=placement, offload="disk", memory=memory)


def in_memory(folder, placement="auto"):
    """The same pair with all weights in memory."""
    return load_pair(*models_in(folder), dtype="float32", placement=placement)


def decoder(pair, tree=TREE):
    return SequoiaDecoder(pair.target, pair.draft, tree)


def tokens(pair):
    return decoder(pair).generate(PROMPT, 40).sequences


def weights():
    """The one weight file of this test's target."""
    [path] = Path(os.environ["SEQUOIA_PLAN_CACHE"]).glob("target-*")
    return path
