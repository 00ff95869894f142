"""Draft models are weighed by their passes: layouts, types and smaller presets."""

from __future__ import annotations

import dataclasses
import json

import pytest

from fly_jax.models.presets import preset
from fly_jax.planning.plan import make_plan
from fly_jax.planning.request import Request, default_round
from fly_jax.planning.table import table
from fly_jax.sharding.chips import CHIPS
from fly_jax.sharding.mesh import parse_mesh
from fly_jax.sharding.rules import RULES

REQUEST = Request(
    target=preset("llama-3.1-405b"),
    draft=preset("llama-3.1-8b"),
    chip=CHIPS["v5e"],
    mesh=parse_mesh("8x8"),
    compiles=False,
)


def test_every_layout_and_type_of_the_draft_is_timed() -> None:
    drafters = make_plan(REQUEST).drafters()
    assert drafters is not None
    passes = {(one.rules, one.int8): one for one in drafters.passes}
    assert set(passes) == {(rules, int8) for rules in RULES for int8 in (False, True)}
    assert not passes["replicated", False].fits, "8B is not held whole beside 405B"
    assert passes["replicated", True].network_seconds == 0
    for rules in RULES:
        wide, narrow = passes[rules, False], passes[rules, True]
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
    given = next(one for one in drafters.passes if one.fits and not one.int8)
    verify = plan.step("verify")
    assert verify is not None
    a_round = verify.seconds + REQUEST.num_speculative_tokens * given.seconds
    assert least.pays_from / least.round_seconds == pytest.approx(plan.mean_accepted / a_round)
    # With fewer draft tokens the draft weighs less, and a smaller one pays later.
    shorter = make_plan(
        dataclasses.replace(REQUEST, spec=default_round(5), mean_accepted_tokens=4.0)
    ).drafters()
    assert shorter is not None
    assert shorter.smaller[0].pays_from / 4.0 > least.pays_from / plan.mean_accepted


def test_no_model_of_another_family_is_proposed() -> None:
    request = dataclasses.replace(
        REQUEST, target=preset("llama-2-70b"), draft=preset("llama-2-7b"), context=2048
    )
    drafters = make_plan(request).drafters()
    assert drafters is not None
    assert drafters.smaller == ()


def test_the_table_and_json_have_them() -> None:
    plan = make_plan(REQUEST)
    text = table(plan)
    assert "counted from shapes" in text
    assert "llama-3.2-1b" in text
    assert "pays from" in text
    drafters = json.loads(json.dumps(plan.to_dict()))["drafters"]
    assert {one["name"] for one in drafters["smaller"]} == {"llama-3.2-1b", "llama-3.2-3b"}
    assert set(drafters["passes"][0]) == {
        "rules", "int8", "seconds", "network_seconds", "num_bytes", "fits",
    }  # fmt: skip
