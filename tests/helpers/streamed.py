"""A small model in a folder whose layers are streamed, for the tests of offloading."""

import os
from functools import cache
from pathlib import Path

import torch
from architectures import TREE, tiny

from sequoia_plan.runtime import SequoiaDecoder, load_pair
from sequoia_plan.runtime.backends import load_model, loaded
from sequoia_plan.runtime.backends.modules.offloaded_target import OffloadedTarget
from sequoia_plan.runtime.models.pretrained import find_model
from sequoia_plan.runtime.offload.memory import SLOTS, cache_bytes, own_bytes

PROMPT = torch.arange(3, 20)
LAYERS = 8


def save_models(folder, tokenizer, name="Llama", **changes):
    """A target of eight layers and a draft, as transformers saves them; the folder of both."""
    for role, layers in (("target", LAYERS), ("draft", 1)):
        model = tiny(name, num_hidden_layers=layers, tie_word_embeddings=True, **changes)
        model.save_pretrained(folder / role)
        tokenizer.save_pretrained(folder / role)
    return folder


@cache
def memory_for(target_folder, draft_folder, resident):
    """Bytes with which so many layers of a target stay in memory, beside its draft."""
    offloaded = OffloadedTarget(find_model(target_folder), "cpu", torch.float32)
    target, draft = loaded(offloaded.model), load_model(draft_folder, dtype="float32")
    caches = cache_bytes(target) + cache_bytes(draft)
    size = max(offloaded.layer_sizes())
    return offloaded.outside_bytes + own_bytes(draft, target) + caches + (SLOTS + resident) * size


def streamed(folder, resident=2, placement="auto"):
    """The pair with so many resident layers."""
    models = str(folder / "target"), str(folder / "draft")
    memory = memory_for(*models, resident)
    return load_pair(*models, dtype="float32", placement=placement, offload="disk", memory=memory)


def decoder(pair, tree=TREE):
    return SequoiaDecoder(pair.target, pair.draft, tree)


def tokens(pair, temperature=0.0, seed=1):
    return decoder(pair).generate(PROMPT, 40, temperature=temperature, seed=seed).sequences


def weights(folder):
    """The one weight file of this test."""
    [path] = Path(os.environ["SEQUOIA_PLAN_CACHE"]).glob("*.weights")
    return path
