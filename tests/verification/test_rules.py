"""Every rule against the loops of the oracle, alone and combined, and hard cases by name."""

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Alternative
from refusals import assert_refused

from fly_jax import Budget, CorrectionMemory, DecodingConfig, FlyJaxError
from fly_jax.integrations.vllm_tpu.startup import decoding_config
from fly_jax.parameters import parameters_of
from fly_jax.verification.evidence import Entropy, Needs, TargetEvidence, evidence
from fly_jax.verification.rules import Exact, Fly, Loose, Rule, RuleState, Verdict, Why, accept
from fly_jax.verification.rules.loosened import Csd, Lenience, Lossy, Margin, Typical, rule_names
from fly_jax.verification.sampling import Sampling
from fly_jax.verification.verify import verify

# One letter per position of a block: a match, or a mismatch at which the entropy is this.
UNDECIDED, SURE = 0.5, 0.1
MISMATCHES = {"x": UNDECIDED, "s": SURE, "z": 0.0}

reference = functools.partial(Fly, window="reference")
decide = jax.jit(accept)
verdict_on = jax.jit(verify)
gathered = jax.jit(evidence, static_argnames="needs")


def seen(accepted: np.ndarray, entropy: np.ndarray | float = UNDECIDED) -> TargetEvidence:
    """Evidence with the given verdicts; the argmax is token 1, the draft tokens are token 2."""
    shape = accepted.shape[0], accepted.shape[1] + 1
    entropy = np.broadcast_to(np.float32(entropy), accepted.shape)
    return TargetEvidence(
        argmax=jnp.full(shape, 1, jnp.int32), argmax_logit=jnp.zeros(shape),
        draft_logit=jnp.full(shape, -1.0), log_sum_exp=jnp.zeros(shape),
        entropy=jnp.asarray(np.pad(entropy, ((0, 0), (0, 1)))),
        draft_log_prob=jnp.full(shape, -1.0),
        accepted=jnp.asarray(np.pad(accepted, ((0, 0), (0, 1)))),
        replacement=jnp.broadcast_to(jnp.arange(100, 100 + shape[1], dtype=jnp.int32), shape),
    )  # fmt: skip


def whys(result: Verdict, row: int = 0) -> list[str]:
    return [Why(int(why)).name for why in result.why[row]]


def row_of(result: Verdict, row: int) -> oracle.Row:
    """What is decided about a row, in the oracle's words."""
    kept, following = result.num_accepted[row], Why(int(result.next_why[row])).name
    return oracle.Row(kept, following, whys(result, row), result.num_rescued[row])


@pytest.mark.parametrize("window", ["paper", "reference"])
@pytest.mark.parametrize("window_size", range(9))
def test_fly_on_every_pattern_of_eight(window_size: int, window: str) -> None:
    patterns = list(itertools.product([True, False], repeat=8))
    accepted = np.array([*patterns, *patterns])
    rng = np.random.default_rng(window_size)
    entropy = np.where(rng.random(accepted.shape) < 0.8, UNDECIDED, SURE)
    entropy[: len(patterns)] = UNDECIDED
    rule = Fly(window_size=window_size, window=window)
    result = decide(rule, seen(accepted, entropy), jnp.full(accepted.shape, 2))
    result = jax.tree.map(np.asarray, result)
    for row in range(len(accepted)):
        block = accepted[row].tolist(), entropy[row].tolist(), [False] * 8, 8
        expected = oracle.fly_row(*block, 0.3, window_size, window == "reference")
        assert row_of(result, row) == expected, accepted[row]
        assert result.next_token[row] == 100 + expected.num_accepted
    assert (result.num_rescued.sum() > 0) == (window_size < 8)


# By hand: what is emitted of a block, a letter per token, and why the first other was refused.
W1, W2, REFERENCE = Fly(window_size=1), Fly(window_size=2), reference(window_size=2)
BLOCKS: dict[str, tuple[Rule, str, str, str]] = {
    "nothing accepted": (W2, "xxxxx", "c", "REFUSED_WINDOW"),
    "a window that just fits": (W2, "mmxmm", "mmrmmb", ""),
    "a window cut by the block's end": (W2, "mmmxm", "mmmc", "REFUSED_BOUNDARY"),
    "two mismatches W + 1 apart": (W2, "xmmxmmm", "rmmrmmmb", ""),
    "what was drafted of the window fails already": (W2, "mmmxx", "mmmc", "REFUSED_WINDOW"),
    "an exact rule": (Exact(), "mmmxx", "mmmc", "REFUSED"),
    "a sure target": (W1, "smm", "c", "REFUSED_GATE"),
    "at the threshold": (Fly(SURE, window_size=1), "smm", "rmmb", ""),
    "no window, and the gate": (Fly(window_size=0), "xxsx", "rrc", "REFUSED_GATE"),
    "the reference's window is one shorter": (REFERENCE, "xmxmm", "rmrmmb", ""),
    "and its boundary the same": (REFERENCE, "mmmxm", "mmmc", "REFUSED_BOUNDARY"),
    **{
        f"a threshold of {threshold}, {window}": (Fly(threshold, 1, window=window), "zmm", *rest)
        for window in ("paper", "reference")
        for threshold, *rest in ((0.0, "rmmb", ""), (0.01, "rmmb", ""), (0.02, "c", "REFUSED_GATE"))
    },
}


