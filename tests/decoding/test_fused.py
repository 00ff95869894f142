"""The fused loop against its steps and oracles of Fly, also where windows stay open over rounds.

And every token's report equals what the two models' logits say, in passes without a cache.
"""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import random_pairs as pairs
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import Array
from random_pairs import PROMPTS
from refusals import assert_refused

from fly_jax import Generation, KVCache, Lookup, Sampling, Terms, empty_cache, verify, verify_step
from fly_jax.decoding import deferral
from fly_jax.decoding.config import RoundSpec
from fly_jax.decoding.drafters.model import DraftModel, ModelState
from fly_jax.engine.engine import Engine
from fly_jax.models.llama import Llama
from fly_jax.verification.evidence import Entropy
from fly_jax.verification.rules import Budget, Exact, Fly, Rule, Why
from fly_jax.verification.rules.loosened import Margin, Typical

Emitted = tuple[list[int], str]  # the tokens of a row, and the letters of why they stand there
Plain = tuple[Emitted, collections.Counter[str]]  # and its rounds, windows deferred, rolled back
MAX_NEW_TOKENS, DRAFTED = 24, 5
FLY, DEFERRED = Fly(0.4, 2), Fly(0.2, 2)
PROTECTED = np.isin(np.arange(pairs.CONFIG.vocab_size), pairs.EOS)

prompt = st.lists(st.integers(0, pairs.CONFIG.vocab_size - 1), min_size=1, max_size=12)
draft_alone = jax.jit(DraftModel.propose, static_argnames="num_speculative_tokens")
verify_alone = jax.jit(verify_step)
decide_alone = jax.jit(verify)


@jax.jit
def prefilled(target: Llama, drafter: DraftModel, text: Array) -> tuple[KVCache, ModelState]:
    cache = target.extend(text, empty_cache(target.config, *text.shape, jnp.float32))[1]
    state = drafter.init(*text.shape, jnp.float32)
    return cache, drafter.prefill(state, text, jnp.int32(0), None)


def foreign_engine(spec: RoundSpec, pair: int, noise: float) -> list[Emitted]:
    """Somebody else's loop: her own text and caches, and the steps called one by one."""
    rule, sampling = spec.rule, spec.sampling
    text, length = pairs.padded(PROMPTS, pairs.CAPACITY)
    target = pairs.random_target(pair)
    drafter = pairs.model_drafter(pairs.random_draft(pair, noise), spec.static.lookup, DRAFTED)
    target_cache, drafter_state = prefilled(target, drafter, text)
    keys = draft_keys = verify_keys = pairs.keys_from(pair, len(PROMPTS))
    emitted: list[Emitted] = [([], "") for _ in PROMPTS]
    live = set(range(len(PROMPTS)))
    while live:
        if sampling is not None:
            split = jax.vmap(lambda key: jax.random.split(key, 3))(keys)
            keys, draft_keys, verify_keys = split[:, 0], split[:, 1], split[:, 2]
        terms = Terms(None, sampling, None if sampling is None else draft_keys)
        proposal, drafter_state = draft_alone(drafter, drafter_state, text, length, DRAFTED, terms)
        logits, target_cache = verify_alone(target, target_cache, text, length, proposal.tokens)
        drawn = {"sampling": sampling, "draft_logits": proposal.logits, "key": verify_keys}
        kept = decide_alone(rule, logits, proposal.tokens, protected=PROTECTED, **drawn)
        # At once: on the device each number that is taken out would be a program of its own.
        kept, drafted = jax.device_get((kept, proposal.tokens))
        for row in sorted(live):
            count = int(kept.num_accepted[row])
            new = [*drafted[row, :count].tolist(), int(kept.next_token[row])]
            why = "".join("mr"[one] for one in kept.why[row, :count].tolist())
            emitted[row], ended = settled(emitted[row], new, why + "cb"[count == DRAFTED])
            text[row, length[row] : length[row] + len(new)] = new
            if ended:
                live.discard(row)
            else:
                length[row] += len(new)
    return emitted


def settled(row: Emitted, new: list[int], why: str) -> tuple[Emitted, bool]:
    """What a row has emitted after a round, up to the end of the text, and whether that is all."""
    tokens = pairs.until_end([*row[0], *new])[:MAX_NEW_TOKENS]
    ended = tokens[-1] in pairs.EOS or len(tokens) == MAX_NEW_TOKENS
    return (tokens, (row[1] + why)[: len(tokens)]), ended


