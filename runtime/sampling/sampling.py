"""How tokens are sampled: from logits to the probabilities that verification is exact for."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig

from sequoia_plan.artifacts import ArgumentError, TokenTree
from sequoia_plan.models.base.kernel_launch import kernel_or_tensors, kernels_available
from sequoia_plan.runtime.sampling.drawing import (
    DRAWING_OF_VERIFIER,
    MOST_PROBABLE,
    WITHOUT_REPLACEMENT,
    Drawing,
    loops_for,
    race_on_device,
)

OFF_VALUES_OF_PROCESSORS = {
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "sequence_bias": None,
    "min_length": 0,
    "min_new_tokens": 0,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "begin_suppress_tokens": None,
    "watermarking_config": None,
    "guidance_scale": 1.0,
    "suppress_tokens": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "top_h": None,
    "num_return_sequences": 1,
    "output_scores": False,
    "output_logits": False,
}
"""transformers' settings that `sequoia` follows inside `generate`, by the logits processors that
transformers makes of most of them, and the value beside None that switches each off."""

OFF_VALUES = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "penalty_alpha": 0.0,
    "dola_layers": None,
    "constraints": None,
    "force_words_ids": None,
    "prompt_lookup_num_tokens": None,
    "assistant_early_exit": None,
    "stop_strings": None,
    "output_attentions": False,
    "output_hidden_states": False,
}
"""transformers' settings that decoding with a token tree does not follow."""

DEFAULT_VERIFIER = "traversal"
"""It never accepts fewer expected tokens than `sequoia` (tests/runtime/test_verify.py)."""

SMALLEST, LARGEST = 1e-30, 1e30
"""Temperatures and masses beyond these exceed float32: sampling is not exact."""

LARGEST_BITS = (1 << 30) - 1
"""At least the bit pattern of every float32 up to 1."""

FIXED_POINT = 1 << 50
"""1.0 as a whole number, where probabilities are added as whole numbers."""


def not_followed(config: GenerationConfig, has_processors: bool = False) -> dict[str, object]:
    """The settings of a GenerationConfig that are on and not followed, each with its off value."""
    off_values = OFF_VALUES if has_processors else OFF_VALUES_OF_PROCESSORS | OFF_VALUES
    return {
        name: off_value
        for name, off_value in off_values.items()
        if getattr(config, name, None) not in (None, off_value)
    }


def verifier_of(tree: TokenTree) -> str:
    """The verifier that a tree's plan records; the default if the plan has none."""
    return tree.plan.settings.get("verifier") or DEFAULT_VERIFIER


