"""Plans from shapes alone, their counts against those of XLA, and the model of speed."""

from __future__ import annotations

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import pytest

from fly_jax.engine.engine import Engine
from fly_jax.errors import FlyJaxError
from fly_jax.models import llama
from fly_jax.models.architectures import INT8, LlamaConfig, MatrixType, parameter_specs
from fly_jax.models.cache import empty_cache
from fly_jax.models.layouts import (
    Layouts,
    Workload,
    choose_layouts,
    parameter_bytes,
    pass_seconds,
    resident_bytes,
)
from fly_jax.models.llama import Llama
from fly_jax.models.presets import preset
from fly_jax.models.quantise import SELF_DRAFTS
from fly_jax.planning.alternatives import Drafters, SmallerDraft
from fly_jax.planning.hlo import Exchange
from fly_jax.planning.plan_spec import PlanSpec, abstract_mesh, default_round
from fly_jax.planning.plan_steps import abstract_model, abstract_state
from fly_jax.planning.planner import Plan, make_plan, table
from fly_jax.planning.roofline import (
    StepTimes,
    Work,
    acceptance_from,
    best_num_speculative_tokens,
    draft_passes,
    group_axes,
    mean_accepted,
    pass_work,
    roofline_seconds,
)
from fly_jax.sharding.chips import CHIPS, Chip, chip_of
from fly_jax.sharding.mesh import parse_mesh
from fly_jax.sharding.rules import RULES, Layout

V5E = CHIPS["v5e"]
LARGE, MIDDLE, SMALL = (preset(f"llama-3.1-{size}") for size in ("405b", "70b", "8b"))
TINY = preset("llama-3.2-1b")


def chosen(mesh: str, chip: Chip | None = V5E, **workload: int | MatrixType) -> Layouts:
    return choose_layouts(abstract_mesh(parse_mesh(mesh)), LARGE, SMALL, Workload(**workload), chip)


def test_how_a_target_is_split() -> None:
    # Merging softmax sums would take longer than reading the cache eight times.
    assert chosen("8x8").target_rules == "tensor_whole"
    assert chosen("8x8", capacity=131_072, matrices=INT8).target_rules == "tensor_long"
    assert chosen("8x8", rows=32, matrices=INT8).target_rules == "tensor"


def test_the_fastest_that_fits_is_chosen() -> None:
    mesh, workload, chip = abstract_mesh(parse_mesh("4x4")), Workload(rows=16), CHIPS["v6e"]
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
    assert chosen("2x2", None, rows=rows).draft_rules == "replicated"


SPEC = PlanSpec(target=LARGE, draft=SMALL, chip=V5E, mesh=parse_mesh("8x8"), compiles=False)


def weighed(plan: Plan) -> tuple[Drafters, dict[str, SmallerDraft]]:
    """The drafters of a plan that fits, and the smaller ones by name."""
    drafters = plan.drafters()
    return drafters, {one.name: one for one in drafters.smaller}


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(SPEC)


@pytest.mark.parametrize("rules", ["tensor", "tensor_long"])
@pytest.mark.parametrize(("rows", "prompt_length"), [(1, None), (6, 200), (9, 8000), (40, 30)])
def test_prompts_are_run_as_the_engine_runs_them(
    rules: str, rows: int, prompt_length: int | None
) -> None:
    spec = dataclasses.replace(SPEC, rows=rows, prompt_length=prompt_length)
    layout = Layout(abstract_mesh(spec.mesh), RULES[rules])
    models = [abstract_model(config, layout) for config in (spec.target, spec.draft)]
    sizes = {"num_slots": rows, "max_length": spec.context}
    engine = Engine(models[0], models[1:], spec.rounds, offline=True, **sizes)
    given, plan = (engine._prefill.plan, spec.chunk_plan(layout))
    groups = plan.groups(spec.prefilled, rows)
    assert groups == given.groups(spec.prefilled, rows)
    assert sum(chunks[0].rows * times for chunks, times in groups) >= rows
    for chunks, _ in groups:
        assert given.positions(chunks[0].rows) == plan.positions(chunks[0].rows)
        assert chunks[-1].start + chunks[-1].size >= spec.prefilled
    held = abstract_state(engine.trace_slots(), [layout, layout]).target
    assert held.capacity == spec.workload.capacity


