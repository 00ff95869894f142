"""Plans from shapes alone: layouts, and draft models weighed by their passes."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from fly_jax.engine.engine import Engine
from fly_jax.models.architectures import INT8, LlamaConfig, MatrixType, parameter_specs
from fly_jax.models.layouts import Layouts, Workload, choose_layouts, pass_seconds, resident_bytes
from fly_jax.models.presets import preset
from fly_jax.models.quantise import SELF_DRAFTS
from fly_jax.planning.alternatives import Drafters, SmallerDraft
from fly_jax.planning.plan_spec import PlanSpec, abstract_mesh, default_round
from fly_jax.planning.plan_steps import abstract_model, abstract_state
from fly_jax.planning.planner import Plan, make_plan, table
from fly_jax.sharding.chips import CHIPS, Chip
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
