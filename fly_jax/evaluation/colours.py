"""Why a token stands there, for the eye: words, meanings and the colours of pages."""

from __future__ import annotations

from fly_jax.verification.rules import Why

WORDS = {
    Why.MATCHED: "matched",
    Why.RESCUED: "rescued mismatch",
    Why.CORRECTED: "target's correction",
    Why.BONUS: "bonus token",
}
MEANINGS = {
    Why.MATCHED: "draft and target agreed",
    Why.RESCUED: "the draft's token was kept although the target would have written another",
    Why.CORRECTED: "the draft's token was refused and the target's own put in its place",
    Why.BONUS: "the target's own, after a block that was kept whole",
}

# The colours are those of a terminal; lines under the text tell the same without them.
PALETTE = """\
:root {
  color-scheme: light dark;
  --page: #ffffff; --ink: #1c1e21; --dim: #5c6066; --line: #c9ccd1; --panel: #f3f4f6;
  --m: #22662b; --r: #6b4700; --r-back: #ffe9b0; --c: #b3141c; --c-back: #ffe3e1; --b: #00606e;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #16181c; --ink: #e4e6ea; --dim: #a2a7b0; --line: #454a53; --panel: #22252b;
    --m: #8fd19a; --r: #ffd773; --r-back: #4a3a08; --c: #ff9d97; --c-back: #55201f; --b: #73d3e0;
  }
}
.t { border-radius: .2rem; margin-right: 1px; }
.m { color: var(--m); }
.r { color: var(--r); background: var(--r-back); font-weight: bold;
     text-decoration: underline double; text-underline-offset: .25em; }
.c { color: var(--c); background: var(--c-back);
     text-decoration: underline wavy; text-underline-offset: .25em; }
.b { color: var(--b); text-decoration: underline dotted; text-underline-offset: .25em; }
"""
