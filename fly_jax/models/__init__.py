"""Llama in Flax NNX: configuration, cache, weights in and out, tokenizers."""
