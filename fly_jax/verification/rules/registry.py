"""The loosened rules by name: a rule is its file and its line here."""

from __future__ import annotations

from fly_jax.verification.rules.csd import Csd
from fly_jax.verification.rules.fly import Fly
from fly_jax.verification.rules.lenience import Lenience
from fly_jax.verification.rules.lossy import Lossy
from fly_jax.verification.rules.margin import Margin
from fly_jax.verification.rules.rule import Loose
from fly_jax.verification.rules.typical import Typical

RULES: dict[str, type[Loose]] = {
    "fly": Fly,
    "csd": Csd,
    "lossy": Lossy,
    "lenience": Lenience,
    "typical": Typical,
    "margin": Margin,
}
