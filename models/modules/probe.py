"""A model is tried on a small tree before it decodes with one."""

import inspect

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sequoia_plan.artifacts import SequoiaPlanError, TokenTree
from sequoia_plan.models.base.architecture import execution_device, model_type, unwrapped
from sequoia_plan.models.base.cache import CacheLayout, TreeCache
from sequoia_plan.models.base.errors import first_line
from sequoia_plan.models.base.tree_tensors import TreeTensors
from sequoia_plan.models.layers.attention import IMPLEMENTATIONS, attention_implementation
from sequoia_plan.models.loaded_model import LoadedModel

TREE = TokenTree.from_parents([-1, 0, 0, 1, 1, 2])
PATHS = torch.tensor([[0, 1, 3], [0, 1, 4], [0, 2, 5]], device="cpu")
"""The nodes from the root to each leaf."""
PREFIX = 4  # committed tokens before the tree
EXTENT = 16  # slots of the cache that the tree is read with


@torch.inference_mode()
def probe(model: LoadedModel, module: PreTrainedModel) -> CacheLayout:
    """Check that `module` can read a token tree; returns the layout of its cache.

    Raises:
        SequoiaPlanError: if its mode, configuration or signature rules that out, or its logits of a
            small tree are not those of the tree's paths.
    """
    _check_description(model, module)
    try:
        with torch.compiler.set_stance("force_eager"):  # these shapes never come again
            error, cache = _tree_error(model, module)
    except SequoiaPlanError:
        raise
    except Exception as failure:  # a foreign model may fail in any way
        raise SequoiaPlanError(
            f"{model_type(module)}: cannot decode with a token tree, reading one fails "
            f"({type(failure).__name__}: {first_line(failure)})"
        ) from failure
    bound = torch.finfo(model.dtype).eps ** 0.5
    if error < bound:
        return cache.layout
    if error != error:  # NaN
        reason = "its logits are not finite; the weights are damaged or the dtype overflows"
    else:
        reason = (
            "cannot decode with a token tree, its logits there differ from those of the plain "
            f"sequence (relative error {error:.2g}, expected less than {bound:.2g}); only "
            "attention that follows position_ids and the attention mask can, and recurrent layers "
            "that go on from any state, ALiBi cannot; where it is quantised, quantise its weights "
            "only, not its activations"
        )
    raise SequoiaPlanError(f"{model_type(module)}: {reason}")


def _check_description(model: LoadedModel, module: PreTrainedModel) -> None:
    """Raise SequoiaPlanError if the module's configuration or signature rules out a tree."""
    implementation = attention_implementation(module.config)
    parameters = inspect.signature(unwrapped(module).forward).parameters
    takes_no_positions = "input_ids" in parameters and "position_ids" not in parameters
    if getattr(module.config, "is_encoder_decoder", False):
        reason = "an encoder-decoder, expected a decoder-only causal language model"
    elif implementation is not None and implementation not in IMPLEMENTATIONS:
        reason = (
            f"attention {implementation} takes no tree mask; load the model with "
            "attn_implementation='sdpa' or 'eager'"
        )
    elif takes_no_positions or getattr(module.config, "alibi", False):
        reason = (
            "cannot decode with a token tree, it takes no position_ids (ALiBi or a recurrence "
            "orders its tokens)"
        )
    elif execution_device(module).type == "meta":
        reason = (
            "its weights are on the meta device and nothing brings them; load them, or offload it "
            "with accelerate"
        )
    elif model.stream and model.traits.chains_only:
        reason = (
            "its layers with a recurrent state read tokens again, when streamed weights are gone; "
            "load it without offload"
        )
    else:
        return
    raise SequoiaPlanError(f"{model_type(module)}: {reason}")


