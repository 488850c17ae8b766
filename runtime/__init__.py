"""Token tree -> tokens: models, KV cache, growth, verification, decoding. Never needs numba, click or yaml."""

from sequoia_plan.runtime.decode import Generation, SequoiaDecoder
from sequoia_plan.runtime.models import Pair, load_pair
from sequoia_plan.runtime.sampling import Sampling

__all__ = ["Generation", "Pair", "Sampling", "SequoiaDecoder", "load_pair"]
