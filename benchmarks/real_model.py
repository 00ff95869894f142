"""A real model on real prompts: mean accepted tokens and speed, by rule, draft and category.

    python benchmarks/real_model.py --target SmolLM2-135M-Instruct.Q4_1.gguf \\
        --prompts question.jsonl --progress runs/real_model.json \\
        --hugging_face_python PYTHON --drafter runs/head/pard

The prompts are those of Spec-Bench (hemingkx/Spec-Bench, `data/spec_bench/question.jsonl`), put as
a user's first message; everything is in float32. With --hugging_face_python, an interpreter that
has PyTorch and transformers, the same model also decodes there: greedily, with its prompt lookup,
and assisted by the draft of self:int4. --drafter adds a head or a drafter.

All ways take turns, several times, so that a machine that slows down slows all of them; one way on
all prompts in one turn is a job. What is done is kept in --progress, and a run that was interrupted
goes on with the next job when it is started again. Of a draft's exact decodings, only the one
that is fastest for one prompt decodes larger batches.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags
from hugging_face import GREEDY, ONE_ROW_ONLY, WAYS, HuggingFace
from machine import run, write
from tables import TARGET_ALONE
from tqdm import tqdm

from fly_jax.decoding.pair import load_pair, open_pair
from fly_jax.engine.engine import Engine
from fly_jax.models.cache import empty_cache
from fly_jax.models.checkpoints.source import identity
from fly_jax.models.checkpoints.write import save_hf
from fly_jax.models.llama import Llama
from fly_jax.sharding.mesh import enable_compilation_cache

_TARGET = flags.DEFINE_string("target", None, "an instruct model: folder or GGUF file")
_PROMPTS = flags.DEFINE_string("prompts", None, "Spec-Bench's question.jsonl")
_PROGRESS = flags.DEFINE_string("progress", None, "file for what is done")
_DRAFTER = flags.DEFINE_string("drafter", None, "folder of a drafter made for the target")
_PYTHON = flags.DEFINE_string(
    "hugging_face_python", None, "interpreter with PyTorch and transformers"
)
_EACH = flags.DEFINE_integer("each", 4, "prompts of each category", lower_bound=1)
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 64, "of an answer", lower_bound=1)
_TURNS = flags.DEFINE_integer("turns", 3, "measurements of each", lower_bound=1)
_BATCHES = flags.DEFINE_multi_integer("batch", [1, 4], "prompts decoded together", lower_bound=1)
_NAME = "real_model"
# 80 of the 480 are MT-bench's, in its own eight categories.
_CATEGORIES = {"translation", "summarization", "qa", "math_reasoning", "rag"}
DRAFTER = "drafter"  # one that was trained for the target, which --drafter names
_DRAFTS = {"lookup": "ngram", "self:int4": "self:int4", DRAFTER: DRAFTER}
_RULES: Mapping[str, dict[str, Any]] = {
    "exact": {"rule": "exact"},
    "fly": {"rule": "fly"},
    "fly | margin 0.3": {"rule": "fly | margin", "margin_gap": 0.3},
}
_TIE = 1e-3  # between the two best logits, where float32 may round either way

_LOOSENED = ("fly", "fly | margin 0.3")
_DECODINGS = (
    TARGET_ALONE,
    "lookup, exact, K = 2",
    *(f"lookup, {rule}, K = 10" for rule in _LOOSENED),
    "self:int4, exact, K = 1",
    "drafter, exact, K = 2",
    *(f"drafter, {rule}, K = 10" for rule in _LOOSENED),
)


@dataclasses.dataclass
class Job:
    """One way on all prompts in one turn: by prompt, or by group of prompts decoded together.

    Attributes:
      tokens: of each prompt's answer.
      seconds: of each group, without what the prompts took.
      uncounted: of an answer's first tokens, which the prompt's pass gives and `seconds` lacks: one
        from Hugging Face; none of ours, whose first round gives the first token.
      rounds: of each prompt; none from Hugging Face.
      rescued: of each prompt; none from Hugging Face.
    """

    tokens: list[list[int]] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)
    uncounted: int = 0
    rounds: list[int] = dataclasses.field(default_factory=list)
    rescued: list[int] = dataclasses.field(default_factory=list)

    def tokens_per_second(self, batch: int, indices: Sequence[int] | None = None) -> float:
        """Of all prompts together, or of some: whole groups of `batch` each."""
        indices = range(len(self.tokens)) if indices is None else indices
        count = sum(len(self.tokens[index]) - self.uncounted for index in indices)
        return count / sum(self.seconds[group] for group in {index // batch for index in indices})


# Decodes a group of prompts into a job.
Way = Callable[[Job, Sequence[Sequence[int]]], None]


class Ways:
    """All that can decode, one at a time: each is made when it is asked for.

    Nothing is kept but the models. Linux lets a process map some 65,000 pieces of memory, and the
    compiled programs of all ways together are more; the next turn reads them from JAX's cache.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], folder: Path) -> None:
        """Makes nothing yet.

        Args:
          prompts: all that will be decoded.
          folder: where Hugging Face's copies of the models may lie for the time being.
        """
        self._prompts, self._folder = prompts, folder
        self.pair = functools.cache(lambda draft: load_pair(_TARGET.value, draft, dtype="float32"))
        self._hugging_face: HuggingFace | None = None

    def decoded(self, batch: int, name: str) -> Job:
        """All prompts, `batch` at a time, with everything compiled before."""
        jax.clear_caches()
        way = (self._of_hugging_face if name in WAYS else self._of_ours)(batch, name)
        job = Job()
        starts = range(0, len(self._prompts), batch)
        for start in tqdm(starts, desc=f"{name}, batch {batch}", leave=False):
            way(job, self._prompts[start : start + batch])
        return job

    def _of_ours(self, batch: int, name: str) -> Way:
        draft, values = decoding(name)
        limit = _MAX_NEW_TOKENS.value
        engine = Engine.of(
            self.pair(_DRAFTER.value if draft == DRAFTER else draft), prompts=self._prompts,
            max_new_tokens=limit, num_slots=batch, with_texts=False, **values,
        )  # fmt: skip
        engine.warm_up_for(engine.requests(self._prompts, limit))

        def way(job: Job, group: Sequence[Sequence[int]]) -> None:
            begin, prefilled = time.perf_counter(), engine.prefill_seconds
            rows = engine.generate(group, limit)
            taken = time.perf_counter() - begin - (engine.prefill_seconds - prefilled)
            job.seconds.append(taken)
            job.tokens += [row.token_ids for row in rows]
            job.rounds += [row.num_rounds for row in rows]
            job.rescued += [row.num_rescued_tokens for row in rows]

        return way

    def _of_hugging_face(self, batch: int, name: str) -> Way:
        process = self._hugging_face = self._hugging_face or self._started()

        def way(job: Job, group: Sequence[Sequence[int]]) -> None:
            rows, seconds = process.decode(name, group, _MAX_NEW_TOKENS.value)
            job.tokens += rows
            job.seconds.append(seconds)
            job.uncounted = 1

        return way

    def _started(self) -> HuggingFace:
        pair = self.pair("self:int4")
        models = {"target": pair.target, "assistant": pair.draft}
        for name, model in models.items():
            save_hf(model, self._folder / name, jnp.float32)
        return HuggingFace(_PYTHON.value, *(str(self._folder / name) for name in models))


