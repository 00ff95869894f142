"""Llama and its kin in Flax NNX: configuration, cache, weights in and out, tokenizers."""
