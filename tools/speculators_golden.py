"""What the library speculators makes of small random drafts: folders, and logits.

The tests compare ours with them.

Run once, in an environment of its own, because it pins another transformers; nothing here imports
this project:

    pip install speculators==0.9.0
    python tools/speculators_golden.py tests/data
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.dflash import DFlashSpeculatorConfig
from speculators.models.dflash.core import DFlashDraftModel
from speculators.models.eagle3 import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, Qwen3Config

VOCABULARY, DRAFT_VOCABULARY, HIDDEN, LENGTH, DEPTH = 48, 20, 16, 24, 4
SHAPE = dict(
    vocab_size=VOCABULARY,
    hidden_size=HIDDEN,
    intermediate_size=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    attn_implementation="eager",
)
EAGLE3 = {
    "plain": dict(),
    "norm-before-residual": dict(norm_before_residual=True),
    "norm-output": dict(norm_output=True, fc_norm=True),
    "norm-before-fc": dict(norm_before_fc=True),
    "two-layers": dict(layers=2),
    "qwen3": dict(layer="qwen3"),
    "window": dict(
        layer="qwen3",
        layers=2,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=6,
        use_sliding_window=True,
    ),
}
DFLASH = {
    "plain": dict(),
    "window": dict(
        layer_types=["full_attention", "sliding_attention"],
        sliding_window=6,
        use_sliding_window=True,
    ),
    "window-both-ways": dict(
        layer_types=["full_attention", "sliding_attention"],
        sliding_window=6,
        use_sliding_window=True,
        sliding_window_non_causal=True,
    ),
}
BLOCK, MASK = 5, 47
ANCHORS = [3, 9, 17]


def described(algorithm: str, tokens: int) -> SpeculatorsConfig:
    methods = [GreedyTokenProposalConfig(speculative_tokens=tokens)]
    verifier = VerifierConfig(name_or_path="small/target", architectures=["LlamaForCausalLM"])
    return SpeculatorsConfig(
        algorithm=algorithm,
        proposal_methods=methods,
        default_proposal_method="greedy",
        verifier=verifier,
    )


def fill(model: torch.nn.Module, seed: int) -> None:
    """Weights large enough that every part shows in the logits."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in sorted([*model.named_parameters()]):
        values = torch.randn(tensor.shape, generator=generator)
        with torch.no_grad():
            tensor.copy_(
                1 + 0.3 * values
                if tensor.ndim == 1
                else values / tensor.shape[-1] ** 0.5
                if "embed" not in name
                else values
            )


def vocabulary() -> tuple[torch.Tensor, torch.Tensor]:
    """t2d, and d2t as offsets."""
    chosen = (
        torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(5))[:DRAFT_VOCABULARY]
        .sort()
        .values
    )
    marked = torch.zeros(VOCABULARY, dtype=torch.bool)
    marked[chosen] = True
    return marked, chosen - torch.arange(DRAFT_VOCABULARY)


def inputs(width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [LENGTH + 1] and the features [LENGTH, width] of all but the last."""
    generator = torch.Generator().manual_seed(7)
    return torch.randint(VOCABULARY - 1, (LENGTH + 1,), generator=generator), torch.randn(
        LENGTH, width, generator=generator
    )


def eagle3(folder: Path, settings: dict[str, object]) -> dict[str, torch.Tensor]:
    settings = dict(settings)
    layer, layers = settings.pop("layer", "llama"), settings.pop("layers", 1)
    own = {
        key: settings.pop(key)
        for key in ("layer_types", "sliding_window", "use_sliding_window")
        if key in settings
    }
    config = {"llama": LlamaConfig, "qwen3": Qwen3Config}[layer](
        **SHAPE, num_hidden_layers=layers, **own
    )
    model = Eagle3DraftModel(
        Eagle3SpeculatorConfig(
            transformer_layer_config=config,
            draft_vocab_size=DRAFT_VOCABULARY,
            eagle_aux_hidden_state_layer_ids=[1, 2, 4],
            speculators_config=described("eagle3", DEPTH),
            **settings,
        )
    ).eval()
    fill(model, 1)
    model.load_vocab_mappings(*vocabulary())
    model.save_pretrained(folder)
    logits: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, args, output: logits.append(output[0]))
    tokens, features = inputs(3 * HIDDEN)
    golden = {}
    # a row pairs a token with the features of the token before; a second text that differs after
    # the root is another branch of a tree
    for name, text in {
        "chain": tokens,
        "branch": torch.cat([tokens[:13], (tokens[13:] + 11) % (VOCABULARY - 1)]),
    }.items():
        logits.clear()
        with torch.no_grad():
            model(
                features[None],
                text[None, 1:],
                torch.zeros(1, LENGTH, dtype=torch.long),
                ttt_steps=DEPTH,
            )
        golden[f"{name}.tokens"], golden[f"{name}.logits"] = text, torch.stack(logits)
    return golden | {"features": features}


def dflash(folder: Path, settings: dict[str, object]) -> dict[str, torch.Tensor]:
    settings = dict(settings)
    both_ways = settings.pop("sliding_window_non_causal", False)
    config = Qwen3Config(**SHAPE, num_hidden_layers=2, **settings)
    model = DFlashDraftModel(
        DFlashSpeculatorConfig(
            transformer_layer_config=config,
            draft_vocab_size=DRAFT_VOCABULARY,
            block_size=BLOCK,
            aux_hidden_state_layer_ids=[1, 3],
            mask_token_id=MASK,
            sliding_window_non_causal=both_ways,
            speculators_config=described("dflash", BLOCK - 1),
        )
    ).eval()
    fill(model, 2)
    model.load_vocab_mappings(*vocabulary())
    model.save_pretrained(folder)
    tokens, features = inputs(2 * HIDDEN)
    tokens = tokens[:-1]
    loss_mask = torch.zeros(1, LENGTH)
    loss_mask[0, ANCHORS] = 1
    zeros = torch.zeros(1, LENGTH, dtype=torch.long)
    with torch.no_grad():
        _, logits, _, _, indices = model._backbone_forward(
            features[None],
            tokens[None],
            loss_mask,
            torch.zeros(1, LENGTH, HIDDEN),
            zeros,
            max_anchors=len(ANCHORS),
        )
    anchors = indices.view(-1, BLOCK)[:, 0]
    return {
        "tokens": tokens,
        "features": features,
        "anchors": anchors,
        "logits": logits.view(len(anchors), BLOCK, -1),
        "embeddings": model.embed_tokens.weight,
    }


def main(output: Path) -> None:
    """Write one file an algorithm: each variant's config.json, weights, inputs and logits."""
    for algorithm, variants, run in (("eagle3", EAGLE3, eagle3), ("dflash", DFLASH, dflash)):
        tensors: dict[str, torch.Tensor] = {}
        configs: dict[str, str] = {}
        for name, settings in variants.items():
            with tempfile.TemporaryDirectory() as folder:
                golden = run(Path(folder), settings)
                from safetensors.torch import load_file

                weights = load_file(Path(folder, "model.safetensors"))
                configs[name] = Path(folder, "config.json").read_text()
            tensors |= {
                f"{name}/weights/{key}": value.contiguous() for key, value in weights.items()
            }
            tensors |= {
                f"{name}/golden/{key}": value.detach().clone().contiguous()
                for key, value in golden.items()
            }
        save_file(
            tensors,
            output / f"speculators-{algorithm}.safetensors",
            {"configs": json.dumps(configs), "speculators": "0.9.0", "torch": torch.__version__},
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
