"""The Triton kernels of verification and drawing against enumeration and the tensor versions: on a CUDA device, or without one by Triton's
interpreter on the CPU."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from enumeration import CASES, Case, independent, without_replacement
from toys import SMALL_TREES as TREES
from toys import ToyModel

from sequoia_plan.artifacts import TokenTree, load_tree
from sequoia_plan.runtime import Sampling, SequoiaDecoder, decode, sampling
from sequoia_plan.runtime.verify import VERIFIERS, TreeIndex, fused, greedy, verify
from sequoia_plan.runtime.verify.fused import RULES, Filters, Fused
from sequoia_plan.runtime.verify.verdict import Verdict

pytest.importorskip("triton", reason="Triton is not installed, which compiles or interprets the kernels", exc_type=ImportError)
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")]  # the interpreter computes with NumPy
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
interpreted = pytest.mark.skipif(DEVICE == "cuda", reason="kernels that are compiled cannot be changed from Python")
BLOCK = 2
"""Tokens that a program reads at once: laws take several blocks, the last of them not full."""
SMALL = TokenTree.from_parents([-1, 0, 0, 1])
WIDE = TokenTree.from_parents([-1, 0, 0, 0, 1, 1, 2, 4, 7])
DELTA = 1e-9


def decided(rule, change=lambda tree: None):
    """A `judge` that says what the kernels decide. They are asked just inside both ends of each interval that the tensor version gives a
    node, and each token after it: where both answers agree, the interval is theirs, else it is shared."""

    def judge(target, draft, drawn, index, covered=None):
        law = target(torch.arange(index.size))
        tree = Fused(Case.now.tree, DEVICE, covered, law.shape[1], BLOCK)
        given = [each.to(DEVICE) for each in (law.log(), draft, drawn)]
        change(tree)
        verdict = VERIFIERS[rule].judge(target, draft, drawn, index, covered)
        ends, tokens = torch.zeros(index.size, dtype=torch.float64), torch.zeros(index.size, law.shape[1], dtype=torch.float64)

        def ask(first, second):
            found = tree.verify(rule, given[0], Filters(1.0), *given[1:], torch.tensor([first, second], dtype=torch.float64, device=DEVICE))
            path, end = found.path.tolist(), int(found.path[int(found.count) - 1])
            assert path[: int(found.count)] == [n for n in index.paths[end].tolist() if n or path.index(n) == 0][: int(found.count)]
            return end, int(found.bonus)

        for node, low, high in intervals(verdict.ends, index.post_order):
            bonus = verdict.bonus_law(torch.tensor([node]), target, index, covered)[0]
            for _, left, right in intervals(bonus / bonus.sum(), torch.arange(bonus.numel())):
                share = (high - low) * (right - left)
                for end, token in (ask(low + DELTA, left + DELTA), ask(high - DELTA, right - DELTA)):
                    ends[end] += share / 2
                    tokens[end, token] += share / 2
        return Verdict(ends, None, index.together), tokens

    return judge


def intervals(weights, order):
    """Of [0, 1), what each entry of a law gets, laid out in `order`; entries without weight are left out."""
    edges = [0.0, *weights[order].double().cumsum(0).tolist()]
    return [(int(entry), low, high) for entry, (low, high) in zip(order, itertools.pairwise(edges), strict=True) if high - low > 4 * DELTA]


class Fixed(Verdict):
    """A verdict whose bonus laws are known."""

    def __init__(self, verdict, tokens):
        super().__init__(verdict.ends, verdict.left, verdict.order)
        object.__setattr__(self, "tokens", tokens)

    def bonus_law(self, end, target, index, covered=None):
        return self.tokens[end]


def error(case, rule, draws=without_replacement, change=lambda tree: None):
    """How far the law that the kernels put out is from the target's."""
    Case.now = case
    judge = decided(rule, change)
    return case.error(lambda *args: Fixed(*judge(*args)), draws)


ENUMERATED = {
    "random": SMALL,
    "zeros": TREES["chain"],
    "one-hot": TREES["lopsided"],
    "equal": TREES["chain"],
    "disjoint": TREES["star"],
    "reduced": TREES["chain"],
    "reduced-zeros": SMALL,
}
"""Every case with one tree: interpreted kernels take their time."""


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rule", RULES)
def test_output_law_is_the_targets(rule, case):
    assert error(Case(ENUMERATED[case], **CASES[case]), rule) < 1e-7


def no_residual(logits, laws, draft_of, tokens, inside, draft_vocabulary, highest, least, c, e, temperature, min_p, REDUCED, NUMBER):
    """Negative control: rejections leave the target's law as it was."""
    return KERNELS["shares"](logits, tokens, inside, highest, least, temperature, min_p, NUMBER)


KERNELS = {}