@pytest.mark.parametrize("case", BLOCKS)
def test_blocks_that_are_easy_to_get_wrong(case: str) -> None:
    rule, block, emitted, reason = BLOCKS[case]
    accepted = np.array([[letter == "m" for letter in block]])
    entropy = np.array([[MISMATCHES.get(letter, UNDECIDED) for letter in block]])
    result = decide(rule, seen(accepted, entropy), jnp.full(accepted.shape, 2))
    kept = [{"m": "MATCHED", "r": "RESCUED"}[letter] for letter in emitted[:-1]]
    decided = [*kept, reason] if reason else kept
    assert whys(result) == [*decided, *["DROPPED"] * (len(block) - len(decided))]
    assert Why(int(result.next_why[0])).letter == emitted[-1]
    assert (result.num_accepted, result.num_rescued) == (len(kept), emitted.count("r"))


def test_a_token_that_top_k_removed_is_never_rescued() -> None:
    logits = jnp.tile(jnp.array([[3.0, 2.0, 1.0], [0.0, 0.0, 0.0]]), (16, 1, 1))
    draft, draft_logits = jnp.full((16, 1), 2), jnp.tile(jnp.array([0.0, 0.0, 60.0]), (16, 1, 1))
    rule, given = Fly(0.0, window_size=0), {"draft_logits": draft_logits, "key": jax.random.key(0)}
    for top_k, expected in [(2, "REFUSED"), (3, "RESCUED")]:
        sampling = Sampling(top_k=top_k)
        found = gathered(logits, draft, needs=rule.needs, sampling=sampling, **given)
        refused = ~np.asarray(found.accepted)[:, 0]
        assert refused.any()
        why = decide(rule, found, draft).why[refused, 0]
        assert {Why(int(one)).name for one in why} == {expected}


def test_evidence_of_another_draft_is_refused() -> None:
    for rule in (Exact(), Fly()):
        given = seen(np.ones((1, 4), bool)), jnp.zeros((1, 3), jnp.int32)
        assert_refused(r"\(1, 4\)", accept, rule, *given)


# What one round of FLy's unmodified reference code (AMD-AGI/FLy at 6667ae8, PyTorch 2.13 on a CPU)
# made of logits (int8, times `scale`) and draft tokens, for each K, under six settings: draft
# tokens kept, and the token that follows.
STORED = np.load(Path(__file__).parents[1] / "fixtures" / "reference_rule.npz")

SETTINGS: dict[str, Rule] = {"default": reference(), "no_gate": reference(entropy_threshold=0.0)}
SETTINGS |= {"thre_0.6": reference(entropy_threshold=0.6), "no_window": reference(window_size=0)}
SETTINGS |= {"win_len_4": reference(window_size=4), "strict": Exact()}


@pytest.mark.parametrize("num_draft", [6, 7, 15, 25])
@pytest.mark.parametrize("setting", SETTINGS)
def test_decides_as_the_reference_code_does(setting: str, num_draft: int) -> None:
    logits = STORED[f"logits_{num_draft}"] * np.float32(STORED["scale"])
    draft = STORED[f"draft_{num_draft}"].astype(np.int32)
    verdict = verdict_on(SETTINGS[setting], logits, draft)
    np.testing.assert_array_equal(verdict.num_accepted, STORED[f"accepted_{num_draft}_{setting}"])
    np.testing.assert_array_equal(verdict.next_token, STORED[f"next_{num_draft}_{setting}"])


ROWS, VOCAB = 8, 6


