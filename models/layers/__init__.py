"""Layers in PyTorch with fewer operations than transformers', and their CUDA kernels."""
