"""Plans from shapes alone, their counts against those of XLA, and the model of speed."""

import dataclasses
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from golden import pod_layout
from launch_types import Patch
from refusals import assert_refused

from fly_jax import Pair, Workload, empty_cache, preset
from fly_jax.engine.engine import Engine
from fly_jax.models import layouts, llama
from fly_jax.models.architectures import INT8, LlamaConfig, MatrixType, parameter_specs
from fly_jax.models.layouts import Layouts, choose_layouts, pass_seconds, resident_bytes
from fly_jax.models.llama import Llama
from fly_jax.models.quantise import SELF_DRAFTS
from fly_jax.planning import roofline
from fly_jax.planning.alternatives import SmallerDraft
from fly_jax.planning.hlo import Exchange
from fly_jax.planning.plan_spec import PlanSpec, abstract_model, default_round
from fly_jax.planning.plan_steps import abstract_state
from fly_jax.planning.planner import Plan, make_plan, table
from fly_jax.planning.roofline import Work, mean_accepted, pass_work, roofline_seconds
from fly_jax.sharding.chips import CHIPS, Chip, chip_of
from fly_jax.sharding.mesh import parse_mesh
from fly_jax.sharding.rules import RULES
from fly_jax.verification.rules.loosened import Margin

V5E = CHIPS["v5e"]
LARGE, MIDDLE, SMALL = (preset(f"llama-3.1-{size}") for size in ("405b", "70b", "8b"))
TINY = preset("llama-3.2-1b")
ROW = pod_layout("8", "tensor_whole")


def chosen(mesh: str, chip: Chip | None = V5E, **workload: int | MatrixType) -> Layouts:
    return choose_layouts(pod_layout(mesh).mesh, LARGE, SMALL, Workload(**workload), chip)


def test_how_a_target_is_split() -> None:
    # Merging softmax sums would take longer than reading the cache eight times.
    assert chosen("8x8").target_rules == "tensor_whole"
    assert chosen("8x8", capacity=131_072, matrices=INT8).target_rules == "tensor_long"
    assert chosen("8x8", rows=32, matrices=INT8).target_rules == "tensor"


def test_the_fastest_that_fits_is_chosen() -> None:
    workload, chip = Workload(rows=16), CHIPS["v6e"]
    found = choose_layouts(pod_layout("4x4").mesh, MIDDLE, TINY, workload, chip)
    best = pass_seconds(found.draft, TINY, workload, chip)
    held = resident_bytes(found.target, MIDDLE, workload)
    for name in RULES:
        layout = pod_layout("4x4", name)
        if held + resident_bytes(layout, TINY, workload) < 0.95 * chip.memory_bytes:
            assert best <= pass_seconds(layout, TINY, workload, chip), name


def test_where_nothing_fits_the_smallest_is_chosen() -> None:
    lies = [pod_layout("2x2", name) for name in ("tensor", "tensor_long", "tensor_whole")]
    lies.append(chosen("2x2", rows=2).target)
    held = [resident_bytes(layout, LARGE, Workload(rows=2)) for layout in lies]
    assert held[-1] == min(held)


def test_unknown_devices_save_memory() -> None:
    for rows, rules in ((1, "tensor_long"), (8, "tensor"), (16, "tensor")):
        found = chosen("8x8", None, rows=rows)
        # The draft is larger than the target's share.
        assert found.target_rules == found.draft_rules == rules
        assert chosen("2x2", None, rows=rows).draft_rules == "replicated"


SPEC = PlanSpec(target=LARGE, draft=SMALL, chip=V5E, mesh=parse_mesh("8x8"), compiles=False)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(SPEC)


def planned(**changes: Any) -> Plan:
    return make_plan(dataclasses.replace(SPEC, **changes))


def smaller(plan: Plan) -> dict[str, SmallerDraft]:
    """Smaller drafts, by name, for a plan that fits."""
    return {one.name: one for one in plan.drafters().smaller}


