"""A GGUF file's tokenizer: the ids of a text, and where a text ends, as llama.cpp has them.

Tables and rules are those of src/llama-vocab.cpp at llama.cpp's commit 0c1e570 (2026-11).
"""

import re
from collections.abc import Container, Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast
from transformers.tokenization_utils_base import generate_merges

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.models.files.gguf_file import GgufFile

ENDS = """
    <|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> </s>
    <|endoftext|> <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos>
    <turn|> <|tool_response> <\uff5cend▁of▁sentence\uff5c> [e~[
"""
"""Tokens that end a text, by their text, whatever their type."""
ONE_OF = {
    "eos": "", "eot": "", "eom": "", "fim_pad": "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]",
    "fim_rep": "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>",
    "fim_sep": "<|file_sep|>",
}  # fmt: skip
"""Of each kind one more: the token that the metadata names, else the first with such a text."""
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"bos_token_id": 1, "eos_token_id": 2},
    "gpt2": {"pre": "default", "bos_token_id": 11, "eos_token_id": 11},
    "gemma4": {},
}
"""What metadata without these means, by the kind of the tokenizer."""
NORMAL, UNKNOWN, USER_DEFINED = 1, 2, 4
"""Types of tokens; unknown, control (3) and user-defined ones are found before text is split."""
PREFIX = "tokenizer.ggml."
KEYS = """
    model pre tokens scores token_type token_type_count merges add_bos_token add_eos_token
    add_space_prefix
"""
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
PUNCTUATION = r"[\p{P}\$\+<=>\^~\|]+"
SPLITS = {
    pre: splits
    for names, splits in {
        "gpt-2 phi-2 jina-es jina-de mpt olmo jais": [GPT2],
        "smollm starcoder refact command-r codeshell exaone minerva-7b": [r"\p{N}", GPT2],
        "default": [PUNCTUATION, GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
    }.items()
    for pre in names.split()
}
"""How text is split by `tokenizer.ggml.pre`; transformers knows others."""
WHOLE = "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano tekken"
"""With these, a word that is a token is not merged, and BOS is added unless a flag says no."""
UNSTRIPPED = "<unk> <s> <|endoftext|>"  # a Phi-3's other tokens take the spaces that follow them
ONE_BOS = """\
{%% set text +%%}%s{%%+ endset %%}\
{{ '' if text.startswith(bos_token or '') else bos_token }}{{ text }}"""
"""A chat template whose texts begin with one BOS."""


def end_tokens(file: GgufFile) -> list[int]:
    """The tokens that end a text."""
    own = _metadata(file)
    tokens = own.get("tokens", [])
    numbers = {token: number for number, token in enumerate(tokens)}
    ends = set(ENDS.split()) & numbers.keys()
    for name, texts in ONE_OF.items():
        named = [numbers[text] for text in texts.split() if text in numbers]
        if (number := own.get(f"{name}_token_id", min(named, default=None))) is not None:
            ends.add(tokens[number])
    if ends & {"<|call|>", "<|calls|>"} and ends & {"<|return|>", "<|flush|>"}:
        ends.discard("<|end|>")  # it ends a message
    if ends & {"<|tool_response>", "<|plamo:eos|>"}:
        ends.discard("</s>")  # it is text like any other
    return sorted(numbers[text] for text in ends)


def gguf_tokenizer(file: GgufFile) -> PreTrainedTokenizerFast:
    """The tokenizer, as one of transformers."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    own, splits = _metadata(file), {k: [v] for k, v in GGUF_PRE_TOKENIZER_SPLITS.items()} | SPLITS
    _refuse(file, own, splits)
    kind, pre, tokens = own["model"], own.get("pre", ""), own["tokens"]
    numbers = {token: number for number, token in enumerate(tokens)}
    is_bytes = kind == "gpt2"
    is_whole = is_bytes and pre in WHOLE.split()
    if kind == "llama":
        merges = generate_merges(numbers, dict(zip(tokens, own["scores"], strict=True)))
    else:
        merges = [tuple(merge.split(" ", 1)) for merge in own["merges"]]
    backend = Tokenizer(BPE(numbers, merges, byte_fallback=not is_bytes, ignore_merges=is_whole))
    if is_bytes:
        parts = [pre_tokenizers.Split(Regex(split), "isolated") for split in splits[pre]]
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*parts, to_bytes])
        backend.decoder = decoders.ByteLevel()
    else:
        has_prefix = own.get("add_space_prefix", kind == "llama")
        escape = [normalizers.Replace(" ", "▁"), normalizers.Prepend("▁")]
        read = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.normalizer = normalizers.Sequence(escape[: 1 + has_prefix])
        backend.decoder = decoders.Sequence(read + [decoders.Strip(" ", 1, 0)] * has_prefix)
    kinds = own.get("token_type") or [NORMAL] * len(tokens)
    by_text, ends = set(ENDS.split()), {tokens[number] for number in end_tokens(file)}
    strips = bool(re.search("(?i)phi-?3", file.metadata.get("general.name", "")))
    backend.add_tokens(
        [
            AddedToken(
                token,
                rstrip=strips and token not in UNSTRIPPED.split(),
                normalized=False,
                special=kind != USER_DEFINED or token in by_text,
            )
            for token, kind in zip(tokens, kinds, strict=True)
            if (token in by_text or UNKNOWN <= kind <= USER_DEFINED)
            and (token in ends or token != "</s>")
        ]
    )
    adds_bos = own.get("add_bos_token", kind == "llama" or is_whole) or kind == "gemma4"
    template = file.metadata.get("tokenizer.chat_template", "").removesuffix("\n")  # as jinja does
    tokenizer = PreTrainedTokenizerFast.__new__(PreTrainedTokenizerFast)
    tokenizer._tokenizer = backend  # it would copy `tokenizer_object`, which takes a second
    tokenizer.__init__(
        add_bos_token=adds_bos,
        add_eos_token=own.get("add_eos_token", False),
        chat_template=ONE_BOS % template if template and adds_bos else template or None,
        model_input_names=["input_ids", "attention_mask"],
        **{
            f"{key[:3]}_token": tokens[own[key]]  # "unk" and "pad" in transformers
            for key in ("bos_token_id", "eos_token_id", "unknown_token_id", "padding_token_id")
            if key in own and (kinds[own[key]] != NORMAL or f"{PREFIX}{key}" in file.metadata)
        },
    )
    return tokenizer


def _metadata(file: GgufFile) -> dict[str, Any]:
    """The tokenizer's metadata with llama.cpp's defaults, without numbers beyond its tokens."""
    own = file.under(PREFIX)
    size = len(own.get("tokens", ()))
    return {
        key: value
        for source in (DEFAULTS.get(own.get("model", ""), {}), own)
        for key, value in source.items()
        if not key.endswith("_token_id") or value < size
    }


def _refuse(file: GgufFile, own: Mapping[str, object], splits: Container[str]) -> None:
    """Raise SequoiaPlanError for metadata that the tokenizer made here would not follow.

    `own`: the tokenizer's metadata; `splits`: the values of `pre` whose splits are known.
    """
    followed = {"model": DEFAULTS} | ({"pre": splits} if own.get("model") == "gpt2" else {})
    for key, value in own.items():
        is_known = key in KEYS.split() or key.endswith("_token_id") or not value
        if not is_known or (key in followed and value not in followed[key]):
            raise SequoiaPlanError(
                f"{file.path}: {PREFIX}{key} is {value!r:.60}, which the tokenizer would "
                "not follow; use the model as a folder or a hub ID"
            )
