"""Configs in files: TOML, and the reference code's JSON."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from fly_jax.decoding.config import DecodingConfig
from fly_jax.errors import FlyJaxError
from fly_jax.parameters import Parameter, check_keys


def load_config(path: str | Path) -> DecodingConfig:
    """Reads a config: TOML with the keywords of `DecodingConfig`, or the reference code's JSON.

    Raises:
      FlyJaxError: a file that cannot be read, an unknown key (named), or a value of no use.
    """
    path = Path(path)
    if path.suffix not in (".toml", ".json"):
        raise FlyJaxError(
            f"The config {path} is neither .toml nor .json; give a TOML file with the flags' "
            "names, or a JSON file with the reference code's keys."
        )
    try:
        text = path.read_text(encoding="utf-8")
        values = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise FlyJaxError(
            f"The config {path} cannot be read ({error.strerror}); correct the path."
        ) from error
    except (ValueError, RecursionError) as error:  # of both parsers, and of text that is not UTF-8
        reason = " ".join(str(error).split()).rstrip(".")
        raise FlyJaxError(
            f"The config {path} is not valid {path.suffix[1:].upper()} ({reason}); correct it."
        ) from error
    try:
        return DecodingConfig(**values) if path.suffix == ".toml" else from_reference_json(values)
    except FlyJaxError as error:
        raise FlyJaxError(f"In the config {path}: {error}") from error


def from_reference_json(values: Any) -> DecodingConfig:
    """A config from the reference code's (AMD-AGI/FLy): its window, lookup and defaults included.

    With temperature 0 the tokens are the reference's. With a temperature they are not: the
    reference then draws the target's tokens twice and drafts greedily, and FLy here rescues what
    rejection sampling refused.

    Args:
      values: a parsed JSON file; the keys that name models or logging are ignored.

    Raises:
      FlyJaxError: no JSON object, an unknown key, a key that is missing, or a value of no use.
    """
    if not isinstance(values, dict):
        raise FlyJaxError("a JSON object was expected; write the reference code's keys in braces.")
    check_keys(values, (*_REFERENCE_KINDS, *_REFERENCE_IGNORED))
    for name, kind in _REFERENCE_KINDS.items():
        if name in values:
            Parameter(name, name, kind, default=kind(), help="").check_given(values[name])
    if values.get("dual_tok"):
        raise FlyJaxError(
            "dual_tok is true; draft and target must share a tokenizer: choose such a pair and "
            "leave the key out."
        )
    if "spd_k" not in values:
        raise FlyJaxError("spd_k is missing; give the number of draft tokens of a round.")
    temperature = values.get("temperature", 0.0)
    rule = "sampled" if temperature > 0 else "exact"
    window_size = 0
    if values.get("enable_fly", False):
        rule = "fly"
        if not values.get("abla_no_window", False):
            if "win_len" not in values:
                raise FlyJaxError("win_len is missing; enable_fly needs the window's length.")
            window_size = values["win_len"]
    if not values.get("use_sd", True):
        rule = "autoregressive"
    use_ngram = values.get("use_ngram", False)
    return DecodingConfig(
        rule=rule,
        num_speculative_tokens=values["spd_k"],
        entropy_threshold=values.get("entropy_thre", 0.0),
        window_size=window_size,
        window="reference",
        entropy="top_k",
        entropy_top_k=3,
        prompt_lookup_max=values.get("max_ngram_size", 3) if use_ngram else 0,
        prompt_lookup_min=1,
        prompt_lookup_tokens=values.get("num_ngram_pred_tokens", 10),
        prompt_lookup_match="earliest",
        temperature=temperature,
    )


_REFERENCE_KINDS: dict[str, type] = {
    "spd_k": int,
    "enable_fly": bool,
    "win_len": int,
    "entropy_thre": float,
    "abla_no_window": bool,
    "use_ngram": bool,
    "max_ngram_size": int,
    "num_ngram_pred_tokens": int,
    "temperature": float,
    "dual_tok": bool,
    "use_sd": bool,
}
_REFERENCE_IGNORED = ("target_model_path", "draft_model_path", "verbose")
