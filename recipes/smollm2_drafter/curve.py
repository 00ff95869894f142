r"""Trains heads of each kind on parts of a teacher's answers, and measures them on Spec-Bench.

    python recipes/smollm2_drafter/curve.py --part answers --shards 4 ...
    python recipes/smollm2_drafter/curve.py --part features --shard 0 --shards 4 ...  # and 1, 2, 3
    python recipes/smollm2_drafter/curve.py --part eagle3 --answer_tokens 2000000,500000 ...
    (each with --teacher MODEL --prompts_file prompts.jsonl --held_out question.jsonl)

The answers go on where they were stopped. The shards of the features may run side by side, and the
kinds of head too. `results_KIND.json` in the directory has what a round of exact decoding with
K = 4 settles on the answers to Spec-Bench's first turns, by category: computed from the answers,
as `train` does. All else is as `train` makes it, with as many steps as read the texts `--passes`
times.
"""

from __future__ import annotations

import functools
import itertools
import json
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging
from jax import Array
from tqdm import tqdm

from fly_jax.decoding.pair import OpenPair, Pair, load_pair, open_pair
from fly_jax.evaluation.machine import describe
from fly_jax.launch.inputs import Prompt, read_prompts
from fly_jax.models.architectures import LlamaConfig
from fly_jax.models.cache import KVCache, empty_cache
from fly_jax.models.checkpoints.write import carry_tokenizer, save_hf
from fly_jax.models.llama import Llama, Parameters
from fly_jax.training import expectations, heads
from fly_jax.training.expectations import Expected, read_documents
from fly_jax.training.trainer import bfloat16_matmul, train

_PART = flags.DEFINE_enum("part", None, ["answers", "features", *heads.KINDS], "what to do")
_TEACHER = flags.DEFINE_string("teacher", None, "the model that answers")
_PROMPTS = flags.DEFINE_string("prompts_file", None, "JSON lines with what is learned from")
_HELD_OUT = flags.DEFINE_string("held_out", None, "Spec-Bench's question.jsonl")
_DIRECTORY = flags.DEFINE_string("directory", "runs/curve", "where everything goes")
_DTYPE = flags.DEFINE_string(
    "dtype", "bfloat16", "of the teacher; float32 has products of bfloat16"
)
_NEW = flags.DEFINE_integer("max_new_tokens", 128, "of an answer")
_SLOTS = flags.DEFINE_integer("batch_size", 1024, "answers at a time; 128 on a CPU")
_PREFILL_TOKENS = flags.DEFINE_integer("prefill_tokens", 131072, "of a pass; 16384 on a CPU")
_SHARD = flags.DEFINE_integer("shard", 0, "which of the shards")
_SHARDS = flags.DEFINE_integer("shards", 1, "files of answers")
_ANSWER_TOKENS = flags.DEFINE_list("answer_tokens", ["500000"], "tokens learned from, 0 for all")
_TOKENS_PER_STEP = flags.DEFINE_integer("tokens_per_step", 8192, "of training")
_PASSES = flags.DEFINE_float("passes", 2.0, "times that all texts are read")
_BEGUN = flags.DEFINE_string("begun", None, "folder of a head that an eagle3 goes on from")
_LAYERS = flags.DEFINE_integer("num_layers", 2, "of a PARD drafter or a DSpark head")

# Prompts are padded to these, so that few programs are compiled; longer ones are left out.
_WIDTHS = 64, 128, 256, 512, 1024, 2048
_KNOWN, _MOST_HELD_OUT = 8191, 48


def _prompts() -> tuple[list[Prompt], int]:
    """Spec-Bench's first turns, then what is learned from; how many the former are."""
    asked = read_prompts(_HELD_OUT.value, skip_bad=False)
    return asked + read_prompts(_PROMPTS.value, skip_bad=True), len(asked)


def _encoded(models: OpenPair, prompt: Prompt) -> Any:
    return models.encode([{"role": "user", "content": prompt.text}], name=prompt.source)


def _file(shard: int) -> Path:
    return Path(_DIRECTORY.value) / f"answers_{shard}_of_{_SHARDS.value}.jsonl"


