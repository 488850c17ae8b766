"""transformers' logits processors on the paths of a token tree."""

import copy
from collections import deque
from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers.generation import logits_process

from sequoia_plan.artifacts import ArgumentError
from sequoia_plan.runtime.constraints.path_logits import Path, PathLogits, PathProcessor

Processor = Callable[[Tensor, Tensor], Tensor]
"""(token ids int64 [rows, length], scores float32 [rows, vocabulary]) -> scores."""


WARPERS = tuple(
    value for name, value in vars(logits_process).items() if name.endswith("LogitsWarper")
)
"""Processors that depend on scores alone. transformers has them last."""


def split_at_warpers(processors: Sequence[Processor]) -> tuple[list[Processor], list[Processor]]:
    """Processors for target and draft, and, from the first warper on, for the target alone."""
    is_warper = [isinstance(processor, WARPERS) for processor in processors]
    first = is_warper.index(True) if any(is_warper) else len(is_warper)
    return list(processors[:first]), list(processors[first:])


class LogitsProcessors:
    """Processors one after the other, as `LogitsProcessorList` runs them (see `PathProcessor`).

    Raises:
        ArgumentError: if one does not give the same scores when it is called again, or changes
            later.
    """

    def __init__(self, processors: Sequence[Processor]) -> None:
        self.processors, self.text, self.states = processors, list[int](), list[object]()

    def begin(self, prompt: Sequence[int], end_tokens: Collection[int]) -> None:
        self.text = list(prompt)

    def commit(self, tokens: Sequence[int]) -> None:
        self.text.extend(tokens)

    def __call__(self, paths: Sequence[Path], logits: Tensor) -> Tensor:
        """The scores after each path, written to `logits`; paths of one length are a batch."""
        for length in sorted({len(path) for path in paths}):
            rows = [row for row, path in enumerate(paths) if len(path) == length]
            ids = torch.tensor([[*self.text, *paths[row]] for row in rows], device=logits.device)
            scores = logits[rows]
            for number, processor in enumerate(self.processors):
                if number == len(self.states):
                    self.states.append(check_repeats(processor, ids, scores))
                scores = _in_batches(processor, ids, scores)
                if _state(processor) != self.states[number]:
                    raise error_of_change(processor)
            logits[rows] = scores.float()
        return logits


def path_logits_of(
    processors: Sequence[Processor], constraint: PathProcessor | None, vocabulary: int
) -> PathLogits | None:
    """What changes one text's logits, None if nothing; `constraint` is copied for its state."""
    if not processors and constraint is None:
        return None
    before_warpers, warpers = split_at_warpers(processors)  # warpers: for the target
    both: list[PathProcessor] = [LogitsProcessors(before_warpers)] if before_warpers else []
    if constraint is not None:
        both.append(copy.copy(constraint))  # both: target and draft
    target_only = [LogitsProcessors(warpers)] if warpers else []
    return PathLogits(both, target_only, vocabulary)


def check_repeats(processor: Processor, ids: Tensor, scores: Tensor) -> object:
    """Refuse a processor that counts its calls or keeps what it was given; returns its state."""
    first, state = _in_batches(processor, ids, scores), _state(processor)
    try:
        repeats = torch.equal(first, _in_batches(processor, ids, scores))
    except Exception:
        repeats = False
    if not repeats:
        raise error_of_change(processor)
    return state


def error_of_change(processor: Processor) -> ArgumentError:
    """The error for a processor whose scores depend on the calls before."""
    name = getattr(processor, "__name__", type(processor).__name__)
    return ArgumentError(
        f"logits_processor: {name} changes from call to call, expected a function of token "
        "ids and scores, which a tree calls once for each node; leave it out (a grammar is "
        "given as constraint=Grammar(...))"
    )


def _in_batches(processor: Processor, ids: Tensor, scores: Tensor) -> Tensor:
    """The scores of all rows; what may tell rows of a batch apart gets one row at a time."""
    processor_class = type(processor)
    treats_rows_alike = processor_class is not logits_process.PrefixConstrainedLogitsProcessor
    if treats_rows_alike and processor_class.__module__ == logits_process.__name__:
        return processor(ids, scores.clone())
    rows = zip(ids.split(1), scores.clone().split(1), strict=True)
    return torch.cat([processor(*row) for row in rows])


def _state(value: object, seen: frozenset[int] = frozenset()) -> object:
    """A summary that differs if a processor has kept something between two calls.

    It covers attributes, containers and closures; of a module, only which one it is.
    """
    if isinstance(value, (Tensor, np.ndarray)):
        return str(value.sum().item())  # as text, because NaN differs from itself
    if isinstance(value, torch.nn.Module) or id(value) in seen:
        return id(value)
    seen |= {id(value)}
    contents = [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
    names = ("__dict__", "__self__", "func", "args", "keywords")  # the last three of a partial
    contents += [getattr(value, name, None) for name in names]
    if isinstance(value, (list, tuple, set, deque, dict)):
        items = value.values() if isinstance(value, dict) else value
        contents += [item for item in items if not isinstance(item, (int, str, float))]
    return repr(value), [_state(content, seen) for content in contents if content is not None]
