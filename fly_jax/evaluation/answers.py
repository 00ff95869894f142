"""Answers of several decodings to items of tasks, in a file that grows, and their figures."""

from __future__ import annotations

import collections
import hashlib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool
from tqdm import tqdm

from fly_jax.decoding.config import DecodingConfig
from fly_jax.decoding.pair import Pair
from fly_jax.engine.engine import Engine
from fly_jax.engine.request import Request, RequestState
from fly_jax.errors import FlyJaxError
from fly_jax.evaluation.audit_summary import CLASSES, aligned, or_dash, token_class
from fly_jax.evaluation.tasks import DRAFT, TASKS, Item
from fly_jax.verification.rules import Why

# Items for each slot that a decoding answers before the next one's turn.
_GROUPS = 4
_Z = 1.959964  # of a two-sided interval of 95%
_Z_POWER = 0.841621  # a test that decides in 80% of cases
_SAMPLES = 10_000

Key = tuple[str, str, str]  # task, item, decoding
Verdicts = Bool[np.ndarray, " items"]


class Answers:
    """A file of a setting and then an answer a line; `dropped` if the last was incomplete."""

    def __init__(self, path: Path, setting: Mapping[str, Any]) -> None:
        """Reads the complete lines; FlyJaxError for a file of another setting."""
        self.path = path
        self.records: dict[Key, dict[str, Any]] = {}
        first = json.dumps({"fly_jax_answers": 3, **setting})
        whole, end, cut = path.read_bytes().rpartition(b"\n") if path.exists() else (b"", b"", b"")
        self.dropped = bool(cut)
        lines = whole.split(b"\n") if end else []
        if not end and not first.encode().startswith(cut):
            lines = [cut]  # a file of something else
        for at, line in enumerate(lines, 1):
            try:
                one = json.loads(line)
                if at > 1:
                    self.records[one["task"], one["item"], one["decoding"]] = one
                    continue
                differs = [
                    f"its {name} is {json.dumps(one.get(name))[:60]} and here it is "
                    f"{json.dumps(value)[:60]}"
                    for name, value in json.loads(first).items()
                    if one.get(name) != value
                ]
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise FlyJaxError(
                    f"{path}, line {at} is no answer ({error!r}); give another --output."
                ) from error
            if differs:
                raise FlyJaxError(f"{path} is of another run: {differs[0]}; give another --output.")
        if cut or not end:
            with path.open("ab") as file:  # at whose end it writes
                file.truncate(len(whole + end))
                file.write(b"" if end else first.encode() + b"\n")

    def check_items(self, prompts: Mapping[tuple[str, str], str]) -> None:
        """Raises FlyJaxError for an answer to an item that is another one now."""
        for (task, item, _), record in self.records.items():
            if prompts.get((task, item), record["prompt"]) != record["prompt"]:
                raise FlyJaxError(
                    f"{self.path} has an answer to {task} {item}, which was another item in the "
                    "data of that run; give those data, or another --output."
                )

    def add(self, record: dict[str, Any]) -> None:
        """Writes down an answer."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        self.records[record["task"], record["item"], record["decoding"]] = record


def answer_items(
    pair: Pair, configs: Mapping[str, DecodingConfig], items: Sequence[Item],
    requests: Sequence[Request], answers: Answers, *, batch_size: int,
) -> None:  # fmt: skip
    """Decodes the answers that are missing, in turns, and judges and writes down each."""
    engines: dict[str, tuple[Engine, list[int]]] = {}
    for name, config in configs.items():
        missing = [at for at, one in enumerate(items) if _key(one, name) not in answers.records]
        looks_back = bool(config.lookup.num_earlier_tokens and config.num_speculative_tokens)
        builds = config.to_rule().uses_memory or (looks_back and config.rule != "exact")
        if missing and builds:  # its answers are made from those before
            missing = list(range(len(items)))
        if missing:
            wanted = [requests[at] for at in missing]
            alone = replace(pair, target=pair.drafts[0], drafts=()) if name == DRAFT else pair
            engine = Engine.of(
                alone, config,
                prompts=[one.prompt for one in wanted], num_slots=batch_size,
                max_new_tokens=max(one.max_new_tokens for one in wanted),
                audits=config.is_loosened,  # for the regret
            )  # fmt: skip
            engine.warm_up_for([replace(one, sampling=engine.spec.sampling) for one in wanted])
            engine.forget()
            engines[name] = engine, missing
    total, left = len(items) * len(configs), sum(len(missing) for _, missing in engines.values())
    pace = 0.1 if sys.stderr.isatty() else 60.0  # seconds from line to line; a log has few
    with tqdm(total=total, initial=total - left, smoothing=0.02, mininterval=pace) as bar:
        for first in range(0, len(items), _GROUPS * batch_size):
            group = range(first, first + _GROUPS * batch_size)
            for name, (engine, missing) in engines.items():
                bar.set_description(name)
                pieces = collections.defaultdict[RequestState, list[str]](list)
                asked = {
                    engine.submit(replace(requests[at], sampling=engine.spec.sampling)): items[at]
                    for at in missing
                    if at in group
                }
                for state, settled in engine.run(()):
                    pieces[state] += settled.texts
                    if settled.finish_reason is not None:
                        answers.add(_record(asked[state], name, state, pieces.pop(state)))
                        bar.update()
                engine.forget()


def _key(item: Item, decoding: str) -> Key:
    return item.task, item.name, decoding


def item_digest(item: Item, prompt: Sequence[int]) -> str:
    """A digest that tells apart what is asked, and what an answer is judged by."""
    whole = json.dumps([*prompt, item.record], sort_keys=True)
    return hashlib.sha256(whole.encode()).hexdigest()[:16]


def _record(item: Item, decoding: str, state: RequestState, pieces: list[str]) -> dict[str, Any]:
    one = state.generation
    return {
        "task": item.task, "item": item.name, "decoding": decoding,
        "prompt": item_digest(item, one.prompt_token_ids), "pieces": pieces,
        "why": "".join(why.letter for why in one.why),
        "regret": [round(of.regret or 0, 4) for of in one.reports if of.why is Why.RESCUED],
        "token_ids": one.token_ids, "num_rounds": one.num_rounds,
        "finish_reason": one.finish_reason,
        "is_right": TASKS[item.task].is_right(item.record, "".join(pieces)),
    }  # fmt: skip


def support(config: DecodingConfig) -> str | None:
    """The tokens that a loosened rule keeps at a position, windows aside, or is truncated to.

    None for other decodings, a rule that depends on what came long before, and one that draws.
    """
    rule = config.to_rule()
    rule = rule.support or rule
    draws = config.is_loosened and config.sampling.temperature > 0
    if not rule.clauses() or draws or rule.uses_memory or rule.budget is not None:
        return None
    return f"{[one.conditions for one in rule.clauses()]}, protected {config.limits.protect}"


def figures(
    answers: Answers, items: Sequence[Item], configs: Mapping[str, DecodingConfig], margin: float
) -> dict[str, dict[str, dict[str, Any]]]:
    """The figures by task and decoding, of which the first is the base; see `compare_paired`."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for task in dict.fromkeys(one.task for one in items):
        some = [one for one in items if one.task == task]
        base = [answers.records[_key(one, next(iter(configs)))] for one in some]
        for name, config in configs.items():
            ours = [answers.records[_key(one, name)] for one in some]
            same = [a["token_ids"] == b["token_ids"] for a, b in zip(ours, base, strict=True)]
            tokens = sum(len(one["token_ids"]) for one in ours)
            kinds = [
                token_class(piece or "\ufffd")  # the first bytes of a character
                for one in ours
                for piece, why in zip(one["pieces"], one["why"], strict=True)
                if why == Why.RESCUED.letter
            ]
            nats = [nat for one in ours for nat in one.get("regret", ())]
            is_known = len(nats) == len(kinds)  # else some answers are older than this figure
            of_kind = collections.defaultdict[str, float](float)
            for kind, nat in zip(kinds, nats if is_known else (), strict=is_known):
                of_kind[kind] += nat
            found.setdefault(task, {})[name] = {
                "items": [one.name for one in some],
                "right": "".join(str(int(one["is_right"])) for one in ours),
                "mean_accepted_tokens": tokens / max(sum(one["num_rounds"] for one in ours), 1),
                "rescued_per_100_tokens": 100 * len(kinds) / max(tokens, 1),
                "rescued_by_class": dict(collections.Counter(kinds).most_common()),
                "regret_per_100_tokens": 100 * sum(nats) / max(tokens, 1) if is_known else None,
                "regret_by_class": of_kind, "support": support(config),
                "is_truncated": config.truncate is not None, "same_text": sum(same) / len(same),
            }  # fmt: skip
        compare_decodings(found[task], margin)
    return found


