"""The two calls that most users make, load a pair and generate; also with a drafter by its name."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array
from launch_types import Folders, Patch
from refusals import assert_refused
from tiny_pair import CONFIG

import fly_jax
from fly_jax import CorrectionMemory, Draft, DraftModel, Engine, Lookup, Terms, Verdict, generate
from fly_jax.decoding import pair as chain
from fly_jax.decoding.config import RoundStatic
from fly_jax.decoding.pair import Pair, load_pair
from fly_jax.decoding.state import DecodeState
from fly_jax.engine import engine

PROMPTS = ["Ada has 3 apples", "Vera's 12"]
REPEATING = ["Ada has 3 apples and Ada has 3", "Boris"]


@pytest.fixture(scope="module")
def alone(pair: Pair) -> Pair:
    return dataclasses.replace(pair, drafts=())


def tokens(pair: Pair, prompts: list[str] = REPEATING, **given: Any) -> list[list[int]]:
    return [one.token_ids for one in generate(pair, prompts, max_new_tokens=12, **given)]


def test_a_pair_without_a_draft_takes_any_rule(alone: Pair) -> None:
    assert tokens(alone, PROMPTS, rule=fly_jax.Fly()) == tokens(alone, PROMPTS)


def test_what_cannot_be_decoded_is_refused(pair: Pair, tiny_pair: Folders) -> None:
    assert_refused("list of at least one prompt", generate, pair, [])
    assert_refused("for a single text", generate, pair, "Ada has 3 apples")
    assert_refused("batch_size of at least 1", generate, pair, PROMPTS, batch_size=0)
    assert_refused("outside the model's vocabulary", generate, pair, [[1, 10**6]])
    for no_ids in ("Ada", [1.5], [1, None]):
        assert_refused("own tokenizer", chain.check_prompt, no_ids, pair.target.config)
    assert chain.check_prompt(np.array([1, 2]), pair.target.config) == (1, 2)
    assert_refused("must be at least 0 and 1", pair.spec, rounds_per_dispatch=0)
    no_expression = r"protect is '\(', which is no regular expression"
    assert_refused(no_expression, Engine.of, pair, rule="exact", protect=["("])
    assert_refused("must be at least 0 and 1", RoundStatic, 0, rounds_per_dispatch=0)
    other = CorrectionMemory("other")
    assert_refused("another vocabulary", Engine.of, pair, rule="csd", memory=other)
    there_is_none = "There is no drafter 'lucky'; there are ngram"
    assert_refused(there_is_none, generate, pair, PROMPTS, drafter="lucky")
    # A name that no file system takes.
    assert_refused("cannot be looked up|neither a folder", load_pair, tiny_pair[0], "x" * 300)


def test_one_cpu_device_has_a_large_target_in_int8(tiny_pair: Folders, monkeypatch: Patch) -> None:
    opened = chain.open_pair(*tiny_pair)
    held = jax.tree.leaves(load_pair(opened).target.parameters())
    size = 4 * opened.target.num_parameters
    assert size == sum(leaf.size * leaf.dtype.itemsize for leaf in held)
    monkeypatch.setattr(chain, "LARGE_BYTES", size + 1)
    assert opened.default_dtype(1) == "float32"
    monkeypatch.setattr(chain, "LARGE_BYTES", size)
    loaded = load_pair(opened)
    assert all(one.has_integers for one in (loaded.target, *loaded.drafts))
    assert [opened.default_dtype(number) for number in (1, 2)] == ["int8", "float32"]
    own = chain.open_pair(tiny_pair[0], "self:int8")
    assert own.default_dtype(1) == "float32", "else its draft would be the target itself"


def test_engines_share_the_pairs_weights(pair: Pair) -> None:
    """Each holding its layers one by one would hold the model once more."""
    assert pair.draft is not None
    own = jax.tree.leaves((pair.target.parameters(), pair.draft.parameters()))
    for _ in range(2):
        engine = Engine.of(pair, rule="exact", num_speculative_tokens=2)
        assert isinstance(engine.drafter, DraftModel)
        held = (engine._programs._parameters, engine.drafter.parameters)
        assert [*map(id, jax.tree.leaves(held))] == [*map(id, own)]


class Pieces(NamedTuple):
    """What `Echo` has been given."""

    prompt: Array  # the sum of the prompt's hidden states
    hidden: Array  # that of the token that the last verdict ended the draft after
    wrong: Array  # rounds in which the target would not have said the next token after that state


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Echo(fly_jax.Drafter):
    """Proposes the last token again and again, and keeps the target's hidden states."""

    unembedding: Array
    num_speculative_tokens = 1
    needs_hidden = True

    def init(self, rows: int, capacity: int, dtype: jnp.dtype) -> Pieces:
        empty = jnp.zeros((rows, CONFIG.embed_size), dtype)
        return Pieces(empty, empty, jnp.zeros(rows, jnp.int32))

    def prefill(self, state: Pieces, tokens: Array, start: Array, hidden: Array | None) -> Pieces:
        assert hidden is not None
        assert hidden.shape == (*tokens.shape, CONFIG.embed_size)
        return state._replace(prompt=state.prompt + jnp.sum(hidden, axis=1))

    def propose(
        self, state: Pieces, text: Array, length: Array, num_speculative_tokens: int, terms: Terms
    ) -> tuple[Draft, Pieces]:
        last = jnp.take_along_axis(text, length[:, None] - 1, axis=1)
        count = terms.of_each(length, num_speculative_tokens)
        tokens = jnp.tile(last, (1, num_speculative_tokens))
        return Draft(tokens, None, count, jnp.zeros(0, jnp.int32)), state

    def observe(
        self, state: Pieces, verdict: Verdict, hidden: Array | None, *, draft: Draft, live: Array
    ) -> Pieces:
        rows, num_speculative_tokens = draft.tokens.shape
        assert hidden is not None
        assert hidden.shape == (rows, num_speculative_tokens + 1, CONFIG.embed_size)
        own = jnp.take_along_axis(hidden, verdict.num_accepted[:, None, None], axis=1)[:, 0]
        wrong = jnp.argmax(own @ self.unembedding, axis=-1) != verdict.next_token
        return Pieces(state.prompt, own, state.wrong + (wrong & live))


