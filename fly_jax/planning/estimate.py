"""Memory and exchanges of every step from shapes, where no compiler says them."""

from __future__ import annotations

import dataclasses

from fly_jax.decoding.programs import prefill_piece
from fly_jax.models.architectures import LlamaConfig
from fly_jax.models.layouts import Workload, cache_exchanges, resident_bytes
from fly_jax.planning.counts import model_exchanges
from fly_jax.planning.hlo import Exchange
from fly_jax.sharding.rules import Layout


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What the estimate is made from."""

    target: LlamaConfig
    draft: LlamaConfig
    target_layout: Layout
    draft_layout: Layout
    workload: Workload
    draft_workload: Workload
    prompt_length: int


@dataclasses.dataclass(frozen=True)
class EstimatedStep:
    """One step on one chip; the fields are those of `CompiledStep`."""

    name: str
    peak_bytes: int
    argument_bytes: int
    temporary_bytes: int
    exchanges: tuple[Exchange, ...]


def estimate(given: Estimate) -> list[EstimatedStep]:
    """Every step of a plan, in the order in which the compiler takes them."""
    workload, k = given.workload, given.workload.num_speculative_tokens
    target, draft = (given.target_layout, given.target), (given.draft_layout, given.draft)
    held = {
        "target": resident_bytes(*target, workload),
        "draft": resident_bytes(*draft, given.draft_workload),
    }
    piece = prefill_piece(workload.rows)
    both, once = held["target"] + held["draft"], min(given.prompt_length, piece)
    passes = -(-given.prompt_length // piece)
    drafted = _exchanges(*draft, workload, 2) + [
        dataclasses.replace(one, count=one.count * (k - 1))
        for one in _exchanges(*draft, workload, 1)
    ]
    verified = _exchanges(*target, workload, k + 1)
    taken_in = [
        dataclasses.replace(one, count=one.count * passes)
        for one in _exchanges(*target, workload, once) + _exchanges(*draft, workload, once)
    ]
    widest = max(_temporaries(*model, workload, once, False) for model in (target, draft))
    verifying = _temporaries(*target, workload, k + 1, True)
    return [
        _step("prefill", both, widest, taken_in),
        _step("round", both, verifying, drafted + verified),
        _step("draft", held["draft"], _temporaries(*draft, workload, 2, True), drafted),
        _step("verify", held["target"], verifying, verified),
        _step(
            "autoregressive", held["target"], _temporaries(*target, workload, 1, True),
            _exchanges(*target, workload, 1),
        ),
    ]  # fmt: skip


def _step(name: str, held: int, temporary: int, found: list[Exchange]) -> EstimatedStep:
    return EstimatedStep(name, held + temporary, held, temporary, tuple(found))


def _exchanges(
    layout: Layout, config: LlamaConfig, workload: Workload, tokens: int
) -> list[Exchange]:
    kinds = cache_exchanges(layout, config, workload)
    return model_exchanges(layout, config, workload, tokens, kinds)


def _temporaries(
    layout: Layout, config: LlamaConfig, workload: Workload, tokens: int, logits: bool
) -> int:
    """The residual stream twice and the MLP once in float32, the scores of one layer, the logits.

    Long prompts are dominated by the scores, short blocks by nothing that matters.
    """
    rows = workload.rows // layout.devices(layout.axes_of("rows", workload.rows))
    ffw = config.ffw_size // layout.devices(layout.axes_of("ffw", config.ffw_size))
    heads = config.num_heads // layout.devices(layout.axes_of("q_heads", config.num_heads))
    vocab = config.vocab_size // layout.devices(layout.axes_of("vocab", config.vocab_size))
    numbers = 2 * config.embed_size + ffw + heads * workload.capacity + (vocab if logits else 0)
    return 4 * rows * tokens * numbers