def compare_decodings(decodings: Mapping[str, dict[str, Any]], margin: float) -> None:
    """Adds scores, and `compare_paired` of each decoding but the first.

    Decodings that rescued something are also compared as arXiv 2607.26627 asks: with the target's
    truncation sampling with the rule's own support, and with the draft alone.
    """
    verdicts = [np.array([*one["right"]]) == "1" for one in decodings.values()]
    base = verdicts[0]
    for one, right in zip(decodings.values(), verdicts, strict=True):
        one["score"] = float(right.mean())
        if right is not base:
            one |= compare_paired(base, right, margin)
        if one["rescued_per_100_tokens"]:
            one["beside"] = {
                name: compare_paired(of, right, margin)
                for (name, other), of in zip(decodings.items(), verdicts, strict=True)
                if name == DRAFT
                or (other.get("is_truncated") and other["support"] == one.get("support"))
            }


def retention(base: Verdicts, other: Verdicts) -> tuple[float, float, float] | None:
    """The other score over the base's, with a 95% bootstrap interval; None for a base of 0."""
    if not base.any():
        return None
    drawn = np.random.default_rng(0).integers(len(base), size=(_SAMPLES, len(base)))
    ours, theirs = base[drawn].sum(axis=1), other[drawn].sum(axis=1)
    low, high = np.quantile(theirs[ours > 0] / ours[ours > 0], (0.025, 0.975))
    return float(other.sum() / base.sum()), float(low), float(high)


