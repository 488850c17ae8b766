"""The exact output distribution of a verifier, by enumeration of every drawn tree and outcome.

Also the draws that the verifiers are exact for, with the probability of each.
"""

import itertools
from collections import Counter

import numpy as np
import torch
from scipy.stats import chisquare

from sequoia_plan.runtime.verify import DrawnTree, TreeIndex


def normalised(weights):
    return weights / weights.sum()


def without_replacement(q, count):
    """Every ordered draw of `count` tokens without replacement, with its probability.

    Draws are uniform once q is exhausted.
    """
    for order in itertools.permutations(range(len(q)), count):
        probability, remaining = 1.0, q.copy()
        undrawn = np.ones(len(q), bool)
        for token in order:
            weights = remaining if remaining.sum() > 0 else undrawn
            probability *= normalised(weights)[token]
            remaining[token], undrawn[token] = 0, False
        if probability > 0:
            yield order, probability


def exact_acceptance(p, q, count):
    """float64 [count]: how often each child is accepted, by the definition of Sequoia's rule."""
    acceptance = np.zeros(count)
    for order, probability in without_replacement(q, count):
        residual, draft_probs, left = p, q, 1.0
        for rank, child in enumerate(order):
            accept_prob = min(1, residual[child] / draft_probs[child])
            acceptance[rank] += probability * left * accept_prob
            left *= 1 - accept_prob
            if left < 1e-12:
                break
            residual = normalised(np.maximum(residual - draft_probs, 0))
            draft_probs = normalised(np.where(np.arange(len(q)) == child, 0, draft_probs))
    return acceptance


def independent(q, count):
    """Every ordered draw of `count` tokens with replacement, with its probability."""
    for order in itertools.product(np.flatnonzero(q).tolist(), repeat=count):
        yield order, np.prod(q[list(order)])


def most_probable(q, count):
    """The only possible draw, of probability 1."""
    yield tuple(torch.tensor(q).topk(count).indices.tolist()), 1.0


def chi_square(drawn, probs):
    """p-value of the drawn orders under `probs`; 0 if an order of probability 0 was drawn."""
    counts = Counter(map(tuple, drawn.tolist()))
    if counts.keys() - probs.keys():
        return 0.0
    expected = [probability * len(drawn) for probability in probs.values()]
    return chisquare([counts[order] for order in probs], expected).pvalue


def pooled_p_value(observed, expected):
    """p-value of counts; outcomes that are expected less than 5 times are one."""
    rare = expected < 5
    pooled = [np.append(x[~rare], x[rare].sum()) if rare.any() else x for x in (observed, expected)]
    return chisquare(*pooled).pvalue


def outcomes(acceptance, tree, tokens, drawn_tree):
    """Every (tokens that a step says, probability), by the nodes' `tokens`: the accepted ones after
    the root, and the bonus token."""
    for node, end_prob in enumerate(acceptance.end_probs.tolist()):
        if end_prob > 1e-15:
            accepted = [tokens[n] for n in np.flatnonzero(tree.attention_mask[node])[1:]]
            bonus = acceptance.bonus_probs(torch.tensor([node]), drawn_tree)[0]
            for token, bonus_prob in enumerate(normalised(bonus).tolist()):
                yield (*accepted, token), end_prob * bonus_prob


def continued(chances, token_probs):
    """The distribution of texts that begin with one of the outcomes in `chances` and then are the
    target's own, of which `token_probs` [vocabulary, ..., length] has each token's probability."""
    probs = np.zeros(token_probs.shape[:-1])
    for said, chance in chances.items():
        probs[said] += chance * token_probs[said][..., len(said) :].prod(-1)
    return probs


