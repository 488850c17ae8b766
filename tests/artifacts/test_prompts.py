"""Prompt files: what is read as a prompt, and what is no prompt or would be misread."""

import json

import pytest
from refusals import refusal

from sequoia_plan.artifacts.prompts import Prompt, held_out_half, load, measuring_half
from sequoia_plan.profiler.prompts import encode

ANSWERED = [
    {"role": "system", "content": "Be brief."},
    {
        "role": "user",
        "content": [{"type": "text", "text": "Why "}, {"type": "text", "text": "rain?"}],
    },
    {"role": "assistant", "content": "Because."},
]
QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why rain?"}]


class Words:
    """A tokenizer without a chat template: one token a word."""

    chat_template = None

    def __call__(self, text):
        return {"input_ids": [len(word) for word in text.split()]}


@pytest.mark.parametrize(
    ("entry", "prompt"),
    [
        ({"text": "a line\u2028separator"}, Prompt("a line\u2028separator")),
        ({"messages": ANSWERED}, Prompt(QUESTION)),
        ({"messages": QUESTION, "kind": "rain", "category": 3}, Prompt(QUESTION, "rain")),
        ({"category": "writing", "turns": ["Compose.", "Rewrite."]}, Prompt("Compose.", "writing")),
        *(
            # no kind that a profile could hold: as if it were not there
            ({"text": "fine", "kind": kind}, Prompt("fine"))
            for kind in ("", 7, ["a"], None, "a\x1b[2J", 61 * "k")
        ),
    ],
)
def test_lines(tmp_path, entry, prompt):
    for name in ("p.jsonl", "P.JSONL", "p.ndjson"):
        (tmp_path / name).write_text(json.dumps(entry, ensure_ascii=False) + "\r\n\n")
        assert load(tmp_path / name) == [prompt]


def test_paragraphs(tmp_path):
    (tmp_path / "p.txt").write_bytes("\ufeffFirst\r\nprompt.\r\n\r\nSecond.\r\n".encode())
    assert load(tmp_path / "p.txt") == [Prompt("First\nprompt."), Prompt("Second.")]
    (tmp_path / "p.txt").write_text("[1, 2\n\n{curly} braces")  # looks like JSON, and is none
    assert load(tmp_path / "p.txt") == [Prompt("[1, 2"), Prompt("{curly} braces")]


def test_prompts_are_drawn_evenly_over_kinds_and_over_the_file(tmp_path):
    """From a file with one kind after the other, the first prompts are of all kinds and places."""
    lines = [{"turns": [f"{kind} {i}"], "category": kind} for kind in "abcdef" for i in range(16)]
    lines += [{"text": "rare", "kind": "rare"}, {"text": "rarer", "kind": "rarer"}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, lines)))
    prompts = load(tmp_path / "p.jsonl")
    halves = measuring_half(prompts), held_out_half(prompts)
    assert sorted(p.text for half in halves for p in half) == sorted(p.text for p in prompts)
    for half in halves:
        assert len(half) == 49
        assert [prompt.kind for prompt in half[7:49]] == list("abcdef") * 7
        numbers = [int(prompt.text[2:]) for prompt in half if prompt.kind == "c"]
        assert sorted(numbers[:4]) == [numbers[0] + n for n in (0, 4, 8, 12)]
    assert [half[6].kind for half in halves] == ["rare", "rarer"]


def test_halves_and_encoding():
    prompts = list(map(Prompt, "abcd"))
    assert measuring_half(prompts) == prompts[::2] and held_out_half(prompts) == prompts[1::2]
    assert measuring_half(prompts[:1]) == held_out_half(prompts[:1]) == prompts[:1]
    assert encode(Words(), QUESTION) == [2, 6, 3, 5]


@pytest.mark.parametrize(
    "line",
    [
        '{"messages": []}',
        '{"messages": [{"role": "assistant", "content": "x"}]}',
        '{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
        '{"messages": [{"role": "user", "content": "\\udfff"}]}',
        '{"turns": []}',
        '{"text": 3}',
        "[" * 5000,
    ],
)
def test_lines_that_are_no_prompt(tmp_path, line):
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n' + line + "\n")
    with refusal(r"bad\.jsonl: line 2 is no prompt; expected"):
        load(tmp_path / "bad.jsonl")


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("x.json", b'{"text": "a"}\n', "holds JSON and is not named .jsonl"),
        ("x.JSON", b"not even JSON", "holds JSON and is not named .jsonl"),
        ("x.txt", b'{"text": "a"}\n{"text": "b"}\n', "holds JSON and is not named .jsonl"),
        ("x", b'[\n{"text": "a"}\n]', "holds JSON and is not named .jsonl"),
        ("x.txt", "What is rain?".encode("utf-16-le"), "holds NUL characters, as UTF-16 does"),
        ("x.jsonl", b"\xff", "not UTF-8 text"),
        ("x.jsonl", b"\n", "holds no prompt"),
    ],
)
def test_files_that_would_be_misread(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with refusal(message):
        load(tmp_path / name)