@interpreted
@pytest.mark.parametrize("rule", RULES)
def test_broken_kernels_fail(rule, monkeypatch):
    case = Case(SMALL, 3, [0, 1])
    assert error(case, rule) < 1e-7
    assert error(case, rule, independent) > 1e-3
    if rule == "traversal":
        reverse = lambda tree: setattr(tree, "post_order", torch.arange(tree.tree.size).flip(0))  # noqa: E731
        assert error(case, rule, change=reverse) > 1e-3
    kernels = fused.kernels()
    KERNELS["shares"] = kernels.shares
    monkeypatch.setattr(kernels, "left", no_residual)
    assert error(case, rule) > 1e-3


@interpreted
@pytest.mark.parametrize("rule", RULES)
def test_a_draft_whose_drawn_tokens_stay_fails(rule, monkeypatch):
    """Negative control: the mass before each child's turn is all of the draft's."""
    kernels = fused.kernels()
    real = kernels.nobodys

    def everything(laws, drawn, count, draft_vocabulary, NUMBER, BLOCK):
        return real(laws, drawn, count * 0, draft_vocabulary, NUMBER, BLOCK)

    monkeypatch.setattr(kernels, "nobodys", everything)
    assert error(Case(SMALL, 3), rule) > 1e-3


FILTERS = [{}, {"top_p": 0.8}, {"top_k": 3}, {"min_p": 0.1}, {"top_k": 5, "top_p": 0.9, "min_p": 0.05}]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("settings", "dtype"), [*((each, torch.float16) for each in FILTERS), (FILTERS[-1], torch.float32)], ids=str)
def test_they_decide_as_the_tensor_versions_do(rule, settings, dtype):
    """The same path and bonus token from the same random numbers, with every filter, also where the draft covers a part."""
    generator = torch.Generator().manual_seed(0)
    chosen, ends = Sampling(0.7, **settings), set()
    for tree, covered in itertools.product([TREES["both"], WIDE, TokenTree.chain(1)], [None, torch.tensor([1, 3, 4, 7, 8])]):
        width, inner = 9 if covered is None else 5, int((tree.child_count > 0).sum())
        logits = (torch.randn(tree.size, 9, generator=generator) * 2).to(dtype)
        laws = torch.softmax(torch.randn(inner, width, generator=generator) * 2, -1)
        drawn = torch.rand(inner, width, generator=generator).argsort(-1)[:, : tree.branching]
        uniforms = torch.rand(2, generator=generator, dtype=torch.float64)
        found = Fused(tree, DEVICE, covered, 9, 16).verify(rule, logits.to(DEVICE), chosen.filters, *(each.to(DEVICE) for each in (laws, drawn, uniforms)))
        law = lambda nodes, logits=logits: chosen.target(logits[nodes])  # noqa: E731
        expected = verify(VERIFIERS[rule], law, laws, drawn, TreeIndex.of(tree), uniforms, covered)
        assert plain(found) == plain(expected)
        ends.add(tuple(found.path.tolist()))
    assert len(ends) > 2


def plain(accepted):
    return accepted.path.tolist(), accepted.count.tolist(), accepted.bonus.tolist()


def test_greedy_is_the_tensor_version():
    generator = torch.Generator().manual_seed(0)
    longest = 0
    for tree in [*TREES.values(), WIDE, TokenTree.chain(1)] * 6:
        logits, tokens = torch.randn(tree.size, 5, generator=generator), torch.zeros(tree.size, dtype=torch.long)
        for node in np.flatnonzero(tree.child_count):
            children = slice(int(tree.first_child[node]), int(tree.first_child[node] + tree.child_count[node]))
            tokens[children] = torch.randperm(5, generator=generator)[: children.stop - children.start]
        found = Fused(tree, DEVICE, block=BLOCK).greedy(logits.to(DEVICE), tokens.to(DEVICE))
        assert plain(found) == plain(greedy(logits.argmax(-1), tokens, TreeIndex.of(tree)))
        longest = max(longest, int(found.count))
    assert longest > 2


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("rule", RULES)
def test_logits_that_are_not_finite_end_somewhere(rule, value):
    """With indices that exist: the step reports the fault afterwards."""
    logits, laws = torch.full((SMALL.size, 9), value, device=DEVICE), torch.full((2, 9), 1 / 9, device=DEVICE)
    drawn, uniforms = torch.arange(2, device=DEVICE).expand(2, 2).contiguous(), torch.tensor([0.5, 0.5], dtype=torch.float64, device=DEVICE)
    with np.errstate(all="ignore"):
        for settings in ({"top_p": 0.9},):
            found = Fused(SMALL, DEVICE, block=16).verify(rule, logits, Filters(0.7, **settings), laws, drawn, uniforms)
            assert 0 <= int(found.bonus) < 9 and 1 <= int(found.count) <= SMALL.depth


