"""Which draft tokens to keep, from the target's logits alone: what other engines import."""
