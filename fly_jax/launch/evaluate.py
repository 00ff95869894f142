"""The command evaluate: the quality of several decodings on the same items of tasks."""

from __future__ import annotations

import collections
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fly_jax.errors import FlyJaxError
from fly_jax.evaluation.judge import judge
from fly_jax.evaluation.tasks import DRAFT, TASKS, Item, read_items
from fly_jax.launch.bench import decodings, unusual
from fly_jax.launch.flags import DecodingFlags, Flags, ModelFlags, SeedFlags, flag_group
from fly_jax.launch.inputs import load_opened, open_models, say
from fly_jax.parameters import parameter

if TYPE_CHECKING:
    from fly_jax.decoding.pair import OpenPair
    from fly_jax.engine.request import Request

_HELP = """\
python -m fly_jax.launch evaluate --output DIR [flags]

Answers the same items of tasks with several decodings, and says what each keeps of the first one's
score. Every answer is written to DIR/answers.jsonl when it is there, and the same command goes on
where it was stopped; DIR/results.json has the figures.

Examples:
  python -m fly_jax.launch evaluate --output runs/problems
  python -m fly_jax.launch evaluate --target target.gguf --draft draft.gguf --output runs/code \\
    --tasks humaneval,mbpp --data sets --allow_code_execution \\
    --decode autoregressive --decode exact:4 --decode fly:15
"""


@flag_group("Evaluation")
class _EvaluateFlags(ModelFlags, DecodingFlags, SeedFlags):
    tasks: str = parameter("problems", f"of {', '.join(TASKS)}, with commas")
    data: str | None = parameter(None, "folder with the files of the sets")
    decode: tuple[str, ...] = parameter(
        (),
        "as for bench, or draft for the draft model alone; others are held to the first rule; if "
        "not given, one token at a time, exact (or sampled), and the chosen rule",
    )
    limit: int | None = parameter(None, "the first items of each task", kind=int, low=1)
    output: str | None = parameter(None, "folder for the answers and the figures")
    margin: float = parameter(1.0, "points of the score that may be lost", above=0, below=100)
    allow_code_execution: bool = parameter(
        False, "run the code that models answer with, in a process with limits (Linux only)"
    )
    max_new_tokens: int | None = parameter(
        None, "most tokens of an answer; what suits the task if not given", kind=int, low=1
    )
    batch_size: int = parameter(1, "items decoded together", low=1)
    json: bool = parameter(False, "the figures as one JSON object on standard output")


