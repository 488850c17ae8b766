"""A decoding step as one compiled function, for models whose passes are compiled (numba)."""

from sequoia_plan.artifacts.files import keep_compiled_code

keep_compiled_code()
