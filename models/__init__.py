"""One language model: its files, what runs its passes, and its memory."""
