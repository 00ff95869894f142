"""Every family of models decodes as its own logits say: one array per layer, and on meshes."""

from __future__ import annotations

import functools

import jax
import pytest
from golden import GOLDEN, layout_on
from random_pairs import batch_engine, greedy, until_end

from fly_jax.decoding.config import RoundSpec, RoundStatic
from fly_jax.models.checkpoints.load import load_llama
from fly_jax.models.llama import Llama
from fly_jax.verification.rules import Exact

FAMILIES = ("mistral", "qwen2_windows", "qwen3", "smollm3")
# Longer than the windows, and of different lengths.
PROMPTS = [[3, 1, 4, 1, 5] * 5, [9, 2, 6], [5, 3, 5, 8, 9, 7, 9] * 2, [3, 2]]
MAX_NEW_TOKENS = 16
SPEC = RoundSpec(Exact(), RoundStatic(3, eos_token_ids=(2,)))


def noisy(model: Llama) -> Llama:
    """A draft that agrees with its target now and then."""
    query = model.parameters()["query"]
    noisy = query + 0.1 * jax.random.normal(jax.random.key(0), query.shape)
    return Llama(model.config, model.parameters() | {"query": noisy}, model.layout)


def decoded(target: Llama, draft: Llama) -> list[list[int]]:
    engine = batch_engine(target, draft, SPEC, len(PROMPTS))
    return [one.token_ids for one in engine.generate(PROMPTS, MAX_NEW_TOKENS)]


@functools.cache
def expected(family: str) -> list[list[int]]:
    """One token at a time, without a cache, up to the end of the text."""
    found = greedy(load_llama(GOLDEN / family), PROMPTS, MAX_NEW_TOKENS)
    return [until_end(one, (2,)) for one in found]


@pytest.mark.parametrize("family", FAMILIES)
def test_each_layer_of_its_own(family: str) -> None:
    target = load_llama(GOLDEN / family)
    assert decoded(target.unstacked(), noisy(target).unstacked()) == expected(family)


@pytest.mark.parametrize(
    ("family", "mesh", "rules"),
    [
        ("mistral", "2x4", "tensor_long"),
        ("qwen2_windows", "2x2", "tensor"),
        ("qwen3", "2x4", "tensor_whole"),
        ("smollm3", "2x2x2", "tensor"),
    ],
)
def test_on_a_mesh(family: str, mesh: str, rules: str) -> None:
    target = load_llama(GOLDEN / family, layout=layout_on(mesh, rules))
    assert decoded(target, noisy(target)) == expected(family)
