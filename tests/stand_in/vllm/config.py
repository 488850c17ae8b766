"""The one name that the driver looks at."""

import dataclasses


@dataclasses.dataclass
class SpeculativeConfig:
    num_speculative_tokens_per_batch_size: object = None