class Case:
    """Random evidence, in steps so coarse that sums are exact and no threshold is met by chance."""

    def __init__(self, seed: int, num_draft: int) -> None:
        rng = np.random.default_rng(seed)
        shape = (ROWS, num_draft + 1)
        accepted = rng.random(shape) < rng.choice([0.5, 0.8, 0.95])
        accepted[:, -1] = False
        argmax_logit = rng.integers(-10, 80, shape) / 8
        gap = np.where(accepted, 0, rng.integers(0, 50, shape) / rng.choice([8, 32], shape))
        log_sum_exp = argmax_logit + rng.integers(0, 100, shape) / 64
        ruled_out = rng.random(shape) < 0.05  # less probable than a float32 can say
        gap = np.where(ruled_out, rng.choice([100, np.inf], shape), gap)
        draft_logit = argmax_logit - gap
        self.draft = rng.integers(VOCAB, size=(ROWS, num_draft))
        cut = rng.integers(num_draft + 1, size=ROWS)
        self.num_drafted = np.where(rng.random(ROWS) < 0.5, num_draft, cut)
        self.memory = CorrectionMemory("v", min_count=1, num_keys=VOCAB**2)
        pairs = itertools.product(range(VOCAB), repeat=2)
        self.memory.add([pair for pair in pairs if rng.random() < 0.5], 2)
        single = functools.partial(np.asarray, dtype=np.float32)
        self.seen = TargetEvidence(
            argmax=rng.integers(VOCAB, size=shape).astype(np.int32),
            argmax_logit=single(argmax_logit), draft_logit=single(draft_logit),
            log_sum_exp=single(log_sum_exp),
            entropy=single(rng.choice([0.0, 0.005, 0.1, 0.5], shape)),
            draft_log_prob=single(draft_logit - log_sum_exp), accepted=accepted,
            replacement=rng.integers(VOCAB, size=shape).astype(np.int32),
            full_entropy=single(rng.integers(0, 200, shape) / 64),
            scaled_uniform=single(np.where(rng.random((ROWS, 1)) < 0.3, -1, rng.random(shape))),
        )  # fmt: skip
        # The same tokens for all rows, or others for each.
        self.protected = rng.random(VOCAB if num_draft == 9 else (ROWS, VOCAB)) < 0.15
        self.budget = single(rng.choice([0, 0.125, 1.5, 4, 100], ROWS))
        self.gap = self.column("argmax_logit") - self.column("draft_logit")
        self.prob = np.exp(self.column("draft_logit") - self.column("log_sum_exp"))

    def column(self, name: str) -> np.ndarray:
        return np.asarray(getattr(self.seen, name), np.float64)[:, :-1]

    def decided(self, rule: Rule) -> Verdict:
        drafted = {"num_drafted": self.num_drafted, "protected": self.protected}
        given = {"memory": self.memory.keys(), "state": RuleState(jnp.asarray(self.budget))}
        return jax.tree.map(np.asarray, decide(rule, self.seen, self.draft, **drafted, **given))


# The name of a refusal, and where the condition holds.
Condition = tuple[str, Callable[[Case], np.ndarray]]
Clauses = list[tuple[list[Condition], list[tuple[int, str]]]]


def remembered(case: Case) -> np.ndarray:
    pairs = zip(case.draft.ravel(), case.seen.argmax[:, :-1].ravel(), strict=True)
    known = [case.memory.count(int(d), int(t)) > 1 for d, t in pairs]
    return np.array(known).reshape(case.draft.shape)


def lenient(case: Case) -> np.ndarray:
    uniform = case.column("scaled_uniform")
    drawn = 0.4 * uniform < np.exp(case.column("draft_log_prob"))
    return np.where(uniform < 0, case.gap <= -math.log(0.4), drawn)


def typical(case: Case) -> np.ndarray:
    return case.prob > np.minimum(0.09, 0.3 * np.exp(-case.column("full_entropy")))


def near(nats: float) -> Condition:
    return "REFUSED_GATE", lambda case: case.gap <= nats


GATE: Condition = "REFUSED_GATE", lambda case: case.column("entropy") >= np.float32(0.3)
PROBABLE: Condition = "REFUSED_GATE", lambda case: case.prob >= 0.3
TYPICAL: Condition = "REFUSED_GATE", typical
MEMORY: Condition = "REFUSED_MEMORY", remembered
CSD = [near(-math.log(0.01)), MEMORY]
NEXT, NEXT_TWO = (1, "paper"), (2, "paper")

