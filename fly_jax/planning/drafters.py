"""Which draft model pays: layouts and types of the given one, and smaller ones in its place.

All of it is counted from shapes. On a pod a draft pass is mostly latency, so that fewer layers may
weigh more than better guesses.
"""

from __future__ import annotations

import dataclasses

from fly_jax.models.architectures import LlamaConfig
from fly_jax.models.layouts import Workload, cache_exchanges, resident_bytes
from fly_jax.models.presets import PRESETS
from fly_jax.models.specs import INT8, SELF, SELF_DRAFTS, MatrixType, self_draft_type
from fly_jax.planning.counts import model_exchanges, pass_work, roofline_seconds
from fly_jax.planning.request import Request
from fly_jax.planning.topology import abstract_mesh
from fly_jax.sharding.rules import RULES, Layout


@dataclasses.dataclass(frozen=True)
class DraftPass:
    """A draft model in one layout and type.

    Attributes:
      rules: name of the layout.
      matrices: type of its matrices.
      seconds: roofline time of a pass over one token.
      network_seconds: of these, between chips.
      num_bytes: that a chip holds of it, its cache included.
      fits: with the target beside it.
    """

    rules: str
    matrices: str
    seconds: float
    network_seconds: float
    num_bytes: int
    fits: bool


@dataclasses.dataclass(frozen=True)
class SmallerDraft:
    """A smaller model, or the target's own matrices, in the place of the given draft.

    Attributes:
      name: of the preset, or such as self:int4.
      best: its fastest layout, in the type of the plan's draft.
      round_seconds: of a round with it.
      pays_from: mean accepted tokens from which it gives more tokens a second than the given draft
        does with those of the plan.
    """

    name: str
    best: DraftPass
    round_seconds: float
    pays_from: float


@dataclasses.dataclass(frozen=True)
class Drafters:
    """What the choice of a draft model is worth.

    Attributes:
      passes: the given draft in every layout and type, the fastest first; those that do not fit
        come last. A target's own draft has one layout, the target's.
      smaller: presets of its architecture and vocabulary with fewer parameters, and the target's
        own matrices; but for those that pay with no K + 1 tokens a round.
    """

    passes: tuple[DraftPass, ...]
    smaller: tuple[SmallerDraft, ...]


def weigh_drafters(
    request: Request,
    target_rules: str,
    draft_rules: str,
    target_bytes: int,
    verify_seconds: float,
    mean: float,
) -> Drafters:
    """Weighs the given draft's layouts and types, and smaller models of its type, at the plan's K.

    Args:
      request: the plan's.
      target_rules: layout of the plan's target.
      draft_rules: layout of the plan's draft.
      target_bytes: that a chip holds of the target and its cache.
      verify_seconds: of the target's pass in the plan.
      mean: accepted tokens of the plan.
    """
    left = request.chip.memory_bytes - target_bytes
    k = request.num_speculative_tokens
    wide = "int8" if request.int8 else "bfloat16"
    own = {
        f"{SELF}{name}": _pass(request, request.target, target_rules, matrices, left)
        for name, matrices in SELF_DRAFTS.items()
        if name != wide
    }
    if request.self_draft is not None:
        given = own.pop(next(name for name in own if request.self_draft == self_draft_type(name)))
        passes: tuple[DraftPass, ...] = (given,)
    else:
        passes = _passes(request, request.draft, left)
        given = next(one for one in passes if (one.rules, one.matrices) == (draft_rules, wide))
    given_round = verify_seconds + k * given.seconds
    others = []
    for name, config in PRESETS.items():
        if not _replaces(config, request.draft):
            continue
        alike = (one for one in _passes(request, config, left) if one.matrices == wide)
        others.append((name, next(alike)))
    smaller = []
    for name, best in (*others, *own.items()):
        if best.fits:
            seconds = verify_seconds + k * best.seconds
            pays_from = mean * seconds / given_round
            if pays_from <= k + 1:  # more no round settles
                smaller.append(SmallerDraft(name, best, seconds, pays_from))
    return Drafters(passes, tuple(smaller))


def _replaces(config: LlamaConfig, draft: LlamaConfig) -> bool:
    """Whether a preset drafts for the same targets with less work."""
    return (
        config.architecture == draft.architecture
        and draft.vocab_size <= config.vocab_size < 1.01 * draft.vocab_size
        and config.eos_token_ids == draft.eos_token_ids
        and config.max_context >= draft.max_context
        and config.num_layers * config.embed_size < draft.num_layers * draft.embed_size
    )


def _passes(request: Request, config: LlamaConfig, left: float) -> tuple[DraftPass, ...]:
    """Every layout and type of a draft model, the best first.

    Args:
      request: the plan's.
      config: the model's.
      left: bytes that a chip has for it.
    """
    found = [
        _pass(request, config, name, matrices, left) for name in RULES for matrices in (None, INT8)
    ]
    return tuple(sorted(found, key=lambda one: (not one.fits, one.seconds)))


def _pass(
    request: Request, config: LlamaConfig, rules: str, matrices: MatrixType | None, left: float
) -> DraftPass:
    layout = Layout(abstract_mesh(request.mesh), RULES[rules])
    workload: Workload = dataclasses.replace(request.workload, matrices=matrices)
    chip, sizes = request.chip, dict(request.mesh.axes)
    kinds = cache_exchanges(layout, config, workload)
    work = pass_work(layout, config, workload, 1, vector_memory=chip.vector_memory)
    sent = model_exchanges(layout, config, workload, 1, kinds)
    seconds = roofline_seconds(work, sent, chip, sizes)
    held = resident_bytes(layout, config, workload)
    alone = roofline_seconds(work, [], chip, sizes)
    name = "bfloat16" if matrices is None else matrices.dtype.name
    return DraftPass(rules, name, seconds, seconds - alone, held, held <= left)
