"""Tiny random models of transformers' own classes.

There is one of each architecture that people use, and some that cannot decode with a tree.
"""

import torch
import transformers as hf
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from sequoia_plan.artifacts import TokenTree

VOCABULARY, CONTEXT, WINDOW = 97, 160, 12
SMALL = dict(vocab_size=VOCABULARY)
SIZES = dict(
    SMALL,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_position_embeddings=CONTEXT,
    tie_word_embeddings=False,
)
GROUPED = dict(SIZES, num_key_value_heads=2, head_dim=8)
FEW = dict(num_experts=4, num_local_experts=4, n_routed_experts=4, moe_num_experts=4)
EXPERTS = dict(GROUPED, **FEW, num_experts_per_tok=2, moe_k=2, moe_topk=2, moe_intermediate_size=24)
WINDOWED_LAYERS = dict(
    GROUPED,
    sliding_window=WINDOW,
    layer_types=["full_attention", "sliding_attention", "full_attention"],
    query_pre_attn_scalar=8,
)
WINDOWED_EXPERTS = EXPERTS | WINDOWED_LAYERS
LATENT = dict(
    SIZES,
    kv_lora_rank=16,
    q_lora_rank=24,
    qk_rope_head_dim=8,
    v_head_dim=8,
    qk_nope_head_dim=16,
    n_routed_experts=4,
    n_group=2,
    topk_group=1,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    first_k_dense_replace=1,
)
PER_LAYER = dict(
    vocab_size_per_layer_input=VOCABULARY, hidden_size_per_layer_input=8, num_kv_shared_layers=1
)
IMAGES = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
NO_SPECIAL = dict(pad_token_id=None, bos_token_id=None, eos_token_id=None)

