"""The exact law of what one step of a real decoder puts out: every draw it could make is made, each
with its probability."""

import itertools
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import torch
from enumeration import continued, outcomes, pooled_p_value, without_replacement
from toys import first_tokens

from sequoia_plan.artifacts.state import State
from sequoia_plan.runtime import Sampling
from sequoia_plan.runtime.verify import VERIFIERS, DrawnTree


class Script:
    """Runs a program again and again until every choice it has was made."""

    def __init__(self):
        self.chosen, self.at = [], 0

    def choose(self, options):
        """One of `options`, [(value, probability)]; a later run takes the next."""
        if self.at == len(self.chosen):
            self.chosen.append([0, options])
        place, options = self.chosen[self.at]
        self.at += 1
        self.chance *= options[place][1]
        return options[place][0]

    def runs(self):
        """Begins each run."""
        while True:
            self.at, self.chance = 0, 1.0
            yield
            while self.chosen and self.chosen[-1][0] + 1 == len(self.chosen[-1][1]):
                self.chosen.pop()
            if not self.chosen:
                return
            self.chosen[-1][0] += 1


@dataclass(frozen=True)
class Scripted(Sampling):
    """A sampling whose children are chosen by a script.

    Args:
        shared: rows of logits that are equal, as those of one level of a block draft, take one draw
        together. Wrong for `traversal`.
        told: what verification is told of a law that was drawn from; anything but the law itself is
        wrong.
    """

    script: Script = field(default_factory=Script, compare=False)
    shared: bool = False
    told: object = None

    def draw_children(self, logits, count, bits):
        laws, drawn, known = self.draft_probs(logits), [], {}
        for law in laws.double().nan_to_num(0.0).numpy():  # NaN, or all 0: the draws are uniform
            key = law.tobytes() if self.shared else len(drawn)
            if key not in known:
                known[key] = self.script.choose(
                    list(without_replacement(law / (law.sum() or 1), count))
                )
            drawn.append(known[key])
        return (laws if self.told is None else self.told(laws)), torch.tensor(drawn)


def token_probs_of_texts(target, prompt, length, sampling):
    """float64 [vocabulary, ... `length` times, length]: the target's own probability of each token
    of every text after the prompt, read whole."""
    vocabulary = target.config.vocab_size
    texts = itertools.product(range(vocabulary), repeat=length)
    ids = torch.tensor([[*prompt, *text] for text in texts])
    logits = target(input_ids=ids, use_cache=False).logits[:, -length - 1 : -1]
    probs = sampling.target_probs(logits.flatten(0, 1)).double().unflatten(0, (-1, length))
    probs = (probs / probs.sum(-1, keepdim=True)).gather(-1, ids[:, -length:, None])
    return probs.reshape(*[vocabulary] * length, length).numpy()


def error_of_a_step(decoder, prompt, sampling, expected=None):
    """The largest difference between the distribution of the first tokens and the target's.

    The target is `expected`, if it is another one than the decoder's. There are as many tokens as
    the tree has levels. The prompt decides which tree the step has.
    """
    choice, drafted_chances = chances_of_a_step(decoder, prompt, sampling, State(0, 0))
    chances = Counter()
    for (said, _), chance in drafted_chances.items():
        chances[said] += chance
    target = expected or decoder.step.target.module
    return largest_difference(chances, target, prompt, choice.tree.depth, sampling)


def largest_difference(chances, target, prompt, length, sampling):
    """Between the texts that begin with what has these `chances`, and the target's own texts."""
    token_probs = token_probs_of_texts(target, prompt, length, sampling)
    return float(np.abs(continued(chances, token_probs) - token_probs.prod(-1)).max())


def error_of_steps(decoder, prompt, sampling, length, twin=None, cost_of=None):
    """The same of `length` tokens of as many steps as that takes, each with the tree of its state.

    `twin` takes a state and a step's drafted tokens and gives the state that chooses its tree;
    `cost_of` takes a choice and the drafted tokens and gives what the step is found to cost.
    """
    open_texts, chances = Counter({((), State(0, 0)): 1.0}), Counter()
    while open_texts:
        (text, state), probability = open_texts.popitem()
        if len(text) >= length:
            chances[text[:length]] += probability
            continue
        whole = [*prompt, *text]
        choice, of_step = chances_of_a_step(decoder, whole, sampling, state, twin)
        for (said, drafted), chance in of_step.items():
            cost = cost_of(choice, drafted) if cost_of else choice.cost
            following = state.after_step(choice._replace(cost=cost), len(said), 0)
            open_texts[(*text, *said), following] += probability * chance
    return largest_difference(chances, decoder.step.target.module, prompt, length, sampling)


def joint_law_p_value(decoder, prompt, length, runs, sampling):
    """Chi-square of the joint law of a decoder's first tokens against the exact one."""
    new = first_tokens(decoder, prompt, range(runs), length, sampling)
    target = decoder.step.target.module
    expected = token_probs_of_texts(target, prompt, length, sampling).prod(-1).flatten() * runs
    texts = np.ravel_multi_index(new.T, [target.config.vocab_size] * length)
    return pooled_p_value(np.bincount(texts, minlength=expected.size), expected)


@torch.inference_mode()
def chances_of_a_step(decoder, prompt, sampling, state, twin=None):
    """What a step after the prompt takes, and how probably it (puts out which tokens, has drafted
    which)."""
    step, script = decoder.step, sampling.script
    step.prefill(torch.tensor(prompt), 4 * max(t.depth for t in step.tree.all_trees), 0)
    match_length = int(step.look_up()) if step.lookup else 0
    choice = state.choose(decoder.choices_at(len(prompt) - 1, match_length))
    step = decoder.step_of_tree[choice.tree]
    tree, vocabulary = step.tree, step.target.module.config.vocab_size
    step.refill_random_numbers(sampling)
    covered, chances = step.drafter.d2t if step.drafter else None, Counter()
    for _ in script.runs():
        drafted = step.draft(64, sampling)
        logits = step.process_target(step.forward_target(64))
        tokens = tuple(step.sequence.tokens[len(prompt) - 1 :][: tree.size].tolist())
        p = sampling.target_probs(logits).double()
        if tree.size == 1 or (twin and twin(state, tokens[1:]).balance < 0):
            for token, probability in enumerate(p[0].tolist()):
                chances[(token,), tokens[1:]] += script.chance * probability
            continue
        draft_probs, drawn, looked_up = drafted.draft_probs, drafted.drawn, None
        if tree.looks_up:
            draft_probs, drawn = step.verifier.with_undrafted_rows(draft_probs, drawn, vocabulary)
            looked_up = step.verifier.looked_up_children(
                step.sequence.lookup_chain, sampling.verifier
            )
        drawn_tree = DrawnTree(
            p.__getitem__, draft_probs.double(), drawn, step.verifier.index, covered, looked_up
        )
        acceptance = VERIFIERS[sampling.verifier](drawn_tree)
        for said, probability in outcomes(acceptance, tree, tokens, drawn_tree):
            chances[said, tokens[1:]] += script.chance * probability
    assert abs(sum(chances.values()) - 1) < 1e-5
    return choice, chances
