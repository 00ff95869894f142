"""One function chooses how a pair lies, from memory and time."""

from __future__ import annotations

import pytest

from fly_jax.models.architectures import INT8, MatrixType
from fly_jax.models.layouts import (
    Layouts,
    Workload,
    choose_layouts,
    parameter_bytes,
    pass_seconds,
    resident_bytes,
)
from fly_jax.models.presets import preset
from fly_jax.planning.plan_spec import abstract_mesh
from fly_jax.sharding.chips import CHIPS, Chip
from fly_jax.sharding.mesh import parse_mesh
from fly_jax.sharding.rules import RULES, Layout

V5E = CHIPS["v5e"]
LARGE, MIDDLE, SMALL = (preset(f"llama-3.1-{size}") for size in ("405b", "70b", "8b"))
TINY = preset("llama-3.2-1b")


def chosen(mesh: str, chip: Chip | None = V5E, **workload: int | MatrixType) -> Layouts:
    return choose_layouts(abstract_mesh(parse_mesh(mesh)), LARGE, SMALL, Workload(**workload), chip)


def test_few_rows_of_little_text_are_held_by_every_column() -> None:
    """Merging softmax sums would take longer than reading the cache eight times."""
    assert chosen("8x8").target_rules == "tensor_whole"


def test_few_rows_of_much_text_are_split_by_positions() -> None:
    assert chosen("8x8", capacity=131_072, matrices=INT8).target_rules == "tensor_long"


def test_many_rows_are_split_over_y() -> None:
    assert chosen("8x8", rows=32, matrices=INT8).target_rules == "tensor"


def test_a_large_draft_is_not_held_whole_beside_405b() -> None:
    layouts = chosen("8x8")
    assert layouts.draft_rules != "replicated"
    held = parameter_bytes(layouts.draft, SMALL) + resident_bytes(layouts.target, LARGE, Workload())
    assert held < V5E.memory_bytes
    assert parameter_bytes(Layout(layouts.draft.mesh, RULES["replicated"]), SMALL) > 14 * 2**30


def test_the_fastest_that_fits_is_chosen() -> None:
    mesh, workload = abstract_mesh(parse_mesh("4x4")), Workload(rows=16)
    chip = CHIPS["v6e"]
    layouts = choose_layouts(mesh, MIDDLE, TINY, workload, chip)
    best = pass_seconds(layouts.draft, TINY, workload, chip)
    for name, rules in RULES.items():
        layout = Layout(mesh, rules)
        held = resident_bytes(layout, TINY, workload)
        held += resident_bytes(layouts.target, MIDDLE, workload)
        if held < 0.95 * chip.memory_bytes:
            assert best <= pass_seconds(layout, TINY, workload, chip), name


def test_where_nothing_fits_the_smallest_is_chosen() -> None:
    layouts = chosen("2x2", rows=2)
    mesh, workload = layouts.target.mesh, Workload(rows=2)
    for name in ("tensor", "tensor_long", "tensor_whole"):
        other = resident_bytes(Layout(mesh, RULES[name]), LARGE, workload)
        assert resident_bytes(layouts.target, LARGE, workload) <= other


@pytest.mark.parametrize(("rows", "rules"), [(1, "tensor_long"), (8, "tensor"), (16, "tensor")])
def test_unknown_devices_save_memory(rows: int, rules: str) -> None:
    layouts = chosen("8x8", None, rows=rows)
    assert layouts.target_rules == rules
    assert layouts.draft_rules == rules, "the draft is larger than the target's share"
    small = choose_layouts(
        abstract_mesh(parse_mesh("2x2")), LARGE, SMALL, Workload(rows=rows), None
    )
    assert small.draft_rules == "replicated"
