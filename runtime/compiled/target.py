"""The compiled pass of a transformers model, kept in step with the model's weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import (
    LlamaForCausalLM,
    MistralForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.runtime.compiled.cache import CompiledCache
from sequoia_plan.runtime.compiled.compiled_pass import CompiledPass, visible_slots
from sequoia_plan.runtime.compiled.forward import UNIT
from sequoia_plan.runtime.compiled.weights import DTYPES, Embedding, GgufWeights, pack_model
from sequoia_plan.runtime.models.architecture import attention_window, model_type, rope_changes
from sequoia_plan.runtime.models.compiled_passes import passes

CLASSES = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
TRIED_TOKENS = 8
"""Tokens of the text that both passes read when a model is compiled."""
MAX_ERROR = {"F32": 1e-4, "F16": 2e-2, "BF16": 0.2}
"""How far logits may be from PyTorch's, relative, by the format of the weights."""
MAX_QUANTISED_ERROR = 0.3
"""The same where the pass rounds activations to 8 bits."""


def why_not(model: Any) -> str:
    """Why PyTorch runs a model; "" if it can be compiled."""
    if type(model) not in CLASSES:
        return f"{type(model).__name__} is none of {', '.join(c.__name__ for c in CLASSES)}"
    config, (_, differ) = model.config, attention_window(model.config)
    modules = list(model.modules())
    if any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in modules):
        return "a module has hooks"
    linears = [m for m in modules if isinstance(m, torch.nn.Linear)]
    layer = model.model.layers[0]
    with_bias = {id(p) for a in model.model.layers for p in _biased(a.self_attn)}
    if any(m.bias is not None and id(m) not in with_bias for m in linears):
        return "a matrix other than q, k and v has a bias"
    if any(type(m) is not torch.nn.Linear or m.weight.dtype not in DTYPES for m in linears):
        return "its matrices are not plain linear layers"
    if layer.self_attn.head_dim % UNIT or config.hidden_act != "silu":
        return f"heads of {layer.self_attn.head_dim} numbers, activation {config.hidden_act}"
    if rope_changes(config) or differ:
        return "its rotary embeddings change with the text, or its layers differ in their window"
    return ""


def _biased(attention: Any) -> tuple[Any, ...]:
    """The matrices of a layer that may have a bias."""
    return attention.q_proj, attention.k_proj, attention.v_proj


class CompiledTarget:
    """Runs a model's passes; `gguf` is the file that the model was converted from, if its own bits
    are to be used.
    """

    def __init__(self, model: Any, gguf: Path | None, workers: int) -> None:
        self.gguf, self.num_workers = gguf, workers
        self.states: WeakKeyDictionary[Any, tuple[Any, ...]] = WeakKeyDictionary()
        self.pack(model)

    def __getstate__(self) -> dict[str, Any]:
        """The state for pickle and copies, whose models have the same weights."""
        return self.__dict__ | {"states": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over another one's state."""
        self.__dict__.update(state | {"states": WeakKeyDictionary()})

    def pack(self, model: Any) -> None:
        """Take over the model's weights."""
        config, base = model.config, model.model
        file = GgufWeights(self.gguf, config) if self.gguf else None
        self.dtype = torch.bfloat16 if model.dtype == torch.bfloat16 else torch.float32
        packed = pack_model(
            list(base.layers),
            base.norm,
            model.lm_head,
            config,
            base.layers[0].self_attn.head_dim,
            self.dtype.itemsize,
            file.blocks if file else None,
            file.head() if file else None,
        )
        self.embed = file.embed if file else Embedding(base.embed_tokens)
        self.runner = CompiledPass(
            packed, config.hidden_size, config.intermediate_size, len(model.lm_head.weight),
            config.num_key_value_heads, base.rotary_emb, self.dtype, self.num_workers,
        )  # fmt: skip
        self.states[model] = weights_state(model)

    def check(self, model: Any) -> None:
        """Pack the weights anew if they changed, or raise SequoiaPlanError."""
        state = weights_state(model)
        if self.states.setdefault(model, state) == state:
            return
        reason = "the GGUF file has other weights" if self.gguf else why_not(model)
        if reason:
            raise SequoiaPlanError(
                f"{model_type(model)}: its weights or modules changed after it was compiled for "
                f'this processor, and {reason}; load it with placement="resident"'
            )
        self.pack(model)

    def new_cache(self, capacity: int, *, counts_positions: bool) -> CompiledCache:
        """A cache for a sequence of up to so many slots."""
        return self.runner.new_cache(capacity, counts_positions=counts_positions)

    def __call__(
        self, cache: CompiledCache, tokens: Tensor, positions: Tensor, slots: Tensor, mask: Tensor,
        logits_to_keep: int = 0, layers: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """One pass over tokens; see `CompiledPass`."""
        rows = positions.numpy(), slots.numpy(), visible_slots(mask)
        return self.runner(cache, self.embed(tokens.numpy()), *rows, logits_to_keep, layers)

    @property
    def formats(self) -> str:
        """The formats of its weights, as files record them."""
        return "+".join(self.runner.packed.formats)


def weights_state(model: Any) -> tuple[Any, ...]:
    """What changes when a model's weights, modules or hooks do."""
    parameters = tuple(
        (id(p), p.data_ptr(), 0 if p.is_inference() else p._version) for p in model.parameters()
    )
    modules = tuple(
        (id(m), len(m._forward_hooks), len(m._forward_pre_hooks), "forward" in vars(m))
        for m in model.modules()
    )
    return parameters, modules


@torch.inference_mode()
def compile_target(model: Any, gguf: Path | None = None) -> str:
    """Compile a model's pass; returns "", or why PyTorch runs it."""
    reason = why_not(model)
    if reason:
        return reason
    target = CompiledTarget(model, gguf, torch.get_num_threads())
    drawn = torch.randint(1 << 30, (TRIED_TOKENS,), generator=torch.Generator().manual_seed(0))
    tokens = drawn % model.config.vocab_size
    expected = model(input_ids=tokens[None], use_cache=False).logits[0].double()
    cache, places = (
        target.new_cache(TRIED_TOKENS, counts_positions=False),
        torch.arange(TRIED_TOKENS),
    )
    mask = torch.zeros(TRIED_TOKENS, TRIED_TOKENS).masked_fill(places > places[:, None], -1.0)
    logits = target(cache, tokens, places, places, mask)[0].double()
    expected, logits = (x - x.mean(-1, keepdim=True) for x in (expected, logits))
    error = float((logits - expected).norm() / expected.norm())
    bound = max(MAX_ERROR.get(f, MAX_QUANTISED_ERROR) for f in target.runner.packed.formats)
    if not error < bound:
        return f"a compiled pass gave other logits (relative error {error:.2g})"
    passes[model] = target
    return ""