@dataclass(frozen=True)
class Sampling:
    """How the target samples, how children are drawn from the draft, and which verifier accepts.

    The filters apply to the target only, in transformers' order (temperature, top_k, top_p, min_p)
    and with its meaning.

    Args:
        temperature: 0 is greedy; the other settings then make no difference.
        top_p: keep the most probable tokens that together have at least this probability.
        top_k: keep the k most probable tokens; 0 keeps all.
        min_p: keep tokens at least this fraction as probable as the most probable one.
        draft_temperature: of the distribution that children are drawn from; None is the target's.
        verifier: a name in `sequoia_plan.runtime.verify.VERIFIERS`.

    Raises:
        ArgumentError: for an invalid value.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    draft_temperature: float | None = None
    verifier: str = DEFAULT_VERIFIER

    def __post_init__(self) -> None:
        """Check every setting; raise ArgumentError for the first that is invalid."""
        # logits and probabilities are float32
        temperatures, masses = (SMALLEST, LARGEST), (SMALLEST, 1)
        for name, (lowest, highest), off_value in (
            ("temperature", temperatures, 0),
            ("top_p", masses, 1),
            ("min_p", (0, 1), 0),
            ("draft_temperature", temperatures, None),
        ):
            value = getattr(self, name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value != off_value and not (is_number and lowest <= value <= highest):
                raise ArgumentError(
                    f"{name}: found {value!r:.60}, expected a number, {lowest} to {highest:g}; "
                    f"{off_value} switches it off"
                )
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 0:
            raise ArgumentError(
                f"top_k: found {self.top_k!r}, expected a count of tokens, or 0 for all"
            )
        if self.verifier not in DRAWING_OF_VERIFIER:
            names = ", ".join(DRAWING_OF_VERIFIER)
            raise ArgumentError(f"verifier: found {self.verifier!r}, expected {names}")

    @classmethod
    def from_generation_config(
        cls,
        config: GenerationConfig,
        verifier: str = DEFAULT_VERIFIER,
        *,
        has_processors: bool = False,
    ) -> Sampling:
        """The sampling that transformers would do with `config`.

        Args:
            has_processors: the settings that transformers makes logits processors of are followed.

        Raises:
            ArgumentError: naming the first setting that is invalid or not supported.
        """
        for name, off_value in not_followed(config, has_processors).items():
            raise ArgumentError(
                f"{name}: found {getattr(config, name)!r:.60}, expected {off_value}; decoding with "
                "a token tree does not follow it here (docs/huggingface.md)"
            )
        if not config.do_sample:
            return cls(verifier=verifier)
        given = {
            name: value
            for name in ("temperature", "top_p", "top_k", "min_p")
            if (value := getattr(config, name, None)) is not None
        }
        return cls(**({"temperature": 1.0} | given), verifier=verifier)

    @property
    def greedy(self) -> bool:
        """True if the target always takes its most probable token."""
        return self.temperature == 0

    def drawing_on(self, device: torch.device) -> Drawing:
        """How children are drawn: as the verifier needs, or the draft's top tokens if greedy."""
        drawing = MOST_PROBABLE if self.greedy else DRAWING_OF_VERIFIER[self.verifier]
        return drawing.on(device)

    def settings(self) -> dict[str, object]:
        """Every setting by name, as profiles and trees record it."""
        return asdict(self)

    def for_transformers(self) -> dict[str, object]:
        """The same sampling as arguments of transformers' `generate`."""
        if self.greedy:
            return {"do_sample": False}
        filters = {"top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p or None}
        return {"do_sample": True, "temperature": self.temperature, **filters}

    def target_probs(self, logits: Tensor) -> Tensor:
        """float32 [nodes, vocabulary]: the target's probabilities, filtered.

        Args:
            logits: [nodes, vocabulary], the target's.
        """
        return _probs(logits.float(), self.temperature, self.top_k, self.top_p, self.min_p)

    def scores(self, logits: Tensor) -> Tensor:
        """float32 [nodes, vocabulary]: logits / temperature, -inf for tokens that filters remove.

        Args:
            logits: [nodes, vocabulary], the target's.
        """
        if self.greedy:
            return logits.float()
        scores = logits.float() / self.temperature
        if self.top_k == 0 and self.top_p == 1 and self.min_p == 0:
            return scores
        return scores.masked_fill(self.target_probs(logits) == 0, -torch.inf)

    def draft_probs(self, logits: Tensor) -> Tensor:
        """float32 [nodes, draft vocabulary]: what children are drawn from and verified against.

        If greedy, the logits themselves: only their order matters.
        """
        if self.greedy:
            return logits
        return _probs(logits.float(), self.draft_temperature or self.temperature)

    def draw_children(self, logits: Tensor, count: int, bits: Tensor) -> tuple[Tensor, Tensor]:
        """Draw `count` children for each row of the draft's logits; on CUDA by a kernel.

        Args:
            logits: [nodes, draft vocabulary].
            bits: int32 [nodes, numbers for each], the random numbers that `drawing` takes.

        Returns:
            `draft_probs(logits)`; int64 [nodes, count], the children in draw order.
        """

        def draw_by_tensor_operations() -> tuple[Tensor, Tensor]:
            """The same on any device, from the same random numbers."""
            probs = self.draft_probs(logits)
            return probs, drawing.draw(probs, count, bits)

        drawing = self.drawing_on(logits.device)
        if drawing is not WITHOUT_REPLACEMENT or not kernels_available(logits.device):
            return draw_by_tensor_operations()
        temperature = self.draft_temperature or self.temperature
        return kernel_or_tensors(
            ("drawing", logits.dtype),
            lambda: race_on_device(logits, temperature, count, bits),
            draw_by_tensor_operations,
        )


def _probs(
    logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """Probabilities from float32 logits [nodes, vocabulary], of the same shape, filtered."""
    if loops := loops_for(logits):
        rows = logits.detach().reshape(-1, logits.shape[-1]).numpy().copy()
        shares = np.float32(top_p), np.float32(min_p)
        loops.target_probs(rows, rows.max(-1), np.float32(temperature), top_k, *shares)
        return torch.from_numpy(rows).view(logits.shape)
    scores = logits / temperature
    if top_k:
        threshold = scores.topk(min(top_k, scores.shape[-1]), -1).values[..., -1:]
        scores = scores.masked_fill(scores < threshold, -torch.inf)
    probs = torch.softmax(scores, -1)
    if top_p < 1:
        probs = top_p_filter(probs, top_p)
    if min_p > 0:
        probs = _keep_from(probs, min_p * probs.amax(-1, keepdim=True))
    return probs


def top_p_filter(probs: Tensor, top_p: float) -> Tensor:
    """float32 [nodes, vocabulary]: the most probable tokens with mass >= top_p, renormalised.

    Positive floats have the order of their bit patterns. So two histograms of these find the lowest
    probability to keep, which is faster than to sort the vocabulary.
    """
    # the clamp gives NaN a bin, too: the step reports it afterwards
    bits = probs.view(torch.int32).long().clamp_(0, LARGEST_BITS)
    # 30 bits in all: the bin of the upper 15 that has the last probability, then the lower 15
    weights, mass = summands(probs, top_p)
    upper, mass_above = _boundary(weights, bits >> 15, mass)
    within = torch.where(bits >> 15 == upper, weights, 0)
    lower, _ = _boundary(within, bits & 0x7FFF, mass - mass_above)
    return _keep_from(probs, (upper << 15 | lower).int().view(torch.float32))


def summands(probs: Tensor, mass: float) -> tuple[Tensor, float]:
    """Probabilities and a mass in numbers whose sums are the same in every run.

    A CUDA device adds in no fixed order, which rounds floats differently from run to run, so both
    become whole numbers there. The CPU adds in a fixed order, and floats are faster.
    """
    return (probs, mass) if probs.device.type == "cpu" else whole_numbers(probs, mass)


def whole_numbers(probs: Tensor, mass: float) -> tuple[Tensor, int]:
    """Both as int64, in units of 1 / `FIXED_POINT`; the mass is at least 1: a token is kept."""
    return (probs * FIXED_POINT).long(), max(1, int(mass * FIXED_POINT))


def _boundary(weights: Tensor, bins: Tensor, mass: float | Tensor) -> tuple[Tensor, Tensor]:
    """The lowest bin with less than `mass` above it (int64 [nodes, 1]), and the mass above it.

    `weights` [nodes, vocabulary]; `bins` int64 [nodes, vocabulary], each token's, below 2^15.
    """
    top = 0x7FFF  # the last of 2^15 bins; the histogram has it first
    shape = (*weights.shape[:-1], top + 1)
    histogram = torch.zeros(shape, dtype=weights.dtype, device=weights.device)
    histogram.scatter_add_(-1, top - bins, weights)
    above = histogram.cumsum(-1) - histogram
    last = ((above < mass).sum(-1, keepdim=True) - 1).clamp_(min=0)
    return top - last, above.gather(-1, last)


def _keep_from(probs: Tensor, threshold: Tensor) -> Tensor:
    """`probs` with everything below `threshold` ([nodes, 1]) removed, renormalised."""
    kept = torch.where(probs >= threshold, probs, 0.0)
    return kept / kept.sum(-1, keepdim=True)
