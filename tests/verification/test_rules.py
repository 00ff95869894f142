"""Every rule against the loops of the oracle, and the cases that are easy to get wrong by name."""

from __future__ import annotations

import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fly_jax.errors import FlyJaxError
from fly_jax.verification.evidence import TargetEvidence, evidence
from fly_jax.verification.rules import Exact, Fly, Rule, Verdict, Why, accept, entropy_gate
from fly_jax.verification.sampling import Sampling
from fly_jax.verification.verify import verify

# One letter per position of a block: a match, or a mismatch at which the entropy is this.
UNDECIDED, SURE = 0.5, 0.1
MISMATCHES = {"x": UNDECIDED, "s": SURE, "z": 0.0}

decide = jax.jit(accept)
verdict_on = jax.jit(verify)
gathered = jax.jit(evidence, static_argnames="needs")


def seen(
    accepted: np.ndarray,
    entropy: np.ndarray | float = UNDECIDED,
    draft_log_prob: np.ndarray | float = -1.0,
) -> TargetEvidence:
    """Evidence with the given verdicts; the argmax is token 1, the draft tokens are token 2."""
    rows, num_draft = accepted.shape
    shape = (rows, num_draft + 1)

    def widened(values: np.ndarray | float, last: float) -> jax.Array:
        values = np.broadcast_to(np.float32(values), accepted.shape)
        return jnp.asarray(np.pad(values, ((0, 0), (0, 1)), constant_values=np.float32(last)))

    return TargetEvidence(
        argmax=jnp.full(shape, 1, jnp.int32),
        argmax_logit=jnp.zeros(shape),
        draft_logit=widened(draft_log_prob, -np.inf),
        log_sum_exp=jnp.zeros(shape),
        entropy=widened(entropy, 0.0),
        draft_log_prob=widened(draft_log_prob, -np.inf),
        accepted=jnp.asarray(np.pad(accepted, ((0, 0), (0, 1)))),
        replacement=jnp.broadcast_to(jnp.arange(100, 101 + num_draft, dtype=jnp.int32), shape),
    )


def one_row(rule: Rule, block: str, **keywords: np.ndarray | float) -> Verdict:
    """The decision on a block such as "mmxmm"."""
    accepted = np.array([[letter == "m" for letter in block]])
    entropy = np.array([[MISMATCHES.get(letter, UNDECIDED) for letter in block]])
    tokens = jnp.full(accepted.shape, 2)
    return decide(rule, seen(accepted, entropy, **keywords), tokens)


def whys(result: Verdict, row: int = 0) -> list[str]:
    return [Why(int(why)).name for why in result.why[row]]


def row_of(result: Verdict, row: int) -> oracle.Row:
    """What is decided about a row, in the oracle's words."""
    following = Why(int(result.next_why[row])).name
    return oracle.Row(
        result.num_accepted[row], following, whys(result, row), result.num_rescued[row]
    )


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