def main(arguments: Sequence[str]) -> None:
    """Runs the command."""
    given = Flags("evaluate", _EvaluateFlags, without=("memory", "csd_min_count"))
    values = given.parse(arguments, _HELP)
    items = _items(values)
    config = values.to_config(values)
    proposes, lossless = values.proposes(config), "exact"
    if config.sampling.temperature > 0 and not values.decode:
        config, lossless = config.replace(temperature=config.sampling.temperature), "sampled"
    rules = ("autoregressive", lossless, config.rule) if proposes else ("autoregressive",)
    decode = values.decode or rules
    others = [one for one in decode if one != DRAFT]
    configs = decodings(others, config, values) if others else {}
    if DRAFT in decode:
        alone = config.replace(rule="autoregressive").without_draft()  # at that rule's temperature
        configs[DRAFT] = alone.replace(truncate=None)  # which is the target's
    longest = max(configs.values(), key=lambda one: one.drafting.max_speculative_tokens)
    models, mesh = open_models(values, longest)
    for one in configs.values():
        models.check_drafting(one)
    if DRAFT in configs and not models.draft_decodes_alone:
        raise FlyJaxError(
            "evaluate was asked for the decoding draft, and the draft is no model that decodes by "
            "itself; give --draft such a model, or leave --decode draft out."
        )
    requests = _requests(values, items, models)

    from fly_jax.evaluation.answers import Answers, answer_items, figures, item_digest, table
    from fly_jax.evaluation.machine import describe
    from fly_jax.models.checkpoints.source import identity

    folder = Path(values.output or "")
    folder.mkdir(parents=True, exist_ok=True)
    named = models.drafter or models.self_draft
    setting: dict[str, Any] = {  # of all answers: an answer's own has its prompt, rule and K
        "target": identity(models.target.path),
        "draft": named or [identity(one.path) for one in models.drafts],
        "dtype": values.dtype or models.default_dtype(mesh.size),
        "decoding": unusual(config), "draft_parallel": values.draft_parallel,
        "max_new_tokens": values.max_new_tokens, "batch_size": values.batch_size,
        "seed": values.seed, "devices": f"{mesh.size} {mesh.devices.flat[0].platform}",
    }  # fmt: skip
    answers = Answers(folder / "answers.jsonl", setting)
    if answers.dropped:
        say(f"The last line of {answers.path} was only half there, and is made again.")
    asked = zip(items, requests, strict=True)
    answers.check_items({(one.task, one.name): item_digest(one, r.prompt) for one, r in asked})
    if any((one.task, one.name, name) not in answers.records for one in items for name in configs):
        length = max(len(one.prompt) + one.max_new_tokens for one in requests)
        rows = min(values.batch_size, len(items))
        pair = load_opened(values, longest, models, mesh, rows=rows, longest=length)
        try:
            answer_items(pair, configs, items, requests, answers, batch_size=rows)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"{len(answers.records)} answers are in {answers.path}; the same command goes on."
            ) from None
    found = figures(answers, items, configs, values.margin)
    runs_code = any(TASKS[one.task].runs_code for one in items)
    result = {
        "machine": describe(), "target": values.target or "embedded", "draft": list(values.draft),
        "dtype": setting["dtype"], "setting": setting, "margin": values.margin,
        "code_was_kept_in_by": judge("").isolation if runs_code else None, "tasks": found,
    }  # fmt: skip
    (folder / "results.json").write_text(json.dumps(result) + "\n", encoding="utf-8")
    print(table(found), file=sys.stderr if values.json else sys.stdout, flush=True)
    if values.json:
        print(json.dumps(result), flush=True)


def _items(values: _EvaluateFlags) -> list[Item]:
    names = list(dict.fromkeys(one.strip() for one in values.tasks.split(",")))
    for name in names:
        if name not in TASKS:
            raise FlyJaxError(f"There is no task '{name}'; the tasks are {', '.join(TASKS)}.")
    if values.output is None:
        raise FlyJaxError("evaluate needs a folder for its answers; give --output DIR.")
    code = [name for name in names if TASKS[name].runs_code]
    if code and not (values.allow_code_execution and sys.platform == "linux"):
        raise FlyJaxError(
            f"The task {code[0]} runs code that the model has written; give --allow_code_execution "
            "on a Linux machine where that may be, or leave the task out."
        )
    if code and not judge("pass").passed:
        raise FlyJaxError(
            "The process that runs a model's code does not start here (not even the program "
            f"'pass' ends well); see that {sys.executable} runs with an empty environment."
        )
    folder = None if values.data is None else Path(values.data)
    if folder is not None and not folder.is_dir():
        raise FlyJaxError(f"--data is {folder}, which is no folder; correct the path.")
    return [one for name in names for one in read_items(name, folder, values.limit)]


def _requests(values: _EvaluateFlags, items: Sequence[Item], models: OpenPair) -> list[Request]:
    """A request for each item: a user's message where the target has a chat template."""
    from fly_jax.engine.request import Request

    chats = models.target.tokenizer.chat_template is not None
    found = []
    numbers = collections.Counter[str]()  # within its task, whatever is asked beside it
    for item in items:
        task, name = TASKS[item.task], f"{item.task} {item.name}"
        message = [{"role": "user", "content": task.ask(item.record)}]
        prompt = models.encode(message if chats else task.begin(item.record), name=name)
        limit, stop = values.max_new_tokens or task.max_new_tokens, () if chats else task.stops
        found.append(Request(prompt, limit, seed=values.seed + numbers[item.task], stop=stop))
        numbers[item.task] += 1
    return found
