"""What proposes draft tokens: draft models, chains of them, and the lookup."""
