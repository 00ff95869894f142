"""What the project exists for: evidence, acceptance rules, drafters, the round and host loop."""
