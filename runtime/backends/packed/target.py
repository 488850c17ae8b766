"""The compiled pass of a transformers model, kept in step with the model's weights."""

import copy
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LlamaForCausalLM,
    MistralForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from sequoia_plan.runtime.backends.packed.compiled_pass import (
    CompiledCache,
    CompiledModel,
    CompiledPass,
    cache_dtype,
    visible_slots,
)
from sequoia_plan.runtime.backends.packed.forward import UNIT
from sequoia_plan.runtime.backends.packed.packing import in_4_bits, in_8_bits
from sequoia_plan.runtime.backends.packed.weights import DTYPES, Embedding, GgufWeights, pack_model
from sequoia_plan.runtime.models.architecture import attention_window, rope_changes
from sequoia_plan.runtime.models.attention import IMPLEMENTATIONS, attention_implementation
from sequoia_plan.runtime.models.compiled_passes import passes
from sequoia_plan.runtime.models.fused_layer import is_as_defined
from sequoia_plan.runtime.models.model_state import Watch, copied, numbers_of

CLASSES = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
BIASED = ("q_proj", "k_proj", "v_proj")
"""A layer's matrices that may have a bias."""
UNUSED = ("training", "name_or_path", "gradient_checkpointing", "vocab_size", "padding_idx")
"""Settings of modules that a pass does not depend on."""
TRIED_TOKENS = 8
"""Tokens of the text that both passes read when a model is compiled."""
MAX_ERROR = {"F32": 1e-4, "F16": 2e-2, "BF16": 0.2}
"""How far logits may be from PyTorch's, relative, by the format of the weights."""
MAX_QUANTISED_ERROR = 0.3
"""The same where the pass rounds activations to 8 bits."""
MAX_ROUNDED_ERROR = 0.8
"""The same where it rounds weights, too; another computation's logits differ by about 1.4."""
ROUNDING: dict[int | None, tuple[Any, ...]] = {
    None: (),
    8: (in_8_bits,),
    4: (in_4_bits, in_8_bits),  # a head loses the most
}
"""What rounds the matrices of layers and the head, by bits."""


def why_not(model: Any) -> str:
    """Why PyTorch runs a model; "" if it can be compiled."""
    if type(model) not in CLASSES:
        return f"{type(model).__name__} is none of {', '.join(c.__name__ for c in CLASSES)}"
    if (attention := attention_implementation(model.config)) not in IMPLEMENTATIONS:
        return f"it attends by {attention}"
    config, (_, differ) = model.config, attention_window(model.config)
    modules, layer = list(model.modules()), model.model.layers[0]
    if any(not is_as_defined(module) for module in modules):
        return "a module has hooks"
    if name := _not_as_configured(model):
        return f"{name} is not what its configuration says"
    parameters = dict(model.named_parameters())
    if any(name.endswith("bias") and name.split(".")[-2] not in BIASED for name in parameters):
        return "a matrix other than q, k and v has a bias"
    if dtypes := {p.dtype for p in parameters.values()} - DTYPES.keys():
        return f"it has weights in {dtypes.pop()}"
    if layer.self_attn.head_dim % UNIT or config.hidden_act != "silu":
        return f"heads of {layer.self_attn.head_dim} numbers, activation {config.hidden_act}"
    if rope_changes(config) or differ:
        return "its rotary embeddings change with the text, or its layers differ in their window"
    return ""


def _not_as_configured(model: Any) -> str:
    """The first module that is not as in a new model of the same configuration, or ""."""
    with torch.device("meta"):
        new_modules = dict(type(model)(copy.deepcopy(model.config)).named_modules())
    modules = dict(model.named_modules())
    for name in new_modules | modules:
        new, module = new_modules.get(name), modules.get(name)
        if type(new) is not type(module) or (name and not _has_numbers_of(module, new)):
            return name
    return ""


def _has_numbers_of(module: Any, other: Any) -> bool:
    """Has a module all the settings of another one?"""
    others = {name: n for name, n in numbers_of(other).items() if name not in UNUSED}
    return {name: vars(module).get(name) for name in others} == others