def decoding(name: str) -> tuple[str | None, dict[str, Any]]:
    """What drafts, and how is decoded, by a name such as "self:int4, fly, K = 15"."""
    if name == TARGET_ALONE:
        return None, {"rule": TARGET_ALONE}
    draft, rule, depth = name.split(", ")
    return _DRAFTS[draft], {**_RULES[rule], "num_speculative_tokens": int(depth[len("K = ") :])}


def is_exact(name: str) -> bool:
    """Whether a name's rule is exact decoding."""
    return ", exact, " in name


def questions(path: Path, each: int) -> list[tuple[str, str]]:
    """The first of each category, with its name, one category after the other; MT-bench is one."""
    found: dict[str, list[tuple[str, str]]] = collections.defaultdict(list)
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        name = record["category"] if record["category"] in _CATEGORIES else "mt_bench"
        found[name].append((name, record["turns"][0]))
    return [one for name in sorted(found) for one in found[name][:each]]


def _summary(
    turns: Sequence[Job], batch: int, names: Sequence[str], reference: Sequence[list[int]]
) -> dict[str, Any]:
    """Speed and mean accepted tokens, in all and by category; how far the text is the reference's.

    Args:
      turns: of one way.
      batch: prompts in a group.
      names: the prompts' categories, in an order in which no group has two.
      reference: each prompt's answer that others are compared with.
    """
    job = turns[0]

    def of(indices: Sequence[int]) -> dict[str, float]:
        count = sum(len(job.tokens[index]) for index in indices)
        speeds = [one.tokens_per_second(batch, indices) for one in turns]
        figures = {"tokens_per_second": statistics.median(speeds)}
        if job.rounds:
            rescued = sum(job.rescued[index] for index in indices)
            figures["mean_accepted_tokens"] = count / sum(job.rounds[index] for index in indices)
            figures["rescued_per_100_tokens"] = 100 * rescued / count
        return figures

    pairs = list(zip(job.tokens, reference, strict=True))
    return {
        **of(range(len(names))),
        "turns": len(turns),
        "same_answers": sum(one == other for one, other in pairs),
        "median_same_tokens": statistics.median(_same(*pair) for pair in pairs),
        "same_in_all_turns": all(one.tokens == job.tokens for one in turns),
        "by_category": {
            name: of([index for index, one in enumerate(names) if one == name])
            for name in sorted(set(names))
        },
    }