def test_races_are_drawn_as_the_tensor_version_draws():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 37, generator=generator) * 8
    logits[0, 5:] = -torch.inf  # fewer tokens than are drawn
    bits = torch.empty(5, 37, dtype=torch.int32).random_(generator=generator)
    laws, picks = (each.cpu() for each in fused.race(logits.to(DEVICE), 0.6, 9, bits.to(DEVICE), block=16))
    expected, chosen = Sampling(0.6).children(logits, 9, bits)
    torch.testing.assert_close(laws, expected, rtol=1e-5, atol=1e-9)
    assert torch.equal(picks, chosen)


@interpreted
@pytest.mark.parametrize("chosen", [Sampling(), Sampling(0.9, verifier="sequoia"), Sampling(0.9), Sampling(0.9, verifier="spectr")], ids=repr)
@pytest.mark.parametrize("covered", [None, [0, 2, 3, 5, 7]])
def test_a_decoder_says_the_same_with_kernels(chosen, covered, monkeypatch):
    """Whole texts: what a decoder on CUDA runs, step by step, and a rule without kernels beside it."""
    target = ToyModel(0, context=256)
    draft = ToyModel(1, base=target, noise=0.5, covered=covered, context=256)
    expected = SequoiaDecoder(target, draft, WIDE).generate([3, 1, 4], 12, sampling=chosen, seed=3).sequences
    for module in (decode, sampling):
        monkeypatch.setattr(module, "available", lambda device: True)
    monkeypatch.setattr(decode, "on_one_cuda_device", lambda model: model is target)
    monkeypatch.setattr(decode, "Fused", lambda *args: Fused(*args, block=16))
    monkeypatch.setattr(sampling, "race", lambda *args: fused.race(*args, block=16))
    each = SequoiaDecoder(target, draft, WIDE, captured=False)
    runs = []
    for name, run in {"greedy": each.fused.greedy, "verify": each.fused.verify}.items():
        monkeypatch.setattr(each.fused, name, lambda *args, run=run, name=name: runs.append(name) or run(*args))
    result = each.generate([3, 1, 4], 12, sampling=chosen, seed=3)
    assert torch.equal(result.sequences, expected)
    assert runs == [] if chosen.verifier == "spectr" else runs == ["greedy" if chosen.greedy else "verify"] * result.steps


COMPILE = """
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from sequoia_plan.runtime.verify import kernels

NUMBERS = {"temperature": "fp32", "top_k": "i32", "top_p": "fp32", "min_p": "fp32", "logits": "*bf16", "laws": "*fp32", "state": "*fp32", "keys": "*fp32",
    "bits": "*i32", "uniforms": "*fp64", "accepted": "*fp64"} | dict.fromkeys(("vocabulary", "draft_vocabulary", "branching", "depth", "size"), "i32")
CONSTANT = {"NUMBER": tl.float32, "LOW_BIT": 16, "BLOCK": 4096, "CHILDREN": 8, "LEVELS": 16, "NODES": 128}
for name, choice in (*((name, True) for name in ("greedy", "race", "sequoia", "prepare", "judge", "settle")), ("sequoia", False)):
    kernel, constant = getattr(kernels, name), CONSTANT | {"REDUCED": choice, "FILTER": choice}
    signature = {each: "constexpr" if each in constant else NUMBERS.get(each, "*i64") for each in kernel.arg_names}
    source = ASTSource(kernel, signature, {each: constant[each] for each in kernel.arg_names if each in constant})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 16})
    print(name, len(made.asm["cubin"]) > 0, made.metadata.shared)
"""


def test_they_compile_for_a_gpu_that_is_not_here(tmp_path):
    """To machine code of sm_90, with and without filters and a reduced vocabulary."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    lines = [line.split() for line in run.stdout.splitlines()]
    assert len(lines) == 7 and all(made == "True" and int(shared) < 1 << 15 for _, made, shared in lines)


@pytest.mark.parametrize(("name", "rounds"), [("llama3-70b-8b-cnn-128x10", 10), ("llama3-70b-8b-cnn-768x18", 18)])
def test_traversal_takes_few_rounds(name, rounds):
    """Every child is judged once, after its parent and after its earlier siblings; no more rounds than the longest such wait."""
    tree = load_tree(name)
    each, done = Fused(tree, "cpu"), {0: -1}
    assert len(each.rounds) == rounds
    for now, (rows, ranks) in enumerate(each.rounds):
        for node, rank in zip(each.inner[rows].tolist(), ranks.tolist(), strict=True):
            child = int(tree.first_child[node]) + rank
            assert child not in done and done[node] < now and (rank == 0 or done[child - 1] < now)
            done[child] = now
    assert len(done) == tree.size
