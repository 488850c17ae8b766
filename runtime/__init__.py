"""Token tree -> tokens: models, KV cache, drafting, verification, decoding. Never needs numba, click or yaml."""

from sequoia_plan.runtime.decode import SequoiaDecoder
from sequoia_plan.runtime.generation import Generation
from sequoia_plan.runtime.huggingface import sequoia
from sequoia_plan.runtime.pair import Pair, load_pair
from sequoia_plan.runtime.sampling import Sampling

__all__ = ["Generation", "Pair", "Sampling", "SequoiaDecoder", "load_pair", "sequoia"]
