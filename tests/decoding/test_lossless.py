"""`Exact` is autoregressive decoding: for any draft, batch, K, lookup, dispatch and family.

And what is sampled is distributed as the target says.
"""

import dataclasses

import jax
import numpy as np
import oracle
import pytest
import random_pairs as pairs
from golden import GOLDEN, layout_on
from hypothesis import given, settings
from hypothesis import strategies as st

from fly_jax import Budget, Exact, Fly, FlyJaxError, Generation, Lookup, Margin, Sampling
from fly_jax.models.checkpoints.load import load_llama
from fly_jax.models.llama import Llama

SHORT = Lookup(num_speculative_tokens=3)
EARLIEST = Lookup(match="earliest", num_speculative_tokens=3)
EARLIER = Lookup(num_speculative_tokens=3, num_earlier_tokens=40)  # answers, too
PROGRAMS = {
    "autoregressive": pairs.SPECS["autoregressive"], "one token": pairs.rounds(1),
    "five tokens": pairs.SPECS["exact"],
    "lookup, three rounds": pairs.rounds(5, lookup=EARLIEST, rounds_per_dispatch=3),
    "depths, lookup": pairs.rounds(6, lookup=SHORT, depths=(2, 6)),
    "levels, lookup": pairs.rounds(5, lookup=EARLIER, level_speculative_tokens=(2,)),
    "no budget": dataclasses.replace(pairs.SPECS["deferred"], rule=Budget(Fly(0.2, 2), 0.0)),
}  # fmt: skip
# A small alphabet repeats itself, so that the lookup finds something.
tokens = st.lists(st.integers(0, 47) | st.integers(0, 2), min_size=1, max_size=16)


def decode(
    program: str, prompts: list[list[int]], limit: int, pair: int, *noises: float
) -> list[Generation]:
    spec, rows = PROGRAMS[program], 1 if program == "one token" else pairs.ROWS
    noises = noises[: 1 + len(spec.static.level_speculative_tokens)]
    return pairs.pair_engine(pair, spec, *noises, rows=rows).generate(prompts, limit)


@pytest.mark.parametrize("program", PROGRAMS)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    pair=st.integers(0, 3), noises=st.tuples(*[st.sampled_from(pairs.NOISES)] * 2),
    prompts=st.lists(tokens, min_size=1, max_size=5), limit=st.integers(1, pairs.MOST_TOKENS),
)  # fmt: skip
def test_equals_one_token_at_a_time(
    program: str, pair: int, noises: tuple[float, float], prompts: list[list[int]], limit: int
) -> None:
    generations = decode(program, prompts, limit, pair, *noises)
    expected = pairs.autoregressive(pairs.random_target(pair), prompts, limit)
    assert pairs.tokens_of(generations) == expected
    for row, prompt in zip(generations, prompts, strict=True):
        assert list(row.prompt_token_ids) == prompt
        assert row.finish_reason == ("stop" if row.token_ids[-1] in pairs.EOS else "length")
        assert not any(token in pairs.EOS for token in row.token_ids[:-1])
        assert program != "autoregressive" or row.mean_accepted_tokens == 1
        assert program != "no budget" or row.regret == 0.0


def test_agreement_spans_everything_and_shortens_decoding() -> None:
    """The cases above mean something: drafts from perfect to useless, and text that differs."""
    prompts, mean = [[token] for token in range(24)], []
    for noise in pairs.NOISES:
        rows = decode("five tokens", prompts, pairs.MOST_TOKENS, 0, noise)
        mean.append(sum(len(row.token_ids) for row in rows) / sum(row.num_rounds for row in rows))
        assert len({tuple(row.token_ids) for row in rows}) > 12
    assert mean == sorted(mean, reverse=True)
    assert mean[-1] < 1.3 < 3 < mean[0]
    assert {row.finish_reason for row in rows} == {"stop", "length"}


def test_a_row_ends_where_the_context_does() -> None:
    context, prompt = pairs.CONFIG.max_context, list(range(40)) * 15
    for longest, size, limit, left in ((100, 95, 50, 5), (context, context - 3, 10, 3)):
        engine = pairs.pair_engine(2, pairs.SPECS["exact"], 0.0, max_length=longest)
        (asked,) = engine.requests([prompt[:size]], limit)
        (state,) = engine.answer([dataclasses.replace(asked, ignores_eos=True)])
        row = state.generation
        assert (len(row.token_ids), row.finish_reason) == (left, "length")
    with pytest.raises(FlyJaxError, match="context"):
        engine.generate([prompt[:context]], 10)


# Longer than the windows, and of different lengths.
PROMPTS = [[3, 1, 4, 1, 5] * 5, [9, 2, 6], [5, 3, 5, 8, 9, 7, 9] * 2, [3, 2]]
MAX_NEW_TOKENS = 16
SPEC = pairs.rounds(3, eos_token_ids=(2,))


def noisy(model: Llama) -> Llama:
    """A draft that agrees with its target now and then."""
    values = model.parameters()
    noise = 0.1 * jax.random.normal(jax.random.key(0), values["query"].shape)
    return Llama(model.config, values | {"query": values["query"] + noise}, model.layout)


