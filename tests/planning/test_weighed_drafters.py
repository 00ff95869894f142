"""Draft models are weighed by their passes: layouts, types and smaller presets."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from fly_jax.models.architectures import parameter_specs
from fly_jax.models.presets import preset
from fly_jax.models.quantise import SELF_DRAFTS
from fly_jax.planning.plan_spec import PlanSpec, default_round
from fly_jax.planning.planner import make_plan, table
from fly_jax.sharding.chips import CHIPS
from fly_jax.sharding.mesh import parse_mesh
from fly_jax.sharding.rules import RULES

REQUEST = PlanSpec(
    target=preset("llama-3.1-405b"),
    draft=preset("llama-3.1-8b"),
    chip=CHIPS["v5e"],
    mesh=parse_mesh("8x8"),
    compiles=False,
)


def test_every_layout_and_type_of_the_draft_is_timed() -> None:
    drafters = make_plan(REQUEST).drafters()
    assert drafters is not None
    passes = {(one.rules, one.matrices): one for one in drafters.passes}
    assert set(passes) == {(rules, kind) for rules in RULES for kind in ("bfloat16", "int8")}
    assert not passes["replicated", "bfloat16"].fits, "8B is not held whole beside 405B"
    assert passes["replicated", "int8"].network_seconds == 0
    for rules in RULES:
        wide, narrow = passes[rules, "bfloat16"], passes[rules, "int8"]
        assert narrow.seconds < wide.seconds
        assert narrow.network_seconds == pytest.approx(wide.network_seconds)
        assert narrow.num_bytes < wide.num_bytes


def test_a_smaller_draft_pays_where_its_tokens_a_second_are_the_same() -> None:
    plan = make_plan(REQUEST)
    drafters = plan.drafters()
    assert drafters is not None
    smaller = {one.name: one for one in drafters.smaller}
    assert set(smaller) == {"llama-3.2-1b", "llama-3.2-3b"}
    least, more = smaller["llama-3.2-1b"], smaller["llama-3.2-3b"]
    assert 1 < least.pays_from < more.pays_from < plan.mean_accepted
    given = next(one for one in drafters.passes if one.fits and one.matrices == "bfloat16")
    verify = plan.step("verify")
    assert verify is not None
    a_round = verify.seconds + REQUEST.num_speculative_tokens * given.seconds
    assert least.pays_from / least.round_seconds == pytest.approx(plan.mean_accepted / a_round)
    # With fewer draft tokens the draft weighs less, and a smaller one pays later.
    shorter = make_plan(
        dataclasses.replace(REQUEST, rounds=default_round(5), mean_accepted_tokens=4.0)
    ).drafters()
    assert shorter is not None
    assert shorter.smaller[0].pays_from / 4.0 > least.pays_from / plan.mean_accepted


def test_no_model_of_another_family_is_proposed() -> None:
    spec = dataclasses.replace(
        REQUEST, target=preset("llama-2-70b"), draft=preset("llama-2-7b"), context=2048
    )
    drafters = make_plan(spec).drafters()
    assert drafters is not None
    assert not [one for one in drafters.smaller if not one.name.startswith("self:")]


def test_a_targets_own_matrices_are_weighed_where_they_fit() -> None:
    """An int4 pass reads less than an int8 one, and the network is the same."""
    spec = dataclasses.replace(
        REQUEST, target=preset("llama-3.1-70b"), draft=preset("llama-3.1-70b"),
        rounds=default_round(8), mean_accepted_tokens=8.0,
    )  # fmt: skip
    drafters = make_plan(spec).drafters()
    assert drafters is not None
    assert all(one.pays_from <= 9 for one in drafters.smaller), "more no round settles"
    own = {one.name: one.best for one in drafters.smaller if one.name.startswith("self:")}
    assert set(own) == {"self:int8", "self:int4"}
    int8, int4 = own["self:int8"], own["self:int4"]
    assert int4.num_bytes < int8.num_bytes
    assert int4.seconds < int8.seconds
    assert int4.network_seconds == pytest.approx(int8.network_seconds)
    assert not [one for one in make_plan(REQUEST).drafters().smaller if "self" in one.name]


@pytest.mark.parametrize("name", SELF_DRAFTS)
def test_a_plan_with_a_targets_own_draft(name: str) -> None:
    target = preset("llama-3.1-8b")
    spec = dataclasses.replace(
        REQUEST, target=target, draft=target, self_draft=SELF_DRAFTS[name], mesh=parse_mesh("2x2")
    )
    plan = make_plan(spec)
    assert plan.fits
    assert plan.layouts.draft_rules == plan.layouts.target_rules
    memory = plan.memory()
    # Of the target's matrices, without the embedding and the unembedding that both share.
    shared = 2 * target.vocab_size * target.embed_size * 2 / 4
    per_byte = {"int8": 1 / 2, "int4": (1 / 2 + 4 / 64) / 2}[name]
    assert memory["draft_parameter_bytes"] == pytest.approx(
        (memory["parameter_bytes"] - shared) * per_byte, rel=0.01
    )
    drafters = plan.drafters()
    assert drafters is not None
    assert [one.matrices for one in drafters.passes] == [name]
    assert name in table(plan)


@pytest.mark.parametrize(
    "name",
    ["mistral-7b", "qwen-2.5-7b", "qwen-3-8b", "smollm2-1.7b", "smollm3-3b",
     "deepseek-r1-distill-qwen-7b", "deepseek-r1-distill-llama-8b"],
)  # fmt: skip
def test_every_family_is_planned(name: str) -> None:
    target = preset(name)
    spec = dataclasses.replace(
        REQUEST, target=target, draft=target, self_draft=SELF_DRAFTS["int4"], context=4096,
        mesh=parse_mesh("2x2"),
    )  # fmt: skip
    plan = make_plan(spec)
    assert plan.fits
    specs = parameter_specs(target).values()
    a_quarter = 2 * sum(math.prod(spec.shape) for spec in specs) / 4
    # All is split over the four chips, but for what their number does not divide.
    assert 0.99 < plan.memory()["parameter_bytes"] / a_quarter < 1.15


def test_the_table_and_json_have_them() -> None:
    plan = make_plan(REQUEST)
    text = table(plan)
    assert "counted from shapes" in text
    assert "llama-3.2-1b" in text
    assert "pays from" in text
    drafters = json.loads(json.dumps(plan.to_dict()))["drafters"]
    assert {one["name"] for one in drafters["smaller"]} == {"llama-3.2-1b", "llama-3.2-3b"}
    assert set(drafters["passes"][0]) == {
        "rules", "matrices", "seconds", "network_seconds", "num_bytes", "fits",
    }  # fmt: skip


def test_a_family_whose_vocabularies_are_padded_apart_is_planned() -> None:
    spec = dataclasses.replace(
        REQUEST, target=preset("qwen-2.5-72b"), draft=preset("qwen-2.5-1.5b"), context=4096
    )
    plan = make_plan(spec)
    drafters = plan.drafters()
    assert drafters is not None
    assert plan.spec.target.vocab_size == plan.spec.draft.vocab_size == 151_936
    # Not a Qwen 3, whose tokenizer has other tokens behind the same size.
    others = {one.name for one in drafters.smaller if not one.name.startswith("self:")}
    assert others == {"qwen-2.5-0.5b"}
