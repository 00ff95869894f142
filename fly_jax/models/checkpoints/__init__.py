"""Checkpoints: located, checked, read straight into shards, and converted."""
