"""Every family that is known; a new one is a file and its line here."""

from __future__ import annotations

from fly_jax.models.architectures.llama import LLAMA
from fly_jax.models.architectures.mistral import MISTRAL
from fly_jax.models.architectures.qwen2 import QWEN2
from fly_jax.models.architectures.qwen3 import QWEN3
from fly_jax.models.architectures.smollm3 import SMOLLM3

ARCHITECTURES = {one.name: one for one in (LLAMA, MISTRAL, QWEN2, QWEN3, SMOLLM3)}
GGUF_ARCHITECTURES = {one.gguf: one for one in ARCHITECTURES.values() if one.gguf is not None}