def test_a_foreign_drafter_is_lossless_and_given_the_targets_hidden_states(
    tiny_pair: Folders, alone: Pair, monkeypatch: Patch,
    dispatches: list[tuple[DecodeState, DecodeState]],
) -> None:  # fmt: skip
    """Those of prompts, of all pieces, and of each block."""
    monkeypatch.setattr(chain, "_BUILDS", {**chain._BUILDS})
    monkeypatch.setattr(engine, "OFFLINE_TOKENS", 16)
    register, prompts = fly_jax.register_drafter, [*REPEATING, "Ada has 3 apples " * 4]
    expected, given = tokens(alone, prompts), {"rule": "exact", "num_speculative_tokens": 3}
    register("echo", lambda target, static: Echo(target.parameters()["embedding"].T))
    dispatches.clear()
    assert tokens(alone, prompts, drafter="echo", **given) == expected
    assert len(dispatches) > 2
    last = jax.device_get(dispatches[-1][1].drafter)
    assert not np.any(last.wrong)  # in any round
    assert np.any(last.hidden != 0)
    assert np.all(np.any(last.prompt != 0, axis=1))
    loaded = load_pair(tiny_pair[0], "echo", dtype="float32")
    assert (loaded.drafts, loaded.drafter) == ((), "echo")
    for number in (3, "auto"):
        given["num_speculative_tokens"] = number
        (one,) = generate(loaded, prompts[:1], max_new_tokens=12, **given)
        assert one.token_ids == expected[0]
        assert one.num_draft_tokens > 0 or number == "auto"
    assert_refused("a drafter 'echo' already", register, "echo", lambda target, static: None)
    assert_refused("proposes alone", load_pair, tiny_pair[0], ["echo", tiny_pair[1]])


def test_what_a_lookup_drafts_with(tiny_pair: Folders, pair: Pair, alone: Pair) -> None:
    """Said and unsaid; that it drafts alone is tested in tests/launch/test_generate.py."""
    given = {"rule": "exact", "num_speculative_tokens": 4}
    named = load_pair(tiny_pair[0], "ngram", dtype="float32")
    lookups = {Lookup(): {}, Lookup(2): {"prompt_lookup_max": 2}}
    lookups |= {Lookup(num_speculative_tokens=3): {"prompt_lookup_tokens": 3}}
    for lookup, values in lookups.items():
        assert named.spec(**given, **values).static.lookup == lookup
    # Unsaid it is exact with three tokens; and a rule that loosens has the published fifteen.
    for unsaid in (pair.config(), named.config(), alone.config(prompt_lookup_max=2)):
        assert (unsaid.rule, unsaid.num_speculative_tokens) == ("exact", 3)
    for loosened in (pair.config(rule="fly"), named.config(rule="margin")):
        assert loosened.num_speculative_tokens == 15
