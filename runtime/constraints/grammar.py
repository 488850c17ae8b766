"""Structured output: texts of a JSON schema, a regular expression or a grammar, by xgrammar."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from sequoia_plan.artifacts import ArgumentError
from sequoia_plan.runtime.constraints.json_schema import LOOKAHEAD, refuse_unenforced
from sequoia_plan.runtime.constraints.path_logits import Path

_compilers: WeakKeyDictionary[PreTrainedTokenizerBase, object] = WeakKeyDictionary()
"""xgrammar's compiler for each tokenizer; it has read the whole vocabulary."""
MAX_BLANKS = 8
"""Blanks in a row between parts of JSON, at most: a model may prefer them to going on."""
OPENED, CLOSED = "<think>", "</think>"
"""What a thought stands between; only texts after it follow a grammar."""


class Grammar:
    """Lets through the tokens that continue a text of a grammar (see `PathProcessor`).

    Where the prompt ends with `<think>`, the text of the grammar begins after `</think>`.

    Args:
        tokenizer: the target's.
        json_schema: a JSON schema, as text or as a dictionary. At most eight blanks stand together
            between the parts of its texts.
        regex: a regular expression that the whole text matches.
        ebnf: a grammar in xgrammar's notation (GBNF), whose first rule is `root`.

    Raises:
        ArgumentError: if not exactly one of the three is given, it cannot be compiled, has a part
            that xgrammar does not enforce, or xgrammar is not installed.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        json_schema: str | Mapping[str, object] | None = None,
        regex: str | None = None,
        ebnf: str | None = None,
    ) -> None:
        given = {"json_schema": json_schema, "regex": regex, "grammar": ebnf}
        sources = {name: source for name, source in given.items() if source is not None}
        if len(sources) != 1:
            raise ArgumentError(
                f"grammar: found {', '.join(sources) or 'none'}, expected one of {', '.join(given)}"
            )
        [(language, source)] = sources.items()
        try:
            import xgrammar
        except ImportError as error:
            raise ArgumentError(
                f"{language}: needs xgrammar, which is not installed; pip install "
                "'sequoia-plan[grammar]'"
            ) from error
        try:
            text = source if isinstance(source, str) else json.dumps(source)
            if language == "json_schema":
                refuse_unenforced(schema := json.loads(text), schema)
            if language == "regex" and re.search(LOOKAHEAD, text):
                raise ValueError("a lookahead is not enforced")
            if tokenizer not in _compilers:
                _compilers[tokenizer] = xgrammar.GrammarCompiler(_vocabulary_of(tokenizer))
            options = {"max_whitespace_cnt": MAX_BLANKS} if language == "json_schema" else {}
            self.compiled = getattr(_compilers[tokenizer], f"compile_{language}")(text, **options)
        except (ValueError, RuntimeError, TypeError, LookupError, AttributeError) as error:
            reason = re.sub(r"^\[.*?\] \S+: ", "", str(error).strip().splitlines()[-1])
            if isinstance(error, (LookupError, AttributeError)):
                reason = "not a JSON schema"
            raise ArgumentError(
                f"{language}: found {str(source).strip()[:60] or 'nothing'}: {reason}"
            ) from error
        self.xgrammar, self.vocabulary = xgrammar, self.compiled.tokenizer_info.vocab_size
        self.tokenizer = tokenizer

    def begin(self, prompt: Sequence[int], end_tokens: Collection[int]) -> None:
        """A text begins after `prompt`; it may end with one of `end_tokens` once it is complete."""
        ends = [token for token in end_tokens if token < self.vocabulary] or None
        self.matcher = self.xgrammar.GrammarMatcher(self.compiled, override_stop_tokens=ends)
        self.masks: dict[Path, Tensor] = {}
        self.thought: list[int] | None = None
        if self.tokenizer.decode(prompt[-2 * len(OPENED) :]).rstrip().endswith(OPENED):
            self.thought = []

    def commit(self, tokens: Sequence[int]) -> None:
        """Let the matcher accept the next tokens of the text, once a thought has ended."""
        answer = self._answer(tokens)
        self.thought = [*(self.thought or ()), *tokens] if answer is None else None
        for token in answer or ():
            if not self.matcher.is_terminated():
                self.matcher.accept_token(token)
        self.masks = {}

    def __call__(self, paths: Sequence[Path], logits: Tensor) -> Tensor:
        """Set logits of tokens that are not allowed to -inf, except after paths that left it."""
        masks = torch.cat([self._mask(path) for path in paths]).to(logits.device)
        width = min(self.vocabulary, logits.shape[1])
        self.xgrammar.apply_token_bitmask_inplace(logits, masks, vocab_size=width)
        if logits.shape[1] > self.vocabulary:  # a head may have more rows than there are tokens
            allows_all = (masks == -1).all(-1)
            logits[~allows_all, self.vocabulary :] = -torch.inf
        return logits

    def _mask(self, path: Path) -> Tensor:
        """int32 [1, vocabulary / 32]: a bit for each token that is allowed after a path.

        All are, off the grammar and at its end. A mask is made once a step, for draft and target.
        """
        if path not in self.masks:
            num_accepted, matcher, answer = 0, self.matcher, self._answer(path)
            mask = self.xgrammar.allocate_token_bitmask(1, self.vocabulary)
            for token in answer or ():
                if matcher.is_terminated() or not matcher.accept_token(token):
                    break
                num_accepted += 1
            if answer is not None and num_accepted == len(answer) and not matcher.is_terminated():
                matcher.fill_next_token_bitmask(mask)
            if num_accepted:
                matcher.rollback(num_accepted)
            self.masks[path] = mask
        return self.masks[path]

    def _answer(self, tokens: Sequence[int]) -> Sequence[int] | None:
        """Those of the next tokens that follow `</think>`; None if the thought goes on."""
        if self.thought is None:  # not in a thought, of which it has the tokens so far
            return tokens
        before = self.thought[-len(CLOSED) :]  # `</think>` may take several tokens
        for count in range(1, len(tokens) + 1):
            if CLOSED in self.tokenizer.decode([*before, *tokens[:count]]):
                return tokens[count:]
        return None


def _vocabulary_of(tokenizer: PreTrainedTokenizerBase) -> object:
    """xgrammar's TokenizerInfo, in which control tokens have no text: no grammar allows them."""
    from xgrammar import TokenizerInfo

    info = TokenizerInfo.from_huggingface(tokenizer)
    added, texts = tokenizer.added_tokens_decoder, info.decoded_vocab
    for token in {*tokenizer.all_special_ids, *(t for t in added if added[t].special)}:
        texts[token] = b""
    ends = info.stop_token_ids or None
    return TokenizerInfo(texts, stop_token_ids=ends, add_prefix_space=info.add_prefix_space)
