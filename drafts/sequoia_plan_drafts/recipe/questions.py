"""The questions of the training text: from templates, requests for copies, or the target's own."""

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MAX_PASSAGE_TOKENS = 80
"""The most tokens of a passage that is to be copied: the answer must fit in the context, too."""
TEMPLATES = Path(__file__).with_name("questions.txt")
"""One a line; {a} and {b} stand for words, {passage} for an earlier answer and {misspelled} for one
with a few letters taken out."""


def make_questions(
    tokenizer: Any, count: int, passages: Sequence[str], rng: random.Random
) -> list[str | None]:
    """Random questions, None where the target is to write one itself.

    A fifth ask for copies, once there are passages. Half of the others are the target's, half
    templates; all are the target's if its vocabulary has no words for the templates.
    """
    words = _vocabulary_words(tokenizer)
    lines = TEMPLATES.read_text(encoding="utf-8").splitlines()
    copying = [line for line in lines if "{passage}" in line or "{misspelled}" in line]
    templates = [line for line in lines if line not in copying]
    questions: list[str | None] = []
    for _ in range(count):
        if passages and rng.random() < 0.2:
            passage = rng.choice(passages)
            question = rng.choice(copying).replace("\\n", "\n").replace("{passage}", passage)
            questions.append(question.replace("{misspelled}", misspelled(passage, rng)))
        elif words and rng.random() < 0.5:
            template = rng.choice(templates)
            questions.append(template.format(a=rng.choice(words), b=rng.choice(words)))
        else:
            questions.append(None)
    return questions


def passage_of(tokenizer: Any, answer: Sequence[int]) -> str:
    """The begin of an answer, up to a sentence's or a line's end within the first tokens.

    If none ends there, it is cut off after `MAX_PASSAGE_TOKENS`.
    """
    text: str = tokenizer.decode(answer[:MAX_PASSAGE_TOKENS], skip_special_tokens=True)
    ends = [match.end() for match in re.finditer(r"[.!?](?=\s|$)|\n", text)]
    return text[: ends[-1]].strip() if ends else text.strip()


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
