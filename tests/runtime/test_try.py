import sys
import pytest, torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel
from mtp import FAMILIES, checkpoint, BEHIND
from sequoia_plan.runtime.models.loading import load_whole
from sequoia_plan.runtime.draft.mtp import load_mtp
from sequoia_plan.runtime.draft.eagle import EagleDrafter
from sequoia_plan.artifacts import TokenTree
sys.path.insert(0, "/work/trees/mtp/tests/runtime")
from test_draft_models import started, logits_of_tree, assert_close

@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_x(family, tmp_path):
    folder = checkpoint(tmp_path, family)
    target = load_whole(tmp_path, torch.float32)
    draft = load_mtp(target)
    target._keys_to_ignore_on_load_unexpected = [BEHIND, r"^mtp\."]
    oracle = MtpModel.from_pretrained(target).eval()
    text = torch.randint(97, (20,), generator=torch.Generator().manual_seed(3))
    features = target.model(input_ids=text[None]).last_hidden_state[0]
    for root in (1, 2, 9):
        cache, positions = MtpCache(config=target.config.get_mtp_config()), torch.arange(1, root + 1)
        expected = []
        out = features[None, :root]
        for level in range(4):
            ids = text[None, positions]
            out = oracle.forward_layer(0, out, positions[None], cache, input_ids=ids)[:, -1:]
            expected.append(target.lm_head(out[0, -1]))
            positions = positions[-1:] + 1
        got = logits_of_tree(*started(EagleDrafter, draft, text, features, root), TokenTree.chain(5))
        for a, b in zip(got, expected, strict=True):
            print(family, root, (a[0]-b).abs().max(), b.abs().max())
            assert_close(a[0], b)
