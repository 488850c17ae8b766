"""Loading a model whose weights are packed in the cache, or saying why PyTorch has to run it."""

from pathlib import Path

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.models.base.loading import Loading
from sequoia_plan.models.files.pretrained import ModelFiles, check_tensors
from sequoia_plan.models.packed.backend import PackedBackend
from sequoia_plan.models.packed.families import empty_module, why_not
from sequoia_plan.models.packed.from_file import PackedFile, StreamedFile, packed_file, recorded_of
from sequoia_plan.models.packed.from_module import PackedModule
from sequoia_plan.models.packed.weights import Storage


def load_packed(
    files: ModelFiles, how: Loading, *, streams: bool = False
) -> tuple[PackedBackend | None, str]:
    """The backend that runs a model's files packed, and ""; or None, and why there is none.

    With `streams` it is a `StreamedFile`, whose layers are still to be loaded.
    """
    config, dtype, empty = files.config, how.torch_dtype, empty_module(files.config)
    if reason := why_not(config, empty):
        return None, reason
    source = files.source
    try:
        if source:
            check_tensors(files, empty)
    except SequoiaPlanError:
        if files.gguf:
            raise
        source = None  # transformers may still read a folder
    if source is None and streams:
        return None, "its files have other tensors"
    keeps_bits = files.gguf is not None and how.dtype == "auto"  # a GGUF file's own
    storage = Storage(None if how.bits or keeps_bits else dtype, how.bits)
    try:
        if source is None:  # transformers knows how to read it
            return PackedModule(files.module(dtype), how.bits), ""
        file = packed_file(Path(files.name).stem, source, storage, how.on_bytes)
    except ValueError as unknown:  # format of weights
        return None, str(unknown)
    recorded = recorded_of(file, dtype, source)
    if streams:
        return StreamedFile(file, config, dtype, recorded), ""
    file.close()
    return PackedFile(file.path, config, dtype, recorded), ""
