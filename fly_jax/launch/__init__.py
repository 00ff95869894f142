"""The command line: `python -m fly_jax.launch`."""