@pytest.mark.parametrize(("drafts", "k", "context", "rules", "rows", "prompt_length"), [
    (["llama-3.1-8b"], 25, 8167, "tensor", 1, None),
    (["pard-llama-3.2-1b"], 40, 8112, "tensor_long", 6, 200),
    (["llama-3.1-8b", "pard-llama-3.2-1b"], 25, 8151, "tensor", 9, 8000),
    (["llama-3.1-8b", "eagle3-llama-3.1-8b"], 25, 8156, "tensor_long", 40, 30),
])  # fmt: skip
def test_prompts_are_run_and_caches_have_room_as_in_the_engine(
    drafts: list[str], k: int, context: int, rules: str, rows: int, prompt_length: int | None
) -> None:
    """With contexts of which one position less of room would be a step less of capacity."""
    rounds = default_round(k).with_static(level_speculative_tokens=(8,) * (len(drafts) - 1))
    draft, *below = map(preset, drafts)
    given = {"draft": draft, "below": tuple(below), "rounds": rounds, "context": context}
    spec = dataclasses.replace(SPEC, **given, rows=rows, prompt_length=prompt_length)
    layout = pod_layout("8x8", rules)
    models = [abstract_model(one, layout) for one in (spec.target, *spec.drafts)]
    engine = spec.engine(models, rounds)
    assert engine._capacity == spec.workload.capacity
    held = abstract_state(engine.trace_slots(), [layout] * len(models)).target
    assert held.capacity == spec.workload.capacity
    given, plan = engine._prefill.plan, spec.chunk_plan(layout)
    groups = plan.groups(spec.prefilled, rows)
    assert groups == given.groups(spec.prefilled, rows)
    assert sum(chunks[0].rows * times for chunks, times in groups) >= rows
    for chunks, _ in groups:
        assert given.positions(chunks[0].rows) == plan.positions(chunks[0].rows)
        assert chunks[-1].start + chunks[-1].size >= spec.prefilled


@pytest.mark.parametrize("served", [{"prefill_chunk": 64, "rules": (Margin(),)}, {}])
def test_a_plans_engine_is_that_of_the_commands(pair: Pair, served: dict[str, Any]) -> None:
    is_served = bool(served)
    sizes = {"num_slots": 2, "max_length": 96, "audits": is_served, "offline": not is_served}
    made = Engine.of(pair, **sizes, **served)
    models = [pair.target, *pair.drafts]
    given = {"target": models[0].config, "draft": models[1].config, "mesh": parse_mesh("1")}
    spec = PlanSpec(**given, chip=V5E, rows=2, context=96, **served)
    planned = spec.engine(models, pair.spec(audits=is_served))
    assert made.spec.static == planned.spec.static
    for name in ("max_length", "_capacity", "_row_steps"):
        assert getattr(made, name) == getattr(planned, name)
    assert vars(made._prefill.plan) == vars(planned._prefill.plan)


def test_every_layout_and_type_of_the_draft_is_timed(plan: Plan) -> None:
    passes = {(one.rules, one.matrices): one for one in plan.drafters().passes}
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
    names = ["pard-llama-3.2-1b", "llama-3.2-1b", "llama-3.2-3b"]
    found, verify = smaller(plan), plan.step("verify").seconds
    assert set(found) == set(names)
    at_once, least, more = map(found.get, names)  # the first in one pass
    assert 1 < at_once.pays_from < least.pays_from < more.pays_from < plan.spec.accepted[0]
    assert at_once.round_seconds - verify == pytest.approx(at_once.best.seconds)
    assert at_once.best.seconds < (least.round_seconds - verify) / 10
    passes = (one for one in plan.drafters().passes if one.fits and one.matrices == "bfloat16")
    a_round = verify + SPEC.num_speculative_tokens * next(passes).seconds
    assert least.pays_from / least.round_seconds == pytest.approx(plan.spec.accepted[0] / a_round)
    # With fewer draft tokens the draft weighs less, and a smaller one pays later.
    short = planned(rounds=default_round(5), mean_accepted_tokens=4.0).drafters().smaller[0]
    assert short.pays_from / 4.0 > least.pays_from / plan.spec.accepted[0]
    assert all(words in table(plan) for words in ("llama-3.2-1b", "pays from"))
    said = json.loads(json.dumps(plan.to_dict()))["drafters"]
    assert {one["name"] for one in said["smaller"]} == set(names)
    keys = {"rules", "matrices", "seconds", "network_seconds", "num_bytes", "fits"}
    assert set(said["passes"][0]) == keys


