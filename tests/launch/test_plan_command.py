"""The command plan: its table, its JSON, and what it refuses."""

import json
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
from launch_types import Patch, Ran, Refused

from fly_jax.planning import planner
from fly_jax.planning.plan_steps import STEPS
from fly_jax.verification.sampling import Sampling

Planned = Callable[..., dict[str, Any]]
H200 = ("--chip=h200", "--mesh=8", "--target=llama-3.1-70b")
STEP_KEYS = {f"{kind}_bytes_per_chip" for kind in ("peak", "argument", "temporary")}
STEP_KEYS |= {"collectives", "flops", "bytes_accessed", "roofline_seconds"}


@pytest.fixture(autouse=True)
def _environment(monkeypatch: Patch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # which the command sets for its process


@pytest.fixture
def planned(ran: Ran) -> Planned:
    """Runs plan, and gives the object that it prints."""
    return lambda *given, status=0: json.loads(ran("plan", "--json", *given, status=status).out)


def test_a_gpu_is_counted_from_shapes(planned: Planned, ran: Ran) -> None:
    """In JSON, and in the table, which says where figures come from."""
    out = ran("plan", *H200).out
    for words in ("counted from shapes", "of 131.32", "all-reduce", "tokens/s", "largest batch"):
        assert words in out
    plan = planned(*H200)
    assert plan["fits"] is True
    assert tuple(plan["steps"]) == STEPS
    for name, step in plan["steps"].items():
        assert (step["source"], step.keys() >= STEP_KEYS) == ("shapes", True)
        assert step["peak_bytes_per_chip"] >= step["argument_bytes_per_chip"] > 0
        kinds = {one["kind"] for one in step["collectives"]}
        assert kinds == (set() if name == "insert" else {"all-reduce"})
    a_round, draft, verify = (plan["steps"][name] for name in ("round", "draft", "verify"))
    for name in ("flops", "roofline_seconds"):
        assert a_round[name] == pytest.approx(draft[name] + verify[name])
    speed = plan["speed"]
    speed_up = speed["tokens_per_second"] / speed["autoregressive_tokens_per_second"]
    assert speed["speed_up"] == pytest.approx(speed_up, rel=1e-6)
    assert speed["best_speed_up"] >= speed["speed_up"]


def test_only_the_largest_batch_fits(models: list[str], planned: Planned) -> None:
    """And what folders hold is planned for as well."""
    sizes = ("--mesh=4", "--context=4096")
    rows = planned(*H200, *sizes)["largest_batch_size"]
    assert rows > 1
    assert planned(*H200, *sizes, f"--batch_size={rows}")["fits"]
    assert not planned(*H200, *sizes, f"--batch_size={rows + 1}", status=2)["fits"]
    given = (*models[:2], "--context=64", "--mesh=1", "--chip=h100", "--num_speculative_tokens=5")
    assert planned(*given)["fits"]


def test_what_does_not_fit_says_by_how_much(planned: Planned, ran: Ran) -> None:
    small = ("--chip=v5e", "--mesh=4x8", "--prompt_length=512", "--nocompile")
    out, said = ran("plan", *small, "--json", status=2)
    assert json.loads(out)["fits"] is False
    for words in ("GiB a chip are missing on v5e 4x8", "--dtype int8", "--mesh 8x8"):
        assert words in said.splitlines()[-1]
    assert planned(*small, "--dtype=int8")["fits"], "the remedy that was named does not help"


ROUNDS = [
    ["--rule=fly & margin", "--margin_gap=1", "--risk_budget=20", "--audits"],
    ["--prompt_lookup_max=4", "--num_speculative_tokens=auto"],
    ["--boundary=defer", "--window_size=4"],
    # The rule that a small K has room for.
    ["--num_speculative_tokens=4", "--temperature=0.7", "--top_k=40", "--top_p=0.9"],
    ["--rule=csd", "--nocsd_online"],
]


@pytest.mark.parametrize("arguments", ROUNDS)
def test_every_round_is_planned(planned: Planned, monkeypatch: Patch, arguments: list[str]) -> None:
    make = Mock(side_effect=planner.make_plan)
    monkeypatch.setattr(planner, "make_plan", make)
    assert planned(*H200, "--nocompile", *arguments)["fits"]
    spec = make.call_args.args[0].rounds
    given = dict(one.removeprefix("--").partition("=")[::2] for one in arguments)
    assert spec.static.audits == ("audits" in given)
    assert (spec.static.lookup is not None) == ("prompt_lookup_max" in given)
    assert (spec.static.deferred_window > 0) == ("boundary" in given)
    assert spec.sampling == (Sampling(0.7, 40, 0.9) if "temperature" in given else None)
    assert bool(spec.static.depths) == (given.get("num_speculative_tokens") == "auto")
    assert spec.rule.uses_memory == (given.get("rule") == "csd")
    assert (spec.rule.budget is not None) == ("risk_budget" in given)


def test_a_data_axis_halves_the_rows_of_a_chip(planned: Planned) -> None:
    sizes = ("--nocompile", "--batch_size=16", "--prompt_length=512", "--dtype=int8")
    plans = [planned(f"--mesh={mesh}", *sizes) for mesh in ("8x8", "2x8x8")]
    one, two = (plan["memory_per_chip"] for plan in plans)
    assert two["parameter_bytes"] == one["parameter_bytes"]
    assert two["cache_bytes"] == one["cache_bytes"] / 2


PARD = ("--draft=llama-3.1-8b", "--draft=pard-llama-3.2-1b")
STACK = (*H200, *PARD, "--level_speculative_tokens=6", "--level_accepted_tokens=4")


def test_a_stack_of_drafts_is_planned_with_its_passes(planned: Planned, ran: Ran) -> None:
    k25 = "--num_speculative_tokens=25"
    alone = planned(*H200, k25, PARD[0])
    stack = planned(*STACK, k25)
    assert stack["draft_passes"] == [{"2": 1.0, "7": 6.0}, {"12": 6.0}]
    for name in ("draft_parameter_bytes", "draft_cache_bytes"):
        assert stack["memory_per_chip"][name] > alone["memory_per_chip"][name]
    drafts = [one["steps"]["draft"] for one in (alone, stack)]
    assert drafts[1]["roofline_seconds"] < 0.5 * drafts[0]["roofline_seconds"]
    assert stack["speed"]["speed_up"] > alone["speed"]["speed_up"]
    assert "levels below the draft" in ran("plan", *STACK).out


def test_to_compile_without_libtpu_is_refused(refused: Refused, monkeypatch: Patch) -> None:
    monkeypatch.setitem(sys.modules, "libtpu", None)
    refused("plan", "--chip=v5e", words=["fly_jax[tpu]", "--nocompile"])


def test_a_server_is_planned_with_its_chunks_rules_and_draws(planned: Planned) -> None:
    model = ("--target=llama-3.2-1b", "--draft=pard-llama-3.2-1b", "--chip=v5e", "--mesh=1")
    sizes = ("--context=1024", "--num_speculative_tokens=8", "--nocompile")
    plans = [planned(*model, *sizes, *("--serve", "--prefill_chunk=64")[:one]) for one in range(3)]
    known, served, smaller = (plan["steps"]["prefill"]["bytes_accessed"] for plan in plans)
    assert known < served < smaller, "weights are read once for each chunk, of 256 or 64 tokens"
