"""Loosened rules, alone, combined and within a budget, against the loops of the oracle."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Alternative

from fly_jax.decoding.config import DecodingConfig
from fly_jax.errors import FlyJaxError
from fly_jax.integrations.vllm_tpu.startup import decoding_config
from fly_jax.parameters import parameters_of
from fly_jax.verification.correction_memory import CorrectionMemory
from fly_jax.verification.evidence import Entropy, Needs, TargetEvidence, evidence
from fly_jax.verification.rules import (
    Budget,
    Csd,
    Exact,
    Fly,
    Lenience,
    Loose,
    Lossy,
    Margin,
    Rule,
    RuleState,
    Typical,
    Why,
    accept,
)
from fly_jax.verification.rules.loosened import rule_names
from fly_jax.verification.sampling import Sampling

ROWS, VOCAB = 8, 6

WHYS = {why.value: why.name for why in Why}

decide = jax.jit(accept)


@dataclasses.dataclass
class Case:
    """Random evidence, in steps so coarse that sums are exact and no threshold is met by chance."""

    seen: TargetEvidence
    draft: np.ndarray
    num_drafted: np.ndarray
    protected: np.ndarray
    memory: CorrectionMemory
    budget: np.ndarray

    def column(self, name: str) -> np.ndarray:
        return np.asarray(getattr(self.seen, name), np.float64)[:, :-1]

    @property
    def gap(self) -> np.ndarray:
        return self.column("argmax_logit") - self.column("draft_logit")

    @property
    def log_prob(self) -> np.ndarray:
        return self.column("draft_logit") - self.column("log_sum_exp")


def random_case(seed: int, num_draft: int) -> Case:
    rng = np.random.default_rng(seed)
    shape = (ROWS, num_draft + 1)
    accepted = rng.random(shape) < rng.choice([0.5, 0.8, 0.95])
    accepted[:, -1] = False
    argmax_logit = rng.integers(-10, 80, shape) / 8
    gap = np.where(accepted, 0, rng.integers(0, 50, shape) / rng.choice([8, 32], shape))
    log_sum_exp = argmax_logit + rng.integers(0, 100, shape) / 64
    draft_logit = np.where(rng.random(shape) < 0.05, -np.inf, argmax_logit - gap)
    draft = rng.integers(VOCAB, size=(ROWS, num_draft))
    argmax = rng.integers(VOCAB, size=shape)
    num_drafted = np.where(
        rng.random(ROWS) < 0.5, num_draft, rng.integers(num_draft + 1, size=ROWS)
    )
    memory = CorrectionMemory("v", min_count=1, num_keys=VOCAB**2)
    memory.add([(d, t) for d in range(VOCAB) for t in range(VOCAB) if rng.random() < 0.5], 2)
    single = functools.partial(np.asarray, dtype=np.float32)
    seen = TargetEvidence(
        argmax=argmax.astype(np.int32),
        argmax_logit=single(argmax_logit),
        draft_logit=single(draft_logit),
        log_sum_exp=single(log_sum_exp),
        entropy=single(rng.choice([0.0, 0.005, 0.1, 0.5], shape)),
        draft_log_prob=single(draft_logit - log_sum_exp),
        accepted=accepted,
        replacement=rng.integers(VOCAB, size=shape).astype(np.int32),
        full_entropy=single(rng.integers(0, 200, shape) / 64),
        scaled_uniform=single(np.where(rng.random((ROWS, 1)) < 0.3, -1, rng.random(shape))),
    )
    return Case(
        seen,
        draft,
        num_drafted,
        rng.random(VOCAB) < 0.15,
        memory,
        single(rng.choice([0, 0.125, 1.5, 4, 100], ROWS)),
    )


Definition = Callable[[Case], np.ndarray]


def gate(case: Case) -> np.ndarray:
    return case.column("entropy") >= np.float32(0.3)


def near(nats: float) -> Definition:
    return lambda case: case.gap <= nats


def remembered(case: Case) -> np.ndarray:
    pairs = zip(case.draft.ravel(), case.seen.argmax[:, :-1].ravel(), strict=True)
    known = [case.memory.count(int(d), int(t)) > 1 for d, t in pairs]
    return np.array(known).reshape(case.draft.shape)


def probable(case: Case) -> np.ndarray:
    return np.exp(case.log_prob) >= 0.3


def typical(case: Case) -> np.ndarray:
    return np.exp(case.log_prob) > np.minimum(0.09, 0.3 * np.exp(-case.column("full_entropy")))


def lenient(case: Case) -> np.ndarray:
    uniform = case.column("scaled_uniform")
    drawn = 0.4 * uniform < np.exp(case.column("draft_log_prob"))
    return np.where(uniform < 0, near(-math.log(0.4))(case), drawn)


GATE, MEMORY = "REFUSED_GATE", "REFUSED_MEMORY"
Clauses = list[tuple[list[tuple[str, Definition]], list[tuple[int, str]]]]
W1, W2 = (1, "paper"), (2, "paper")
CSD = [(GATE, near(-math.log(0.01))), (MEMORY, remembered)]

# What each rule means, written out as alternatives by hand.
MEANINGS: dict[str, tuple[Loose, Clauses]] = {
    "fly": (Fly(window_size=2), [([(GATE, gate)], [W2])]),
    "fly, reference": (
        Fly(window_size=3, window="reference"), [([(GATE, gate)], [(3, "reference")])],
    ),
    "fly without a gate, reference": (
        Fly(0.0, window_size=4, window="reference"), [([], [(4, "reference")])],
    ),
    "csd": (Csd(), [(CSD, [])]),
    "csd, memory alone": (Csd(consistency=None), [([(MEMORY, remembered)], [])]),
    "csd, consistency alone": (Csd(0.3, memory=False), [([(GATE, near(-math.log(0.3)))], [])]),
    "csd, whatever the consistency": (Csd(0.0), [([(MEMORY, remembered)], [])]),
    "lossy": (Lossy(), [([(GATE, probable)], [])]),
    "lenience": (Lenience(0.4), [([(GATE, lenient)], [])]),
    "typical": (Typical(), [([(GATE, typical)], [])]),
    "margin": (Margin(), [([(GATE, near(0.3))], [])]),
    "fly & margin": (
        Fly(window_size=2) & Margin(gap=1.3), [([(GATE, gate), (GATE, near(1.3))], [W2])],
    ),
    "fly | csd": (Fly(window_size=2) | Csd(), [([(GATE, gate)], [W2]), (CSD, [])]),
    "(fly | csd) & typical": (
        (Fly(window_size=2) | Csd()) & Typical(),
        [([(GATE, gate), (GATE, typical)], [W2]), ([*CSD, (GATE, typical)], [])],
    ),
    "fly & fly": (
        Fly(0.0, window_size=2) & Fly(window_size=1), [([(GATE, gate)], [W2, W1])],
    ),
}  # fmt: skip


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
@pytest.mark.parametrize("name", MEANINGS)
def test_rules_are_the_oracles(name: str, seed: int) -> None:
    rule, clauses = MEANINGS[name]
    for is_limited in (False, True):
        case = random_case(seed, 9)
        result = decide(
            Budget(rule, 4.0) if is_limited else rule,
            case.seen,
            case.draft,
            protected=case.protected,
            num_drafted=case.num_drafted,
            memory=case.memory.keys(),
            state=RuleState(jnp.asarray(case.budget)),
        )
        result = jax.tree.map(np.asarray, result)
        argmax = case.seen.argmax[:, :-1]
        never = case.protected[case.draft] | case.protected[argmax] | ~np.isfinite(case.gap)
        for row in range(ROWS):
            alternatives = [
                Alternative([(why, holds(case)[row].tolist()) for why, holds in joined], windows)
                for joined, windows in clauses
            ]
            expected, spent = oracle.loosened_row(
                case.seen.accepted[row, :-1].tolist(),
                never[row].tolist(),
                int(case.num_drafted[row]),
                alternatives,
                case.gap[row].tolist(),
                float(case.budget[row]) if is_limited else math.inf,
            )
            kept, following = result.num_accepted[row], WHYS[result.next_why[row]]
            why, num_rescued = [WHYS[one] for one in result.why[row]], result.num_rescued[row]
            assert oracle.Row(kept, following, why, num_rescued) == expected
            assert result.next_token[row] == case.seen.replacement[row, kept]
            if is_limited:
                assert result.regret[row].sum() == spent


def test_the_cases_reach_every_decision() -> None:
    """What is compared above is no handful of trivial blocks."""
    found: set[str] = set()
    for seed in range(20):
        case = random_case(seed, 9)
        for name in ("fly", "csd"):
            result = decide(
                Budget(MEANINGS[name][0], 1.0),
                case.seen,
                case.draft,
                protected=case.protected,
                memory=case.memory.keys(),
                state=RuleState(jnp.asarray(case.budget)),
            )
            found |= {WHYS[why] for why in np.unique(result.why)}
    assert found == {*WHYS.values()} - {"CORRECTED", "BONUS"}


def test_the_state_pays_for_what_was_emitted() -> None:
    rule = Budget(Margin(gap=100.0), 10.0)
    case = random_case(3, 9)
    state = rule.initial_state(ROWS)
    result = decide(rule, case.seen, case.draft, state=state)
    regret = np.asarray(result.regret)
    assert (regret.sum(axis=1) > 0).any()
    for count in (0, 3, 10):
        left = state.after(result, jnp.full(ROWS, count)).budget
        np.testing.assert_array_equal(left, 10 - regret[:, :count].sum(axis=1))
    assert RuleState().after(result, jnp.full(ROWS, 3)).budget is None


def test_what_rules_ask_of_the_evidence() -> None:
    """Nothing that is not used: what costs nothing is not there."""
    for rule in (Exact(), Csd(), Lossy(), Margin(), Lenience()):
        assert rule.needs == Needs()
    assert (Typical() & Margin()).needs == Needs(full_entropy=True)
    assert [rule.uses_memory for rule in (Fly(), Csd(), Csd(memory=False), Fly() | Csd())] == [
        False, True, False, True,
    ]  # fmt: skip
    assert (Csd() | Fly()).needs == Needs(entropy=Entropy())
    assert Budget(Fly(), 3.0).budget == 3.0
    assert Fly().initial_state(4) == RuleState()
    assert Fly(entropy="full").needs == Needs(entropy=Entropy("full"))
    assert [why.letter for why in Why] == ["m", "r", *"------", "c", "b", "-"]


def test_rules_of_python_numbers_are_hashable() -> None:
    first, second = Fly() & Margin() | Csd(), (Fly() & Margin()) | Csd()
    assert first == second
    assert hash(first) == hash(second)
    assert Budget(first, 1.0) != Budget(first, 2.0)
    assert len({Exact(), Exact(), Fly(), Fly(), Fly(0.2)}) == 3


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Exact() & Fly(), "Exact cannot be part"),
        (lambda: Fly() | Exact(), "Exact cannot be part"),
        (lambda: Budget(Fly(), 1.0) & Margin(), "a budget goes around"),
        (lambda: Margin() | Budget(Fly(), 1.0), "a budget goes around"),
        (lambda: Budget(Budget(Fly(), 1.0), 1.0), "goes around one loosened rule"),
        (lambda: Budget(Exact(), 1.0), "goes around one loosened rule"),
        (lambda: Budget(Fly(), -1.0), "risk_budget is -1.0"),
        (lambda: Budget(Fly(), math.nan), "risk_budget is nan"),
        (lambda: Fly() & Fly(entropy="full"), "different entropies"),
        (lambda: Entropy("shannon"), "measure is 'shannon'"),
        (lambda: Entropy(top_k=0), "at least 1"),
        (lambda: Csd(None, memory=False), "neither its memory nor"),
        (lambda: Csd(0.0, memory=False), "neither its memory nor"),
        (lambda: (Fly() & Margin()).check(6), "num_speculative_tokens=6.*window_size=6"),
        (lambda: functools.reduce(operator.and_, [Fly() | Csd()] * 4), "makes 16 alternatives"),
        (lambda: functools.reduce(operator.and_, [Fly()] * 9), "joins 9 rules"),
        (lambda: functools.reduce(operator.or_, [Fly()] * 9), "joins 9 rules"),
    ],
)
def test_what_cannot_mean_anything_is_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(FlyJaxError, match=words) as error:
        make()
    assert "\n" not in str(error.value)
    assert str(error.value).endswith(".")


# Values that their parameters do not take, by field.
OUTSIDE: dict[type, dict[str, tuple[object, ...]]] = {
    Fly: {
        "entropy_threshold": (-0.1, math.nan), "window_size": (-1,), "entropy": ("top",),
        "entropy_top_k": (0,), "window": ("code",),
    },
    Sampling: {"temperature": (-0.1, math.inf), "top_k": (-1,), "top_p": (0.0, 1.5)},
    Csd: {"consistency": (-0.01,)},
    Lossy: {"threshold": (0.0,)},
    Lenience: {"lenience": (1.5,)},
    Typical: {"epsilon": (0.0,), "delta": (2.0,)},
    Margin: {"gap": (-1.0, math.nan)},
}  # fmt: skip


@pytest.mark.parametrize("declaring", OUTSIDE)
def test_values_outside_are_refused(declaring: type) -> None:
    names = {one.field: one.name for one in parameters_of(declaring)}
    for field, values in OUTSIDE[declaring].items():
        for value in values:
            with pytest.raises(
                FlyJaxError, match=f"{names[field]} is {value!r}; it must be .*[.]$"
            ):
                declaring(**{field: value})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("&".join(["(fly|fly)"] * 14), "joins 28 rules, which makes 16384 alternatives"),
        ("&".join(["(fly|csd)"] * 4), "joins 8 rules, which makes 16 alternatives"),
        ("|".join(["fly"] * 9), "joins 9 rules"),
        ("(" * 10**6 + "fly" + ")" * 10**6, "in at most 256 characters"),
        ("~" * 10**6 + "fly", "in at most 256 characters"),
        ("&".join(["fly"] * 10**6), "in at most 256 characters"),
    ],
    ids=lambda value: value[:40],
)
def test_a_text_is_counted_before_anything_is_made_of_it(text: str, words: str) -> None:
    for read in (
        rule_names,
        lambda text: DecodingConfig(rule=text),
        lambda text: DecodingConfig().replace(rule=text),
        lambda text: decoding_config({"rule": text}, 15),
    ):
        with pytest.raises(FlyJaxError, match=words) as error:
            read(text)
        assert len(str(error.value)) < 600


def test_the_largest_combinations() -> None:
    for text in ("|".join(["fly"] * 8), "(fly|csd)&(fly|margin)&(fly|typical)&lossy&lenience"):
        rule = DecodingConfig(rule=text).to_rule()
        assert len(rule.clauses()) == 8


def test_one_alternative_that_can_rescue_is_enough() -> None:
    Fly().check(7)
    Fly(window_size=0).check(1)
    (Fly() | Csd()).check(6)
    Csd().check(1)
    Exact().check(1)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (Csd(), "keys of a CorrectionMemory"),
        (Typical(), "full entropy"),
        (Fly(), "an entropy"),
        (Budget(Margin(), 1.0), "the state.*initial_state"),
    ],
)
def test_what_a_rule_needs_it_must_be_given(rule: Rule, words: str) -> None:
    case = random_case(0, 9)
    bare = dataclasses.replace(case.seen, entropy=None, full_entropy=None)
    with pytest.raises(FlyJaxError, match=words):
        accept(rule, bare, case.draft)


@pytest.mark.parametrize("lenience", [1.0, 0.4])
def test_lenience_accepts_with_the_probability_it_should(lenience: float) -> None:
    """min(1, p / (l q)), and never less than the lossless rule by the same draw."""
    rows = 40_000
    target = np.log(np.array([0.1, 0.2, 0.3, 0.4], np.float32))
    proposed = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    draft = np.random.default_rng(0).choice(4, p=np.exp(proposed), size=(rows, 1))
    rule = Lenience(lenience)
    seen = jax.jit(evidence)(
        jnp.broadcast_to(target, (rows, 2, 4)),
        draft,
        sampling=Sampling(),
        draft_logits=jnp.broadcast_to(proposed, (rows, 1, 4)),
        key=jax.random.key(1),
    )
    result = decide(rule, seen, draft)
    accepted, kept = np.asarray(seen.accepted)[:, 0], np.asarray(result.num_accepted) == 1
    assert (kept >= accepted).all()
    assert (np.asarray(result.num_rescued) == (kept & ~accepted)).all()
    if lenience == 1:
        assert (kept == accepted).all()
    for token in range(4):
        expected = min(1.0, math.exp(target[token] - proposed[token]) / lenience)
        assert kept[draft[:, 0] == token].mean() == pytest.approx(expected, abs=0.02)
    # What comes out has at most 1/l times the target's probability.
    emitted = np.where(kept, draft[:, 0], result.next_token)
    for token in range(4):
        assert (emitted == token).mean() <= math.exp(target[token]) / lenience + 0.02