class CompiledTarget(CompiledModel):
    """Runs a model's passes; `gguf` is the file that the model was converted from, if its own bits
    are to be used; `bits` 8 or 4: the model's own weights are rounded to these.
    """

    def __init__(
        self, model: Any, gguf: Path | None, workers: int, bits: int | None = None
    ) -> None:
        self.gguf, self.num_workers, self.bits = gguf, workers, bits
        # weights that a file replaces need not be in memory
        self.watch = Watch(partial(copied, sampled=gguf is None))
        self.pack(model)

    def pack(self, model: Any) -> None:
        """Take over the model's weights."""
        config, base = model.config, model.model
        head_dim = base.layers[0].self_attn.head_dim
        file = GgufWeights(self.gguf, head_dim) if self.gguf else None
        self.dtype = cache_dtype(model)
        packed = pack_model(
            list(base.layers),
            base.norm,
            model.lm_head,
            config,
            head_dim,
            self.dtype.itemsize,
            file.blocks if file else None,
            file.head() if file else None,
            *ROUNDING[self.bits],
        )
        self.embed = file.embed if file else Embedding(base.embed_tokens)
        self.runner = CompiledPass(
            packed, config, len(model.lm_head.weight), base.rotary_emb, self.dtype, self.num_workers
        )
        self.watch.look(model)

    def why_not(self, model: Any, names: Collection[str]) -> str:
        """See `Copy`."""
        reason = why_not(model)
        if not reason and self.gguf and not model.state_dict().keys().isdisjoint(names):
            reason = "the GGUF file has other weights"
        return reason

    @torch.inference_mode()
    def differs(self, model: Any) -> str:
        """See `Copy`; both passes are tried on a short text."""
        drawn = torch.randint(1 << 30, (TRIED_TOKENS,), generator=torch.Generator().manual_seed(0))
        expected, logits = self._logits_of_both(model, drawn % model.config.vocab_size)
        expected, logits = (x - x.mean(-1, keepdim=True) for x in (expected, logits))
        error = float((logits - expected).norm() / expected.norm())
        bound = max(MAX_ERROR.get(f, MAX_QUANTISED_ERROR) for f in self.runner.packed.formats)
        bound = MAX_ROUNDED_ERROR if self.bits else bound
        return (
            ""
            if error < bound
            else f"a compiled pass gave other logits (relative error {error:.2g})"
        )

    def _logits_of_both(self, model: Any, tokens: Tensor) -> list[Tensor]:
        """float64 [n, vocabulary]: the model's logits of a text of n tokens, and the pass's."""
        places = torch.arange(len(tokens))
        mask = torch.zeros(len(tokens), len(tokens)).masked_fill(places > places[:, None], -1.0)
        cache = self.new_cache(len(tokens), counts_positions=False)
        logits = self(cache, tokens, places, places, mask)[0]
        return [model(input_ids=tokens[None], use_cache=False).logits[0].double(), logits.double()]

    @torch.inference_mode()
    def cost_of_rounding(self, model: Any, texts: Sequence[Tensor]) -> tuple[float, float]:
        """What the pass's probabilities differ by from the model's, on texts (int64 [n] each).

        The mean KL divergence in nats a token, and the share of places with the same most probable
        token.
        """
        divergences, agreements = [], []
        for tokens in texts:
            exact, rounded = (x.log_softmax(-1) for x in self._logits_of_both(model, tokens))
            divergences.append((exact.exp() * (exact - rounded)).sum(-1))
            agreements.append(exact.argmax(-1) == rounded.argmax(-1))
        return float(torch.cat(divergences).mean()), float(torch.cat(agreements).double().mean())

    def __call__(
        self, cache: CompiledCache, tokens: Tensor, positions: Tensor, slots: Tensor, mask: Tensor,
        logits_to_keep: int = 0, layers: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """One pass over tokens; see `CompiledPass`."""
        rows = positions.numpy(), slots.numpy(), visible_slots(mask)
        return self.runner(cache, self.embed(tokens.numpy()), *rows, logits_to_keep, layers)


def compile_target(model: Any, gguf: Path | None = None, bits: int | None = None) -> str:
    """Compile a model's pass; returns "", or why PyTorch runs it."""
    reason = why_not(model)
    if reason:
        return reason
    try:
        target = CompiledTarget(model, gguf, torch.get_num_threads(), bits)
    except ValueError as unknown:  # format of weights
        return str(unknown)
    reason = target.differs(model)
    if not reason:
        passes[model] = target
    return reason
