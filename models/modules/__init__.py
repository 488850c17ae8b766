"""PyTorch's modules as transformers loads them, or with fused layers; in memory or streamed."""
