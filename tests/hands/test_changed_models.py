"""Models that somebody changes: the next text is that of the changed model, or an error says so."""

import copy
import pickle
import re
import warnings
from functools import partial

import pytest
import torch
from architectures import FUSED, PACKED, VOCABULARY, plain_text, resembling, tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refusal
from toys import PLAIN, TREE

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.models.backends import loaded
from sequoia_plan.models.layers.fuse import fuse
from sequoia_plan.runtime import SequoiaDecoder, load_pair, sequoia

pytestmark = pytest.mark.slow

IDS, NEW = torch.tensor([[5, 6, 7, 8]]), 24
RUNS = {"compiled": PACKED, "PyTorch": {}, "fused": {}}


def model_of(run, seed=0):
    return tiny("Qwen3", seed, **RUNS[run])


class Scaled(torch.nn.Module):
    """What adapters are: a module around another one, which has its weight as its own."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.weight = inner, inner.weight

    def forward(self, x):
        return -self.inner(x)


def resize(model, count):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.resize_token_embeddings(count, mean_resizing=False)


def wrap_head(model, run):
    model.lm_head = Scaled(model.lm_head).eval()


def append_layer(model, run):
    model.model.layers.append(copy.deepcopy(model.model.layers[0]))
    model.model.layers[-1].self_attn.layer_idx = len(model.model.layers) - 1
    model.config.num_hidden_layers += 1
    model.config.layer_types = [*model.config.layer_types, "full_attention"]


def patch_forward(model, run):
    right = model.model.layers[1].mlp.forward
    model.model.layers[1].mlp.forward = lambda x: -right(x)


def weight(path):
    def parameter(model):
        return model.get_submodule(path).weight

    return parameter


EPSILON = "variance_epsilon"
norm, head = weight("model.layers.1.post_attention_layernorm"), weight("lm_head")
CHANGES = {
    "a norm, in place": lambda m, run: norm(m).copy_(-norm(m)),
    "data assigned": lambda m, run: setattr(head(m), "data", head(m).data.roll(1, 0)),
    "a state dict": lambda m, run: m.load_state_dict(model_of(run, 1).state_dict()),
    "a hook": lambda m, run: m.model.layers[0].mlp.register_forward_hook(lambda *a: -a[2]),
    "a hook on the head": lambda m, run: m.lm_head.register_forward_hook(lambda *a: -a[2]),
    "forward": patch_forward,
    "a layer": lambda m, run: m.model.layers.__setitem__(1, model_of(run, 1).model.layers[1]),
    "the head": lambda m, run: m.set_output_embeddings(model_of(run, 1).lm_head),
    "the head wrapped": wrap_head,
    "the embedding": lambda m, run: m.set_input_embeddings(model_of(run, 1).model.embed_tokens),
    "more tokens": lambda m, run: resize(m, VOCABULARY + 40),
    "fewer tokens": lambda m, run: resize(m, VOCABULARY - 40),
    "one more layer": append_layer,
    "an epsilon": lambda m, run: setattr(m.model.layers[1].input_layernorm, EPSILON, 50.0),
    "the rotary table": lambda m, run: m.model.rotary_emb.inv_freq.mul_(3),
    "attention": lambda m, run: setattr(m.model.layers[0].self_attn, "scaling", 5.0),
}
COPIES = (copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it)))
OF_TRANSFORMERS_LAYERS = ("a layer", "one more layer", "an epsilon")
"""Changes that a model with fused layers is not expected to take."""


def is_packed(model):
    return loaded(model).traits.is_compiled


def answer(decoder):
    """The text, or what is asked for."""
    try:
        return decoder.generate(IDS, NEW).sequences.tolist()
    except SequoiaPlanError as error:
        return re.sub(r".*make (the decoder|it) anew", "make it anew", str(error))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("run", RUNS)
def test_a_change_counts_or_is_refused(run, change):
    """With the decoder of before, and with a new one; the control is that texts differ."""
    if run == "fused" and change in OF_TRANSFORMERS_LAYERS:
        pytest.skip("not a change of such a model")
    model, original = model_of(run), model_of(run)
    draft = resembling(model)
    if run == "fused":
        assert fuse(model) == 3
    decoder = SequoiaDecoder(model, draft, TREE)
    assert is_packed(model) == (run == "compiled")
    before = decoder.generate(IDS, NEW).sequences
    assert before.equal(plain_text(original, IDS, NEW))
    with torch.no_grad():
        for each in (model, original):
            CHANGES[change](each, run)
    expected = plain_text(original, IDS, NEW)
    assert "tokens" in change or not expected.equal(before)
    for _ in range(2):  # what is refused once is refused again
        assert answer(decoder) in ("make it anew", expected.tolist())
    if "tokens" in change:  # the draft has another vocabulary now
        draft = resembling(model)
    assert SequoiaDecoder(model, draft, TREE).generate(IDS, NEW).sequences.equal(expected)


@pytest.mark.parametrize("run", RUNS)
def test_numbers_changed_behind_the_version_counter_need_refresh(run):
    """As anything that holds a parameter's memory can change them."""
    model = model_of(run)
    if run == "fused":
        fuse(model)
    decoder = SequoiaDecoder(model, resembling(model), TREE)
    before = decoder.generate(IDS, NEW).sequences
    for change in (lambda: norm(model).data.neg_(), lambda: head(model).data.numpy().__imul__(-1)):
        change()
        assert decoder.generate(IDS, NEW).sequences.equal(before) or run != "compiled"
        decoder.refresh()
        expected = plain_text(model, IDS, NEW)
        assert decoder.generate(IDS, NEW).sequences.equal(expected) and not expected.equal(before)
        before = expected


