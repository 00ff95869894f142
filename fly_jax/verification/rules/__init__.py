"""Acceptance rules: which draft tokens a row keeps, what follows them, and why."""

from fly_jax.verification.rules.conditions import RuleState as RuleState
from fly_jax.verification.rules.conditions import Verdict as Verdict
from fly_jax.verification.rules.conditions import Why as Why
from fly_jax.verification.rules.loosened import RULES as RULES
from fly_jax.verification.rules.loosened import VLLM_NAMES as VLLM_NAMES
from fly_jax.verification.rules.loosened import Fly as Fly
from fly_jax.verification.rules.loosened import from_vllm_names as from_vllm_names
from fly_jax.verification.rules.rule import Budget as Budget
from fly_jax.verification.rules.rule import Exact as Exact
from fly_jax.verification.rules.rule import Loose as Loose
from fly_jax.verification.rules.rule import Rule as Rule
from fly_jax.verification.rules.rule import accept as accept
from fly_jax.verification.rules.rule import per_row as per_row