def _same(one: list[int], other: list[int]) -> int:
    """How many tokens at the beginning are the same."""
    both = zip(one, other, strict=False)
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], both)))


def _gaps(
    target: Llama, prompts: Sequence[Sequence[int]], answers: Sequence[list[int]],
    reference: Sequence[list[int]],
) -> list[float]:  # fmt: skip
    """For each answer that is not the reference's: the two best logits' gap where they part."""
    found = []
    for prompt, one, other in zip(prompts, answers, reference, strict=True):
        if one == other:
            continue
        ids = [*prompt, *one[: _same(one, other)]]
        cache = empty_cache(target.config, 1, len(ids), jnp.dtype("float32"))
        hidden, _ = target.extend(jnp.asarray([ids]), cache)
        logits = jnp.sort(target.logits(hidden[:, -1:])[0, 0])
        found.append(float(logits[-1] - logits[-2]))
    return found


def _is_lossless(name: str) -> bool:
    return name in WAYS or name == TARGET_ALONE or is_exact(name)


def _names() -> list[str]:
    """All ways, in the order of a turn."""
    with_drafter = _DRAFTER.value is not None
    names = [name for name in _DECODINGS if with_drafter or not name.startswith(DRAFTER)]
    names[1:1] = WAYS if _PYTHON.value is not None else ()  # in a turn, beside the target alone
    return names


def _key(turn: int, batch: int, name: str) -> str:
    """A job's name among those that are done."""
    return f"turn {turn}, batch {batch}: {name}"


def _for_several(names: Sequence[str], jobs: Mapping[str, Job]) -> list[str]:
    """The ways that decode several rows: of a draft's exact ones, that which is fastest alone."""
    several = [name for name in names if name not in ONE_ROW_ONLY]
    if 1 not in _BATCHES.value:
        return several
    of_draft: dict[str, list[str]] = collections.defaultdict(list)
    for name in filter(is_exact, several):
        of_draft[name.split(", ")[0]].append(name)
    best = {
        max(some, key=lambda name: jobs[_key(0, 1, name)].tokens_per_second(1))
        for some in of_draft.values()
    }
    return [name for name in several if not is_exact(name) or name in best]


