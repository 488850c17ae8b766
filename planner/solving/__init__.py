"""From acceptance and latencies to the best token tree, with the proofs and bounds that hold."""
