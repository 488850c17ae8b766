"""A model whose passes run as transformers' modules, perhaps with fused layers."""

import inspect
import warnings
from collections.abc import Mapping, Sequence

from torch import Tensor
from transformers import PreTrainedModel

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.models.base.architecture import (
    UNLIMITED,
    execution_device,
    model_type,
    rope_changes,
    text_config,
    unwrapped,
)
from sequoia_plan.models.base.cache import CacheLayout, TreeCache, cache_argument
from sequoia_plan.models.files.metadata import module_metadata
from sequoia_plan.models.layers.attention import attending, attends_by_sdpa
from sequoia_plan.models.layers.fuse import num_fused_layers
from sequoia_plan.models.layers.split_keys import splits_keys
from sequoia_plan.models.loaded_model import Backend, LoadedModel, Masks, Traits
from sequoia_plan.models.module_state import Watch, check_mode, structure, weight_memory, weights
from sequoia_plan.models.modules.aux_hidden_states import register_hooks, take_aux_hidden_states
from sequoia_plan.models.modules.fused_twin import FusedTwin
from sequoia_plan.models.modules.probe import probe
from sequoia_plan.models.modules.recurrent import RecurrentCache, record_inputs, recurrent_modules
from sequoia_plan.models.parallel import from_first, is_compiled, is_on_one_cuda_device, is_split
from sequoia_plan.models.vocabulary import vocabulary_size


class ModuleBackend(Backend):
    """Runs a transformers model, in whatever wrapper it comes, by calling it.

    `recorded` is what profiles record of its placement.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        recorded: Mapping[str, object] = {"placement": "resident"},
    ) -> None:
        plain = unwrapped(module)
        self.module, self.recorded = module, dict(recorded)
        self.device, self.dtype = execution_device(module), module.dtype
        self.vocabulary = vocabulary_size(module)
        embedding = module.get_input_embeddings() if hasattr(plain, "get_input_embeddings") else 0
        self.num_embeddings = getattr(embedding, "num_embeddings", UNLIMITED)
        self.stream = getattr(plain, "weight_stream", None)
        self.recurrent = recurrent_modules(plain)
        self.traits = Traits(chains_only=bool(self.recurrent), is_split=is_split(module))
        config = text_config(module)
        self.sdpa_config = config if attends_by_sdpa(plain, config) else None
        self.takes_logits_to_keep = "logits_to_keep" in inspect.signature(plain.forward).parameters
        self.cache_argument = cache_argument(plain.forward)
        self.layout: CacheLayout | None = None
        self.twin: FusedTwin | None = None
        self.structure, self.weights = Watch(structure), Watch(weights)
        self.look()
        for layer in self.recurrent:
            record_inputs(layer)

    def look(self) -> None:
        """Note how the module is now: later changes are seen against it."""
        self.structure.look(self.module)
        self.weights.look(self.module)

    @property
    def runs(self) -> PreTrainedModel:
        """The module that runs passes."""
        return self.twin.model if self.twin and self.twin.num_fused else self.module

    def metadata(self) -> dict[str, object]:
        recorded = module_metadata(self.module) if "digest" not in self.recorded else {}
        if self.recurrent:
            recorded["recurrent_layers"] = len(self.recurrent)
        return recorded | self.recorded

    def prepare(self, hidden_states: Sequence[int]) -> None:
        """Fuse layers on CUDA, try the model on a small tree, both once; see `Backend.prepare`."""
        check_mode(self.module)
        stays = num_fused_layers(self.module) or self.stream  # fused already, or not all in memory
        if not stays and not self.twin and self.is_on_one_cuda_device():
            self.twin = FusedTwin(self.module)
            self.weights.look(self.module)  # making the twin has moved them
            if not self.twin.num_fused:
                warnings.warn(
                    f"{model_type(self.module)}: transformers' own layers run, which takes longer: "
                    "no fused ones can take their place, or they gave other results",
                    stacklevel=5,
                )
        if self.layout is None:  # of the cache
            self.layout = probe(LoadedModel(self, text_config(self.module)), self.runs)
        if hidden_states:
            register_hooks(unwrapped(self.runs), hidden_states)

    def is_stale(self) -> bool:
        return bool(self.structure.changes(self.module) or (self.twin and self.twin.is_stale()))

    def check(self) -> None:
        if names := self.structure.changes(self.module):
            raise SequoiaPlanError(
                f"{model_type(self.module)}: {', '.join(names[:3])} changed after the decoder was "
                "made; make it anew"
            )
        check_mode(self.module)
        if self.twin:  # before `refresh`, after which no change is seen
            self.twin.check()
        # the memory of streamed weights changes in each pass
        if self.stream is None and self.weights.changes(self.module):
            self.refresh()

    def refresh(self) -> None:
        self.version += 1
        self.weights.look(self.module)
        if self.twin:
            self.twin.pack()

    def new_cache(self, capacity: int, *, counts_positions: bool) -> TreeCache:
        cache_class = RecurrentCache if self.recurrent else TreeCache
        layers = self.layout or text_config(self.module).num_hidden_layers
        return cache_class(layers, capacity, self.device, counts_positions=counts_positions)

    def forward(
        self, cache: TreeCache, tokens: Tensor, positions: Tensor, masks: Masks,
        logits_to_keep: int, hidden_states: Sequence[int],
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        mask = (
            masks[None, None]
            if isinstance(masks, Tensor)
            else {kind: m if m is None else m[None, None] for kind, m in masks.items()}
        )
        options: dict[str, object] = {self.cache_argument: cache}
        if self.takes_logits_to_keep:
            options["logits_to_keep"] = logits_to_keep
        with attending(self.sdpa_config, cache.slots):
            all_logits = self.runs(
                input_ids=tokens[None],
                position_ids=positions[None],
                attention_mask=mask,
                use_cache=True,
                **options,
            ).logits
        # [-0:] keeps all rows; a model without `logits_to_keep` returns more than were asked for
        logits = all_logits[0, -logits_to_keep:]
        cache.finite.logical_and_(logits.amax(-1).isfinite().all())
        if not hidden_states:
            return logits, None
        return logits, take_aux_hidden_states(cache, hidden_states, self.device)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.module.get_input_embeddings()(tokens)

    def head(self, hidden_states: Tensor) -> Tensor:
        return self.module.get_output_embeddings()(hidden_states.to(self.module.dtype))

    def splits_keys(self, tokens: int) -> bool:
        if self.layout is None or self.sdpa_config is None or is_compiled(self.module):
            return False
        return all(
            splits_keys(device, dtype, head_dim, tokens)
            for device, dtype, _, head_dim in {m for pair in self.layout for m in pair or ()}
        )

    def is_on_one_cuda_device(self) -> bool:
        return is_on_one_cuda_device(self.module)

    def can_be_captured(self) -> bool:
        """See `Backend`: the host must neither decide nor wait."""
        waits_for_host = self.stream is not None and not self.stream.can_be_captured
        is_static = not rope_changes(text_config(self.module)) and not waits_for_host
        return is_static and not self.recurrent and self.is_on_one_cuda_device()

    def weight_memory(self) -> tuple[tuple[int, int], ...]:
        return weight_memory(self.module)

    def from_first(self, values: Tensor) -> Tensor:
        return from_first(self.module, values)
