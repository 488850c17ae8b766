"""The public decoder: generates text with a token tree, one step after the other."""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TextStreamer

from sequoia_plan.artifacts import ArgumentError, SequoiaPlanError, TokenTree
from sequoia_plan.artifacts.state import NO_COUNTS, Choice, State, choices_of
from sequoia_plan.runtime.captured_step import CapturedStep, StepOutput
from sequoia_plan.runtime.clock import Clock, shape_of
from sequoia_plan.runtime.constraints.grammar import Grammar
from sequoia_plan.runtime.constraints.logits_processors import Processor, path_logits_of
from sequoia_plan.runtime.constraints.path_logits import PathLogits
from sequoia_plan.runtime.decoding_models import DecodingModels, Model
from sequoia_plan.runtime.generation import (
    Criterion,
    Ending,
    Generation,
    Prompt,
    Session,
    TokenRecord,
    check_loaded,
    end_tokens,
    read_prompt,
    stop_list,
    whole_number,
)
from sequoia_plan.runtime.sampling.sampling import Sampling, verifier_of
from sequoia_plan.runtime.text import NewText, TextStream

SEEDS = (-(1 << 63), (1 << 64) - 1)
"""The first and the last seed that PyTorch's generators take."""
TOLERANCE = 1.15
"""A machine is another one if the plan's steps take longer or less by this factor."""


