"""Engines of random pairs, of every kind that tests ask of one, and what is asked of them."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from golden import layout_on
from random_pairs import MAX_LENGTH, SPECS, placed, random_draft, random_target, rounds

from fly_jax import CorrectionMemory, Engine, Lookup, Request, RequestState, RoundSpec, Sampling
from fly_jax.models.llama import Llama
from fly_jax.verification.rules import Budget, Exact, Fly, Rule
from fly_jax.verification.rules.loosened import Csd, Margin

MORE = {"rounds_per_dispatch": 2, "max_logprobs": 2}
ROUND = rounds(4, Fly(0.2, 2), **MORE)
DEPTHS = (0, 2, 4)
AUTO = SPECS["exact"].with_static(num_speculative_tokens=4, depths=DEPTHS)


@dataclasses.dataclass(frozen=True)
class Kind:
    """An engine, and what its requests ask for in turn."""

    spec: RoundSpec
    num_drafts: int = 1
    rules: tuple[Rule, ...] = ()
    samplings: tuple[Sampling | None, ...] = (None,)
    mesh: str | None = None
    num_slots: int = 3
    memory: CorrectionMemory | None = None


def every_other_pair() -> CorrectionMemory:
    memory = CorrectionMemory("v", min_count=0)
    memory.add((a, b) for a in range(48) for b in range(48) if (a + b) % 2)
    return memory


KINDS = {
    "rules and sampling": Kind(
        ROUND, rules=(Exact(), Fly(0.5, 2), Budget(Margin(gap=2.0), 3.0), Csd(0.0)),
        samplings=(None, Sampling(0.9, top_p=0.9), None, Sampling(1.0, top_k=5)),
        memory=every_other_pair(),
    ),
    "levels": Kind(ROUND.with_static(lookup=Lookup(), level_speculative_tokens=(2,)), num_drafts=2),
    # With rounds for one of the slots.
    "defer": Kind(rounds(4, Fly(0.0, 3), deferred_window=3, **MORE), num_slots=4),
    "lookup alone": Kind(SPECS["lookup"].with_static(audits=True), num_drafts=0),
    "autoregressive": Kind(SPECS["autoregressive"], num_drafts=0),
    "mesh": Kind(ROUND, mesh="2x4", rules=(Exact(),), samplings=(None, Sampling(0.9, top_p=0.9))),
}  # fmt: skip


@functools.cache
def models(mesh: str | None, num_drafts: int) -> tuple[Llama, ...]:
    found = [random_target(2), *(random_draft(2, noise) for noise in (0.2, 0.3))]
    return tuple(placed(one, layout_on(mesh)) for one in found[: 1 + num_drafts])


def engine_for(kind: Kind, **given: Any) -> Engine:
    target, *drafts = models(kind.mesh, kind.num_drafts)
    sizes = {"num_slots": kind.num_slots, "max_length": MAX_LENGTH, "prefill_chunk": 32}
    given = {**sizes, "rules": kind.rules, "memory": kind.memory, "offline": False, **given}
    return Engine(target, drafts, kind.spec, **given)


def requests(kind: Kind, number: int = 14, seed: int = 0) -> list[Request]:
    random, rules, found = np.random.default_rng(seed), (None, *kind.rules), []
    for index in range(number):
        # Short ones and long ones: for each power of two a decoder compiles anew.
        length = int(random.integers(*((1, 16), (33, 64))[index % 3 > 0]))
        one = Request(
            random.integers(0, 48, length).tolist(), int(random.integers(1, 25)),
            rules[index % len(rules)],
            # Each rule with one of them, since for every pair a decoder compiles anew too.
            kind.samplings[index % len(rules) % len(kind.samplings)], seed=2**40 + index,
            logprobs=(None, 2, 0, 1)[index % 4] if kind.spec.static.max_logprobs else None,
            protected_token_ids=(None, range(0, 48, 2), None)[index % 3],
        )  # fmt: skip
        found.append(one)
    return found


def finished(engine: Engine, given: Sequence[Request]) -> list[RequestState]:
    states = [engine.submit(request) for request in given]
    while not engine.is_idle:
        engine.step()
    return states


def account(state: RequestState) -> tuple[object, ...]:
    one = state.generation
    counts = (one.num_rounds, one.num_draft_tokens, one.num_rescued_tokens, one.num_rollbacks)
    # Passes of other widths round other than alone.
    reports = [
        (report.draft_id, report.choice_id, report.verdict, round(report.entropy, 3))
        for report in one.reports
    ]
    return one.token_ids, one.why, one.finish_reason, counts, reports
