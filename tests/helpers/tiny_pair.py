"""A random target, a draft that often agrees with it, and a tokenizer: all made in a second."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
from random_pairs import SIZES
from tokenizer_makers import write_sentencepiece

from fly_jax.models.architectures import LlamaConfig, parameter_specs
from fly_jax.models.checkpoints.write import save_hf
from fly_jax.models.llama import Llama

VOCAB_SIZE = 320
CONFIG = LlamaConfig(
    vocab_size=VOCAB_SIZE, **SIZES, head_size=8, max_context=96, tied_embeddings=True
)
TEMPLATE = (
    "{% for one in messages %}{% if one.role == 'tool' %}{{ raise_exception('No tools.') }}"
    "{% endif %}{{ one.role }}:{{ one.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def write_tokenizer(folder: Path) -> None:
    words = ("Ada has", "Boris buys", "Vera's")
    sentences = [f"{word} {number} apples in a box" for word in words for number in range(30)]
    settings = {"vocab_size": VOCAB_SIZE, "split_digits": True, "add_dummy_prefix": False}
    write_sentencepiece(folder / "tokenizer.model", sentences, **settings, pad_id=3)


def write_pair(folder: Path) -> tuple[Path, Path]:
    """Writes the pair and returns the target's and the draft's folder."""
    generator = np.random.default_rng(0)  # and no JAX, which would compile for every shape
    target, draft = {}, {}
    for name, spec in parameter_specs(CONFIG).items():
        scale = 0.0 if name.endswith("norm") else CONFIG.embed_size**-0.5
        noise = generator.normal(size=(2, *spec.shape)) * scale
        target[name] = (scale == 0.0) + noise[0]
        draft[name] = target[name] + 0.15 * noise[1]
    for name, values in (("target", target), ("draft", draft)):
        parameters = {key: jnp.asarray(value, jnp.float32) for key, value in values.items()}
        save_hf(Llama(CONFIG, parameters), folder / name)
        write_tokenizer(folder / name)
    return folder / "target", folder / "draft"
