"""Token tree -> tokens: models, KV cache, drafting, verification, decoding.

Needs torch and transformers; never needs numba, click or yaml.
"""

from sequoia_plan.runtime.base.sampling import Sampling
from sequoia_plan.runtime.decoder import SequoiaDecoder
from sequoia_plan.runtime.generation import Generation
from sequoia_plan.runtime.grammar import Grammar
from sequoia_plan.runtime.huggingface import sequoia
from sequoia_plan.runtime.pair import Pair, load_pair

__all__ = ["Generation", "Grammar", "Pair", "Sampling", "SequoiaDecoder", "load_pair", "sequoia"]