def emitted_by(rows: list[Generation]) -> list[Emitted]:
    return [(row.token_ids, "".join(why.letter for why in row.why)) for row in rows]


@functools.cache
def fly_by_the_oracle(prompt: tuple[int, ...], pair: int, noise: float) -> Emitted:
    """Whole passes without a cache, and the plain loops of the rule's oracle."""
    row, ended = (list[int](), ""), False
    while not ended:
        drafted, seen, decided = pairs.fly_block(FLY, pair, noise, [*prompt, *row[0]], DRAFTED)
        kept = decided.num_accepted
        # M(ATCHED), R(ESCUED), C(ORRECTED), B(ONUS)
        why = "".join(name[0].lower() for name in [*decided.why[:kept], decided.next_why])
        row, ended = settled(row, [*drafted[:kept], seen[kept].argmax], why)
    return row


@pytest.mark.parametrize("name", ["exact", "fly", "fly, lookup", "sampled"])
def test_steps_alone_and_the_oracle_give_the_same_tokens_and_the_account_adds_up(name: str) -> None:
    spec, seen = pairs.SPECS[name], set[str]()
    for pair, noise in ((0, 0.2), (2, 0.5), (3, 0.3), *((1, noise) for noise in pairs.NOISES)):
        rows = pairs.pair_engine(pair, spec, noise).generate(PROMPTS, MAX_NEW_TOKENS, seed=pair)
        found = emitted_by(rows)
        assert found == foreign_engine(spec, pair, noise)
        if "fly" in name:
            assert found == [fly_by_the_oracle(tuple(one), pair, noise) for one in PROMPTS]
        for row, (tokens, why) in zip(rows, found, strict=True):
            assert len(why) == len(tokens)
            assert row.num_draft_tokens == DRAFTED * row.num_rounds
            assert row.num_accepted_tokens == why.count("m") + why.count("r")
            assert row.num_rescued_tokens == why.count("r")
            # Every round but a last one that was cut short ends in a token of the target's own.
            assert why.count("c") + why.count("b") == row.num_rounds - (why[-1] in "mr")
            assert row.mean_accepted_tokens == len(tokens) / row.num_rounds
            assert row.num_rounds <= row.num_draft_passes <= DRAFTED * row.num_rounds
            assert row.seconds > 0
            seen |= set(why)
            if noise == 0 and name == "exact":
                assert {"m"} <= set(why) <= {"m", "b"}
    assert seen == set("mrcb" if "fly" in name else "mcb")


def test_a_round_needs_no_more_room_than_it_says() -> None:
    """The last position of the text and of the cache may be the last that a round writes."""
    spec = pairs.rounds(12, lookup=Lookup(num_speculative_tokens=3), eos_token_ids=())
    prompts = [[1] * 24, [6, 3], [7, 3]]
    engine = pairs.pair_engine(2, spec, 0.2, max_length=24 + MAX_NEW_TOKENS)
    assert engine._capacity == 24 + MAX_NEW_TOKENS + engine._programs.room
    rows = engine.generate(prompts, MAX_NEW_TOKENS)
    assert pairs.tokens_of(rows) == pairs.greedy(pairs.random_target(2), prompts)


def deferring_pays(rates: list[float], drafted: int, missing: int) -> bool:
    """By the row's fading counts of what was matched, rescued, refused and cut."""
    matched, rescued, refused, _ = rates
    loose = (matched + rescued + 0.25 * 0.85) / (matched + rescued + refused + 0.25)
    expected = sum(loose**i for i in range(drafted + 1))
    strict = (matched + 0.25 * 0.75) / (sum(rates) + 0.25)
    completed = min(strict**missing, 0.65)
    return completed * (DEFERRED.window_size + 1 - missing + expected) > expected


