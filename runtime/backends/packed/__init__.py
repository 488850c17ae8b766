"""The forward pass of a Llama-like model on a CPU, compiled as one function (numba)."""
