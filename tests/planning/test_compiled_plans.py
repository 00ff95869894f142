"""What the compiled programs show at 405B and 70B scale: read from the TPU compiler's output."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from rounds import BY_LIBTPU

from fly_jax.launch.__main__ import main
from fly_jax.models.architectures import INT8, LlamaConfig, parameter_specs
from fly_jax.models.cache import CACHE_AXES, cache_shape
from fly_jax.models.layouts import Layouts
from fly_jax.models.presets import preset
from fly_jax.planning import planner
from fly_jax.planning.plan_spec import PlanSpec, slice_mesh
from fly_jax.planning.plan_steps import STEPS, Step, compiled_steps
from fly_jax.planning.planner import Plan, make_plan, table
from fly_jax.sharding.chips import CHIPS
from fly_jax.sharding.mesh import parse_mesh
from fly_jax.sharding.rules import RULES, Layout

pytestmark = BY_LIBTPU

V5E = CHIPS["v5e"]
LARGE, MIDDLE, SMALL = (preset(f"llama-3.1-{size}") for size in ("405b", "70b", "8b"))
COMMAND = "plan --target llama-3.1-405b --draft llama-3.1-8b --chip v5e --mesh 8x8"
K, CAPACITY = 25, 8256
Steps = dict[str, Step]


@pytest.fixture(scope="module")
def plan() -> Plan:
    """405B in bfloat16 with an 8B draft, by the README's command: every step."""
    plans: list[Plan] = []

    def kept(spec: PlanSpec, progress: Callable[[str], None]) -> Plan:
        plans.append(make_plan(spec, progress))
        return plans[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "make_plan", kept)
        patch.setenv("JAX_PLATFORMS", "cpu")  # which the command sets for its process
        assert main(COMMAND.split()) == 0
    return plans[0]


@pytest.fixture(scope="module")
def bfloat16(plan: Plan) -> Steps:
    return {step.name: step for step in plan.steps}


def test_it_is_the_readmes_command() -> None:
    readme = Path(__file__).parents[2] / "README.md"
    assert f"\npython -m fly_jax.launch {COMMAND}\n" in readme.read_text(encoding="utf-8")


def up_to_the_round(target: LlamaConfig, rules: Sequence[str], **sizes: Any) -> Steps:
    """The first steps of a pair with the 8B draft on v5e 8x8, in layouts of these names."""
    spec = PlanSpec(target=target, draft=SMALL, chip=V5E, mesh=parse_mesh("8x8"), **sizes)
    devices = slice_mesh(V5E, spec.mesh)
    layouts = Layouts(*(Layout(devices, RULES[name]) for name in rules), *rules)
    found = {}
    for step in compiled_steps(spec, layouts):
        found[step.name] = step
        if step.name == "round":
            break
    return found


@pytest.fixture(scope="module")
def int8_batch() -> Steps:
    """405B in int8 with 8 rows, which are split over y."""
    return up_to_the_round(LARGE, ("tensor", "tensor"), int8=True, rows=8)


@pytest.fixture(scope="module")
def long_70b() -> Steps:
    """70B whose cache is split by positions, with a draft in every column.

    The prompt is short: the compiler takes long for wide passes, which exchange the same.
    """
    return up_to_the_round(MIDDLE, ("tensor_long", "narrow_whole"), prompt_length=16)


def test_405b_in_bfloat16_fits_a_v5e_slice_of_64(plan: Plan, bfloat16: Steps) -> None:
    assert [step.name for step in plan.steps] == list(STEPS)
    assert {step.source for step in plan.steps} == {"compiled"}
    assert plan.fits
    for step in plan.steps:
        assert 0 < step.peak_bytes <= V5E.memory_bytes, step.name
    memory = plan.memory()
    held = sum(
        memory[f"{name}_bytes"] for name in ("parameter", "draft_parameter", "cache", "draft_cache")
    )
    # The compiler's arguments are the parameters and caches that shapes say, and little else.
    assert held <= bfloat16["round"].argument_bytes <= 1.01 * held
    assert plan.largest_batch >= 1
    assert plan.remedies == ()


def test_405b_in_int8_fits_with_8_rows(int8_batch: Steps) -> None:
    for step in int8_batch.values():
        assert 0 < step.peak_bytes <= V5E.memory_bytes, step.name
    # Matrices are read as int8: nothing keeps a wide copy of them.
    assert int8_batch["round"].argument_bytes < 8 * 2**30
    assert int8_batch["round"].temporary_bytes < 2**28