def compare_paired(base: Verdicts, other: Verdicts, margin: float) -> dict[str, Any]:
    """Counts the items that another decoding gained and lost, and its retention.

    The verdict is Tango's score test (1998) of a difference of `margin` points, at 2.5%. Where no
    item differs it still needs a few hundred items for a point. Where it is undecided,
    `items_to_decide` are those that would decide: in 80% of cases if the decodings are equally good
    and differ as often as here, or, where there are as many already, with the difference seen.
    """
    number, share = len(base), retention(base, other)
    gained, lost = int((other & ~base).sum()), int((base & ~other).sum())
    limit = margin / 100
    score = _tango(lost / number, gained / number, limit)
    verdict = "undecided"
    if abs(score) * math.sqrt(number) >= _Z:
        verdict = "not worse" if score > 0 else "worse"
    half = (gained + lost) / number / 2
    spread = _Z * limit / _tango(half, half, limit) + _Z_POWER * math.sqrt(2 * half)
    needed = math.ceil((spread / limit) ** 2)
    if needed <= number:  # a difference of just the margin decides nothing
        needed = math.ceil((_Z / score) ** 2) if score else 0
    return {
        "retention": share and share[0], "low": share and share[1], "high": share and share[2],
        "points": 100 * (gained - lost) / number, "gained": gained, "lost": lost,
        "mcnemar_p": mcnemar(gained, lost), "verdict": verdict,
        "items_to_decide": (needed or None) if verdict == "undecided" else None,
    }  # fmt: skip


def mcnemar(gained: int, lost: int) -> float:
    """The exact two-sided p of so many items gained and lost, were both equally likely."""
    number, least = gained + lost, min(gained, lost)
    tail = sum(math.comb(number, one) for one in range(least + 1))
    return min(1.0, 2 * tail / 2**number)


def _tango(lost: float, gained: float, limit: float) -> float:
    """The statistic of one item, given shares of items: above 0 where the loss is below the limit.

    That of n items is sqrt(n) times it. The variance is that of the most probable shares with a
    loss of just the limit.
    """
    b = -lost - gained + (2 - gained + lost) * -limit
    c = lost * limit * (1 + limit)
    share = (math.sqrt(max(b * b - 8 * c, 0.0)) - b) / 4
    return (gained - lost + limit) / math.sqrt(2 * share - limit * (1 + limit))


def rows(found: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[list[str]]:
    """The figures as a table of texts, of which the first row names the columns."""
    shown = [[
        "task", "decoding", "score", "retention (95%)", "gained", "lost", "p", "verdict",
        "mean accepted", "rescued per 100", "regret per 100", "same text",
    ]]  # fmt: skip
    for task, decodings in found.items():
        for name, one in decodings.items():
            shown.append([task, name, f"{one['score']:.1%} of {len(one['right'])}"])
            shown[-1] += [*_compared(one), f"{one['mean_accepted_tokens']:.2f}"]
            nats = or_dash(one.get("regret_per_100_tokens"))
            shown[-1] += [f"{one['rescued_per_100_tokens']:.1f}", nats, f"{one['same_text']:.0%}"]
    return shown


def beside_rows(found: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[list[str]]:
    """A table, as `rows`, of loosened decodings beside truncation sampling and the draft alone."""
    shown = [["task", "rule", "score", "beside", "its score", "gained", "lost", "p"]]
    for task, decodings in found.items():
        for name, one in decodings.items():
            for other, of in one.get("beside", {}).items():
                scores = [f"{one['score']:.1%}", other, f"{decodings[other]['score']:.1%}"]
                shown.append([task, name, *scores, *_changed(of)])
    return shown


def class_rows(found: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[list[str]]:
    """A table, as `rows`, of rescued tokens by class, with the mean loss of one in nats."""
    shown = [["task", "rule", *CLASSES]]
    for task, decodings in found.items():
        for name, one in decodings.items():
            counts, nats = one["rescued_by_class"], one.get("regret_by_class", {})
            cells = {
                kind: f"{count} ({nats[kind] / count:.2f})" if kind in nats else str(count)
                for kind, count in counts.items()
            }
            if counts:
                shown.append([task, name, *(cells.get(kind, "0") for kind in CLASSES)])
    return shown


def table(found: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """The figures as an aligned text table."""
    lines = aligned(rows(found), left=(1,))
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def _compared(one: Mapping[str, Any]) -> list[str]:
    if "verdict" not in one:
        return ["-"] * 5
    more = "" if one["items_to_decide"] is None else f": {one['items_to_decide']} items would tell"
    return [kept(one), *_changed(one), one["verdict"] + more]


def _changed(one: Mapping[str, Any]) -> list[str]:
    p = one["mcnemar_p"]
    return [str(one["gained"]), str(one["lost"]), "<0.01" if p < 0.01 else f"{p:.2f}"]


def kept(one: Mapping[str, Any]) -> str:
    """Retention with its interval; a dash where there is none."""
    if one.get("retention") is None:
        return "-"
    return f"{one['retention']:.1%} [{one['low']:.1%}, {one['high']:.1%}]"