# What each rule means, written out as alternatives by hand.
MEANINGS: dict[str, tuple[Rule, Clauses]] = {
    "exact": (Exact(), []), "fly": (W2, [([GATE], [NEXT_TWO])]),
    "fly, reference": (reference(window_size=3), [([GATE], [(3, "reference")])]),
    "fly without a gate, reference": (reference(0.0, 4), [([], [(4, "reference")])]),
    "csd": (Csd(), [(CSD, [])]), "csd, memory alone": (Csd(consistency=None), [([MEMORY], [])]),
    "csd, consistency alone": (Csd(0.3, memory=False), [([near(-math.log(0.3))], [])]),
    "csd, whatever the consistency": (Csd(0.0), [([MEMORY], [])]),
    "lossy": (Lossy(), [([PROBABLE], [])]),
    "lenience": (Lenience(0.4), [([("REFUSED_GATE", lenient)], [])]),
    "typical": (Typical(), [([TYPICAL], [])]), "margin": (Margin(), [([near(0.3)], [])]),
    "fly & margin": (W2 & Margin(gap=1.3), [([GATE, near(1.3)], [NEXT_TWO])]),
    "fly | csd": (W2 | Csd(), [([GATE], [NEXT_TWO]), (CSD, [])]),
    "(fly | csd) & typical": (
        (W2 | Csd()) & Typical(), [([GATE, TYPICAL], [NEXT_TWO]), ([*CSD, TYPICAL], [])]
    ),
    "fly & fly": (Fly(0.0, window_size=2) & W1, [([GATE], [NEXT_TWO, NEXT])]),
}  # fmt: skip


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
@pytest.mark.parametrize("name", MEANINGS)
def test_rules_are_the_oracles(name: str, seed: int) -> None:
    rule, clauses = MEANINGS[name]
    for num_draft, is_limited in ((1, False), (9, True), (25, False)):
        case, is_limited = Case(seed, num_draft), is_limited and isinstance(rule, Loose)
        result = case.decided(Budget(rule, 4.0) if is_limited else rule)
        protected = np.broadcast_to(case.protected, (ROWS, VOCAB))
        pairs = np.stack([case.draft, case.seen.argmax[:, :-1]])
        never = protected[np.arange(ROWS)[:, None], pairs].any(axis=0) | (case.gap > 90)
        for row in range(ROWS):
            alternatives = [
                Alternative([(why, holds(case)[row].tolist()) for why, holds in joined], windows)
                for joined, windows in clauses
            ]
            expected, spent = oracle.loosened_row(
                case.seen.accepted[row, :-1].tolist(), (never[row] | (not clauses)).tolist(),
                int(case.num_drafted[row]), alternatives, case.gap[row].tolist(),
                float(case.budget[row]) if is_limited else math.inf,
            )  # fmt: skip
            assert row_of(result, row) == expected
            assert result.next_token[row] == case.seen.replacement[row, expected.num_accepted]
            if is_limited:
                assert result.regret[row].sum() == spent


def test_the_cases_reach_every_decision() -> None:
    """What is compared above is no handful of trivial blocks."""
    found: set[Why] = set()
    for seed, name in itertools.product(range(20), ("fly", "csd")):
        result = Case(seed, 9).decided(Budget(MEANINGS[name][0], 1.0))
        found |= set(map(Why, result.why.ravel().tolist()))
    assert found == {*Why} - {Why.CORRECTED, Why.BONUS}


def test_the_state_pays_for_what_was_emitted() -> None:
    rule, case = Budget(Margin(gap=100.0), 10.0), Case(3, 9)
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
    rules = Fly(), Csd(memory=False), Csd(), Fly() | Csd()
    assert [rule.uses_memory for rule in rules] == [False, False, True, True]
    assert (Csd() | Fly()).needs == Needs(entropy=Entropy())
    assert Budget(Fly(), 3.0).budget == 3.0
    assert Fly().initial_state(4) == RuleState()
    assert Fly(entropy="full").needs == Needs(entropy=Entropy("full"))
    assert [why.letter for why in Why] == ["m", "r", *"------", "c", "b", "-"]


@pytest.mark.parametrize(("make", "words"), [
    (lambda: Exact() & Fly(), "Exact cannot be part"),
    (lambda: Fly() | Exact(), "Exact cannot be part"),
    (lambda: Budget(Fly(), 1.0) & Margin(), "a budget goes around"),
    (lambda: Margin() | Budget(Fly(), 1.0), "a budget goes around"),
    (lambda: Budget(Budget(Fly(), 1.0), 1.0), "goes around one loosened rule"),
    (lambda: Budget(Exact(), 1.0), "goes around one loosened rule"),
    (lambda: Budget(Fly(), -1.0), "risk_budget is -1.0"),
    (lambda: Budget(Fly(), math.nan), "risk_budget is nan"),
    (lambda: Fly() & Fly(entropy="full"), "different entropies"),
    (lambda: Entropy("shannon"), "measure is 'shannon'"), (lambda: Entropy(top_k=0), "at least 1"),
    (lambda: Csd(None, memory=False), "neither its memory nor"),
    (lambda: Csd(0.0, memory=False), "neither its memory nor"),
    (lambda: (Fly() & Margin()).check(6), "num_speculative_tokens=6.*window_size=6"),
    (lambda: functools.reduce(operator.and_, [Fly() | Csd()] * 4), "makes 16 alternatives"),
    (lambda: functools.reduce(operator.or_, [Fly()] * 9), "joins 9 rules"),
])  # fmt: skip
def test_what_cannot_mean_anything_is_refused(make: Callable[[], object], words: str) -> None:
    assert_refused(words, make)


