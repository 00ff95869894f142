"""Text for the reader, each token coloured by its `Why`: as it comes, and as a page."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from fly_jax.evaluation.audit_file import Audit
from fly_jax.evaluation.colours import MEANINGS, PALETTE, WORDS
from fly_jax.verification.rules import Why

_STYLES = {Why.MATCHED: "32", Why.RESCUED: "1;4;33", Why.CORRECTED: "31", Why.BONUS: "36"}
_DIM = "2"

# Replaces characters that a terminal would obey.
CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}

_WINDOWS = {
    "held": "held in its block",
    "completed": "deferred, and completed by a later block",
    "failed": "deferred, and failed in a later block",
}


def wants_colour(stream: TextIO) -> bool:
    """Tells whether it is a terminal that is not dumb, without NO_COLOR (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def painted(text: str, style: str) -> str:
    """The text in a style, between ANSI escape sequences."""
    return f"\x1b[{style}m{text}\x1b[0m" if text else ""


def legend() -> str:
    """A line that explains the colours."""
    return "  ".join(painted(word, _STYLES[why]) for why, word in WORDS.items())


@dataclasses.dataclass
class _Row:
    """A prompt that is being continued; its text is `waiting` while an earlier row is written."""

    waiting: str  # at first its heading
    done: bool = False


class TextView:
    """A view of a batch: it writes row after row, the first unfinished one as it grows."""

    def __init__(self, out: TextIO) -> None:
        """Takes the output: in colour, with a legend, on a terminal; plain elsewhere."""
        self._out = out
        self._terminal, self._colour = out.isatty(), wants_colour(out)
        self._rows: list[_Row] = []
        self._current = 0
        if self._colour:
            self._write(legend() + "\n\n")

    def begin(self, prompts: Sequence[str]) -> None:
        """Begins a batch, with the headings of its rows."""
        self._rows = [_Row(self._shown(prompt, _DIM)) for prompt in prompts]
        self._current = 0
        self._flush(self._rows[0])

    def push(self, row: int, texts: Sequence[str], why: Sequence[Why], done: bool = False) -> None:
        """Takes the texts of a row's settled tokens; `done` with its last ones."""
        state = self._rows[row]
        for text, reason in zip(texts, why, strict=True):
            state.waiting += self._shown(text, _STYLES[reason])
        if done:
            state.done = True
            state.waiting += "\n\n"
        if row == self._current:
            self._flush(state)

    def ended(self) -> Iterator[int]:
        """Yields the rows that are written completely, each before the next one begins."""
        while self._current < len(self._rows) and self._rows[self._current].done:
            yield self._current
            self._current += 1
            if self._current < len(self._rows):
                self._flush(self._rows[self._current])

    def _flush(self, row: _Row) -> None:
        self._write(row.waiting)
        row.waiting = ""

    def _shown(self, text: str, style: str) -> str:
        text = text.translate(CONTROLS) if self._terminal else text
        return painted(text, style) if self._colour else text

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


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
    import jinja2

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
