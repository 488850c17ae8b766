"""Drafters, which propose the tokens of a tree, and the file format of small ones."""
