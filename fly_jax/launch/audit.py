"""The command audit: what a run kept and refused, as figures and as a page."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from fly_jax.errors import FlyJaxError
from fly_jax.evaluation.audit_file import read_audit
from fly_jax.evaluation.audit_summary import summarise, table
from fly_jax.launch.flags import Flags, flag_group
from fly_jax.parameters import parameter

_HELP = """\
python -m fly_jax.launch audit FILE [flags]

Sums up what python -m fly_jax.launch --audit FILE has written: which draft tokens were kept for
which of the target's, what was refused, and how often that changed the text. It can also write a
page on which every token of one text tells why it stands there.

Examples:
  python -m fly_jax.launch --audit audit.jsonl
  python -m fly_jax.launch audit audit.jsonl
  python -m fly_jax.launch audit audit.jsonl --html page.html --prompt 2
"""


@flag_group("Output")
class _AuditFlags:
    file: str | None = None
    pairs: int = parameter(10, "most pairs of tokens to list", low=0)
    html: str | None = parameter(None, "file for a page that shows one prompt's text")
    prompt: int = parameter(1, "number of the prompt that it shows, from 1", low=1)
    json: bool = parameter(False, "all figures as one JSON object on standard output")


def main(arguments: Sequence[str]) -> None:
    """Runs the command."""
    values = Flags("audit", _AuditFlags).parse(arguments, _HELP)
    if values.file is None:
        raise FlyJaxError(
            "audit needs a file to sum up; give one that python -m fly_jax.launch --audit FILE has "
            "written."
        )
    path = Path(values.file)
    audit = read_audit(path)
    if audit.warning is not None:
        print(audit.warning, file=sys.stderr)
    if values.html is not None:
        index = values.prompt - 1
        if index not in audit.continuations:
            known = ", ".join(str(one + 1) for one in sorted(audit.continuations)) or "none"
            raise FlyJaxError(f"{path} has no prompt {values.prompt}; it has {known}: give one.")
        if Path(values.html).resolve() == path.resolve():
            said = f"The page would be written over the audit {path}"
            raise FlyJaxError(f"{said}; give --html another file.")

        from fly_jax.launch.view import page  # which needs JAX, and so takes a second

        Path(values.html).write_text(page(audit, index), encoding="utf-8", errors="replace")
    summary = summarise(audit)
    print(json.dumps(dataclasses.asdict(summary)) if values.json else table(summary, values.pairs))