@pytest.mark.parametrize(("pair", "vocab_size", "proposed"), [
    (("llama-2-70b", "llama-2-7b"), 32_000, set()),
    # Their vocabularies are padded apart; a Qwen 3 has other tokens behind the same size.
    (("qwen-2.5-72b", "qwen-2.5-1.5b"), 151_936, {"qwen-2.5-0.5b"}),
])  # fmt: skip
def test_smaller_models_of_a_family(pair: tuple[str, str], vocab_size: int, proposed: set) -> None:
    models = {"target": preset(pair[0]), "draft": preset(pair[1]), "context": 2048}
    assert not smaller(planned(**models)), "of this pair no mean is published"
    plan = planned(**models, mean_accepted_tokens=17.0)
    assert plan.spec.target.vocab_size == plan.spec.draft.vocab_size == vocab_size
    assert {name for name in smaller(plan) if not name.startswith("self:")} == proposed


def test_a_targets_own_matrices_are_weighed_where_they_fit(plan: Plan) -> None:
    """An int4 pass reads less than an int8 one, and the network is the same."""
    short = {"rounds": default_round(8), "mean_accepted_tokens": 8.0}
    found = smaller(planned(target=MIDDLE, draft=MIDDLE, **short))
    assert all(one.pays_from <= 9 for one in found.values()), "more no round settles"
    assert {name for name in found if "self" in name} == {"self:int8", "self:int4"}
    int8, int4 = found["self:int8"].best, found["self:int4"].best
    assert int4.num_bytes < int8.num_bytes
    assert int4.seconds < int8.seconds
    assert int4.network_seconds == pytest.approx(int8.network_seconds)
    assert not [name for name in smaller(plan) if "self" in name]


FAMILIES = ("llama-3.1-8b", "mistral-7b", "qwen-2.5-7b", "qwen-3-8b", "smollm2-1.7b", "smollm3-3b")


@pytest.mark.parametrize(
    ("name", "kind"), [("llama-3.1-8b", "int8"), *((name, "int4") for name in FAMILIES)]
)
def test_every_family_is_planned_with_its_own_matrices_as_its_draft(name: str, kind: str) -> None:
    target, sizes = preset(name), {"context": 4096, "mesh": parse_mesh("2x2")}
    plan = planned(target=target, draft=target, self_draft=SELF_DRAFTS[kind], **sizes)
    assert plan.fits
    assert plan.layouts.draft_rules == plan.layouts.target_rules
    assert [one.matrices for one in plan.drafters().passes] == [kind]
    assert kind in table(plan)
    held, drafting = (plan.memory()[f"{one}parameter_bytes"] for one in ("", "draft_"))
    a_quarter = 2 * sum(math.prod(spec.shape) for spec in parameter_specs(target).values()) / 4
    # All is split over the four chips, but for what their number does not divide.
    assert 0.99 < held / a_quarter < 1.15
    # Of the matrices, without the embedding and the unembedding that both share.
    shared = (1 if target.tied_embeddings else 2) * target.vocab_size * target.embed_size * 2 / 4
    per_byte = {"int8": 1 / 2, "int4": (1 / 2 + 4 / 64) / 2}[kind]
    assert drafting == pytest.approx((held - shared) * per_byte, rel=0.01)


SIZES = {"vocab_size": 512, "num_layers": 4, "num_heads": 8, "num_kv_heads": 4, "head_size": 16}
CONFIG = LlamaConfig(**SIZES, embed_size=128, ffw_size=384, max_context=256)
PARD, HEAD = dataclasses.replace(CONFIG, pard_token=3), preset("eagle3-llama-3.1-8b")
WORKLOAD = Workload(rows=2, capacity=128)
ONE = pod_layout("1x1", "tensor")


def analysed_flops(model: Llama, tokens: int) -> float:
    def step(model_parameters: dict, tokens: jax.Array) -> jax.Array:
        model = Llama(CONFIG, model_parameters)
        cache = empty_cache(CONFIG, WORKLOAD.rows, WORKLOAD.capacity, jnp.float32)
        return model.logits(model.hidden(tokens, cache)[0])

    given = (model.parameters(), jnp.zeros((WORKLOAD.rows, tokens), jnp.int32))
    return float(jax.jit(step).lower(*given).compile().cost_analysis()["flops"])


