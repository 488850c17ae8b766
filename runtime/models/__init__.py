"""One transformers model: loading it, checking that it can read a tree, and its forward pass."""
