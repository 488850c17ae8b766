"""From acceptance and latencies to the best token tree, with what is proven of it."""
