"""Small vocabularies of GGUF files, with the ids and the ends that llama.cpp has for them."""

LLAMA = {
    "model": "llama",
    "tokens": "<unk> <s> </s> ▁ ▁▁ ▁▁▁ a b ▁a ▁ab ab <|x|> <|endoftext|>",
    "scores": "0 0 0 -9 -1 -2 -9 -9 -3 -5 -4 0 0",
    "token_type": "2 3 3 1 1 1 1 1 1 1 1 3 3",
}
GPT2 = {
    "tokens": "a b Ġ 1 2 Ġa ab Ġab 12 <s> </s> x <PAD> \uff5c __",
    "merges": "Ġ a,a b,1 2",
    "token_type": "1 1 1 1 1 1 1 1 1 3 1 1 1 3 4",
    "bos_token_id": 9,
}
IDS = [
    (LLAMA, {}, "  ab", "1 5 10"),
    (LLAMA, {}, "a<s>  a<|x|> ab", "1 8 1 5 6 11 4 10"),
    (LLAMA, {"add_bos_token": False}, "aab  b", "8 10 4 7"),
    (LLAMA, {"add_space_prefix": False}, "  ab", "1 4 10"),
    (LLAMA, {"general.name": "Phi-3 x"}, " a</s> b<|x|> ab", "1 4 6 2 3 7 11 9"),
    (GPT2, {"pre": "gpt-2"}, " ab  ab12 x</s>", "5 1 14 6 8 2 11 10"),
    (GPT2, {"pre": "llama-bpe"}, " ab\uff5cb", "9 7 13 1"),
    (GPT2, {"pre": "tekken", "add_bos_token": False}, " ab12", "7 3 4"),
    (GPT2, {"pre": "smollm", "add_bos_token": True}, " ab12", "9 5 1 3 4"),
    (GPT2, {}, " ab12", "5 1 8"),
    (GPT2, {"bos_token_id": 0, "add_bos_token": True}, "b", "0 1"),
]
ENDS = [
    ("x <turn|> <|tool_response> [EOT] [EOS] </s> <eos>", {}, "1 2 3 4 6"),
    ("x </s> <end_of_utterance> [e~[ _<EOT>", {}, "1 2 3 4"),
    ("x <\uff5cend▁of▁sentence\uff5c> <|im_end|>", {}, "1 2"),
    ("<|end|> <|return|> x", {}, "0 1"),
    ("<|end|> <|return|> <|call|>", {}, "1 2"),
    ("<|end|> <|calls|> <|flush|>", {"eos_token_id": 0}, "1 2"),
    ("<|end|> <|calls|> x", {}, "0 1"),
    ("</s> <|plamo:eos|> y", {"eos_token_id": 1}, "1"),
    ("<fim-pad> <reponame> <|file_sep|> x", {}, "0 1 2"),
    ("<fim-pad> <reponame> <|file_sep|> x", {"fim_pad_token_id": 3}, "1 2 3"),
    ("x y z", {"fim_rep_token_id": 1, "fim_sep_token_id": 2, "eom_token_id": 9}, "1 2"),
    ("0 1 2 3 4 5 6 7 8 9 10 11 12", {"eos_token_id": 2**32 - 1, "eot_token_id": 3}, "3 11"),
    ("<unk> <s> x y", {"model": "llama", "scores": "0 0 0 0"}, "2"),
]