@jax.jit
def evidence_and_verdict(
    rule: Rule, logits: jax.Array, draft: jax.Array, num_drafted: jax.Array, protected: jax.Array
) -> tuple[TargetEvidence, Verdict]:
    found = evidence(logits, draft, needs=rule.needs, num_drafted=num_drafted)
    result = accept(rule, found, draft, protected=protected, num_drafted=num_drafted)
    return found, result


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_draft=st.sampled_from([1, 9, 25]),
    rule=st.sampled_from(
        [
            Exact(),
            Fly(),
            Fly(window_size=1, window="reference"),
            Fly(0.0, window_size=3),
            Fly(0.25, window_size=0, entropy="normalized"),
        ]
    ),
)
def test_rules_on_logits_are_the_oracles(seed: int, num_draft: int, rule: Rule) -> None:
    rows, vocab = 6, 8
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(rows, num_draft + 1, vocab))
    logits *= rng.choice([0.0, 1.0, 3.0, 10.0], size=(rows, num_draft + 1, 1))
    logits = np.where(rng.random((rows, num_draft + 1, 1)) < 0.5, np.round(logits), logits)
    logits = np.where(rng.random(logits.shape) < 0.1, -np.inf, logits).astype(np.float32)
    logits[..., 0] = np.maximum(logits[..., 0], 0)
    draft = np.where(
        rng.random((rows, num_draft)) < 0.8,
        logits[:, :-1].argmax(-1),
        rng.integers(vocab, size=(rows, num_draft)),
    )
    num_drafted = rng.integers(num_draft + 1, size=rows)
    num_drafted[: rows // 2] = num_draft
    # The same tokens for all rows, or others for each.
    own = rng.integers(vocab, size=(rows, 1))
    protected = np.arange(vocab) == (own if num_draft == 9 else own[0])
    protected_in = np.broadcast_to(protected, (rows, vocab))
    found, result = evidence_and_verdict(rule, logits, draft, num_drafted, protected)
    result = jax.tree.map(np.asarray, result)
    # The entropies are not recomputed: one at the threshold could go either way by rounding.
    entropy = np.zeros(draft.shape) if found.entropy is None else np.asarray(found.entropy)
    for row, last in enumerate(num_drafted.tolist()):
        loops = [
            oracle.greedy_evidence(logits[row, i], int(draft[row, i]), "full", 3)
            for i in range(num_draft)
        ]
        accepted = [found_here.accepted for found_here in loops]
        if isinstance(rule, Fly):
            barred = np.flatnonzero(protected_in[row])
            never = [
                one.draft_logit == -np.inf or token in barred or one.argmax in barred
                for one, token in zip(loops, draft[row], strict=True)
            ]
            block = accepted, entropy[row, :-1].tolist(), never, last
            threshold, is_reference = np.float32(rule.entropy_threshold), rule.window == "reference"
            expected = oracle.fly_row(*block, float(threshold), rule.window_size, is_reference)
        else:
            expected = oracle.lossless_row(accepted, last)
        assert row_of(result, row) == expected
        assert result.next_token[row] == logits[row, expected.num_accepted].argmax()


# What is emitted of a block, a letter per token, and why the first that is not kept was refused.
W1, W2, REFERENCE = Fly(window_size=1), Fly(window_size=2), Fly(window_size=2, window="reference")
BLOCKS: dict[str, tuple[Rule, str, str, str]] = {
    "everything accepted": (W2, "mmmmm", "mmmmmb", ""),
    "nothing accepted": (W2, "xxxxx", "c", "REFUSED_WINDOW"),
    "a clean window": (W2, "mxmmm", "mrmmmb", ""),
    "a window that just fits": (W2, "mmxmm", "mmrmmb", ""),
    "a window cut by the block's end": (W2, "mmmxm", "mmmc", "REFUSED_BOUNDARY"),
    "a mismatch at the end": (W2, "mmmmx", "mmmmc", "REFUSED_BOUNDARY"),
    "two mismatches in a window": (W2, "xmxmm", "c", "REFUSED_WINDOW"),
    "the same, in the middle": (W2, "mxmxm", "mc", "REFUSED_WINDOW"),
    "two mismatches next to each other": (W2, "xxmmm", "c", "REFUSED_WINDOW"),
    "two mismatches W + 1 apart": (W2, "xmmxmmm", "rmmrmmmb", ""),
    "the second of two is refused": (W2, "xmmxmx", "rmmc", "REFUSED_WINDOW"),
    "what was drafted of the window fails already": (W2, "mmmxx", "mmmc", "REFUSED_WINDOW"),
    "an exact rule": (Exact(), "mmmxx", "mmmc", "REFUSED"),
    "a sure target": (W1, "smm", "c", "REFUSED_GATE"),
    "at the threshold": (Fly(SURE, window_size=1), "smm", "rmmb", ""),
    "no window": (Fly(window_size=0), "xxxx", "rrrrb", ""),
    "no window, and the gate": (Fly(window_size=0), "xxsx", "rrc", "REFUSED_GATE"),
    "the reference's window is one shorter": (REFERENCE, "xmxmm", "rmrmmb", ""),
    "and its boundary the same": (REFERENCE, "mmmxm", "mmmc", "REFUSED_BOUNDARY"),
}


@pytest.mark.parametrize("case", BLOCKS)
def test_blocks_that_are_easy_to_get_wrong(case: str) -> None:
    rule, block, emitted, reason = BLOCKS[case]
    result = one_row(rule, block)
    kept = [{"m": "MATCHED", "r": "RESCUED"}[letter] for letter in emitted[:-1]]
    decided = [*kept, reason] if reason else kept
    assert whys(result) == [*decided, *["DROPPED"] * (len(block) - len(decided))]
    assert Why(int(result.next_why[0])).letter == emitted[-1]
    assert (result.num_accepted, result.num_rescued) == (len(kept), emitted.count("r"))


@pytest.mark.parametrize("window", ["paper", "reference"])
@pytest.mark.parametrize(("threshold", "rescued"), [(0.0, 1), (0.01, 1), (0.02, 0)])
def test_a_threshold_of_a_hundredth_or_less_is_no_gate(
    threshold: float, rescued: int, window: str
) -> None:
    result = one_row(Fly(threshold, window_size=1, window=window), "zmm")
    assert (result.num_rescued, result.num_accepted) == (rescued, 3 * rescued)


@pytest.mark.parametrize("log_prob", [-np.inf, -100.0])
def test_a_token_of_zero_probability_is_never_rescued(log_prob: float) -> None:
    result = one_row(Fly(0.0, window_size=0), "xx", draft_log_prob=np.array([[-80.0, log_prob]]))
    assert whys(result) == ["RESCUED", "REFUSED"]


def test_a_token_that_top_k_removed_is_never_rescued() -> None:
    logits = jnp.tile(jnp.array([[3.0, 2.0, 1.0], [0.0, 0.0, 0.0]]), (16, 1, 1))
    draft, draft_logits = jnp.full((16, 1), 2), jnp.tile(jnp.array([0.0, 0.0, 60.0]), (16, 1, 1))
    rule = Fly(0.0, window_size=0)
    for top_k, expected in [(2, "REFUSED"), (3, "RESCUED")]:
        given = {"sampling": Sampling(top_k=top_k), "key": jax.random.key(0)}
        found = gathered(logits, draft, needs=rule.needs, draft_logits=draft_logits, **given)
        result = decide(rule, found, draft)
        refused = ~np.asarray(found.accepted)[:, 0]
        assert refused.any()
        assert {Why(int(why)).name for why in result.why[refused, 0]} == {expected}


def test_entropy_gate_is_true_where_undecided() -> None:
    found = seen(np.ones((1, 2), bool), entropy=np.array([[0.2, 0.4]]))
    assert entropy_gate(found, 0.3).tolist() == [[False, True, False]]
    assert entropy_gate(found, 0.01).tolist() == [[True, True, True]]


def test_evidence_of_another_draft_is_refused() -> None:
    for rule in (Exact(), Fly()):
        with pytest.raises(FlyJaxError, match=r"\(1, 4\)"):
            accept(rule, seen(np.ones((1, 4), bool)), jnp.zeros((1, 3), jnp.int32))


# What one round of FLy's unmodified reference code (AMD-AGI/FLy at 6667ae8, PyTorch 2.13 on a CPU)
# made of logits (int8, times `scale`) and draft tokens, for each K, under six settings: draft
# tokens kept, and the token that follows.
STORED = np.load(Path(__file__).parents[1] / "fixtures" / "reference_rule.npz")

SETTINGS: dict[str, Rule] = {
    "default": Fly(window="reference"),
    "no_gate": Fly(window="reference", entropy_threshold=0.0),
    "thre_0.6": Fly(window="reference", entropy_threshold=0.6),
    "no_window": Fly(window="reference", window_size=0),
    "win_len_4": Fly(window="reference", window_size=4),
    "strict": Exact(),
}


@pytest.mark.parametrize("num_draft", [6, 7, 15, 25])
@pytest.mark.parametrize("setting", SETTINGS)
def test_decides_as_the_reference_code_does(setting: str, num_draft: int) -> None:
    rule = SETTINGS[setting]
    logits = STORED[f"logits_{num_draft}"] * np.float32(STORED["scale"])
    draft = STORED[f"draft_{num_draft}"].astype(np.int32)

    verdict = verdict_on(rule, logits, draft)
    np.testing.assert_array_equal(verdict.num_accepted, STORED[f"accepted_{num_draft}_{setting}"])
    np.testing.assert_array_equal(verdict.next_token, STORED[f"next_{num_draft}_{setting}"])


def test_the_stored_cases_tell_the_two_windows_apart() -> None:
    logits = STORED["logits_15"] * np.float32(STORED["scale"])
    draft = STORED["draft_15"].astype(np.int32)
    kept = verdict_on(Fly(), logits, draft).num_accepted
    assert np.any(np.asarray(kept) != STORED["accepted_15_default"])
