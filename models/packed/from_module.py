"""A model in memory that is packed, and packed anew when its weights change."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.models.base.architecture import model_type
from sequoia_plan.models.base.masks import causal_mask
from sequoia_plan.models.files.metadata import module_metadata
from sequoia_plan.models.files.stored import ModuleSource
from sequoia_plan.models.module_state import Watch, check_mode, everything
from sequoia_plan.models.packed.backend import PackedBackend
from sequoia_plan.models.packed.families import why_not_module
from sequoia_plan.models.packed.weights import Storage, packed_in_memory

TRIED_TOKENS = 8  # tokens of the text that both passes read when a model is packed
MAX_ERROR = {"F32": 1e-4, "F16": 2e-2, "BF16": 0.2}
"""How far logits may be from PyTorch's, relative, by the format of the weights."""
MAX_ROUNDED_ERROR = 0.8
"""The same where the pass rounds weights; another computation's logits differ by about 1.4."""


class PackedModule(PackedBackend):
    """Runs a transformers model's weights, of which it has a packed copy.

    Raises:
        SequoiaPlanError: if the pass does not compute what the module does.
    """

    def __init__(self, module: PreTrainedModel, bits: int | None = None) -> None:
        self.storage, self.watch = Storage(bits=bits), Watch(everything)
        if reason := why_not_module(module):
            raise SequoiaPlanError(reason)
        recorded = module_metadata(module) | {"placement": "compiled"}
        weights = packed_in_memory(ModuleSource(module), self.storage)
        super().__init__(weights, module.config, module.dtype, recorded)
        self.use(weights)
        self.module = module
        self.watch.look(module)
        if reason := self.differs():
            raise SequoiaPlanError(reason)

    def __reduce__(self) -> tuple[object, ...]:
        """For pickle and copies: packed anew from the copy of the module."""
        return PackedModule, (self.module, self.storage.bits), self.kept_tokens

    def is_stale(self) -> bool:
        """Is the module no longer one that can be packed anew?"""
        return bool(self._follow())

    def check(self) -> None:
        check_mode(self.module)
        if reason := self._follow():
            raise SequoiaPlanError(f"{model_type(self.module)}: {reason}; make the decoder anew")

    def _follow(self) -> str:
        """Pack the module anew if it changed; returns why that cannot be, else ""."""
        before, names = self.watch.state, self.watch.changes(self.module)
        if not names:
            return ""
        embedding, head = self.module.get_input_embeddings(), self.module.lm_head
        sizes = self.module.dtype, len(embedding.weight), len(head.weight)
        reason = why_not_module(self.module)
        if not reason and sizes != (self.dtype, self.num_embeddings, self.weights.head.outputs):
            reason = "its vocabulary or its dtype is another one"
        if not reason:
            self.refresh()
            reason = self.differs()
        if not reason:
            return ""
        self.watch.state = {**(before or {}), "refused": True}  # the next text tries again
        return f"{names[0]} changed after it was compiled for this processor, and {reason}"

    def prepare(self, hidden_states: Sequence[int]) -> None:
        check_mode(self.module)
        super().prepare(hidden_states)

    def refresh(self) -> None:
        self.config, self.dtype = self.module.config, self.module.dtype
        self.use(packed_in_memory(ModuleSource(self.module), self.storage))
        self.version += 1
        self.watch.look(self.module)

    @torch.inference_mode()
    def differs(self) -> str:
        """Why the pass cannot run in place of the module, which is tried on a short text; or ""."""
        drawn = torch.randint(1 << 30, (TRIED_TOKENS,), generator=torch.Generator().manual_seed(0))
        tokens = drawn % self.num_embeddings
        positions = torch.arange(len(tokens))
        mask = causal_mask(positions, len(tokens), torch.float32)
        cache = self.new_cache(len(tokens), counts_positions=False).at(positions, len(tokens))
        logits, _ = self.forward(cache, tokens, positions, mask, 0, ())
        expected: Tensor = self.module(input_ids=tokens[None], use_cache=False).logits[0]
        expected, logits = expected.double(), logits.double()
        # centred, because a softmax does not depend on the mean
        expected, logits = (x - x.mean(-1, keepdim=True) for x in (expected, logits))
        error = float((logits - expected).norm() / expected.norm())
        bound = max(MAX_ERROR.get(f, MAX_ROUNDED_ERROR) for f in self.weights.formats())
        if error < bound:
            return ""
        return f"a compiled pass gave other logits (relative error {error:.2g})"


def needed_bytes(module: torch.nn.Module) -> int:
    """Bytes of a packed copy of a module's weights."""
    return sum(parameter.nbytes for parameter in module.parameters())
