"""A model is tried on a small tree before it is trusted with one."""

from __future__ import annotations

import inspect
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from sequoia_plan.artifacts import SequoiaPlanError, TokenTree
from sequoia_plan.runtime.cache import Layout, TreeCache
from sequoia_plan.runtime.models import attention
from sequoia_plan.runtime.models.forward import TreeModel, additive, execution_device, place, plain, text_config
from sequoia_plan.runtime.structure import Structure

TREE = TokenTree.from_parents([-1, 0, 0, 1, 1, 2])
LEAVES = (3, 4, 5)
PREFIX, EXTENT = 4, 16
ATTENTION = ("sdpa", "eager")

_probed: WeakKeyDictionary[Any, tuple[tuple[Any, ...], Layout]] = WeakKeyDictionary()


@torch.inference_mode()
def probe(model: Any) -> Layout:
    """Compare logits of a tree's nodes with those of its paths, each read by the model on its own, without our mask or cache.

    That is done once for a model in one place and dtype. Nodes share slots' order but not positions with their paths, so whatever looks at slots
    (ALiBi), at the token before (recurrent layers) or past the mask shows.

    Returns:
        The layout of the model's KV cache.

    Raises:
        SequoiaPlanError: if the model cannot read a tree.
    """
    implementation = attention.implementation(model.config)
    setting = (implementation, *place(model))
    known, layout = _probed.get(plain(model), (None, None))
    if layout is not None and known == setting:
        return layout
    kind = getattr(model.config, "model_type", type(plain(model)).__name__)
    if getattr(model.config, "is_encoder_decoder", False):
        raise SequoiaPlanError(f"{kind}: an encoder-decoder, expected a decoder-only causal language model")
    if implementation is not None and implementation not in ATTENTION:
        raise SequoiaPlanError(f"{kind}: attention {implementation} takes no tree mask; load the model with attn_implementation='sdpa' or 'eager'")
    parameters = inspect.signature(plain(model).forward).parameters
    if ("input_ids" in parameters and "position_ids" not in parameters) or getattr(model.config, "alibi", False):
        raise SequoiaPlanError(f"{kind}: cannot decode with a token tree, it takes no position_ids (ALiBi or a recurrence orders its tokens)")
    if execution_device(model).type == "meta":
        raise SequoiaPlanError(f"{kind}: its weights are on the meta device and nothing brings them; load them, or offload it with accelerate")
    trial = TreeModel(model)  # says itself what it cannot describe
    try:
        with torch.compiler.set_stance("force_eager"):  # these shapes never come again
            error, cache = _error(trial)
    except SequoiaPlanError:
        raise
    except Exception as failure:  # whatever foreign code does with a mask it does not expect
        raise SequoiaPlanError(f"{kind}: cannot decode with a token tree, reading one fails ({type(failure).__name__}: {_short(failure)})") from failure
    if error != error:
        raise SequoiaPlanError(f"{kind}: its logits are not finite; the weights are damaged or the dtype overflows")
    bound = torch.finfo(model.dtype).eps ** 0.5
    if not error < bound:
        raise SequoiaPlanError(
            f"{kind}: cannot decode with a token tree, its logits there differ from those of the plain sequence (relative error {error:.2g}, expected "
            f"less than {bound:.2g}); only attention that follows position_ids and the attention mask can, ALiBi and recurrent layers cannot"
        )
    _probed[plain(model)] = setting, cache.layout
    return cache.layout


def _error(trial: TreeModel) -> tuple[float, TreeCache]:
    """The mean over the tree's nodes of |tree - path| / |path|, logits centred: a softmax does not see their mean. And the cache used."""
    device = trial.device
    vocabulary = int(text_config(trial.model).vocab_size)
    chosen = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(0))[: PREFIX + TREE.size]
    chosen = chosen.repeat(PREFIX + TREE.size)[: PREFIX + TREE.size].to(device)
    prefix, nodes = chosen[:PREFIX], chosen[PREFIX:]
    paths = [torch.as_tensor(TREE.attention_mask[leaf].nonzero()[0], device=device) for leaf in LEAVES]

    reference = trial.model(input_ids=torch.stack([torch.cat([prefix, nodes[path]]) for path in paths]), use_cache=False).logits
    expected: dict[int, Tensor] = {}
    for row, path in enumerate(paths):
        expected.update({node: reference[row, PREFIX + place] for place, node in enumerate(path.tolist())})

    cache = trial.new_cache(EXTENT)
    start = torch.arange(PREFIX + 1, device=device)  # the root too: the rest of the tree must find it in the cache
    trial(cache, chosen[: PREFIX + 1], start, start, additive(start <= start[:, None], trial.model.dtype))
    length, structure = torch.tensor([PREFIX], device=device), Structure.of(TREE, device, trial.model.dtype)
    mask = structure.mask[1:].index_select(1, structure.columns(length, EXTENT))
    logits = trial(cache, nodes[1:], length + structure.offsets[1:], length + structure.nodes[1:], mask).logits

    errors = [_relative(logits[node - 1], expected[node]) for node in range(1, TREE.size)]
    return float(torch.stack(errors).mean()), cache


def _relative(ours: Tensor, theirs: Tensor) -> Tensor:
    forbidden = theirs.isneginf() & ours.isneginf()
    ours, theirs = (x[~forbidden].double() for x in (ours, theirs))
    ours, theirs = ours - ours.mean(), theirs - theirs.mean()
    return (ours - theirs).norm() / theirs.norm().clamp(min=torch.finfo(torch.float64).tiny)


def _short(error: BaseException) -> str:
    return (str(error).strip().split("\n") or [""])[0][:160]
