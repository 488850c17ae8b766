"""What a drafter declares is what it does, and what is captured, or placed, is one decision
each."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from simulated import Simulated, simulate_capture
from toys import ToyModel

from drafts import PARTS, load, small_target, write
from sequoia_plan.artifacts import LANGUAGE_MODEL, ArgumentError, TokenTree
from sequoia_plan.runtime import Sampling, SequoiaDecoder, captured_step, load_pair
from sequoia_plan.runtime.draft.language_model import LanguageModelDrafter
from sequoia_plan.runtime.draft.self_draft import self_draft
from sequoia_plan.runtime.models import prepacked
from sequoia_plan.runtime.models.forward import TreeModel

TREE = TokenTree.from_parents([-1, 0, 0, 1, 1, 2, 3])
TREES = [
    TokenTree.chain(2),
    TokenTree.chain(5),
    TokenTree.star(4),
    TREE,
    TokenTree.from_parents([-1, *((node - 1) // 3 for node in range(1, 30))]),
]
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


def decoder(tree=TREE, **options):
    target = ToyModel(0, context=256)
    return SequoiaDecoder(target, ToyModel(1, base=target, noise=0.5, context=256), tree, **options)


def widths_of_a_step(decoder, monkeypatch):
    """Tokens in each pass of the draft during one step."""
    step, widths = decoder.step, []
    model = step.drafter.model

    def counted_pass(self, cache, tokens, *args, run=TreeModel.__call__, **options):
        if self is model:
            widths.append(tokens.numel())
        return run(self, cache, tokens, *args, **options)

    step.prefill(torch.arange(5) % 8, 40, seed=0)
    if isinstance(model, TreeModel):
        monkeypatch.setattr(TreeModel, "__call__", counted_pass)
    else:
        forward = model.forward
        monkeypatch.setattr(
            model, "forward", lambda *args: widths.append(args[0].shape[1]) or forward(*args)
        )
    with torch.inference_mode():
        step.refill_random_numbers(Sampling(1.0))
        step(64, Sampling(1.0))
    return widths


def make_pair(kind, folder):
    """A target, and a draft of each kind for it."""
    if kind == "language model":
        target = ToyModel(0, context=256)
        return target, ToyModel(1, base=target, noise=0.5, context=256)
    target = small_target().bfloat16()
    if kind == "int8":
        return target, self_draft(target)
    return target, load(write(folder, *PARTS[kind](target)), target)


@pytest.mark.parametrize("tree", TREES, ids=repr)
@pytest.mark.parametrize("kind", ["language model", "int8", *PARTS])
def test_declared_widths_are_those_of_the_passes(kind, tree, tmp_path, monkeypatch):
    decoder = SequoiaDecoder(*make_pair(kind, tmp_path / "draft"), tree)
    declared = decoder.step.drafter.drafting.pass_widths(tree.num_parents_by_level)
    assert widths_of_a_step(decoder, monkeypatch) == declared


def test_another_width_of_a_pass_shows(monkeypatch):
    """Negative control: a drafter that reads its first level without the token before the root."""
    passes = LanguageModelDrafter.passes

    def narrow(self, tree, tensors):
        first, *deeper = passes(self, tree, tensors)
        narrow_first = replace(
            first, input_slots=first.input_slots[1:], offsets=first.offsets[1:], mask=first.mask[1:]
        )
        return (narrow_first, *deeper)

    monkeypatch.setattr(LanguageModelDrafter, "passes", narrow)
    assert widths_of_a_step(decoder(), monkeypatch) != LANGUAGE_MODEL.pass_widths(
        TREE.num_parents_by_level
    )


def test_decoders_of_several_trees_share_a_sequence():
    """Whichever decodes, it says what a decoder of its own says; the memory is the same."""
    first = decoder()
    for tree in (TokenTree.chain(4), TokenTree.chain(1), TREE):
        for temperature in (0.0, 1.0):
            shared, alone = (
                each.generate([3, 1, 4], 30, temperature, seed=2).sequences
                for each in (first.with_tree(tree), decoder(tree))
            )
            assert torch.equal(shared, alone)
    assert first.with_tree(TREE).step.sequence is first.step.sequence


def test_random_numbers_of_other_settings_use_the_same_memory():
    """Greedy and sampled generations in turn, of trees that need fewer numbers: nothing is
    allocated anew, so graphs stay."""
    each = decoder()
    each.generate([3, 1, 4], 30, 1.0, seed=0)
    version = each.step.sequence.version
    for temperature, tree in ((0.0, TREE), (1.0, TREE), (1.0, TokenTree.chain(2)), (0.0, TREE)):
        each.with_tree(tree).generate([3, 1, 4], 20, temperature, seed=0)
    assert each.step.sequence.version == version


@pytest.mark.parametrize(
    ("fails", "captured"),
    [
        ((), {"step"}),
        (("step", "target"), {"draft", "verify"}),
        (("step", "draft"), {"target", "verify"}),
        (("step", "draft", "target", "verify"), set()),
    ],
)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)], ids=repr)
def test_only_the_parts_that_cannot_be_captured_run_as_they_are(fails, captured, sampling, recwarn):
    expected = decoder().generate([3, 1, 4], 60, sampling=sampling, seed=1).sequences
    each = decoder()
    simulate_capture(each.step)
    graphs = each.step.models.graphs
    graphs.fails = frozenset(fails)
    for _ in range(2):
        assert torch.equal(
            each.generate([3, 1, 4], 60, sampling=sampling, seed=1).sequences, expected
        )
    assert set(graphs.captures) == captured and len(graphs.captures) == len(graphs.graphs)
    assert {key[0] for key in graphs.failed} == set(fails)
    warned = [str(w.message) for w in recwarn if "cannot be captured" in str(w.message)]
    assert len(warned) == len(graphs.failed) and all("and more" not in line for line in warned)


def test_parts_known_to_be_uncapturable_are_not_tried():
    each = decoder()
    simulate_capture(each.step, {"step", "target"})
    graphs = each.step.models.graphs
    expected = decoder().generate([3, 1, 4], 60, 1.0, seed=1).sequences
    assert torch.equal(each.generate([3, 1, 4], 60, 1.0, seed=1).sequences, expected)
    assert set(graphs.captures) == {"draft", "verify"} and not graphs.failed


def test_new_memory_makes_new_graphs(monkeypatch):
    monkeypatch.setattr(captured_step, "EXTENT_MULTIPLE", {"cpu": 64, "cuda": 64})
    each = decoder()
    simulate_capture(each.step)
    graphs = each.step.models.graphs
    for prompt, tokens in (([3, 1, 4], 20), ([3, 1, 4], 20), ([3, 1, 4] * 20, 100)):
        expected = decoder().generate(prompt, tokens).sequences
        assert torch.equal(each.generate(prompt, tokens).sequences, expected)
    assert graphs.version == each.step.sequence.version == 2


def test_inputs_elsewhere_are_copied_to_where_the_graph_reads_them():
    """And a result of another graph, which is always in the same place, is not."""
    graphs = Simulated(torch.device("cpu"))
    run = lambda x: x + 1  # noqa: E731
    for value in range(3):
        assert graphs(("add",), run, list, (torch.tensor([value]),)).tolist() == [value + 1]
    assert graphs.captures == ["add"]


def test_placements():
    with pytest.raises(
        ArgumentError, match="placement: found 'attic', expected auto, resident, fused, repacked"
    ):
        load_pair(placement="attic")
    with pytest.raises(
        ArgumentError, match="placement repacked: no kernels for float16 on cpu; use fused"
    ):
        load_pair(dtype="float16", placement="repacked")


def test_where_weights_are_is_recorded(pair):
    best = "repacked" if prepacked.can_prepack(torch.float32, "cpu") else "fused"
    plain = load_pair(dtype="float32", placement="resident")
    fused = load_pair(dtype="float32", placement="fused")
    for each, placement in ((pair, best), (fused, "fused"), (plain, "resident")):
        kinds = {type(module) for model in (each.target, each.draft) for module in model.modules()}
        target, draft = each.metadata["target"], each.metadata["draft"]
        assert each.placement == target["placement"] == draft["placement"] == placement
        assert (prepacked.PrepackedLinear in kinds) == (placement == "repacked")
        assert ("fused_layers" in target) == (placement != "resident")
        assert target["digest"] == plain.metadata["target"]["digest"]
        assert draft["digest"] == plain.metadata["draft"]["digest"]