class SequoiaDecoder:
    """Decodes with a static token tree (Sequoia, arXiv 2402.12374).

    The output has exactly the target's distribution. A decoder holds one sequence; requests of
    several threads wait for each other.

    Args:
        target: what `load_pair` loads, or a transformers causal LM in eval mode; quantised, sharded
                or compiled as you like.
        draft: another one that shares the target's vocabulary or covers a part of it (attribute
            `d2t`, int64 [draft vocabulary]: the target's token for each of the draft's tokens), or
            a draft that `load_pair` loads. None only for a tree of one node.
        tree: the token tree.
        tokenizer: the target's, for prompts that are text, for stop strings, and for the text of
            results.
        draft_tokenizer: the draft's; it is compared with the target's, token by token.
        captured: replay steps as CUDA graphs. None: if both models are on one CUDA device and
            neither is compiled.

    Attributes:
        step: the decoding step (`CapturedStep`).

    Raises:
        SequoiaPlanError: if the vocabularies do not fit, the tree drafts and there is no draft, or
            a model cannot read a tree (see `probe`).
    """

    def __init__(
        self,
        target: Model,
        draft: Model | None,
        tree: TokenTree,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        draft_tokenizer: PreTrainedTokenizerBase | None = None,
        captured: bool | None = None,
    ) -> None:
        check_loaded(target, draft, tree)
        self.tokenizer, self.clock = tokenizer, Clock()
        self._use(DecodingModels(target, draft, tree, tokenizer, draft_tokenizer, captured), tree)

    def with_tree(self, tree: TokenTree) -> SequoiaDecoder:
        """A decoder with another tree that shares models, sequence and graphs with this one.

        Only one of the two can be in the middle of a sequence.

        Raises:
            SequoiaPlanError: if the draft cannot draft the tree.
        """
        decoder = copy.copy(self)
        decoder._use(self.step.models, tree)
        return decoder

    def _use(self, models: DecodingModels, tree: TokenTree) -> None:
        """Decode with `tree`, its trees for longer texts and lookup matches, and smaller ones."""
        if any(t.looks_up for t in (tree, *tree.by_context.values())):
            raise SequoiaPlanError(
                "tree: its spine is looked up; expected a tree for texts without a match, with "
                "this one in its `by_match`"
            )
        trees = set(tree.all_trees)
        # a step that is launched before the last one was read cannot depend on that
        is_read_first = len(trees) > 1 or models.graphs is None
        has_times = tree.plan.objective == "speed" and bool(tree.plan.plain_seconds)
        self.chooses = has_times and is_read_first
        has_rungs = models.graphs is None  # else each is captured anew
        self.choices: dict[tuple[int, int], list[Choice]] = {}  # by length and match length
        for length, t in {0: tree, **tree.by_context}.items():
            for match in (*t.portfolio, *(plan.match_length for plan in t.plan.by_match)):
                self.choices[length, match] = (
                    choices_of(t, match, has_rungs)
                    if self.chooses
                    else [Choice(t.for_match(match))]
                )
        trees |= {choice.tree for choices in self.choices.values() for choice in choices}
        family = tree if len(trees) > 1 else None
        self.step_of_tree = {t: CapturedStep(models, t, family) for t in trees}
        self.step = self.step_of_tree[tree]
        self.state = self.first_state = State(0, 0, speed=tree.plan.predicted_speedup or 1.0)
        stream, latency = models.target.stream, tree.plan.latency
        if stream and latency and latency.stream:
            stream.keep_most_chosen(latency.stream.expert_counts)

    @torch.inference_mode()
    def generate(
        self,
        input_ids: Prompt,
        max_new_tokens: int | None = 128,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
        eos_token_id: int | Iterable[int] | None = None,
        streamer: Any = None,
        *,
        sampling: Sampling | None = None,
        attention_mask: Tensor | None = None,
        stop_strings: str | Sequence[str] | None = None,
        stopping_criteria: Sequence[Criterion] = (),
        logits_processor: Sequence[Processor] = (),
        constraint: Grammar | None = None,
        logprobs: int | None = None,
        output_logits: bool = False,
        output_scores: bool = False,
        reuse_prefix: bool = False,
        on_step: Callable[[StepOutput, str], object] | None = None,
        timed: bool | None = None,
    ) -> Generation:
        """Generate after a prompt.

        Args:
            input_ids: token ids (int64 [n] or [1, n]), text, or what a tokenizer returns.
            max_new_tokens: None: as many as the context has room for. 0 only reads the prompt, so
                that a later text with `reuse_prefix` begins at once.
            temperature: 0 is greedy.
            top_p: nucleus filter on the target.
            seed: makes sampling repeatable; None draws one.
            eos_token_id: ends the generation. None: those of the target's generation config, else
                the tokenizer's.
            streamer: anything with transformers' `put(tokens)` and `end()`; it gets the prompt
                first, as from transformers. A `TextStreamer` gets the text of the result.
            sampling: all sampling settings at once, in place of `temperature` and `top_p`. Without
                it, the verifier is the one that the tree's plan records.
            attention_mask: as tokenizers return it; it may hide nothing.
            stop_strings: new text that ends the generation, and is left out of the result's text;
                needs the decoder's tokenizer. The token that completes a stop string is kept in
                `sequences`, as in transformers.
            stopping_criteria: transformers' criteria, called as `criterion(input_ids, None)` after
                every token.
            logits_processor: transformers' processors and warpers, in its order; each is called
                for every node of a tree, with the tokens before it. They come before `sampling`.
            constraint: a grammar that the new tokens follow.
            logprobs: return the log-probability of each new token, after processors and filters,
                and those of so many most probable tokens there.
            output_logits: return the target's logits at each new token.
            output_scores: return them after processors, temperature and filters.
            reuse_prefix: do not read again what the decoder has last read, as far as the prompt
                begins with it.
            on_step: called after each step with its output, and the text that is known so far;
                what it raises ends the generation.
            timed: choose the tree of each step by what steps take on this machine and by what
                earlier texts gained, where the tree's plan has times and steps are not CUDA graphs.
                False: by planned times and this text alone, so that with a seed a text is
                repeatable. None: False with a seed, else True.

        Raises:
            SequoiaPlanError: if the prompt is empty, a batch or too long for the context, a setting
                is invalid, memory is short, or a model's logits are not finite.
        """
        started = time.perf_counter()
        model, tokenizer = self.step.target, self.tokenizer
        most = whole_number("max_new_tokens", max_new_tokens)
        max_new_tokens = model.context if most is None else most
        seed = whole_number("seed", seed, *SEEDS)
        if sampling is None:
            sampling = Sampling(temperature, top_p, verifier=verifier_of(self.step.tree))
        prompt = read_prompt(input_ids, tokenizer, attention_mask, model).to(self.step.device)
        prompt_ids = prompt.tolist()
        stops, text = stop_list(stop_strings, tokenizer), None
        if tokenizer is not None:
            text = NewText(tokenizer, prompt_ids, {"skip_special_tokens": True}, stops)
        ending = Ending(
            prompt_ids,
            max_tokens=max_new_tokens,
            max_tokens_in_context=model.context - len(prompt_ids),
            end_tokens=end_tokens(eos_token_id, model, tokenizer),
            criteria=stopping_criteria,
            text=text,
        )
        num_steps, finish_reason, new_ids = 0, "" if max_new_tokens else "length", list[int]()
        if getattr(type(streamer), "put", None) is TextStreamer.put:
            streamer = TextStream(streamer, prompt_ids, stops)
        elif streamer is not None:
            streamer.put(prompt[None].cpu())
        record = TokenRecord(sampling, logprobs, output_logits, output_scores)
        path_logits = path_logits_of(logits_processor, constraint, model.config.vocab_size)
        if path_logits:
            path_logits.begin(prompt_ids, ending.end_tokens)
        all_steps = self.steps(
            prompt, max_new_tokens, sampling, seed,
            path_logits=path_logits, keeps_logits=bool(record.recorded), reuse_prefix=reuse_prefix,
            timed=timed,
        )  # fmt: skip
        with closing(all_steps) as steps:
            if finish_reason:  # no step: the prompt is read, and that is all
                next(steps, None)
            while not finish_reason:
                output = next(steps)
                tokens, finish_reason = ending.cut(output.tokens)
                num_steps += 1
                new_ids.extend(tokens)
                record.add(tokens, output.logits, output.processed_logits)
                if on_step:
                    on_step(output, ending.known)
                if streamer is not None:
                    streamer.put(torch.tensor(tokens))
        if streamer is not None:
            streamer.end()
        self._compare_with_plan()
        sequences = torch.tensor([prompt_ids + new_ids], device=self.step.device)
        seconds = time.perf_counter() - started
        result_text = None if text is None else ending.known + text.rest()
        return Generation(
            sequences, len(new_ids), num_steps, seconds, finish_reason, result_text,
            **record.tensors(),
        )  # fmt: skip

    def choices_at(self, length: int, match_length: int) -> list[Choice]:
        """What a step may take after so many tokens, with a lookup match of so many."""
        reached = ((n, m) for n, m in self.choices if n <= length and m <= match_length)
        return self.choices[max(reached)]

    def _compare_with_plan(self) -> None:
        """Warn once if the plan's tree takes other times than planned, relative to plain steps."""
        choices = self.choices_at(self.state.length, self.state.match_length)  # the plan's first
        ratio = math.exp(self.clock.means.get(shape_of(choices[0].tree), 0.0))
        if self.clock.has_warned or 1 / TOLERANCE <= ratio <= TOLERANCE:
            return
        self.clock.has_warned = True
        chosen = self.state.choose(self.clock.measured(choices, self.state.speed)).tree
        logging.getLogger("sequoia_plan").warning(  # by default printed as it is
            f"steps with the plan's tree take {ratio:.2f} times as long as planned, beside plain "
            f"ones: this machine is not as profiled, or busy; the choice now: {chosen}. For a plan "
            "that suits it: sequoia-plan profile, then sequoia-plan solve"
        )

    def refresh(self) -> None:
        """Take the models' weights anew, after changes that PyTorch does not count (`.data`)."""
        for model in self.step.models.models:
            model.refresh()

    def start(self, prompt: Prompt = ()) -> Session:
        """A text that goes on: what the models have read of it is not read again."""
        return Session(self, prompt)

    def generate_each(
        self, prompts: Iterable[Prompt], *, seed: int | None = None, **settings: Any
    ) -> list[Generation]:
        """`generate` for each prompt in turn; with a seed, prompt i gets seed + i."""
        if isinstance(prompts, str):  # an iterable of letters
            raise ArgumentError(f"prompts: found {prompts!r:.60}, expected a list of prompts")
        seed = whole_number("seed", seed, *SEEDS)
        return [
            self.generate(prompt, seed=None if seed is None else seed + number, **settings)
            for number, prompt in enumerate(prompts)
        ]

    @torch.inference_mode()
    def steps(
        self,
        prompt: Tensor,
        max_new_tokens: int,
        sampling: Sampling,
        seed: int | None = None,
        *,
        path_logits: PathLogits | None = None,
        keeps_logits: bool = False,
        reuse_prefix: bool = False,
        timed: bool | None = None,
    ) -> Generator[StepOutput, None, None]:
        """Prefill `prompt` (int64 [n]), then yield steps until the limit or the context's end.

        From the first step to the last, or until the iterator is closed, other threads wait for the
        decoder. The tree never shrinks: near the end of the context, nodes beyond it are cut off
        the result. Before each step, what was committed decides which tree runs, and if `timed` (as
        for `generate`), so do the times of earlier steps. With `launches_ahead`, a step that is
        needed in any case is launched before the tokens of the step before it are read.

        Raises:
            SequoiaPlanError: if the prompt leaves no room in the context, or a model's logits are
                not finite.
        """
        step, sequence, clock = self.step, self.step.sequence, self.clock
        with sequence.lock.hold():
            sequence.path_logits, sequence.keeps_logits = path_logits, keeps_logits
            timed = seed is None if timed is None else timed
            seed = 0 if sampling.greedy else seed
            step.prefill(prompt, max_new_tokens, seed, reuse=reuse_prefix, others=self.step_of_tree)
            # CUDA graphs are captured in steps, and the host takes part in those by parts
            timed &= self.chooses and step.models.graphs is None and not step.runs_by_parts
            length = prompt.numel() - 1
            match_length = int(step.look_up()) if step.lookup else 0
            state = self.state if timed else self.first_state
            state = state._replace(length=length, match_length=match_length, counts=NO_COUNTS)
            end = min(length + max_new_tokens, step.target.context - 1)
            launched: Callable[[int], StepOutput] | None = None
            while length < end:
                choices = self.choices_at(length, state.match_length)
                choice = state.choose(clock.measured(choices, state.speed) if timed else choices)
                step = self.step_of_tree[choice.tree]
                started = clock.now()
                read_output = launched or step.launch(length, sampling)
                max_length, launched = length + step.tree.depth, None
                if step.launches_ahead and max_length < end:
                    launched = step.launch(max_length, sampling)
                output = read_output(length)
                if timed:
                    choice = clock.note(choice, clock.now() - started)
                length += len(output.tokens)
                sequence.num_read = length
                state = state.after_step(choice, len(output.tokens), output.match_length)
                self.state = state if timed else self.state
                yield output
