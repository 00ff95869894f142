"""What a draft model takes in after a step; with a lookup the same tokens in fewer passes."""

import functools
from itertools import chain

import jax
import jax.numpy as jnp
import numpy as np
from random_pairs import padded

from fly_jax.decoding.drafters.lookup import Lookup
from fly_jax.integrations.vllm_tpu import draft_inputs
from fly_jax.integrations.vllm_tpu.draft_inputs import Pass, TargetStep

ROWS, TOKENS, LIMIT = 4, 10, 40


def taken(requests: list[tuple[int, list[int], int, int]]) -> object:
    """Requests as (position of the first token, tokens, rejected at the end, next token)."""
    firsts, texts, rejected, following = zip(*requests, strict=True) if requests else [()] * 4
    counts = [*map(len, texts)]
    positions = [first + i for first, n in zip(firsts, counts, strict=True) for i in range(n)]
    pad, missing = TOKENS - len(positions), ROWS - len(requests)
    # What the engine leaves in places that are padding is not zero.
    step = TargetStep(
        tokens=np.array([*chain(*texts), *[99] * pad]), num_requests=np.array([len(requests)]),
        positions=np.array(positions + [5] * pad),
        starts=np.array([0, *np.cumsum(counts), *[1] * missing]),
        lengths=np.array([*np.add(firsts, counts), *[7] * missing], int),
        next_token=np.array([*following, *[98] * missing]),
        num_rejected=np.array([*rejected, *[3] * missing]),
    )  # fmt: skip
    return draft_inputs.context_of(step, max_length=LIMIT)


def test_a_prompt_a_rejection_and_a_step_without_drafts() -> None:
    found = taken([(0, [10, 11, 12], 0, 13), (20, [30, 31, 32, 33], 2, 40), (9, [50], 0, 51)])
    assert found.tokens[:9].tolist() == [10, 11, 12, 13, 30, 31, 40, 50, 51]
    assert found.positions[:9].tolist() == [0, 1, 2, 3, 20, 21, 22, 9, 10]
    assert found.starts.tolist() == [0, 4, 7, 9, 9]
    assert found.lengths[:3].tolist() == [4, 23, 11]
    assert found.last[:3].tolist() == [3, 6, 8]
    assert found.distribution.tolist() == [0, 0, 3]
    # No request reaches beyond its limit, and without requests nothing is taken in.
    found = taken([(LIMIT - 3, [1, 2, 3], 0, 4)])
    assert found.positions[:4].tolist() == [LIMIT - 3, LIMIT - 2, LIMIT - 1, LIMIT - 1]
    assert found.lengths[0] == LIMIT
    none = taken([])
    assert [*none.starts.tolist(), *none.distribution.tolist()] == [0] * (ROWS + 1 + 3)


def test_drafting_goes_on_from_the_last_token_of_each() -> None:
    found = taken([(0, [10, 11], 0, 12), (20, [30], 0, 31)])
    hidden = np.arange(TOKENS + ROWS, dtype=np.float32)[:, None]
    last, positions, starts, distribution = draft_inputs.decoding_step(
        hidden, np.asarray(found.positions), found.last, np.asarray(found.distribution)
    )
    assert last[:2, 0].tolist() == [2, 4]
    assert positions[:2].tolist() == [2, 21]
    assert starts.tolist() == [0, 1, 2, 3, 4]
    assert distribution.tolist() == [2, 2, 2]


K, VOCAB = 9, 7
LOOKUP = Lookup(max_ngram=3, num_speculative_tokens=4)
# A text that goes on as it began, one that never repeats itself, one that ends at the limit.
TEXTS = [[*range(VOCAB)] * 3, [0, 1, 3, 6, 3, 1], [2, 5] * 18]


class Model:
    """The next token is one of the last two, added: so it depends on what was taken in before."""

    def __init__(self) -> None:
        self.cache = np.full((len(TEXTS), LIMIT), -1)
        for row, text in enumerate(TEXTS):
            self.cache[row, : len(text)] = text
        self.furthest = [len(text) - 1 for text in TEXTS]

    def choices(self, fed: Pass) -> np.ndarray:
        """After each of the tokens; nonsense after padding."""
        chosen = np.full(len(fed.tokens), 3)
        for row in range(len(TEXTS)):
            assert fed.starts[row + 1] > fed.starts[row]  # attention needs a token of each
            for at in range(fed.starts[row], fed.starts[row + 1]):
                place = fed.positions[at]
                self.cache[row, place] = fed.tokens[at]
                self.furthest[row] = max(self.furthest[row], int(place))
                chosen[at] = self.next(row, int(place))
            assert fed.lengths[row] == place + 1
        return chosen

    def next(self, row: int, place: int) -> int:
        """One more than the last token; and in the second text, what nobody has seen there."""
        before, last = self.cache[row, place - 1 : place + 1]
        assert before >= 0
        return int((last + (before if row == 1 else 1)) % VOCAB)


def one_by_one() -> list[list[int]]:
    model = Model()
    found = [[model.next(row, len(text) - 1)] for row, text in enumerate(TEXTS)]
    for row, tokens in enumerate(found):
        while len(tokens) < K:
            place = min(len(TEXTS[row]) + len(tokens) - 1, LIMIT - 1)
            model.cache[row, place] = tokens[-1]
            tokens.append(model.next(row, place))
    return found


def test_the_tokens_are_the_models_own_in_fewer_passes() -> None:
    expected, model = one_by_one(), Model()
    text, length = padded([*TEXTS, [0] * 5, [0] * 5], LIMIT)  # two rows of padding
    first = np.array([*(tokens[0] for tokens in expected), 0, 0], np.int32)
    progress = draft_inputs.begin(
        text, length, first, np.array([0, 0, len(TEXTS)], np.int32), num_speculative_tokens=K
    )
    sizes = {"lookup": LOOKUP, "num_speculative_tokens": K, "max_length": LIMIT}
    feed = jax.jit(functools.partial(draft_inputs.feed, **sizes))
    extended = jax.jit(functools.partial(draft_inputs.extended, num_speculative_tokens=K))
    passes = np.zeros(len(TEXTS))
    while np.any(progress.num_drafted < K):
        passes += progress.num_drafted[: len(TEXTS)] < K
        fed = feed(progress)
        progress = extended(progress, fed, model.choices(fed))
    drafted = draft_inputs.drafted(progress, num_speculative_tokens=K)
    assert drafted[: len(TEXTS)].tolist() == expected
    assert passes[0] == 2  # nine tokens: one is there, and five and three at a time
    assert passes[1] > passes[0]
    # No further than without a lookup: a request has no pages for more.
    assert model.furthest == [min(len(text) + K - 2, LIMIT - 1) for text in TEXTS]


def test_a_token_goes_to_its_requests_text() -> None:
    slots, starts = jnp.array([4, 9, 2]), np.array([0, 2, 3, 3], np.int32)
    where = draft_inputs.slots_of_tokens(slots, starts, np.zeros(5, np.int32))
    assert where[:3].tolist() == [4, 4, 9]
    assert min(where[3:]) > 100  # padding
