"""What the compiled programs show at 405B and 70B scale: read from the TPU compiler's output."""

import collections
import functools
import itertools
import math
import re
from pathlib import Path
from typing import Any

import pytest
from rounds import BY_LIBTPU, copied, repeated, round_hlo

from fly_jax.launch.__main__ import main
from fly_jax.models.architectures import INT8, parameter_specs
from fly_jax.models.cache import CACHE_AXES, cache_shape
from fly_jax.models.layouts import Layouts
from fly_jax.models.presets import preset
from fly_jax.planning import planner
from fly_jax.planning.hlo import exchanges, frames, parse
from fly_jax.planning.plan_spec import PlanSpec, abstract_model, slice_mesh
from fly_jax.planning.plan_steps import STEPS, Step, compiled_steps
from fly_jax.planning.planner import Plan, make_plan, table
from fly_jax.sharding.chips import CHIPS
from fly_jax.sharding.mesh import parse_mesh
from fly_jax.sharding.rules import RULES, Layout

pytestmark = BY_LIBTPU

V5E, MESH = CHIPS["v5e"], parse_mesh("8x8")
LARGE, MIDDLE, SMALL = (preset(f"llama-3.1-{size}") for size in ("405b", "70b", "8b"))
COMMAND = "plan --target llama-3.1-405b --draft llama-3.1-8b --chip v5e --mesh 8x8"
K, CAPACITY = 25, 8256
HELD = ("parameter", "draft_parameter", "cache", "draft_cache")
# The compiler takes long for wide passes of prompts, which exchange the same.
SHORT = {"prompt_length": 16}
# Targets with the 8B draft: how both lie, on 64 v5e, and what else is asked for.
PAIRS: dict[str, tuple[Any, ...]] = {
    "bfloat16": (LARGE, "tensor_whole", {}),
    "int8": (LARGE, "tensor", "tensor", {"int8": True, "rows": 8, **SHORT}),  # split over y
    # The cache is split by positions, and a draft is in every column.
    "long": (MIDDLE, "tensor_long", "narrow_whole", SHORT),
}


@functools.cache
def readmes_plan() -> Plan:
    """405B in bfloat16, by the README's command: every step."""
    plans: dict[str, Plan] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "make_plan", lambda *given: plans.setdefault("", make_plan(*given)))
        patch.setenv("JAX_PLATFORMS", "cpu")  # which the command sets for its process
        assert main(COMMAND.split()) == 0
    return plans[""]


def test_it_is_the_readmes_command() -> None:
    readme = Path(__file__).parents[2] / "README.md"
    assert f"\npython -m fly_jax.launch {COMMAND}\n" in readme.read_text(encoding="utf-8")


@functools.cache
def steps_of(name: str) -> dict[str, Step]:
    """The first steps of a pair, up to the round; all that the README's command shows."""
    if name == "bfloat16":
        return {step.name: step for step in readmes_plan().steps}
    target, *rules, sizes = PAIRS[name]
    spec = PlanSpec(target=target, draft=SMALL, chip=V5E, mesh=MESH, **sizes)
    devices = slice_mesh(V5E, MESH)
    layouts = Layouts(*(Layout(devices, RULES[one]) for one in rules), *rules)
    first = itertools.islice(compiled_steps(spec, layouts), STEPS.index("round") + 1)
    return {step.name: step for step in first}


def test_the_readmes_plan_has_every_step_and_lists_what_is_copied() -> None:
    plan = readmes_plan()
    assert [step.name for step in plan.steps] == list(STEPS)
    assert {step.source for step in plan.steps} == {"compiled"}
    assert (plan.fits, plan.remedies) == (True, ())
    held = sum(plan.memory()[f"{part}_bytes"] for part in HELD)
    # The compiler's arguments are the parameters and caches that shapes say, and little else.
    assert held <= plan.step("round").argument_bytes <= 1.01 * held
    assert min(plan.largest_batch, *(step.cycles or 0 for step in plan.steps)) >= 1
    for step in plan.steps:
        assert step.copies is not None
        assert not repeated(step.copies), step.name
    assert "Copies of a cache or a stack of matrices in a loop or a branch: none" in table(plan)
    keys = {"operation", "shape", "bytes", "count", "in_loop", "in_branch"}
    for step in plan.to_dict()["steps"].values():
        assert all(set(copy) <= keys for copy in step["copies"])


def test_a_prefill_that_does_not_fit_counts_all_that_is_held_and_says_what_travels() -> None:
    """Its program does not use the unembedding, which the engine holds all the same."""
    small = {"draft": preset("llama-3.2-1b"), "mesh": parse_mesh("2x4"), "context": 512}
    plan = make_plan(PlanSpec(target=MIDDLE, chip=V5E, **small))
    (prefill,) = plan.steps
    held = (*HELD, "prefill_cache")
    assert plan.peak_bytes >= sum(plan.memory()[f"{part}_bytes"] for part in held)
    assert (prefill.source, prefill.copies, plan.fits) == ("compiled", None, False)
    assert "Between chips" in table(plan)


