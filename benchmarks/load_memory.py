r"""Peak memory of loading: of two processes that share a checkpoint, and of a command's start.

    python benchmarks/load_memory.py
    python benchmarks/load_memory.py --target qwen/qwen2.5-coder-1.5b-instruct.gguf \
        --draft qwen/qwen2.5-coder-0.5b-instruct.gguf

The first writes two Hugging Face checkpoints with random weights, the second with twice the layers
of the first, and loads each in two processes on a mesh of two devices. What a process holds beyond
its shards must not grow with the model. Writes results/load_memory.json. Takes a minute or two and
5 GB of disk; `--folder` keeps the checkpoints for the next time.

Memory is the anonymous part of the resident set (RssAnon), read from /proc every 5 ms, without
pages of mapped files; VmHWM, the kernel's own peak of the whole set, is written beside it.

The second times the command from its start to the end of one token, the first time and the second,
with caches of its own, and what six chats of different lengths compile. Writes results/start.json.
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

from fly_jax.decoding.pair import load_pair
from fly_jax.engine.engine import Engine
from fly_jax.models.architectures import LlamaConfig, config_fields, groups
from fly_jax.models.checkpoints.hugging_face import tensor_name, tensor_shape
from fly_jax.models.checkpoints.load import load_llama
from fly_jax.sharding.mesh import create_mesh, parse_mesh
from fly_jax.sharding.rules import RULES, Layout

FLAGS = flags.FLAGS
flags.DEFINE_string("folder", None, "where checkpoints are kept; a temporary folder if not given")
flags.DEFINE_multi_integer("num_layers", [12, 24], "layers of each checkpoint")
flags.DEFINE_string("target", None, "model of which the start is measured instead")
flags.DEFINE_string("draft", None, "its draft, for the programs of the six chats")
flags.DEFINE_multi_enum("dtype", ["float32"], ["float32", "bfloat16", "int8"], "of the target")
flags.DEFINE_string("job", None, "what one process loads; given by the script itself")

CHAT_TOKENS = (45, 90, 160, 240, 330, 422)
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
    _, _, behind = Path("/proc/self/status").read_text().partition(f"\n{field}:")
    return int(behind.split()[0]) * 1024


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


def start(target: str, dtype: str, caches: Path) -> dict[str, float]:
    """The command once: seconds, its peak of memory, and the bytes of the weights that are kept."""
    command = [sys.executable, "-m", "fly_jax.launch", "--target", target, "--dtype", dtype]
    command += ["--prompt", "def add(a, b):", "--max_new_tokens", "1", "--json"]
    begin = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, env={**os.environ, "XDG_CACHE_HOME": str(caches)}
    )
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit("The command failed; its message is above.")
    kept = sum(file.stat().st_size for file in caches.glob("fly_jax/weights/*"))
    return {
        "seconds": time.perf_counter() - begin,
        "resident_peak_bytes": used.ru_maxrss * 1024,
        "kept_bytes": kept,
        "peak_to_kept": used.ru_maxrss * 1024 / kept,
    }


def programs_of_chats(target: str, draft: str | None) -> dict[str, Any]:
    """What is compiled for six chats, one after the other, decoded exactly with K = 4."""
    seconds: dict[str, float] = {}

    def add(event: str, duration: float, **_: Any) -> None:
        if event.startswith("/jax/core/compile/"):
            name = event.rpartition("/")[2]
            seconds[name] = seconds.get(name, 0.0) + duration

    jax.config.update("jax_enable_compilation_cache", False)
    pair = load_pair(target, draft, dtype="float32")
    random = np.random.default_rng(0)
    given = {"rule": "exact", "num_speculative_tokens": 4} if draft else {}
    jax.monitoring.register_event_duration_secs_listener(add)
    for length in CHAT_TOKENS:
        prompt = random.integers(1000, 100_000, length).tolist()
        Engine.of(pair, prompts=[prompt], max_new_tokens=64, **given).generate([prompt], 8)
    return {"tokens": CHAT_TOKENS, **seconds, "seconds": sum(seconds.values())}


def starts() -> None:
    """Writes what the starts of the target take."""
    found = []
    for dtype in FLAGS.dtype:
        with tempfile.TemporaryDirectory() as caches:
            for which in ("first", "second"):
                one = {"dtype": dtype, "start": which}
                found.append(one | start(FLAGS.target, dtype, Path(caches)))
                print(json.dumps(found[-1]), flush=True)
    chats = programs_of_chats(FLAGS.target, FLAGS.draft)
    print(json.dumps(chats))
    models = [Path(one).name for one in (FLAGS.target, FLAGS.draft) if one]
    result = {"command": f"python benchmarks/load_memory.py --target {' --draft '.join(models)}"}
    print(machine.write("start", result | {"starts": found, "programs_of_six_chats": chats}))


def main() -> None:
    if FLAGS.job:
        print(json.dumps(load(*json.loads(FLAGS.job))))
        return
    if FLAGS.target:
        starts()
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
