"""What the compiled programs show at 405B and 70B scale: read from the TPU compiler's output."""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from fly_jax.decoding import programs
from fly_jax.decoding.programs import prefill_piece
from fly_jax.launch.__main__ import main
from fly_jax.models.cache import CACHE_AXES, cache_shape
from fly_jax.models.presets import preset
from fly_jax.models.specs import INT8, parameter_specs
from fly_jax.planning import planner as plan_module
from fly_jax.planning.plan_spec import PlanSpec, default_round, slice_mesh
from fly_jax.planning.plan_steps import CompiledStep, Model, compiled_steps
from fly_jax.planning.planner import Plan, make_plan, table
from fly_jax.sharding.chips import CHIPS
from fly_jax.sharding.mesh import parse_mesh
from fly_jax.sharding.rules import RULES, Layout

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu, the TPU compiler, is not installed; the extras [tpu] and [test] have it",
)

V5E = CHIPS["v5e"]
LARGE, MIDDLE, SMALL = (preset(f"llama-3.1-{size}") for size in ("405b", "70b", "8b"))
COMMAND = "plan --target llama-3.1-405b --draft llama-3.1-8b --chip v5e --mesh 8x8"
K, CAPACITY = 25, 8256
CONTEXT = 8192


Steps = dict[str, CompiledStep]


@pytest.fixture(scope="module")
def planned() -> tuple[Plan, Steps]:
    """405B in bfloat16 with an 8B draft: every step, with a prompt of the whole context.

    The README's command makes the plan.
    """
    steps: Steps = {}
    plans: list[Plan] = []

    def recorded(*given: Any, **sizes: Any) -> Iterator[CompiledStep]:
        for step in compiled_steps(*given, **sizes):
            steps[step.name] = step
            yield step

    def kept(spec: PlanSpec, progress: Callable[[str], None]) -> Plan:
        plans.append(make_plan(spec, progress))
        return plans[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_module, "compiled_steps", recorded)
        patch.setattr(plan_module, "make_plan", kept)
        patch.setenv("JAX_PLATFORMS", "cpu")  # which the command sets for its process
        assert main(COMMAND.split()) == 0
    return plans[0], steps


def test_it_is_the_readmes_command() -> None:
    readme = Path(__file__).parents[2] / "README.md"
    assert f"\npython -m fly_jax.launch {COMMAND}\n" in readme.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def plan(planned: tuple[Plan, Steps]) -> Plan:
    return planned[0]


def prefill_and_round(
    mesh: str, rules: Sequence[str], *, large: bool, int8: bool, rows: int, prompt: int
) -> Steps:
    """The first two steps of a pair, after a prompt of so many tokens."""
    devices = slice_mesh(V5E, parse_mesh(mesh))
    target, draft = (Layout(devices, RULES[name]) for name in rules)
    matrices = INT8 if int8 else None
    steps = compiled_steps(
        Model(LARGE if large else MIDDLE, target, matrices),
        Model(SMALL, draft, matrices),
        default_round(K),
        rows=rows,
        capacity=CAPACITY,
        prompt_length=prompt,
    )
    return {step.name: step for step in (next(steps), next(steps))}


@pytest.fixture(scope="module")
def int8_batch() -> Steps:
    """405B in int8 with 8 rows, which are split over y."""
    return prefill_and_round(
        "8x8", ("tensor", "tensor"), large=True, int8=True, rows=8, prompt=CONTEXT - 1
    )


