"""vLLM for TPU with the plugin, on a CPU: draft models of other architectures, and two ranks.

    pip install vllm-tpu==0.32.0 && pip install -e .
    python benchmarks/vllm_families.py

Tiny random models, 8 random prompts. A draft has its target's weights, so
every token that it drafts must be accepted, and all tokens must be plain decoding's: with a lookup
below the draft model, and with two ranks that share the requests. Each way of decoding is a process
of its own; `vllm_stand_ins.py` stands in for what the engine lacks without a TPU, and nothing is
said of speed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import vllm_stand_ins
from absl import flags
from machine import run, write

from fly_jax.models.checkpoints.load import open_weights, save_hf
from fly_jax.models.checkpoints.source import EMBEDDED_PAIR
from fly_jax.models.llama import Llama

_WAY = flags.DEFINE_string("way", None, "decode in this way alone; used by the script itself")
_FILES = flags.DEFINE_list("files", [], "models and output of that way")

_GOLDEN = Path(__file__).parents[1] / "tests" / "fixtures" / "golden"
_FAMILIES = ("qwen3", "mistral")  # the embedded pair is a Llama: vllm_engine.py
_K, _VOCAB = 15, 96
_HEAD_SIZE = 128  # the engine knows no smaller ones of a Qwen 3
_EXACT = {"rule": "exact"}
# additional_config["fly_jax"], and the ranks of data parallel attention.
_WAYS: dict[str, tuple[dict[str, Any] | None, int]] = {
    "plain": (None, 1),
    "draft model": (_EXACT, 1),
    "draft model, lookup below, two ranks": (_EXACT | {"prompt_lookup_max": 4}, 2),
}


def _write_models(folder: Path, family: str) -> None:
    """Target and draft with the same weights."""
    golden = open_weights(_GOLDEN / family).config
    config = dataclasses.replace(
        golden, head_size=_HEAD_SIZE, sliding_window=None, windowed_layers=()
    )
    # The engine has no Mistral in JAX to be a target, and without windows it is a Llama.
    as_target = "llama" if family == "mistral" else family
    parameters = Llama.random(config, jax.random.key(0)).parameters()
    for role, architecture in (("target", as_target), ("draft", family)):
        model = Llama(dataclasses.replace(config, architecture=architecture), parameters)
        save_hf(model, folder / role, jnp.float32)
        for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json"):
            if (EMBEDDED_PAIR[0] / name).exists():
                shutil.copy(EMBEDDED_PAIR[0] / name, folder / role)


def _decode(way: str, models: Path, output: Path) -> None:
    """In a process of its own: what the engine makes of the prompts."""
    fly_jax, ranks = _WAYS[way]
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={ranks}"
    vllm_stand_ins.install()
    from vllm import LLM, SamplingParams, TokensPrompt

    engine = LLM(
        str(models / "target"),
        skip_tokenizer_init=True,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        data_parallel_size=ranks,
        speculative_config=fly_jax and {
            "method": "draft_model", "model": str(models / "draft"), "num_speculative_tokens": _K,
        },
        additional_config={
            "sharding": {"sharding_strategy": {"device_indexes": list(range(ranks))}},
            **({"fly_jax": fly_jax} if fly_jax else {}),
        },
        disable_log_stats=False,
        **vllm_stand_ins.ENGINE,
    )  # fmt: skip
    chance = random.Random(0)
    prompts = [
        [chance.randrange(3, _VOCAB) for _ in range(chance.randint(5, 40))] for _ in range(8)
    ]
    outputs = engine.generate(
        [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts],
        SamplingParams(temperature=0, max_tokens=48, detokenize=False),
    )
    tokens = [list(one.outputs[0].token_ids) for one in outputs]
    output.write_text(json.dumps({"tokens": tokens, **vllm_stand_ins.counters(engine)}))


def main() -> None:
    if _WAY.value is not None:
        _decode(_WAY.value, *map(Path, _FILES.value))
        return
    versions = vllm_stand_ins.versions("vllm-tpu", "tpu-inference")
    jax.config.update("jax_platforms", "cpu")  # for the weights; each engine has its own process
    results: dict[str, Any] = {}
    for family in _FAMILIES:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / "models"
            _write_models(folder, family)
            found = {way: vllm_stand_ins.in_its_own_process(way, folder) for way in _WAYS}
        plain = found.pop("plain")["tokens"]
        results[family] = {
            way: {
                "as_plain": sum(a == b for a, b in zip(one["tokens"], plain, strict=True)),
                "drafted": one["draft_tokens"],
                "accepted": one["accepted_tokens"],
            }
            for way, one in found.items()
        }
        print(family, results[family], flush=True)
    print(write("vllm_families", {**versions, "requests": 8, "families": results}))


if __name__ == "__main__":
    run(main)
