"""Do a target and a draft speak the same tokens?"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sequoia_plan.artifacts import SequoiaPlanError


def check_tokenizers(target: Any, draft: Any) -> int:
    """Compare two tokenizers token by token.

    Returns:
        The size of the smaller vocabulary, whose tokens they share.

    Raises:
        SequoiaPlanError: naming the first token that differs.
    """
    ours, theirs = ({number: token for token, number in tokenizer.get_vocab().items()} for tokenizer in (target, draft))
    size = min(max(ours), max(theirs)) + 1
    for number in range(size):
        if ours.get(number) != theirs.get(number):
            raise SequoiaPlanError(
                f"draft: its tokenizer differs from the target's at token {number} (target {_shown(ours.get(number))}, draft {_shown(theirs.get(number))}); "
                "use a draft that shares the target's tokenizer"
            )
    return size


def vocabulary_size(model: Any) -> int:
    """How many logits a model gives, those of padding included."""
    return int(model.get_output_embeddings().out_features)


def shared_vocabulary(target: Any, draft: Any, tokenizer: Any = None, draft_tokenizer: Any = None) -> tuple[int, Tensor | None]:
    """Which tokens the draft can propose.

    The target's logits are never cut: what the draft does not cover stays with the target, so the output's law is the same.

    Returns:
        How many of the draft's logits are used, and the target's token for each (int64); None if they are the same.

    Raises:
        SequoiaPlanError: if the vocabularies cannot belong together.
    """
    size, own = vocabulary_size(target), vocabulary_size(draft)
    common = check_tokenizers(tokenizer, draft_tokenizer) if tokenizer is not None and draft_tokenizer is not None else None
    covered: Tensor | None = getattr(draft, "covered_tokens", None)
    if covered is not None:
        if int(covered.max()) >= size:
            raise SequoiaPlanError(f"draft: covers token {int(covered.max())}, the target's vocabulary has {size}; use a draft made for this target")
        if covered.unique().numel() != covered.numel() or covered.numel() > own:
            raise SequoiaPlanError(f"draft: covered_tokens must name each of at most {own} tokens once")
        return covered.numel(), covered
    if own == size:
        return own, None
    if common is None:
        raise SequoiaPlanError(
            f"draft: a vocabulary of {own} tokens, the target's has {size}; use a draft that shares the target's tokenizer "
            "(if only padding differs, give both: tokenizer= and draft_tokenizer=)"
        )
    common = min(common, size, own)
    return common, None if common == size else torch.arange(common, device=draft.device)


def _shown(token: str | None) -> str:
    return "has none" if token is None else repr(token)
