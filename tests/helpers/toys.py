"""Toy models small enough to know their law exactly, with the interface of transformers' causal
LMs.

They read everything a decoder controls: tokens, positions, the attention mask and the KV cache. A
token's logits depend
on the token, on its position, and on the *visible* earlier tokens, fetched from the cache: a wrong
mask, position, slot
or compaction changes the law.
"""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch

from sequoia_plan.artifacts import Plan, TokenTree
from sequoia_plan.models.backends import loaded
from sequoia_plan.runtime import Pair, SequoiaDecoder, sequoia

TREE = TokenTree([-1, 0, 0, 1, 1, 2, 3])
PLAIN = TokenTree.chain(1)
"""Steps without a draft."""
SMALL_TREES = {
    "chain": TokenTree.chain(3),
    "star": TokenTree.star(3),
    "binary": TokenTree([-1, 0, 0, 1, 1]),
    "lopsided": TokenTree([-1, 0, 0, 2, 2, 3]),
    "both": TokenTree([-1, 0, 0, 1, 2]),
}
"""Small enough to enumerate every draw."""
PROMPTS = [[i % 8, (3 * i) % 8, 5, (i + 1) % 8] for i in range(12)]


def normal(*shape, seed=0):
    """Normally distributed numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def planned(tree, cost, tokens=None, **plan):
    """The tree with a plan by which its steps take so many plain ones and yield so many `tokens`,
    twice as many by default."""
    tokens = tokens or max(1.0, 2 * cost)
    plan = Plan(
        objective="speed",
        expected_tokens=tokens,
        step_seconds=cost,
        predicted_speedup=tokens / cost,
        **plan,
    )
    return replace(tree, plan=plan)


class ToyModel(torch.nn.Module):
    """logits(token at position i) = A[token] + B[i mod 3] + W[number of visible tokens] . (sum of
    visible one-hots)."""

    def __init__(self, seed, vocabulary=8, covered=None, base=None, noise=0.0, context=64):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def table(*shape):
            return torch.randn(*shape, generator=generator)

        n = vocabulary
        if base is None:
            self.by_token, self.by_position = table(n, n), 0.5 * table(3, n)
            self.by_past = 0.4 * table(n, n)
        else:  # a draft that resembles its target
            self.by_token, self.by_position = (
                base.by_token + noise * table(n, n),
                base.by_position.clone(),
            )
            self.by_past = base.by_past + noise * 0.3 * table(n, n)
        if covered is not None:
            self.d2t = torch.tensor(covered)
        self.config = SimpleNamespace(
            num_hidden_layers=1, max_position_embeddings=context, vocab_size=vocabulary
        )
        self.generation_config = None
        self.vocabulary = vocabulary
        self.eye = torch.eye(vocabulary)
        self.dtype, self.device = torch.float32, torch.device("cpu")
        self.eval()

    def get_output_embeddings(self):
        covered = getattr(self, "d2t", None)
        return SimpleNamespace(out_features=self.vocabulary if covered is None else covered.numel())

    def forward(
        self,
        input_ids,
        position_ids=None,
        attention_mask=None,
        past_key_values=None,
        use_cache=None,
        logits_to_keep=0,
    ):
        own = self.eye[input_ids]
        if past_key_values is None:  # whole sequences, as transformers takes them: [batch, n]
            position_ids, past = torch.arange(input_ids.shape[1]), own.cumsum(1)
        else:
            _, values = past_key_values.layers[0].update(own[None], own[None])
            past = (attention_mask[0, 0] == 0).float() @ values[0, 0]
        logits = self.by_token[input_ids] + self.by_position[position_ids % 3] + past @ self.by_past
        covered = getattr(self, "d2t", slice(None))
        return SimpleNamespace(logits=logits[:, -logits_to_keep:, covered])

    def greedy_text(self, prompt, count):
        """The prompt and the `count` most probable tokens after it."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self(torch.tensor([tokens])).logits[0, -1].argmax()))
        return tokens


class Ids:
    """A streamer that keeps what it gets."""

    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended = True


def toy_models(seed=0, noise=0.5, covered=None, context=64, vocabulary=8):
    """A target and a draft that resembles it."""
    target = ToyModel(seed, vocabulary, context=context)
    return target, ToyModel(seed + 1, vocabulary, covered, target, noise, context)


def toy_pair(noise=0.7, constant=False):
    """A toy target, a draft that resembles it, and what else a pair has; `constant`: one law at
    every position."""
    target, draft = toy_models(noise=noise, context=512)
    if constant:
        for model in (target, draft):
            model.by_token = model.by_token[:1].expand(8, 8).clone()
            model.by_position, model.by_past = 0 * model.by_position, 0 * model.by_past
    return Pair(
        loaded(target),
        loaded(draft),
        SimpleNamespace(eos_token_id=None),
        {"target": {"name": "toy"}, "draft": {"name": "toy"}},
    )


def toy_decoder(tree, seed=0, noise=0.5, covered=None):
    """A decoder whose draft resembles its target."""
    return SequoiaDecoder(*toy_models(seed, noise, covered, 1 << 14), tree)


def first_tokens(decoder, prompt, seeds, length, sampling):
    """int64 [seeds, length]: a decoder's first tokens of one run for each seed."""
    prompt = torch.tensor(prompt)

    def again(prompt, max_new_tokens, seed, *, reuse, others):
        """In place of prefill: the caches still hold the prompt, and what lies beyond it is
        hidden."""
        decoder.step.sequence.generator.manual_seed(seed)
        decoder.step.sequence.length.fill_(prompt.numel() - 1)

    @torch.inference_mode()
    def first(seed):
        steps = decoder.steps(prompt, length, sampling, seed)
        return list(itertools.chain.from_iterable(step.tokens for step in steps))[:length]

    first(0)
    decoder.step.prefill = again
    return np.array([first(seed) for seed in seeds])


def text_inside_generate(model, draft, ids, **options):
    """What transformers' generate returns when it decodes with us; greedy by default."""
    defaults = dict(draft=draft, tree=TREE, do_sample=False, pad_token_id=0)
    return model.generate(ids, custom_generate=sequoia, **(defaults | options))


def naive_match(tokens, max_match, chain_length):
    """The length of the match and the lookup chain of a text, by definition."""
    last, best, end = len(tokens) - 1, 0, None
    for position in range(last):
        length = 0
        while length < max_match and length <= position:
            if tokens[position - length] != tokens[last - length]:
                break
            length += 1
        if length and length >= best:
            best, end = length, position
    text = list(tokens)
    for offset in range(chain_length if best else 0):
        text.append(text[end + 1 + offset])
    return best, text[len(tokens) :]