@pytest.fixture(scope="module")
def long_70b() -> Steps:
    """70B whose cache is split by positions, with a draft in every column.

    Pieces of prompts are short: the compiler takes long for wide ones, which exchange the same.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "_LONGEST_PIECE", 128)
        return prefill_and_round(
            "8x8",
            ("tensor_long", "narrow_whole"),
            large=False,
            int8=False,
            rows=1,
            prompt=2 * prefill_piece(1),
        )


def test_405b_in_bfloat16_fits_a_v5e_slice_of_64(plan: Plan) -> None:
    assert [step.name for step in plan.steps] == [
        "prefill", "round", "draft", "verify", "autoregressive",
    ]  # fmt: skip
    assert {step.source for step in plan.steps} == {"compiled"}
    assert plan.fits
    for step in plan.steps:
        assert 0 < step.peak_bytes <= V5E.memory_bytes, step.name
    memory = plan.memory()
    held = sum(
        memory[f"{name}_bytes"] for name in ("parameter", "draft_parameter", "cache", "draft_cache")
    )
    a_round = plan.step("round")
    assert a_round is not None
    # The compiler's arguments are the parameters and caches that shapes say, and little else.
    assert held <= a_round.argument_bytes <= 1.01 * held
    assert plan.largest_batch >= 1
    assert plan.remedies == ()


def test_405b_in_int8_fits_with_8_rows(int8_batch: Steps) -> None:
    for step in int8_batch.values():
        assert 0 < step.peak_bytes <= V5E.memory_bytes, step.name
    # Matrices are read as int8: nothing keeps a wide copy of them.
    assert int8_batch["round"].argument_bytes < 8 * 2**30
    assert int8_batch["round"].temporary_bytes < 2**28


def test_a_layer_of_one_row_exchanges_twice(plan: Plan) -> None:
    verify, alone = plan.step("verify"), plan.step("autoregressive")
    assert verify is not None
    assert alone is not None
    for step, tokens in ((verify, K + 1), (alone, 1)):
        in_layers = [one for one in step.exchanges if one.count == LARGE.num_layers]
        assert [one.kind for one in in_layers] == ["all-reduce", "all-reduce"]
        assert {one.shapes for one in in_layers} == {((1, tokens, LARGE.embed_size),)}
        outside = [one for one in step.exchanges if one not in in_layers]
        assert {one.count for one in outside} == {1}
        assert len(outside) <= 5, "the embedding, and a few numbers of evidence per position"


def test_a_layer_of_split_rows_exchanges_four_times(int8_batch: Steps) -> None:
    in_layers = [one for one in int8_batch["round"].exchanges if one.count == LARGE.num_layers]
    assert sorted(one.kind for one in in_layers) == [
        "all-reduce", "all-reduce", "all-to-all", "all-to-all",
    ]  # fmt: skip


def test_a_layer_of_split_positions_exchanges_five_times(
    long_70b: Steps,
) -> None:
    in_layers = [one for one in long_70b["round"].exchanges if one.count == MIDDLE.num_layers]
    kinds = sorted(one.kind for one in in_layers)
    # Of the sum each device needs its own heads; older compilers reduce all of it for that.
    assert kinds[:4] == ["all-gather"] + ["all-reduce"] * 3
    assert kinds[4:] in (["all-reduce"], ["reduce-scatter"])


def test_no_exchange_carries_a_vocabulary_a_matrix_or_a_cache(
    plan: Plan, int8_batch: Steps, long_70b: Steps
) -> None:
    for rows, steps in (
        (1, plan.steps),
        (8, int8_batch.values()),
        (1, long_70b.values()),
    ):
        for step in steps:
            tokens = 2 if step.name == "autoregressive" else K + 1
            if step.name == "prefill":
                tokens = prefill_piece(rows)
            most = rows * tokens * (LARGE.embed_size + SMALL.embed_size)
            assert step.exchanges, step.name
            for one in step.exchanges:
                for shape in one.shapes:
                    assert LARGE.vocab_size not in shape, (step.name, one)
                    assert CAPACITY not in shape, (step.name, one)
                    assert math.prod(shape) <= most, (step.name, one)


def made(step: CompiledStep, kind: str, shape: Sequence[int]) -> set[str]:
    """The operations that give an array of this type and shape, those within a fusion left out."""
    fused = set(re.findall(r" fusion\(.*calls=%?([\w.\-]+)", step.hlo))
    computations = re.split(r"\n(?=(?:ENTRY )?%?[\w.\-]+ \(.*\{\n)", step.hlo)
    array = re.compile(rf"= {kind}\[{','.join(map(str, shape))}\]\S* (\S+?)\(")
    found: set[str] = set()
    for computation in computations[1:]:
        if computation.removeprefix("ENTRY ").lstrip("%").split(" ")[0] not in fused:
            found.update(array.findall(computation))
    return found


def test_caches_are_updated_in_place(
    planned: tuple[Plan, Steps], int8_batch: Steps, long_70b: Steps
) -> None:
    for steps, mesh, rules, config, rows in (
        (planned[1], "8x8", "tensor_whole", LARGE, 1),
        (int8_batch, "8x8", "tensor", LARGE, 8),
        (long_70b, "8x8", "tensor_long", MIDDLE, 1),
    ):
        layout = Layout(slice_mesh(V5E, parse_mesh(mesh)), RULES[rules])
        shape = cache_shape(config, rows, CAPACITY)
        local = layout.sharding(CACHE_AXES, shape).shard_shape(shape)
        operations = made(steps["round"], "bf16", local)
        assert "dynamic-update-slice" in operations
        assert not operations & {"copy", "copy-start", "copy-done", "all-gather"}
        assert steps["round"].temporary_bytes < 2 * 2 * math.prod(local)


def test_a_plan_lists_what_is_copied(plan: Plan) -> None:
    for step in plan.steps:
        assert step.copies is not None
        assert not [one for one in step.copies if one.is_repeated], step.name
    assert "Copies of a cache or a stack of matrices in a loop or a branch: none" in table(plan)
    steps = plan.to_dict()["steps"]
    assert isinstance(steps, dict)
    assert {key for step in steps.values() for copy in step["copies"] for key in copy} <= {
        "operation", "shape", "bytes", "count", "in_loop", "in_branch",
    }  # fmt: skip


def test_a_weight_is_nowhere_copied_whole(planned: tuple[Plan, Steps], int8_batch: Steps) -> None:
    """A stack of matrices in another order would not fit, and would take longer than the pass."""
    layout = Layout(slice_mesh(V5E, parse_mesh("8x8")), RULES["tensor"])
    for steps, kind, int8 in ((planned[1], "bf16", False), (int8_batch, "s8", True)):
        for name, spec in parameter_specs(LARGE, INT8 if int8 else None).items():
            local = layout.sharding(spec.axes, spec.shape).shard_shape(spec.shape)
            if spec.inputs and spec.axes[0] == "layers":
                operations = made(steps["round"], kind, local)
                assert "parameter" in operations, f"{name} is not in the program"
                assert operations <= {"parameter", "get-tuple-element", "bitcast"}, name
