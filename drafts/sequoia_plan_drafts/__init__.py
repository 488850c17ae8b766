"""The embedded drafts of sequoia-plan, as data files; docs/draft.md says how they were made."""
