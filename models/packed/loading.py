"""Loading a model whose weights are packed in the cache, or saying why PyTorch has to run it."""

from pathlib import Path
from typing import Any

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.models.base.loading import Loading
from sequoia_plan.models.files.pretrained import ModelFiles, check_tensors
from sequoia_plan.models.offload.weight_file import WeightFile
from sequoia_plan.models.packed.backend import PackedBackend
from sequoia_plan.models.packed.families import empty_module, why_not
from sequoia_plan.models.packed.from_file import PackedFile, StreamedFile, packed_file, recorded_of
from sequoia_plan.models.packed.from_module import PackedModule
from sequoia_plan.models.packed.weights import Storage


def load_packed(files: ModelFiles, how: Loading) -> tuple[PackedBackend | None, str]:
    """The backend of a model's files; None, and why it cannot be packed."""
    config, empty = files.config, empty_module(files.config)
    if reason := why_not(config, empty):
        return None, reason
    has_own_tensors = _has_own_tensors(files, empty)
    try:
        if not has_own_tensors:  # transformers knows how to read it
            return PackedModule(files.module(how.torch_dtype), how.bits), ""
        file, recorded = _file_of(files, how)
    except ValueError as unknown:  # format of weights
        return None, str(unknown)
    file.close()
    return PackedFile(file.path, config, how.torch_dtype, recorded), ""


def offload_packed(files: ModelFiles, how: Loading) -> Any:
    """A target that is streamed from its packed file; None if it cannot be."""
    empty = empty_module(files.config)
    if why_not(files.config, empty) or not _has_own_tensors(files, empty):
        return None
    try:
        file, recorded = _file_of(files, how)
    except ValueError:  # format of weights
        return None
    return StreamedFile(file, files.config, how.torch_dtype, recorded)


def _file_of(files: ModelFiles, how: Loading) -> tuple[WeightFile, dict[str, Any]]:
    """The packed file of a model, and what profiles record of it."""
    assert files.source
    keeps_bits = files.gguf is not None and how.dtype == "auto"  # a GGUF file's own
    storage = Storage(None if how.bits or keeps_bits else how.torch_dtype, how.bits)
    file = packed_file(Path(files.name).stem, files.source, storage, how.on_bytes)
    return file, recorded_of(file, how.torch_dtype, files.source)


def _has_own_tensors(files: ModelFiles, empty: Any) -> bool:
    """Do the files have exactly the model's tensors, by name and shape?

    If not, transformers may still read a folder; for a GGUF file, SequoiaPlanError is raised.
    """
    if files.source is None:
        return False
    try:
        check_tensors(files, empty)
    except SequoiaPlanError:
        if files.gguf:
            raise
        return False
    return True
