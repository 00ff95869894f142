"""Counts from shapes against those of XLA where no loop misleads it, and the model of speed."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from fly_jax.errors import FlyJaxError
from fly_jax.models.architectures import INT8, LlamaConfig
from fly_jax.models.cache import empty_cache
from fly_jax.models.layouts import Workload, parameter_bytes
from fly_jax.models.llama import Llama
from fly_jax.models.presets import preset
from fly_jax.planning.hlo import Exchange
from fly_jax.planning.plan_spec import abstract_mesh
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
from fly_jax.sharding.chips import CHIPS, chip_of
from fly_jax.sharding.mesh import parse_mesh
from fly_jax.sharding.rules import RULES, Layout

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


# A CPU multiplies tokens, which are of two rows here, by fours or eights (`products.in_front`).
@pytest.mark.parametrize(("tokens", "multiplied"), [(1, 4), (4, 8), (9, 24), (12, 24)])
def test_operations_are_those_of_xla_where_no_loop_hides_them(tokens: int, multiplied: int) -> None:
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