def _done(path: Path, setting: Mapping[str, Any]) -> dict[str, Job]:
    """The jobs of an earlier run with the same setting, by their names."""
    if not path.exists():
        return {}
    before = json.loads(path.read_text(encoding="utf-8"))
    if before["setting"] != setting:
        raise SystemExit(
            f"{path} is of another model, drafter or number of prompts; give another --progress, "
            "or remove it."
        )
    return {key: Job(**job) for key, job in before["jobs"].items()}


def main() -> None:
    if _TARGET.value is None or _PROMPTS.value is None or _PROGRESS.value is None:
        raise app.UsageError("--target, --prompts and --progress are needed; see this file's head.")
    if any(_EACH.value % batch for batch in _BATCHES.value):
        raise app.UsageError("--each must be a multiple of every --batch: a batch is of one kind.")
    enable_compilation_cache()
    asked = questions(Path(_PROMPTS.value), _EACH.value)
    opened = open_pair(_TARGET.value)
    prompts = [opened.encode([{"role": "user", "content": text}]) for _, text in asked]
    setting = {
        "target": Path(_TARGET.value).name,
        "target_identity": identity(Path(_TARGET.value)),
        "drafter_identity": None if _DRAFTER.value is None else identity(Path(_DRAFTER.value)),
        "prompts": len(asked),
        "max_new_tokens": _MAX_NEW_TOKENS.value,
    }
    path, names = Path(_PROGRESS.value), _names()
    jobs = _done(path, setting)
    path.parent.mkdir(parents=True, exist_ok=True)
    todo: list[tuple[int, int, str]] = []
    with tempfile.TemporaryDirectory() as folder:
        ways = Ways(prompts, Path(folder))
        for turn, batch in itertools.product(range(_TURNS.value), sorted(_BATCHES.value)):
            some = names if batch == 1 else _for_several(names, jobs)
            for name in tqdm(some, desc=f"turn {turn + 1} of {_TURNS.value}, batch {batch}"):
                key = _key(turn, batch, name)
                todo.append((turn, batch, name))
                if key in jobs:
                    continue
                jobs[key] = ways.decoded(batch, name)
                kept = {key: dataclasses.asdict(job) for key, job in jobs.items()}
                new = path.with_suffix(".new")
                new.write_text(json.dumps({"setting": setting, "jobs": kept}), encoding="utf-8")
                new.replace(path)
        _report(setting, [name for name, _ in asked], prompts, jobs, todo, ways.pair(None).target)


def _report(
    setting: Mapping[str, Any], categories: Sequence[str], prompts: Sequence[Sequence[int]],
    jobs: Mapping[str, Job], todo: Sequence[tuple[int, int, str]], target: Llama,
) -> None:  # fmt: skip
    """Prints and writes what has been measured."""
    by_way: dict[tuple[int, str], list[Job]] = collections.defaultdict(list)
    for turn, batch, name in todo:
        by_way[batch, name].append(jobs[_key(turn, batch, name)])
    wanted = ((1, GREEDY), (1, TARGET_ALONE), next(iter(by_way)))
    first = next(way for way in wanted if way in by_way)
    reference = by_way[first][0].tokens
    summaries: dict[str, dict[str, Any]] = collections.defaultdict(dict)
    for (batch, name), turns in by_way.items():
        one = _summary(turns, batch, categories, reference)
        if _is_lossless(name):
            gaps = _gaps(target, prompts, turns[0].tokens, reference)
            one["gaps_where_answers_part"] = gaps
            one["parted_beyond_rounding"] = sum(gap > _TIE for gap in gaps)
        summaries[f"batch {batch}"][name] = one
        shown = ("tokens_per_second", "mean_accepted_tokens", "same_answers")
        print(f"batch {batch}", name, {key: one[key] for key in shown if key in one})
    write(_NAME, {"setting": setting, "answers_compared_with": first[1], "summaries": summaries})


if __name__ == "__main__":
    run(main)
