"""Training a draft on the target's own text: `python -m sequoia_plan.profiler.distill train`.

The draft starts as a few of the target's own layers with the target's embeddings (kept, shared) and, as its head, the
embedding rows of the tokens the target uses most. It minimises the forward KL divergence to the target's law at the
answer tokens.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.profiler.distill.text import HIDDEN
from sequoia_plan.runtime.draft.file import build_draft, save_draft


@dataclass(frozen=True)
class Recipe:
    """How a draft is made.

    Args:
        layers: which of the target's layers it starts as.
        covered: rows of its head.
        steps, batch: optimiser steps, and conversations in each.
        learning_rate: peak of AdamW's, warmed up, then cosine to zero.
        held_out: conversations kept for measuring, from the end of the text.
    """

    layers: tuple[int, ...] = (0, 1)
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

    def most_used(self, count: int, vocabulary: int) -> tuple[Tensor, float, Tensor]:
        """The tokens with the most mass under the target's laws, sorted; their share of that mass; each token's place among them or -1."""
        mass = np.zeros(vocabulary)
        for _, _, ids, logp in self.conversations:
            np.add.at(mass, ids.astype(np.int64), np.exp(logp.astype(np.float64)))
        chosen = np.sort(np.argsort(-mass, kind="stable")[:count])
        places = torch.full((vocabulary,), -1)
        places[chosen] = torch.arange(count)
        return torch.from_numpy(chosen), float(mass[chosen].sum() / mass.sum()), places

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


def train(target: Any, text: Text, recipe: Recipe, out: Path, target_name: str) -> None:
    """Train a draft for `target` (a Llama in float32) and write it to `out`."""
    torch.manual_seed(recipe.seed)
    started = time.perf_counter()
    draft, to_draft, share = _start(target, text, recipe)
    learn, held_out = text.split(recipe.held_out)
    parameters = [p for name, p in draft.named_parameters() if "embed_tokens" not in name]
    optimiser = torch.optim.AdamW(parameters, lr=recipe.learning_rate, weight_decay=recipe.weight_decay, betas=(0.9, 0.95))
    schedule = warmed_up_cosine(optimiser, recipe.steps)
    rng = np.random.default_rng(recipe.seed)
    step, average = 0, 0.0
    print(f"{len(learn)} conversations, head of {recipe.covered} covers {share:.3f} of the target's mass, {sum(p.numel() for p in parameters)} parameters")
    while step < recipe.steps:
        draft.train()
        for batch in text.batches(shuffled(learn, text, recipe.batch, rng), recipe.batch):
            loss = divergence(draft, to_draft, batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimiser.step()
            schedule.step()
            optimiser.zero_grad(set_to_none=True)
            average = loss.item() if step == 0 else 0.98 * average + 0.02 * loss.item()
            step += 1
            if step % 100 == 0 or step == recipe.steps:
                elapsed = time.perf_counter() - started
                agreement = evaluate(draft, to_draft, text, held_out)
                print(f"step {step}: loss {average:.3f}, held-out top-1 agreement {agreement:.4f}, {elapsed:.0f} s", flush=True)
                facts: dict[str, Any] = {"recipe": {**recipe.__dict__, "layers": list(recipe.layers)}, "text": text.facts, "target": target_name}
                facts |= {"steps": step, "seconds": round(elapsed), "covered_mass": round(share, 4), "held_out_top1": round(agreement, 4)}
                save_draft(draft, out, facts)
            if step >= recipe.steps:
                break


def divergence(draft: Any, to_draft: Tensor, batch: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    """Mean over answer tokens of KL(target || draft), on the covered part of the target's most probable tokens."""
    tokens, places, ids, logp = batch
    log_q = _logits(draft, tokens, places).log_softmax(-1)
    at = to_draft[ids]
    p = logp.exp() * (at >= 0)
    return (p * (logp - log_q.gather(1, at.clamp(min=0)))).sum(-1).mean()


@torch.no_grad()
def evaluate(draft: Any, to_draft: Tensor, text: Text, which: Sequence[int]) -> float:
    """Share of answer tokens at which draft and target agree on the most probable token (acceptance of rank 1 at temperature 0)."""
    draft.eval()
    agree = total = 0
    for tokens, places, ids, _ in text.batches(which, 16):
        agree += int((_logits(draft, tokens, places).argmax(-1) == to_draft[ids[:, 0]]).sum())
        total += places.numel()
    draft.train()
    return agree / total


def _logits(draft: Any, tokens: Tensor, places: Tensor) -> Tensor:
    hidden = draft.model(input_ids=tokens, use_cache=False).last_hidden_state
    logits: Tensor = draft.lm_head(hidden.flatten(0, 1)[places])
    return logits


def _start(target: Any, text: Text, recipe: Recipe) -> tuple[Any, Tensor, float]:
    """The untrained draft, the map from the target's tokens to its own (-1: not covered), and the mass it covers."""
    vocabulary = target.config.vocab_size
    covered, share, to_draft = text.most_used(recipe.covered, vocabulary)
    config = LlamaConfig(**{**target.config.to_dict(), "num_hidden_layers": len(recipe.layers), "layer_types": None, "tie_word_embeddings": False})
    draft = build_draft(config, target.get_input_embeddings(), covered)
    weights = target.state_dict()
    start = {"lm_head.weight": weights["lm_head.weight"][covered], "model.norm.weight": weights["model.norm.weight"]}
    for to, layer in enumerate(recipe.layers):
        prefix = f"model.layers.{layer}."
        start |= {f"model.layers.{to}.{name.removeprefix(prefix)}": value for name, value in weights.items() if name.startswith(prefix)}
    draft.load_state_dict(start, strict=False)
    draft.model.embed_tokens.requires_grad_(False)
    return draft, to_draft, share


def warmed_up_cosine(optimiser: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    """A learning rate that rises for a hundred steps, or a tenth of them, and falls to zero along a cosine."""
    warm_up = min(100, steps // 10 + 1)
    return torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: min(1.0, (step + 1) / warm_up) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps))))


def shuffled(which: Sequence[int], text: Text, batch: int, rng: np.random.Generator) -> list[int]:
    """A new order in which batches hold conversations of like length, so that little is padded."""
    order = rng.permutation(which)
    pools = [sorted(order[i : i + 32 * batch], key=lambda c: len(text.conversations[c][0])) for i in range(0, len(order), 32 * batch)]
    groups = [pool[i : i + batch] for pool in pools for i in range(0, len(pool), batch)]
    rng.shuffle(groups)
    return [int(c) for group in groups for c in group]
