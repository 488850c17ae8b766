"""Drafts: how each kind is loaded, and the drafters that draft token trees with them."""
