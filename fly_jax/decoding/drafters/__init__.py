"""Drafters: draft models, chains of them, and the lookup."""