class Case:
    """A target's and a draft's probabilities after every context.

    A context is a tuple of tokens that starts with the root's token, 0.

    Args:
        d2t: the target's token for each of the draft's tokens; None if they are the same.
        zeros: how many tokens of the target, and of the draft, have probability 0.
        relation: of the draft to the target: "random", "equal" or "disjoint".
    """

    def __init__(self, tree, vocabulary, d2t=None, zeros=(0, 0), seed=0, relation="random"):
        self.tree, self.vocabulary = tree, vocabulary
        self.d2t = d2t or list(range(vocabulary))
        self.index, self.length = TreeIndex.of(tree), tree.depth
        generator = np.random.default_rng(seed)
        contexts = [
            (0, *tokens)
            for length in range(self.length)
            for tokens in itertools.product(range(vocabulary), repeat=length)
        ]
        self.target = self.random_probs(generator, contexts, vocabulary, zeros[0])
        self.draft = self.random_probs(generator, contexts, len(self.d2t), zeros[1])
        if relation == "equal":
            self.draft = {context: probs.copy() for context, probs in self.target.items()}
        if relation == "disjoint":
            is_targets = np.arange(vocabulary) < vocabulary // 2
            for context in contexts:
                for probs, support in ((self.target, is_targets), (self.draft, ~is_targets)):
                    probs[context] = normalised(probs[context] * support)

    @staticmethod
    def random_probs(generator, contexts, size, zeros):
        probs = {}
        for context in contexts:
            p = generator.dirichlet(np.full(size, 0.7))
            p[generator.permutation(size)[:zeros]] = 0
            probs[context] = normalised(p)
        return probs

    def d2t_tensor(self):
        """`d2t` as verifiers take it: None if the draft has the target's vocabulary."""
        return None if len(self.d2t) == self.vocabulary else torch.tensor(self.d2t)

    def context(self, node, tokens):
        return tuple(tokens[n] for n in np.flatnonzero(self.tree.attention_mask[node]))

    def assignments(self, draws, row=0, tokens=None):
        """Every way to draw the whole tree.

        Yields:
            The drawn indices by inner node, the tokens by node, the probability.
        """
        tokens = tokens or {0: 0}
        inner = np.flatnonzero(self.tree.child_count)
        if row == len(inner):
            yield {}, dict(tokens), 1.0
            return
        parent = int(inner[row])
        first_child, count = int(self.tree.first_child[parent]), int(self.tree.child_count[parent])
        for order, probability in draws(self.draft[self.context(parent, tokens)], count):
            for rank, drawn in enumerate(order):
                tokens[first_child + rank] = self.d2t[drawn]
            for later_draws, all_tokens, p in self.assignments(draws, row + 1, tokens):
                yield {parent: order} | later_draws, all_tokens, probability * p

    def drawn_tree(self, drawn, tokens):
        """What a verifier takes for one of the `assignments`; probabilities are float64."""
        inner = np.flatnonzero(self.tree.child_count).tolist()
        contexts = [self.context(node, tokens) for node in range(self.tree.size)]
        p = torch.tensor(np.array([self.target[context] for context in contexts]))
        q = torch.tensor(np.array([self.draft[contexts[node]] for node in inner]))
        children = torch.zeros(len(inner), self.tree.branching, dtype=torch.long)
        for row, node in enumerate(inner):
            children[row, : len(drawn[node])] = torch.tensor(drawn[node])
        return DrawnTree(p.__getitem__, q, children, self.index, self.d2t_tensor())

    def output(self, accept, draws):
        """The output distribution with the verifier `accept`, and the expected tokens a step.

        The output are the first tokens: accepted ones, the bonus token, then the target's own.

        Args:
            accept: a verifier's `acceptance`.
            draws: one of the enumerations above.
        """
        chances = Counter()
        for drawn, tokens, chance in self.assignments(draws):
            tree = self.drawn_tree(drawn, tokens)
            for said, probability in outcomes(accept(tree), self.tree, tokens, tree):
                chances[said] += chance * probability
        expected_tokens = sum(chance * len(said) for said, chance in chances.items())
        return continued(chances, self.token_probs()), expected_tokens

    def token_probs(self):
        """The target's probability of each token of every text that follows the root."""
        probs = np.empty([*[self.vocabulary] * self.length, self.length])
        for text in itertools.product(range(self.vocabulary), repeat=self.length):
            contexts = [(0, *text[:i]) for i in range(self.length)]
            probs[text] = [self.target[contexts[i]][token] for i, token in enumerate(text)]
        return probs

    def error(self, accept, draws):
        """The largest difference of the output distribution from the target's."""
        probs, _ = self.output(accept, draws)
        return np.abs(probs - self.token_probs().prod(-1)).max()


CASES = {
    "random": dict(vocabulary=3),
    "zeros": dict(vocabulary=3, zeros=(1, 1)),
    "one-hot": dict(vocabulary=3, zeros=(2, 2)),
    "equal": dict(vocabulary=3, relation="equal"),
    "disjoint": dict(vocabulary=4, relation="disjoint"),
    "reduced": dict(vocabulary=4, d2t=[0, 2, 3]),
    "reduced-zeros": dict(vocabulary=4, d2t=[3, 1, 2], zeros=(1, 2)),
}