def test_every_layout_and_type_of_the_draft_is_timed(plan: Plan) -> None:
    drafters, _ = weighed(plan)
    passes = {(one.rules, one.matrices): one for one in drafters.passes}
    assert set(passes) == {(rules, kind) for rules in RULES for kind in ("bfloat16", "int8")}
    assert not passes["replicated", "bfloat16"].fits, "8B is not held whole beside 405B"
    assert plan.fits
    assert plan.layouts.draft_rules != "replicated"
    assert passes["replicated", "int8"].network_seconds == 0
    for rules in RULES:
        wide, narrow = passes[rules, "bfloat16"], passes[rules, "int8"]
        assert narrow.seconds < wide.seconds
        assert narrow.network_seconds == pytest.approx(wide.network_seconds)
        assert narrow.num_bytes < wide.num_bytes


def test_a_smaller_draft_pays_where_its_tokens_a_second_are_the_same(plan: Plan) -> None:
    drafters, smaller = weighed(plan)
    assert set(smaller) == {"pard-llama-3.2-1b", "llama-3.2-1b", "llama-3.2-3b"}
    least, more = smaller["llama-3.2-1b"], smaller["llama-3.2-3b"]
    at_once = smaller["pard-llama-3.2-1b"]  # of the same size, in one pass
    assert 1 < at_once.pays_from < least.pays_from < more.pays_from < plan.mean_accepted
    one_pass = at_once.round_seconds - plan.step("verify").seconds
    assert one_pass == pytest.approx(at_once.best.seconds)
    assert one_pass < (least.round_seconds - plan.step("verify").seconds) / 10
    given = next(one for one in drafters.passes if one.fits and one.matrices == "bfloat16")
    a_round = plan.step("verify").seconds + SPEC.num_speculative_tokens * given.seconds
    assert least.pays_from / least.round_seconds == pytest.approx(plan.mean_accepted / a_round)
    # With fewer draft tokens the draft weighs less, and a smaller one pays later.
    short = dataclasses.replace(SPEC, rounds=default_round(5), mean_accepted_tokens=4.0)
    shorter, _ = weighed(make_plan(short))
    assert shorter.smaller[0].pays_from / 4.0 > least.pays_from / plan.mean_accepted


@pytest.mark.parametrize(
    ("target", "draft", "vocab_size", "proposed"),
    [
        ("llama-2-70b", "llama-2-7b", 32_000, set()),
        # Their vocabularies are padded apart; a Qwen 3 has other tokens behind the same size.
        ("qwen-2.5-72b", "qwen-2.5-1.5b", 151_936, {"qwen-2.5-0.5b"}),
    ],
)
def test_smaller_models_of_the_same_family_are_proposed(
    target: str, draft: str, vocab_size: int, proposed: set[str]
) -> None:
    spec = dataclasses.replace(SPEC, target=preset(target), draft=preset(draft), context=2048)
    plan = make_plan(spec)
    assert plan.spec.target.vocab_size == plan.spec.draft.vocab_size == vocab_size
    assert {name for name in weighed(plan)[1] if not name.startswith("self:")} == proposed


def test_a_targets_own_matrices_are_weighed_where_they_fit(plan: Plan) -> None:
    """An int4 pass reads less than an int8 one, and the network is the same."""
    sizes = {"rounds": default_round(8), "mean_accepted_tokens": 8.0}
    spec = dataclasses.replace(SPEC, target=MIDDLE, draft=MIDDLE, **sizes)
    _, smaller = weighed(make_plan(spec))
    assert all(one.pays_from <= 9 for one in smaller.values()), "more no round settles"
    assert {name for name in smaller if "self" in name} == {"self:int8", "self:int4"}
    int8, int4 = smaller["self:int8"].best, smaller["self:int4"].best
    assert int4.num_bytes < int8.num_bytes
    assert int4.seconds < int8.seconds
    assert int4.network_seconds == pytest.approx(int8.network_seconds)
    assert not [name for name in weighed(plan)[1] if "self" in name]


