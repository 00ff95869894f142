"""The summary of an audit: pairs of tokens, kinds of token, and answers that changed."""

from __future__ import annotations

import collections
import dataclasses
import re
import statistics
from collections.abc import Collection, Iterable, Sequence

from fly_jax.evaluation.audit_file import Audit, Mismatch

# In order: a pair is of the first class that one of its two tokens belongs to.
CLASSES = {
    "digits": "has a digit", "capitalised": "begins with a capital: names, and starts of sentences",
    "identifiers": "has an underscore, or a capital within",
    "operators": "of + - * / % = < > & | ^ ~ @ ! only",
    "punctuation": "other signs without a letter", "white space": "nothing else",
    "words": "all other words: wording, synonyms",
}  # fmt: skip
_OPERATORS = frozenset("+-*/%=<>&|^~@!")
_IDENTIFIER = re.compile(r"_|[a-z][A-Z]")


def token_class(text: str) -> str:
    """The name in `CLASSES` of a token's text; a part of a character is punctuation."""
    if not (word := text.strip()):
        return "white space"
    if any(character.isdigit() for character in word):
        return "digits"
    if _IDENTIFIER.search(word):
        return "identifiers"
    if not (first := next(filter(str.isalpha, word), "")):
        return "operators" if set(word) <= _OPERATORS else "punctuation"
    return "capitalised" if first.isupper() else "words"


def pair_class(mismatch: Mismatch) -> str:
    """The first class in `CLASSES` of the draft token and the target's choice."""
    found = {token_class(mismatch.draft_text), token_class(mismatch.choice_text)}
    return next(name for name in CLASSES if name in found)


@dataclasses.dataclass(frozen=True)
class PairCount:
    """A draft token and the target's choice, and how often the one was kept for the other.

    Regrets are in nats, None if one of them is infinite; probabilities are of the plain softmax.
    """

    draft: str
    choice: str
    kind: str
    count: int
    mean_regret: float | None
    mean_draft_probability: float
    mean_choice_probability: float


@dataclasses.dataclass(frozen=True)
class ClassCount:
    """Mismatches of one class, kept and refused; the mean regret is the rescues', in nats."""

    rescues: int
    refusals: int
    mean_regret: float | None


@dataclasses.dataclass(frozen=True)
class Summary:
    """The figures of one audit."""

    rule: str
    prompts: int
    tokens: int
    rescues: int
    regret: float | None  # of all rescues together, in nats; None if one is infinite
    pairs: tuple[PairCount, ...]
    classes: dict[str, ClassCount]
    windows: dict[str, int]  # rescues by the fate of their window; "none" without one
    windows_failed: int  # mismatches that were deferred and then rolled back
    refusals: dict[str, int]
    compared: int  # prompts of which the target's own text is known
    texts_differ: int  # of these
    answered: int  # of these, those where both texts came to their end within the limit
    answers_differ: int  # of these, those whose final answer is another
    rescues_per_100_tokens: float


def summarise(audit: Audit) -> Summary:
    """Counts the events of an audit."""
    rescues = [one for one in audit.mismatches if one.is_rescue]
    refusals = [one for one in audit.mismatches if not one.is_rescue]
    texts = collections.defaultdict(list)
    for one in rescues:
        texts[one.draft_text, one.choice_text].append(one)
    kinds = collections.defaultdict[str, tuple[list[Mismatch], list[Mismatch]]](lambda: ([], []))
    for one in audit.mismatches:
        kinds[pair_class(one)][not one.is_rescue].append(one)
    found = {name: kinds[name] for name in CLASSES if name in kinds}
    classes = {name: ClassCount(len(a), len(b), _mean(a)) for name, (a, b) in found.items()}
    known = [one for one in audit.continuations.values() if one.exact_text is not None]
    ended = [one for one in known if None not in (one.answer, one.exact_answer)]
    tokens = sum(len(one.token_ids) for one in audit.continuations.values())
    return Summary(
        rule=audit.run.rule, prompts=len(audit.continuations), tokens=tokens, rescues=len(rescues),
        regret=_sum(rescues),
        pairs=tuple(sorted(map(_pair, texts.values()), key=lambda one: (-one.count, one.draft))),
        classes=classes, windows=_counted(one.window or "none" for one in rescues),
        windows_failed=sum(one.window == "failed" for one in refusals),
        refusals=_counted(one.refused_by or "" for one in refusals), compared=len(known),
        texts_differ=sum(one.text != one.exact_text for one in known), answered=len(ended),
        answers_differ=sum(one.answer != one.exact_answer for one in ended),
        rescues_per_100_tokens=100 * len(rescues) / max(tokens, 1),
    )  # fmt: skip


