"""How fast and how well: the rules measured side by side."""