def decoded(target: Llama, draft: Llama, prompts: pairs.Texts = PROMPTS) -> list[list[int]]:
    engine = pairs.batch_engine(target, draft, SPEC, len(PROMPTS))
    return pairs.tokens_of(engine.generate(prompts, MAX_NEW_TOKENS))


@pytest.mark.parametrize(("family", "mesh"), [("qwen2_windows", None), ("smollm3", "2x2x2")])
def test_families_with_an_array_for_each_layer_or_on_a_mesh(family: str, mesh: str | None) -> None:
    """One each: the logits of both are golden for the other one's, too."""
    target = load_llama(GOLDEN / family)
    expected = pairs.autoregressive(target, PROMPTS, MAX_NEW_TOKENS, eos=(2,))
    if mesh is not None:
        target = load_llama(GOLDEN / family, layout=layout_on(mesh, "tensor"))
    models = target, noisy(target)
    assert decoded(*(models if mesh else (one.unstacked() for one in models))) == expected


def test_a_family_in_int8_whose_activations_are_rounded() -> None:
    """Alone, one token at a time, and in a batch: an integer that flips would change some texts."""
    target = load_llama(GOLDEN / "qwen3", int8=True)
    alone = pairs.batch_engine(target, None, SPEC.with_static(num_speculative_tokens=0), 1)
    prompts = [[token, *PROMPTS[token % len(PROMPTS)]] for token in range(3, 27)]
    expected = pairs.tokens_of(alone.generate(prompts, MAX_NEW_TOKENS))
    assert decoded(target, noisy(load_llama(GOLDEN / "qwen3")), prompts) == expected
    assert len({tuple(one) for one in expected}) > len(PROMPTS)


# A small vocabulary, so that every token is drawn often enough to be counted.
SMALL = dataclasses.replace(pairs.CONFIG, vocab_size=8, eos_token_ids=())
SHARPNESS = 1.5
PROMPT = [3, 1, 4, 1]
ROWS, DRAWS = 16, 768
TEMPERATURE, TOP_K = 0.9, 6


def models() -> tuple[Llama, Llama]:
    target = pairs.random_target(5, SMALL, SHARPNESS)
    return target, pairs.random_draft(5, 1.0, SMALL, SHARPNESS)


def probabilities(text: list[int], model: int = 0, below: float = np.inf) -> np.ndarray:
    """The distribution of the token that follows a text, by the oracle; 1 is the draft's.

    Of tokens whose logit is at most so far below the largest.
    """
    logits = pairs.logits_after(models()[model], text)[-1]
    cut = np.where(logits >= logits.max() - below, logits, -np.inf)
    return oracle.processed_probs(cut, TEMPERATURE, TOP_K, 1.0)


@pytest.mark.parametrize(("lookup", "below"), [(Lookup(1), np.inf), (None, 1.0)])
def test_tokens_have_the_targets_distribution(lookup: Lookup | None, below: float) -> None:
    """Speculation is lossless for the target as the rule's support cuts it, before all else."""
    rule, sampling = Exact(Margin(below) if below == 1 else None), Sampling(TEMPERATURE, TOP_K)
    spec = pairs.rounds(3, rule, sampling, lookup=lookup, eos_token_ids=())
    rows = pairs.batch_engine(*models(), spec, ROWS).generate([PROMPT] * DRAWS, 3)
    assert all(row.num_draft_tokens == 3 * row.num_rounds for row in rows)
    accepted = sum(row.num_accepted_tokens for row in rows) / sum(row.num_rounds for row in rows)
    assert 0.2 < accepted < 2.5, "the draft is too good or too bad to test anything"
    probs = probabilities(PROMPT, below=below)
    assert 1 < np.count_nonzero(probs) <= TOP_K - (below == 1)
    assert oracle.goodness_of_fit([row.token_ids[0] for row in rows], probs) > 1e-3
    # Given what came before, the second and the third one too.
    for depth in (1, 2):
        groups: dict[tuple[int, ...], list[int]] = {}
        for row in rows:
            groups.setdefault(tuple(row.token_ids[:depth]), []).append(row.token_ids[depth])
        largest = sorted(groups, key=lambda group: len(groups[group]), reverse=True)[:3]
        assert len(groups[largest[-1]]) > 25
        for one in largest:
            probs = probabilities([*PROMPT, *one], below=below)
            assert oracle.goodness_of_fit(groups[one], probs) > 1e-4, one


def test_the_test_of_fit_notices_the_wrong_distribution() -> None:
    tokens = np.random.default_rng(0).choice(SMALL.vocab_size, DRAWS, p=probabilities([2, 2]))
    assert oracle.goodness_of_fit(tokens[tokens < 8].tolist(), probabilities([2, 2])) > 1e-3
    drawn = np.random.default_rng(0).choice(SMALL.vocab_size, DRAWS, p=probabilities(PROMPT, 1))
    target = np.where(probabilities(PROMPT) == 0, 1e-9, probabilities(PROMPT))
    assert oracle.goodness_of_fit(drawn.tolist(), target / target.sum()) < 1e-6
