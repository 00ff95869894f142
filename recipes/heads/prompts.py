r"""Gathers the prompts that heads learn from, out of five public repositories.

    python recipes/heads/prompts.py --gsm8k grade-school-math --gpteacher GPTeacher \
        --self_instruct self-instruct --natural_questions natural-questions --multi30k dataset \
        --held_out question.jsonl --output prompts.jsonl

The repositories are openai/grade-school-math (MIT), teknium1/GPTeacher (MIT), multi30k/dataset,
google-research-datasets/natural-questions (questions: CC BY-SA 3.0) and yizhongw/self-instruct
(Apache-2.0, with prompts of T0's training data), each a git checkout or a bare clone. Only prompts
are taken: the answers are the teacher's own. A prompt that shares a run of eight words, or all of
its words, with one of Spec-Bench (`question.jsonl`) is left out.
"""

from __future__ import annotations

import gzip
import json
import random
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from absl import app, flags
from tqdm import tqdm

_GSM8K = flags.DEFINE_string("gsm8k", None, "clone of openai/grade-school-math")
_GPTEACHER = flags.DEFINE_string("gpteacher", None, "clone of teknium1/GPTeacher")
_SELF_INSTRUCT = flags.DEFINE_string("self_instruct", None, "clone of yizhongw/self-instruct")
_NATURAL = flags.DEFINE_string("natural_questions", None, "clone of its repository")
_MULTI30K = flags.DEFINE_string("multi30k", None, "clone of multi30k/dataset")
_HELD_OUT = flags.DEFINE_string("held_out", None, "Spec-Bench's question.jsonl")
_OUTPUT = flags.DEFINE_string("output", None, "JSON lines with a prompt each")
_NUM = flags.DEFINE_integer("num_prompts", 30000, "prompts to write", lower_bound=1)

_MOST_CHARACTERS = 5000
_RUN = 8
_SEED = 0
# Parts of the whole, where there are as many. T0's are summaries, and everything else.
_SHARES = {
    "gsm8k": 0.2, "gpteacher": 0.25, "summaries": 0.15, "tasks": 0.25, "questions": 0.1,
    "translations": 0.05,
}  # fmt: skip
_SUMMARIES = "cnn_dailymail", "multi_news", "samsum", "xsum"


def _file(repository: str, name: str) -> str:
    shown = ["git", "-C", repository, "show", f"HEAD:{name}"]
    content = subprocess.run(shown, stdout=subprocess.PIPE, check=True).stdout
    return (gzip.decompress(content) if name.endswith(".gz") else content).decode()


def _names(repository: str, folder: str) -> list[str]:
    listed = ["git", "-C", repository, "ls-tree", "--name-only", "HEAD", folder]
    done = subprocess.run(listed, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.splitlines()


def _instruction(record: dict[str, Any]) -> str:
    return f"{record['instruction']}\n\n{record['input']}".strip()


def _of(kind: str) -> Iterator[str]:
    if kind == "gsm8k":
        for line in _file(_GSM8K.value, "grade_school_math/data/train.jsonl").splitlines():
            yield json.loads(line)["question"]
    elif kind == "gpteacher":
        for name in (
            "Codegen/codegen-instruct.json",
            "Roleplay/roleplay-simple-deduped-roleplay-instruct.json",
        ):
            yield from map(_instruction, json.loads(_file(_GPTEACHER.value, name)))
        for line in _file(_SELF_INSTRUCT.value, "data/seed_tasks.jsonl").splitlines():
            record = json.loads(line)
            yield _instruction(record | {"input": record["instances"][0]["input"]})
    elif kind == "questions":
        for name in ("NQ-open.dev.jsonl", "NQ-open.efficientqa.dev.1.1.no-annotations.jsonl"):
            for line in _file(_NATURAL.value, f"nq_open/{name}").splitlines():
                yield json.loads(line)["question"].capitalize()
    elif kind == "translations":
        for line in _file(_MULTI30K.value, "data/task1/raw/train.de.gz").splitlines():
            yield f"Translate German to English: {line}"
    else:
        folder = "data/finetuning/t0_train_50k/data_per_template/"
        for name in _names(_SELF_INSTRUCT.value, folder):
            if name.removeprefix(folder).startswith(_SUMMARIES) == (kind == "summaries"):
                for line in _file(_SELF_INSTRUCT.value, name).splitlines():
                    yield json.loads(line)["prompt"].strip()


def _runs(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[start : start + _RUN]) for start in range(max(len(words) - _RUN, 0) + 1)}


def main(_: list[str]) -> None:
    """Writes the prompts, shuffled."""
    held_out: set[tuple[str, ...]] = set()
    for line in Path(_HELD_OUT.value).read_text(encoding="utf-8").splitlines():
        for turn in json.loads(line)["turns"]:
            held_out |= _runs(turn)
    rng = random.Random(_SEED)
    chosen: list[str] = []
    for kind, share in tqdm(_SHARES.items()):
        texts = sorted({text for text in _of(kind) if 0 < len(text) <= _MOST_CHARACTERS})
        kept = [text for text in texts if not _runs(text) & held_out]
        some = rng.sample(kept, min(len(kept), round(share * _NUM.value)))
        print(f"{kind}: {len(texts)} prompts, {len(texts) - len(kept)} held out, {len(some)} taken")
        chosen += some
    rng.shuffle(chosen)
    lines = (json.dumps({"prompt": text}, ensure_ascii=False) for text in chosen)
    Path(_OUTPUT.value).write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    flags.mark_flags_as_required(
        [
            "gsm8k",
            "gpteacher",
            "self_instruct",
            "natural_questions",
            "multi30k",
            "held_out",
            "output",
        ]
    )
    app.run(main)