def own_draft(target: LlamaConfig, kind: str) -> Plan:
    """A plan that fits four chips, of a model that drafts for itself."""
    changes = {"self_draft": SELF_DRAFTS[kind], "context": 4096, "mesh": parse_mesh("2x2")}
    plan = make_plan(dataclasses.replace(SPEC, target=target, draft=target, **changes))
    assert plan.fits
    return plan


@pytest.mark.parametrize("name", SELF_DRAFTS)
def test_a_plan_with_a_targets_own_draft(name: str) -> None:
    plan = own_draft(SMALL, name)
    assert plan.layouts.draft_rules == plan.layouts.target_rules
    memory = plan.memory()
    # Of the target's matrices, without the embedding and the unembedding that both share.
    shared = 2 * SMALL.vocab_size * SMALL.embed_size * 2 / 4
    per_byte = {"int8": 1 / 2, "int4": (1 / 2 + 4 / 64) / 2}[name]
    assert memory["draft_parameter_bytes"] == pytest.approx(
        (memory["parameter_bytes"] - shared) * per_byte, rel=0.01
    )
    assert [one.matrices for one in weighed(plan)[0].passes] == [name]
    assert name in table(plan)


@pytest.mark.parametrize(
    "name",
    ["mistral-7b", "qwen-2.5-7b", "qwen-3-8b", "smollm2-1.7b", "smollm3-3b",
     "deepseek-r1-distill-qwen-7b", "deepseek-r1-distill-llama-8b"],
)  # fmt: skip
def test_every_family_is_planned(name: str) -> None:
    target = preset(name)
    a_quarter = 2 * sum(math.prod(spec.shape) for spec in parameter_specs(target).values()) / 4
    # All is split over the four chips, but for what their number does not divide.
    assert 0.99 < own_draft(target, "int4").memory()["parameter_bytes"] / a_quarter < 1.15


def test_the_table_and_json_have_them(plan: Plan) -> None:
    assert all(
        words in table(plan) for words in ("counted from shapes", "llama-3.2-1b", "pays from")
    )
    drafters = json.loads(json.dumps(plan.to_dict()))["drafters"]
    found = {one["name"] for one in drafters["smaller"]}
    assert found == {"pard-llama-3.2-1b", "llama-3.2-1b", "llama-3.2-3b"}
    assert set(drafters["passes"][0]) == {
        "rules", "matrices", "seconds", "network_seconds", "num_bytes", "fits",
    }  # fmt: skip


SIZES = {"vocab_size": 512, "num_layers": 4, "num_heads": 8, "num_kv_heads": 4, "head_size": 16}
CONFIG = LlamaConfig(**SIZES, embed_size=128, ffw_size=384, max_context=256)
PARD = dataclasses.replace(CONFIG, pard_token=3)
WORKLOAD = Workload(rows=2, capacity=128)
ONE = Layout(abstract_mesh(parse_mesh("1x1")), RULES["tensor"])


def analysed_flops(model: Llama, tokens: int) -> float:
    def step(model_parameters: dict, tokens: jax.Array) -> jax.Array:
        model = Llama(CONFIG, model_parameters)
        cache = empty_cache(CONFIG, WORKLOAD.rows, WORKLOAD.capacity, jnp.float32)
        return model.logits(model.hidden(tokens, cache)[0])

    given = jnp.zeros((WORKLOAD.rows, tokens), jnp.int32)
    compiled = jax.jit(step).lower(model.parameters(), given).compile()
    return float(compiled.cost_analysis()["flops"])


# A CPU multiplies tokens, which are of two rows here, by fours or eights (`llama.in_front`).
@pytest.mark.parametrize(("tokens", "multiplied"), [(1, 4), (4, 8), (9, 24), (12, 24)])
def test_operations_are_those_of_xla_where_no_loop_hides_them(
    tokens: int, multiplied: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama, "_CACHED_BYTES", 0)  # as of a model that is none too small for it
    model = Llama.random(CONFIG, jax.random.key(0))
    counted = pass_work(ONE, CONFIG, WORKLOAD, tokens).flops * multiplied / (2 * tokens)
    # Norms, softmax and rotations are not products, and are not counted.
    assert counted == pytest.approx(analysed_flops(model.unstacked(), tokens), rel=0.08)
    assert analysed_flops(model, tokens) < counted / 2, "XLA counts a scanned layer once"


