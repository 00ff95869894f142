"""The verdict on draft tokens, from the target's logits alone; other engines import this."""
