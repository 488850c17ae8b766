"""Text as token ids, and new tokens as text, which is the same in results and in streams."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import TextStreamer


def text_ids(tokenizer: Any, text: str) -> list[int]:
    """The ids of a text, without the tokenizer's BOS if the text has its own."""
    ids, begin = tokenizer(text)["input_ids"], tokenizer("")["input_ids"][:1]
    return list(ids[1:] if ids[:2] == begin * 2 else ids)


class TextBefore:
    """Text before the first of some strings that is complete; what may begin one waits.

    The same however much text comes at once. `found` is that string, "" until then.
    """

    def __init__(self, strings: Sequence[str] = ()) -> None:
        self.strings, self.waiting, self.found = strings, "", ""

    def add(self, text: str) -> str:
        """The text that is known to be before the string."""
        if self.found:
            return ""
        text = self.waiting + text
        places = ((text.find(string), string) for string in self.strings)
        # of strings that end at one place, the one that begins first
        ends = [(place + len(string), place, string) for place, string in places if place >= 0]
        if ends:
            _, end, self.found = min(ends)
            self.waiting = ""
            return text[:end]
        lengths = (n for s in self.strings for n in range(1, len(s)) if text.endswith(s[:n]))
        end = len(text) - max(lengths, default=0)
        self.waiting = text[end:]
        return text[:end]


class NewText:
    """The text of new tokens after a prompt, the same however many of them come at once.

    Tokens that end inside a character wait for the next ones. The text ends before the first of
    `stop_strings`, which is then `stop.found`.
    """

    def __init__(
        self, tokenizer: Any, prompt: Sequence[int], options: dict[str, Any],
        stop_strings: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.tokenizer, self.options, self.waiting = tokenizer, options, list[int]()
        self.stop = TextBefore()
        self.add(prompt[-3:])  # its last character may lack bytes
        self.stop = TextBefore(stop_strings)

    def add(self, tokens: Sequence[int]) -> str:
        """The text that is known with these tokens."""
        whole = ""
        for token in tokens:
            self.waiting.append(token)
            if not (text := self._waiting_text()).endswith("\ufffd"):
                whole, self.waiting = whole + self.stop.add(text), []
        return whole

    def rest(self) -> str:
        """What waits, once no more tokens come."""
        return "" if self.stop.found else self.stop.waiting + self._waiting_text()

    def _waiting_text(self) -> str:
        """The text of the tokens that wait, as it is after others.

        Many decoders drop a space where a text begins.
        """
        once, twice = (
            str(self.tokenizer.decode(self.waiting * times, **self.options)) for times in (1, 2)
        )
        return twice[len(once) :]


class TextStream(NewText):
    """Gives one of transformers' streamers the text that results have."""

    def __init__(
        self, streamer: TextStreamer, prompt: list[int], stop_strings: Sequence[str] = ()
    ) -> None:
        super().__init__(streamer.tokenizer, prompt, streamer.decode_kwargs, stop_strings)
        self.streamer = streamer
        if not streamer.skip_prompt:
            streamer.on_finalized_text(self.tokenizer.decode(prompt, **self.options))

    def put(self, tokens: Tensor) -> None:
        """Take new tokens."""
        self.streamer.on_finalized_text(self.add(tokens.tolist()))

    def end(self) -> None:
        """Give what is left."""
        self.streamer.on_finalized_text(self.rest(), stream_end=True)
