"""Sequoia decoding inside transformers' generate.

model.generate(ids, custom_generate=sequoia, draft=draft, tree=tree)
"""

import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput, GenerationConfig
from transformers.generation import logits_process as processors
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from sequoia_plan.artifacts import ArgumentError, SequoiaPlanError, TokenTree
from sequoia_plan.runtime.base.sampling import Sampling, verifier_of
from sequoia_plan.runtime.decoder import SequoiaDecoder

SETTING_OF_PROCESSOR = {
    processors.TemperatureLogitsWarper: "temperature",
    processors.TopKLogitsWarper: "top_k",
    processors.TopPLogitsWarper: "top_p",
    processors.MinPLogitsWarper: "min_p",
}
"""What transformers makes of the generation config, which `Sampling` reads itself."""

_decoder_lock = threading.Lock()


def sequoia(
    model: Any,
    input_ids: Tensor,
    logits_processor: Sequence[Any] | None = None,
    stopping_criteria: Sequence[Any] | None = None,
    generation_config: GenerationConfig | None = None,
    *,
    draft: Any = None,
    tree: TokenTree | None = None,
    text_streamer: Any = None,
    seed: int | None = None,
    **model_kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """For `custom_generate`: decode with `tree` and `draft`; the generation config says the rest.

    The first call makes a decoder and keeps it on the model, while draft and tree stay the same and
    the models have their modules and configurations.

    Args:
        draft, tree: as for `SequoiaDecoder`. The verifier is the one that the tree's plan records.
        text_streamer: a streamer, under a name that transformers passes on; it drops `streamer`.
        seed: makes sampling repeatable; None draws one with PyTorch's generator (`set_seed`).

    Returns:
        int64 [1, prompt + new], or transformers' output class if the config has
        `return_dict_in_generate`.

    Raises:
        SequoiaPlanError: for what `SequoiaDecoder` refuses, and for settings that would be ignored.
    """
    config = generation_config or model.generation_config
    _check_processors(logits_processor or (), config)
    decoder = _decoder_of(model, draft, tree)
    verifier = verifier_of(decoder.step.tree)
    sampling = Sampling.from_generation_config(config, verifier)
    # the decoder itself ends at these two, with the user's values where there are any
    criteria = list(stopping_criteria or ())
    lengths = [c.max_length for c in criteria if type(c) is MaxLengthCriteria]
    ends = [c.eos_token_id.flatten() for c in criteria if type(c) is EosTokenCriteria]
    eos = torch.cat(ends) if ends else config.eos_token_id
    max_new_tokens = min(lengths, default=config.max_length) - input_ids.shape[1]
    result = decoder.generate(
        {"input_ids": input_ids, **model_kwargs},
        max_new_tokens=max(max_new_tokens, 1),  # as transformers, which looks after each token
        seed=seed,
        eos_token_id=() if eos is None else eos,
        streamer=text_streamer,
        sampling=sampling,
        stopping_criteria=[
            c for c in criteria if type(c) not in (MaxLengthCriteria, EosTokenCriteria)
        ],
    )
    if config.return_dict_in_generate:
        return GenerateDecoderOnlyOutput(sequences=result.sequences)
    return result.sequences


def _check_processors(given: Sequence[Any], config: GenerationConfig) -> None:
    """Refuse processors other than those that transformers made of the config, once each."""
    kinds = [type(processor) for processor in given]
    for kind, processor in zip(kinds, given, strict=True):
        if kind is processors.LogitNormalization:  # which changes no probability
            continue
        name = SETTING_OF_PROCESSOR.get(kind, "")
        if not name or getattr(processor, name) != getattr(config, name) or kinds.count(kind) > 1:
            hint = f"set {name} in the generation config instead" if name else "leave it out"
            raise ArgumentError(
                f"{kind.__name__}: logits depend on it, and a token tree cannot follow it; {hint}"
            )


def _decoder_of(model: Any, draft: Any, tree: Any) -> SequoiaDecoder:
    """The decoder that the model keeps, if it fits the arguments; else a new one."""
    with _decoder_lock:
        kept_draft, kept_tree, decoder = model.__dict__.get("_sequoia_decoder", (None,) * 3)
        if decoder is not None and kept_draft is draft and kept_tree == tree:
            with suppress(SequoiaPlanError):  # a model changed
                decoder.step.models.check_unchanged()
                return decoder
        decoder = SequoiaDecoder(model, draft, tree)
        model.__dict__["_sequoia_decoder"] = (draft, tree, decoder)
        return decoder
