"""The published models by name, from presets.toml."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from fly_jax.errors import FlyJaxError
from fly_jax.models.architectures import LlamaConfig, RopeScaling
from fly_jax.models.head_config import Block, Eagle3

_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def _fields(table: dict[str, Any]) -> dict[str, Any]:
    """The fields of a model, over those of the model that it is like."""
    own = _tuples({name: one for name, one in table.items() if name != "accepted"})
    if "rope_scaling" in own:
        own["rope_scaling"] = RopeScaling(**own["rope_scaling"])
    if "head" in own:
        own["head"] = (Block if "block_size" in own["head"] else Eagle3)(**_tuples(own["head"]))
    own.pop("parameters")
    like = own.pop("like", None)
    return own if like is None else _fields(_TABLES[like]) | own


def _tuples(table: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(one) if isinstance(one, list) else one for key, one in table.items()}


PUBLISHED = {name: table["parameters"] for name, table in _TABLES.items()}
PRESETS = {name: LlamaConfig(**_fields(table)) for name, table in _TABLES.items()}


def published_acceptance(
    target: LlamaConfig, draft: LlamaConfig, rule: str
) -> tuple[float, int, str] | None:
    """Mean accepted tokens published of a pair, with which K, and the source; None if not."""
    for name, table in _TABLES.items():
        for one in table.get("accepted", ()):
            if rule in one and (PRESETS[one["target"]], PRESETS[name]) == (target, draft):
                return one[rule], one["k"], one["source"]
    return None


def preset(name: str) -> LlamaConfig:
    """The configuration of a published model, such as `"llama-3.1-8b"`, one of `PRESETS`."""
    if name not in PRESETS:
        raise FlyJaxError(
            f"There is no preset '{name}', nor a folder or GGUF file of that name; the presets are "
            f"{', '.join(PRESETS)}: name one of them."
        )
    return PRESETS[name]
