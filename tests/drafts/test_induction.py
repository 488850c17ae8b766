"""Heads that a draft gets: they continue text that repeats itself."""

from functools import partial
from pathlib import Path

import pytest
import torch
from sequoia_plan_drafts.recipe.eagle3 import chain_logits, untrained_draft
from sequoia_plan_drafts.recipe.induction import add_induction_heads
from sequoia_plan_drafts.recipe.text import TOP, Conversation, write_conversations
from sequoia_plan_drafts.recipe.training_text import TrainingText

pytestmark = pytest.mark.slow
LAYERS = (2, 15, 27)
PASSAGES, LENGTH = 10, 96


@pytest.fixture(scope="module")
@torch.no_grad()
def text(plain_target, pair, tmp_path_factory):
    """Passages of a page, each of them twice; answers are the second halves."""
    folder = tmp_path_factory.mktemp("repeated")
    page = Path(__file__).parents[2] / "docs" / "planner.md"
    ids = torch.tensor(pair.tokenizer(page.read_text()).input_ids[: PASSAGES * LENGTH])
    tokens = ids.view(PASSAGES, LENGTH).repeat(1, 2)
    conversations = []
    for row in tokens:
        output = plain_target(row[None], output_hidden_states=True)
        top_logp, top_ids = output.logits[0, LENGTH - 1 : -1].log_softmax(-1).topk(TOP)
        states = torch.cat([output.hidden_states[layer][0] for layer in LAYERS], -1)
        conversations.append(
            Conversation(row.int(), top_ids.int(), top_logp.half(), states.clamp(-6e4, 6e4).half())
        )
    write_conversations(
        folder / "text-00000.safetensors", conversations, {"hidden_states": list(LAYERS)}
    )
    return TrainingText([folder])


@torch.no_grad()
def test_heads_add_what_followed_the_same_two_tokens(plain_target, text):
    """Repeated tokens become far more probable; not so with heads that compare nothing."""
    vocabulary = text.draft_vocabulary(plain_target.config.vocab_size, 2048)
    draft = untrained_draft(plain_target, vocabulary)
    logits = partial(chain_logits, draft, scale=text.hidden_state_scale)
    batch = next(text.batches(range(PASSAGES), PASSAGES))
    second = vocabulary.target_to_draft[batch.tokens[:, LENGTH:].flatten()]

    def surprise():
        """Minus the mean log-probability of the second halves' tokens."""
        drafted = next(logits(batch, 1)).log_softmax(-1)[second >= 0]
        return -float(drafted.gather(1, second[second >= 0, None]).mean())

    before, old_queries = surprise(), draft.layers[0].self_attn.q_proj.weight.clone()
    add_induction_heads(draft, plain_target, text, vocabulary, logits, 2)
    after = surprise()
    queries = draft.layers[0].self_attn.q_proj.weight
    queries[(queries != old_queries).any(1)] = 0
    assert after < before - 1 and surprise() > before - 0.3