def test_a_layer_of_one_row_exchanges_twice(bfloat16: Steps) -> None:
    for name, tokens in (("verify", K + 1), ("autoregressive", 1)):
        step = bfloat16[name]
        in_layers = [one for one in step.exchanges if one.count == LARGE.num_layers]
        assert [one.kind for one in in_layers] == ["all-reduce", "all-reduce"]
        assert {one.shapes for one in in_layers} == {((1, tokens, LARGE.embed_size),)}
        outside = [one for one in step.exchanges if one not in in_layers]
        assert {one.count for one in outside} == {1}
        assert len(outside) <= 5, "the embedding, and a few numbers of evidence per position"


def in_layers(steps: Steps, config: LlamaConfig) -> list[str]:
    """The kinds of a round's exchanges in each layer of the target."""
    return sorted(one.kind for one in steps["round"].exchanges if one.count == config.num_layers)


def test_a_layer_of_split_rows_exchanges_four_times(int8_batch: Steps) -> None:
    assert in_layers(int8_batch, LARGE) == ["all-reduce"] * 2 + ["all-to-all"] * 2


def test_a_layer_of_split_positions_exchanges_five_times(long_70b: Steps) -> None:
    kinds = in_layers(long_70b, MIDDLE)
    # Of the sum each device needs its own heads; older compilers reduce all of it for that.
    assert kinds[:4] == ["all-gather"] + ["all-reduce"] * 3
    assert kinds[4:] in (["all-reduce"], ["reduce-scatter"])


def test_no_exchange_carries_a_vocabulary_a_matrix_or_a_cache(
    plan: Plan, int8_batch: Steps, long_70b: Steps
) -> None:
    found = [(1, step) for step in (*plan.steps, *long_70b.values())]
    for rows, step in [*found, *((8, step) for step in int8_batch.values())]:
        tokens = 2 if step.name == "autoregressive" else K + 1
        if step.name == "prefill":  # prompts as long as these are run one by one
            rows, tokens = 1, 1024
        most = rows * tokens * (LARGE.embed_size + SMALL.embed_size)
        assert bool(step.exchanges) == (step.name != "insert"), step.name
        for one in step.exchanges:
            for shape in one.shapes:
                assert LARGE.vocab_size not in shape, (step.name, one)
                assert CAPACITY not in shape, (step.name, one)
                assert math.prod(shape) <= most, (step.name, one)


def made(step: Step, kind: str, shape: Sequence[int]) -> set[str]:
    """The operations that give an array of this type and shape, those within a fusion left out."""
    fused = set(re.findall(r" fusion\(.*calls=%?([\w.\-]+)", step.hlo))
    computations = re.split(r"\n(?=(?:ENTRY )?%?[\w.\-]+ \(.*\{\n)", step.hlo)
    array = re.compile(rf"= {kind}\[{','.join(map(str, shape))}\]\S* (\S+?)\(")
    found: set[str] = set()
    for computation in computations[1:]:
        if computation.removeprefix("ENTRY ").lstrip("%").split(" ")[0] not in fused:
            found.update(array.findall(computation))
    return found


def test_caches_are_updated_in_place(bfloat16: Steps, int8_batch: Steps, long_70b: Steps) -> None:
    for steps, rules, config, rows in (
        (bfloat16, "tensor_whole", LARGE, 1),
        (int8_batch, "tensor", LARGE, 8),
        (long_70b, "tensor_long", MIDDLE, 1),
    ):
        layout = Layout(slice_mesh(V5E, parse_mesh("8x8")), RULES[rules])
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


def test_a_weight_is_nowhere_copied_whole(bfloat16: Steps, int8_batch: Steps) -> None:
    """A stack of matrices in another order would not fit, and would take longer than the pass."""
    layout = Layout(slice_mesh(V5E, parse_mesh("8x8")), RULES["tensor"])
    for steps, kind, int8 in ((bfloat16, "bf16", False), (int8_batch, "s8", True)):
        for name, spec in parameter_specs(LARGE, INT8 if int8 else None).items():
            local = layout.sharding(spec.axes, spec.shape).shard_shape(spec.shape)
            if spec.inputs and spec.axes[0] == "layers":
                operations = made(steps["round"], kind, local)
                assert "parameter" in operations, f"{name} is not in the program"
                assert operations <= {"parameter", "get-tuple-element", "bitcast"}, name