# classes are named, not imported: each has a large module
READS_TREES = {
    "Llama": ("LlamaForCausalLM", GROUPED),
    "Qwen2": ("Qwen2ForCausalLM", GROUPED),
    "Qwen2, some layers windowed": (
        "Qwen2ForCausalLM",
        dict(GROUPED, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    ),
    "Qwen3": ("Qwen3ForCausalLM", GROUPED),
    "Qwen3-MoE": ("Qwen3MoeForCausalLM", EXPERTS),
    "SmolLM3": ("SmolLM3ForCausalLM", dict(GROUPED, no_rope_layer_interval=2)),
    "Phi-3": ("Phi3ForCausalLM", dict(GROUPED, sliding_window=None)),
    "GPT-NeoX": ("GPTNeoXForCausalLM", dict(SIZES, use_parallel_residual=False)),
    "GPT-2": (
        "GPT2LMHeadModel",
        dict(SMALL, n_embd=32, n_layer=3, n_head=4, n_positions=CONTEXT, tie_word_embeddings=False),
    ),
    "OPT": (
        "OPTForCausalLM",
        dict(SIZES, ffn_dim=48, word_embed_proj_dim=32, do_layer_norm_before=True),
    ),
    "Mistral": ("MistralForCausalLM", dict(GROUPED, sliding_window=WINDOW)),
    "Mixtral": ("MixtralForCausalLM", dict(EXPERTS, sliding_window=WINDOW)),
    "Gemma 2": ("Gemma2ForCausalLM", WINDOWED_LAYERS),
    "Gemma 3": ("Gemma3ForCausalLM", WINDOWED_LAYERS),
    "Gemma 3n": (
        "Gemma3nForCausalLM",
        dict(
            WINDOWED_LAYERS, **PER_LAYER, laurel_rank=8, activation_sparsity_pattern=[0.5, 0.0, 0.0]
        ),
    ),
    "Gemma 4": (
        "Gemma4ForCausalLM",
        dict(WINDOWED_EXPERTS, **PER_LAYER, enable_moe_block=True, top_k_experts=2),
    ),
    "Llama 4": (
        "Llama4ForCausalLM",
        dict(
            EXPERTS,
            intermediate_size_mlp=48,
            no_rope_layers=[1, 0, 1],
            attention_chunk_size=WINDOW,
            floor_scale=8,
            attn_scale=1.0,
        ),
    ),
    "DeepSeek-V2": ("DeepseekV2ForCausalLM", dict(LATENT, n_shared_experts=1)),
    "DeepSeek-V3": ("DeepseekV3ForCausalLM", LATENT),
    "GLM-4": ("Glm4ForCausalLM", GROUPED),
    "GLM-4-MoE": ("Glm4MoeForCausalLM", EXPERTS),
    "GPT-OSS": ("GptOssForCausalLM", WINDOWED_EXPERTS),
    "Granite": ("GraniteForCausalLM", dict(GROUPED, attention_multiplier=0.3)),
    "Granite 4": (
        "GraniteMoeHybridForCausalLM",
        dict(
            EXPERTS,
            shared_intermediate_size=24,
            layer_types=["full_attention"] * 3,
            mamba_n_heads=4,
            position_embedding_type="rope",
        ),
    ),
    "OLMo 3": ("Olmo3ForCausalLM", WINDOWED_LAYERS),
    "Ernie 4.5": ("Ernie4_5ForCausalLM", GROUPED),
    "Ernie 4.5 MoE": ("Ernie4_5_MoeForCausalLM", dict(EXPERTS, moe_num_shared_experts=1)),
    "Hunyuan": ("HunYuanDenseV1ForCausalLM", GROUPED),
    "Hunyuan MoE": ("HunYuanMoEV1ForCausalLM", EXPERTS),
    "Mellum": ("MellumForCausalLM", WINDOWED_EXPERTS),
    "MiniMax-M2": ("MiniMaxM2ForCausalLM", EXPERTS),
    "MiMo-V2": ("MiMoV2FlashForCausalLM", dict(WINDOWED_EXPERTS, v_head_dim=4)),
    "Mistral 3": (
        "Mistral3ForConditionalGeneration",
        dict(text_config=dict(GROUPED, model_type="ministral3"), vision_config=IMAGES),
    ),
    "Cohere 2": ("Cohere2ForCausalLM", WINDOWED_LAYERS),
    "EXAONE 4": ("Exaone4ForCausalLM", WINDOWED_LAYERS),
    "Seed-OSS": ("SeedOssForCausalLM", GROUPED),
}

LINEAR = dict(
    GROUPED,
    num_hidden_layers=4,
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
)
MAMBA = dict(
    GROUPED, mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=2, mamba_d_state=8, mamba_chunk_size=8
)

TAKES_CHAINS = {
    "Qwen3-Next": (
        "Qwen3NextForCausalLM",
        EXPERTS | dict(LINEAR, shared_expert_intermediate_size=24),
    ),
    "Qwen3.5": ("Qwen3_5ForCausalLM", LINEAR),
    "OLMo, hybrid": ("OlmoHybridForCausalLM", dict(LINEAR, num_key_value_heads=4)),
    "Bamba": ("BambaForCausalLM", dict(MAMBA, attn_layer_indices=[1])),
    "Granite 4, hybrid": (
        "GraniteMoeHybridForCausalLM",
        EXPERTS
        | dict(MAMBA, shared_intermediate_size=24, layer_types=["mamba", "attention", "mamba"]),
    ),
    "Falcon-H1": ("FalconH1ForCausalLM", dict(MAMBA, mamba_d_ssm=64)),
    "LFM2": ("Lfm2ForCausalLM", dict(GROUPED, layer_types=["conv", "full_attention", "conv"])),
}
"""Those with a recurrent state."""

REFUSED = {
    "MPT": ("MptForCausalLM", dict(SMALL, d_model=32, n_heads=4, n_layers=2)),
    "BLOOM": ("BloomForCausalLM", dict(SMALL, hidden_size=32, n_layer=2, n_head=4)),
    "GPT-Neo": (
        "GPTNeoForCausalLM",
        dict(
            SMALL,
            hidden_size=32,
            num_layers=2,
            num_heads=4,
            attention_types=[[["global", "local"], 1]],
            max_position_embeddings=CONTEXT,
        ),
    ),
    "Mamba": ("MambaForCausalLM", dict(SMALL, hidden_size=32, num_hidden_layers=2, state_size=4)),
    "Jamba": (
        "JambaForCausalLM",
        dict(
            GROUPED,
            num_experts=2,
            num_experts_per_tok=1,
            attn_layer_period=2,
            attn_layer_offset=1,
            use_mamba_kernels=False,
            mamba_d_state=4,
        ),
    ),
    "DeepSeek-V3.2": (
        "DeepseekV32ForCausalLM",
        dict(LATENT, index_topk=8, index_head_dim=16, index_n_heads=2),
    ),
    "MiniMax": ("MiniMaxForCausalLM", EXPERTS),
    "T5": (
        "T5ForConditionalGeneration",
        dict(SMALL, d_model=32, d_ff=48, num_layers=1, num_heads=4, d_kv=8),
    ),
}

PACKED = dict(head_dim=32, hidden_size=64, intermediate_size=80)
"""Sizes with which a pass is compiled: it takes no smaller heads."""
FUSED = {
    "Llama",
    "Mistral",
    "Mixtral",
    "Qwen2",
    "Qwen2, some layers windowed",
    "Qwen3",
    "Qwen3-MoE",
    "SmolLM3",
}
"""Those whose layers are fused."""


def is_embedding(parameter):
    return any(part in parameter for part in ("embed", "wte", "wpe", "lm_head"))


def tiny(name, seed=0, **changes):
    """A random model whose attention matters: weights are larger than transformers draws them."""
    class_name, sizes = (READS_TREES | TAKES_CHAINS | REFUSED)[name]
    model_class = getattr(hf, class_name)
    torch.manual_seed(seed)
    if "text_config" in sizes:
        changes = {"text_config": sizes["text_config"] | changes}
    sizes = {**NO_SPECIAL, **sizes, **changes}
    layers = sizes.get("num_hidden_layers", 3)
    sizes |= {k: n * (layers // 3) for k, n in sizes.items() if isinstance(n, list) and len(n) == 3}
    model = model_class(model_class.config_class(**sizes)).eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(std=1.0 if is_embedding(parameter_name) else 0.3)
    return model


def resembling(target, noise=0.02):
    """A draft: the target with noise on its weights."""
    torch.manual_seed(1)
    draft = type(target)(target.config).eval()
    draft.load_state_dict(target.state_dict())
    for parameter in draft.parameters():
        parameter.data.add_(noise * parameter.std().nan_to_num() * torch.randn_like(parameter))
    return draft


def words(changes=None, count=VOCABULARY):
    """A real tokenizer: token i is two letters."""
    vocabulary = {chr(97 + i // 10) + chr(97 + i % 10): i for i in range(count)}
    for old, new in (changes or {}).items():
        vocabulary[new] = vocabulary.pop(old)
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="aa"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(".."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def tokens_of(count, seed=0):
    """int64 [count]: random tokens."""
    return torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))


def plain_text(model, ids, count, **options):
    """int64 [1, prompt + count]: transformers' own greedy text, the reference."""
    mask = torch.ones_like(ids)
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=count, do_sample=False, **options
    )


NEW, PROMPT = 64, 30
TREE = TokenTree.from_parents([-1, 0, 0, 0, 1, 1, 2, 4, 4, 6, *range(9, 21)])
"""Wide at the top, then a chain that is longer than the window."""


def logits_errors(decoder, prompt):
    """`max_tree_error` after a prompt, and again after a path was committed."""
    step = decoder.step
    step.prefill(prompt, NEW, seed=0)
    tokens = tokens_of(TREE.size, 1)
    prompt_error = max_tree_error(step, prompt[:-1], tokens)
    path = torch.tensor([0, 2, 6, 9, 10])
    length = step.sequence.length
    step.sequence.target.commit(length + path, length)
    committed = torch.cat([prompt[:-1], tokens[path]])
    length += len(path)
    return prompt_error, max_tree_error(step, committed, tokens.flip(0))


def max_tree_error(step, committed, tokens):
    """The largest relative error of a node's logits against those that the model alone gives."""
    length = int(step.sequence.length)
    step.sequence.tokens[length : length + TREE.size] = tokens
    logits = step.forward_target(step.extent(length))
    max_error = 0.0
    for leaf in (TREE.child_count == 0).nonzero()[0]:
        path = torch.from_numpy(TREE.attention_mask[leaf].nonzero()[0])
        sequence = torch.cat([committed, tokens[path]])[None]
        expected = step.target.module(sequence, use_cache=False).logits[0, len(committed) :]
        errors = (logits[path] - expected).norm(dim=-1) / expected.norm(dim=-1)
        max_error = max(max_error, float(errors.max()))
    return max_error
