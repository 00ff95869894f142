"""Words, meanings and colours for each `Why` of a token."""

from __future__ import annotations

from pathlib import Path

from fly_jax.verification.rules import Why

WORDS = {
    Why.MATCHED: "matched", Why.RESCUED: "rescued mismatch", Why.CORRECTED: "target's correction",
    Why.BONUS: "bonus token",
}  # fmt: skip
MEANINGS = {
    Why.MATCHED: "draft and target agreed",
    Why.RESCUED: "the draft's token was kept although the target would have written another",
    Why.CORRECTED: "the draft's token was refused and the target's own put in its place",
    Why.BONUS: "the target's own, after a block that was kept whole",
}

# The colours are those of a terminal; lines under the text tell the same without them.
PALETTE = Path(__file__).with_suffix(".css").read_text(encoding="utf-8")
