"""The tree of exactly n nodes with the most expected tokens: two exact solvers."""
