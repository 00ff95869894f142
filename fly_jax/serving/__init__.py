"""An engine for many requests at once."""
