"""Every draw of a whole tree and every outcome: the exact law of what a verifier puts out, and the draws it is exact for."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import torch

from sequoia_plan.runtime.verify import TreeIndex


def without_replacement(q, count):
    """Every ordered draw of `count` tokens without replacement, with its probability; uniform once q is exhausted."""
    for order in itertools.permutations(range(len(q)), count):
        probability, left = 1.0, q.copy()
        free = np.ones(len(q), bool)
        for token in order:
            law = left / left.sum() if left.sum() > 0 else free / free.sum()
            probability *= law[token]
            left[token], free[token] = 0, False
        if probability > 0:
            yield order, probability


def independent(q, count):
    """Every ordered draw of `count` tokens with replacement."""
    for order in itertools.product(np.flatnonzero(q).tolist(), repeat=count):
        yield order, np.prod(q[list(order)])


def most_probable(q, count):
    """The one draw there is."""
    yield tuple(torch.tensor(q).topk(count).indices.tolist()), 1.0


class Case:
    """A target's and a draft's law after every context; contexts start with the root's token, 0."""

    def __init__(self, tree, vocabulary, covered=None, zeros=(0, 0), seed=0, kind="random"):
        self.tree, self.vocabulary, self.covered = tree, vocabulary, covered or list(range(vocabulary))
        self.index, self.length = TreeIndex.of(tree), tree.depth
        generator = np.random.default_rng(seed)
        contexts = [(0, *tokens) for length in range(self.length) for tokens in itertools.product(range(vocabulary), repeat=length)]
        self.target = self.laws(generator, contexts, vocabulary, zeros[0])
        self.draft = self.laws(generator, contexts, len(self.covered), zeros[1])
        if kind == "equal":
            self.draft = {context: law.copy() for context, law in self.target.items()}
        if kind == "disjoint":
            for context in contexts:
                half = np.arange(vocabulary) < vocabulary // 2
                for laws, kept in ((self.target, half), (self.draft, ~half)):
                    laws[context] = laws[context] * kept / (laws[context] * kept).sum()

    @staticmethod
    def laws(generator, contexts, size, zeros):
        found = {}
        for context in contexts:
            p = generator.dirichlet(np.full(size, 0.7))
            p[generator.permutation(size)[:zeros]] = 0
            found[context] = p / p.sum()
        return found

    def context(self, node, tokens):
        return tuple(tokens[n] for n in np.flatnonzero(self.tree.attention_mask[node]))

    def assignments(self, draws, row=0, tokens=None):
        """Every way to draw the whole tree: (drawn indices by inner node, tokens by node, probability)."""
        tokens = tokens or {0: 0}
        inner = np.flatnonzero(self.tree.child_count)
        if row == len(inner):
            yield {}, dict(tokens), 1.0
            return
        parent = int(inner[row])
        for order, probability in draws(self.draft[self.context(parent, tokens)], int(self.tree.child_count[parent])):
            for rank, drawn in enumerate(order):
                tokens[int(self.tree.first_child[parent]) + rank] = self.covered[drawn]
            for rest, whole, p in self.assignments(draws, row + 1, tokens):
                yield {parent: order} | rest, whole, probability * p

    def output(self, judge, draws):
        """The law of the first tokens (verified ones, the bonus token, then the target's own), and the expected tokens a step."""
        prefixes, expected = Counter(), 0.0
        inner = [int(n) for n in np.flatnonzero(self.tree.child_count)]
        covered = None if len(self.covered) == self.vocabulary else torch.tensor(self.covered)
        for drawn, tokens, chance in self.assignments(draws):
            contexts = [self.context(node, tokens) for node in range(self.tree.size)]
            p = torch.tensor(np.array([self.target[c] for c in contexts]))
            q = torch.tensor(np.array([self.draft[contexts[node]] for node in inner]))
            picks = torch.zeros(len(inner), self.tree.branching, dtype=torch.long)
            for row, node in enumerate(inner):
                picks[row, : len(drawn[node])] = torch.tensor(drawn[node])
            verdict = judge(p.__getitem__, q, picks, self.index, covered)
            for node, end in enumerate(verdict.ends.tolist()):
                if end > 1e-15:
                    bonus = verdict.bonus_law(torch.tensor([node]), p.__getitem__, self.index, covered)[0]
                    for token, b in enumerate((bonus / bonus.sum()).tolist()):
                        prefixes[(*contexts[node], token)] += chance * end * b
                    expected += chance * end * (int(self.tree.position_ids[node]) + 1)
        law = np.zeros([self.vocabulary] * self.length)
        for prefix, probability in prefixes.items():
            for rest in itertools.product(range(self.vocabulary), repeat=self.length + 1 - len(prefix)):
                law[(*prefix[1:], *rest)] += probability * self.continuation(prefix, rest)
        return law, expected

    def continuation(self, prefix, rest):
        return np.prod([self.target[(*prefix, *rest[:i])][token] for i, token in enumerate(rest)])

    def error(self, judge, draws):
        """The largest difference of the output law from the target's."""
        law, _ = self.output(judge, draws)
        expected = [self.continuation((0,), tokens) for tokens in itertools.product(range(self.vocabulary), repeat=self.length)]
        return np.abs(law.reshape(-1) - expected).max()


CASES = {
    "random": dict(vocabulary=3),
    "zeros": dict(vocabulary=3, zeros=(1, 1)),
    "one-hot": dict(vocabulary=3, zeros=(2, 2)),
    "equal": dict(vocabulary=3, kind="equal"),
    "disjoint": dict(vocabulary=4, kind="disjoint"),
    "reduced": dict(vocabulary=4, covered=[0, 2, 3]),
    "reduced-zeros": dict(vocabulary=4, covered=[3, 1, 2], zeros=(1, 2)),
}
