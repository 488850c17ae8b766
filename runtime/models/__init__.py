"""One transformers model: how it is loaded, where its weights are, whether it can read a tree, its forward pass."""
