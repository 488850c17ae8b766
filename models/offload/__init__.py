"""Targets that do not fit in memory: their layers are streamed from a file or from host memory.

Decoding without offloading does not import this package.
"""