def test_bytes_are_every_parameter_and_the_cache() -> None:
    config = preset("llama-3.1-70b")
    layout = Layout(abstract_mesh(parse_mesh("8")), RULES["tensor_whole"])
    wide, int8 = (
        pass_work(layout, config, Workload(rows=1, capacity=8192, matrices=one), 1).num_bytes
        for one in (None, INT8)
    )
    embedding = 128_256 * 8192 * 2 / 8
    cache = 80 * 8192 * 8 * 128 * 2 * 2 / 8
    assert wide == pytest.approx(parameter_bytes(layout, config) - embedding + cache, rel=1e-3)
    assert int8 - cache == pytest.approx((wide - cache) / 2, rel=1e-2)


def test_what_a_mesh_splits_is_split() -> None:
    config = preset("llama-3.1-405b")
    alone = pass_work(ONE, config, WORKLOAD, 26)
    for rules in ("tensor_whole", "tensor_long"):
        pod = Layout(abstract_mesh(parse_mesh("8x8")), RULES[rules])
        split = pass_work(pod, config, WORKLOAD, 26)
        # Keys and values are projected in every column of y: 1 in 9 of attention's products.
        assert alone.flops / 64 < split.flops < 1.1 * alone.flops / 64


def test_a_draft_is_k_passes_of_which_the_first_feeds_two_tokens() -> None:
    assert draft_passes([CONFIG], 5) == ({2: 1, 1: 4},)
    assert draft_passes([PARD], 5) == ({10: 1},)


def test_a_level_below_shortens_the_passes_above_it_by_what_it_gives() -> None:
    """25 tokens: one from the first pass, and 4 from each pass over a proposal of 6."""
    assert draft_passes([CONFIG, PARD], 25, 6, 4.0) == ({2: 1, 7: 6}, {12: 6})
    assert draft_passes([CONFIG, CONFIG], 25, 6, 4.0) == ({2: 1, 7: 6}, {4: 6, 1: 30})
    below_both = draft_passes([CONFIG, CONFIG, PARD], 25, 3, 2.0)
    assert below_both == ({2: 1, 4: 12}, {4: 12 + 12}, {6: 12})
    head = preset("eagle3-llama-3.1-8b")
    assert draft_passes([head], 5) == ({6: 1, 1: 4},)
    assert draft_passes([CONFIG, head], 25, 6, 4.0) == ({2: 1, 7: 6}, {10: 6, 1: 30})


def test_roofline_is_memory_or_arithmetic_and_then_the_network() -> None:
    chip = CHIPS["v5e"]
    sizes = {"x": 8, "y": 8}
    reads = Work(flops=1.0, num_bytes=819e9)
    assert roofline_seconds(reads, [], chip, sizes) == pytest.approx(1.0)
    assert roofline_seconds(Work(2 * 197e12, 1.0), [], chip, sizes) == pytest.approx(2.0)
    sums = Exchange("all-reduce", ((1,),), 0, 64, 1000)
    # Two phases of half the way around both axes, a microsecond a hop.
    assert roofline_seconds(reads, [sums], chip, sizes) == pytest.approx(1 + 1000 * 16e-6)
    wide = dataclasses.replace(sums, kind="all-gather", num_bytes=8 * 10**8, group_size=8)
    assert roofline_seconds(Work(0, 0), [wide], chip, sizes) == pytest.approx(
        1000 * (4e-6 + 7e8 / 100e9)
    )


def test_groups_are_found_on_the_mesh() -> None:
    sums = Exchange("all-reduce", ((1,),), 4, 16, 1)
    assert group_axes(sums, {"data": 2, "x": 4, "y": 4}) == ([4, 4], 1)
    assert group_axes(dataclasses.replace(sums, group_size=2), {"data": 2, "x": 4}) == ([2], 4)
    assert group_axes(dataclasses.replace(sums, group_size=3), {"x": 4}) == ([3], 1)
    known = dataclasses.replace(sums, group_size=4, axes=("y",))
    assert group_axes(known, {"x": 4, "y": 4}) == ([4], 1)
    assert group_axes(dataclasses.replace(known, axes=("x",)), {"x": 4, "y": 4}) == ([4], 4)