@pytest.mark.parametrize(("name", "tokens"), [("verify", K + 1), ("autoregressive", 2)])
def test_a_layer_of_one_row_exchanges_twice(name: str, tokens: int) -> None:
    """A token alone is run twice. What is the same in all layers is not made anew in each."""
    found, program = (step := steps_of("bfloat16")[name]).exchanges, parse(step.hlo)
    layer = next(one.computation for one in frames(program) if one.count == LARGE.num_layers)
    kernels = [one for one in layer.instructions.values() if "_cycles" in one.attributes]
    assert 0 < len(kernels) <= 26, "masks, cosines, or the layer's index"
    in_layers = [one for one in found if one.count == LARGE.num_layers]
    assert [one.kind for one in in_layers] == ["all-reduce", "all-reduce"]
    assert {one.shapes for one in in_layers} == {((1, tokens, LARGE.embed_size),)}
    assert {one.count for one in found if one not in in_layers} == {1}
    assert len(found) <= 2 + 5, "the embedding, and a few numbers of evidence per position"


def test_sampling_costs_a_pass_four_exchanges_at_most() -> None:
    layout = Layout(slice_mesh(V5E, MESH), RULES["tensor_whole"])
    models = [abstract_model(one, layout) for one in (LARGE, SMALL)]
    hlo, capacity = round_hlo("sampled", models, rows=1, context=8192, num_speculative_tokens=K)
    assert not repeated(copied(hlo, models, 1, capacity))
    sent = [exchanges(hlo, layout.mesh.size), steps_of("bfloat16")["round"].exchanges]
    sampled, greedy = (sum(one.count for one in some) for some in sent)
    # K passes of the draft, and the target's, whose rejection of draft tokens takes one more.
    assert 0 < sampled - greedy <= 4 * (K + 1) + 1


def test_a_layer_of_split_rows_exchanges_four_times_and_of_split_positions_five() -> None:
    rows, positions = (
        [one for one in steps_of(name)["round"].exchanges if one.count == PAIRS[name][0].num_layers]
        for name in ("int8", "long")
    )
    assert sorted(one.kind for one in rows) == ["all-reduce"] * 2 + ["all-to-all"] * 2
    kinds = sorted(one.kind for one in positions)
    # Of the sum each device needs its own heads; older compilers reduce all of it for that.
    assert kinds[:4] == ["all-gather"] + ["all-reduce"] * 3
    assert kinds[4:] in (["all-reduce"], ["reduce-scatter"])


@pytest.mark.parametrize("name", PAIRS)
def test_every_step_fits_and_exchanges_no_vocabulary_matrix_or_cache(name: str) -> None:
    rows = PAIRS[name][-1].get("rows", 1)
    if name == "int8":  # matrices are read as such: nothing keeps a wide copy of them
        assert steps_of(name)["round"].argument_bytes < 8 * 2**30
        assert steps_of(name)["round"].temporary_bytes < 2**28
    for step in steps_of(name).values():
        assert 0 < step.peak_bytes <= V5E.memory_bytes, step.name
        if step.name == "insert" and rows > 1:  # rows move; longer prompts are run one by one
            continue
        tokens = {"autoregressive": 2 * rows, "prefill": 1024}.get(step.name, (K + 1) * rows)
        most = tokens * (LARGE.embed_size + SMALL.embed_size)
        assert bool(step.exchanges) == (step.name != "insert"), step.name
        for shape in (shape for one in step.exchanges for shape in one.shapes):
            assert not {LARGE.vocab_size, CAPACITY} & set(shape), (step.name, shape)
            assert math.prod(shape) <= most, (step.name, shape)


@pytest.mark.parametrize("name", PAIRS)
def test_caches_are_updated_in_place_and_a_weight_is_nowhere_copied_whole(name: str) -> None:
    """A stack of matrices in another order would not fit, and would take longer than the pass."""
    target, rules, *_, sizes = PAIRS[name]
    a_round, layout = steps_of(name)["round"], Layout(slice_mesh(V5E, MESH), RULES[rules])
    # What gives arrays of each type and shape, but within a fusion.
    made = collections.defaultdict[Any, set[str]](set)
    for frame in frames(parse(a_round.hlo)):
        for one in frame.computation.instructions.values():
            if not one.result.startswith("("):
                made[one.arrays[0][:2]].add(one.opcode)
    shape = cache_shape(target, sizes.get("rows", 1), CAPACITY)
    local = layout.sharding(CACHE_AXES, shape).shard_shape(shape)
    assert "dynamic-update-slice" in made["bf16", local]
    assert not made["bf16", local] & {"copy", "copy-start", "copy-done", "all-gather"}
    assert a_round.temporary_bytes < 2 * 2 * math.prod(local)
    matrices, kind = (INT8, "s8") if "int8" in sizes else (None, "bf16")
    for which, spec in parameter_specs(target, matrices).items():
        if spec.inputs and spec.axes[0] == "layers":
            own = layout.sharding(spec.axes, spec.shape).shard_shape(spec.shape)
            assert "parameter" in made[kind, own], f"{which} is not in the program"
            assert made[kind, own] <= {"parameter", "get-tuple-element", "bitcast"}, which
            assert not made[kind, (1, *own[1:])], f"{which} is copied, a layer at a time"
    # Of the target's pass and the draft's first and later ones: what is not split by its inputs.
    products = re.findall(r"= (\w+)\[[\d,]*\]\S* convolution\(", a_round.hlo)
    assert products.count("s32") == (3 * 6 if kind == "s8" else 0)
