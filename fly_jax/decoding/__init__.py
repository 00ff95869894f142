"""Drafters, the round on the device, and the pair and the config that it is made of."""