def plain_row(pair: int, noise: float, prompt: list[int], limit: int, k: int) -> Plain:
    """Decodes one prompt as defined, with draft and target as functions of the whole text."""
    text, whys, rates = list(prompt), [""] * len(prompt), [4 * 0.9, 4 * 0.05, 4 * 0.05, 0.0]
    start, replacement, remaining, fade = 0, 0, 0, 0.5 ** (1 / 16)
    row, last = collections.Counter[str](), len(prompt) + limit
    while True:
        row["rounds"] += 1
        drafted, seen, decided = pairs.fly_block(DEFERRED, pair, noise, text, k)
        accepted = [one.accepted for one in seen[:k]]
        kept, new, begin = decided.num_accepted, False, len(text)
        why = [name[0].lower() for name in decided.why[:kept]]  # m(atched) or r(escued)
        cut = kept < k and decided.why[kept] == "REFUSED_BOUNDARY"
        j, missing = kept + 1, kept + 1 + DEFERRED.window_size - k
        if cut and last - begin > k + 2 * missing and deferring_pays(rates, k, missing):
            new, kept, why = True, k, [*why, "r", *"m" * (k - j)]
        block, ending = [*drafted[:kept], seen[kept].argmax], "b" if kept == k else "c"
        counts = (why.count("m"), why.count("r"), kept < k and not cut, cut and not new)
        rates = [old * fade + one for old, one in zip(rates, counts, strict=True)]
        block = pairs.until_end(block[: last - begin])
        count, ended = len(block), begin + len(block) >= last or block[-1] in pairs.EOS
        broken = remaining > 0 and not (all(accepted[:remaining]) and count >= min(remaining, k))
        text += block
        whys += [*why, ending][:count]
        if new and not broken and j - 1 < count:
            start, replacement, remaining = begin + j - 1, seen[j - 1].argmax, missing
            row["deferred"] += 1
        else:
            remaining = max(remaining - k, 0)
        if broken or (remaining > 0 and ended):
            text, whys, remaining = [*text[:start], replacement], [*whys[:start], "c"], 0
            row["rollbacks"] += 1
            ended = len(text) >= last or replacement in pairs.EOS
        if ended:
            return (text[len(prompt) :], "".join(whys[len(prompt) :])), row


def deferring(rule: Rule, k: int, pair: int, noise: float, lookup: Lookup | None = None) -> Engine:
    sizes = {"deferred_window": rule.longest_window, "rounds_per_dispatch": 2, "audits": True}
    return pairs.pair_engine(pair, pairs.rounds(k, rule, lookup=lookup, **sizes), noise)


@pytest.mark.parametrize("k", [2, 5])
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    pair=st.integers(0, 2), noise=st.sampled_from((0.05, 0.2, 0.4)),
    prompts=st.lists(prompt, min_size=1, max_size=4), limit=st.integers(1, 24),
)  # fmt: skip
def test_windows_that_stay_open_equal_a_plain_walk(
    k: int, pair: int, noise: float, prompts: list[list[int]], limit: int
) -> None:
    """And what stands has been paid for, of a budget that is never spent."""
    rows = deferring(Budget(DEFERRED, 1000.0), k, pair, noise).generate(prompts, limit)
    for row, found, prompt in zip(rows, emitted_by(rows), prompts, strict=True):
        expected, counts = plain_row(pair, noise, prompt, limit, k)
        assert found == expected
        assert (row.num_rounds, row.num_rollbacks) == (counts["rounds"], counts["rollbacks"])
        assert row.num_rescued_tokens == found[1].count("r")
        stands = [report.regret for report in row.reports if report.why is Why.RESCUED]
        assert row.regret == pytest.approx(sum(stands), abs=1e-2)
        deferred = [report for report in row.reports if report.deferred]
        assert {report.verdict for report in deferred} <= {Why.REFUSED_BOUNDARY}
        failed = [report for report in deferred if report.why is Why.CORRECTED]
        assert {report.refused_by for report in failed} <= {Why.REFUSED_WINDOW}
        stood = [report for report in deferred if report.why is Why.RESCUED]
        assert (len(failed), len(stood)) == (counts["rollbacks"], counts["deferred"] - len(failed))


def test_windows_are_deferred_completed_and_rolled_back() -> None:
    """The cases above would prove nothing if no window were ever left open."""
    rows = [plain_row(pair, 0.2, [first, 3, 5], 24, 2) for pair in range(3) for first in range(8)]
    counts = sum((counts for _, counts in rows), collections.Counter[str]())
    assert counts["deferred"] > counts["rollbacks"] > 0
    # At K = W the published rule rescues nothing at all.
    assert any("r" in why for (_, why), _ in rows)


