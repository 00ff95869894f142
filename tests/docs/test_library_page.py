"""docs/library.md: its blocks run as printed, in order, and give what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import fly_jax

_PAGE = Path(__file__).parents[2] / "docs" / "library.md"
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """The namespace in which all blocks have run."""
    text = _PAGE.read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    blocks = list(_BLOCK.finditer(text))
    assert len(blocks) == text.count("```") / 2 == 10, "a block is not python, or new: test it here"
    for block in blocks:
        line = text.count("\n", 0, block.start(1))
        exec(compile("\n" * line + block[1], _PAGE, "exec"), names)
    return names


def test_the_rules_differ_as_the_page_says(page: dict[str, Any]) -> None:
    plain, exact, fast = page["plain"], page["exact"], page["fast"]
    assert plain.num_rounds == len(plain.token_ids) > 10
    assert exact.token_ids == plain.token_ids
    assert exact.num_rounds < plain.num_rounds
    assert fast.num_rounds <= exact.num_rounds
    assert len(page["drawn"].token_ids) > 10


def test_streamed_text_is_that_of_generate(page: dict[str, Any]) -> None:
    pair = page["pair"]
    whole = fly_jax.generate(
        pair,
        page["prompts"],
        rule=fly_jax.Fly(),
        max_new_tokens=64,
        batch_size=2,
    )
    written = {state.generation.prompt_token_ids: text for state, text in page["written"].items()}
    assert [written[one.prompt_token_ids] for one in whole] == [
        pair.tokenizer.decode(one.token_ids, continues=True) for one in whole
    ]
    assert all(written.values())


@pytest.mark.parametrize("name", ["loop_exact", "loop_fly"])
def test_a_foreign_loop_gives_the_tokens_of_generate(page: dict[str, Any], name: str) -> None:
    rule = fly_jax.Exact() if name == "loop_exact" else fly_jax.Fly()
    count = 0 if name == "loop_exact" else page["K"]
    (expected,) = fly_jax.generate(
        page["pair"],
        page["ids"][:1],
        rule=rule,
        num_speculative_tokens=count,
        protect=(),
        max_new_tokens=48,
    )
    assert page[name] == expected.token_ids
    assert len(page[name]) > 10
    assert (expected.num_rescued_tokens > 0) == (name == "loop_fly")


def test_a_rule_of_ones_own_rescues(page: dict[str, Any]) -> None:
    assert len(page["loop_doubt"]) > 10
    assert page["loop_doubt"] != page["loop_exact"]


def test_each_row_of_a_batch_has_its_own_rule(page: dict[str, Any]) -> None:
    assert page["mixed"].num_accepted.shape == (3,)


def test_the_foreign_loop_fits_on_the_page() -> None:
    text = _PAGE.read_text(encoding="utf-8")
    loop = next(block[1] for block in _BLOCK.finditer(text) if "def decode(" in block[1])
    body = loop.split("def decode(")[1]
    assert len(body.splitlines()) <= 12
    rule = next(block[1] for block in _BLOCK.finditer(text) if "class Doubt" in block[1])
    assert len([line for line in rule.splitlines() if line]) <= 21, "twenty, and the loop"
    assert "pair" not in body, "a foreign engine has no pair"


def test_steps_give_the_tokens_of_generate(page: dict[str, Any]) -> None:
    (expected,) = fly_jax.generate(
        page["pair"],
        page["ids"][:1],
        rule=fly_jax.Fly(),
        num_speculative_tokens=page["K"],
        protect=(),
        max_new_tokens=len(page["stepwise"]),
    )
    settled = len(expected.token_ids)  # the steps of the page go on after an end of text
    assert settled >= 4, "each of the four rounds settles a token at least"
    assert page["stepwise"][:settled] == expected.token_ids


def test_sharded_logits_give_the_same_evidence(page: dict[str, Any]) -> None:
    shards = page["sharded"].sharding.shard_shape(page["sharded"].shape)
    assert shards[2] * jax.device_count() == page["vocab_size"]
    assert jax.device_count() > 1
    for name in ("argmax", "accepted", "replacement"):
        here, there = getattr(page["on_one"], name), getattr(page["on_mesh"], name)
        np.testing.assert_array_equal(here, there)
    np.testing.assert_allclose(page["on_one"].entropy, page["on_mesh"].entropy, rtol=1e-5)


def test_a_call_that_cannot_work_says_why(page: dict[str, Any]) -> None:
    assert "num_speculative_tokens=6" in page["refusal"]
    assert "window_size=6" in page["refusal"]


def test_the_page_uses_the_public_api_only() -> None:
    code = "".join(block[1] for block in _BLOCK.finditer(_PAGE.read_text(encoding="utf-8")))
    assert not re.search(r"(from|import) fly_jax\.", code)
    used = set(re.findall(r"fly_jax\.(\w+)", code))
    assert used
    assert used <= set(fly_jax.__all__)
