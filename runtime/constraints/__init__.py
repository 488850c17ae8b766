"""What a text must obey: logits processors, grammars, JSON schemas."""
