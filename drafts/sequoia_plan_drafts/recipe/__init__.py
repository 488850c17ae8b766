"""Training a draft for a target: `python -m sequoia_plan_drafts.recipe`."""
