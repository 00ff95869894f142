"""On simulated devices: the same tokens as on one, and no recompilation."""

import functools
from collections.abc import Callable
from dataclasses import astuple, replace

import pytest
import random_pairs as pairs
from golden import layout_on
from launch_types import Patch
from random_pairs import CONFIG, batch_engine, placed, random_draft, random_target

from fly_jax import Budget, CorrectionMemory, Csd, Engine, Fly, Generation, Lookup, Margin, Typical
from fly_jax.models import llama
from fly_jax.sharding.rules import RULES

LARGE = replace(CONFIG, num_heads=8, num_kv_heads=4)
ROWS = 4
EXACT, FLY = pairs.SPECS["exact"].with_static(num_speculative_tokens=3), Fly(window_size=1)
ALL = Budget((FLY | Csd(1e-6)) & (Typical() | Margin()), 2.0)
LOOKUP = Lookup(num_earlier_tokens=40)
LEVELS = {"deferred_window": 2, "level_speculative_tokens": (2,), "lookup": LOOKUP}
SPECS = {
    "exact": EXACT, "fly": replace(EXACT, rule=FLY),
    "all": replace(EXACT, rule=ALL).with_static(reports_mismatches=True, audits=True),
    "levels": replace(EXACT, rule=Fly(0.0, 2)).with_static(audits=True, **LEVELS),
}  # fmt: skip
BATCHES = [[[3, 1, 4], [9], [1, 1], [5] * 7], [[2, 6, 5, 3, 5, 8, 9], [7, 9], [4]]]
MAX_NEW_TOKENS = 12
# Every rule, mesh and layout, not all together: programs for eight devices compile slowly.
CASES = [
    ("2x4", "exact", "tensor_long", "narrow"), ("2x2x2", "exact", "tensor_whole", "narrow_long"),
    ("2x2x2", "fly", "tensor_long", "tensor_whole"), ("2x2x2", "all", "tensor", "replicated"),
    ("4x2", "levels", "tensor_long", "narrow_whole"),
]  # fmt: skip


def engine_on(
    mesh: str | None, name: str, target_rules: str = "tensor", draft_rules: str = "replicated"
) -> Engine:
    num_drafts = 1 + len(SPECS[name].static.level_speculative_tokens)
    layout = layout_on(mesh, draft_rules)
    drafts = [placed(random_draft(2, noise, LARGE), layout) for noise in (0.3, 0.4)[:num_drafts]]
    memory = CorrectionMemory("v", min_count=0) if name == "all" else None
    target = placed(random_target(2, LARGE), layout_on(mesh, target_rules))
    return batch_engine(target, drafts, SPECS[name], ROWS, memory=memory)


@functools.cache
def on_one_device(name: str) -> list[Generation]:
    engine = engine_on(None, name)
    return [row for batch in BATCHES for row in engine.generate(batch, MAX_NEW_TOKENS)]


def test_every_layout_is_decoded_with() -> None:
    assert {case[2] for case in CASES} | {case[3] for case in CASES} == set(RULES)


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_tokens_are_those_of_one_device_and_later_batches_compile_nothing(
    case: tuple[str, str, str, str], compilations: Callable[[], list[str]], monkeypatch: Patch
) -> None:
    if case[0] == "4x2":  # with heads in front of their inputs, as in a TPU's memory
        monkeypatch.setattr(llama, "_platform_of", lambda _: "tpu")
        monkeypatch.setattr(llama, "_LANES", 1)
    expected, engine = on_one_device(case[1]), engine_on(*case)
    found = []
    for batch in BATCHES:
        compiled = compilations()
        found += engine.generate(batch, MAX_NEW_TOKENS)
    assert any("_run" in message for message in compiled), "compilations go uncounted"
    assert compilations() == []
    for row, other in zip(found, expected, strict=True):
        assert row.token_ids == other.token_ids
        for report, alone in zip(row.reports, other.reports, strict=True):
            assert astuple(report) == pytest.approx(astuple(alone), abs=1e-4)
    assert all(bool(row.reports) == SPECS[case[1]].static.audits for row in found)
