"""Texts that the benchmarks decode: word problems, and beginnings of the Python library's files."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from fly_jax.decoding.pair import Pair
from fly_jax.evaluation.problems import Problem

# What the pair was trained on is its recipe's.
sys.path.append(str(Path(__file__).parents[1] / "recipes" / "embedded_pair"))
from library_text import documents
from pair_rows import token_rows as token_rows
from word_problems import PROMPT_PREFIX as PROMPT_PREFIX
from word_problems import SUBJECTS as SUBJECTS
from word_problems import Split, problems

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
