"""Drafters by name, beside draft models: a drafter is its file and its registration."""

from __future__ import annotations

from collections.abc import Callable

from fly_jax.decoding.config import RoundStatic
from fly_jax.decoding.drafters.drafter import Drafter
from fly_jax.decoding.drafters.lookup import Lookup
from fly_jax.errors import FlyJaxError
from fly_jax.models.llama import Llama

NGRAM = "ngram"  # the lookup alone

Build = Callable[[Llama, RoundStatic], Drafter]

_BUILDS: dict[str, Build] = {NGRAM: lambda _, static: static.lookup or Lookup()}


def register_drafter(name: str, build: Build) -> None:
    """Makes a drafter known by a name, which can then be given wherever a draft model can.

    Args:
      name: stands before a folder or hub id that is called so.
      build: makes it for a target and the rounds that it is to draft for. A target that lies
        on a CPU may be unstacked; `target.stacked()` has its parameters as `parameter_specs` says.

    Raises:
      FlyJaxError: another drafter has the name.
    """
    if name in _BUILDS and _BUILDS[name] is not build:
        raise FlyJaxError(f"There is a drafter '{name}' already; give yours another name.")
    _BUILDS[name] = build


def is_registered(name: str) -> bool:
    """Whether a drafter has this name."""
    return name in _BUILDS


def build_drafter(name: str, target: Llama, static: RoundStatic) -> Drafter:
    """The drafter of a name.

    Raises:
      FlyJaxError: there is none.
    """
    if name not in _BUILDS:
        raise FlyJaxError(
            f"There is no drafter '{name}'; there are {', '.join(_BUILDS)}: give one of them, or "
            "register yours with register_drafter."
        )
    return _BUILDS[name](target, static)
