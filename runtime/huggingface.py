"""Sequoia decoding inside transformers' generate.

model.generate(ids, custom_generate=sequoia, draft=draft, tree=tree)
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput, GenerationConfig
from transformers.generation import logits_process as processors
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from sequoia_plan.artifacts import ArgumentError, TokenTree
from sequoia_plan.runtime.arguments import check_loaded
from sequoia_plan.runtime.base.sampling import Sampling, verifier_of
from sequoia_plan.runtime.decoder import SequoiaDecoder
from sequoia_plan.runtime.models.architecture import device_and_dtype

PROCESSORS_OF_CONFIG = (
    processors.TemperatureLogitsWarper,
    processors.TopKLogitsWarper,
    processors.TopPLogitsWarper,
    processors.MinPLogitsWarper,
    processors.LogitNormalization,
)
"""Processors that transformers makes of the generation config, which `Sampling` reads itself."""

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

    The first call makes a decoder and keeps it on the model, while draft, tree, and the models'
    devices and dtypes stay the same.

    Args:
        draft, tree: as for `SequoiaDecoder`. The verifier is the one that the tree's plan records.
        text_streamer: a streamer, under a name that transformers passes on; it drops `streamer`.
        seed: makes sampling repeatable; None draws one.

    Returns:
        int64 [1, prompt + new], or transformers' output class if the config has
        `return_dict_in_generate`.

    Raises:
        SequoiaPlanError: for what `SequoiaDecoder` refuses, and for settings that would be ignored.
    """
    config = generation_config or model.generation_config
    for processor in logits_processor or ():
        if not isinstance(processor, PROCESSORS_OF_CONFIG):
            raise ArgumentError(
                f"{type(processor).__name__}: logits depend on it, and a token tree cannot follow "
                "it; leave it out"
            )
    decoder = _decoder_of(model, draft, tree)
    verifier = verifier_of(decoder.step.tree)
    sampling = Sampling.from_generation_config(config, verifier)
    # the decoder itself ends at these two
    ends_itself = (MaxLengthCriteria, EosTokenCriteria)
    criteria = [c for c in stopping_criteria or () if not isinstance(c, ends_itself)]
    result = decoder.generate(
        {"input_ids": input_ids, **model_kwargs},
        max_new_tokens=config.max_length - input_ids.shape[1],
        seed=seed,
        eos_token_id=() if config.eos_token_id is None else config.eos_token_id,
        streamer=text_streamer,
        sampling=sampling,
        stopping_criteria=criteria,
    )
    if config.return_dict_in_generate:
        return GenerateDecoderOnlyOutput(sequences=result.sequences)
    return result.sequences


def _decoder_of(model: Any, draft: Any, tree: Any) -> SequoiaDecoder:
    """The decoder that the model keeps, if it fits the arguments; else a new one."""
    check_loaded(model, draft, tree)
    with _decoder_lock:
        devices = [device_and_dtype(each) for each in (model, draft) if each is not None]
        kept = model.__dict__.get("_sequoia_decoder")
        if kept is not None:
            kept_draft, kept_tree, decoder, kept_devices = kept
            if kept_draft is draft and kept_tree == tree and kept_devices == devices:
                return decoder
        decoder = SequoiaDecoder(model, draft, tree)
        model.__dict__["_sequoia_decoder"] = (draft, tree, decoder, devices)
        return decoder
