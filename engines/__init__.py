"""Plans for engines that draft chains: the best number of speculative tokens by batch size.

The engine runs in the user's own environment, in a process of its own. This package imports none.
"""