# A CPU multiplies tokens, which are of two rows here, by fours or eights (`llama.in_front`).
@pytest.mark.parametrize(("tokens", "multiplied"), [(1, 4), (4, 8), (9, 24), (12, 24)])
def test_operations_are_those_of_xla(tokens: int, multiplied: int, monkeypatch: Patch) -> None:
    monkeypatch.setattr(llama, "_CACHED_BYTES", 0)  # as of a model that is none too small for it
    model = Llama.random(CONFIG, jax.random.key(0))
    counted = pass_work(ONE, CONFIG, WORKLOAD, tokens).flops * multiplied / (2 * tokens)
    # Norms, softmax and rotations are not products, and are not counted.
    assert counted == pytest.approx(analysed_flops(model.unstacked(), tokens), rel=0.08)
    assert analysed_flops(model, tokens) < counted / 2, "XLA counts a scanned layer once"


def test_bytes_are_every_parameter_and_the_cache() -> None:
    workloads = (Workload(rows=1, capacity=8192, matrices=one) for one in (None, INT8))
    wide, int8 = (pass_work(ROW, MIDDLE, one, 1).num_bytes for one in workloads)
    embedding = 128_256 * 8192 * 2 / 8
    cache = 80 * 8192 * 8 * 128 * 2 * 2 / 8
    held = layouts.parameter_bytes(ROW, MIDDLE)
    assert wide == pytest.approx(held - embedding + cache, rel=1e-3)
    assert int8 - cache == pytest.approx((wide - cache) / 2, rel=1e-2)


@pytest.mark.parametrize("rules", ["tensor_whole", "tensor_long"])
def test_what_a_mesh_splits_is_split(rules: str) -> None:
    both = (ONE, pod_layout("8x8", rules))
    alone, split = (pass_work(layout, LARGE, WORKLOAD, 26).flops for layout in both)
    # Keys and values are projected in every column of y: 1 in 9 of attention's products.
    assert alone / 64 < split < 1.1 * alone / 64


def test_a_draft_is_k_passes_and_a_level_below_shortens_those_above_it() -> None:
    passes = roofline.draft_passes
    # The first one feeds two tokens, and a head's all that may have been settled.
    assert passes([CONFIG], 5) == ({2: 1, 1: 4},)
    assert passes([PARD], 5) == ({10: 1},)
    assert passes([HEAD], 5) == ({6: 1, 1: 4},)
    # 25 tokens: one from the first pass, and 4 from each pass over a proposal of 6.
    assert passes([CONFIG, PARD], 25, 6, 4.0) == ({2: 1, 7: 6}, {12: 6})
    assert passes([CONFIG, CONFIG], 25, 6, 4.0) == ({2: 1, 7: 6}, {4: 6, 1: 30})
    assert passes([CONFIG, HEAD], 25, 6, 4.0) == ({2: 1, 7: 6}, {10: 6, 1: 30})
    assert passes([CONFIG, CONFIG, PARD], 25, 3, 2.0) == ({2: 1, 4: 12}, {4: 12 + 12}, {6: 12})
    assert_refused("has 0 numbers", planned, below=(TINY,), level_accepted_tokens=2.0)
    plan = planned(rows=64, int8=True)  # arithmetic bounds one pass, and memory the other
    parts = plan.step("draft").seconds + plan.step("verify").seconds
    assert plan.step("round").seconds == pytest.approx(parts)


def test_a_head_holds_features_beside_its_cache() -> None:
    """4096 numbers of a position beside keys and values of 8 heads of 128."""
    given = ROW, HEAD, Workload(rows=2, capacity=512)
    held, read = layouts.held_cache_bytes(*given), layouts.cache_bytes(*given)
    assert held == 3 * read == 3 * 2 * 512 * 2 * 8 * 128 * 2 // 8


