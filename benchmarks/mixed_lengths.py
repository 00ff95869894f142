"""What one long prompt in a file costs the short ones: their speed beside it and without it.

    python benchmarks/mixed_lengths.py

The shapes are the embedded pair's, whose context is raised for the long prompt: a speed does not
depend on what the text is worth. Both files are decoded in turns, with programs compiled before.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from absl import app, flags
from machine import write
from texts import library_beginnings, word_problems

from fly_jax.decoding.decoder import Decoder
from fly_jax.decoding.pair import Pair, load_pair
from fly_jax.models.llama import Llama
from fly_jax.training.library_text import documents

_TURNS = flags.DEFINE_integer("turns", 9, "measurements of each file", lower_bound=1)
_ROWS = flags.DEFINE_integer("batch_size", 8, "prompts decoded together", lower_bound=1)
_LONG = 4000
_CONTEXT = 8192
_MAX_NEW_TOKENS = 64


def _with_context(model: Llama) -> Llama:
    config = dataclasses.replace(model.config, max_context=_CONTEXT)
    return Llama(config, model.parameters(), model.layout)


def _long_prompt(pair: Pair) -> list[int]:
    text = "".join(documents("held_out"))
    return pair.tokenizer.encode(text[: 8 * _LONG])[:_LONG]


def _tokens_per_second(decoder: Decoder, prompts: Sequence[Sequence[int]], rows: int) -> float:
    """Of the short prompts, batch by batch."""
    decoded = decoder.generate(prompts, _MAX_NEW_TOKENS)
    short = [one for one in decoded if len(one.prompt_token_ids) < _LONG]
    batches = [short[at : at + rows] for at in range(0, len(short), rows)]
    seconds = sum(max(one.seconds for one in batch) for batch in batches)
    return sum(len(one.token_ids) for one in short) / seconds


def main(_: list[str]) -> None:
    pair, rows = load_pair(), _ROWS.value
    problems = [pair.tokenizer.encode(one.prompt) for one in word_problems("held_out", 3 * rows)]
    short = [*problems, *library_beginnings(pair, "held_out", rows)]
    pair = dataclasses.replace(
        pair,
        target=_with_context(pair.target),
        drafts=tuple(_with_context(one) for one in pair.drafts),
    )
    decoder = pair.decoder(pair.spec(), batch_size=rows)
    files = {"alone": short, "beside one long prompt": [short[0], _long_prompt(pair), *short[1:]]}
    for prompts in files.values():
        decoder.warm_up(prompts, _MAX_NEW_TOKENS)
    turns = [
        {name: _tokens_per_second(decoder, prompts, rows) for name, prompts in files.items()}
        for _ in range(_TURNS.value)
    ]
    ratios = [turn["beside one long prompt"] / turn["alone"] for turn in turns]
    ratio = statistics.median(ratios)
    print(
        f"Short prompts keep {ratio:.1%} of their speed ({min(ratios):.1%} to {max(ratios):.1%})."
    )
    print(
        write(
            "mixed_lengths",
            {
                "short_prompts": len(short),
                "long_prompt_tokens": _LONG,
                "max_new_tokens": _MAX_NEW_TOKENS,
                "batch_size": rows,
                "median_ratio": ratio,
                "turns": turns,
            },
        )
    )


if __name__ == "__main__":
    app.run(main)
