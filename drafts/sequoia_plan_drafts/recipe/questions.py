"""The questions of the training text: from templates, requests for copies, or the target's own."""

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sequoia_plan.artifacts import ArgumentError

MAX_PASSAGE_TOKENS = 80
"""The most tokens of a passage that is to be copied: the answer must fit in the context, too."""
PASSAGE = re.compile("{(passage|misspelled)}")
"""In a template: an earlier answer, and one with a few letters taken out."""
BEGINS = (
    "Write a Python function", "Write a function that", "How do I", "How can I", "In Python,",
    "In JavaScript,", "In Java,", "In C++,", "In Go,", "In Rust,", "Write a SQL query",
    "Write a shell script", "Write a class", "Create a", "Implement", "Explain", "Why does",
    "Fix this code:", "What does this code do?", "Complete this function:\n\ndef", "Given a",
    "Convert", "Refactor", "Write tests for", "I have a",
)  # fmt: skip
"""Of questions about code."""
LANGUAGES = ("Python", "JavaScript", "TypeScript", "Java", "C", "C++", "Go", "Rust", "Bash", "SQL")
"""Of programming, for {language} in a template; {a} and {b} stand for words, {task} for a task."""


class Questions:
    """Random questions: from templates, or None where the target is to write one itself.

    A fifth ask for copies, once there are passages. Half of the others are the target's, half
    templates; all are the target's if its vocabulary has no words for the templates. Of "code", a
    third are those of "chat".
    """

    def __init__(self, kind: str, tokenizer: Any, rng: random.Random) -> None:
        self.rng, self.words = rng, _vocabulary_words(tokenizer)
        chat = _lines("questions.txt")
        if kind not in ("chat", "code"):
            raise ArgumentError(f"--questions {kind}: expected chat or code")
        self.kinds = [chat] if kind == "chat" else [chat, *[_lines("questions-code.txt")] * 2]
        self.tasks = _lines("tasks.txt")

    def begin(self) -> str:
        """How a question that the target writes begins; "" if that is left to it, too."""
        is_chat = self.rng.choice(self.kinds) is self.kinds[0]
        return "" if is_chat else self.rng.choice(BEGINS)

    def next(self, passages: Sequence[str]) -> str | None:
        """A question."""
        rng, lines = self.rng, self.rng.choice(self.kinds)
        is_copy = bool(passages) and rng.random() < 0.2
        if not is_copy and (not self.words or rng.random() < 0.5):
            return None
        choices = [line for line in lines if is_copy == bool(PASSAGE.search(line))]
        question = rng.choice(choices).replace("\\n", "\n")
        if is_copy:
            passage = rng.choice(passages)
            question = question.replace("{passage}", passage)
            question = question.replace("{misspelled}", misspelled(passage, rng))
        values = {
            "a": rng.choice(self.words or ["name"]), "b": rng.choice(self.words or ["name"]),
            "task": rng.choice(self.tasks), "language": rng.choice(LANGUAGES),
        }  # fmt: skip
        for name, value in values.items():
            question = question.replace(f"{{{name}}}", value)
        return question


def _lines(name: str) -> list[str]:
    """The lines of a file beside this one."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8").splitlines()


def passage_of(tokenizer: Any, answer: Sequence[int]) -> str:
    """The begin of an answer, up to a sentence's or a line's end within the first tokens.

    If none ends there, it is cut off after `MAX_PASSAGE_TOKENS`.
    """
    text: str = tokenizer.decode(answer[:MAX_PASSAGE_TOKENS], skip_special_tokens=True)
    ends = [match.end() for match in re.finditer(r"[.!?](?=\s|$)|\n", text)]
    return text[: ends[-1]].strip() if ends else text.strip()


def around_a_hole(code: str, rng: random.Random) -> tuple[str, str]:
    """What is before and after a hole in code, which begins anywhere and ends with a line."""
    start = rng.randrange(len(code))
    ends = [match.end() - 1 for match in re.finditer("\n", code) if match.end() > start][:6]
    return code[:start], code[rng.choice(ends or [len(code)]) :]


def misspelled(text: str, rng: random.Random) -> str:
    """The text with one inner letter taken out of about every eighth word of five letters."""

    def take_out_a_letter(match: re.Match[str]) -> str:
        word = match.group()
        if rng.random() > 1 / 8:
            return word
        place = rng.randrange(1, len(word) - 1)
        return word[:place] + word[place + 1 :]

    return re.sub(r"[a-z]{5,}", take_out_a_letter, text)


def _vocabulary_words(tokenizer: Any) -> list[str]:
    """Lower-case words of more than three ASCII letters that are one token with a space before."""
    decoded = {tokenizer.decode([token]) for token in range(len(tokenizer))}
    return sorted(text[1:] for text in decoded if re.fullmatch(" [a-z]{4,}", text))
