"""The packed pass against transformers, and its rows against each other, bit for bit."""

import copy
import gc
import weakref
from random import Random

import pytest
import torch
from architectures import PACKED, plain_text, resembling, tiny, tokens_of
from forking import fork, status_of
from refusals import refusal
from spies import spy
from toys import PLAIN
from workers import interrupt_first_worker, use_workers

from drafts import logits_of_tree
from sequoia_plan.artifacts import ArgumentError, TokenTree
from sequoia_plan.models.backends import loaded, loaded_as
from sequoia_plan.models.base.masks import causal_mask
from sequoia_plan.models.base.tree_tensors import TreeTensors
from sequoia_plan.models.files.stored import decoded_rows
from sequoia_plan.models.packed import packed_pass
from sequoia_plan.models.packed.from_module import PackedModule
from sequoia_plan.models.packed.tiles import round_rows
from sequoia_plan.runtime import Sampling, SequoiaDecoder, load_pair
from sequoia_plan.runtime.draft import packed_eagle as eagle

pytestmark = pytest.mark.slow

MODELS = {
    "Llama": {},
    "Llama, tied": dict(tie_word_embeddings=True, num_key_value_heads=4),
    "Mistral": dict(sliding_window=12),
    "Qwen2": {},
    "Qwen3": dict(num_key_value_heads=1, num_attention_heads=5),
}
TREE = TokenTree([-1, 0, 0, 1, 1, 2, 3, 3, 6])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
LENGTH = 21
"""Committed tokens before the tree."""


def model_of(name, dtype=torch.float32, **changes):
    return tiny(name.partition(",")[0], **{**PACKED, **MODELS[name], **changes}).to(dtype)


def read(target, cache, tokens, start, mask=None, offsets=None):
    """The logits of tokens in the slots from `start` on."""
    slots = torch.arange(start, start + len(tokens))
    positions = slots if offsets is None else start + offsets
    if mask is None:
        mask = causal_mask(slots, start + len(tokens), torch.float32)
    return target.forward(cache.at(slots, mask.shape[1]), tokens, positions, mask, 0, ())[0]


def logits_of(target, tokens):
    return read(target, target.new_cache(len(tokens), counts_positions=False), tokens, 0)


def relative_error(found, right):
    return float((found - right).norm() / right.norm())


def packed(model, workers=1, bits=None):
    """The backend of a model, with so many threads."""
    backend = PackedModule(model, bits)
    use_workers(backend, workers)
    return backend


def tree_and_paths(target, tokens):
    """The logits of a tree's nodes as read at once, and as each is read alone after its path.

    The last `LENGTH` tokens before the tree are read alone, too.
    """
    length = len(tokens) - TREE.size
    capacity, nodes = length + 43, tokens[length:]
    tensors = TreeTensors.of(TREE, "cpu", torch.float32)
    shared = target.new_cache(capacity, counts_positions=False)
    read(target, shared, tokens[:length], 0)
    mask = tensors.mask[:, tensors.columns(torch.tensor([length]), capacity)]
    at_once = read(target, shared, nodes, length, mask, tensors.offsets)
    alone = []
    for node in range(TREE.size):
        cache = target.new_cache(capacity, counts_positions=False)
        cache.take(shared, length - LENGTH)
        path = torch.cat([tokens[:length], nodes[TREE.attention_mask[node].nonzero()[0]]])
        for place in range(length - LENGTH, len(path)):
            logits = read(target, cache, path[place, None], place)
        alone.append(logits[0])
    return at_once, torch.stack(alone)


@dtypes
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name, dtype):
    model = model_of(name, dtype)
    target, tokens = packed(model), tokens_of(10)
    exact = copy.deepcopy(model).float()
    with torch.inference_mode():
        expected = exact(tokens[None]).logits[0]
        theirs = relative_error(model(tokens[None]).logits[0].float(), expected)
    ours = relative_error(logits_of(target, tokens), expected)
    assert ours < (1e-5 if dtype == torch.float32 else theirs)


@pytest.mark.parametrize("name", MODELS)
def test_decoding_equals_transformers(name):
    """With a draft of the same architecture, a window, rejections, and a text beyond the window."""
    target = model_of(name)
    draft = resembling(target)
    prompt = tokens_of(9)[None]
    expected = plain_text(target, prompt, 60)
    for model in (target, draft):
        assert isinstance(loaded(model).backend, PackedModule)
    result = SequoiaDecoder(target, draft, TREE).generate(prompt, 60)
    assert result.sequences.equal(expected)
    assert 60 / 9 < result.steps < 60  # some nodes were accepted, and some rejected


@pytest.mark.parametrize("length", [LENGTH, 4001])
@dtypes
def test_a_tree_gives_the_bits_of_its_paths(dtype, length):
    """Whatever stands beside a row, and with any number of threads."""
    model, tokens = model_of("Llama", dtype), tokens_of(length + TREE.size)
    by_workers = []
    for workers in (1, 2, 3):
        at_once, alone = tree_and_paths(packed(model, workers), tokens)
        assert at_once.equal(alone)
        by_workers.append(at_once)
    assert by_workers[0].equal(by_workers[1]) and by_workers[0].equal(by_workers[2])