def _pair(found: Sequence[Mismatch]) -> PairCount:
    first = found[0]
    draft = statistics.fmean(one.draft_probability for one in found)
    choice = statistics.fmean(one.choice_probability for one in found)
    texts = first.draft_text, first.choice_text
    return PairCount(*texts, pair_class(first), len(found), _mean(found), draft, choice)


def _sum(found: Sequence[Mismatch]) -> float | None:
    known = [one.regret for one in found if one.regret is not None]
    return sum(known) if len(known) == len(found) else None


def _mean(found: Sequence[Mismatch]) -> float | None:
    total = _sum(found)
    return total / len(found) if found and total is not None else None


def _counted(names: Iterable[str]) -> dict[str, int]:
    return dict(collections.Counter(names).most_common())


def table(summary: Summary, most_pairs: int) -> str:
    """The summary as text, with so many pairs at most."""
    lines = [
        f"rule {summary.rule}: {summary.prompts} prompts, {summary.tokens} tokens, "
        f"{summary.rescues} rescues ({summary.rescues_per_100_tokens:.1f} per 100 tokens, "
        f"regret {or_dash(summary.regret)} nats in all)"
    ]
    if summary.compared:
        lines.append(
            f"beside the target's own text: {summary.texts_differ} of {summary.compared} texts "
            f"differ; of the {summary.answered} that end within the limit {summary.answers_differ} "
            "have another final answer"
        )
    else:
        lines.append("the target's own text was not decoded: nothing is known of the answers")
    windows = [f"{count} {name}" for name, count in summary.windows.items() if name != "none"]
    if windows or summary.windows_failed:
        lines.append(f"windows: {', '.join([*windows, f'{summary.windows_failed} failed'])}")
    if summary.refusals:
        refused = ", ".join(f"{count} by {name}" for name, count in summary.refusals.items())
        lines.append(f"refused: {refused}".replace("by always", "that no rule may keep"))
    if summary.classes:
        classes = [
            (name, str(one.rescues), str(one.refusals), or_dash(one.mean_regret), CLASSES[name])
            for name, one in summary.classes.items()
        ]
        lines += ["", *aligned([("class", "rescued", "refused", "mean regret", ""), *classes], {4})]
    if summary.pairs:
        heading = ("draft kept", "target's choice", "times", "mean regret", "p draft", "p choice")
        rows: list[tuple[str, ...]] = [(*heading, "class")]
        for pair in summary.pairs[:most_pairs]:
            tokens = (repr(pair.draft), repr(pair.choice), str(pair.count))
            means = (pair.mean_regret, pair.mean_draft_probability, pair.mean_choice_probability)
            rows.append((*tokens, *map(or_dash, means), pair.kind))
        lines += ["", *aligned(rows, {1, 6})]
        if len(summary.pairs) > most_pairs:
            lines.append(f"and {len(summary.pairs) - most_pairs} more pairs")
    return "\n".join(lines)


def or_dash(value: float | None, form: str = "{:.2f}") -> str:
    """A number as `str.format` writes it, or a dash for none."""
    return "-" if value is None else form.format(value)


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = ()) -> list[str]:
    """Aligns columns: the first one and those in `left` to the left, others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    pads = [str.ljust if at == 0 or at in left else str.rjust for at in range(len(widths))]
    cells = (zip(pads, row, widths, strict=True) for row in rows)
    return ["  ".join(pad(cell, width) for pad, cell, width in row).rstrip() for row in cells]
