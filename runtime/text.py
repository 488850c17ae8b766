"""Text as token ids, and new tokens as text, which is the same in results and in streams."""

from collections.abc import Mapping, Sequence

from torch import Tensor
from transformers import PreTrainedTokenizerBase, TextStreamer


def text_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The ids of a text, without the tokenizer's BOS if the text has its own."""
    ids, begin = tokenizer(text)["input_ids"], tokenizer("")["input_ids"][:1]
    return list(ids[1:] if ids[:2] == begin * 2 else ids)


class TextBefore:
    """Text before the first of some strings that is complete; what may begin one waits.

    `found` is that string, "" until then.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.strings, self.waiting, self.found = strings, "", ""

    def add(self, text: str) -> str:
        """Add text; returns what is new of the text known to come before the strings."""
        if self.found:
            return ""
        text = self.waiting + text
        # of strings that end at one place, the longest
        ends = [(text.find(s) + len(s), -len(s), s) for s in self.strings if s in text]
        if ends:
            end, minus_length, self.found = min(ends)
            self.waiting = ""
            return text[: end + minus_length]
        begun = (n for s in self.strings for n in range(len(s)) if text.endswith(s[:n]))
        num_known = len(text) - max(begun, default=0)
        self.waiting = text[num_known:]
        return text[:num_known]


class NewText:
    """The text of new tokens after a prompt, the same however many of them come at once.

    Tokens that end inside a character wait for the next ones. It ends before the first of `stops`.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int],
        options: Mapping[str, object], stops: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.tokenizer, self.options, self.waiting = tokenizer, options, list[int]()
        self.before = TextBefore(())
        self.add(prompt[-3:])  # its last character may lack bytes
        self.before = TextBefore(stops)

    def add(self, tokens: Sequence[int]) -> str:
        """Add tokens; returns the text that is known with them and was not before."""
        whole = ""
        for token in tokens:
            self.waiting.append(token)
            if not (text := self._decoded()).endswith("\ufffd"):
                whole, self.waiting = whole + self.before.add(text), []
        return whole

    def rest(self) -> str:
        """The text that waits, once no more tokens come."""
        return self.before.waiting + self._decoded()

    def _decoded(self) -> str:
        """The text of the waiting tokens as it is within a text: that of the second of two copies.

        Many decoders drop a space where a text begins.
        """
        once = self.tokenizer.decode(self.waiting, **self.options)
        twice = self.tokenizer.decode(self.waiting * 2, **self.options)
        return twice[len(once) :]


class TextStream(NewText):
    """Gives one of transformers' streamers the text that results have."""

    def __init__(self, streamer: TextStreamer, prompt: list[int], stops: Sequence[str]) -> None:
        super().__init__(streamer.tokenizer, prompt, streamer.decode_kwargs, stops)
        self.streamer = streamer
        if not streamer.skip_prompt:
            streamer.on_finalized_text(self.tokenizer.decode(prompt, **self.options))

    def put(self, tokens: Tensor) -> None:
        """Take new tokens."""
        self.streamer.on_finalized_text(self.add(tokens.tolist()))

    def end(self) -> None:
        """Give what is left."""
        self.streamer.on_finalized_text(self.rest(), stream_end=True)