def test_roofline_is_memory_or_arithmetic_and_then_the_network() -> None:
    def seconds(work: Work, *sent: Exchange, size: int = 16) -> float:
        return roofline_seconds([work], sent, V5E, {"x": size, "y": size})

    reads = Work(flops=1.0, num_bytes=819e9)
    assert seconds(reads) == pytest.approx(1.0)
    assert seconds(Work(2 * 197e12, 1.0)) == pytest.approx(2.0)
    sums = [Exchange("all-reduce", ((1,),), 0, size, 1000) for size in (256, 64)]
    # Two phases of half the way around both axes, a microsecond a hop; 8 chips are no ring.
    assert seconds(reads, sums[0]) == pytest.approx(1 + 1000 * 32e-6)
    assert seconds(reads, sums[1], size=8) == pytest.approx(1 + 1000 * 28e-6)
    wide = [Exchange("all-gather", ((1,),), size * 10**8, size, 1000) for size in (16, 8)]
    assert seconds(Work(0, 0), wide[0]) == pytest.approx(1000 * (8e-6 + 15e8 / 100e9))
    assert seconds(Work(0, 0), wide[1], size=8) == pytest.approx(1000 * (7e-6 + 7e8 / 50e9))


def test_groups_are_found_on_the_mesh() -> None:
    def groups(size: int, axes: tuple[str, ...] = (), **mesh: int) -> tuple[list[int], int]:
        return roofline.group_axes(Exchange("all-reduce", ((1,),), 4, size, 1, axes), mesh)

    assert groups(16, data=2, x=4, y=4) == ([4, 4], 1)
    assert groups(2, data=2, x=4) == ([2], 4)
    assert groups(3, x=4) == ([3], 1)
    assert groups(4, ("y",), x=4, y=4) == ([4], 1)
    assert groups(4, ("x",), x=4, y=4) == ([4], 4)


def test_an_exchange_beyond_one_switch_passes_the_network_with_a_share() -> None:
    seconds = CHIPS["h200"].exchange_seconds  # 8 at 450 GB/s, and 50 GB/s each beyond the switch
    within = 2 * (5e-6 + 8e6 * 7 / 8 / 450e9)
    assert seconds("all-reduce", 8e6, [8]) == pytest.approx(within)
    beyond = 2 * (1e-5 + 1e6 * 3 / 4 / 50e9)
    assert seconds("all-reduce", 8e6, [4, 8]) == pytest.approx(within + beyond)
    # Groups of one chip of each switch have nothing but the network.
    assert seconds("all-gather", 8e6, [4], 8) == pytest.approx(1e-5 + 8e6 * 3 / 4 / 50e9)
    away = 5e-6 + 7e6 / 450e9 + 1e-5 + 4e6 / 50e9
    assert seconds("all-to-all", 8e6, [2, 8]) == pytest.approx(away)


def test_a_torus_sums_as_it_scatters_and_gathers() -> None:
    seconds = CHIPS["v5e"].exchange_seconds
    for sizes in ([8], [16], [8, 8]):
        both = seconds("reduce-scatter", 1e6 / math.prod(sizes), sizes)
        both += seconds("all-gather", 1e6, sizes)
        assert seconds("all-reduce", 1e6, sizes) == pytest.approx(both)
    # What 4 of 8 chips have for the other 4 passes the middle of an axis with two ends.
    assert seconds("all-to-all", 2e6, [8]) == pytest.approx(7e-6 + 4e6 / 50e9)


def test_scores_that_do_not_stay_in_the_chip_are_written_and_read() -> None:
    sizes = (ROW, MIDDLE, Workload(rows=1, capacity=8192))
    a_token = 4 * 8192 * MIDDLE.num_heads / 8 * MIDDLE.num_layers  # in float32
    for tokens, times in ((26, 0), (1024, 2)):
        inside = pass_work(*sizes, tokens)
        counted = pass_work(*sizes, tokens, vector_memory=V5E.vector_memory)
        assert counted.num_bytes - inside.num_bytes == pytest.approx(times * a_token * tokens)
        assert counted.flops == inside.flops


def test_chips_are_known_by_what_jax_calls_them() -> None:
    names = {
        "TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p", "TPU v6 lite": "v6e",
        "NVIDIA H100 80GB HBM3": "h100", "NVIDIA H200": "h200",
    }  # fmt: skip
    assert all(chip_of(kind) is CHIPS[name] for kind, name in names.items())
    assert chip_of("cpu") is None


def test_mean_accepted_is_the_sum_over_prefixes() -> None:
    assert mean_accepted(0.8, 3) == pytest.approx(1 + 0.8 + 0.8**2 + 0.8**3)
    assert (mean_accepted(0.0, 9), mean_accepted(1.0, 9)) == (1, 10)
    for mean, k in ((1.0, 4), (12.41, 15), (17.13, 25), (6.0, 5)):
        found = mean_accepted(roofline.acceptance_from(mean, k), k)
        assert found == pytest.approx(mean, rel=1e-6)
    for mean in (0.5, 6.5):
        assert_refused("1 to 6", roofline.acceptance_from, mean, 5)