def test_a_text_that_ends_in_its_open_window_is_rolled_back() -> None:
    """Before it has the draft tokens that the window lacks, each of which is accepted."""
    one, none = jnp.ones(1, jnp.int32), jnp.zeros(1, jnp.int32)
    # 7 is the mismatch, and the block's draft is 8, 9.
    text = jnp.asarray([[3, 1, 4, 7, 5, 8, 9, 0]], jnp.int32)
    window = dataclasses.replace(deferral.no_windows(1, 3, False), start=3 * one, remaining=2 * one)
    window = dataclasses.replace(window, replacement=6 * one)
    new = deferral.Deferral(none > 0, none, none, none.astype(jnp.float32))
    kept = jnp.ones((1, 3), bool)
    for count, left in ((1, [6]), (2, [7, 5, 8, 9])):
        block = deferral.Emitted(text[:, 5:], jnp.zeros((1, 3), jnp.int8), count * one, None)
        ended = jnp.asarray([True])
        found = deferral.close(window, new, none, text, 5 * one, block, 2 * one, kept, ended)
        assert found.emitted.tokens[0, : len(left)].tolist() == left
        assert found.emitted.count.tolist() == [len(left)]
        assert found.length.tolist() == [3 + len(left)]
        assert found.emitted.rolled_back is not None
        assert found.emitted.rolled_back.tolist() == [count == 1]
        assert not found.window.is_open.any()


def test_what_cannot_be_deferred() -> None:
    drawn = Sampling(0.5)
    for rounds in ((Exact(),), (Margin(),), (Exact(), drawn), (DEFERRED, drawn)):
        assert_refused("boundary is 'defer'", pairs.rounds, 4, *rounds, deferred_window=2)


