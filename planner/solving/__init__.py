"""From acceptance and latencies to the best token tree, with the proofs and bounds that hold."""

from sequoia_plan.artifacts.files import keep_compiled_code

keep_compiled_code()
