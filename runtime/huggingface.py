"""Sequoia decoding inside transformers' own generate: `model.generate(ids, custom_generate=sequoia, draft=draft, tree=tree)`."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput, GenerationConfig
from transformers.generation import logits_process as processors
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from sequoia_plan.artifacts import ArgumentError, TokenTree
from sequoia_plan.runtime.decode import SequoiaDecoder
from sequoia_plan.runtime.models.forward import place
from sequoia_plan.runtime.sampling import Sampling, verifier_of

NOT_RETURNED = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
OTHER_DECODING = ("prompt_lookup_num_tokens", "assistant_early_exit", "stop_strings")
CONFIGURED = tuple(
    getattr(processors, name)
    for name in ("TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper", "LogitNormalization")
    if hasattr(processors, name)
)
"""Processors that say nothing the configuration does not."""


_making = threading.Lock()


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
    """For `custom_generate`: the target decodes with `tree` and `draft`; everything else comes from the generation config.

    The decoder is made on the first call and kept with the model while draft, tree, and where both models are stay the same.

    Args:
        draft, tree: as for `SequoiaDecoder`; the verifier is the one that the tree's plan records.
        text_streamer: a streamer under a name that transformers passes on; it drops `streamer`.
        seed: makes sampling repeatable; None draws one.

    Returns:
        int64 [1, prompt + new], or transformers' output class if the config says `return_dict_in_generate`.

    Raises:
        SequoiaPlanError: for what `SequoiaDecoder` refuses, and for settings that would be ignored.
    """
    config = generation_config or model.generation_config
    if tree is None:
        raise ArgumentError("custom_generate=sequoia needs a tree: model.generate(ids, custom_generate=sequoia, draft=draft, tree=load_tree(file))")
    sampling = Sampling.from_generation_config(config, verifier=verifier_of(tree))
    _refuse(config, logits_processor or ())
    decoder = _decoder(model, draft, tree)
    criteria = [c for c in stopping_criteria or () if not isinstance(c, (MaxLengthCriteria, EosTokenCriteria))]
    result = decoder.generate(
        input_ids,
        max_new_tokens=config.max_length - input_ids.shape[1],
        seed=seed,
        eos_token_id=() if config.eos_token_id is None else config.eos_token_id,
        streamer=text_streamer,
        sampling=sampling,
        attention_mask=model_kwargs.get("attention_mask"),  # named, transformers would pass it twice
        stopping_criteria=criteria,
    )
    return GenerateDecoderOnlyOutput(sequences=result.sequences) if config.return_dict_in_generate else result.sequences


def _refuse(config: GenerationConfig, logits_processor: Sequence[Any]) -> None:
    """What transformers hands over without a word beside sampling, and we cannot honour."""
    for name in (*NOT_RETURNED, *OTHER_DECODING):
        if found := getattr(config, name, None):
            raise ArgumentError(f"{name}: found {found}, which token tree decoding does not do; leave it out")
    for processor in logits_processor:
        if not isinstance(processor, CONFIGURED):
            raise ArgumentError(f"{type(processor).__name__}: logits depend on it, and a token tree cannot follow it; leave it out")


def _decoder(model: Any, draft: Any, tree: TokenTree) -> SequoiaDecoder:
    """The decoder of the last call if it was for the same draft and tree, where both models are. It lives on the model, so both go together."""
    with _making:
        places = [place(each) for each in (model, draft) if each is not None]
        kept = model.__dict__.get("_sequoia_decoder")
        if kept is None or kept[0] is not draft or kept[1] != tree or kept[3] != places:
            kept = (draft, tree, SequoiaDecoder(model, draft, tree), places)
            model.__dict__["_sequoia_decoder"] = kept
    decoder: SequoiaDecoder = kept[2]
    return decoder
