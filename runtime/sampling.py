"""How tokens are sampled: from logits to the probabilities that verification is exact for."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from sequoia_plan.artifacts import ArgumentError, TokenTree
from sequoia_plan.runtime.drawing import MOST_PROBABLE, WITHOUT_REPLACEMENT, Drawing
from sequoia_plan.runtime.verify import DEFAULT, VERIFIERS, Verifier
from sequoia_plan.runtime.verify.fused import RULES, Filters, available, race

CONTEXT_DEPENDENT = {
    "repetition_penalty": (1.0,),
    "encoder_repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "bad_words_ids": (),
    "sequence_bias": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "begin_suppress_tokens": (),
    "watermarking_config": (),
    "guidance_scale": (1.0,),
}
"""Settings of transformers that change probabilities by the text so far, with the values that mean "off" (None always does)."""

UNSUPPORTED = {
    "suppress_tokens": (),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "top_h": (),
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0.0,),
    "dola_layers": (),
    "constraints": (),
    "force_words_ids": (),
}
"""Settings that could be sampled from or searched with, and are not."""


def verifier_of(tree: TokenTree) -> str:
    """The verifier that a tree was solved for, by its plan; the default where the plan names none."""
    return str(tree.plan.settings.get("verifier") or DEFAULT)


LEAST = 1e-30
"""Temperatures and masses beyond this, or its inverse, leave what float32 can hold, and sampling would not be exact."""


@dataclass(frozen=True)
class Sampling:
    """How the target samples, and what drafts for it and verifies. Filters apply to the target alone.

    Args:
        temperature: 0 is greedy; filters, verifier and draft temperature then make no difference.
        top_p: keep the most probable tokens with at least this mass; 1 keeps all.
        top_k: keep the k most probable tokens; 0 keeps all.
        min_p: keep tokens at least this fraction as probable as the most probable one; 0 keeps all.
        draft_temperature: of the law that children are drawn from; None is the target's temperature.
        verifier: name of one of `sequoia_plan.runtime.verify.VERIFIERS`.

    The filters come in transformers' order (temperature, top_k, top_p, min_p) and mean the same.

    Raises:
        ArgumentError: for an invalid value.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    draft_temperature: float | None = None
    verifier: str = DEFAULT

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "draft_temperature"):
            value = getattr(self, name)
            if isinstance(value, bool) or (not isinstance(value, (int, float)) and (name, value) != ("draft_temperature", None)):
                raise ArgumentError(f"{name}: found {value!r:.60}, expected a number")
        if not (self.temperature == 0 or LEAST <= self.temperature <= 1 / LEAST):
            raise ArgumentError(f"temperature: found {self.temperature}, expected 0 (greedy), or {LEAST} to {1 / LEAST:g} (logits are float32)")
        if not LEAST <= self.top_p <= 1:
            raise ArgumentError(f"top_p: found {self.top_p}, expected at least {LEAST} (probabilities are float32) and at most 1")
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 0:
            raise ArgumentError(f"top_k: found {self.top_k!r}, expected a count of tokens, or 0 for all")
        if not 0 <= self.min_p <= 1:
            raise ArgumentError(f"min_p: found {self.min_p}, expected 0 to 1")
        if self.draft_temperature is not None and not LEAST <= self.draft_temperature <= 1 / LEAST:
            raise ArgumentError(f"draft_temperature: found {self.draft_temperature}, expected {LEAST} to {1 / LEAST:g} (logits are float32)")
        if self.verifier not in VERIFIERS:
            raise ArgumentError(f"verifier: found {self.verifier!r}, expected {', '.join(VERIFIERS)}")

    @classmethod
    def from_generation_config(cls, config: Any, draft_temperature: float | None = None, verifier: str = DEFAULT) -> Sampling:
        """The same sampling as transformers would do with `config` (a GenerationConfig, resolved or not).

        Raises:
            ArgumentError: naming the first setting that cannot be honoured or is invalid.
        """
        for names, why in (
            (CONTEXT_DEPENDENT, "it depends on the text so far, which differs from node to node of a token tree"),
            (UNSUPPORTED, "of transformers' sampling settings, temperature, top_p, top_k and min_p are supported"),
        ):
            for name, neutral in names.items():
                value = getattr(config, name, None)
                if value is not None and value not in neutral:
                    raise ArgumentError(f"{name}: found {value!r:.60}, expected {neutral[0] if neutral else None}; {why}")
        if not config.do_sample:
            return cls(0.0, verifier=verifier)
        if config.temperature is not None and config.temperature <= 0:
            raise ArgumentError(f"temperature: found {config.temperature} with do_sample=True, expected more than 0; greedy is do_sample=False")
        found = {name: getattr(config, name, None) for name in ("temperature", "top_p", "top_k", "min_p")}
        given = {name: value for name, value in found.items() if value is not None}
        return cls(**({"temperature": 1.0} | given), draft_temperature=draft_temperature, verifier=verifier)

    @property
    def greedy(self) -> bool:
        """Is the target's distribution a single token?"""
        return self.temperature == 0

    @property
    def rule(self) -> Verifier:
        """The verifier."""
        return VERIFIERS[self.verifier]

    @property
    def drawing(self) -> Drawing:
        """How children are drawn from `draft`: as the verifier needs, or the best in order if greedy."""
        return MOST_PROBABLE if self.greedy else self.rule.drawing

    @property
    def filters(self) -> Filters:
        """How the target's law follows from its logits."""
        return Filters(self.temperature, self.top_k, self.top_p, self.min_p)

    @property
    def fusible(self) -> bool:
        """Are there kernels for the verifier?"""
        return self.verifier in RULES and self.rule is VERIFIERS[self.verifier]

    def settings(self) -> dict[str, Any]:
        """Every setting by name, as profiles and trees record it."""
        return asdict(self)

    def for_transformers(self) -> dict[str, Any]:
        """The same sampling as arguments of transformers' generate."""
        if self.greedy:
            return {"do_sample": False}
        return {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p or None}

    def target(self, logits: Tensor) -> Tensor:
        """float32 [nodes, vocabulary]: the target's probabilities."""
        scores = logits.float() / self.temperature
        if self.top_k:
            least = scores.topk(min(self.top_k, scores.shape[-1]), -1).values[..., -1:]
            scores = scores.masked_fill(scores < least, -torch.inf)
        probabilities = torch.softmax(scores, -1)
        if self.top_p < 1:
            probabilities = nucleus(probabilities, self.top_p)
        if self.min_p > 0:
            probabilities = _at_least(probabilities, self.min_p * probabilities.amax(-1, keepdim=True))
        return probabilities

    def draft(self, logits: Tensor) -> Tensor:
        """float32 [nodes, draft vocabulary]: what children are drawn from and verified against; the logits themselves if greedy."""
        if self.greedy:
            return logits  # only the order matters
        return torch.softmax(logits.float() / (self.draft_temperature or self.temperature), -1)

    def children(self, logits: Tensor, count: int, bits: Tensor) -> tuple[Tensor, Tensor]:
        """The draft's laws (see `draft`) and children drawn from them, int64 [nodes, count]: on CUDA by a kernel."""
        if self.drawing is WITHOUT_REPLACEMENT and available(logits.device):
            return race(logits, self.draft_temperature or self.temperature, count, bits)
        laws = self.draft(logits)
        return laws, self.drawing.draw(laws, count, bits)


