"""One generation as a page: every token coloured by why it stands there, the rest on pointing."""

from __future__ import annotations

import html
from collections.abc import Mapping

from fly_jax.evaluation.audit_file import Audit
from fly_jax.evaluation.colours import MEANINGS, PALETTE, WORDS
from fly_jax.evaluation.mismatches import Continuation, Mismatch
from fly_jax.launch.view import CONTROLS
from fly_jax.verification.rules import Why

_WINDOWS = {
    "held": "held in its block",
    "completed": "deferred, and completed by a later block",
    "failed": "deferred, and failed in a later block",
}

_STYLE = """
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 1.5rem 1.25rem 13rem; max-width: 62rem;
  background: var(--page); color: var(--ink); font: 1rem/1.5 system-ui, sans-serif;
}
h1 { font-size: 1.35rem; margin: 0 0 .25rem; }
h2 { font-size: 1.05rem; margin: 0; display: inline; }
p { margin: .25rem 0; }
.dim, .hint { color: var(--dim); }
.legend { list-style: none; margin: 1rem 0 .5rem; padding: 0; }
.legend li { display: grid; grid-template-columns: max-content 1fr; gap: 0 .6rem;
             margin: .3rem 0; align-items: baseline; }
.legend b { font-variant-numeric: tabular-nums; }
.legend li > span:last-child { grid-column: 1 / -1; color: var(--dim); }
@media (min-width: 40rem) {
  .legend li { grid-template-columns: 11.5rem 3rem 1fr; }
  .legend b { text-align: right; }
  .legend .t { justify-self: start; }
  .legend li > span:last-child { grid-column: auto; color: inherit; }
}
.text, .plain {
  white-space: pre-wrap; overflow-wrap: anywhere; tab-size: 4;
  font: .95rem/1.9 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace;
  border: 1px solid var(--line); border-radius: .5rem; padding: 1rem; margin: 1rem 0;
}
.text .t:hover, .text .t:focus { outline: 2px solid currentColor; outline-offset: 1px; }
.end::before { content: "\\21B5"; opacity: .65; }
.part::before { content: "\\25CC"; }
.tip {
  display: none; position: fixed; inset: auto 0 0 0; z-index: 1; padding: .8rem 1.25rem 1rem;
  background: var(--panel); color: var(--ink); border-top: 2px solid var(--line);
  font: 1rem/1.45 system-ui, sans-serif; white-space: normal; text-decoration: none;
}
.tip > span { display: block; max-width: 59.5rem; margin: 0 auto; }
.t:focus > .tip, .t:hover > .tip { display: block; }
.t:hover > .tip { z-index: 2; }
.choice { display: flex; gap: .6rem; align-items: center; }
.choice > span:first-child { min-width: 8.5rem; color: var(--dim); }
.choice > code { min-width: 9rem; }
.bar { flex: none; width: 10rem; height: .7rem; border: 1px solid var(--dim); border-radius: .2rem;
       overflow: hidden; }
.bar > span { display: block; height: 100%; width: var(--share); background: var(--b); }
code { font: .95em ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace;
       white-space: pre-wrap; overflow-wrap: anywhere; }
details { margin: 1rem 0; }
summary { cursor: pointer; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: .75rem 0; font-size: .92rem; }
th, td { text-align: left; padding: .25rem .7rem .25rem 0; border-bottom: 1px solid var(--line);
         vertical-align: top; }
td.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.token code { white-space: pre; }
"""


def page(audit: Audit, index: int) -> str:
    """The page of one prompt, in one piece: it loads nothing and runs nothing.

    Args:
      audit: what was written down.
      index: of the prompt.
    """
    one = audit.continuations[index]
    mismatches = {each.position: each for each in audit.mismatches if each.prompt == index}
    rescues = sum(each.is_rescue for each in mismatches.values())
    passes = f"{len(one.token_ids)} tokens in {one.num_rounds} passes of the target"
    tokens = "".join(
        _token(at, one, mismatches.get(at), audit.run.entropy_measure)
        for at in range(len(one.token_ids))
    )
    title = f"Prompt {index + 1}: why each token stands there"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{PALETTE}{_STYLE}</style>
