"""docs/engine.md: its blocks run as printed, in order, and give what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import fly_jax

_PAGE = (Path(__file__).parents[2] / "docs" / "engine.md").read_text(encoding="utf-8")
_BLOCKS = re.findall(r"^```python\n(.*?)^```$", _PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """The namespace in which all blocks have run."""
    names: dict[str, Any] = {}
    assert len(_BLOCKS) == _PAGE.count("```") / 2 == 3, "a block is not python, or new"
    for block in _BLOCKS:
        exec(compile(block, "engine.md", "exec"), names)
    return names


def test_rules_and_draws_differ(page: dict[str, Any]) -> None:
    found = {name: one.generation for name, one in page["states"].items()}
    assert all(len(one.token_ids) > 4 for one in found.values())
    assert found["lossless"].num_rescued_tokens == 0
    assert found["drawn"].token_ids != found["lossless"].token_ids
    assert page["states"]["lossless"].num_reused == len(page["prompt"]) - 1 or (
        len(page["prompt"]) < 16
    )


def test_asyncio_gives_the_same_answers(page: dict[str, Any]) -> None:
    pair, config = page["pair"], page["pair"].config()
    alone = fly_jax.generate(pair, page["texts"], config, max_new_tokens=32, batch_size=5)
    assert page["answers"] == [pair.tokenizer.decode(one.token_ids) for one in alone]
    assert page["engine"].is_idle
