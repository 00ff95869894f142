"""docs/engine.md: its blocks run as printed, in order, and give what the page says."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

import fly_jax

_ROOT = Path(__file__).parents[2]
_PAGE = (_ROOT / "docs" / "engine.md").read_text(encoding="utf-8")
_BLOCKS = re.findall(r"^```python\n(.*?)^```$", _PAGE, re.MULTILINE | re.DOTALL)

WAYS = ("engine", "static")


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


def test_its_figures_are_those_that_were_measured() -> None:
    result = json.loads((_ROOT / "benchmarks" / "results" / "engine.json").read_text())
    for name in ("mixed", "alike"):
        one = result[name]
        ratios = one["ratios"]
        figures = [one["tokens"] / statistics.median(one[f"{way}_seconds"]) for way in WAYS]
        row = (
            f"| {figures[0]:.0f} | {figures[1]:.0f} | {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f}) |"
        )
        assert row in _PAGE
        assert one["alike"] == one["requests"] == 64
        assert one["slots"] == 8
