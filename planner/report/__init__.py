"""What people look at: trees in the terminal, plots, the table of bench and its page."""
