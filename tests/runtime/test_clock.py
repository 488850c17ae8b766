"""Which trees steps take on a machine that is not as planned: the tests move its clock."""

from functools import partial

import pytest
import torch
from toys import planned, toy_models

from sequoia_plan.artifacts import Acceptance, Latency, TokenTree
from sequoia_plan.artifacts.state import FIRST_BALANCE, LONG_MEMORY, MAX_LOSS
from sequoia_plan.runtime import Sampling, SequoiaDecoder
from sequoia_plan.runtime.clock import PLAIN_SHAPE, SHARE

PLANNED = {1: 1.0, 2: 1.1, 4: 1.3, 8: 1.7}
PROMPT = torch.tensor([1, 2, 3])


class Machine:
    """A decoder whose steps move the clock by what `seconds` has for their nodes."""

    def __init__(self, noise=0.0, **seconds):
        latency = Latency(PLANNED, {1: 1e-9, 8: 1e-9}, context=1000)
        acceptance = Acceptance.given([[0.6, 0.2]])
        tree = planned(TokenTree.chain(4), PLANNED[4], 2.2, latency=latency, acceptance=acceptance)
        self.decoder = SequoiaDecoder(*toy_models(noise=noise, context=2048), tree)
        self.seconds, self.time, self.sizes = PLANNED, 0.0, []
        self.decoder.clock.now = lambda: self.time
        for tree, step in self.decoder.step_of_tree.items():
            step.launch = partial(self.launch, step.launch, tree.size)

    def launch(self, launch, size, *arguments):
        """Starts a step."""
        self.time += self.seconds[size]
        self.sizes.append(size)
        return launch(*arguments)

    def text(self, count=200, **settings):
        """The nodes of each step of a text, how long it takes beside plain steps, and the text."""
        num_before, self.time = len(self.sizes), 0.0
        result = self.decoder.generate(PROMPT, count, **settings)
        cost = self.time / self.seconds[1] / result.new_tokens
        return self.sizes[num_before:], cost, result.sequences


def costs(factor, common=1.0):
    """Seconds of steps where trees take `factor` times what is planned."""
    return {n: common * (seconds if n == 1 else factor * seconds) for n, seconds in PLANNED.items()}


@pytest.mark.parametrize(("factor", "best"), [(10, 1), (1, 4), (0.1, 4)])
def test_a_plan_that_is_wrong_is_left_and_a_right_one_kept(factor, best):
    """After the first text, and with texts that the draft knows by heart."""
    machine = Machine()
    machine.seconds = costs(factor, common=3.0)
    machine.text()
    sizes, cost, _ = machine.text()
    assert sizes.count(best) > 0.8 * len(sizes)
    assert cost < 1.03


def test_a_machine_that_slows_down_has_its_best_tree_within_64_tokens():
    """Once all steps alike, which changes no tree, and once wide ones."""
    machine = Machine()
    machine.text()
    machine.seconds = costs(1.0, common=2.5)
    assert machine.text(400)[0][-10:] == [4] * 10
    machine = Machine()
    machine.text(400)
    machine.seconds = PLANNED | {4: 2.6, 8: 5.5}
    sizes = machine.text(264)[0]
    num_before = next(i for i in range(len(sizes)) if sum(sizes[:i]) >= 64)
    assert sizes[num_before:].count(2) > 0.9 * len(sizes[num_before:])


def test_a_clock_that_jumps_changes_no_choice(monkeypatch):
    """Ahead by an hour, as after a sleep, back, and not at all: one step each, a means' share."""
    shares = []
    for jump in (3600.0, -3600.0, -PLANNED[4], 3600.0):
        if len(shares) == 3:  # the control: a step moves its mean by all that it differs
            monkeypatch.setattr("sequoia_plan.runtime.clock.MAX_CHANGE", 99.0)
        machine = Machine()
        machine.text(300)
        machine.seconds = PLANNED | {4: PLANNED[4] + jump}
        while machine.text(1)[0] != [4]:
            pass
        machine.seconds = PLANNED
        sizes = machine.text(60)[0]
        shares.append(sizes.count(4) / len(sizes))
    assert min(shares[:3]) > 0.9 > shares[3]


def test_what_texts_lost_is_remembered_and_not_with_a_seed():
    machine = Machine(noise=9.0)
    machine.text(60)
    state = machine.decoder.state
    assert state.balance != FIRST_BALANCE
    machine.decoder.state = state._replace(balance=-0.5)
    assert machine.text(30, seed=1)[0][0] > 1
    assert set(machine.text(20)[0]) == {1}
    assert machine.decoder.state.balance == pytest.approx(-0.5 + 20 * MAX_LOSS)


def test_what_all_texts_accepted_counts_in_the_next(monkeypatch):
    """The control forgets it after each step."""
    counts = []
    for memory in (LONG_MEMORY, 1):
        monkeypatch.setattr("sequoia_plan.artifacts.state.LONG_MEMORY", memory)
        machine = Machine(noise=9.0)
        machine.seconds = costs(1.6)
        texts = [machine.text(60)[0] for _ in range(12)]
        counts.append(sum(size > 1 for sizes in texts[4:] for size in sizes))
    assert counts[0] <= 1 < 8 <= counts[1]


def test_plain_steps_are_timed_again_while_trees_are_taken(monkeypatch):
    """They have become faster than any tree; the control never looks."""
    shares = []
    for share in (SHARE, 0.0):
        monkeypatch.setattr("sequoia_plan.runtime.clock.SHARE", share)
        machine = Machine()
        machine.seconds = costs(2.3)
        machine.text(300)
        machine.seconds[1] = 0.5
        machine.text(1800)
        shares.append(machine.sizes[-100:].count(1))
    assert shares == [100, 0]


def test_a_seed_means_one_text_whatever_steps_take():
    machine = Machine(noise=0.5)
    sampling, texts = Sampling(1.0), []
    for factor in (1, 10, 0.1):
        machine.seconds = costs(factor)
        sizes, _, text = machine.text(60, seed=5, sampling=sampling)
        texts.append((sizes, text.tolist()))
    assert texts[0] == texts[1] == texts[2]
    machine.seconds = costs(10)
    assert machine.text(60, seed=5, sampling=sampling, timed=True)[0] != texts[0][0]


def test_a_pair_is_timed_once(caplog):
    """Decoders with other trees know its times; that it does not keep to its plan is said once."""
    machine = Machine()
    machine.seconds = costs(10)
    for _ in range(3):
        machine.text()
    assert [record.getMessage()[:46] for record in caplog.records] == [
        "steps with the plan's tree take 10.00 times as"
    ]
    machine.decoder = machine.decoder.with_tree(machine.decoder.step.tree)
    assert machine.decoder.clock.counts[PLAIN_SHAPE] > 2
