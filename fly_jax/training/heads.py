"""Heads that draft for a teacher: where each kind begins, what it learns, and what it is worth.

All kinds draft the tokens behind slot i in steps. The first step sees the text up to there, and
each further one what the steps before it have added at this slot. So a row of text is trained on
as a whole (training-time test, EAGLE-3, arXiv 2503.01840; PARD, arXiv 2504.18583): step s of slot
i attends to what step 0 knows of the slots up to i, and to steps 1 to s of its own. Steps are run
at half of a row's slots, those that weigh most: the answers' before the prompts'.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

from fly_jax.models.architectures import LlamaConfig, parameter_specs, scale_of
from fly_jax.models.head import BlockHead, Eagle3Head
from fly_jax.models.head_config import Block, Eagle3, TargetHead
from fly_jax.models.integers import signed
from fly_jax.models.llama import Attend, Llama, Parameters
from fly_jax.shapes import Index
from fly_jax.training.expectations import ROW_LENGTH, Expected, HeardRow, laid_out
from fly_jax.training.trainer import Recipe, Start, bfloat16_matmul, seen_within, stacked
from fly_jax.verification.data import taken

_DECAY = 0.8  # of the weight of a step's loss from that of the one before
# Draft tokens where a head is measured, and the documents that are measured at once.
NUM_SPECULATIVE_TOKENS = 4
_MEASURED_ROWS, _LENGTH_STEP = 8, 64
# Rank of the bias that DSpark's tokens put on the next one.
_MARKOV_RANK = 64

# Keys and values of each layer, which a step leaves to those after it.
_Left = tuple[Array, Array]
_Kept = list[_Left]


class Kind(NamedTuple):
    """A kind of head."""

    behind: int  # step s of slot i predicts token i + 1 + `behind` + s
    # Steps that are trained. With more than three the first ones become worse, as EAGLE's users
    # found; where all are drafted at once, one that was not trained is worth nothing.
    depth: int
    # Of the tokens that it knows, at some slots of each row, step by step, in float32.
    scores: Callable[[LlamaConfig, Parameters, HeardRow, Array, int], Iterator[Array]]
    learning_rate: float


def _attending(seen: Bool[Array, "rows slots time"], kept: _Kept) -> Attend[_Left]:
    """Attention of a step to the first one, and to all later ones at its own slot."""
    visible = seen[:, None, None]

    def attend(layer: Index, query: Array, key: Array, value: Array) -> tuple[Array, _Left]:
        steps = [(keys[layer], values[layer]) for keys, values in kept] + [(key, value)]
        (keys, values), own = steps[0], steps[1:]
        grouped = query.reshape(*key.shape[:3], -1, key.shape[3]) * key.shape[3] ** -0.5
        scores = [jnp.where(visible, jnp.einsum("btkgh,bskh->bkgts", grouped, keys), -jnp.inf)]
        scores += [jnp.einsum("btkgh,btkh->bkgt", grouped, one)[..., None] for one, _ in own]
        weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1)
        time = keys.shape[1]
        mixed = jnp.einsum("bkgts,bskh->btkgh", weights[..., :time], values)
        for at, (_, one) in enumerate(own, time):
            mixed += jnp.einsum("bkgt,btkh->btkgh", weights[..., at], one)
        return mixed.reshape(query.shape), (key, value)

    return attend


def _eagle3_scores(
    config: LlamaConfig, parameters: Parameters, heard: HeardRow, slots: Array, depth: int
) -> Iterator[Float[Array, "rows slots known"]]:
    head, kept = Eagle3Head(config, parameters), _Kept()
    seen, positions = seen_within(heard.row), jnp.asarray(heard.row.positions)[:, :-1]
    fed = head.fused(_features(heard), bfloat16_matmul)
    for step in range(depth):
        tokens = _ahead(heard.row.tokens, 1 + step)[:, :-1]
        hidden, fed, (keys, values) = head.run_with(
            taken(tokens, slots) if step else tokens, fed, positions + step,
            _attending(seen, kept), bfloat16_matmul,
        )  # fmt: skip
        kept.append((keys[None], values[None]))
        if not step:
            all_of = hidden, fed, seen, positions
            hidden, fed, seen, positions = (taken(one, slots) for one in all_of)
        yield head.row_logits(hidden, bfloat16_matmul)


def _pard_scores(
    config: LlamaConfig, parameters: Parameters, heard: HeardRow, slots: Array, depth: int
) -> Iterator[Float[Array, "rows slots known"]]:
    model, kept, row = Llama(config, parameters), _Kept(), heard.row
    tokens, positions = (jnp.asarray(one)[:, :-1] for one in (row.tokens, row.positions))
    seen = seen_within(row)
    for step in range(depth):
        attend = _attending(seen, kept)
        hidden, added, _ = model.run_layers(tokens, positions + step, attend, bfloat16_matmul)
        kept.append(added)
        if not step:
            hidden, seen, positions = (taken(one, slots) for one in (hidden, seen, positions))
            tokens = jnp.full_like(slots, config.pard_token or 0)
        yield model.row_logits(hidden, bfloat16_matmul)[..., : config.unknown_row]


def _dspark_scores(
    config: LlamaConfig, parameters: Parameters, heard: HeardRow, slots: Array, depth: int
) -> Iterator[Float[Array, "rows slots known"]]:
    """Runs all steps of all slots in one pass: blocks do not see each other (arXiv 2607.05147)."""
    head, own = BlockHead(config, parameters), config.head
    assert isinstance(own, Block)
    tokens = jnp.asarray(heard.row.tokens)[:, :-1]
    rows, time = tokens.shape
    context = head.injected(_features(heard), jnp.zeros(rows, jnp.int32))
    before = taken(seen_within(heard.row) & ~jnp.eye(time, dtype=bool), slots)
    masks = jnp.full((*slots.shape, own.block_size - 1), own.mask_token, jnp.int32)
    blocks = jnp.concatenate((taken(tokens, slots)[..., None], masks), axis=2)
    places = (slots[..., None] + jnp.arange(own.block_size)).reshape(rows, -1)

    def attend(layer: Index, query: Array, key: Array, value: Array) -> tuple[Array, None]:
        keys, values = context.keys[layer], context.values[layer]
        key, value = (one.reshape(*blocks.shape, *one.shape[2:]) for one in (key, value))
        grouped = query.reshape(*key.shape[:4], -1, key.shape[4]) * key.shape[4] ** -0.5
        far = jnp.einsum("btzkgh,bksh->bkgtzs", grouped, keys)
        far = jnp.where(before[:, None, None, :, None], far, -jnp.inf)
        near = jnp.einsum("btzkgh,btykh->bkgtzy", grouped, key)
        weights = jax.nn.softmax(jnp.concatenate((far, near), axis=-1), axis=-1)
        mixed = jnp.einsum("bkgtzs,bksh->btzkgh", weights[..., :time], values)
        mixed += jnp.einsum("bkgtzy,btykh->btzkgh", weights[..., time:], value)
        return mixed.reshape(query.shape), None

    hidden, *_ = head.run_layers(blocks.reshape(rows, -1), places, attend, bfloat16_matmul)
    hidden = hidden.reshape(*blocks.shape, -1)
    for step in range(depth):
        bias = head.row_bias(taken(_ahead(tokens, step), slots))
        yield head.row_logits(hidden[:, :, step], bfloat16_matmul) + bias


KINDS = {
    "eagle3": Kind(1, 3, _eagle3_scores, 3e-3),
    "pard": Kind(0, 5, _pard_scores, 2e-3),
    "dspark": Kind(0, 5, _dspark_scores, 3e-3),
}


def _features(heard: HeardRow) -> Array:
    return jax.lax.bitcast_convert_type(jnp.asarray(heard.features), jnp.bfloat16)


def _ahead(x: Array | np.ndarray, number: int) -> Array:
    """The values so many places later, and zeros behind the end."""
    x = jnp.asarray(x)
    return jnp.pad(x[:, number:], ((0, 0), (0, number), *[(0, 0)] * (x.ndim - 2)))


def loss(
    kind: str, config: LlamaConfig, parameters: Parameters, heard: HeardRow
) -> Float[Array, ""]:
    """The cross entropy of the teacher's shares of known tokens, in nats; steps weigh 0.8^s."""
    behind, depth, scores, _ = KINDS[kind]
    rows, segment = parameters["token_rows"], jnp.asarray(heard.row.segments)[:, :-1]
    first = _ahead(heard.row.weights, behind)
    # Slots that weigh the same are taken from all over the row: alone `top_k` takes the first.
    spread = 0.1 * (jnp.arange(first.shape[1]) * 0.618034 % 1)
    slots = jax.lax.top_k(first + spread, -(-first.shape[1] // 2))[1]
    total = jnp.float32(0)
    for step, logits in enumerate(scores(config, parameters, heard, slots, depth)):
        said = heard.likely, heard.shares, heard.row.weights, segment
        likely, shares, weights, own = (taken(_ahead(one, behind + step), slots) for one in said)
        weights = jnp.where(own == taken(segment, slots), weights, 0)
        likely = rows[likely]
        # The head cannot draft tokens that it does not know.
        shares = jnp.where(likely == config.unknown_row, 0, shares)
        found = jnp.take_along_axis(logits, jnp.minimum(likely, config.unknown_row - 1), axis=-1)
        losses = jnp.sum(shares * (jax.nn.logsumexp(logits, axis=-1, keepdims=True) - found), -1)
        total += _DECAY**step * jnp.sum(losses * weights) / jnp.maximum(jnp.sum(weights), 1)
    return total / sum(_DECAY**step for step in range(depth))


@functools.partial(jax.jit, static_argnames=("kind", "config"))
def _hits(
    kind: str, config: LlamaConfig, parameters: Parameters, heard: HeardRow
) -> Bool[Array, "rows time steps"]:
    """Tells which steps of each slot, with all before them, have the row's own token as best."""
    behind, _, scores, _ = KINDS[kind]
    rows = parameters["token_rows"][jnp.asarray(heard.row.tokens)]
    slots = jnp.broadcast_to(jnp.arange(rows.shape[1] - 1), rows[:, :-1].shape)
    each = scores(config, parameters, heard, slots, NUM_SPECULATIVE_TOKENS)
    found = [
        jnp.argmax(logits, axis=-1) == _ahead(rows, 1 + behind + step)[:, :-1]
        for step, logits in enumerate(each)
    ]
    return jnp.cumprod(jnp.stack(found, axis=-1), axis=-1).astype(bool)


def mean_accepted_tokens(kind: str, model: Llama, documents: Sequence[Expected]) -> float:
    """The tokens that a round with K = 4 settles, in answers that are the teacher's greedy ones."""
    tokens, rounds = np.sum(settled(kind, model, documents), axis=0)
    return tokens / max(rounds, 1)


def settled(kind: str, model: Llama, documents: Sequence[Expected]) -> list[tuple[int, int]]:
    """The tokens of each answer, and the rounds with K = 4 that settle them."""
    behind, found = KINDS[kind].behind, list[tuple[int, int]]()
    longest = max(len(one.tokens) for one in documents)
    width = -(-longest // _LENGTH_STEP) * _LENGTH_STEP
    rows = (laid_out([one], width) for one in itertools.cycle(documents))
    batched = stacked(rows, _MEASURED_ROWS)
    for start in range(0, len(documents), _MEASURED_ROWS):
        some = documents[start : start + _MEASURED_ROWS]
        hits = np.asarray(_hits(kind, model.config, model.parameters(), next(batched)))
        for own, one in zip(hits.sum(axis=-1), some, strict=False):
            length, end, rounds = max(one.num_prompt, 1 + behind), len(one.tokens), 0
            tokens = end - length
            while length < end:
                length += 1 + own[length - 1 - behind]
                rounds += 1
            found.append((tokens, rounds))
    return found


def layers_read(num_layers: int) -> tuple[int, ...]:
    """The layers of a teacher whose inputs heads read, the last one among them."""
    return (min(2, max(num_layers // 2 - 1, 0)), num_layers // 2, num_layers - 1)


def beginning(
    kind: str, teacher: Llama, known: Int32[np.ndarray, " known"], *, num_layers: int,
    intermediate_size: int | None = None,
) -> tuple[LlamaConfig, Start]:  # fmt: skip
    """A head that knows some of the teacher's tokens, and begins as parts of the teacher.

    It reads the inputs of `layers_read`. A DSpark head has the teacher's last `num_layers` layers.
    A PARD drafter has as many, half of them the first ones and half the last ones. With an
    `intermediate_size` it keeps so many neurons of each layer's MLP, the ones that say most.
    """
    config, last = teacher.config, teacher.config.num_layers
    layers = layers_read(last)
    few = 1 if kind == "eagle3" else num_layers
    kept = [*range(last - few, last)]
    if kind == "pard":
        kept = [*range(-(-few // 2)), *range(last - few // 2, last)]
    have = _plain(teacher, kept)
    if intermediate_size is not None and intermediate_size < config.ffw_size:
        loudest = np.argsort(-np.linalg.norm(have["down"], axis=2), axis=1)
        some = np.sort(loudest[:, None, :intermediate_size])
        for name in ("gate", "up"):
            have[name] = np.take_along_axis(have[name], some, axis=2)
        have["down"] = np.take_along_axis(have["down"], some.swapaxes(1, 2), axis=1)
        config = dataclasses.replace(config, ffw_size=intermediate_size)
    whole, tied = have.pop("embedding"), config.tied_embeddings
    unembedding = (whole if tied else have.pop("unembedding").T)[known]
    rows = np.full(config.vocab_size, len(known), np.int32)
    rows[known] = np.arange(len(known))
    unknown = np.flatnonzero(rows == len(known))
    frozen = {"token_rows": rows}
    own = dataclasses.replace(
        config, num_layers=few, draft_vocab_size=len(known), windowed_layers=(),
        sliding_window=None, unrotated_layers=(),
    )  # fmt: skip
    if kind == "pard":
        others = whole[unknown].mean(axis=0, keepdims=True)
        have["embedding"] = np.concatenate([whole[known], others])
        have |= {} if tied else {"unembedding": np.pad(unembedding, ((0, 1), (0, 0))).T}
        own = dataclasses.replace(own, draft_vocab_size=len(known) + 1, pard_token=int(unknown[-1]))
        return own, Start(*jax.tree.map(jnp.asarray, (have, frozen)))
    frozen |= {"embedding": whole, "unembedding": np.ascontiguousarray(unembedding.T)}
    embed, wide = config.embed_size, config.embed_size * len(layers)
    have["fusion"] = np.eye(wide, embed, embed - wide, np.float32)
    shared: Any = {"target_embed_size": embed, "layers": layers, "has_embedding": True}
    head: TargetHead = Eagle3(**shared)
    # Its layers are Llama's or Qwen 3's, which is what others read of such a head.
    foreign = ("_bias", "query_norm", "key_norm")
    have = {name: value for name, value in have.items() if not name.endswith(foreign)}
    is_llama = kind == "eagle3"
    shape: Any = {"architecture": "llama" if is_llama else "qwen3", "head_norms": not is_llama}
    own = dataclasses.replace(own, attention_biases=False, **shape)
    if is_llama:
        for name in ("query", "key", "value"):  # at first the token is not looked at
            have[name] = np.concatenate([np.zeros_like(have[name]), have[name]], axis=1)
        have["hidden_norm"] = have["attention_norm"]
        have["attention_norm"] = np.ones_like(have["attention_norm"])
    else:
        heads = np.ones((few, config.head_size), np.float32)
        have = {"query_norm": heads, "key_norm": heads} | have
        have["fused_norm"] = have["attention_norm"][-1]
        draws = np.random.default_rng(0).normal(0, 0.1, (config.vocab_size, _MARKOV_RANK))
        have["markov_rows"] = draws.astype(np.float32)
        have["markov_bias"] = np.zeros((_MARKOV_RANK, len(known)), np.float32)
        head = Block(
            **shared, block_size=KINDS[kind].depth, mask_token=int(unknown[-1]),
            target_num_layers=last, anchor_predicts=True, markov_rank=_MARKOV_RANK,
            windows_from_block=True,  # as in the form that it is written in
        )  # fmt: skip
    own = dataclasses.replace(own, tied_embeddings=False, head=head)
    return own, Start(*jax.tree.map(jnp.asarray, (have, frozen)))


def _plain(model: Llama, layers: Sequence[int]) -> dict[str, np.ndarray]:
    """The matrices outside the layers, and some layers, in float32 and without scales."""
    own = model.outer_parameters() | {name: model.stack(name, layers) for name in model.layers}
    found: dict[str, np.ndarray] = {}
    for name, spec in parameter_specs(model.config).items():
        found[name] = np.array(signed(own[name]), np.float32)
        if (scale := own.get(scale_of(name))) is not None:
            inputs = [axis for axis, which in enumerate(spec.axes) if which in spec.inputs]
            found[name] *= np.expand_dims(np.asarray(scale), tuple(inputs))
    return found


def recipe_of(
    kind: str, config: LlamaConfig, *, tokens_per_step: int, num_steps: int, seed: int
) -> Recipe:
    """The run that trains a head."""
    return Recipe(
        config=config, num_steps=num_steps, batch_size=max(tokens_per_step // ROW_LENGTH, 1),
        row_length=ROW_LENGTH,
        learning_rate=KINDS[kind].learning_rate, seed=seed, loss=_LOSSES[kind],
    )  # fmt: skip


def steps_per_checkpoint(recipe: Recipe) -> int:
    """A twentieth of the run, so that it does not end before its learning rate has fallen."""
    return max(100, recipe.num_steps // 20)


# One function each, made once: `jit` knows programs by their functions.
_LOSSES = {kind: functools.partial(loss, kind) for kind in KINDS}
