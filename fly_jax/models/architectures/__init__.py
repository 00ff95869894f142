"""The families of models that are run: each is Llama but for what its file says."""
