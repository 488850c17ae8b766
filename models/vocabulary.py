"""Which tokens a target and a draft have in common."""

import re
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.models.base.architecture import text_config
from sequoia_plan.models.loaded_model import LoadedModel

PLACEHOLDER = re.compile(
    r"\W*(pad|unused|dummy|reserved|placeholder|extra|special)(_?[a-z]+)*_?\d+\W*", re.IGNORECASE
)
"""Names of tokens that no text has, as [PAD151646], <unused_0>, <|dummy_0|>."""


def check_tokenizers(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> int:
    """Compare two tokenizers token by token; returns how many first tokens both have.

    Placeholders, which no text has, may differ; else SequoiaPlanError is raised.
    """
    target_tokens, draft_tokens = (  # GGUF files have spaces for some of "▁"
        {number: token.replace("▁", " ") for token, number in tokenizer.get_vocab().items()}
        for tokenizer in (target, draft)
    )
    common_size = min(max(target_tokens), max(draft_tokens)) + 1
    for number in range(common_size):
        target_token, draft_token = target_tokens.get(number), draft_tokens.get(number)
        if target_token != draft_token and not all(
            token is None or PLACEHOLDER.fullmatch(token) for token in (target_token, draft_token)
        ):
            raise SequoiaPlanError(
                f"draft: its tokenizer differs from the target's at token {number} "
                f"(target {_quoted(target_token)}, draft {_quoted(draft_token)}); "
                "use a draft that shares the target's tokenizer"
            )
    return common_size


def vocabulary_size(model: PreTrainedModel) -> int:
    """How many logits a model gives for each token, those of padding included.

    Tokens that only pad the head may be generated, as transformers does.
    """
    head = model.get_output_embeddings()  # which an adapter may wrap
    return getattr(head, "out_features", 0) or text_config(model).vocab_size


def common_tokens(target: LoadedModel, draft: LoadedModel) -> int:
    """How many first tokens two models' vocabularies have in common; SequoiaPlanError if few."""
    if target.tokens and target.tokens == draft.tokens:
        return len(target.tokens)
    return check_tokenizers(target.tokenizer, draft.tokenizer)


class Draft(Protocol):
    """A draft with a model of its own, or one that reads the target's hidden states."""

    d2t: Tensor | None

    @property
    def vocabulary(self) -> int:
        """How many tokens it can propose."""

    @property
    def device(self) -> torch.device:
        """Where its `d2t` is."""


def shared_vocabulary(
    target: LoadedModel, draft: Draft, common_size: int | None = None
) -> tuple[int, Tensor | None]:
    """How many tokens a draft can propose, and d2t: int64 [so many], the target's token for each.

    d2t is None if both models have the same tokens. The target's logits are never cut. It keeps the
    tokens that the draft does not have, so the distribution of the output is the same.
    """
    target_size, draft_size = target.vocabulary, draft.vocabulary
    if (d2t := draft.d2t) is not None:
        check_d2t(d2t, target_size, draft_size)
        return d2t.numel(), d2t
    if draft_size == target_size:
        return draft_size, None
    if common_size is None:
        raise SequoiaPlanError(
            f"draft: a vocabulary of {draft_size} tokens, the target's has {target_size}; "
            "use a draft that shares the target's tokenizer "
            "(if only padding differs, give both: tokenizer= and draft_tokenizer=)"
        )
    common_size = min(common_size, target_size, draft_size)
    if common_size == target_size:
        return common_size, None
    return common_size, torch.arange(common_size, device=draft.device)


def check_d2t(d2t: Tensor, target_size: int, draft_size: int) -> None:
    """Raise SequoiaPlanError unless `d2t` names distinct tokens that both models have."""
    tokens = d2t.flatten().tolist()
    is_valid = d2t.ndim == 1 and not d2t.is_floating_point() and 0 < len(tokens) <= draft_size
    if not is_valid or len(set(tokens)) < len(tokens):
        raise SequoiaPlanError(
            f"draft: d2t must name each of at most {draft_size} tokens once, found {d2t.dtype} "
            f"{list(d2t.shape)}"
        )
    for token in (min(tokens), max(tokens)):
        if not 0 <= token < target_size:
            raise SequoiaPlanError(
                f"draft: covers token {token}, the target's vocabulary has {target_size}; use a "
                "draft made for this target"
            )


def _quoted(token: str | None) -> str:
    """A token as error messages show it."""
    return "has none" if token is None else repr(token)
