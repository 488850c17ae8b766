"""Which backend runs a model: chosen when it is loaded, or when a decoder is given a module."""

import contextlib
import warnings
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.models.base.architecture import (
    model_type,
    text_config,
    without_adapter_wrapper,
)
from sequoia_plan.models.base.kernel_launch import HAS_NUMBA
from sequoia_plan.models.base.loading import Loading
from sequoia_plan.models.files.metadata import module_metadata
from sequoia_plan.models.files.pretrained import find_model
from sequoia_plan.models.layers.fuse import fuse
from sequoia_plan.models.loaded_model import Backend, LoadedModel
from sequoia_plan.models.modules.backend import ModuleBackend
from sequoia_plan.models.offload.memory import (
    SLOTS,
    as_bytes,
    cache_bytes,
    format_bytes,
    free_memory,
    own_bytes,
    split_memory,
)

RESIDENT, FUSED, COMPILED = "resident", "fused", "compiled"
"""How passes run: by the modules that transformers loads; by fused layers, where those compute the
same; or on a CPU as one compiled function, with the weights packed for it."""
PLACEMENTS = (RESIDENT, FUSED, COMPILED)
KEPT = "_sequoia_plan"
"""The attribute of a module that keeps its `LoadedModel`: decoders of one module share it."""


class _Keeper:
    """Holds a module's `LoadedModel`; copies and pickles of the module have an empty one."""

    model: LoadedModel | None = None

    def __reduce__(self) -> tuple[object, ...]:
        """For pickle and copies."""
        return _Keeper, ()


def integer_products() -> str:
    """What compiled passes multiply integers with here, as "AVX2"; "" without numba."""
    if not HAS_NUMBA:
        return ""
    from sequoia_plan.models.packed.instructions import OWN

    return OWN.name


def loaded(model: Any) -> LoadedModel:
    """The `LoadedModel` of a transformers model in memory, made when it is first asked for.

    On a CPU, it packs the weights of a Llama-like model if there is memory for a copy.
    """
    if isinstance(model, LoadedModel):
        return model
    module = without_adapter_wrapper(model)
    keeper = vars(module).setdefault(KEPT, _Keeper())
    if keeper.model is None or keeper.model.backend.is_stale():
        keeper.model = LoadedModel(_backend_of(module), text_config(module))
    return keeper.model


def keep_loaded(module: PreTrainedModel, model: LoadedModel) -> None:
    """Let `model` be what decoders take for a module."""
    vars(module).setdefault(KEPT, _Keeper()).model = model


def _backend_of(module: nn.Module) -> Backend:
    """The backend of a module in memory: packed, if the packed pass and memory allow it."""
    if not HAS_NUMBA or not isinstance(module, PreTrainedModel) or module.device.type != "cpu":
        return ModuleBackend(module)
    # decoding on a GPU does not need numba
    from sequoia_plan.models.packed.families import why_not_module
    from sequoia_plan.models.packed.from_module import PackedModule, needed_bytes

    needed, free = needed_bytes(module), free_memory(module.device)
    if needed < free:
        with contextlib.suppress(SequoiaPlanError):
            return PackedModule(module)
    elif not why_not_module(module):
        warnings.warn(
            f"{model_type(module)}: PyTorch runs it, because a copy of its weights needs "
            f"{format_bytes(needed)} of memory, and {format_bytes(free)} are free",
            stacklevel=5,
        )
    return ModuleBackend(module)


def load_model(source: str | None, how: Loading) -> LoadedModel:
    """Load a language model, named as for `load_pair`.

    Raises:
        SequoiaPlanError: if it cannot be found or loaded, or bits are asked for and it is not
            compiled.
    """
    files = find_model(source)
    backend: Backend | None = None
    remarks: tuple[str, ...] = ()
    if how.placement == COMPILED:
        from sequoia_plan.models.packed.loading import load_packed

        backend, reason = load_packed(files, how)
        if backend is None:
            if how.bits:
                raise SequoiaPlanError(f"bits {how.bits}: the model cannot be compiled: {reason}")
            remarks = (f"{files.name}: PyTorch runs it, its pass is not compiled: {reason}",)
    if backend is None:
        module = files.module(how.torch_dtype).to(how.device)
        backend = ModuleBackend(module, fused(module, how.placement))
    model = LoadedModel(backend, files.config.get_text_config(), files, remarks)
    if backend.module is not None:
        keep_loaded(backend.module, model)
    return model


def loaded_as(module: PreTrainedModel, placement: str = RESIDENT) -> LoadedModel:
    """The model of a module in memory, which runs as `placement` says."""
    if placement == COMPILED:
        return loaded(module)
    model = LoadedModel(ModuleBackend(module, fused(module, placement)), text_config(module))
    keep_loaded(module, model)
    return model


def fused(module: PreTrainedModel, placement: str) -> dict[str, object]:
    """Fuse a module's layers if `placement` says so; returns what profiles record of it."""
    if placement == RESIDENT:
        return {"placement": RESIDENT}
    return module_metadata(module) | {"placement": FUSED, "fused_layers": fuse(module)}


class OffloadedModel:
    """A target whose layers are streamed from a `link` ("disk", "host"), but for those that fit.

    `loader` loads them: a `StreamedFile` or an `OffloadedTarget`.
    """

    def __init__(
        self, source: str | None, how: Loading, link: str, memory: str | int | None
    ) -> None:
        files = find_model(source)
        self.link, self.is_fused = link, how.placement != RESIDENT
        self.budget = as_bytes(memory, torch.device(how.device))
        self.loader: Any = None
        if how.placement == COMPILED and link == "disk":
            from sequoia_plan.models.packed.loading import load_packed

            self.loader, _ = load_packed(files, how, streams=True)
        if self.loader is None:
            from sequoia_plan.models.modules.offloaded_target import OffloadedTarget

            self.loader = OffloadedTarget(files, how.device, how.torch_dtype)
        self.model = LoadedModel(self.loader.backend, files.config.get_text_config(), files)

    def load_beside(self, draft: Any) -> None:
        """Load the layers that fit beside a draft, which may be None, and stream the others."""
        caches, draft_bytes = cache_bytes(self.model), 0
        if getattr(draft, "lm_head", self) is None and self.model.module is None:
            self.loader.keep_head()
        if draft is not None:
            draft_bytes = own_bytes(draft, self.model)
            caches += cache_bytes(draft)
        reads_chosen = getattr(self.loader, "routed", None) and self.link == "disk"
        split = split_memory(
            self.budget,
            self.loader.outside_bytes,
            draft_bytes,
            caches,
            self.loader.layer_sizes(),
            slots=1 if reads_chosen else SLOTS,
        )
        self.loader.load(split, self.link, self.is_fused)
