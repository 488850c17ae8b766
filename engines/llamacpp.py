"""llama.cpp in a build of the user's: how its servers are started, run, and are told how to draft.

The draft's probabilities are recorded along texts, from which `replay` predicts every maximum
length (n-max) and threshold (p-min).
"""

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from sequoia_plan.engines.chain_replay import (
    ChainStep,
    DraftedText,
    LookupText,
    Proposal,
    ReplayModel,
    acceptance_of,
    drafted_text,
)
from sequoia_plan.engines.driver import fill_up
from sequoia_plan.engines.llama_server import Build, Server
from sequoia_plan.engines.plan import ContextPlan
from sequoia_plan.engines.pool import EnginePool
from sequoia_plan.engines.spec_types import (
    HIDDEN_STATE_TYPES,
    LOOKUP,
    candidates,
    default_drafting,
    flags,
    timed_draftings,
)
from sequoia_plan.engines.timing import NEVER
from sequoia_plan.engines.workload import (
    NONE,
    Drafting,
    EngineRun,
    RunKind,
    text_before,
)

SERVER_CONTEXT = 4096
"""Size of a server's context, at least, unless --server-args sets it."""
ROOM = 512
"""Room in a server's context beyond the largest prompt and its tokens: chains that are recorded
are longer, and a text to time lookups in, too."""
EXTRA_LENGTH = 4
"""Tokens of a recorded chain beyond the longest one that is planned."""
PROMPTS_PER_ROUND = 4
LOOKUPS_PER_ROUND = 2
"""Texts of a round that times lookups, each with several drafts."""
COPIED_DRAFTS = 4
"""Drafts of a lookup that are timed in a text."""
MIN_PERIOD = 16
"""Tokens of a text that is repeated to time lookups, at least."""
PERIOD_MARGIN = 8
"""Tokens of such a text beyond those that are drafted."""


class Logged(NamedTuple):
    """Names a server that logs the chains that it drafts."""

    drafting: Drafting


