"""The drafter of an engine: by its name, as given, or a chain of draft models over the lookup."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from fly_jax.decoding.config import RoundStatic
from fly_jax.decoding.drafters.block_draft import BlockDraft
from fly_jax.decoding.drafters.drafter import Drafter
from fly_jax.decoding.drafters.head_draft import HeadDraft
from fly_jax.decoding.drafters.lookup import Lookup
from fly_jax.decoding.drafters.model import DraftModel
from fly_jax.decoding.drafters.parallel import ParallelDraft
from fly_jax.errors import FlyJaxError
from fly_jax.models.architectures import LlamaConfig
from fly_jax.models.head import BlockHead, Eagle3Head
from fly_jax.models.head_config import Block
from fly_jax.models.llama import Llama
from fly_jax.sharding.rules import Layout

NGRAM = "ngram"  # the lookup alone

Build = Callable[[Llama, RoundStatic], Drafter]

_BUILDS: dict[str, Build] = {NGRAM: lambda _, static: static.lookup or Lookup()}
# With more layers, compiling them separately costs more than that saves on a CPU.
_MOST_UNSTACKED_LAYERS = 32


def checked_drafter(
    target: Llama, draft: Llama | Sequence[Llama] | Drafter | None, static: RoundStatic
) -> Drafter | None:
    """The drafter that is given, a chain of the given models, the lookup, or None where K is 0.

    Raises:
      FlyJaxError: K is asked for and nothing proposes, too few or many draft models, one of
        another vocabulary, or a confidence that none of them has.
    """
    if not static.num_speculative_tokens:
        return None
    if isinstance(draft, Drafter):
        return draft
    models = (draft,) if isinstance(draft, Llama) else tuple(draft or ())
    if not models and static.lookup is None:
        raise FlyJaxError(
            f"{static.num_speculative_tokens} speculative tokens were asked for without a draft "
            "model or a lookup; speculation needs one of them: give a draft or a lookup, or "
            "num_speculative_tokens=0."
        )
    if models and len(models) != 1 + len(static.level_speculative_tokens):
        raise FlyJaxError(
            f"{len(models)} draft models were given, and level_speculative_tokens has "
            f"{len(static.level_speculative_tokens)} numbers; it needs one for each draft model "
            "but the first: correct it."
        )
    for one in models:
        if one.config.vocab_size != target.config.vocab_size:
            raise FlyJaxError(
                f"A draft model has {one.config.vocab_size} tokens and the target "
                f"{target.config.vocab_size}; both need the same vocabulary: choose a draft "
                "model of the target's family."
            )
    configs = [one.config for one in models]
    check_chain(target.config, configs, static.lookup)
    check_confidence(configs, static.draft_confidence)
    if models and models[-1].config.head is not None:
        *above, head = models
        kind = BlockHead if isinstance(head.config.head, Block) else Eagle3Head
        models = (*above, kind.on(for_backend(head), (target, *above)[-1]))
    return drafter_of(models, static)


def check_chain(
    target: LlamaConfig, drafts: Sequence[LlamaConfig], lookup: Lookup | None = None
) -> None:
    """Raises FlyJaxError for draft models that cannot stand one below the other in this order."""
    for above, config, below in zip((target, *drafts), drafts, (*drafts[1:], None), strict=False):
        check_nothing_below(config, below or lookup)
        if config.head is not None:
            _check_head(above, config, "target" if above is target else "draft model above it")


def check_confidence(drafts: Sequence[LlamaConfig], least: float) -> None:
    """Raises FlyJaxError for a draft_confidence where no draft says how probable its tokens are."""
    if least and not any(isinstance(one.head, Block) and one.head.has_confidence for one in drafts):
        raise FlyJaxError(
            f"draft_confidence is {least}, and no draft says how probable its tokens are to be "
            "accepted; leave it out, or give a DSpark head with a confidence head as a draft."
        )


def _check_head(target: LlamaConfig, config: LlamaConfig, of: str) -> None:
    """Raises FlyJaxError for a head that does not fit the model that it would propose to."""
    head = config.head
    assert head is not None
    layers, shares = head.layers_of(target.num_layers), not head.has_embedding
    wrong = {
        f"features of width {head.target_embed_size}": head.target_embed_size != target.embed_size,
        f"that model's embedding for a width of {config.embed_size}": shares
        and config.embed_size != target.embed_size,
        "that model's embedding, which has not all tokens,": shares
        and target.draft_vocab_size is not None,
        f"a vocabulary of {config.vocab_size}": config.vocab_size != target.vocab_size,
        f"layers {', '.join(map(str, layers))}": not 0
        <= min(layers)
        <= max(layers)
        < target.num_layers,
    }
    if isinstance(head, Block) and head.target_num_layers not in (None, target.num_layers):
        wrong[f"a target of {head.target_num_layers} layers"] = True
    for what in (what for what, is_wrong in wrong.items() if is_wrong):
        raise FlyJaxError(
            f"The head reads {what}, and the {of} has a width of {target.embed_size}, "
            f"{target.vocab_size} tokens and {target.num_layers} layers; give the head that was "
            f"trained for this {of.split()[0]}."
        )


def drafter_of(models: Sequence[Llama], static: RoundStatic) -> Drafter | None:
    """The drafter of rounds: a chain of draft models above the lookup, or as much as there is."""
    drafter: Drafter | None = static.lookup
    kind: Callable[..., Drafter]
    sizes = (static.num_speculative_tokens, *static.level_speculative_tokens)
    for level in reversed(range(len(models))):
        model, kind = for_backend(models[level]), DraftModel
        config, lags, rests = model.config, level > 0, level == 0 and 0 in static.depths
        given: dict[str, Any] = {"lags": lags}
        if isinstance(config.head, Block):
            kind, given["least_confidence"] = BlockDraft, static.draft_confidence
        elif config.head is not None:
            kind = HeadDraft
        elif config.pard_token is not None:
            check_nothing_below(config, drafter)
            kind, given = ParallelDraft, {"may_lag": lags or rests}
        else:
            given |= {"below": drafter, "margin": static.level_margin, "rests": rests}
        given |= {"config": config, "layout": model.layout, "num_tokens": sizes[level]}
        drafter = kind(model.parameters(), **given)
    return drafter


def check_nothing_below(config: LlamaConfig, below: object) -> None:
    """Raises FlyJaxError where something is below a drafter that can have nothing below it."""
    if config.head is not None and below is not None:
        raise FlyJaxError(
            "A head was given with another draft or a lookup below it, and drafts from the states "
            "of the model above it alone; make it the last --draft, behind the model that it is "
            "of, and leave prompt_lookup_max out."
        )
    if config.pard_token is not None and below is not None:
        raise FlyJaxError(
            "A draft model with a pard_token was given with another draft or a lookup below it, "
            "and drafts in one pass, which nothing below can shorten; make it the last --draft, "
            "and leave prompt_lookup_max out."
        )


def for_backend(model: Llama) -> Llama:
    """The model with its layers as programs on this backend take them best."""
    return model.unstacked() if runs_unstacked(model) else model


def runs_unstacked(model: Llama) -> bool:
    """Tells whether programs take one array per layer where this model lies."""
    separate = separates_layers(model.config, model.layout, has_integers=model.has_integers)
    return separate and lies_on_cpu(model)


def separates_layers(config: LlamaConfig, layout: Layout | None, *, has_integers: bool) -> bool:
    """Tells whether programs take one array per layer of such a model on a CPU."""
    return layout is None and (has_integers or config.num_layers <= _MOST_UNSTACKED_LAYERS)


def lies_on_cpu(model: Llama) -> bool:
    """Tells whether the model is on CPUs; if traced, whether JAX's default backend is."""
    norm = model.final_norm.get_value()  # which every model has
    sharding = None if isinstance(norm, jax.core.Tracer) else norm.sharding
    if sharding is None:
        return jax.default_backend() == "cpu"
    return next(iter(sharding.device_set)).platform == "cpu"


def register_drafter(name: str, build: Build) -> None:
    """Registers a drafter by a name, to give as a draft; FlyJaxError where another has it.

    Args:
      name: takes precedence over a folder or hub id of this name.
      build: makes it for a target and the rounds that it is to draft for. A target that lies
        on a CPU may be unstacked; `target.stacked()` has its parameters as `parameter_specs` says.
    """
    if name in _BUILDS and _BUILDS[name] is not build:
        raise FlyJaxError(f"There is a drafter '{name}' already; give yours another name.")
    _BUILDS[name] = build


def is_registered(name: str) -> bool:
    """Tells whether a drafter has this name."""
    return name in _BUILDS


def build_drafter(name: str, target: Llama, static: RoundStatic) -> Drafter:
    """Builds the drafter of a name; FlyJaxError where there is none."""
    if name not in _BUILDS:
        raise FlyJaxError(
            f"There is no drafter '{name}'; there are {', '.join(_BUILDS)}: give one of them, or "
            "register yours with register_drafter."
        )
    return _BUILDS[name](target, static)