LARGEST_BITS = (1 << 30) - 1
"""More than those of any float32 up to 1."""
FIXED_POINT = 1 << 50
"""One, where probabilities are added as whole numbers."""


def nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """float32 [nodes, vocabulary]: the most probable tokens with mass >= top_p, renormalised (Holtzman et al., arXiv
    1904.09751). Tokens as probable as the last one kept are kept too.

    Finds that last probability without sorting: the bits of non-negative floats are in the order of their values, so a
    histogram of the upper half of the bits and one of the lower half within the right bin give it exactly.
    """
    bits = probabilities.view(torch.int32).long().clamp_(0, LARGEST_BITS)  # NaN too must find a bin: the step reports it afterwards
    weights, mass = summands(probabilities, top_p)
    upper, before = _boundary(weights, bits >> 15, mass)
    within = torch.where(bits >> 15 == upper, weights, 0)
    lower, _ = _boundary(within, bits & 0x7FFF, mass - before)
    return _at_least(probabilities, (upper << 15 | lower).int().view(torch.float32))


def summands(probabilities: Tensor, mass: float) -> tuple[Tensor, float]:
    """Probabilities and a mass as numbers whose sums are the same on every process that shares a model. A CUDA device adds in no fixed
    order, so they are whole numbers there; the CPU adds in order, and floats are faster."""
    return (probabilities, mass) if probabilities.device.type == "cpu" else whole_numbers(probabilities, mass)


def whole_numbers(probabilities: Tensor, mass: float) -> tuple[Tensor, int]:
    """Both in units of 1 / `FIXED_POINT`: int64."""
    return (probabilities * FIXED_POINT).long(), int(mass * FIXED_POINT)


def _boundary(weights: Tensor, bins: Tensor, mass: float | Tensor) -> tuple[Tensor, Tensor]:
    """The lowest bin with less than `mass` above it, and how much is: int64, and as the weights are, [nodes, 1]."""
    top = 0x7FFF
    total = torch.zeros((*weights.shape[:-1], top + 1), dtype=weights.dtype, device=weights.device).scatter_add_(-1, top - bins, weights)
    above = total.cumsum(-1) - total
    last = ((above < mass).sum(-1, keepdim=True) - 1).clamp_(min=0)
    return top - last, above.gather(-1, last)


def _at_least(probabilities: Tensor, least: Tensor) -> Tensor:
    """`probabilities` cut below `least` and renormalised."""
    kept = torch.where(probabilities >= least, probabilities, 0.0)
    return kept / kept.sum(-1, keepdim=True)