@functools.partial(jax.jit, static_argnames=("config", "most", "ends"), donate_argnames=("cache",))
def _greedy(
    config: LlamaConfig, parameters: Parameters, cache: KVCache, tokens: Array, lengths: Array,
    most: int, ends: tuple[int, ...],
) -> Array:  # fmt: skip
    """Continues padded prompts [rows, width] greedily; returns [rows, most], -1 behind an end."""
    model, rows = Llama(config, parameters), len(tokens)
    multiply = bfloat16_matmul if model.dtype == jnp.float32 else None

    def extended(tokens: Array, cache: KVCache) -> tuple[Array, KVCache]:
        hidden, new, _ = model.hidden_and_inputs(tokens, cache, matmul=multiply)
        return hidden, cache.written(new, model.layout)

    hidden, cache = extended(tokens, cache)
    cache = cache.with_length(lengths)
    last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)
    found = jnp.full((rows, most), -1, jnp.int32)

    def chosen(hidden: Array) -> Array:
        return jnp.argmax(model.logits(hidden, multiply)[:, 0], axis=-1).astype(jnp.int32)

    def goes_on(state: tuple[Array, KVCache, Array, Array, Array]) -> Array:
        step, _, _, _, ended = state
        return (step < most) & ~jnp.all(ended)

    def decode(
        state: tuple[Array, KVCache, Array, Array, Array],
    ) -> tuple[Array, KVCache, Array, Array, Array]:
        step, cache, token, found, ended = state
        found = found.at[:, step].set(jnp.where(ended, -1, token))
        ended |= jnp.isin(token, jnp.array(ends))
        hidden, cache = extended(token[:, None], cache)
        cache = cache.with_length(cache.length + 1)
        return step + 1, cache, chosen(hidden), found, ended

    start = jnp.int32(0), cache, chosen(last), found, jnp.zeros(rows, bool)
    return jax.lax.while_loop(goes_on, decode, start)[3]


