"""Processors whose state changes, at once or in the middle of a text."""

from collections import Counter
from functools import partial

import pytest
import torch
from toys import TREE, toy_decoder

from sequoia_plan.artifacts import ArgumentError
from sequoia_plan.runtime.constraints import logits_processors

THINKING = 6
"""From so many new tokens on, a budget forces a token."""


class Budget:
    """Counts calls after a token, as those for a thinking budget do."""

    def __init__(self, kept):
        self.kept = kept

    def __call__(self, ids, scores):
        if ids.shape[1] > THINKING:
            self.kept["after"] += 1
        return scores if self.kept["after"] < 5 else scores.index_fill(1, torch.tensor([3]), 50.0)


class Nested(Budget):
    """The same with its count in an object of its own."""

    def __init__(self):
        super().__init__(Counter())
        self.state = [type("State", (), {})()]
        self.state[0].count = 0

    def __call__(self, ids, scores):
        self.state[0].count += ids.shape[1] > THINKING
        return scores if self.state[0].count < 5 else scores.flip(1)


def in_closure():
    """The same with its count in a closure."""
    kept = [0.0, torch.zeros(2)]

    def processor(ids, scores):
        kept[1][1] += ids.shape[1] > THINKING
        return scores if kept[1][1] < 5 else scores.flip(1)

    return processor


def counting(ids, scores, kept):
    """The same with its count in what a partial holds."""
    return Budget(kept)(ids, scores)


def pure(ids, scores, table):
    """Depends on the token before alone."""
    return scores.index_fill(1, ids[:, -1] % len(table), float(table.max()) - 60)


CHANGING = {
    "attribute": lambda: Budget(Counter()),
    "nested": Nested,
    "closure": in_closure,
    "partial": lambda: partial(counting, kept=Counter()),
    "method": lambda: Budget(Counter()).__call__,
}


def texts(processor):
    """Texts of a tree and of plain decoding."""
    decoder = toy_decoder(TREE)
    options = dict(max_new_tokens=24, temperature=0, logits_processor=[processor()])
    tree = decoder.generate([5, 1, 2], **options).sequences
    ids, processors = torch.tensor([[5, 1, 2]]), [processor()]
    for _ in range(24):
        logits = decoder.step.target.module(ids).logits[:, -1]
        for process in processors:
            logits = process(ids, logits.clone())
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
    return tree, ids


@pytest.mark.parametrize("kind", CHANGING)
def test_a_state_that_changes_in_the_middle_of_a_text_is_refused(kind, monkeypatch):
    with pytest.raises(ArgumentError, match="changes from call to call"):
        texts(CHANGING[kind])
    monkeypatch.setattr(logits_processors, "_state", lambda processor: None)
    tree, plain = texts(CHANGING[kind])
    assert not tree.equal(plain), "the control: a tree calls it for more than the text"


@pytest.mark.parametrize("number", [0.0, float("nan"), float("inf")])
def test_a_function_of_the_tokens_is_taken(number):
    processor = partial(pure, table=torch.tensor([number, 1.0, 0.5]).nan_to_num(0, 0))
    processor.unread = [torch.tensor([number, -number]), {"again": processor}, [1, {2}]]
    tree, plain = texts(lambda: processor)
    assert tree.equal(plain)