def test_best_k_is_the_best_of_all_and_a_free_draft_gives_a_block_for_a_pass() -> None:
    times = roofline.StepTimes(draft_pass=0.1, verify=1.0, autoregressive=1.0)
    best, speed_up = roofline.best_num_speculative_tokens(times, 0.8, 10)
    speeds = [mean_accepted(0.8, k) / (1 + 0.1 * k) for k in range(1, 40)]
    assert best == 1 + speeds.index(max(speeds))
    assert speed_up == pytest.approx(max(speeds))
    free = roofline.StepTimes(draft_pass=0.0, verify=2.0, autoregressive=2.0)
    assert free.speed_up(9, 10.0) == pytest.approx(10.0)
    wide = roofline.StepTimes(draft_pass=0.0, verify=1.1, autoregressive=1.0, verify_token=0.1)
    assert wide.round(1, 8) == pytest.approx(1.0)  # whatever arithmetic is saved


@pytest.mark.parametrize(("target", "drafts", "k", "mean", "level"), [
    (LARGE, ["llama-3.1-8b"], 25, 17.13, None),
    (MIDDLE, ["llama-3.1-8b"], 15, 12.41, None),
    (MIDDLE, ["eagle3-llama-3.3-70b"], 7, None, None),  # with FLy
    (LARGE, ["pard-llama-3.2-1b"], 25, None, None),
    (LARGE, ["llama-3.1-8b", "pard-llama-3.2-1b"], 25, 17.13, 3.83),
    (LARGE, ["llama-3.1-8b", "eagle3-llama-3.1-8b"], 25, 17.13, 3.2),
])  # fmt: skip
def test_only_what_is_published_of_a_pair_is_taken_for_it(
    target: LlamaConfig, drafts: list[str], k: int, mean: float | None, level: float | None
) -> None:
    """Of others the plan says how many tokens would be needed, and gives no speed."""
    draft, *below = map(preset, drafts)
    sizes = {None: (), 3.83: (8,), 3.2: (7,)}[level]
    rounds = default_round(k).with_static(level_speculative_tokens=sizes)
    plan = planned(target=target, draft=draft, below=tuple(below), rounds=rounds)
    found, source = plan.spec.level_accepted
    assert found == (None if level is None else pytest.approx(level))
    speed = plan.speed()
    assert all(0 < one <= k + 1 for one in speed["accepted_tokens_for"].values())
    if mean is None:
        assert speed.keys() & {"speed_up", "tokens_per_second"} == set()
        assert "--mean_accepted_tokens" in table(plan)
        return
    assert speed["mean_accepted_tokens"] == pytest.approx(mean)
    # The tokens that double the speed are as many times fewer as it is more than twice as fast.
    twice = speed["accepted_tokens_for"]["2"]
    assert mean / twice == pytest.approx(speed["speed_up"] / 2)
    assert all(one in table(plan) for one in (speed["source"], source or ""))


@pytest.mark.parametrize("draft", ["dflash-qwen-3-8b", "dspark-qwen-3-8b"])
def test_the_best_k_of_a_block_is_one_that_its_head_drafts_and_costs_one_pass(draft: str) -> None:
    given = {"target": preset("qwen-3-8b"), "draft": preset(draft), "mesh": parse_mesh("2x2")}
    plan = planned(**given, context=2048, rounds=default_round(2), mean_accepted_tokens=2.9)
    speed, most = plan.speed(), preset(draft).head.most_tokens
    chosen = dataclasses.replace(plan.spec, rounds=default_round(15).with_static(depths=(0, 15)))
    chosen.check()
    assert chosen.num_speculative_tokens == most
    assert speed["best_num_speculative_tokens"] == most
    # One pass whatever K is: the gain is nearly that of the tokens.
    acceptance = roofline.acceptance_from(2.9, 2)
    gain = speed["best_speed_up"] / speed["speed_up"]
    assert gain == pytest.approx(mean_accepted(acceptance, most) / 2.9, rel=0.05)
