"""The one class of `vllm.config` that the driver reads."""

import dataclasses


@dataclasses.dataclass
class SpeculativeConfig:
    num_speculative_tokens_per_batch_size: object = None
