"""The events of an audit: mismatches that a run kept or refused, and what became of each.

Nothing here needs JAX: an audit is read where the models are not.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from fly_jax.decoding.reports import TokenReport
    from fly_jax.engine.request import Generation
    from fly_jax.models.tokenizer import Tokenizer

_CONTEXT_CHARACTERS = 48
_NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")

Window = Literal["held", "completed", "failed"]


@dataclasses.dataclass(frozen=True)
class Run:
    """The settings that all prompts of an audit share; the event "run".

    Attributes:
      format: what the file is.
      version: of the file's format.
      entropy_measure: what the entropies are: "top_3" (over so many most probable tokens, in nats),
        "full" (over all tokens, in nats) or "normalized" ("full", divided by ln V).
      settings: of decoding, by their names as flags, and `num_prompts`, how many there were to
        decode.
    """

    format: str
    version: int
    rule: str
    entropy_measure: str
    settings: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """A draft token that was not the target's own; the events "rescue" and "refusal".

    Probabilities are those of the target's plain softmax, whatever the temperature.

    Attributes:
      prompt: index of the prompt, from 0.
      position: index in the continuation's tokens, from 0.
      draft_text: what the draft token spells by itself.
      choice_id: the target's most probable token.
      entropy: of the target there, measured by `entropy_measure` (see `Run`).
      window: what became of the deferred window: "held" in its block, "completed" by a later block,
        "failed" in a later block, so that the row was rolled back and this token refused; None
        where it was refused at once, or the rule has no window.
      refused_by: "gate", "memory", "budget", "window", "boundary" or, for what no rule may keep,
        "always"; None for a rescue.
      regret: ln(choice_probability / draft_probability), in nats; None if it is infinite.
      budget_left: what the rescues up to this one leave of the prompt's risk budget, in nats; None
        without a budget.
      context: the end of the text before it.
    """

    prompt: int
    position: int
    draft_id: int
    draft_text: str
    choice_id: int
    choice_text: str
    draft_probability: float
    choice_probability: float
    entropy: float
    entropy_measure: str
    window: Window | None
    refused_by: str | None
    rule: str
    regret: float | None
    budget_left: float | None
    context: str

    @property
    def is_rescue(self) -> bool:
        """The draft token was kept."""
        return self.refused_by is None


@dataclasses.dataclass(frozen=True)
class Continuation:
    """The continuation of a prompt; the event "prompt".

    Attributes:
      prompt: index of the prompt, from 0.
      token_texts: what each of these tokens adds to the text, control tokens by their names.
      why: a letter for each, as in `Why.letter`.
      choice_probabilities: of the target's most probable token at each.
      entropies: of the target at each.
      text: without control tokens.
      answer: `final_answer` of the text; None if the limit cut it off.
      exact_text: what the target alone continues the prompt with; None if that was not decoded.
      exact_answer: its `final_answer`; None if the limit cut it off.
    """

    prompt: int
    prompt_text: str
    token_ids: list[int]
    token_texts: list[str]
    why: str
    choice_probabilities: list[float]
    entropies: list[float]
    text: str
    answer: str | None
    finish_reason: str
    num_rounds: int
    exact_text: str | None
    exact_answer: str | None


def final_answer(text: str) -> str:
    """The last number in a text, without thousands' commas; without one its last line."""
    numbers = _NUMBER.findall(text)
    if numbers:
        return str(numbers[-1]).replace(",", "")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def audited(
    index: int,
    prompt: str,
    generation: Generation,
    tokenizer: Tokenizer,
    run: Run,
    *,
    has_window: bool,
    budget: float | None = None,
    exact: Generation | None = None,
) -> tuple[list[Mismatch], Continuation]:
    """The events of one prompt.

    Args:
      index: of the prompt.
      generation: what it became, with its reports.
      has_window: every rescue has a deferred window behind it, whichever part of the rule made it.
      budget: the risk budget that it began with.
      exact: what the target alone continues it with, if that is known.
    """
    ids, reports = generation.token_ids, generation.reports
    # After the prompt's last token, since some tokenizers drop the space that begins a text.
    texts = tokenizer.piece_texts([generation.prompt_token_ids[-1], *ids])[1:]
    mismatches: list[Mismatch] = []
    before, spent = prompt, 0.0
    for position, (report, text) in enumerate(zip(reports, texts, strict=True)):
        if report.why.letter in "rc" and report.draft_id is not None:
            assert report.draft_probability is not None
            assert report.regret is not None
            spent += report.regret if report.why.letter == "r" else 0
            mismatches.append(
                Mismatch(
                    prompt=index,
                    position=position,
                    draft_id=report.draft_id,
                    draft_text=tokenizer.token_text(report.draft_id),
                    choice_id=report.choice_id,
                    choice_text=tokenizer.token_text(report.choice_id),
                    draft_probability=report.draft_probability,
                    choice_probability=report.choice_probability,
                    entropy=report.entropy,
                    entropy_measure=run.entropy_measure,
                    window=_window(report, has_window),
                    refused_by=refused_by(report),
                    rule=run.rule,
                    regret=report.regret if report.draft_probability > 0 else None,
                    budget_left=None if budget is None else max(budget - spent, 0.0),
                    context=before[-_CONTEXT_CHARACTERS:],
                )
            )
        before = (before + text)[-_CONTEXT_CHARACTERS:]
    text, answer = _ended(generation, tokenizer)
    exact_text, exact_answer = (None, None) if exact is None else _ended(exact, tokenizer)
    return mismatches, Continuation(
        prompt=index,
        prompt_text=prompt,
        token_ids=list(ids),
        token_texts=texts,
        why="".join(report.why.letter for report in reports),
        choice_probabilities=[report.choice_probability for report in reports],
        entropies=[report.entropy for report in reports],
        text=text,
        answer=answer,
        finish_reason=generation.finish_reason,
        num_rounds=generation.num_rounds,
        exact_text=exact_text,
        exact_answer=exact_answer,
    )


def _ended(generation: Generation, tokenizer: Tokenizer) -> tuple[str, str | None]:
    """A generation's text, and its answer if it came to its end."""
    text = tokenizer.decode(generation.token_ids, continues=True)
    return text, final_answer(text) if generation.finish_reason == "stop" else None


def _window(report: TokenReport, has_window: bool) -> Window | None:
    is_rescue = report.refused_by is None
    if report.deferred:
        return "completed" if is_rescue else "failed"
    return "held" if is_rescue and has_window else None


def refused_by(report: TokenReport) -> str | None:
    """The reason of a correction, as `Mismatch.refused_by` has it."""
    if report.refused_by is None:
        return None
    return report.refused_by.name.lower().removeprefix("refused").removeprefix("_") or "always"
