"""No round copies a cache or a stack of matrices: what the CPU compiles, for one device and 8."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from golden import layout_on
from rounds import KINDS, compiled_text, copied, engine_of, repeated, round_hlo

from fly_jax.decoding import programs
from fly_jax.engine.prefill import Chunk
from fly_jax.models.architectures import LlamaConfig
from fly_jax.models.head_config import Block, Eagle3
from fly_jax.models.llama import Llama
from fly_jax.planning.hlo import exchanges
from fly_jax.planning.plan_spec import abstract_model
from fly_jax.planning.plan_steps import abstract_state
from fly_jax.sharding.rules import Layout

SIZES = {"vocab_size": 512, "num_layers": 2, "num_heads": 8, "num_kv_heads": 4, "head_size": 16}
# None of their other arrays has a cache's or a stack's size by accident.
TINY = [
    LlamaConfig(**SIZES, embed_size=embed_size, ffw_size=ffw_size, max_context=512)
    for embed_size, ffw_size in ((144, 320), (72, 192), (40, 96))
]
ROWS = 3


def on_cpu(config: LlamaConfig) -> Llama:
    """A model as the CPU decodes it: an array for each layer, of shapes alone."""
    made = jax.eval_shape(lambda: Llama.random(config, jax.random.key(0)).unstacked().parameters())
    return Llama(config, made)


def placed(configs: Sequence[LlamaConfig], rules: str | None) -> tuple[list[Llama], Layout | None]:
    """The models: on one device without rules, else with them on a mesh."""
    if rules is None:
        return [on_cpu(config) for config in configs], None
    layout = layout_on("2x4", rules)
    # In bfloat16 the CPU's programs widen whole arrays, which accelerators do not.
    return [abstract_model(config, layout, dtype=jnp.float32) for config in configs], layout


def last_model(what: str, above: Sequence[LlamaConfig]) -> LlamaConfig:
    """What lies below these models: another one of its own, or a head of the last of them."""
    if what in ("model", "pard"):  # which drafts in one pass
        return dataclasses.replace(TINY[len(above)], pard_token=7 if what == "pard" else None)
    size = {"target_embed_size": above[-1].embed_size}
    if what == "eagle":
        sizes = {"num_layers": 1, "ffw_size": 112}
        own: Eagle3 | Block = Eagle3(**size, layers=(0, 1, 1), has_embedding=True)
    else:
        sizes = {"embed_size": above[-1].embed_size}
        also = {"block_size": 6, "mask_token": 5, "anchor_predicts": True, "has_confidence": True}
        own = Block(**size, **also, layers=(0, 1), markov_rank=24)
    return dataclasses.replace(TINY[2], **sizes, draft_vocab_size=200, head=own)


# Each drafter and each kind, on one device and on 8, not all together: "rules" are all of them, and
# rows that come and go are served with a K that is chosen. Others: test_no_copies_on_slices.py,
# and, sampled, test_compiled_plans.py.
@pytest.mark.parametrize(("name", "last", "rules"), [
    ("auto, lookup", None, None),
    *((name, "model", None) for name in ("autoregressive", "rules", "sampled", "lookup")),
    *((name, "model", None) for name in ("levels", "defer")),
    *((name, "model", "tensor_whole") for name in ("rules", "defer", "served")),
    *(("auto", "pard", one) for one in (None, "tensor")), ("head below", "eagle", None),
    *((name, "eagle", None) for name in ("defer", "sampled", "auto")),
    ("auto", "eagle", "tensor_whole"), ("auto", "block", None),
    *(("head below", one, None) for one in ("block", "pard")),
])  # fmt: skip
def test_no_round_copies_a_cache_or_a_stack(name: str, last: str | None, rules: str | None) -> None:
    static = KINDS[name].static
    above = TINY[: (static.num_speculative_tokens > 0) + len(static.level_speculative_tokens)]
    below = [last_model(last, above)] if last else []
    models, _ = placed([*above, *below], rules)
    more = {"draft_confidence": 0.5} if last == "block" else {}
    hlo, capacity = round_hlo(name, models, rows=ROWS, context=100, **more)
    assert not repeated(copied(hlo, models, ROWS, capacity))


@pytest.mark.parametrize("rules", [None, "tensor_whole", "tensor"])
def test_rows_come_and_go_with_no_copy(rules: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an engine's slots; "tensor" splits the rows, of which a device then has two."""
    slots, (models, layout) = 8, placed(TINY[:2], rules)
    monkeypatch.setattr("fly_jax.engine.engine.lies_on_cpu", lambda _: False)
    engine = engine_of("served", models, slots, context=500, depths=(0, 5))
    shared, plan = engine._programs, engine._prefill.plan
    many = abstract_state(engine.trace_slots(), [layout, layout])
    at = jax.ShapeDtypeStruct((), jnp.int32, sharding=layout and layout.sharding((), ()))

    def text(traced: Any) -> str:
        return compiled_text(traced, models[0])

    released = text(programs._release.trace(many, at))
    assert not copied(released, models, slots, 512)
    if layout is None:  # rounds may be made for the first rows alone
        rounds = text(shared.run(many, engine._inputs(sampled=True), 2))
        assert not repeated(copied(rounds, models, slots, 512) + copied(rounds, models, 2, 512))
        moved = text(programs._move.trace(shared._shapes, shared._resting, many, at, at))
        assert not copied(moved, models, slots, 512)
    assert plan.rows == (1, 4, 8)
    for number in plan.rows if rules == "tensor" else (1, slots):  # the others split no rows
        some = abstract_state(engine.trace_rows(number), [layout, layout])
        assert some.target.capacity == plan.positions(number) == (512 if number == 1 else 256)
        prefill = text(engine.trace_prefill(some, Chunk(number, 16, 16, 256)))
        assert not repeated(copied(prefill, models, number, some.target.capacity))
        inserted = text(engine.trace_insert(many, some))
        given = (shared._shapes, shared._resting, some, many, at, at)
        taken = text(programs._copy_row.trace(*given))
        assert not copied(inserted, models, slots, 512)
        # On a mesh of CPUs the others' rows are masked first; a TPU does that as it sums.
        assert not repeated(copied(taken, models, slots, 512))
        assert layout is not None or not copied(taken, models, slots, 512)
        caches = (some.target, some.drafter.cache)
        row = max(math.prod(cache.keys.shape) // number for cache in caches)
        for hlo in (inserted, released, taken):
            for exchange in exchanges(hlo, 1 if layout is None else layout.mesh.size):
                assert exchange.count == 1
                assert all(math.prod(shape) <= row for shape in exchange.shapes), exchange