@pytest.fixture
def always_deferring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows stay open whatever the rates say, in rounds that no other test decodes with."""
    monkeypatch.setattr(deferral, "pays", lambda stats, *sizes: stats.matched >= 0)


@pytest.mark.usefixtures("always_deferring")
def test_after_a_rollback_all_is_as_if_nothing_had_been_provisional() -> None:
    """The caches, the lookup's history and the text: from there on a fresh engine does the same.

    The rates by which deferral is chosen remember the failed attempt, so they are made blind here.
    """
    prompts = [[first, 3, 5, 3] for first in range(8)]
    given = (Fly(0.0, 3), 4, 1, 0.1, Lookup(num_speculative_tokens=3))
    rows, fresh = deferring(*given).generate(prompts, 24), deferring(*given)
    assert sum(row.num_rollbacks for row in rows) > 3
    for row, prompt in zip(rows, prompts, strict=True):
        for cut in range(1, len(row.token_ids)):
            if row.why[cut - 1].letter != "c":  # a rollback ends with a correction
                continue
            fresh.forget()
            (rest,) = fresh.generate([[*prompt, *row.token_ids[:cut]]], 24 - cut)
            assert rest.token_ids == row.token_ids[cut:]
            assert rest.why == row.why[cut:]


@pytest.mark.usefixtures("always_deferring")
def test_a_window_that_nothing_is_drafted_for_does_not_stay_open() -> None:
    """A lookup finds nothing for many rounds: windows do not outgrow the state."""
    lookup = Lookup(3, 3, num_speculative_tokens=4)
    spec = pairs.rounds(4, Fly(0.0, 2), lookup=lookup, deferred_window=2)
    prompts = [[*[first, 3, 5, 7] * 2, first] for first in range(40)]
    rows = pairs.pair_engine(1, spec).generate(prompts, 40)
    assert sum(row.num_rollbacks for row in rows) > 3
    for row, prompt in zip(rows, prompts, strict=True):
        chosen = pairs.logits_after(pairs.random_target(1), [*prompt, *row.token_ids]).argmax(-1)
        told = zip(chosen[len(prompt) - 1 : -1], row.token_ids, row.why, strict=True)
        assert all(own == token or why.letter == "r" for own, token, why in told)
        assert len(row.token_ids) == 40 or row.token_ids[-1] in pairs.EOS


# Of reports.
PAIR, NOISE, GAP, TOTAL = 2, 0.2, 1.5, 2.5
EXACT = pairs.SPECS["exact"].with_static(audits=True)
BY_TWO = EXACT.with_static(rounds_per_dispatch=2)
AUDITED = {
    "fly": dataclasses.replace(BY_TWO, rule=Fly(0.4, 2, entropy="full")),
    "budget": dataclasses.replace(EXACT, rule=Budget(Margin(gap=GAP), TOTAL)),
    "deferred": pairs.SPECS["deferred"],
}
MEASURES = {"fly": ("full", 0), "budget": ("top_k", 3), "deferred": ("top_k", 3)}


def decode(spec: RoundSpec) -> list[Generation]:
    prompts = [[first, 3, 5] for first in range(8)]
    return pairs.pair_engine(PAIR, spec, NOISE).generate(prompts, MAX_NEW_TOKENS)


@functools.cache
def audited(name: str) -> list[Generation]:
    return decode(AUDITED[name])


@pytest.mark.parametrize("name", AUDITED)
def test_numbers_are_those_of_the_models(name: str) -> None:
    whys = set()
    for row in audited(name):
        models = (pairs.random_target(PAIR), pairs.random_draft(PAIR, NOISE))
        text, first = [*row.prompt_token_ids, *row.token_ids], len(row.prompt_token_ids) - 1
        target, draft = (pairs.logits_after(one, text)[first:] for one in models)
        assert len(row.reports) == len(row.token_ids)
        for at, report in enumerate(row.reports):
            assert (report.token_id, report.why) == (row.token_ids[at], row.why[at])
            drafted = None if report.why is Why.BONUS else int(draft[at].argmax())
            seen = oracle.greedy_evidence(target[at], drafted, *MEASURES[name])
            assert report.choice_id == seen.argmax
            assert report.draft_id == drafted
            best = np.exp(seen.argmax_logit - seen.log_sum_exp)
            assert report.choice_probability == pytest.approx(best, abs=1e-4)
            assert report.entropy == pytest.approx(seen.entropy, abs=1e-4)
            if drafted is None:
                assert (report.draft_probability, report.regret) == (None, None)
            else:
                gap = seen.argmax_logit - seen.draft_logit
                share = np.exp(seen.draft_logit - seen.log_sum_exp)
                assert report.draft_probability == pytest.approx(share, abs=1e-4)
                assert report.regret == pytest.approx(gap, abs=1e-3)
            kept = report.why in (Why.MATCHED, Why.RESCUED)
            assert report.token_id == (drafted if kept else seen.argmax)
            assert (report.refused_by is None) == (report.why is not Why.CORRECTED)
            if not report.deferred and report.why is not Why.CORRECTED:
                assert report.verdict is report.why
            whys.add(report.why)
    assert whys == {Why.MATCHED, Why.RESCUED, Why.CORRECTED, Why.BONUS}


def test_a_budget_refuses_what_it_cannot_pay() -> None:
    found = set()
    for row in audited("budget"):
        spent = 0.0
        for report in row.reports:
            assert report.regret is not None or report.why is Why.BONUS
            if report.why is Why.RESCUED:
                spent += report.regret
            elif report.why is Why.CORRECTED:
                protected = report.draft_id in pairs.EOS or report.choice_id in pairs.EOS
                expected = Why.REFUSED if protected else Why.REFUSED_GATE
                if not protected and report.regret <= GAP:
                    assert spent + report.regret > TOTAL or spent == TOTAL
                    expected = Why.REFUSED_BUDGET
                assert report.refused_by is expected
                found.add(expected)
        assert row.regret == pytest.approx(spent, abs=1e-4)
    assert found >= {Why.REFUSED_GATE, Why.REFUSED_BUDGET}


def test_reports_change_no_token_and_are_not_there_unasked() -> None:
    silent = decode(AUDITED["deferred"].with_static(audits=False))
    for one, other in zip(silent, audited("deferred"), strict=True):
        assert one == dataclasses.replace(other, reports=[], seconds=one.seconds)
    # Nor are they a part of the program.
    for spec in AUDITED.values():
        plain = spec.with_static(audits=False)
        window = pairs.pair_engine(PAIR, plain, NOISE)._slots().window
        assert window is None or window.reports is None
        assert plain.static.needs(plain.rule) == plain.rule.needs


def test_the_entropy_that_is_reported() -> None:
    measures: dict[Rule, Entropy] = {Exact(): Entropy(), Fly() & Typical(): Entropy()}
    measures |= {Fly(entropy="normalized"): Entropy("normalized"), Typical(): Entropy("full")}
    for rule, measure in measures.items():
        assert EXACT.static.needs(rule).entropy == measure


def test_sampled_corrections_tell_what_was_drafted() -> None:
    rows = decode(pairs.SPECS["sampled"].with_static(audits=True))
    refused = [one for row in rows for one in row.reports if one.why is Why.CORRECTED]
    assert all(one.draft_id not in (None, one.token_id) for one in refused)
    assert {one.refused_by for one in refused} == {Why.REFUSED}