def _tree_error(model: LoadedModel, module: PreTrainedModel) -> tuple[float, TreeCache]:
    """The mean relative error of the nodes' logits, and the cache that the tree was read with.

    The error is against the logits that the model computes from each node's path alone. The root is
    left out, because `_node_logits` reads it in a plain causal pass.
    """
    count = PREFIX + TREE.size
    order = torch.randperm(int(model.config.vocab_size), generator=torch.Generator().manual_seed(0))
    # distinct tokens, if the vocabulary has enough; else they repeat
    tokens = order[:count].repeat(count)[:count].to(model.device)
    if model.traits.chains_only:
        return _chain_error(model, module, tokens)
    expected_logits = _path_logits(module, tokens)
    cache = model.new_cache(EXTENT)
    errors = list(map(_relative_error, _node_logits(model, cache, tokens), expected_logits))
    return float(torch.stack(errors).mean()), cache


def _chain_error(
    model: LoadedModel, module: PreTrainedModel, tokens: Tensor
) -> tuple[float, TreeCache]:
    """`_tree_error` for recurrent layers: chains, from a text int64 [n], accepted in part."""
    cache = model.new_cache(EXTENT)
    expected = module(input_ids=tokens[None], use_cache=False).logits[0]
    errors: list[Tensor] = []
    end = 0
    # how many tokens of a chain are the text's next ones, and how many others follow
    for right, wrong in ((PREFIX, 0), (1, 2), (2, 1), (1, 0), (2, 0)):
        start, end = end, end + right
        chain = torch.cat([tokens[start:end], tokens[:wrong]])
        slots = torch.arange(start, end + wrong, device=chain.device)
        cache.save()
        logits = model.read_text(cache, chain, slots, EXTENT).logits
        cache.roll_back(torch.tensor([right]))
        errors += map(_relative_error, logits, expected[start:end])
    return float(torch.stack(errors[PREFIX:]).mean()), cache


def _path_logits(module: PreTrainedModel, tokens: Tensor) -> Tensor:
    """[nodes - 1, vocabulary]: each node's logits as the model computes them from its path alone.

    The model reads one plain sequence for each leaf. `tokens` int64 [PREFIX + nodes].
    """
    prefixes = tokens[:PREFIX].expand(len(PATHS), -1)
    sequences = torch.cat([prefixes, tokens[PREFIX:][PATHS]], 1)
    logits = module(input_ids=sequences, use_cache=False).logits[:, PREFIX:]
    return torch.stack([logits[PATHS.eq(node)][0] for node in range(1, TREE.size)])


def _node_logits(model: LoadedModel, cache: TreeCache, tokens: Tensor) -> Tensor:
    """[nodes - 1, vocabulary]: the logits of all nodes but the root, read as a tree.

    One pass reads the prefix and the root with a causal mask. A second pass reads the other nodes
    with the tree's mask; its attention looks at the first `EXTENT` slots of the cache. `tokens`
    int64 [PREFIX + nodes].
    """
    device = model.device
    # the first pass reads the root too: the other nodes must find its keys in the cache
    causal_slots = torch.arange(PREFIX + 1, device=device)  # a slot is a position here
    model.read_text(cache, tokens[: PREFIX + 1], causal_slots, PREFIX + 1)
    prefix_length = torch.tensor([PREFIX], device=device)  # this is the root's slot and position
    tree = TreeTensors.of(TREE, device, model.dtype)
    mask = tree.mask[1:].index_select(1, tree.columns(prefix_length, EXTENT))
    node_slots = prefix_length + tree.nodes[1:]
    node_positions = prefix_length + tree.offsets[1:]  # an offset is a node's depth
    return model(cache, tokens[PREFIX + 1 :], node_positions, node_slots, mask).logits


def _relative_error(logits: Tensor, expected: Tensor) -> Tensor:
    """|logits - expected| / |expected|, both centred: a softmax does not depend on their mean.

    Tokens that have the logit -inf in both are left out. `logits`, `expected` float [vocabulary];
    returns float64 [].
    """
    is_allowed = ~(expected.isneginf() & logits.isneginf())
    logits, expected = logits[is_allowed].double(), expected[is_allowed].double()
    logits, expected = logits - logits.mean(), expected - expected.mean()
    return (logits - expected).norm() / expected.norm().clamp(min=torch.finfo(torch.float64).tiny)
