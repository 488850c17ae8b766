"""What every recipe shares: the text, its laws, and the optimiser's steps."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.profiler.distill.text import HIDDEN

EVERY = 100
"""Steps between two looks at the held-out conversations, each of which also saves the draft."""
SURENESS = 0.3
"""What the target's final norm counts for before training: with the whole of it, a layer or two are sure, and wrong."""
B = TypeVar("B")


@dataclass(frozen=True)
class Training:
    """Settings that every recipe has.

    Args:
        covered: rows of the draft's head.
        steps, batch: optimiser steps, and conversations in each.
        learning_rate: peak of AdamW's, warmed up, then cosine to zero.
        held_out: conversations kept for measuring, from the end of the text.
    """

    covered: int = 8192
    steps: int = 2000
    batch: int = 8
    learning_rate: float = 2e-3
    weight_decay: float = 0.05
    held_out: int = 100
    seed: int = 0


class Text:
    """Conversations written by `text.write_text`, from one or more folders.

    Attributes:
        facts: what each folder says of itself.
        conversations: tokens [n], which are the answer's [n], top ids and log p [answer tokens, TOP] of each.
        hidden: the target's hidden states [n, taps * width] of each, on disk; empty if one of the folders has none.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self.facts: list[dict[str, Any]] = []
        self.conversations: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
        self.hidden: list[np.ndarray] = []
        for folder in folders:
            try:
                facts = json.loads((folder / "text.json").read_text())
                tokens, answer, top_ids, top_logp = (np.load(folder / f"{name}.npy") for name in ("tokens", "answer", "top_ids", "top_logp"))
                states = [np.load(file, mmap_mode="r") for file in sorted(folder.glob(HIDDEN))]
            except (OSError, ValueError) as error:
                raise SequoiaPlanError(f"{folder}: no training text ({error}); write some with: python -m sequoia_plan.profiler.distill text") from error
            ends = facts.pop("ends")
            laws = np.concatenate([[0], np.cumsum(answer)])
            for start, end in zip([0, *ends], ends, strict=False):
                rows = slice(laws[start], laws[end])
                self.conversations.append((tokens[start:end], answer[start:end], top_ids[rows], top_logp[rows]))
            first = 0
            for file in states:
                inside = [(start, end) for start, end in zip([0, *ends], ends, strict=False) if first <= start < first + len(file)]
                self.hidden += [file[start - first : end - first] for start, end in inside]
                first += len(file)
            self.facts.append(facts)

    def taps(self, wanted: tuple[int, ...] = ()) -> tuple[int, ...]:
        """The target's hidden states that the text holds.

        Raises:
            SequoiaPlanError: if one of the folders holds none, or others than `wanted`; without that, others than the first.
        """
        wanted = wanted or tuple(self.facts[0].get("taps", ()))
        if not wanted:
            raise SequoiaPlanError("--text: holds no hidden states, and this draft reads some; write it with --taps")
        for facts in self.facts:
            if tuple(facts.get("taps", ())) != wanted:
                numbers = " ".join(map(str, wanted))
                raise SequoiaPlanError(
                    f"--text: holds the hidden states {facts.get('taps', [])}, expected {numbers} for this draft; write it with --taps {numbers}"
                )
        return wanted

    def most_used(self, count: int, vocabulary: int) -> tuple[Tensor, float, Tensor]:
        """The tokens with the most mass under the target's laws, sorted; and what `covered_by` says of them."""
        mass = self._mass(vocabulary)
        chosen = torch.from_numpy(np.sort(np.argsort(-mass, kind="stable")[:count]))
        return chosen, *_covered(mass, chosen)

    def covered_by(self, tokens: Tensor, vocabulary: int) -> tuple[float, Tensor]:
        """The share that tokens [n] have of the mass under the target's laws; and int64 [vocabulary], each token's place among them or -1."""
        return _covered(self._mass(vocabulary), tokens)

    def _mass(self, vocabulary: int) -> np.ndarray:
        mass = np.zeros(vocabulary)
        for _, _, ids, logp in self.conversations:
            np.add.at(mass, ids.astype(np.int64), np.exp(logp.astype(np.float64)))
        return mass

    def counts(self, vocabulary: int) -> Tensor:
        """float [vocabulary]: how often the text has each token."""
        return torch.from_numpy(np.bincount(np.concatenate([tokens for tokens, *_ in self.conversations]), minlength=vocabulary)).float()

    def split(self, held_out: int) -> tuple[list[int], list[int]]:
        """Numbers of the conversations to learn from, and of the last `held_out`.

        Raises:
            SequoiaPlanError: if none is left to learn from.
        """
        every = list(range(len(self.conversations)))
        if not 0 < held_out < len(every):
            raise SequoiaPlanError(f"--held-out {held_out}: the text has {len(every)} conversations; write more text, or hold out fewer, at least one")
        return every[:-held_out], every[-held_out:]

    def batches(self, which: Sequence[int], size: int) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Padded batches: tokens [b, n], places [a] (flat, of the token before each answer token), top ids and log p [a, TOP]."""
        for start in range(0, len(which), size):
            chosen = [self.conversations[i] for i in which[start : start + size]]
            longest = max(len(c[0]) for c in chosen)
            tokens = np.zeros((len(chosen), longest), np.int64)
            places = []
            for row, (words, answer, _, _) in enumerate(chosen):
                tokens[row, : len(words)] = words
                places.append(np.flatnonzero(answer) - 1 + row * longest)
            ids, logp = np.concatenate([c[2] for c in chosen]).astype(np.int64), np.concatenate([c[3] for c in chosen]).astype(np.float32)
            yield torch.from_numpy(tokens), torch.from_numpy(np.concatenate(places)), torch.from_numpy(ids), torch.from_numpy(logp)


def fit(
    parameters: Sequence[nn.Parameter],
    text: Text,
    recipe: Training,
    share: float,
    batches: Callable[[Sequence[int], int], Iterator[B]],
    loss_of: Callable[[B, int], Tensor],
    evaluate: Callable[[Sequence[int]], Any],
    save: Callable[[dict[str, Any]], None],
    report: Callable[[str], None],
) -> None:
    """Take a recipe's steps; the draft is saved on the way, and at the end.

    Args:
        parameters: what is trained.
        share: of the target's probability, what the draft's head covers.
        batches: makes batches of conversations, whose numbers it gets, of a size.
        loss_of: what is minimised, from a batch and the number of steps before.
        evaluate: how often draft and target agree on the conversations with these numbers.
        save: writes the draft with facts on how it was made.
    """
    started = time.perf_counter()
    learn, held_out = text.split(recipe.held_out)
    optimiser = torch.optim.AdamW(parameters, lr=recipe.learning_rate, weight_decay=recipe.weight_decay, betas=(0.9, 0.95))
    schedule = _warmed_up_cosine(optimiser, recipe.steps)
    rng = np.random.default_rng(recipe.seed)
    step, average = 0, 0.0
    report(f"{len(learn)} conversations, head of {recipe.covered} covers {share:.3f} of the target's mass, {sum(p.numel() for p in parameters)} parameters")
    while step < recipe.steps:
        for batch in batches(_shuffled(learn, text, recipe.batch, rng), recipe.batch):
            loss = loss_of(batch, step)
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimiser.step()
            schedule.step()
            optimiser.zero_grad(set_to_none=True)
            average = loss.item() if step == 0 else 0.98 * average + 0.02 * loss.item()
            step += 1
            if step % EVERY == 0 or step == recipe.steps:
                agreement, elapsed = evaluate(held_out), time.perf_counter() - started
                report(f"step {step}: loss {average:.3f}, held-out top-1 agreement {agreement}, {elapsed:.0f} s")
                facts = {"recipe": asdict(recipe), "text": text.facts, "steps": step, "seconds": round(elapsed)}
                save(facts | {"covered_mass": round(share, 4), "held_out_top1": agreement})
            if step >= recipe.steps:
                break


def magnitudes(text: Text) -> Tensor:
    """[taps * width]: the root mean square of every dimension of the hidden states. A few are a hundred times the others."""
    sample = np.concatenate([states[1:-1] for states in text.hidden[:100]]).astype(np.float32)  # the first token's are unlike all others
    return torch.from_numpy(np.sqrt((sample**2).mean(0)) + 1e-6)


def hidden_of(text: Text, which: Sequence[int], longest: int, scale: Tensor) -> Tensor:
    """[conversations, longest, taps * width]: the hidden states of some conversations, multiplied by `scale` [taps * width], and zeros after them."""
    hidden = torch.zeros(len(which), longest, scale.numel())
    for row, conversation in enumerate(which):
        states = text.hidden[conversation]
        hidden[row, : len(states)] = torch.from_numpy(states.astype(np.float32))
    return hidden * scale


def apart(logits: Tensor, to_draft: Tensor, ids: Tensor, logp: Tensor) -> tuple[Tensor, Tensor]:
    """Two distances of draft and target, means over answer tokens.

    Args:
        logits: [a, draft vocabulary].
        to_draft: int64 [target vocabulary], each token's place in the draft's vocabulary or -1.
        ids, logp: [a, TOP], the target's most probable tokens and the logarithms of their probabilities.

    Returns:
        KL(target || draft), on the covered part of the target's most probable tokens; and the probability that speculative sampling rejects a
        token drawn from the draft at temperature 1, which is their total variation distance (arXiv 2211.17192, Corollary 3.6).
    """
    at = to_draft[ids]
    covered, p = at >= 0, logp.exp()
    log_q = logits.gather(1, at.clamp(min=0)) - logits.logsumexp(-1, keepdim=True)
    return (p * covered * (logp - log_q)).sum(-1).mean(), 1 - torch.minimum(p, log_q.exp() * covered).sum(-1).mean()


def divergence(logits: Tensor, to_draft: Tensor, ids: Tensor, logp: Tensor) -> Tensor:
    """The first of the distances of `apart`."""
    return apart(logits, to_draft, ids, logp)[0]


def decayed(losses: Tensor, decay: float) -> Tensor:
    """The mean of losses [n], each of which counts `decay` times what the one before it counts."""
    counts = decay ** torch.arange(losses.numel())
    return (counts * losses).sum() / counts.sum()


def agreeing(logits: Tensor, to_draft: Tensor, ids: Tensor) -> int:
    """At how many answer tokens draft and target agree on the most probable token (acceptance of rank 1 at temperature 0)."""
    return int((logits.argmax(-1) == to_draft[ids[:, 0]]).sum())


def start_ends(draft: Any, target: Any, covered: Tensor) -> None:
    """Before training, a draft that reads hidden states takes the last of them as it is, and has the target's final norm, at `SURENESS`, and the
    rows of its head for `covered`."""
    width = draft.config.hidden_size
    with torch.no_grad():
        draft.fc.weight.zero_()[:, -width:] = torch.eye(width)
        draft.norm.weight.copy_(SURENESS * target.model.norm.weight)
        draft.get_output_embeddings().weight.copy_(target.get_output_embeddings().weight[covered])


def as_published(draft: nn.Module, scale: Tensor) -> dict[str, Tensor]:
    """The weights of a draft that was trained on hidden states times `scale`, in bfloat16, for hidden states as they are."""
    weights = draft.state_dict()
    return {name: value.bfloat16() for name, value in (weights | {"fc.weight": weights["fc.weight"] * scale}).items()}


def layers_like(target: Any, count: int) -> LlamaConfig:
    """The configuration of a draft of so many layers like the target's, with a head of its own."""
    return LlamaConfig(**target.config.to_dict() | {"num_hidden_layers": count, "layer_types": None, "tie_word_embeddings": False})


def _warmed_up_cosine(optimiser: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    """A learning rate that rises for a hundred steps, or a tenth of them, and falls to zero along a cosine."""
    warm_up = min(100, steps // 10 + 1)
    return torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: min(1.0, (step + 1) / warm_up) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps))))


def _covered(mass: np.ndarray, tokens: Tensor) -> tuple[float, Tensor]:
    """See `Text.covered_by`, from each token's mass [vocabulary]."""
    places = torch.full(mass.shape, -1)
    places[tokens] = torch.arange(tokens.numel())
    return float(mass[tokens.numpy()].sum() / mass.sum()), places


def _shuffled(which: Sequence[int], text: Text, batch: int, rng: np.random.Generator) -> list[int]:
    """A new order in which batches hold conversations of like length, so that little is padded."""
    order = rng.permutation(which)
    pools = [sorted(order[i : i + 32 * batch], key=lambda c: len(text.conversations[c][0])) for i in range(0, len(order), 32 * batch)]
    groups = [pool[i : i + batch] for pool in pools for i in range(0, len(pool), batch)]
    rng.shuffle(groups)
    return [int(c) for group in groups for c in group]
