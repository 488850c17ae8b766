"""The tree with the most expected tokens a second on one machine, with a bound that proves it."""
