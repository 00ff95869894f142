"""Every kind of round of an engine, compiled from shapes: the one place that describes them."""

import importlib.util
from collections.abc import Sequence
from typing import Any

import pytest
from jax.stages import Traced

from fly_jax import CorrectionMemory, Csd, Engine, Lookup, Margin, Sampling
from fly_jax.decoding.config import RoundSpec, RoundStatic
from fly_jax.models.llama import Llama
from fly_jax.planning.hlo import Copy, copies, large_shapes
from fly_jax.planning.plan_steps import abstract_state
from fly_jax.verification.rules import Budget, Exact, Fly, Rule

BY_LIBTPU = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu, the TPU compiler, is not installed; the extras [tpu] and [test] have it",
)


def _rounds(rule: Rule, k: int = 5, sampling: Sampling | None = None, **given: Any) -> RoundSpec:
    return RoundSpec(rule, RoundStatic(k, eos_token_ids=(1,), **given), sampling)


_FLY = Fly(window_size=2)
_WHOLE = Budget(_FLY | Margin() | Csd(), 20.0)  # all that a rule may ask for
_LEVEL = _rounds(_FLY, level_speculative_tokens=(3,))
KINDS = {
    "autoregressive": _rounds(Exact(), 0), "exact": _rounds(Exact()), "fly": _rounds(_FLY),
    "rules": _rounds(_WHOLE, reports_mismatches=True, audits=True),
    "sampled": _rounds(Exact(), sampling=Sampling(0.7, top_k=40, top_p=0.9)),
    "lookup": _rounds(_FLY, lookup=Lookup(num_earlier_tokens=4096)),
    "levels": _LEVEL.with_static(lookup=Lookup()), "head below": _LEVEL,
    "auto": _rounds(_FLY, depths=(0, 5)),
    "auto, lookup": _rounds(Exact(), lookup=Lookup(), depths=(0, 5)),
    "defer": _rounds(_FLY, deferred_window=2), "served": _rounds(_FLY),
}  # fmt: skip
# Each row has a rule of its own, and some are drawn.
SERVED = {"served": {"rules": (Margin(), Budget(_FLY, 20.0)), "offline": False}}


def engine_of(name: str, models: Sequence[Llama], rows: int, context: int, **more: Any) -> Engine:
    """An engine of abstract models for so many rows of so many tokens, with more in its rounds."""
    spec = KINDS[name].with_static(**more)
    memory = CorrectionMemory("tests") if spec.static.reports_mismatches else None
    given = {"memory": memory, "offline": True, "num_slots": rows, "max_length": context}
    return Engine(models[0], models[1:], spec, **given | SERVED.get(name, {}))


def round_hlo(name: str, models: Sequence[Llama], **given: Any) -> tuple[str, int]:
    """The optimised program of a dispatch, and the capacity of its caches; see `engine_of`."""
    engine = engine_of(name, models, **given)
    state = abstract_state(engine.trace_slots(), [model.layout for model in models])
    return compiled_text(engine.trace_rounds(state), models[0]), state.target.capacity


def compiled_text(traced: Traced, target: Llama) -> str:
    """The optimised program."""
    sharding = target.parameters()["embedding"].sharding
    # What LLVM makes of a program is not looked at.
    is_cpu = sharding is None or next(iter(sharding.device_set)).platform == "cpu"
    options = {"xla_backend_optimization_level": "0"} if is_cpu else {}
    return traced.lower().compile(compiler_options=options).as_text()


def copied(hlo: str, models: Sequence[Llama], rows: int, capacity: int) -> list[Copy]:
    """Copies of a cache or a stack of matrices of any of these models."""
    large = (large_shapes(model.layout, model.config, rows, capacity) for model in models)
    return copies(hlo, set().union(*large))


def repeated(found: Sequence[Copy]) -> list[str]:
    """Copies that a loop or a branch makes, in few words."""
    return [f"{one.operation} {one.shape} x {one.count}" for one in found if one.is_repeated]
