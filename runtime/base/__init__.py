"""What every part of the runtime stands on: KV cache, sequence, masks, drawing, sampling.

Imports nothing else of the runtime.
"""
