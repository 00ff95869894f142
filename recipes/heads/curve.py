r"""Trains heads of each kind on parts of a teacher's answers, and measures them on Spec-Bench.

    python recipes/heads/curve.py --part answers ...
    python recipes/heads/curve.py --part eagle3 --answer_tokens 2000000,500000 ...
    (each with --teacher MODEL --prompts_file prompts.jsonl --held_out question.jsonl)

The answers, kept with the teacher's features, go on where they were stopped. The kinds of head may
run side by side. `results_KIND.json` in the directory has what a round of exact decoding with
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
from collections.abc import Container
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging
from jax import Array
from tqdm import tqdm

from fly_jax.decoding.pair import OpenPair, load_pair, open_pair
from fly_jax.decoding.programs import cache_capacity
from fly_jax.evaluation.machine import describe
from fly_jax.launch.inputs import Prompt, read_prompts
from fly_jax.models.architectures import LlamaConfig
from fly_jax.models.cache import KVCache, empty_cache
from fly_jax.models.checkpoints.write import carry_tokenizer, save_hf
from fly_jax.models.llama import Llama, Parameters
from fly_jax.sharding.rules import Layout
from fly_jax.training import expectations, heads
from fly_jax.training.expectations import Expected, read_documents
from fly_jax.training.trainer import bfloat16_matmul, train

_PART = flags.DEFINE_enum("part", None, ["answers", *heads.KINDS], "what to do")
_TEACHER = flags.DEFINE_string("teacher", None, "the model that answers")
_PROMPTS = flags.DEFINE_string("prompts_file", None, "JSON lines with what is learned from")
_HELD_OUT = flags.DEFINE_string("held_out", None, "Spec-Bench's question.jsonl")
_DIRECTORY = flags.DEFINE_string("directory", "runs/curve", "where everything goes")
_DTYPE = flags.DEFINE_string(
    "dtype", "bfloat16", "of the teacher; float32 has products of bfloat16; int8 is for CPUs"
)
_NEW = flags.DEFINE_integer("max_new_tokens", 128, "of an answer")
_SLOTS = flags.DEFINE_integer("batch_size", 1024, "answers at a time; 128 on a CPU")
_PREFILL_TOKENS = flags.DEFINE_integer("prefill_tokens", 131072, "of a pass; 16384 on a CPU")
_LONGEST = flags.DEFINE_integer("longest_prompt", 2048, "tokens of a prompt that is answered")
_ANSWER_TOKENS = flags.DEFINE_list("answer_tokens", ["500000"], "tokens learned from, 0 for all")
_TOKENS_PER_STEP = flags.DEFINE_integer("tokens_per_step", 8192, "of training")
_PASSES = flags.DEFINE_float("passes", 2.0, "times that all texts are read")
_BEGUN = flags.DEFINE_string("begun", None, "folder of a head that an eagle3 goes on from")
_LAYERS = flags.DEFINE_integer("num_layers", 2, "of a PARD drafter or a DSpark head")
_NEURONS = flags.DEFINE_integer("intermediate_size", None, "of its MLP; None is the teacher's")

# Prompts are padded to these, so that few programs are compiled; longer ones are left out.
_WIDTHS = 64, 128, 256, 512, 1024, 2048
_KNOWN, _MOST_HELD_OUT = 8191, 48
# Rows of the smallest program that answers.
_FEWEST = 16


def _prompts() -> tuple[list[Prompt], int]:
    """Spec-Bench's first turns, then what is learned from; how many the former are."""
    asked = read_prompts(_HELD_OUT.value, skip_bad=False)
    return asked + read_prompts(_PROMPTS.value, skip_bad=True), len(asked)


def _encoded(models: OpenPair, prompt: Prompt) -> Any:
    return models.encode([{"role": "user", "content": prompt.text}], name=prompt.source)


def _file() -> Path:
    return Path(_DIRECTORY.value) / "answers.jsonl"


@functools.partial(jax.jit, static_argnames=("config", "layout"), donate_argnames=("cache",))
def _read(
    config: LlamaConfig, layout: Layout | None, parameters: Parameters, cache: KVCache,
    tokens: Array, lengths: Array,
) -> tuple[KVCache, dict[str, Array]]:  # fmt: skip
    """Reads so many of each row's tokens [rows, time] as its length; returns what is kept."""
    model = Llama(config, parameters, layout)
    is_wide = model.dtype == jnp.float32 and not model.has_integers
    multiply = bfloat16_matmul if is_wide else None
    layers = heads.layers_read(config.num_layers)
    hidden, new, features = model.hidden_and_inputs(tokens, cache, layers, multiply)
    cache = cache.written(new, layout).with_length(cache.length + lengths)
    return cache, expectations.kept_of(model, hidden, features, multiply)


@functools.partial(jax.jit, donate_argnames=("cache",))
def _of_rows(cache: KVCache, rows: Array) -> KVCache:
    return jax.tree.map(lambda one: one[rows] if one.ndim == 1 else one[:, rows], cache)


