"""Acceptance rules: which draft tokens a row keeps, what follows them, and why."""

from fly_jax.verification.rules.acceptance import Acceptance as Acceptance
from fly_jax.verification.rules.acceptance import Exact as Exact
from fly_jax.verification.rules.acceptance import Rule as Rule
from fly_jax.verification.rules.acceptance import RuleState as RuleState
from fly_jax.verification.rules.acceptance import Sampled as Sampled
from fly_jax.verification.rules.acceptance import Why as Why
from fly_jax.verification.rules.acceptance import accept as accept
from fly_jax.verification.rules.acceptance import initial_state as initial_state
from fly_jax.verification.rules.budget import Budget as Budget
from fly_jax.verification.rules.conditions import GATE_OFF as GATE_OFF
from fly_jax.verification.rules.conditions import entropy_gate as entropy_gate
from fly_jax.verification.rules.loose import Loose as Loose
from fly_jax.verification.rules.published import Csd as Csd
from fly_jax.verification.rules.published import Fly as Fly
from fly_jax.verification.rules.published import Lenience as Lenience
from fly_jax.verification.rules.published import Lossy as Lossy
from fly_jax.verification.rules.published import Margin as Margin
from fly_jax.verification.rules.published import Typical as Typical