@pytest.mark.parametrize(
    "name", ["max_position_embeddings", "sliding_window", "rms_norm_eps", "num_key_value_heads"]
)
def test_a_configuration_that_changes_is_noticed(name):
    model = model_of("PyTorch")
    decoder = SequoiaDecoder(model, None, PLAIN)
    setattr(model.config, name, type(getattr(model.config, name) or 0)(7))
    with refusal(rf"config\.{name} changed .*; make it anew"):
        decoder.generate(IDS, NEW)


@settings(max_examples=20)
@given(st.data())
def test_any_module_that_drops_out_is_refused(data):
    """In target and draft, before and after the decoder was made."""
    models = [tiny("GPT-2"), tiny("Llama", attention_dropout=0.5)]
    decoder = SequoiaDecoder(*models, TREE)
    role = data.draw(st.integers(0, 1))
    modules = models[role].named_modules()
    names = [
        n
        for n, m in modules
        if not n or "Dropout" in repr(type(m)) or n.endswith(("h.0.attn", "self_attn"))
    ]
    name = data.draw(st.sampled_from(names))
    models[role].get_submodule(name).training = True
    for use in (lambda: decoder.generate(IDS, 2), lambda: SequoiaDecoder(*models, TREE)):
        with refusal(rf"{name} found in training mode.*call eval"):
            use()


@pytest.mark.parametrize("made_inside", [True, False])
@pytest.mark.parametrize("run", RUNS)
def test_autocast_is_refused(run, made_inside):
    model = model_of(run)
    decoder = SequoiaDecoder(model, None, PLAIN)
    expected = decoder.generate(IDS, 4).sequences
    use = partial(decoder.generate, IDS, 4)
    if made_inside:
        use = partial(SequoiaDecoder, model, None, PLAIN)
    with torch.autocast("cpu", torch.bfloat16), refusal("autocast"):
        use()
    assert decoder.generate(IDS, 4).sequences.equal(expected)


def test_generate_follows_changes_with_the_decoder_it_keeps():
    model = model_of("compiled")

    def text(**options):
        return model.generate(IDS, max_new_tokens=NEW, do_sample=False, **options)

    def ours():
        return text(custom_generate=sequoia, tree=PLAIN)

    assert ours().equal(text())
    with torch.no_grad():
        model.lm_head.weight.neg_()
    assert ours().equal(text()) and is_packed(model)
    handle = model.model.register_forward_pre_hook(lambda *_: None)
    assert ours().equal(text()) and not is_packed(model)
    handle.remove()
    assert ours().equal(text()) and not is_packed(model)  # the decoder runs modules
    resize(model, VOCABULARY + 40)
    assert ours().equal(text()) and is_packed(model)


@pytest.mark.parametrize("copied", COPIES)
def test_a_copy_that_changes_before_its_first_text(copied):
    decoder = SequoiaDecoder(model_of("compiled"), None, PLAIN)
    before = decoder.generate(IDS, NEW).sequences
    other = copied(decoder)
    model = other.step.target.module
    with torch.no_grad():
        model.lm_head.weight.neg_()
    assert other.generate(IDS, NEW).sequences.equal(plain_text(model, IDS, NEW))
    assert decoder.generate(IDS, NEW).sequences.equal(before)


def test_without_memory_for_a_copy_pytorch_runs_the_model(monkeypatch):
    model = model_of("compiled")
    monkeypatch.setattr(f"{loaded.__module__}.free_memory", lambda device: 1000)
    with pytest.warns(UserWarning, match=r"qwen3: PyTorch runs it, because a copy .* 1 kB are"):
        decoder = SequoiaDecoder(model, None, PLAIN)
    assert not is_packed(model)
    assert decoder.generate(IDS, NEW).sequences.equal(plain_text(model, IDS, NEW))


@pytest.mark.parametrize("name", sorted(FUSED))
@torch.no_grad()
def test_fused_models_are_saved_and_loaded_as_they_came(name, tmp_path):
    model, other = tiny(name), tiny(name, 1)
    fused = copy.deepcopy(model)
    assert fuse(fused)
    logits = fused(IDS).logits
    for copied in COPIES:
        fused = copied(fused)
        assert fused(IDS).logits.equal(logits)
    fused.save_pretrained(tmp_path)
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not (info["missing_keys"] or info["unexpected_keys"])
    expected = model.state_dict()
    for state in (fused.state_dict(), loaded.state_dict()):
        assert state.keys() == expected.keys()
        assert all(state[name].equal(expected[name]) for name in expected)
    fused.load_state_dict(other.state_dict())
    torch.testing.assert_close(fused(IDS).logits, other(IDS).logits, atol=1e-4, rtol=1e-4)


def test_an_eagle_draft_that_changes_is_packed_anew():
    pair = load_pair()
    decoder = SequoiaDecoder(pair.target, pair.draft, TREE)
    steps = decoder.generate(IDS, NEW).steps
    packed = pair.draft.backend.runner
    with torch.no_grad():
        pair.draft.fc.weight.zero_()
        pair.draft.lm_head.weight.neg_()
    assert decoder.generate(IDS, NEW).steps > steps and pair.draft.backend.runner is not packed
