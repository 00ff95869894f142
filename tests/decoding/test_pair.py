"""The two calls that most users make: load a pair, generate."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest
from tiny_pair import write_pair

from fly_jax.decoding.drafters.model import DraftModel
from fly_jax.decoding.pair import Pair, load_pair
from fly_jax.decoding.spec import RoundSpec
from fly_jax.engine.engine import Engine, generate
from fly_jax.errors import FlyJaxError
from fly_jax.verification.correction_memory import CorrectionMemory
from fly_jax.verification.rules import Exact, Fly

PROMPTS = ["Ada has 3 apples", "Vera's 12"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    target, draft = write_pair(tmp_path_factory.mktemp("pair"))
    return load_pair(target, draft, dtype="float32")


def test_no_speculation_with_the_default_rule_is_greedy_decoding(pair: Pair) -> None:
    plain = generate(pair, PROMPTS, num_speculative_tokens=0, max_new_tokens=8)
    exact = generate(pair, PROMPTS, rule=Exact(), num_speculative_tokens=5, max_new_tokens=8)
    assert [one.token_ids for one in plain] == [one.token_ids for one in exact]
    assert all(one.mean_accepted_tokens == 1 for one in plain)


def test_a_pair_without_a_draft_takes_any_rule(pair: Pair) -> None:
    alone = Pair(pair.target, (), pair.tokenizer)
    (with_fly,) = generate(alone, PROMPTS[:1], rule=Fly(), max_new_tokens=8)
    (plain,) = generate(alone, PROMPTS[:1], max_new_tokens=8)
    assert with_fly.token_ids == plain.token_ids


def test_what_cannot_be_decoded_is_refused(pair: Pair) -> None:
    with pytest.raises(FlyJaxError, match="list of at least one prompt"):
        generate(pair, [])
    with pytest.raises(FlyJaxError, match="for a single text"):
        generate(pair, "Ada has 3 apples")
    with pytest.raises(FlyJaxError, match="batch_size of at least 1"):
        generate(pair, PROMPTS, batch_size=0)
    with pytest.raises(FlyJaxError, match="outside the model's vocabulary"):
        generate(pair, [[1, 10**6]])
    with pytest.raises(FlyJaxError, match=r"protect is '\(', which is no regular expression"):
        pair.decoder(pair.spec(rule="exact"), protect=["("])
    with pytest.raises(FlyJaxError, match="must be at least 0 and 1"):
        RoundSpec(Exact(), 0, rounds_per_dispatch=0)


def test_decoders_share_the_pairs_weights(pair: Pair) -> None:
    """Each holding its layers one by one would hold the model once more."""
    assert pair.draft is not None
    own = [*jax.tree.leaves((pair.target.parameters(), pair.draft.parameters()))]
    for _ in range(2):
        decoder = pair.decoder(pair.spec(rule="exact", num_speculative_tokens=2))
        assert isinstance(decoder.drafter, DraftModel)
        held = (decoder._programs._parameters, decoder.drafter.parameters)
        for array, ours in zip(jax.tree.leaves(held), own, strict=True):
            assert array is ours


def test_a_memory_of_other_tokens_is_refused(pair: Pair) -> None:
    memory, spec = CorrectionMemory("other"), pair.spec(rule="csd")
    for make in (
        lambda: pair.decoder(spec, memory=memory),
        lambda: Engine.of(pair, rule="csd", memory=memory),
    ):
        with pytest.raises(FlyJaxError, match="another vocabulary"):
            make()


def test_a_name_that_no_file_system_takes_is_refused(pair: Pair, tmp_path: Path) -> None:
    target, _ = write_pair(tmp_path)
    with pytest.raises(FlyJaxError, match=r"cannot be looked up|neither a folder"):
        load_pair(target, "x" * 300)
