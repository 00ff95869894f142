"""Windows that stay open across rounds equal a plain walk over the text, token by token."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
import pytest
import random_pairs as pairs
from hypothesis import given, settings
from hypothesis import strategies as st

from fly_jax import Budget, Exact, Fly, FlyJaxError, Generation, Lookup, Margin, Rule, Sampling
from fly_jax.decoding import deferral
from fly_jax.decoding.config import RoundSpec, RoundStatic

LETTERS = {"MATCHED": "m", "RESCUED": "r"}
WINDOW, THRESHOLD = 2, 0.2
RULE = Fly(entropy_threshold=THRESHOLD, window_size=WINDOW)


@dataclasses.dataclass
class Plain:
    """One row, decoded with provisional rescues as the definition has it."""

    tokens: list[int]
    why: str = ""
    rounds: int = 0
    deferred: int = 0
    rollbacks: int = 0


class Rates:
    """The row's fading counts of what was matched, rescued, refused and cut."""

    def __init__(self) -> None:
        self.counts = [4 * 0.9, 4 * 0.05, 4 * 0.05, 0.0]

    def see(self, *counts: int) -> None:
        fade = 0.5 ** (1 / 16)
        self.counts = [old * fade + new for old, new in zip(self.counts, counts, strict=True)]

    def pays(self, j: int, k: int) -> bool:
        matched, rescued, refused, _ = self.counts
        loose = (matched + rescued + 0.25 * 0.85) / (matched + rescued + refused + 0.25)
        expected = sum(loose**i for i in range(k + 1))
        strict = (matched + 0.25 * 0.75) / (sum(self.counts) + 0.25)
        completed = min(strict ** (j + WINDOW - k), 0.65)
        return completed * (k + 1 - j + expected) > expected


def plain_row(pair: int, noise: float, prompt: list[int], limit: int, k: int) -> Plain:
    """Decodes one prompt with draft and target as functions of the whole text."""
    text, whys, rates = list(prompt), [""] * len(prompt), Rates()
    start, replacement, remaining = 0, 0, 0
    row = Plain([])
    last = len(prompt) + limit
    while True:
        row.rounds += 1
        drafted, seen, decided = pairs.fly_block(RULE, pair, noise, text, k)
        accepted = [one.accepted for one in seen[:k]]
        kept, new, begin = decided.num_accepted, False, len(text)
        why = [LETTERS.get(one, "c") for one in decided.why[:kept]]
        cut = kept < k and decided.why[kept] == "REFUSED_BOUNDARY"
        j = kept + 1
        room = last - len(text) >= k + 1 + 2 * (j + WINDOW - k)
        if cut and room and rates.pays(j, k):
            new, why = True, [*why, "r", *"m" * (k - j)]
            block = [*drafted, seen[k].argmax]
        else:
            block = [*drafted[:kept], seen[kept].argmax]
        ending = "b" if new or kept == k else "c"
        rates.see(why.count("m"), why.count("r"), int(kept < k and not cut), int(cut and not new))
        count = next((i + 1 for i, token in enumerate(block) if token in pairs.EOS), len(block))
        count = min(count, last - len(text))
        ended = len(text) + count >= last or block[count - 1] in pairs.EOS
        needed = min(remaining, k)
        broken = remaining > 0 and (not all(accepted[:needed]) or count < needed)
        text += block[:count]
        whys += [*why, ending][:count]
        if new and not broken and j - 1 < count:
            start, replacement, remaining = begin + j - 1, seen[j - 1].argmax, j + WINDOW - k
            row.deferred += 1
        else:
            remaining = max(remaining - k, 0)
        if broken or (remaining > 0 and ended):
            text, whys, remaining = [*text[:start], replacement], [*whys[:start], "c"], 0
            row.rollbacks += 1
            ended = len(text) >= last or replacement in pairs.EOS
        if ended:
            row.tokens, row.why = text[len(prompt) :], "".join(whys[len(prompt) :])
            return row


def decode(
    rule: Rule, k: int, pair: int, noise: float, prompts: list[list[int]], limit: int,
    lookup: Lookup | None = None, rows: int = pairs.ROWS,
) -> list[Generation]:  # fmt: skip
    given = {"num_speculative_tokens": k, "lookup": lookup, "deferred_window": rule.longest_window}
    spec = dataclasses.replace(pairs.SPECS["deferred"].with_static(**given), rule=rule)
    return pairs.pair_engine(pair, spec, noise, rows=rows).generate(prompts, limit)


token_lists = st.lists(st.integers(0, pairs.CONFIG.vocab_size - 1), min_size=1, max_size=12)


@pytest.mark.parametrize("k", [2, 5])
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    pair=st.integers(0, 2),
    noise=st.sampled_from((0.05, 0.2, 0.4)),
    prompts=st.lists(token_lists, min_size=1, max_size=4),
    limit=st.integers(1, 24),
)
def test_equals_the_plain_walk(
    k: int, pair: int, noise: float, prompts: list[list[int]], limit: int
) -> None:
    for account, prompt in zip(decode(RULE, k, pair, noise, prompts, limit), prompts, strict=True):
        plain = plain_row(pair, noise, prompt, limit, k)
        assert account.token_ids == plain.tokens
        assert "".join(why.letter for why in account.why) == plain.why
        assert account.num_rounds == plain.rounds
        assert account.num_rollbacks == plain.rollbacks
        assert account.num_rescued_tokens == plain.why.count("r")
        deferred = [report.why.letter for report in account.reports if report.deferred]
        assert deferred.count("c") == plain.rollbacks
        assert deferred.count("r") == plain.deferred - plain.rollbacks