@dataclass(kw_only=True)
class LlamaCppPool(EnginePool):
    """Servers that decode one request at a time."""

    rounds = 3
    starts_each_round = True

    build: Build
    spec_type: str
    arguments: Sequence[str] = ()
    """Further options of llama-server."""
    lookup_texts: dict[int, list[LookupText]] = field(default_factory=dict)
    """Recorded texts by context."""

    @property
    def has_device(self) -> bool:
        """Whether this build lists a device other than the CPU."""
        return self.build.has_device

    @property
    def default_drafting(self) -> Drafting:
        """What llama.cpp does if only the type is named."""
        return default_drafting(self.spec_type)

    def start(self, key: Drafting | Logged) -> Server:
        """Starts a server."""
        self.report_status("starting llama-server")
        logs_chains = isinstance(key, Logged)
        drafting = key.drafting if isinstance(key, Logged) else key
        size = max(SERVER_CONTEXT, self.max_context + self.workload.tokens + ROOM)
        options = [
            *("-m", self.target, "-np", "1", "-c", str(size), "--offline"),
            *flags(drafting, self.spec_type, self.draft),
            *self.arguments,
            *(["--verbosity", "5"] if logs_chains else []),
        ]
        server = Server(self.build, options)
        self.exit_stack.callback(server.close)
        server.wait()
        return server

    def encode(self, engine: Server) -> tuple[list[list[int]], list[list[int]]]:
        """Token ids of the prompts, by the target's tokenizer."""
        encoded = [engine.encode(prompt) for prompt in self.workload.prompts]
        return [prompt for prompt, _ in encoded], [text for _, text in encoded]

    def prompt(self, index: int, context: int = 0) -> list[int]:
        """Token ids of a prompt, with texts before it so that it has `context` tokens.

        The texts are those that the prompts to measure on, or to verify on, do not have: a prompt
        that came twice would be looked up. They are the same for all of these prompts, so a server
        that has decoded one has the begin of the next in its cache.
        """
        middle = self.workload.num_measuring
        others = self.texts[middle:] if index < middle else self.texts[:middle]
        return fill_up(self.prompts[index], text_before(others or self.texts, 0, context))

    def _completion(self, prompt: Sequence[int], tokens: int, context: int) -> dict[str, Any]:
        """A request to decode a prompt. With a context, its begin may be in the server's cache."""
        return {
            "prompt": list(prompt),
            "n_predict": tokens,
            "temperature": self.workload.temperature,
            "cache_prompt": context > 0,
        }

    def decode(
        self,
        key: Drafting | Logged,
        prompts: Iterable[int],
        context: int = 0,
        extra_tokens: int = 0,
    ) -> list[list[ChainStep]]:
        """Decodes prompts, one at a time, and returns each one's steps."""
        self.ensure_running([key])
        server, tokens = self.running[key], self.workload.tokens + extra_tokens
        return [
            server.generate(self._completion(self.prompt(i, context), tokens, context))
            for i in prompts
        ]

    def run(self, kind: RunKind, prompts: Sequence[int]) -> EngineRun:
        """Decodes prompts."""
        return engine_run(chain.from_iterable(self.decode(kind.drafting, prompts, kind.context)))

    def record(self, max_length: int, batch: int, context: int) -> ReplayModel:
        """Records what is replayed, and counts how far the longest chains are accepted."""
        texts: Sequence[DraftedText | LookupText]
        if self.spec_type == LOOKUP:
            texts = self.lookup_texts[context] = self._record_lookup(context)
            longest = Drafting(max_length, lookup_size=min(2, max_length))
            recorded = [text.replay(longest) for text in texts]
        else:
            texts, recorded = self._record_draft(max_length + EXTRA_LENGTH, context)
        replays = {
            drafting: [text.replay(drafting) for text in texts]
            for drafting in candidates(self.spec_type, max_length)
        }
        return ReplayModel(acceptance_of(recorded, self.source(context)), replays)

    def _record_lookup(self, context: int) -> list[LookupText]:
        """Decodes prompts without speculation, for their tokens."""
        self.report_status("decoding texts to look tokens up in")
        self.ensure_running([NONE])
        prompts = [self.prompt(i, context) for i in self.workload.measuring]
        return [
            LookupText(prompt, self._text(NONE, prompt, context), self.workload.tokens)
            for prompt in prompts
        ]

    def _text(self, key: Drafting | Logged, prompt: Sequence[int], context: int) -> list[int]:
        """The token ids that a server writes after a prompt."""
        completion = self._completion(prompt, self.workload.tokens, context)
        return self.running[key].text(completion)

    def _record_draft(
        self, length: int, context: int
    ) -> tuple[list[DraftedText], list[list[ChainStep]]]:
        """Decodes prompts and records the draft's probabilities along their texts."""
        self.report_status(f"recording chains of {length} tokens")
        key = Logged(Drafting(length))
        self.ensure_running([key])
        server = self.running[key]
        num_before = len(server.logged_chains())  # of another context
        recorded = self.decode(key, self.workload.measuring, context, extra_tokens=length)
        chains = ([prob for _, prob in tokens] for tokens in server.logged_chains()[num_before:])
        texts = [drafted_text(steps, chains, self.workload.tokens) for steps in recorded]
        if self.spec_type in HIDDEN_STATE_TYPES:
            first = self._record_first_tokens(context)
            texts = [replace(text, first=first[i]) for i, text in enumerate(texts)]
        return texts, recorded

    def _record_first_tokens(self, context: int) -> list[list[Proposal]]:
        """Decodes prompts, and records the first token that a draft proposes at each position.

        The server's threshold lets no token through, so that every position is the begin of a
        chain, but the log has the token that would have been drafted.
        """
        self.report_status("recording the first token of a chain at each position")
        key = Logged(Drafting(1, NEVER))
        self.ensure_running([key])
        server = self.running[key]
        recorded, num_before = [], len(server.logged_chains())
        for i in self.workload.measuring:
            tokens = self._text(key, self.prompt(i, context), context)
            chains = server.logged_chains()
            # the first token of a text is the prompt's, and the last one may not be drafted
            pairs = zip(tokens[1:], chains[num_before:], strict=False)
            recorded.append([Proposal(prob, token == own) for own, ((token, prob), *_) in pairs])
            num_before = len(chains)
        return recorded

    def timed_draftings(self, max_length: int) -> list[Drafting]:
        """Every length of a plan: the times are staircases, since kernels change with the batch."""
        return timed_draftings(self.spec_type, max_length)

    def time_round(self, kind: RunKind, round_index: int) -> EngineRun:
        """Times the steps that draft as many tokens as they may.

        Lookups are timed in texts that repeat themselves, about as long as the prompts are: a step
        takes longer after a longer text. With a context it is one text, which the server then has
        in its cache.
        """
        drafting, _, context = kind
        self.report_status(f"timing steps, round {round_index + 1} of {self.rounds}")
        tokens = self.workload.tokens
        if drafting.lookup_size:
            tokens = max(tokens, COPIED_DRAFTS * (drafting.length + 1))
            prompts = self._repeated_prompts(drafting.length, context)
        else:
            first = round_index * PROMPTS_PER_ROUND
            indices = [(first + i) % self.workload.num_measuring for i in range(PROMPTS_PER_ROUND)]
            prompts = [self.prompt(i, context) for i in indices]
        # what follows a long context may be the text's end
        ignores_end = drafting.lookup_size > 0 or context > 0
        steps = chain.from_iterable(
            self.running[drafting].generate(self._completion(prompt, tokens, context), ignores_end)
            for prompt in prompts
        )
        length = 0 if drafting.min_prob == NEVER else drafting.length
        return engine_run(step for step in steps if step.is_single and step.drafted == length)

    def _repeated_prompts(self, length: int, context: int) -> list[list[int]]:
        """The texts in which a lookup of some length is timed."""
        sizes = [len(self.prompts[i]) for i in self.workload.measuring]
        texts = self.lookup_texts[context][: 1 if context else LOOKUPS_PER_ROUND]
        prompts = [repeated(text, length, context or int(np.median(sizes))) for text in texts]
        return [prompts[i % len(prompts)][-context:] for i in range(LOOKUPS_PER_ROUND)]

    def launch_options(self, plan: ContextPlan) -> tuple[str, ...]:
        """The options of llama-server for the best way of drafting, as one line for a shell."""
        best = Drafting.of(plan.best_cell(1))
        words = flags(best, self.spec_type, self.draft)
        return (shlex.join(words),) if words else ()

    def metadata(self) -> dict[str, Any]:
        """The build's version and options."""
        return {
            "engine": "llamacpp",
            "engine_version": self.build.version,
            "method": self.spec_type,
            "settings": {"server_args": list(self.arguments)},
        }


def engine_run(steps: Iterable[ChainStep]) -> EngineRun:
    """The tokens and seconds of several steps."""
    taken = [*steps]
    seconds = sum(step.seconds for step in taken)
    return EngineRun(seconds, len(taken), sum(step.tokens for step in taken))


def repeated(text: LookupText, length: int, size: int) -> list[int]:
    """A prompt that repeats the end of a text, and that a model goes on to repeat."""
    period = max(length + PERIOD_MARGIN, MIN_PERIOD)
    tokens = [*text.prompt, *text.tokens]
    end = (tokens * -(-period // len(tokens)))[-period:]
    size = max(size, 3 * period)
    return (end * -(-size // period))[-size:]
