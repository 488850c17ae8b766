"""One tree for each length of the match between the text and what it said before."""
