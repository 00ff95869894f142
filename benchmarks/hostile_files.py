"""Thousands of cut and altered files: each opens, or ends in one sentence, in little memory.

    python benchmarks/hostile_files.py --number 10000

Alters a checkpoint's configuration, weights and tokenizer, a GGUF file, a config and prompts: by
cutting, by turning bytes, by repeating a piece, and by putting large numbers in the place of
small ones. Writes results/hostile_files.json.
"""

from __future__ import annotations

import collections
import random
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
from absl import flags

sys.path.append(str(Path(__file__).parents[1] / "tests" / "helpers"))
import gguf_files
from machine import run, write
from random_attacks import altered
from tokenizer_makers import fill
from tqdm import tqdm

from fly_jax.decoding.config import load_config
from fly_jax.errors import FlyJaxError
from fly_jax.launch.inputs import read_prompts
from fly_jax.models.checkpoints.load import load_llama, open_checkpoint
from fly_jax.models.checkpoints.source import EMBEDDED_PAIR
from fly_jax.models.llama import Llama

_NUMBER = flags.DEFINE_integer("number", 10_000, "files", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "of the alterations")
_TESTS = Path(__file__).parents[1] / "tests"
_MOST_SECONDS, _MOST_BYTES = 5.0, 200 * 2**20


def _open_model(path: Path) -> None:
    load_llama(open_checkpoint(path))


def _open_prompts(path: Path) -> None:
    read_prompts(str(path), skip_bad=False)


def _kinds(folder: Path) -> dict[str, tuple[Path, Path, Callable[[Path], object]]]:
    """By name: a file that is altered, what is then opened, and how."""
    model = folder / "model"
    shutil.copytree(_TESTS / "fixtures" / "golden" / "llama31", model)
    fill(model, "llama3")
    awq = shutil.copytree(_TESTS / "fixtures" / "quantised" / "awq", folder / "awq")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / name, awq)
    draft = shutil.copytree(EMBEDDED_PAIR[1], folder / "embedded")
    gguf = folder / "model.gguf"
    tensors = gguf_files.tensors_of(Llama.random(gguf_files.CONFIG, jax.random.key(0)))
    gguf_files.write_sized(gguf, tensors, *gguf_files.sentence_piece_writer(folder))
    config = shutil.copy(Path(__file__).parents[1] / "configs" / "embedded_pair.toml", folder)
    reference = shutil.copy(Path(__file__).parents[1] / "configs" / "fly_reference.json", folder)
    prompts = folder / "prompts.jsonl"
    lines = [
        '{"prompt": "x", "max_new_tokens": 4}',
        '{"messages": [{"role": "user", "content": "y"}]}',
    ]
    prompts.write_text("\n".join(lines * 20))
    return {
        "config.json": (model / "config.json", model, _open_model),
        "quantization_config": (awq / "config.json", awq, _open_model),
        "safetensors": (model / "model.safetensors", model, _open_model),
        "tokenizer.json": (model / "tokenizer.json", model, _open_model),
        "tokenizer_config.json": (draft / "tokenizer_config.json", draft, _open_model),
        "gguf": (gguf, gguf, _open_model),
        "toml": (Path(config), Path(config), load_config),
        "reference json": (Path(reference), Path(reference), load_config),
        "prompts": (prompts, prompts, _open_prompts),
    }


def main() -> None:
    chance = random.Random(_SEED.value)
    outcomes: collections.Counter[str] = collections.Counter()
    faults: list[str] = []
    slowest: dict[str, float] = collections.defaultdict(float)
    with tempfile.TemporaryDirectory() as folder:
        kinds = _kinds(Path(folder))
        originals = {name: kind[0].read_bytes() for name, kind in kinds.items()}
        for _, opened, way in kinds.values():
            way(opened)  # as it is, it opens
        before = _peak()
        for number in tqdm(range(_NUMBER.value), desc="Files", unit=""):
            name = list(kinds)[number % len(kinds)]
            path, opened, way = kinds[name]
            content = altered(originals[name], chance)
            path.write_bytes(content)
            begin = time.perf_counter()
            try:
                way(opened)
                outcomes[f"{name}: opened"] += 1
            except FlyJaxError as error:
                outcomes[f"{name}: refused"] += 1
                if "\n" in str(error):
                    faults.append(f"{name}: more than a line: {error}")
            except Exception as error:
                faults.append(f"{name}: {type(error).__name__}: {error}"[:300])
                kept = Path(tempfile.gettempdir()) / f"hostile_{number}_{path.name}"
                kept.write_bytes(content)
                tqdm.write(f"{faults[-1]} (kept as {kept})")
            finally:
                path.write_bytes(originals[name])
            slowest[name] = max(slowest[name], time.perf_counter() - begin)
        grown = _peak() - before
    result = {
        "number": _NUMBER.value,
        "seed": _SEED.value,
        "outcomes": dict(sorted(outcomes.items())),
        "faults": faults,
        "slowest_seconds": slowest,
        "peak_growth_bytes": grown,
    }
    print(write("hostile_files", result))
    if faults or grown > _MOST_BYTES or max(slowest.values()) > _MOST_SECONDS:
        raise SystemExit(f"{len(faults)} faults, {grown / 2**20:.0f} MiB, {dict(slowest)}")


def _peak() -> int:
    """Bytes that this process has had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    run(main)