def _answered(
    target: Llama, prompts: list[list[int]], rows: int, width: int, ends: Container[int]
) -> list[tuple[list[int], np.ndarray]]:
    """Answers prompts greedily; returns each answer, and what is kept of the prompt's text and it.

    When half of the rows are done, the others go on without them.
    """
    lengths, tokens = np.ones(rows, np.int32), np.zeros((rows, width), np.int32)
    for row, prompt in enumerate(prompts):
        lengths[row] = len(prompt)
        tokens[row, : len(prompt)] = prompt
    cache = empty_cache(target.config, rows, cache_capacity(width, _NEW.value), target.dtype)
    answers, kept = ([list[Any]() for _ in prompts] for _ in range(2))
    running, done = np.arange(rows), np.arange(rows) >= len(prompts)
    while True:
        model = target.config, target.layout, target.parameters()
        cache, said = _read(*model, cache, tokens, lengths)
        records = expectations.as_records(said)
        chosen = records["likely"][np.arange(len(running)), lengths - 1, 0]
        for at, row in enumerate(running):
            if done[row]:
                continue
            kept[row].append(records[at, : lengths[at]])
            answer = answers[row]
            done[row] = len(answer) == _NEW.value or (bool(answer) and answer[-1] in ends)
            if not done[row]:
                answers[row].append(int(chosen[at]))
        if done.all():
            return [(one, np.concatenate(some)) for one, some in zip(answers, kept, strict=True)]
        stay = np.argsort(done[running], kind="stable")
        stay = stay[: max(_FEWEST, 1 << int(np.sum(~done) - 1).bit_length())]
        if len(stay) < len(running):
            cache, running, chosen = _of_rows(cache, stay), running[stay], chosen[stay]
        tokens, lengths = chosen[:, None], np.ones(len(running), np.int32)


def _answer() -> None:
    """Answers what no line has yet: Spec-Bench's prompts, then the others, a group at a time."""
    models, pair = open_pair(_TEACHER.value), load_pair(_TEACHER.value, dtype=_DTYPE.value)
    prompts, held_out = _prompts()
    ids = [list(_encoded(models, one)) for one in prompts]
    done = {index for index, _ in read_documents(_file())}
    # Stacked layers compile faster, and those of integers then multiply no integers.
    target = pair.target if pair.target.has_integers else pair.target.stacked()
    batches: list[tuple[list[int], int, int]] = []
    starts = [0, *range(held_out, len(ids), 16 * _SLOTS.value), len(ids)]
    widths = [one for one in _WIDTHS if one <= _LONGEST.value]
    for numbers in itertools.starmap(range, itertools.pairwise(starts)):
        for low, width in itertools.pairwise((0, *widths)):
            some = [one for one in numbers if one not in done and low < len(ids[one]) <= width]
            rows = min(_SLOTS.value, _PREFILL_TOKENS.value // width)
            batches += [(some[at : at + rows], rows, width) for at in range(0, len(some), rows)]
    for numbers, rows, width in tqdm(batches, desc="Answering", unit="batch"):
        some = [ids[number] for number in numbers]
        found = _answered(target, some, rows, width, pair.tokenizer.eos_token_ids)
        part = _file().with_name(f"answers_to_{numbers[0]:06}.npy")
        np.save(part, np.concatenate([kept for _, kept in found]))
        lines = ""
        for number, (answer, _) in zip(numbers, found, strict=True):
            record = {"index": number, "prompt": ids[number], "answer": answer, "part": part.name}
            lines += json.dumps(record) + "\n"
        with _file().open("a", encoding="utf-8") as file:
            file.write(lines)  # whole lines, if it is stopped


def _heard() -> tuple[dict[int, Expected], list[Prompt]]:
    """What is kept of each prompt and its answer, and Spec-Bench's prompts, which come first."""
    if not _file().exists():
        raise FileNotFoundError(f"{_file()} is not there: --part answers makes it")
    found, begins = dict[int, Expected](), defaultdict[str, int](int)
    part_of = functools.cache(lambda name: np.load(_file().with_name(name), mmap_mode="r"))
    for line in _file().read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        tokens = np.array([*record["prompt"], *record["answer"]], np.int32)
        begin, length = begins[record["part"]], len(tokens)
        begins[record["part"]] = end = begin + length
        begin = max(begin, end - expectations.ROW_LENGTH - 1)
        own = part_of(record["part"])[begin:end]
        num_prompt = max(len(record["prompt"]) - (length - len(own)), 0)
        each = {name: own[name] for name in Expected._fields[2:]}
        found[record["index"]] = Expected(tokens[-len(own) :], num_prompt, **each)
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
    heard, asked = _heard()
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
        sizes: Any = {"num_layers": _LAYERS.value, "intermediate_size": _NEURONS.value}
        own, start = heads.beginning(kind, pair.target, known, **sizes)
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
    else:
        _train(_PART.value)


if __name__ == "__main__":
    logging.set_verbosity(logging.WARNING)  # absl.app would show what every library does
    flags.mark_flags_as_required(["part", "teacher", "prompts_file", "held_out"])
    app.run(main)
