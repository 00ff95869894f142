"""The page at /: one file that loads nothing from elsewhere."""

from __future__ import annotations

import functools
import json
from pathlib import Path

from fly_jax.evaluation.colours import MEANINGS, PALETTE, WORDS

_FILE = Path(__file__).with_name("page.html")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src 'self'; img-src data:; form-action 'none'; "
    "base-uri 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@functools.cache
def page() -> str:
    """The page, in the words and colours of the command line."""
    kinds = {
        why.name.lower(): {"letter": why.letter, "word": word, "meaning": MEANINGS[why]}
        for why, word in WORDS.items()
    }
    text = _FILE.read_text(encoding="utf-8")
    return text.replace("/*PALETTE*/", PALETTE).replace('"KINDS"', json.dumps(kinds))
