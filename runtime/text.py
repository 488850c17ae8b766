"""Text as token ids, and new tokens as text, which is the same in results and in streams."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import TextStreamer


def text_ids(tokenizer: Any, text: str) -> list[int]:
    """The ids of a text, without the tokenizer's BOS if the text has its own."""
    ids, begin = tokenizer(text)["input_ids"], tokenizer("")["input_ids"][:1]
    return list(ids[1:] if ids[:2] == begin * 2 else ids)


class NewText:
    """The text of new tokens after a prompt, the same however many of them come at once.

    Tokens that end inside a character wait for the next ones.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], options: dict[str, Any]) -> None:
        self.tokenizer, self.options, self.waiting = tokenizer, options, list[int]()
        self.add(prompt[-3:])  # its last character may lack bytes

    def add(self, tokens: Sequence[int]) -> str:
        """The text that is known with these tokens."""
        whole = ""
        for token in tokens:
            self.waiting.append(token)
            if not (text := self.rest()).endswith("\ufffd"):
                whole, self.waiting = whole + text, []
        return whole

    def rest(self) -> str:
        """The text of the tokens that wait, as it is after others.

        Many decoders drop a space where a text begins.
        """
        once, twice = (
            str(self.tokenizer.decode(self.waiting * times, **self.options)) for times in (1, 2)
        )
        return twice[len(once) :]


class TextStream(NewText):
    """Gives one of transformers' streamers the text that results have."""

    def __init__(self, streamer: TextStreamer, prompt: list[int]) -> None:
        super().__init__(streamer.tokenizer, prompt, streamer.decode_kwargs)
        self.streamer = streamer
        if not streamer.skip_prompt:
            streamer.on_finalized_text(self.tokenizer.decode(prompt, **self.options))

    def put(self, tokens: Tensor) -> None:
        """Take new tokens."""
        self.streamer.on_finalized_text(self.add(tokens.tolist()))

    def end(self) -> None:
        """Give what is left."""
        self.streamer.on_finalized_text(self.rest(), stream_end=True)