def test_the_embedded_file_gives_the_bits_of_its_paths():
    """In its own bits, 4 and 8, where a last bit that differs grows by rounding."""
    target = load_pair(draft="none").target.backend
    tokens = torch.arange(1000, 1000 + LENGTH + TREE.size)
    at_once, alone = tree_and_paths(target, tokens)
    assert at_once.equal(alone)


def test_transformers_does_not_give_the_bits_of_the_paths():
    """The control: attention that adds up in another order beside other rows."""
    target = loaded_as(model_of("Llama"), "resident").backend
    target.prepare(())
    with torch.inference_mode():
        at_once, alone = tree_and_paths(target, tokens_of(LENGTH + TREE.size))
    torch.testing.assert_close(at_once, alone, atol=1e-3, rtol=1e-3)
    assert not at_once.equal(alone)


def test_the_embedded_pair_decodes_as_without_a_tree():
    """Greedy text is the same bit for bit, in the file's own bits and in bfloat16."""
    for dtype, formats in (("auto", "Q4_1+Q8_0"), ("bfloat16", "BF16")):
        pair = load_pair(dtype=dtype)
        assert pair.placement == "compiled"
        assert pair.metadata["target"]["weights"] == formats
        plain = SequoiaDecoder(pair.target, None, PLAIN, tokenizer=pair.tokenizer)
        decoder = SequoiaDecoder(pair.target, pair.draft, TREE, tokenizer=pair.tokenizer)
        for prompt in ("The capital of France is", "def fibonacci(n):"):
            expected, result = plain.generate(prompt, 64), decoder.generate(prompt, 64)
            assert result.sequences.equal(expected.sequences)
            assert result.steps < 50


def test_the_pass_is_near_the_model_in_float32():
    """KL of the file's bits with 8-bit activations, to the same weights in float32."""
    pair = load_pair(draft="none")
    target = pair.target.backend
    exact = load_pair(draft="none", dtype="float32", placement="resident").target.module
    text = (
        "Speculative decoding drafts several tokens with a small model and verifies them with a "
        "large one in a single pass. The river was wide and slow, and the old ferryman knew every "
        "stone in it. def add(a, b):\n    return a + b\n"
    )
    tokens = torch.tensor(pair.tokenizer.encode(text))
    with torch.inference_mode():
        expected = exact(tokens[None]).logits[0].log_softmax(-1)
    ours = logits_of(target, tokens).log_softmax(-1)
    assert 0 < (expected.exp() * (expected - ours)).sum(-1).mean() < 0.003


def test_changed_weights_are_packed_anew():
    """And changes that cannot be packed are refused."""
    model, prompt = model_of("Qwen3"), tokens_of(9)[None]
    decoder = SequoiaDecoder(model, None, PLAIN)
    before = decoder.generate(prompt, 20).sequences
    with torch.no_grad():
        model.model.layers[1].post_attention_layernorm.weight.mul_(3)
        model.model.layers[0].self_attn.q_proj.weight.neg_()
    after = decoder.generate(prompt, 20).sequences
    assert after.equal(plain_text(model, prompt, 20)) and not after.equal(before)
    model.load_state_dict(model_of("Qwen3").state_dict())
    assert decoder.generate(prompt, 20).sequences.equal(before)
    model.lm_head.weight.data = model.lm_head.weight.data.roll(1, 0)  # another address
    after = decoder.generate(prompt, 20).sequences
    assert after.equal(plain_text(model, prompt, 20))
    handle = model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    with refusal("a module has hooks; make the decoder anew"):
        decoder.generate(prompt, 4)
    handle.remove()
    assert decoder.generate(prompt, 20).sequences.equal(after)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: tiny("Gemma 2"), "Gemma2ForCausalLM is none of LlamaForCausalLM"),
        (lambda: tiny("Llama"), "heads of 8 numbers"),
        (lambda: model_of("Llama", mlp_bias=True), "other than q, k and v has a bias"),
        (lambda: model_of("Llama", hidden_act="gelu"), "activation gelu"),
    ],
)
def test_what_is_not_compiled_says_why(model, reason):
    with refusal(reason):
        PackedModule(model := model())
    assert loaded(model).metadata()["placement"] == "resident"


def test_a_model_with_other_logits_is_not_compiled(monkeypatch):
    """Found by comparing both passes: the modules alone do not show it."""
    right = PackedModule.forward

    def flipped(self, cache, tokens, positions, *rest):
        return right(self, cache, tokens, positions.flip(0), *rest)

    monkeypatch.setattr(PackedModule, "forward", flipped)
    with refusal("a compiled pass gave other logits"):
        PackedModule(model_of("Llama"))


def test_what_is_kept_of_a_model_ends_with_it():
    model = model_of("Llama")
    kept = weakref.ref(loaded(model))
    assert loaded(model) is kept() and loaded(copy.deepcopy(model)) is not kept()
    del model
    gc.collect()
    assert kept() is None


