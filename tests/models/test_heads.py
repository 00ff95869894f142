"""What a head reads of its target, and the files that heads are published in."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import random_pairs as pairs
from golden import altered
from refusals import assert_refused
from tiny_pair import VOCAB_SIZE, write_pair

from fly_jax import Lookup, generate, load_pair
from fly_jax.decoding.config import RoundStatic
from fly_jax.decoding.pair import check_chain
from fly_jax.models.architectures import config_of
from fly_jax.models.checkpoints.load import load_llama, open_checkpoint
from fly_jax.models.checkpoints.write import convert

FIXTURES = Path(__file__).parents[1] / "fixtures"
OFFICIAL = FIXTURES / "eagle3" / "official"


CONFIG = {
    "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 96,
    "num_attention_heads": 4, "num_key_value_heads": 2, "draft_vocab_size": 64,
}  # fmt: skip
NESTED = {
    "speculators_model_type": "eagle3", "speculators_version": "0.9.0", "draft_vocab_size": 64,
    "transformer_layer_config": CONFIG,
}  # fmt: skip
DSPARK = CONFIG | {
    "architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "num_hidden_layers": 2,
    "block_size": 7, "mask_token_id": 95, "target_layer_ids": [1, 5], "num_target_layers": 9,
    "draft_vocab_size": None, "markov_rank": 8,
}  # fmt: skip
DFLASH = DSPARK | {
    "architectures": ["DFlashDraftModel"], "target_layer_ids": None, "mask_token_id": None,
    "dflash_config": {"mask_token_id": 95, "target_layer_ids": [1, 5]},
}  # fmt: skip
BLOCK = NESTED | {"speculators_model_type": "dspark", "block_size": 7, "mask_token_id": 95}
NAMED = CONFIG | {"architectures": ["LlamaForCausalLMEagle3"]}


EAGLES = {"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        (NAMED, (2, 16, 29)),
        (NAMED | {"eagle_config": EAGLES}, (2, 16, 29)),
        (NESTED, (2, 16, 29)),
        (NESTED | EAGLES, (1, 15, 28)),
        (DSPARK | {"target_layer_ids": [-1, 5]}, (0, 6)),
        (DFLASH, (2, 6)),
        (BLOCK, (2, 16, 29)),
        (BLOCK | {"aux_hidden_state_layer_ids": [1, 5]}, (1, 5)),
    ],
)
def test_each_format_names_its_layers(fields: dict[str, Any], layers: tuple[int, ...]) -> None:
    assert config_of(fields).head.layers_of(32) == layers


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (NESTED | {"speculators_version": "1.0"}, "version 1.0"),
        (NESTED | {"speculators_model_type": "mtp"}, '"mtp"'),
        (NESTED | {"speculators_model_type": "dflash"}, "block_size=null"),
        (DSPARK | {"block_size": None}, "block_size=null"),
        (DFLASH | {"block_size": 1}, "at least 2 tokens"),
        (DSPARK | {"mask_token_id": None}, "mask_token_id=null"),
        (DSPARK | {"mask_token_id": 96}, "vocabulary of 96"),
        (DSPARK | {"target_layer_ids": None}, "target_layer_ids=null"),
        (DSPARK | {"markov_head_type": "rnn"}, "markov_head_type"),
        (DFLASH | {"dflash_config": {"projector_type": "domino"}}, "projector_type"),
        (DFLASH | {"dflash_config": {"causal": True}}, "causal=true"),
        (NESTED | {"fc_norm": True, "norm_before_fc": True}, "norm_before_fc"),
        (NAMED | {"num_hidden_layers": 4}, "num_hidden_layers=4"),
        (NAMED | {"layer_types": ["sliding_attention"], "sliding_window": 64}, "sliding_window=64"),
        (NAMED | {"eagle_config": {"use_aux_hidden_state": False}}, "eagle_config"),
    ],
)
def test_heads_that_are_not_run_are_refused(fields: dict[str, Any], words: str) -> None:
    assert_refused(words, config_of, fields)


OF = dataclasses.replace(pairs.CONFIG, vocab_size=96, embed_size=32, num_layers=9)


@pytest.mark.parametrize(
    ("head", "target", "words"),
    [
        *((one, {"embed_size": 64}, "width 32") for one in (NAMED, DFLASH)),
        *((one, {"vocab_size": 97}, "vocabulary of 96") for one in (NAMED, DFLASH)),
        (NAMED, {"num_layers": 2}, "layers 2, 1, -1"),
        (DFLASH, {"num_layers": 10}, "9 layers"),
        (DFLASH, {"num_layers": 6}, "layers 2, 6"),
    ],
)
def test_a_head_is_of_one_target(head: dict[str, Any], target: dict[str, int], words: str) -> None:
    assert_refused(words, check_chain, dataclasses.replace(OF, **target), [config_of(head)])


def test_a_head_is_of_the_model_above_it_and_the_last_draft() -> None:
    target, draft, head = dataclasses.replace(OF, embed_size=64), OF, config_of(NAMED)
    check_chain(target, [draft, head])
    looked_up = RoundStatic(3, Lookup())
    assert_refused("the draft model above it has a width of 64", check_chain, draft, [target, head])
    assert_refused("the target has a width of 64", check_chain, target, [head])
    assert_refused("last --draft", check_chain, draft, [head, draft])
    assert_refused("prompt_lookup_max", check_chain, draft, [head], looked_up)
    fewer = dataclasses.replace(draft, draft_vocab_size=40)
    assert_refused("which has not all tokens", check_chain, target, [fewer, head])


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"d2t": -np.arange(64)}, "a token twice"),
        ({"d2t": np.full(64, 40, np.int64)}, "beyond the vocabulary"),
        ({"d2t": np.zeros(60, np.int64)}, r"shape \[60\]"),
        ({"midlayer.self_attn.q_proj.bias": np.ones(32, np.float32)}, "q_proj.bias"),
        ({"norm.weight": None}, "lacks the tensor norm.weight"),
    ],
)
def test_wrong_tensors_are_refused(changed: dict[str, Any], words: str, tmp_path: Path) -> None:
    assert_refused(words, load_llama, altered(OFFICIAL, tmp_path, {}, changed))


def test_a_head_is_neither_a_target_nor_converted(tmp_path: Path) -> None:
    assert_refused("give it as --draft", open_checkpoint, OFFICIAL)
    assert_refused("not converted", convert, OFFICIAL, tmp_path)


EAGLE = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 0, 0]}}
DFLASH_OF_TWO = {"dflash_config": {"mask_token_id": 94, "target_layer_ids": [-1, 0, 0]}}


@pytest.mark.parametrize(
    ("name", "fields", "dtype", "num_above"),
    [
        ("eagle3/official", EAGLE, "float32", 0),
        ("eagle3/official", EAGLE, "float32", 1),
        ("block/dflash", DFLASH_OF_TWO, "int8", 0),
    ],
)
def test_a_head_is_recognised_by_itself(
    name: str, fields: dict[str, Any], dtype: Any, num_above: int, tmp_path: Path
) -> None:
    """And has the target's tables, as far as it lacks them, and its tokenizer."""
    target, _ = write_pair(tmp_path)
    fields = {"vocab_size": VOCAB_SIZE, "num_target_layers": 2} | fields
    head = altered(FIXTURES / name, tmp_path / "head", fields, {"t2d": None})
    pair = load_pair(target, [*[target] * num_above, head], dtype=dtype)
    (found,) = generate(pair, ["Ada has 3"], rule="exact", num_speculative_tokens=4)
    (plain,) = generate(pair, ["Ada has 3"], rule="autoregressive")
    assert found.token_ids == plain.token_ids
    drafted, passes = found.num_draft_passes / found.num_rounds, 4 if fields.keys() & EAGLE else 1
    assert drafted <= passes if num_above else drafted == passes
