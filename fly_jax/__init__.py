"""FLy, training-free loosely speculative decoding, for Llama models and their kin in JAX.

What is listed here is the public API; nothing else is promised. Names are imported on first use.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fly_jax.decoding.config import DecodingConfig as DecodingConfig
    from fly_jax.decoding.config import RoundSpec as RoundSpec
    from fly_jax.decoding.config import load_config as load_config
    from fly_jax.decoding.drafters.drafter import Draft as Draft
    from fly_jax.decoding.drafters.drafter import Drafter as Drafter
    from fly_jax.decoding.drafters.drafter import Terms as Terms
    from fly_jax.decoding.drafters.lookup import Lookup as Lookup
    from fly_jax.decoding.drafters.model import DraftModel as DraftModel
    from fly_jax.decoding.pair import OpenPair as OpenPair
    from fly_jax.decoding.pair import Pair as Pair
    from fly_jax.decoding.pair import load_pair as load_pair
    from fly_jax.decoding.pair import open_pair as open_pair
    from fly_jax.decoding.pair import register_drafter as register_drafter
    from fly_jax.decoding.reports import TokenReport as TokenReport
    from fly_jax.decoding.round import verify_step as verify_step
    from fly_jax.engine.engine import Engine as Engine
    from fly_jax.engine.generation import generate as generate
    from fly_jax.engine.request import Generation as Generation
    from fly_jax.engine.request import Request as Request
    from fly_jax.engine.request import RequestState as RequestState
    from fly_jax.engine.request import Settled as Settled
    from fly_jax.errors import FlyJaxError as FlyJaxError
    from fly_jax.evaluation.compare import compare as compare
    from fly_jax.models.cache import KVCache as KVCache
    from fly_jax.models.cache import empty_cache as empty_cache
    from fly_jax.models.layouts import Workload as Workload
    from fly_jax.models.presets import preset as preset
    from fly_jax.models.tokenizer import TextStream as TextStream
    from fly_jax.parameters import parameter as parameter
    from fly_jax.serving.async_engine import AsyncEngine as AsyncEngine
    from fly_jax.serving.async_engine import TokenStream as TokenStream
    from fly_jax.sharding.mesh import enable_compilation_cache as enable_compilation_cache
    from fly_jax.sharding.rules import Layout as Layout
    from fly_jax.sharding.rules import ShardingRules as ShardingRules
    from fly_jax.verification.correction_memory import CorrectionMemory as CorrectionMemory
    from fly_jax.verification.correction_memory import load_memory as load_memory
    from fly_jax.verification.data import column as column
    from fly_jax.verification.data import data_tree as data_tree
    from fly_jax.verification.evidence import Entropy as Entropy
    from fly_jax.verification.evidence import Needs as Needs
    from fly_jax.verification.evidence import TargetEvidence as TargetEvidence
    from fly_jax.verification.evidence import evidence as evidence
    from fly_jax.verification.rules import Budget as Budget
    from fly_jax.verification.rules import Exact as Exact
    from fly_jax.verification.rules import Fly as Fly
    from fly_jax.verification.rules import Loose as Loose
    from fly_jax.verification.rules import Rule as Rule
    from fly_jax.verification.rules import RuleState as RuleState
    from fly_jax.verification.rules import Verdict as Verdict
    from fly_jax.verification.rules import Why as Why
    from fly_jax.verification.rules import accept as accept
    from fly_jax.verification.rules import per_row as per_row
    from fly_jax.verification.rules.conditions import Clause as Clause
    from fly_jax.verification.rules.conditions import Condition as Condition
    from fly_jax.verification.rules.conditions import Seen as Seen
    from fly_jax.verification.rules.conditions import Window as Window
    from fly_jax.verification.rules.conditions import entropy_gate as entropy_gate
    from fly_jax.verification.rules.loosened import Csd as Csd
    from fly_jax.verification.rules.loosened import Lenience as Lenience
    from fly_jax.verification.rules.loosened import Lossy as Lossy
    from fly_jax.verification.rules.loosened import Margin as Margin
    from fly_jax.verification.rules.loosened import Typical as Typical
    from fly_jax.verification.sampling import Sampling as Sampling
    from fly_jax.verification.sampling import sample as sample
    from fly_jax.verification.sampling import sample_at as sample_at
    from fly_jax.verification.sampling import sampling_per_row as sampling_per_row
    from fly_jax.verification.verify import FlatVerdict as FlatVerdict
    from fly_jax.verification.verify import verify as verify
    from fly_jax.verification.verify import verify_flat as verify_flat

# The module of each name, read from the imports above, which only type checkers run.
_HOMES = {
    alias.name: node.module
    for node in ast.walk(ast.parse(pkgutil.get_data(__name__, "__init__.py") or b""))
    if isinstance(node, ast.ImportFrom) and node.module is not None
    for alias in node.names
    if alias.asname == alias.name
}

__all__ = sorted(_HOMES)


if not TYPE_CHECKING:  # with it a type checker would take any name for one that there is

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'fly_jax' has no attribute {name!r}")
        return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
