"""Texts that the benchmarks decode: word problems, and beginnings of the Python library's files.

    python benchmarks/texts.py --folder sets

writes them for the commands `bench` and `evaluate`: problems.jsonl and library.jsonl, of which no
model of the embedded pair was trained on any, in a folder for each split.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import machine
from absl import flags

from fly_jax.decoding.pair import Pair, load_pair
from fly_jax.evaluation.problems import Problem
from fly_jax.launch.inputs import read_prompts

# What the pair was trained on is its recipe's.
sys.path.append(str(Path(__file__).parents[1] / "recipes" / "embedded_pair"))
from library_text import documents
from word_problems import Split, problems

FLAGS = flags.FLAGS
# Answers of the embedded pair end well before this.
MAX_NEW_TOKENS = 160
PROMPT_TOKENS = 40

_SEEDS: dict[Split, int] = {"development": 3, "held_out": 4}


def word_problems(split: Split, number: int) -> list[Problem]:
    """The first problems of a split."""
    return list(itertools.islice(problems(_SEEDS[split], split), number))


def library_beginnings(pair: Pair, split: Split, number: int) -> list[list[int]]:
    """Token ids of the beginnings of `number` chunks, spread evenly over the split."""
    encoded = (pair.tokenizer.encode(text) for text in documents(split))
    prompts = [ids[:PROMPT_TOKENS] for ids in encoded if len(ids) >= 2 * PROMPT_TOKENS]
    stride = max(1, len(prompts) // number)
    return prompts[::stride][:number]


def conversations(pair: Pair, file: str) -> list[list[int]]:
    """Token ids of a file's prompts, each as what a user says to the target."""
    chat, prompts = pair.tokenizer.apply_chat_template, read_prompts(file, skip_bad=False)
    return [chat([{"role": "user", "content": prompt.text}]) for prompt in prompts]


def main() -> None:
    pair = load_pair()
    splits: tuple[tuple[Split, int, int], ...] = (("development", 60, 20), ("held_out", 1000, 60))
    for split, num_problems, num_documents in splits:
        folder = Path(FLAGS.folder) / split
        folder.mkdir(parents=True, exist_ok=True)
        asked = {
            "problems": [vars(one) for one in word_problems(split, num_problems)],
            "library": [
                {"prompt": pair.tokenizer.decode(ids[1:])}
                for ids in library_beginnings(pair, split, num_documents)
            ],
        }
        for name, records in asked.items():
            lines = "".join(json.dumps(one) + "\n" for one in records)
            (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    flags.DEFINE_string("folder", "sets", "where the files go")
    machine.run(main)
