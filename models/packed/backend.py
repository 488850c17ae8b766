"""A Llama-like model whose weights are packed, and whose pass is one compiled function."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.models.base.architecture import head_size
from sequoia_plan.models.base.cache import round_up
from sequoia_plan.models.base.dtype import Float32, Int64
from sequoia_plan.models.base.threads import num_threads
from sequoia_plan.models.files.stored import stored_matrix
from sequoia_plan.models.loaded_model import Backend, Masks, Traits
from sequoia_plan.models.packed.forward import UNIT, Model, project
from sequoia_plan.models.packed.packed_pass import (
    PackedCache,
    PackedPass,
    cache_dtype,
    visible_slots,
)
from sequoia_plan.models.packed.tiles import Matrix, aligned_zeros, dense_rows
from sequoia_plan.models.packed.weights import (
    HEAD,
    PackedWeights,
    Storage,
    describe,
    model_of,
    pack_into,
    place_of,
)


class PackedBackend(Backend):
    """Runs packed weights, once `use` was called.

    `recorded` is what profiles record of the model; `streamed_layers` are those that `stream`
    brings.
    """

    traits = Traits(is_compiled=True)
    reads_embeddings = False  # from a file, when tokens need them
    kept_tokens: Tensor | None = None  # see `keep_logits`
    streamed_layers: Sequence[int] = ()
    runner: PackedPass

    def __init__(
        self,
        weights: PackedWeights,
        config: PreTrainedConfig,
        dtype: torch.dtype,
        recorded: Mapping[str, object],
    ) -> None:
        self.config, self.dtype, self.device = config, dtype, torch.device("cpu")
        self.recorded, self.weights = dict(recorded), weights
        self.num_embeddings, self.vocabulary = weights.embedding.outputs, weights.head.outputs

    def use(self, weights: PackedWeights) -> None:
        """Run these weights from now on."""
        self.weights, config, cached = weights, self.config, cache_dtype(self.dtype)
        self.embedding, self.head_matrix = weights.embedding, weights.head
        self.vocabulary = self.head_matrix.outputs
        model = model_of(weights, config, head_size(config), cached.itemsize)
        # while a text is read, PyTorch has one thread
        workers = self.runner.workers.count if hasattr(self, "runner") else num_threads()
        self.runner = PackedPass(
            model, config, self.vocabulary, cached, workers, self.stream, self.streamed_layers,
        )  # fmt: skip
        self.runner.owners = weights
        if self.kept_tokens is not None:
            self.keep_logits(self.kept_tokens)

    def keep_logits(self, tokens: Tensor) -> None:
        """See `Backend`: a head of these rows alone, in 8 bits, replaces the whole one."""
        self.kept_tokens, rows = tokens, dense_rows(self.weights.head, tokens.numpy())
        cut = Storage(bits=8).of(HEAD, stored_matrix(torch.from_numpy(rows)))
        place = place_of(cut)
        self.head_matrix = pack_into(cut, aligned_zeros(place.shape))
        self.weights.places[HEAD] = self.head_matrix.tiles.reshape(-1), place
        self.vocabulary = self.runner.vocabulary = cut.outputs
        self.runner.model = Model(
            **self.runner.model.fields | {"head": describe(self.head_matrix)[None]}
        )

    __setstate__ = keep_logits  # of copies, which `__reduce__` makes

    def metadata(self) -> dict[str, object]:
        return self.recorded | {"weights": "+".join(self.weights.formats())}

    def prepare(self, hidden_states: Sequence[int]) -> None:
        count = len(self.runner.model.matrices)
        if wrong := [number for number in hidden_states if not -1 <= number <= count]:
            raise SequoiaPlanError(
                f"draft: reads the hidden state {wrong[0]} of a target that has 0 to {count}"
            )

    def weight_memory(self) -> tuple[tuple[int, int], ...]:
        places = self.weights.places.values()
        return tuple((memory.ctypes.data + place.start, place.size) for memory, place in places)

    def new_cache(self, capacity: int, *, counts_positions: bool) -> PackedCache:
        return self.runner.new_cache(capacity, counts_positions=counts_positions)

    def forward(
        self, cache: Any, tokens: Tensor, positions: Tensor, masks: Masks, logits_to_keep: int,
        hidden_states: Sequence[int],
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        assert isinstance(masks, Tensor)  # layers do not differ
        logits, states = self.runner(
            cache, self.embedded(tokens.numpy()), positions.numpy(), cache.slots.numpy(),
            visible_slots(masks), logits_to_keep, hidden_states,
        )  # fmt: skip
        return logits, states.to(self.dtype) if hidden_states else None

    def embedded(self, tokens: Int64) -> Float32:
        """The embeddings of tokens, int64 [n] -> float32 [n, width]; too large ones have the last.

        Padding of a target's head can be drawn, which a draft has no embedding of.
        """
        return dense_rows(self.embedding, np.minimum(tokens, self.num_embeddings - 1))

    def embed(self, tokens: Tensor) -> Tensor:
        rows = torch.from_numpy(self.embedded(tokens.flatten().numpy()))
        return rows.view(*tokens.shape, -1).to(self.dtype)

    def head(self, hidden_states: Tensor) -> Tensor:
        rows = hidden_states.float().reshape(-1, hidden_states.shape[-1])
        return multiplied(self.head_matrix, rows).view(*hidden_states.shape[:-1], -1)


def multiplied(matrix: Matrix, rows: Tensor) -> Tensor:
    """The products of rows, float32 [n, inputs] -> [n, outputs], computed in this thread."""
    x = np.zeros((len(rows), round_up(matrix.inputs, UNIT)), np.float32)
    x[:, : rows.shape[1]] = rows.numpy()
    products = np.empty((len(rows), round_up(matrix.outputs, UNIT)), np.float32)
    project(describe(matrix), x, products)
    return torch.from_numpy(products)[:, : matrix.outputs]
