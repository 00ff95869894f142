"""The one host loop: requests share the slots of one state, and join and leave between rounds."""
