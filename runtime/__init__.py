"""Token tree -> tokens: models, KV cache, drafting, verification, decoding.

Needs torch and transformers; never needs numba, click or yaml.
"""

from sequoia_plan.runtime.constraints.grammar import Grammar
from sequoia_plan.runtime.decoder import SequoiaDecoder
from sequoia_plan.runtime.generation import Generation
from sequoia_plan.runtime.huggingface import sequoia
from sequoia_plan.runtime.pair import Pair, load_pair
from sequoia_plan.runtime.sampling.sampling import Sampling

__all__ = ["Generation", "Grammar", "Pair", "Sampling", "SequoiaDecoder", "load_pair", "sequoia"]
