"""What every part of models stands on: KV cache, masks, kernels, threads."""
