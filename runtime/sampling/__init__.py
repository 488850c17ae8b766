"""From logits to probabilities, and from these to tokens."""
