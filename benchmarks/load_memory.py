"""Peak memory of two processes that load a sharded checkpoint, each its half of every matrix.

    python benchmarks/load_memory.py

Writes two Hugging Face checkpoints with random weights, the second with twice the layers of the
first, and loads each in two processes on a mesh of two devices. What a process holds beyond its
shards must not grow with the model. Writes results/load_memory.json. Takes a minute or two and
5 GB of disk; `--folder` keeps the checkpoints for the next time.

Memory is the anonymous part of the resident set (RssAnon), read from /proc every 5 ms; pages of
mapped files, which the kernel can drop at any time, are not in it. VmHWM, the kernel's own peak of
the whole resident set, is written beside it.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import machine
import ml_dtypes
import numpy as np
from absl import flags
from safetensors.numpy import save_file
from tqdm import tqdm

from fly_jax.models.architectures import LlamaConfig, config_fields, groups
from fly_jax.models.checkpoints.hugging_face import tensor_name, tensor_shape
from fly_jax.models.checkpoints.load import load_llama
from fly_jax.sharding.mesh import create_mesh, parse_mesh
from fly_jax.sharding.rules import RULES, Layout

FLAGS = flags.FLAGS
flags.DEFINE_string("folder", None, "where checkpoints are kept; a temporary folder if not given")
flags.DEFINE_multi_integer("num_layers", [12, 24], "layers of each checkpoint")
flags.DEFINE_string("job", None, "what one process loads; given by the script itself")

NUM_PROCESSES = 2
SECONDS_PER_SAMPLE = 0.005


def config(num_layers: int) -> LlamaConfig:
    """The layers of Llama-3.2-1B with Llama 2's vocabulary, and an unembedding of its own."""
    return LlamaConfig(
        vocab_size=32_000,
        embed_size=2048,
        ffw_size=8192,
        num_layers=num_layers,
        num_heads=32,
        num_kv_heads=8,
        head_size=64,
        max_context=2048,
    )


def write_checkpoint(folder: Path, model: LlamaConfig) -> None:
    """A file for every group and their index; a file that is there is not written again."""
    folder.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    random = np.random.default_rng(0)
    for group in tqdm(groups(model), desc=f"Writing {folder.name}", unit="file"):
        file = folder / f"model-{group.name}.safetensors"
        specs = group.specs(model)
        weight_map |= {tensor_name(group, name): file.name for name in specs}
        if file.exists():
            continue
        tensors = {
            tensor_name(group, name): (
                random.random(tensor_shape(name, spec), np.float32) - 0.5
            ).astype(ml_dtypes.bfloat16)
            for name, spec in specs.items()
        }
        partial = file.with_suffix(".partial")
        save_file(tensors, partial, metadata={"format": "pt"})
        partial.rename(file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config_fields(model)))


def memory(field: str) -> int:
    """A field of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {field}.")


def load(folder: str, dtype: str, coordinator: str, process_id: int) -> dict[str, Any]:
    """One process's part: loads its shards and says what that took."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(coordinator, NUM_PROCESSES, process_id)
    layout = Layout(create_mesh(parse_mesh(str(NUM_PROCESSES))), RULES["tensor"])
    before, start, done, seen = memory("RssAnon"), time.perf_counter(), threading.Event(), [0]

    def watch() -> None:
        while not done.wait(SECONDS_PER_SAMPLE):
            seen.append(memory("RssAnon"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    model = load_llama(Path(folder), layout=layout, dtype=jnp.bfloat16, int8=dtype == "int8")
    arrays = jax.block_until_ready(model.parameters())
    done.set()
    watcher.join()
    shards = sum(
        shard.data.nbytes for array in arrays.values() for shard in array.addressable_shards
    )
    return {
        "shard_bytes": shards,
        "anonymous_before_bytes": before,
        "anonymous_peak_bytes": max(seen),
        "beyond_shards_bytes": max(seen) - before - shards,
        "resident_peak_bytes": memory("VmHWM"),
        "seconds": time.perf_counter() - start,
    }


def measure(folder: Path, dtype: str) -> list[dict[str, Any]]:
    """Loads in all processes at once: the figures of each."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    processes = []
    for index in range(NUM_PROCESSES):
        job = json.dumps([str(folder), dtype, address, index])
        processes.append(
            subprocess.Popen(
                [sys.executable, __file__, f"--job={job}"],
                stdout=subprocess.PIPE,
                env={**os.environ, "JAX_PLATFORMS": "cpu"},
            )
        )
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit("A process failed; its message is above.")
    return [json.loads(output.splitlines()[-1]) for output in outputs]  # Gloo writes lines too


def main() -> None:
    if FLAGS.job:
        print(json.dumps(load(*json.loads(FLAGS.job))))
        return
    loads = []
    with tempfile.TemporaryDirectory() as temporary:
        for num_layers in FLAGS.num_layers:
            folder = Path(FLAGS.folder or temporary) / f"{num_layers}_layers"
            write_checkpoint(folder, config(num_layers))
            stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
            for dtype in ("bfloat16", "int8"):
                one = {"num_layers": num_layers, "checkpoint_bytes": stored, "dtype": dtype}
                loads.append(one | {"processes": measure(folder, dtype)})
                print(json.dumps(loads[-1], indent=2), flush=True)
    result = {"command": "python benchmarks/load_memory.py", "loads": loads}
    print(machine.write("load_memory", result))


if __name__ == "__main__":
    machine.run(main)