def drafted(pair, prompt, tree=None):
    """A prompt's first tree by an EAGLE draft, and the draft's logits on it, or on `tree`."""
    step, place = SequoiaDecoder(pair.target, pair.draft, TREE).step, len(prompt) - 1
    with torch.inference_mode():
        step.prefill(prompt, 64, 0)
        step.draft(step.extent(place), Sampling())
        tokens = step.sequence.tokens[place : place + TREE.size]
        own_tree = tokens.tolist()
        tokens[:] = torch.tensor(tree or own_tree)
        return own_tree, torch.cat(logits_of_tree(step.drafter, step.sequence, TREE))


@pytest.mark.parametrize("storage", [eagle.Storage(bits=8), eagle.Storage(torch.float32)])
def test_a_compiled_eagle_draft_drafts_as_its_modules(storage, monkeypatch):
    """After long prompts, and after those that are shorter than what a first pass reads."""
    monkeypatch.setattr(eagle, "IN_4_BITS", storage)
    resident = load_pair(dtype="float32", placement="resident")
    compiled = load_pair(dtype="float32")
    for count in (1, 2, 3, 9, 21):
        prompt = torch.arange(300, 300 + count)
        tree, expected = drafted(resident, prompt)
        own_tree, logits = drafted(compiled, prompt, tree)
        assert relative_error(logits, expected) < (0.03 if storage.bits else 1e-4)
        assert (logits.argmax(-1) == expected.argmax(-1)).float().mean() > 0.7
        assert own_tree == tree or storage.bits


@pytest.mark.parametrize("bits", [8, 4])
def test_rounded_weights(bits):
    """The pass is that of a model with rounded weights, and 8 bits are nearer to the original."""
    model, tokens = model_of("Qwen3"), tokens_of(12)
    rounded = copy.deepcopy(model)
    for name, module in rounded.named_modules():
        if isinstance(module, torch.nn.Linear):
            own_bits = 8 if name == "lm_head" else bits
            rows = round_rows(module.weight.detach().numpy(), own_bits)
            weights = decoded_rows({8: "Q8_0", 4: "Q4_1"}[own_bits], rows)[:, : module.in_features]
            module.weight.data = torch.from_numpy(weights)
    target = packed(model, bits=bits)
    with torch.inference_mode():
        logits = logits_of(target, tokens)
        errors = [float((m(tokens[None]).logits[0] - logits).norm()) for m in (rounded, model)]
    assert errors[0] < (0.85 if bits == 8 else 0.2) * errors[1]


def test_what_rounding_costs_is_said(folder):
    with refusal(r"bits: found 8 for .*; a GGUF file has bits", ArgumentError):
        load_pair(bits=8)
    with refusal("bits: found 5 for compiled", ArgumentError):
        load_pair(dtype="float32", bits=5)
    with refusal("bits 4: the model cannot be compiled: heads of 8"):
        load_pair(str(folder / "target"), "none", dtype="float32", bits=4)
    pair = load_pair(draft="none", dtype="bfloat16", bits=4)
    assert pair.metadata["target"]["weights"] == "Q4_1+Q8_0"
    [remark] = [r for r in pair.remarks if "rounded to 4 bits" in r]
    assert 0 < float(remark.split("divergence of ")[1].split()[0]) < 0.05


def test_odd_sizes():
    """Widths and vocabularies that are no multiples, heads of all sizes, any start and rows."""
    rng = Random(0)
    for _ in range(25):
        name, kv_heads = rng.choice(list(MODELS)), rng.choice([1, 2, 3, 5])
        heads = kv_heads * rng.choice([1, 2, 5])
        model = model_of(
            name, rng.choice([torch.float32, torch.bfloat16]), head_dim=rng.choice([32, 96, 160]),
            hidden_size=heads * rng.choice([1, 3, 8]), intermediate_size=rng.choice([1, 32, 100]),
            num_key_value_heads=kv_heads, num_attention_heads=heads,
            vocab_size=rng.choice([2, 17, 257]), sliding_window=None,
        )  # fmt: skip
        start, rows = rng.choice([0, 1, 15, 16, 17]), rng.choice([1, 2, 8, 9, 17])
        tokens = torch.arange(start + rows) % model.config.vocab_size
        target = packed(model, rng.choice([1, 2, 3]))
        cache = target.new_cache(len(tokens), counts_positions=False)
        if start:
            read(target, cache, tokens[:start], 0)
        logits = read(target, cache, tokens[start:], start)
        with torch.inference_mode():
            expected = model.float()(tokens[None]).logits[0, start:]
        bound = 3e-5 if target.dtype == torch.float32 else 0.05
        assert relative_error(logits, expected) < bound


def test_an_interrupt_and_a_fork_leave_no_thread_waiting(monkeypatch):
    target, tokens = packed(model_of("Llama"), 3), tokens_of(5)

    expected = logits_of(target, tokens)

    def check():
        assert logits_of(target, tokens).equal(expected)

    spy(monkeypatch, packed_pass, "forward", interrupt_first_worker)
    with pytest.raises(KeyboardInterrupt):
        check()
    monkeypatch.undo()
    check()
    assert status_of(fork(check)) == 0