def test_windows_are_deferred_completed_and_rolled_back() -> None:
    """The cases above would prove nothing if no window were ever left open."""
    rows = [plain_row(pair, 0.2, [first, 3, 5], 24, 2) for pair in range(3) for first in range(8)]
    assert sum(row.rollbacks for row in rows) > 0
    assert sum(row.deferred for row in rows) > sum(row.rollbacks for row in rows)
    # At K = W the published rule rescues nothing at all.
    assert sum(row.why.count("r") for row in rows) > 0


@pytest.mark.parametrize("noise", pairs.NOISES)
def test_a_budget_of_nothing_is_lossless(noise: float) -> None:
    prompts = [[1, 2, 3], [4, 5], [6] * 9]
    rows = decode(Budget(RULE, 0.0), 2, 1, noise, prompts, 20, rows=8)
    expected = pairs.autoregressive(pairs.random_target(1), prompts, 20)
    assert [row.token_ids for row in rows] == expected
    assert {row.regret for row in rows} == {0.0}


def test_the_budget_pays_for_what_stands() -> None:
    prompts = [[first, 3, 5] for first in range(8)]
    rows = decode(Budget(RULE, 1000.0), 2, 2, 0.2, prompts, 24, rows=8)
    assert sum(row.num_rollbacks for row in rows) > 0
    for row, prompt in zip(rows, prompts, strict=True):
        logits = pairs.logits_after(pairs.random_target(2), [*prompt, *row.token_ids])
        gaps = [
            logits[len(prompt) + i - 1].max() - logits[len(prompt) + i - 1][token]
            for i, token in enumerate(row.token_ids)
            if row.why[i].letter == "r"
        ]
        assert row.regret == pytest.approx(sum(gaps), abs=1e-2)


@pytest.mark.parametrize(
    ("rule", "sampling"),
    [(Exact(), None), (Margin(), None), (Exact(), Sampling(0.5)), (RULE, Sampling(0.5))],
)
def test_what_cannot_be_deferred(rule: Rule, sampling: Sampling | None) -> None:
    with pytest.raises(FlyJaxError, match="boundary is 'defer'"):
        RoundSpec(rule, RoundStatic(4, deferred_window=2), sampling)


@pytest.fixture
def always_deferring(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Windows stay open whatever the rates say, in programs of one test alone."""
    monkeypatch.setattr(deferral, "pays", lambda stats, *sizes: stats.matched >= 0)
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.usefixtures("always_deferring")
def test_after_a_rollback_all_is_as_if_nothing_had_been_provisional() -> None:
    """The caches, the lookup's history and the text: from there on a fresh engine does the same.

    The rates by which deferral is chosen remember the failed attempt, so they are made blind here.
    """
    lookup, rule = Lookup(num_speculative_tokens=3), Fly(entropy_threshold=0.0, window_size=3)
    prompts = [[first, 3, 5, 3] for first in range(8)]
    rows = decode(rule, 4, 1, 0.1, prompts, 24, lookup, rows=8)
    assert sum(row.num_rollbacks for row in rows) > 3
    for row, prompt in zip(rows, prompts, strict=True):
        for cut in range(1, len(row.token_ids)):
            if row.why[cut - 1].letter != "c":  # a rollback ends with a correction
                continue
            text = [*prompt, *row.token_ids[:cut]]
            (rest,) = decode(rule, 4, 1, 0.1, [text], 24 - cut, lookup, rows=8)
            assert rest.token_ids == row.token_ids[cut:]
            assert rest.why == row.why[cut:]


@pytest.mark.usefixtures("always_deferring")
def test_a_window_that_nothing_is_drafted_for_does_not_stay_open() -> None:
    """A lookup finds nothing for many rounds: windows do not outgrow the state."""
    spec = RoundSpec(
        Fly(0.0, 2),
        RoundStatic(4, Lookup(3, 3, num_speculative_tokens=4), pairs.EOS, deferred_window=2),
    )
    prompts = [[first, 3, 5, 7, first, 3, 5, 7, first] for first in range(40)]
    rows = pairs.pair_engine(1, spec, rows=8).generate(prompts, 40)
    assert sum(row.num_rollbacks for row in rows) > 3
    for row, prompt in zip(rows, prompts, strict=True):
        chosen = pairs.logits_after(pairs.random_target(1), [*prompt, *row.token_ids]).argmax(-1)
        own = chosen[len(prompt) - 1 : -1].tolist()
        for token, other, why in zip(row.token_ids, own, row.why, strict=True):
            assert token == other or why.letter == "r"
        assert len(row.token_ids) == 40 or row.token_ids[-1] in pairs.EOS
