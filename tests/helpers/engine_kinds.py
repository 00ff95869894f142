"""Engines of random pairs, of every kind that tests ask of one."""

from __future__ import annotations

import dataclasses
import functools

from random_pairs import (
    CONFIG,
    EOS,
    placed,
    random_draft,
    random_target,
)

from fly_jax.decoding.drafters.lookup import Lookup
from fly_jax.decoding.spec import RoundSpec
from fly_jax.engine.engine import Engine
from fly_jax.models.llama import Llama
from fly_jax.sharding.mesh import create_mesh, parse_mesh
from fly_jax.sharding.rules import RULES, Layout
from fly_jax.verification.correction_memory import CorrectionMemory
from fly_jax.verification.rules import Budget, Csd, Exact, Fly, Margin, Rule
from fly_jax.verification.sampling import Sampling

LONG = dataclasses.replace(CONFIG, max_context=600)
ROUND = RoundSpec(Fly(0.2, 2), 4, None, EOS, rounds_per_dispatch=2, max_logprobs=2)
NUM_SLOTS = 3


@dataclasses.dataclass(frozen=True)
class Kind:
    """An engine, and what its requests ask for in turn."""

    spec: RoundSpec
    num_drafts: int = 1
    rules: tuple[Rule, ...] = ()
    samplings: tuple[Sampling | None, ...] = (None,)
    mesh: str | None = None
    num_slots: int = NUM_SLOTS
    memory: CorrectionMemory | None = None


def every_other_pair() -> CorrectionMemory:
    memory = CorrectionMemory("v", min_count=0)
    memory.add((a, b) for a in range(48) for b in range(48) if (a + b) % 2)
    return memory


KINDS = {
    "rules and sampling": Kind(
        ROUND,
        rules=(Exact(), Fly(0.5, 2), Budget(Margin(gap=2.0), 3.0), Csd(0.0)),
        samplings=(None, Sampling(0.9, top_p=0.9), None, Sampling(1.0, top_k=5)),
        memory=every_other_pair(),
    ),
    "levels": Kind(
        dataclasses.replace(ROUND, lookup=Lookup(), level_speculative_tokens=(2,)), num_drafts=2
    ),
    "defer": Kind(
        dataclasses.replace(ROUND, rule=Fly(0.0, 3), boundary="defer"),
        num_slots=4,  # and rounds for one of them
    ),
    "lookup alone": Kind(RoundSpec(Exact(), 4, Lookup(), EOS, audits=True), num_drafts=0),
    "autoregressive": Kind(RoundSpec(Exact(), 0, None, EOS), num_drafts=0),
    "mesh": Kind(ROUND, mesh="2x2x2", rules=(Exact(),), samplings=(None, Sampling(0.9))),
}


@functools.cache
def models(mesh: str | None, num_drafts: int) -> tuple[Llama, ...]:
    found = [random_target(2, LONG), *(random_draft(2, noise, LONG) for noise in (0.2, 0.3))]
    layout = None if mesh is None else Layout(create_mesh(parse_mesh(mesh)), RULES["tensor"])
    found = [placed(one, layout) for one in found]
    return tuple(found[: 1 + num_drafts])


def engine_for(
    kind: Kind, *, num_slots: int | None = None, max_length: int = 100, offline: bool = False
) -> Engine:
    target, *drafts = models(kind.mesh, kind.num_drafts)
    return Engine(
        target,
        drafts,
        kind.spec,
        num_slots=kind.num_slots if num_slots is None else num_slots,
        max_length=max_length,
        prefill_chunk=32,
        rules=kind.rules,
        memory=kind.memory,
        offline=offline,
    )
