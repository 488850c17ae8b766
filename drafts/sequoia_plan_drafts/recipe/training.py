"""What all recipes share: settings, distances of draft and target, and the optimiser."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, get_cosine_schedule_with_warmup

from sequoia_plan_drafts.recipe.training_text import DraftVocabulary, TextBatch, TrainingText

EVALUATION_INTERVAL = 100
"""Steps between two evaluations on the held-out conversations; each also saves the draft."""
EVALUATION_BATCH = 16
"""Conversations in a batch of an evaluation."""
CHAIN_DECAY = 0.8
"""A token of a chain counts so many times what the one before it counts."""
DIVERGENCE_WEIGHT = 0.3
"""Of the KL divergence beside the share of rejected tokens, in steps that train chains."""


@dataclass(frozen=True)
class TrainingSettings:
    """Settings that every recipe has; the command line's options."""

    draft_vocabulary: int = 8192
    steps: int = 2000
    batch: int = 8
    learning_rate: float = 2e-3
    held_out: int = 100
    seed: int = 0
    dtype: str = "float32"


@dataclass(frozen=True)
class Training:
    """A draft in training.

    `logits(batch, chain)` yields the draft's logits [a, draft vocabulary] for a batch's answer
    tokens as first tokens of a drafted chain, as second, and so on. Steps before
    `first_chain_step` train first tokens alone, by the KL divergence. `save(metadata)` writes the
    draft.
    """

    text: TrainingText
    settings: TrainingSettings
    vocabulary: DraftVocabulary
    draft: nn.Module
    logits: Callable[[TextBatch, int], Iterator[Tensor]]
    save: Callable[[dict[str, Any]], None]
    chain: int
    first_chain_step: int

    def loss(self, batch: TextBatch, step: int) -> Tensor:
        """The loss of a batch, a scalar."""
        if step < self.first_chain_step:
            (logits,) = self.logits(batch, 1)
            return divergence_and_rejection(logits, self.vocabulary.target_to_draft, batch)[0]
        logits_by_place = self.logits(batch, self.chain)
        losses = chain_losses(logits_by_place, self.vocabulary.target_to_draft, batch)
        weights = CHAIN_DECAY ** torch.arange(self.chain)
        return (weights * losses).sum() / weights.sum()

    def run(self) -> None:
        """Train for all steps; the draft is evaluated and saved on the way, and at the end."""
        settings, started = self.settings, time.perf_counter()
        training_indices, held_out_indices = self.text.split(settings.held_out)
        parameters = [weight for weight in self.draft.parameters() if weight.requires_grad]
        optimiser = torch.optim.AdamW(
            parameters, settings.learning_rate, (0.9, 0.95), weight_decay=0.05
        )
        schedule = get_cosine_schedule_with_warmup(
            optimiser, settings.steps // 10 + 1, settings.steps
        )
        products = partial(torch.autocast, "cpu", torch.bfloat16, settings.dtype == "bfloat16")
        print(
            f"{len(training_indices)} conversations, head of {self.vocabulary.d2t.numel()} covers "
            f"{self.vocabulary.probability:.3f} of the target's mass, "
            f"{sum(parameter.numel() for parameter in parameters)} parameters",
            flush=True,
        )
        batches = self._endless_batches(training_indices)
        mean_loss = None
        for step in range(settings.steps):
            with products():
                loss = self.loss(next(batches), step)
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimiser.step()
            schedule.step()
            optimiser.zero_grad()
            mean_loss = torch.lerp(loss if mean_loss is None else mean_loss, loss, 0.02).detach()
            if (step + 1) % EVALUATION_INTERVAL and step + 1 < settings.steps:
                continue
            with products():
                held_out = self.text.batches(held_out_indices, EVALUATION_BATCH)
                agreement = self.top1_agreement(held_out)
            seconds = time.perf_counter() - started
            print(
                f"step {step + 1}: loss {mean_loss:.3f}, held-out top-1 agreement {agreement}, "
                f"{seconds:.0f} s",
                flush=True,
            )
            self.save(
                {
                    "recipe": asdict(settings),
                    "text": self.text.metadata,
                    "steps": step + 1,
                    "seconds": round(seconds),
                    "covered_mass": round(self.vocabulary.probability, 4),
                    "held_out_top1": agreement,
                }
            )

    def _endless_batches(self, indices: list[int]) -> Iterator[TextBatch]:
        rng = np.random.default_rng(self.settings.seed)
        while True:
            order = self.text.shuffled(indices, self.settings.batch, rng)
            yield from self.text.batches(order, self.settings.batch)

    @torch.no_grad()
    def top1_agreement(self, batches: Iterator[TextBatch]) -> list[float]:
        """How often draft and target have the same most probable token, by place in a chain.

        That is the acceptance of rank 1 at temperature 0.
        """
        agreements, answer_tokens = [0] * self.chain, 0
        for batch in batches:
            expected = self.vocabulary.target_to_draft[batch.top_ids[:, 0]]
            answer_tokens += expected.numel()
            for place, logits in enumerate(self.logits(batch, self.chain)):
                agreements[place] += int((logits.argmax(-1) == expected).sum())
        return [round(count / answer_tokens, 4) for count in agreements]


def chain_losses(
    logits_by_place: Iterable[Tensor], target_to_draft: Tensor, batch: TextBatch
) -> Tensor:
    """float [chain]: rejection plus weighted divergence, by place in the chain."""
    losses = []
    for logits in logits_by_place:
        divergence, rejection = divergence_and_rejection(logits, target_to_draft, batch)
        losses.append(rejection + DIVERGENCE_WEIGHT * divergence)
    return torch.stack(losses)


def divergence_and_rejection(
    logits: Tensor, target_to_draft: Tensor, batch: TextBatch
) -> tuple[Tensor, Tensor]:
    """Two distances of draft and target, means over a batch's answer tokens.

    The first is KL(target || draft), over those of the target's most probable tokens that the draft
    has. The second is the probability that speculative sampling rejects a token drawn from the
    draft at temperature 1, their total variation distance (arXiv 2211.17192, Corollary 3.6).
    `logits` [a, draft vocabulary]; `target_to_draft` int64 [target vocabulary].
    """
    draft_ids, target_logp = target_to_draft[batch.top_ids], batch.top_logp
    draft_logp = logits.to(target_logp.dtype).log_softmax(-1).gather(1, draft_ids.clamp(min=0))
    in_draft, target_probs = draft_ids >= 0, target_logp.exp()
    divergence = (target_probs * in_draft * (target_logp - draft_logp)).sum(-1).mean()
    accepted = torch.minimum(target_probs, draft_logp.exp() * in_draft).sum(-1).mean()
    return divergence, 1 - accepted


def config_like(target: Any, num_layers: int) -> LlamaConfig:
    """A Llama's configuration with layers of the target's sizes, and a head of its own."""
    defaults = LlamaConfig().to_dict()
    settings = {k: v for k, v in target.config.to_dict().items() if k in defaults}
    changes = {"num_hidden_layers": num_layers, "layer_types": None, "tie_word_embeddings": False}
    return LlamaConfig(**settings | changes | {"model_type": defaults["model_type"]})
