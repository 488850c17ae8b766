"""Sequoia decoding inside transformers' generate.

model.generate(ids, custom_generate=sequoia, draft=draft, tree=tree)
"""

import copy
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput, GenerationConfig, StoppingCriteria
from transformers.generation import logits_process as processors
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from sequoia_plan.artifacts import ArgumentError, SequoiaPlanError, TokenTree
from sequoia_plan.models.base.forks import renewed_in_forks
from sequoia_plan.runtime.constraints.grammar import Grammar
from sequoia_plan.runtime.constraints.logits_processors import Processor, split_at_warpers
from sequoia_plan.runtime.decoder import SequoiaDecoder
from sequoia_plan.runtime.decoding_models import Model
from sequoia_plan.runtime.sampling.sampling import Sampling, verifier_of

SETTING_OF_PROCESSOR = {
    processors.TemperatureLogitsWarper: "temperature",
    processors.TopKLogitsWarper: "top_k",
    processors.TopPLogitsWarper: "top_p",
    processors.MinPLogitsWarper: "min_p",
}
"""What transformers makes of the generation config, which `Sampling` reads itself."""

_decoder_lock = renewed_in_forks(threading.Lock())


def sequoia(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: Sequence[Processor] | None = None,
    stopping_criteria: Sequence[StoppingCriteria] | None = None,
    generation_config: GenerationConfig | None = None,
    *,
    draft: Model | None = None,
    tree: TokenTree | None = None,
    text_streamer: Any = None,
    seed: int | None = None,
    constraint: Grammar | None = None,
    **model_kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """For `custom_generate`: decode with `tree` and `draft`; the generation config says the rest.

    The first call makes a decoder and keeps it on the model, while draft and tree stay the same and
    the models have their modules and configurations.

    Args:
        draft, tree: as for `SequoiaDecoder`. The verifier is the one that the tree's plan records.
        text_streamer: a streamer, under a name that transformers passes on; it drops `streamer`.
        seed: makes sampling repeatable; None draws one with PyTorch's generator (`set_seed`).
        constraint: a grammar that the new tokens follow.

    Returns:
        int64 [sequences, prompt + new], or transformers' output class if the config has
        `return_dict_in_generate`.

    Raises:
        SequoiaPlanError: for what `SequoiaDecoder` refuses, and for settings that would be ignored.
    """
    config = generation_config or model.generation_config
    decoder = _decoder_of(model, draft, tree)
    verifier = verifier_of(decoder.step.tree)
    sampling, own_processors = _sampling_of(config, logits_processor or (), verifier)
    # the decoder itself ends at these two, with the user's values where there are any
    criteria = list(stopping_criteria or ())
    lengths = [c.max_length for c in criteria if type(c) is MaxLengthCriteria]
    ends = [c.eos_token_id.flatten() for c in criteria if type(c) is EosTokenCriteria]
    eos = torch.cat(ends) if ends else config.eos_token_id
    max_new_tokens = min(lengths, default=config.max_length) - input_ids.shape[1]
    count = config.num_return_sequences or 1
    if count > 1 and (config.output_scores or config.output_logits or text_streamer):
        raise ArgumentError(
            f"num_return_sequences: found {count}, expected 1 with scores, logits or a streamer"
        )
    mask = model_kwargs.pop("attention_mask", None)
    if len(input_ids) == count:  # generate has repeated both for each sequence
        input_ids, mask = input_ids[:1], None if mask is None else mask[:1]
    results = decoder.generate_each(
        [{"input_ids": input_ids, "attention_mask": mask, **model_kwargs}] * count,
        max_new_tokens=max(max_new_tokens, 1),  # as transformers, which looks after each token
        seed=seed,
        eos_token_id=() if eos is None else eos,
        streamer=text_streamer,
        sampling=sampling,
        stopping_criteria=[
            c for c in criteria if type(c) not in (MaxLengthCriteria, EosTokenCriteria)
        ],
        logits_processor=own_processors,
        constraint=constraint,
        output_logits=config.output_logits,
        output_scores=config.output_scores,
        reuse_prefix=count > 1,
        timed=sampling.greedy,  # with `set_seed` alone a text is repeatable, too
    )
    rows = [result.sequences[0] for result in results]
    # generate has put the first end token here where there is no padding token
    padding = getattr(config, "_pad_token_tensor", None)
    sequences = torch.nn.utils.rnn.pad_sequence(
        rows, batch_first=True, padding_value=0 if padding is None else int(padding)
    )
    if config.return_dict_in_generate:
        scores, logits = results[0].scores, results[0].logits
        return GenerateDecoderOnlyOutput(
            sequences=sequences,
            scores=None if scores is None else scores.split(1),
            logits=None if logits is None else logits.split(1),
        )
    return sequences


def _sampling_of(
    config: GenerationConfig, given: Sequence[Processor], verifier: str
) -> tuple[Sampling, list[Processor]]:
    """The sampling settings, and the processors of `given` that run before them.

    Where warpers are other than the config's settings, all run as processors.
    """
    sampling = Sampling.from_generation_config(config, verifier, has_processors=True)
    given = [_with_own_padding(processor) for processor in given]
    if not config.output_scores:  # it changes scores alone, not probabilities
        given = [p for p in given if type(p) is not processors.LogitNormalization]
    before_warpers, warpers = split_at_warpers(given)
    names = [SETTING_OF_PROCESSOR.get(type(warper), "") for warper in warpers]
    are_from_config = len(set(names)) == len(names) and all(
        name and getattr(warper, name) == getattr(config, name)
        for name, warper in zip(names, warpers, strict=True)
    )
    if are_from_config:
        return sampling, before_warpers
    if sampling.greedy:
        return sampling, given
    return Sampling(1.0, draft_temperature=sampling.temperature, verifier=verifier), given


def _with_own_padding(processor: processors.LogitsProcessor) -> Processor:
    """A processor made for a batch of one, whose padding is a tensor [1], for any batch."""
    if isinstance(getattr(processor, "prompt_ignore_length", None), Tensor):
        processor = copy.copy(processor)
        processor.prompt_ignore_length = int(processor.prompt_ignore_length)
    return processor


def _decoder_of(model: PreTrainedModel, draft: Model | None, tree: Any) -> SequoiaDecoder:
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
