"""Where a model's files are, and what they say: a folder, a hub ID or a GGUF file."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.models.base.errors import first_line
from sequoia_plan.models.files.from_transformers import (
    load_whole,
    new_model,
    not_loadable,
    refuse_missing,
    refuse_shapes,
    unread,
)
from sequoia_plan.models.files.gguf import GgufSource, embedded_gguf, is_gguf
from sequoia_plan.models.files.gguf_config import CONFIGS, read_config, refuse_unread_tensors
from sequoia_plan.models.files.gguf_file import GgufFile, read_gguf
from sequoia_plan.models.files.gguf_tokenizer import end_tokens, gguf_tokenizer
from sequoia_plan.models.files.stored import CheckpointSource, WeightSource

DEFAULT_TARGET = "SmolLM2-135M-Instruct"
DOWNLOADED_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
"""Files of a hub repository that a model is loaded from; older ones have `TORCH_FILES` as well."""
TORCH_FILES = "pytorch_model*.bin"


@dataclass(frozen=True)
class ModelFiles:
    """A model's files. `path` is a folder, or a GGUF file, whose header was read into `gguf`."""

    name: str
    path: Path
    gguf: GgufFile | None = None

    def __reduce__(self) -> tuple[object, ...]:
        """For pickle and copies, which open the files anew."""
        return ModelFiles, (self.name, self.path, self.gguf)

    @cached_property
    def config(self) -> PreTrainedConfig:
        """transformers' configuration."""
        try:
            return read_config(self.gguf) if self.gguf else AutoConfig.from_pretrained(self.path)
        except SequoiaPlanError:
            raise
        except Exception as error:  # foreign code may do anything with what it does not expect
            raise not_loadable(self.path, error) from error

    @cached_property
    def source(self) -> WeightSource | None:
        """The weights, if they are those of a Llama-like model, tensor by tensor."""
        if self.gguf:
            return GgufSource(self.gguf, self.config) if self.is_known_gguf else None
        has_plain_tensors = not getattr(self.config, "quantization_config", None)
        files = list(self.path.glob("*.safetensors"))
        return CheckpointSource(self.path) if files and has_plain_tensors else None

    @property
    def is_known_gguf(self) -> bool:
        """Is it a GGUF file whose tensors are read here, not by transformers?"""
        return self.gguf is not None and self.gguf.architecture in CONFIGS

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """transformers' tokenizer."""
        try:
            if self.gguf:
                return gguf_tokenizer(self.gguf)
            return AutoTokenizer.from_pretrained(self.path)
        except SequoiaPlanError:
            raise
        except Exception as error:
            raise SequoiaPlanError(
                f"{self.path}: no tokenizer found ({first_line(error)})"
            ) from error

    @property
    def tokens(self) -> list[str]:
        """The vocabulary by number, where a file has it as a list."""
        return self.gguf.metadata.get("tokenizer.ggml.tokens", []) if self.gguf else []

    def generation_config(self) -> GenerationConfig:
        """transformers' generation config."""
        if (self.path / "generation_config.json").is_file():
            return GenerationConfig.from_pretrained(self.path)
        config = GenerationConfig.from_model_config(self.config)
        if self.gguf:
            config.eos_token_id = end_tokens(self.gguf) or None
        return config

    def module(self, dtype: torch.dtype) -> PreTrainedModel:
        """transformers' model with all weights in memory, in eval mode."""
        if not self.gguf:
            return load_whole(self.path, dtype)
        if not self.is_known_gguf:
            model = load_whole(self.path, dtype, self.config)
            refuse_unread_tensors(self.gguf, model)
            # transformers refuses to save a model that it takes for a quantised one
            vars(model.config).pop("quantization_config", None)
            return model
        # ten times as fast as by transformers
        with torch.device("meta"):
            model = new_model(self.config, dtype)
        check_tensors(self, model)
        assert self.source
        weights = {
            name: (
                torch.from_numpy(self.source.vector(name))
                if len(shape) == 1
                else self.source.matrix(name).dense()
            ).to(dtype, copy=True)
            for name, shape in self.source.shapes().items()
        }
        model.load_state_dict(weights, strict=False, assign=True)
        model.tie_weights()
        model.model.rotary_emb = type(model.model.rotary_emb)(self.config)  # computed, not loaded
        model.generation_config = self.generation_config()
        return model


def find_model(source: str | None) -> ModelFiles:
    """The files of a folder, a hub ID, which is downloaded first, or a GGUF file.

    None stands for the embedded target.
    """
    transformers_logging.disable_progress_bar()
    name = name_of(source)
    if source is None or is_gguf(source):
        path = Path(source) if source else embedded_gguf()
        return ModelFiles(name, path, read_gguf(path))
    return ModelFiles(name, downloaded_folder(source))


def check_tensors(files: ModelFiles, model: PreTrainedModel) -> None:
    """Raise SequoiaPlanError if a file lacks a tensor of a model, or has others.

    `model` may be without memory.
    """
    assert files.source
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    shapes = files.source.shapes()
    if model.config.tie_word_embeddings and "lm_head.weight" not in shapes:
        expected.pop("lm_head.weight", None)
    refuse_missing(files.path, expected.keys() - shapes.keys())
    for name in sorted(shapes.keys() - expected.keys()):
        raise unread(files.path, model, name)
    both = ((name, shapes[name], shape) for name, shape in expected.items())
    refuse_shapes(files.path, (each for each in both if each[1] != each[2]))


def downloaded_folder(source: str) -> Path:
    """A folder, or that of a hub ID, whose files are downloaded first."""
    if Path(source).exists():
        return Path(source)
    try:
        # what is new in the hub's repository; without a network, its folder in the cache
        folder = snapshot_download(source, allow_patterns=DOWNLOADED_FILES, ignore_patterns="*/*")
        if not list(Path(folder).glob("*.safetensors")):
            snapshot_download(source, allow_patterns=TORCH_FILES, ignore_patterns="*/*")
        return Path(folder)
    except Exception as error:  # a network may fail in any way
        raise SequoiaPlanError(
            f"{source}: no such folder, and it cannot be downloaded ({first_line(error)}); name a "
            f"folder, or run `hf download {source}` where there is a network and set "
            "HF_HUB_OFFLINE=1"
        ) from error


def name_of(source: str | None) -> str:
    """A model's name, without the path that it is loaded from."""
    if source is None:
        return DEFAULT_TARGET
    return Path(source).name if Path(source).exists() else source