# Values that their parameters do not take, by field.
OUTSIDE: dict[type, dict[str, tuple[object, ...]]] = {
    Fly: {
        "entropy_threshold": (-0.1, math.nan), "window_size": (-1,), "entropy": ("top",),
        "entropy_top_k": (0,), "window": ("code",),
    },
    Sampling: {"temperature": (-0.1, math.inf), "top_k": (-1,), "top_p": (0.0, 1.5)},
    Csd: {"consistency": (-0.01,)}, Lossy: {"threshold": (0.0,)}, Lenience: {"lenience": (1.5,)},
    Typical: {"epsilon": (0.0,), "delta": (2.0,)}, Margin: {"gap": (-1.0, math.nan)},
}  # fmt: skip


@pytest.mark.parametrize("declaring", OUTSIDE)
def test_values_outside_are_refused(declaring: type) -> None:
    names = {one.field: one.name for one in parameters_of(declaring)}
    for field, values in OUTSIDE[declaring].items():
        for value in values:
            words = f"{names[field]} is {value!r}; it must be .*[.]$"
            assert_refused(words, declaring, **{field: value})


@pytest.mark.parametrize(("text", "words"), [
    ("&".join(["(fly|fly)"] * 14), "joins 28 rules, which makes 16384 alternatives"),
    ("|".join(["fly"] * 9), "joins 9 rules"),
    ("(" * 10**6 + "fly" + ")" * 10**6, "in at most 256 characters"),
    ("&".join(["fly"] * 10**6), "in at most 256 characters"),
], ids=lambda value: value[:40])  # fmt: skip
def test_a_text_is_counted_before_anything_is_made_of_it(text: str, words: str) -> None:
    for read in (
        rule_names, lambda text: DecodingConfig(rule=text),
        lambda text: DecodingConfig().replace(rule=text),
        lambda text: decoding_config({"rule": text}, 15),
    ):  # fmt: skip
        with pytest.raises(FlyJaxError, match=words) as error:
            read(text)
        assert len(str(error.value)) < 600


def test_the_largest_combinations() -> None:
    for text in ("|".join(["fly"] * 8), "(fly|csd)&(fly|margin)&(fly|typical)&lossy&lenience"):
        assert len(DecodingConfig(rule=text).to_rule().clauses()) == 8


def test_one_alternative_that_can_rescue_is_enough() -> None:
    rules = {Fly(): 7, Fly(window_size=0): 1, Fly() | Csd(): 6, Csd(): 1, Exact(): 1}
    for rule, num_speculative_tokens in rules.items():
        rule.check(num_speculative_tokens)


LACKING: dict[Rule, str] = {Csd(): "keys of a CorrectionMemory", Typical(): "full entropy"}
LACKING |= {Fly(): "an entropy", Budget(Margin(), 1.0): "the state.*initial_state"}


@pytest.mark.parametrize(("rule", "words"), LACKING.items())
def test_what_a_rule_needs_it_must_be_given(rule: Rule, words: str) -> None:
    case = Case(0, 9)
    bare = dataclasses.replace(case.seen, entropy=None, full_entropy=None)
    assert_refused(words, accept, rule, bare, case.draft)


def test_the_scaled_uniform_is_what_the_lossless_rule_has_drawn() -> None:
    """So lenience, as the oracle has it of this number, accepts with min(1, p / (l q))."""
    logits = np.random.default_rng(0).normal(size=(ROWS, 10, VOCAB)).astype(np.float32)
    drawn = {"sampling": Sampling(), "draft_logits": logits[:, 1:], "key": jax.random.key(1)}
    found = gathered(logits, logits[:, 1:].argmax(-1), **drawn)
    accepted = np.asarray(found.accepted)[:, :-1]
    assert 0 < accepted.mean() < 1
    kept = found.scaled_uniform < np.exp(found.draft_log_prob)
    np.testing.assert_array_equal(kept[:, :-1], accepted)