def _answer() -> None:
    """Answers what no file has yet: Spec-Bench's prompts, then the others, a group at a time."""
    models, pair = open_pair(_TEACHER.value), load_pair(_TEACHER.value, dtype=_DTYPE.value)
    prompts, held_out = _prompts()
    ids = [_encoded(models, one) for one in prompts]
    most, ends = _NEW.value, pair.tokenizer.eos_token_ids
    paths = [_file(shard) for shard in range(_SHARDS.value)]
    done = {index for path in paths for index, _ in read_documents(path)}
    files = [path.open("a", encoding="utf-8") for path in paths]
    batches: list[tuple[list[int], int, int]] = []
    starts = [0, *range(held_out, len(ids), 16 * _SLOTS.value), len(ids)]
    for numbers in itertools.starmap(range, itertools.pairwise(starts)):
        for low, width in itertools.pairwise((0, *_WIDTHS)):
            some = [one for one in numbers if one not in done and low < len(ids[one]) <= width]
            rows = min(_SLOTS.value, _PREFILL_TOKENS.value // width)
            batches += [(some[at : at + rows], rows, width) for at in range(0, len(some), rows)]
    target = pair.target.stacked()  # compiles faster
    config, parameters = target.config, target.parameters()

    def cache(rows: int, width: int) -> KVCache:
        return empty_cache(config, rows, width + most, target.dtype)

    def compiled(shape: tuple[int, int]) -> Any:
        given = (jax.ShapeDtypeStruct(one, jnp.int32) for one in (shape, shape[:1]))
        empty = jax.eval_shape(functools.partial(cache, *shape))
        return _greedy.lower(config, parameters, empty, *given, most=most, ends=ends).compile()

    shapes = sorted({(rows, width) for _, rows, width in batches})
    with ThreadPoolExecutor() as pool:
        programs = dict(zip(shapes, pool.map(compiled, shapes), strict=True))
    for numbers, rows, width in tqdm(batches, desc="Answering", unit="batch"):
        tokens, lengths = np.zeros((rows, width), np.int32), np.ones(rows, np.int32)
        for row, number in enumerate(numbers):
            lengths[row] = len(ids[number])
            tokens[row, : lengths[row]] = ids[number]
        found = np.asarray(programs[rows, width](parameters, cache(rows, width), tokens, lengths))
        lines = [""] * len(files)
        for row, number in enumerate(numbers):
            answer = found[row][found[row] >= 0].tolist()
            record = {"index": number, "prompt": list(ids[number]), "answer": answer}
            lines[number % len(files)] += json.dumps(record) + "\n"
        for file, some in zip(files, lines, strict=True):  # whole lines, if it is stopped
            file.write(some)
            file.flush()
    for file in files:
        file.close()


def _of_shard(pair: Pair, shard: int) -> dict[int, Expected]:
    """The teacher's expectations by the prompt's number."""
    if not _file(shard).exists():
        raise FileNotFoundError(f"{_file(shard)} is not there: --part answers makes it")
    documents = dict(read_documents(_file(shard)))  # in the file's order, which grows at its end
    heard = expectations.expected(
        pair.target.stacked(),  # compiles faster
        list(documents.values()),
        _file(shard).with_suffix(""),
        length=expectations.ROW_LENGTH + 1,
        layers=heads.layers_read(pair.target.config.num_layers),
    )
    return dict(zip(documents, heard, strict=True))


def _heard(pair: Pair) -> tuple[dict[int, Expected], list[Prompt]]:
    """The expectations of all shards, and Spec-Bench's prompts, which come first."""
    found: dict[int, Expected] = {}
    for shard in range(_SHARDS.value):
        found |= _of_shard(pair, shard)
    prompts, number = _prompts()
    return dict(sorted(found.items())), prompts[:number]


def _measured(kind: str, head: Any, heard: dict[int, Expected], asked: list[Prompt]) -> Any:
    """Mean accepted tokens over Spec-Bench, and by category."""
    numbers = [number for number in range(len(asked)) if number in heard]
    each = heads.settled(kind, head, [heard[number] for number in numbers])
    groups = defaultdict(list)
    for number, one in zip(numbers, each, strict=True):
        for group in ("all", asked[number].category):
            groups[group].append(one)
    sums = {group: np.sum(some, axis=0).tolist() for group, some in groups.items()}
    return {group: tokens / max(rounds, 1) for group, (tokens, rounds) in sums.items()}


def _learned(heard: dict[int, Expected], number: int, answer_tokens: int) -> list[Expected]:
    """The first documents behind Spec-Bench's, so many that their answers have these tokens."""
    found, tokens = [], 0
    for index, one in heard.items():
        if index < number:
            continue
        found.append(one)
        tokens += len(one.tokens) - one.num_prompt
        if tokens >= answer_tokens > 0:
            break
    return found


def _begun() -> Parameters | None:
    """The parameters of the head that the training goes on from."""
    if _BEGUN.value is None:
        return None
    (head,) = load_pair(_TEACHER.value, _BEGUN.value, dtype="float32").drafts
    return head.stacked().parameters()


def _train(kind: str) -> None:
    directory = Path(_DIRECTORY.value)
    models, pair = open_pair(_TEACHER.value), load_pair(_TEACHER.value, dtype=_DTYPE.value)
    heard, asked = _heard(pair)
    config = pair.target.config
    results = directory / f"results_{kind}.json"
    found = json.loads(results.read_text()) if results.exists() else {}
    for wanted in map(int, _ANSWER_TOKENS.value):
        documents = _learned(heard, len(asked), wanted)
        number = min(_MOST_HELD_OUT, len(documents) // 2)
        held_out, learned = documents[:number], documents[number:]
        known, share = expectations.frequent_tokens(learned, config.vocab_size, _KNOWN)
        begun = _begun()
        if begun is not None:  # it goes on with the tokens that it knows
            known = np.argsort(begun["token_rows"])[: begun["unembedding"].shape[1]]
            said = np.concatenate([one.tokens[one.num_prompt :] for one in learned])
            share = float(np.isin(said, known).mean())
        own, start = heads.beginning(kind, pair.target, known, num_layers=_LAYERS.value)
        if begun is not None:
            start = start._replace(trained={name: begun[name] for name in start.trained})
        read = sum(len(one.tokens) for one in learned)
        steps = max(int(read * _PASSES.value / _TOKENS_PER_STEP.value), 10)
        recipe = heads.recipe_of(
            kind, own, tokens_per_step=_TOKENS_PER_STEP.value, num_steps=steps, seed=0
        )
        begun = time.perf_counter()
        made = train(
            recipe,
            functools.partial(expectations.batches, learned, recipe),
            directory / f"checkpoints_{kind}_{_LAYERS.value}_{wanted}",
            start=start,
            measured=functools.partial(heads.mean_accepted_tokens, kind, documents=held_out),
            steps_per_checkpoint=heads.steps_per_checkpoint(recipe),
        )
        folder = directory / f"{kind}_{_LAYERS.value}_{wanted}"
        save_hf(made, folder, of=_TEACHER.value)
        carry_tokenizer(models.target.path, models.target.source, folder)
        name = f"{_LAYERS.value} layers, {wanted}" if kind != "eagle3" else str(wanted)
        found[name] = {
            "machine": describe(),
            "answer_tokens": sum(len(one.tokens) - one.num_prompt for one in learned),
            "text_tokens": read,
            "documents": len(learned),
            "known_share": share,
            "steps": steps,
            "tokens_per_step": _TOKENS_PER_STEP.value,
            "seconds": time.perf_counter() - begun,
            "trained_parameters": sum(one.size for one in start.trained.values()),
            "held_out": heads.mean_accepted_tokens(kind, made, held_out),
            "spec_bench": _measured(kind, made, heard, asked),
        }
        results.write_text(json.dumps(found, indent=2) + "\n")
        print(kind, name, found[name], flush=True)


def main(_: list[str]) -> None:
    """Does one part."""
    Path(_DIRECTORY.value).mkdir(parents=True, exist_ok=True)
    if _PART.value == "answers":
        _answer()
    elif _PART.value == "features":
        _of_shard(load_pair(_TEACHER.value, dtype=_DTYPE.value), _SHARD.value)
    else:
        _train(_PART.value)


if __name__ == "__main__":
    logging.set_verbosity(logging.WARNING)  # absl.app would show what every library does
    flags.mark_flags_as_required(["part", "teacher", "prompts_file", "held_out"])
    app.run(main)
