"""A page of one generation: tokens coloured by their `Why`, and the rest on pointing."""

from __future__ import annotations

from pathlib import Path

import jinja2

from fly_jax.evaluation.audit_file import Audit
from fly_jax.evaluation.colours import MEANINGS, PALETTE, WORDS
from fly_jax.launch.view import CONTROLS

_WINDOWS = {
    "held": "held in its block",
    "completed": "deferred, and completed by a later block",
    "failed": "deferred, and failed in a later block",
}


def page(audit: Audit, index: int) -> str:
    """The page of one prompt: it loads and runs nothing, and a model's text is never markup."""
    mismatches = {one.position: one for one in audit.mismatches if one.prompt == index}
    return rendered(
        "page.html", title=f"Prompt {index + 1}: why each token stands there", windows=_WINDOWS,
        run=audit.run, one=audit.continuations[index], mismatches=mismatches,
        rescued=sum(one.is_rescue for one in mismatches.values()),
    )  # fmt: skip


def rendered(template: str, **given: object) -> str:
    """Renders a template of this folder, which escapes all that it is given."""
    loader, strict = jinja2.FileSystemLoader(Path(__file__).parent), jinja2.StrictUndefined
    made = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, undefined=strict)
    made.filters |= {
        # Without control characters, which a model may write.
        "shown": lambda text: text.translate(CONTROLS),
        "quoted": lambda text: repr(text.translate(CONTROLS)),
        "nats": lambda value: "infinite" if value is None else f"{value:.3f}",
    }
    kinds = {why.letter: (word, MEANINGS[why]) for why, word in WORDS.items()}
    return made.get_template(template).render(palette=PALETTE, kinds=kinds, **given)
