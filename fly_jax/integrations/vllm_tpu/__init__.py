"""FLy and a separate draft model inside vLLM on TPU (tpu-inference), as a plugin of vLLM."""
