"""How good the embedded pair is: answers, copying, and how often draft and target agree.

    python benchmarks/pair_quality.py

Writes results/pair_quality.json, which docs/model_card.md quotes. Takes two minutes on two cores.
`--target` and `--draft` measure other folders, such as snapshots of a training run.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import machine
import numpy as np
from absl import flags
from texts import (
    MAX_NEW_TOKENS,
    PROMPT_PREFIX,
    SUBJECTS,
    library_beginnings,
    token_rows,
    word_problems,
)  # fmt: skip

from fly_jax import generate, load_pair
from fly_jax.decoding.pair import Pair
from fly_jax.engine.request import Generation
from fly_jax.evaluation.problems import Problem, is_correct
from fly_jax.models.checkpoints.source import EMBEDDED_PAIR
from fly_jax.models.llama import Llama

FLAGS = flags.FLAGS
flags.DEFINE_string("target", None, "folder of a target; the embedded one if not given")
flags.DEFINE_string("draft", None, "folder of a draft; the embedded one if not given")
flags.DEFINE_integer("num_problems", 600, "held-out problems")
flags.DEFINE_integer("num_documents", 100, "held-out chunks of library text")

BATCH = 16


def _greedy(pair: Pair, model: Llama, prompts: list[list[int]]) -> list[Generation]:
    alone = Pair(model, (), pair.tokenizer)
    return generate(
        alone, prompts, rule="autoregressive", max_new_tokens=MAX_NEW_TOKENS, batch_size=BATCH
    )


def _agreement(draft: Llama, accounts: list[Generation]) -> float:
    """Share of the target's tokens that the draft would have chosen in their place."""
    length = max(len(one.prompt_token_ids) + len(one.token_ids) for one in accounts)
    parameters = draft.parameters()

    @jax.jit
    def choices(parameters: dict[str, Any], tokens: jax.Array) -> jax.Array:
        model = Llama(draft.config, parameters)
        visible = jnp.tril(jnp.ones((1, length, length), bool))
        hidden = model.hidden_uncached(tokens, jnp.arange(length)[None], visible)
        return jnp.argmax(model.logits(hidden), axis=-1)

    same = total = 0
    for one in accounts:
        start, end = len(one.prompt_token_ids), len(one.prompt_token_ids) + len(one.token_ids)
        tokens = np.zeros((1, length), np.int32)
        tokens[0, :end] = [*one.prompt_token_ids, *one.token_ids]
        chosen = np.asarray(choices(parameters, tokens))[0]
        same += int((chosen[start - 1 : end - 1] == tokens[0, start:end]).sum())
        total += end - start
    return same / total


def _problem_share(pair: Pair, num_rows: int = 200) -> float:
    """Share of the word problems among the tokens that the target was trained on."""
    rows = itertools.islice(token_rows(EMBEDDED_PAIR[0] / "tokenizer.model", seed=0), num_rows)
    of_problems = total = 0
    for row in rows:
        for segment in range(1, row.segments.max() + 1):
            tokens = row.tokens[row.segments == segment]
            if pair.tokenizer.decode(tokens[1:5].tolist()).startswith(PROMPT_PREFIX.strip()):
                of_problems += len(tokens)
            total += len(tokens)
    return of_problems / total


def _copies(problem: Problem, text: str) -> tuple[int, int]:
    """Names and things in a solution, and how many of them the prompt has."""
    words = [word for word in re.findall(r"[A-Za-z]+", text) if word in SUBJECTS]
    known = set(re.findall(r"[A-Za-z]+", problem.prompt))
    # A singular of the prompt may become a plural, and the other way round.
    known |= {word + "s" for word in known} | {word + "es" for word in known}
    known |= {word[:-1] for word in known if word.endswith("s")}
    return sum(word in known for word in words), len(words)


def _measure(
    pair: Pair, model: Llama, worded: list[Problem]
) -> tuple[dict[str, float], list[Generation]]:
    accounts = _greedy(pair, model, [pair.tokenizer.encode(one.prompt) for one in worded])
    texts = [pair.tokenizer.decode(one.token_ids) for one in accounts]
    verdicts = [is_correct(one, text) for one, text in zip(worded, texts, strict=True)]
    copies = np.sum([_copies(one, text) for one, text in zip(worded, texts, strict=True)], axis=0)
    return {
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(model.parameters())),
        "solved": float(np.mean(verdicts)),
        "copied_right": float(copies[0] / copies[1]),
        "mean_solution_tokens": float(np.mean([len(one.token_ids) for one in accounts])),
    }, accounts


def main() -> None:
    pair = load_pair(FLAGS.target, FLAGS.draft, dtype="float32")
    assert pair.draft is not None
    worded = word_problems("held_out", FLAGS.num_problems)
    of_target, accounts = _measure(pair, pair.target, worded)
    of_draft, _ = _measure(pair, pair.draft, worded)
    beginnings = library_beginnings(pair, "held_out", FLAGS.num_documents)
    on_library = _greedy(pair, pair.target, beginnings)
    agreement = {
        "problems": _agreement(pair.draft, accounts),
        "library": _agreement(pair.draft, on_library),
    }
    share = _problem_share(pair)
    result = {
        "command": "python benchmarks/pair_quality.py",
        "num_problems": len(worded),
        "target": of_target,
        "draft": of_draft,
        "greedy_agreement": agreement
        | {
            "problem_share_of_the_training_mixture": share,
            "mixture": share * agreement["problems"] + (1 - share) * agreement["library"],
        },
    }
    print(result)
    if pair.is_embedded:
        print(machine.write("pair_quality", result))


if __name__ == "__main__":
    machine.run(main)
