"""Plans for engines whose drafts are chains: how many tokens to draft a step, by batch size. Measures in the user's own engine; imports none."""
