"""Which models the packed pass computes, and why not others."""

import copy

import torch
from transformers import (
    LlamaForCausalLM,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from sequoia_plan.models.base.architecture import attention_window, head_size, rope_changes
from sequoia_plan.models.files.stored import DTYPE_FORMATS
from sequoia_plan.models.layers.attention import IMPLEMENTATIONS, attention_implementation
from sequoia_plan.models.layers.fused_layer import is_as_defined
from sequoia_plan.models.module_state import settings_of
from sequoia_plan.models.packed.forward import UNIT

CLASSES = {
    "llama": LlamaForCausalLM,
    "mistral": MistralForCausalLM,
    "qwen2": Qwen2ForCausalLM,
    "qwen3": Qwen3ForCausalLM,
}
"""By `model_type`."""
BIASED = ("q_proj", "k_proj", "v_proj")  # a layer's matrices that may have a bias
UNUSED = ("training", "name_or_path", "gradient_checkpointing", "vocab_size", "padding_idx")
"""Settings of modules that a pass does not depend on."""


def empty_module(config: PreTrainedConfig) -> PreTrainedModel | None:
    """transformers' model of a configuration, without memory; None if it is not in `CLASSES`."""
    model_class = CLASSES.get(config.model_type)
    if model_class is None:
        return None
    with torch.device("meta"):
        return model_class(copy.deepcopy(config))


def why_not(config: PreTrainedConfig, module: PreTrainedModel | None) -> str:
    """Why the packed pass does not compute a model; "" if it does.

    `module`: of this configuration; None if its class is not known.
    """
    if module is None or type(module) not in CLASSES.values():
        name = config.model_type if module is None else type(module).__name__
        return f"{name} is none of {', '.join(c.__name__ for c in CLASSES.values())}"
    parameters = dict(module.named_parameters())
    if any(name.endswith("bias") and name.split(".")[-2] not in BIASED for name in parameters):
        return "a matrix other than q, k and v has a bias"
    if dtypes := {p.dtype for p in parameters.values()} - DTYPE_FORMATS.keys():
        return f"it has weights in {dtypes.pop()}"
    if head_size(config) % UNIT or config.hidden_act != "silu":
        return f"heads of {head_size(config)} numbers, activation {config.hidden_act}"
    if rope_changes(config) or attention_window(config)[1]:
        return "its rotary embeddings change with the text, or its layers differ in their window"
    return ""


def why_not_module(module: PreTrainedModel) -> str:
    """Why the packed pass does not compute a model, perhaps changed in memory; "" if it does."""
    if type(module) in CLASSES.values():  # `why_not` refuses all others
        if (attention := attention_implementation(module.config)) not in IMPLEMENTATIONS:
            return f"it attends by {attention}"
        if not all(map(is_as_defined, module.modules())):
            return "a module has hooks"
        if name := _not_as_configured(module):
            return f"{name} is not what its configuration says"
    return why_not(module.config, module)


def _not_as_configured(model: PreTrainedModel) -> str:
    """The name of the first module that is not as in a new model of its configuration, or ""."""
    new_model = empty_module(model.config)
    assert new_model is not None  # its class is one of `CLASSES`
    new_modules, modules = dict(new_model.named_modules()), dict(model.named_modules())
    for name in new_modules | modules:
        new, module = new_modules.get(name), modules.get(name)
        if new is None or module is None or type(new) is not type(module):
            return name
        settings = {key: value for key, value in settings_of(new).items() if key not in UNUSED}
        if name and settings != {key: vars(module).get(key) for key in settings}:
            return name
    return ""
