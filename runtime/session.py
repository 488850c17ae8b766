"""A text that goes on: a conversation, or several continuations of one prompt."""

from typing import Any

from sequoia_plan.runtime.generation import Generation, read_prompt, whole_number


class Session:
    """A decoder and the token ids of one text, which the decoder's caches hold between turns.

    Whatever else the decoder generates meanwhile is right, too; the text is then read again.
    """

    def __init__(self, decoder: Any, prompt: Any = ()) -> None:
        self.decoder, self.ids = decoder, list[int]()
        if len(prompt):
            self.say(prompt)

    def say(self, prompt: Any) -> None:
        """Add text or token ids; they are read when the text is continued."""
        tokenizer = self.decoder.tokenizer
        if isinstance(prompt, str) and tokenizer is not None and self.ids:
            # it begins no text, where many tokenizers put a space
            space = " " * "".join(tokenizer.tokenize("a")).startswith("▁")
            prompt = tokenizer(prompt.removeprefix(space), add_special_tokens=False)
        self.ids += read_prompt(prompt, tokenizer, None, self.decoder.step.target).tolist()

    def generate(self, max_new_tokens: int | None = 128, **settings: Any) -> Generation:
        """Continue the text; `settings` are those of `SequoiaDecoder.generate`."""
        result = self.decoder.generate(self.ids, max_new_tokens, reuse_prefix=True, **settings)
        self.ids = result.sequences[0].tolist()
        return result

    def rewind(self, num_tokens: int) -> None:
        """Take the last tokens back."""
        count = whole_number("num_tokens", num_tokens, 0, len(self.ids)) or 0
        del self.ids[len(self.ids) - count :]