</head>
<body>
<header>
<h1>{title}</h1>
<p>Rule <code>{_text(audit.run.rule)}</code>, {passes} ({_text(one.finish_reason)}),
{rescues} rescued, {len(mismatches) - rescues} corrected.</p>
{_verdict(one)}
{_legend(one)}
<p class="hint">Point at a token, touch it, or go from mismatch to mismatch with Tab.</p>
</header>
<main>
<div class="text"><span class="dim">{_text(one.prompt_text)}</span>{tokens}</div>
{_table(mismatches)}
{_exact(one)}
</main>
</body>
</html>
"""


def _legend(one: Continuation) -> str:
    items = [
        f'<li><span class="t {why.letter}">{html.escape(word)}</span>'
        f"<b>{one.why.count(why.letter)}</b><span>{html.escape(MEANINGS[why])}</span></li>"
        for why, word in WORDS.items()
    ]
    return f'<ul class="legend">{"".join(items)}</ul>'


def _verdict(one: Continuation) -> str:
    if one.exact_text is None:
        return "<p>What the target alone would have written was not decoded.</p>"
    if one.text == one.exact_text:
        return "<p>The target alone writes the same text.</p>"
    answers = (one.answer, one.exact_answer)
    if None in answers:
        return "<p>The target alone writes another text.</p>"
    if one.answer == one.exact_answer:
        return "<p>The target alone writes another text with the same final answer.</p>"
    mine, exact = (_code(answer or "") for answer in answers)
    return f"<p>The target alone writes another text, and ends with {exact} instead of {mine}.</p>"


def _token(at: int, one: Continuation, mismatch: Mismatch | None, measure: str) -> str:
    why = next(each for each in WORDS if each.letter == one.why[at])
    shown = _text(one.token_texts[at]).replace("\n", '<span class="end"></span>\n')
    shown = shown or '<span class="part"></span>'
    stop = -1 if mismatch is None else 0  # with the keyboard, from mismatch to mismatch
    return (
        f'<span class="t {why.letter}" tabindex="{stop}">{shown}'
        f'<span class="tip"><span>{_tip(at, one, why, mismatch, measure)}</span></span></span>'
    )


def _tip(at: int, one: Continuation, why: Why, mismatch: Mismatch | None, measure: str) -> str:
    head = f"<b>{html.escape(WORDS[why])}</b>, token {at + 1}: {html.escape(MEANINGS[why])}."
    entropy = f"entropy {one.entropies[at]:.3f} ({html.escape(measure)})"
    if mismatch is None:
        choice = one.choice_probabilities[at]
        return f"{head}<br>The target's most probable token has p = {choice:.4f}; {entropy}."
    facts = [entropy]
    facts.append(f"regret {_number(mismatch.regret)} nats")
    if mismatch.window is not None:
        facts.append(f"window {_WINDOWS[mismatch.window]}")
    if mismatch.refused_by is not None:
        facts.append(f"refused by: {html.escape(mismatch.refused_by)}")
    if mismatch.budget_left is not None:
        facts.append(f"budget left {mismatch.budget_left:.3f} nats")
    return (
        head
        + _choice("draft's token", mismatch.draft_text, mismatch.draft_probability)
        + _choice("target's choice", mismatch.choice_text, mismatch.choice_probability)
        + "; ".join(facts)
        + "."
    )


def _choice(name: str, text: str, probability: float) -> str:
    return (
        f'<span class="choice"><span>{html.escape(name)}</span>{_code(text)}'
        f'<span class="bar"><span style="--share: {probability:.1%}"></span></span>'
        f"<span>p = {probability:.4f}</span></span>"
    )


def _table(mismatches: Mapping[int, Mismatch]) -> str:
    if not mismatches:
        return ""
    rows = "".join(map(_row, mismatches.values()))
    headings = (
        "token", "text before", "draft's token", "p", "target's choice", "p", "entropy",
        "regret (nats)", "what became of it",
    )  # fmt: skip
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in headings)
    return (
        f"<details><summary><h2>All {len(mismatches)} mismatches</h2></summary>"
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
        "</div></details>"
    )


def _row(one: Mismatch) -> str:
    outcome = "kept" if one.refused_by is None else f"refused by {one.refused_by}"
    if one.window is not None:
        outcome += f"; window {_WINDOWS[one.window]}"
    cells = (
        ("n", str(one.position + 1)),
        ("", _code(one.context[-24:])),
        ("token", _code(one.draft_text)),
        ("n", f"{one.draft_probability:.3f}"),
        ("token", _code(one.choice_text)),
        ("n", f"{one.choice_probability:.3f}"),
        ("n", f"{one.entropy:.3f}"),
        ("n", _number(one.regret)),
        ("", html.escape(outcome)),
    )
    return "<tr>" + "".join(f'<td class="{kind}">{cell}</td>' for kind, cell in cells) + "</tr>"


def _exact(one: Continuation) -> str:
    if one.exact_text is None or one.exact_text == one.text:
        return ""
    return (
        "<details><summary><h2>What the target alone writes</h2></summary>"
        f'<div class="plain">{_text(one.exact_text)}</div></details>'
    )


def _text(text: str) -> str:
    """Text as such, whatever a model has written: no markup, no control characters."""
    return html.escape(text.translate(CONTROLS))


def _code(text: str) -> str:
    """A token by itself, so that white space shows."""
    return f"<code>{html.escape(repr(text.translate(CONTROLS)))}</code>"


def _number(value: float | None) -> str:
    return "infinite" if value is None else f"{value:.3f}"
