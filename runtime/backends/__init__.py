"""What runs the passes of models: PyTorch's modules, or the packed pass of a CPU."""
