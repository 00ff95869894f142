"""Drafters that are named where a draft model could be: the lookup, and one from outside."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from tiny_pair import write_pair

import fly_jax
from fly_jax.decoding.drafters import registry
from fly_jax.decoding.pair import Pair, load_pair
from fly_jax.engine.engine import generate
from fly_jax.errors import FlyJaxError

PROMPTS = ["Ada has 3 apples and Ada has 3", "Boris"]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Toy(fly_jax.Drafter):
    """Proposes the last token again and again."""

    size: int = 1

    def propose(
        self, state: Any, text: Any, length: Any, num_tokens: int, *, wanted: Any = None, **_: Any
    ) -> tuple[fly_jax.Draft, Any]:
        last = jnp.take_along_axis(text, length[:, None] - 1, axis=1)
        count = jnp.full(length.shape, num_tokens) if wanted is None else wanted
        tokens = jnp.tile(last, (1, num_tokens))
        return fly_jax.Draft(tokens, None, count, jnp.zeros(0, jnp.int32)), state


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def alone(folders: tuple[Path, Path]) -> Pair:
    return load_pair(folders[0], dtype="float32")


@pytest.fixture
def toy() -> Iterator[None]:
    fly_jax.register_drafter("toy", lambda target, spec: Toy())
    yield
    del registry._BUILDS["toy"]


def tokens(pair: Pair, **given: Any) -> list[list[int]]:
    return [one.token_ids for one in generate(pair, PROMPTS, max_new_tokens=12, **given)]


def test_a_drafter_from_outside_drafts_losslessly(
    folders: tuple[Path, Path], alone: Pair, toy: None
) -> None:
    expected = tokens(alone)
    assert tokens(alone, drafter="toy", rule="exact", num_speculative_tokens=3) == expected
    loaded = load_pair(folders[0], "toy", dtype="float32")
    assert (loaded.drafts, loaded.drafter) == ((), "toy")
    (one,) = generate(
        loaded, PROMPTS[:1], rule="exact", num_speculative_tokens=3, max_new_tokens=12
    )
    assert one.token_ids == expected[0]
    assert one.num_draft_tokens > 0
    with pytest.raises(FlyJaxError, match="a drafter 'toy' already"):
        fly_jax.register_drafter("toy", lambda target, spec: Toy())
    with pytest.raises(FlyJaxError, match="proposes alone"):
        load_pair(folders[0], ["toy", folders[1]])


def test_an_unknown_drafter_is_refused(alone: Pair) -> None:
    with pytest.raises(FlyJaxError, match="There is no drafter 'lucky'; there are ngram"):
        tokens(alone, drafter="lucky")


def test_the_lookup_drafts_alone(folders: tuple[Path, Path], alone: Pair) -> None:
    """Named, or because there is no draft model: the same, and the target's own text."""
    given = {"rule": "exact", "num_speculative_tokens": 4}
    named = load_pair(folders[0], "ngram", dtype="float32")
    assert named.spec(**given).lookup == fly_jax.Lookup()
    assert named.spec(**given, prompt_lookup_max=2).lookup == fly_jax.Lookup(max_ngram=2)
    assert named.spec(**given, prompt_lookup_tokens=3).lookup == fly_jax.Lookup(num_tokens=3)
    (one,) = generate(named, PROMPTS[:1], max_new_tokens=12, **given)
    (same,) = generate(alone, PROMPTS[:1], max_new_tokens=12, prompt_lookup_max=4, **given)
    assert one.token_ids == same.token_ids == tokens(alone)[0]
    assert one.num_draft_tokens == same.num_draft_tokens > 0


def test_a_config_from_a_file_decodes(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('rule = "margin"\nmargin_gap = 100.0\nnum_speculative_tokens = 3\n')
    pair = load_pair(*folders, dtype="float32")
    config = fly_jax.load_config(str(path))
    assert tokens(pair, config=config) == tokens(
        pair, rule=fly_jax.Margin(gap=100), num_speculative_tokens=3
    )
    assert tokens(pair, config=config, rule="exact") == tokens(pair, num_speculative_tokens=0)