def test_an_exchange_beyond_one_switch_passes_the_network_with_a_share() -> None:
    chip = CHIPS["h200"]  # 8 behind a switch of 450 GB/s, and 50 GB/s each beyond it
    within = 2 * (5e-6 + 8e6 * 7 / 8 / 450e9)
    assert chip.exchange_seconds("all-reduce", 8e6, [8]) == pytest.approx(within)
    beyond = 2 * (1e-5 + 1e6 * 3 / 4 / 50e9)
    assert chip.exchange_seconds("all-reduce", 8e6, [4, 8]) == pytest.approx(within + beyond)
    # Groups of one chip of each switch have nothing but the network.
    assert chip.exchange_seconds("all-gather", 8e6, [4], 8) == pytest.approx(
        1e-5 + 8e6 * 3 / 4 / 50e9
    )
    away = chip.exchange_seconds("all-to-all", 8e6, [2, 8])
    assert away == pytest.approx(5e-6 + 7e6 / 450e9 + 1e-5 + 4e6 / 50e9)


def test_scores_that_do_not_stay_in_the_chip_are_written_and_read() -> None:
    config = preset("llama-3.1-70b")
    layout = Layout(abstract_mesh(parse_mesh("8")), RULES["tensor_whole"])
    sizes = (layout, config, Workload(rows=1, capacity=8192))
    a_layer = 4 * 8192 * config.num_heads / 8  # of one token, in float32
    for tokens, spilled in ((26, False), (1024, True)):
        inside = pass_work(*sizes, tokens)
        counted = pass_work(*sizes, tokens, vector_memory=CHIPS["v5e"].vector_memory)
        more = 2 * a_layer * tokens * config.num_layers if spilled else 0
        assert counted.num_bytes - inside.num_bytes == pytest.approx(more)
        assert counted.flops == inside.flops


def test_chips_are_known_by_what_jax_calls_them() -> None:
    names = {
        "TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p", "TPU v6 lite": "v6e",
        "NVIDIA H100 80GB HBM3": "h100", "NVIDIA H200": "h200",
    }  # fmt: skip
    assert {kind: chip_of(kind) for kind in names} == {
        kind: CHIPS[name] for kind, name in names.items()
    }
    assert chip_of("cpu") is None


def test_mean_accepted_is_the_sum_over_prefixes() -> None:
    assert mean_accepted(0.8, 3) == pytest.approx(1 + 0.8 + 0.8**2 + 0.8**3)
    assert (mean_accepted(0.0, 9), mean_accepted(1.0, 9)) == (1, 10)


@pytest.mark.parametrize(("mean", "drafted"), [(1.0, 4), (12.41, 15), (17.13, 25), (6.0, 5)])
def test_acceptance_gives_the_mean_back(mean: float, drafted: int) -> None:
    assert mean_accepted(acceptance_from(mean, drafted), drafted) == pytest.approx(mean, rel=1e-6)


@pytest.mark.parametrize("mean", [0.5, 6.5])
def test_a_mean_beyond_the_block_is_refused(mean: float) -> None:
    with pytest.raises(FlyJaxError, match="1 to 6"):
        acceptance_from(mean, 5)


def test_best_k_is_the_best_of_all_and_a_free_draft_gives_a_block_for_a_pass() -> None:
    times = StepTimes(draft_pass=0.1, verify=1.0, autoregressive=1.0)
    best, speed_up = best_num_speculative_tokens(times, 0.8, 10)
    speeds = [mean_accepted(0.8, k) / (1 + 0.1 * k) for k in range(1, 40)]
    assert best == 1 + speeds.index(max(speeds))
    assert speed_up == pytest.approx(max(speeds))
    free = StepTimes(draft_pass=0.0, verify=2.0, autoregressive=2.0)
    assert free.speed_up(9, 10.0) == pytest.approx(10.0)
