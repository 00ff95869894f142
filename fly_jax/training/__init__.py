"""Training of small drafters."""
