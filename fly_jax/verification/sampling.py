"""Tokens from logits: greedy, or sampled after temperature, top-k and top-p.

Top-k and top-p both keep a token iff the tokens above it weigh less than a limit. Each weighs 1
for top-k and its probability for top-p, so ties with the last one kept are kept. That one is
found exactly, on any mesh.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, Key

from fly_jax.errors import FlyJaxError
from fly_jax.parameters import MOST_INT, check_parameters, parameter
from fly_jax.shapes import Index, RowKeys, Tokens
from fly_jax.sharding.rules import Layout
from fly_jax.verification import reductions
from fly_jax.verification.data import Count, Number, data_tree
from fly_jax.verification.reductions import AxisNames, Local, finite_or_zero, vocab_sum

# First number of verification's draws; the text positions of `sample_at` are far below.
_FIRST_DRAW = 2**30

_Shard = Float32[Array, "*lead local"]
_Each = Float32[Array, "*#lead"]
_Flags = Bool[Array, "*#lead"]
_TopK = Int[Array, "*#lead"] | None
_TopP = _Each | None
_Found = Float32[Array, "*lead"]
_Bounds = tuple[Int[Array, "*lead"], Int[Array, "*lead"]]
_Kept = tuple[_Found, _Found | None, _Found]


@data_tree
class Sampling:
    """The steps from logits to a distribution; its numbers are data, scalars or one for each row.

    Applied in this order: temperature, top-k, then top-p on what top-k left, renormalised. A step
    that is None is not in the program.

    Attributes:
      temperature: divides the logits. A row of temperature 0 is decoded greedily, so that one
        program serves greedy and sampled rows together.
      top_k: keeps so many of the most probable tokens; 0 keeps all.
      top_p: keeps the fewest most probable tokens with at least this probability together; 1
        keeps all.
    """

    temperature: Number = parameter(1.0, "0 is greedy", low=0.0)
    top_k: Count | None = parameter(
        None, "sample from so many most probable tokens; 0 for all", kind=int, low=0, high=MOST_INT
    )
    top_p: Number | None = parameter(
        None, "sample from the most probable tokens of this probability",
        kind=float, above=0.0, high=1.0,
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_parameters(self)

    def of_rows(self, num_rows: int) -> Sampling:
        """A copy in which every number is an array of one for each row."""

        def each(number: Number | Count, dtype: DTypeLike) -> Array:
            return jnp.broadcast_to(jnp.asarray(number, dtype), (num_rows,))

        return Sampling(
            each(self.temperature, jnp.float32),
            None if self.top_k is None else each(self.top_k, jnp.int32),
            None if self.top_p is None else each(self.top_p, jnp.float32),
        )


def sampling_per_row(samplings: Sequence[Sampling | None]) -> Sampling:
    """The samplings of a batch's rows in one, with the steps that any row has; None is greedy."""
    of_rows = [Sampling(0.0) if one is None else one for one in samplings]

    def stacked(name: str, off: float, dtype: type) -> np.ndarray | None:
        numbers = [getattr(one, name) for one in of_rows]
        if all(number is None for number in numbers):
            return None
        return np.array([off if number is None else number for number in numbers], dtype)

    temperature = np.array([one.temperature for one in of_rows], np.float32)
    return Sampling(temperature, stacked("top_k", 0, np.int32), stacked("top_p", 1.0, np.float32))


def is_greedy(sampling: Sampling, num_lead: int) -> _Flags:
    """Tells which rows have temperature 0, in a shape that meets `num_lead` dimensions."""
    return _lead(sampling.temperature, num_lead) == 0


def processed_log_probs(logits: Local, sampling: Sampling, axis_names: AxisNames = ()) -> _Shard:
    """Log-probabilities, in nats, of the distribution sampled from; -inf for what is not kept.

    The raw logits are of rows first; inside `jax.shard_map`, this device's shard of them.
    Temperature 0 is taken as 1 here.
    """
    weights, log_mass = _processed(logits, sampling, axis_names)
    return weights - log_mass[..., None]


def sample(
    logits: Float[Array, "*lead vocab"], sampling: Sampling | None = None,
    keys: Key[Array, "*lead"] | None = None, layout: Layout | None = None,
) -> Int32[Array, "*lead"]:  # fmt: skip
    """Draws a token per position: the most probable one, or one of the processed distribution.

    A position's draw depends on its own key alone: neither on other positions nor on the mesh.
    FlyJaxError for a `sampling` without keys.

    Args:
      logits: raw logits of the whole vocabulary, of rows first.
      sampling: what to draw from; None for the most probable token, the lowest id of equal ones.
      keys: a PRNG key for each position, needed with `sampling`.
      layout: where the logits are sharded, as in `evidence`; None on one device.
    """
    lead = logits.shape[:-1]
    noise = None
    if sampling is not None:
        if keys is None:
            raise FlyJaxError(
                "Sampling was asked for without PRNG keys; pass a key for each position, or "
                "sample_at and one for each row."
            )
        if lead:
            sampling = sampling.of_rows(lead[0])
        noise = gumbel_noise(keys, logits.shape[-1])
    if layout is None:
        return _drawn(logits, noise, sampling, axis_names=())
    split, axis_names = reductions.vocab_split(layout, logits.shape)
    if noise is not None:
        noise = jax.lax.with_sharding_constraint(noise, NamedSharding(layout.mesh, split))
    return jax.shard_map(
        functools.partial(_drawn, axis_names=axis_names),
        mesh=layout.mesh,
        in_specs=(split, split, PartitionSpec(*split[: min(len(lead), 1)])),
        out_specs=PartitionSpec(*split[:-1]),
        check_vma=False,  # it cannot see that merged numbers are the same everywhere
    )(logits, noise, sampling)


def sample_at(
    logits: Float[Array, "rows time vocab"], sampling: Sampling | None,
    row_keys: Key[Array, " rows"] | None, positions: Int[Array, "rows time"],
    layout: Layout | None = None,
) -> Int32[Array, "rows time"]:  # fmt: skip
    """Draws as `sample`, with noise that depends on the row and the text position alone.

    Every model, in every pass, draws the token at a position with the same noise, so that draft
    models in a chain agree as often as they can.

    Args:
      row_keys: a PRNG key for each row, needed with `sampling`; it may be the one that the row's
        `evidence` is given.
      positions: of the tokens to draw, in their rows' texts.
    """
    keys = None
    if sampling is not None:
        keys = position_keys(keys_of_rows(row_keys, len(positions)), positions)
    return sample(logits, sampling, keys, layout)


def keys_of_rows(key: Key[Array, "*#rows"] | None, num_rows: int) -> RowKeys:
    """A key for each row: the given ones, or the given one folded with the row's index."""
    if key is None:
        raise FlyJaxError("Sampling was asked for without a PRNG key; pass key=jax.random.key(…).")
    if not jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)
    if key.ndim == 0:
        return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(num_rows))
    if key.shape != (num_rows,):
        raise FlyJaxError(
            f"The keys have shape {key.shape} for {num_rows} rows; pass one key, or one for each "
            "row."
        )
    return key


def position_keys(row_keys: RowKeys, positions: Tokens) -> Key[Array, "rows time"]:
    """The keys of positions: each row's key folded with the position."""
    return jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(row_keys, positions)


def gumbel_noise(keys: Key[Array, "*lead"], vocab_size: int) -> Float32[Array, "*lead vocab"]:
    """Draws Gumbel noise, the same on every mesh if it is called outside `jax.shard_map`."""
    draw = functools.partial(jax.random.gumbel, shape=(vocab_size,), dtype=jnp.float32)
    make: Callable[..., Array] = draw
    for _ in keys.shape:
        make = jax.vmap(make)
    return make(keys)


def uniform_noise(row_keys: RowKeys, positions: Tokens) -> Float32[Array, "rows time"]:
    """The noise that accepts draft tokens, of each position of a block, by the key of its row."""
    keys = position_keys(row_keys, _FIRST_DRAW + 1 + positions)
    return jax.vmap(jax.vmap(jax.random.uniform))(keys)


def block_noise(row_keys: RowKeys, vocab_size: int) -> Float32[Array, "rows 1 vocab"]:
    """The Gumbel noise of the one token that a row's block draws, whose place it has no say in."""
    places = jnp.full((len(row_keys), 1), _FIRST_DRAW, jnp.int32)
    return gumbel_noise(position_keys(row_keys, places), vocab_size)


def _drawn(
    logits: Local, noise: _Shard | None, sampling: Sampling | None, *, axis_names: AxisNames
) -> Int32[Array, "*lead"]:
    if sampling is None or noise is None:
        return reductions.vocab_argmax(logits, axis_names)
    weights, _ = _processed(logits, sampling, axis_names)  # a draw needs no normaliser
    greedy = is_greedy(sampling, logits.ndim - 1)[..., None]
    scores = jnp.where(greedy, logits.astype(jnp.float32), weights + noise)
    return reductions.vocab_argmax(scores, axis_names)


def _processed(logits: Local, sampling: Sampling, axis_names: AxisNames) -> tuple[_Shard, _Found]:
    """Logits less the largest, over the temperature, -inf where not kept; their log-sum-exp."""
    logits, num_lead = logits.astype(jnp.float32), logits.ndim - 1
    temperature = _lead(sampling.temperature, num_lead)
    temperature = jnp.where(temperature == 0, 1, temperature)
    steps = sampling.top_k, sampling.top_p
    top_k, top_p = (None if step is None else _lead(step, num_lead) for step in steps)
    largest, last, mass = _truncate(logits, temperature, top_k, top_p, axis_names)
    # Subtracting the maximum first keeps a small temperature from overflowing.
    scaled = (logits - largest[..., None]) / temperature[..., None]
    if last is not None:
        scaled = jnp.where(logits >= last[..., None], scaled, -jnp.inf)
    return scaled, jnp.log(mass)


def _lead(number: Number | Count, num_lead: int) -> Array:
    """A number as an array that meets logits of so many dimensions before the vocabulary's."""
    number = jnp.asarray(number)
    return number.reshape(number.shape + (1,) * (num_lead - number.ndim))


def _truncate(
    logits: _Shard, temperature: _Each, top_k: _TopK, top_p: _TopP, axis_names: AxisNames
) -> _Kept:
    """Finds what top-k (0 for all) and then top-p (1 for all) keep; None is no such step.

    Returns the largest logit (0 if that is not finite), the smallest that is kept (None if all
    are), and the sum over those kept of exp((logit - largest) / temperature). Over a sharded
    vocabulary both steps together take four exchanges, and either alone three.
    """
    if axis_names and (top_k is not None or top_p is not None):
        return _truncate_sharded(logits, temperature, top_k, top_p, axis_names)
    largest = finite_or_zero(reductions.vocab_max(logits, axis_names))
    mass = jnp.exp((logits - largest[..., None]) / temperature[..., None])
    last = None
    if top_k is not None:  # which no row may ask for: a server's programs have both steps
        halvings = 32 * jnp.any(top_k > 0)
        last = _last_kept(logits, jnp.ones_like(logits), _count_limit(top_k), halvings)
        mass = jnp.where(logits >= last[..., None], mass, 0)
    if top_p is not None:
        limit, halvings = _mass_limit(top_p, vocab_sum(mass)), 32 * jnp.any(top_p < 1)
        within = _last_kept(logits, mass, limit, halvings)
        last = within if last is None else jnp.maximum(last, within)
        mass = jnp.where(logits >= last[..., None], mass, 0)
    return largest, last, vocab_sum(mass, axis_names)


def _count_limit(top_k: Int[Array, "*#lead"]) -> _Each:
    return jnp.where(top_k == 0, jnp.inf, top_k.astype(jnp.float32))


def _mass_limit(top_p: _Each, mass: _Found) -> _Found:
    # Never 0, so that the most probable token is kept whatever p.
    limit = jnp.maximum(top_p * mass, jnp.finfo(jnp.float32).tiny)
    return jnp.where(top_p >= 1, jnp.inf, limit)


def _last_kept(
    logits: Float32[Array, "*#lead vocab"], weights: Float32[Array, "*#lead vocab"], limit: _Each,
    halvings: int | Index = 32,
) -> _Found:  # fmt: skip
    """The least t such that all logits above t weigh less than `limit`; -inf for no limit.

    No sort: a float32 has 32 bits, so 32 halvings find t exactly; rounded sums of fewer
    non-negative terms are never larger, so the search cannot be misled.
    """
    ordered = _ordered(logits)

    def halve(_: int, bounds: _Bounds) -> _Bounds:
        low, high = bounds
        middle = (low & high) + ((low ^ high) >> 1)  # the mean, without overflow
        above = vocab_sum(jnp.where(ordered > middle[..., None], weights, 0))
        enough = above < limit
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    shape = jnp.broadcast_shapes(logits.shape[:-1], limit.shape)
    like = jnp.broadcast_to(ordered[..., 0], shape)
    low = jnp.full_like(like, _ordered(jnp.float32(-jnp.inf)))
    high = jnp.where(limit < jnp.inf, _ordered(jnp.float32(jnp.inf)), low)
    found = jax.lax.fori_loop(0, halvings, halve, (low, high))[1]
    return jax.lax.bitcast_convert_type(_flipped(found), jnp.float32)


def _ordered(values: Float32[Array, "*shape"]) -> Int32[Array, "*shape"]:
    """Integers in the same order as the floats; both zeros are the same one."""
    return _flipped(jax.lax.bitcast_convert_type(jnp.where(values == 0, 0.0, values), jnp.int32))


def _flipped(bits: Int32[Array, "*shape"]) -> Int32[Array, "*shape"]:
    """Maps a float's bits to an integer in the same order, and back."""
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def _truncate_sharded(
    logits: _Shard, temperature: _Each, top_k: _TopK, top_p: _TopP, axis_names: AxisNames
) -> _Kept:
    """Splits all logits by a few of them, weighs the parts, and looks into the one that matters."""
    # 1) Gather the splitters, in no order: the TPU compiler takes seconds for each sort. Of each
    # shard they are its largest, its least, and every `step`-th in between, so that no shard has
    # `step` logits between two neighbours.
    local, lead = logits.shape[-1], logits.ndim - 1
    step = _best_step(local, jax.lax.axis_size(axis_names))
    ranks, each = np.unique([*range(0, local, step), local - 1]), logits[..., None, :]
    own = _last_kept(each, jnp.ones_like(each), jnp.asarray(ranks + 1.0))
    splitters = jax.lax.all_gather(own, axis_names, axis=lead, tiled=True)
    largest = finite_or_zero(jnp.max(splitters, axis=-1))
    mass = jnp.exp((logits - largest[..., None]) / temperature[..., None])
    # 2) Weigh what lies above each of them, and everything.
    weights = [
        _weight_above(splitters, logits, jnp.ones_like(mass)),
        _weight_above(splitters, logits, mass),
        vocab_sum(mass)[..., None],
    ]
    counted, weighed, total = jnp.split(
        jax.lax.psum(jnp.concatenate(weights, axis=-1), axis_names),
        (splitters.shape[-1], 2 * splitters.shape[-1]),
        axis=-1,
    )

    def last_between(
        above: Float32[Array, "*lead splitters"], limit: _Each, *, by_mass: bool
    ) -> tuple[_Found, _Found]:
        """The last logit kept, and the mass of all kept, by the weight `above` each splitter."""
        limit = jnp.broadcast_to(limit, above.shape[:-1])[..., None]
        is_kept = above < limit
        upper = jnp.min(jnp.where(is_kept, splitters, jnp.inf), axis=-1, keepdims=True)
        lower = jnp.max(jnp.where(is_kept, -jnp.inf, splitters), axis=-1, keepdims=True)
        # This shard's logits between the two, and what it has at the upper one and above.
        at_upper = logits >= upper
        found = jnp.concatenate([
            _compacted(logits, (logits > lower) & ~at_upper, max(step - 1, 1)),
            vocab_sum(at_upper.astype(jnp.float32))[..., None],
            vocab_sum(jnp.where(at_upper, mass, 0))[..., None],
        ], axis=-1)  # fmt: skip
        found = jax.lax.all_gather(found, axis_names, axis=found.ndim - 1)
        count_above, mass_above = (jnp.sum(found[..., at], -1, keepdims=True) for at in (-2, -1))
        between = found[..., :-2]
        between = between.reshape(*between.shape[:-2], -1)
        is_between = between > -jnp.inf  # else it only fills up
        masses = jnp.exp((between - largest[..., None]) / temperature[..., None])
        weights = masses if by_mass else is_between.astype(jnp.float32)
        weight_above = _weight_above(between, between, weights)
        weight_above += mass_above if by_mass else count_above
        is_kept_here = is_between & (weight_above < limit)
        last = jnp.min(jnp.where(is_kept_here, between, upper), axis=-1)
        kept = jnp.where(between >= last[..., None], masses, 0)
        return last, mass_above[..., 0] + jnp.sum(kept, axis=-1)

    # 3) Top-k, and 4) top-p, each with one look between two neighbouring splitters.
    last, kept_mass = None, total[..., 0]
    if top_k is not None:
        last, kept_mass = last_between(counted, _count_limit(top_k), by_mass=False)
    if top_p is not None:
        limit = _mass_limit(top_p, kept_mass)
        within, mass_within = last_between(weighed, limit, by_mass=True)
        if last is None:
            last, kept_mass = within, mass_within
        else:
            kept_mass = jnp.where(within >= last, mass_within, kept_mass)
            last = jnp.maximum(last, within)
    return largest, last, kept_mass


def _best_step(local: int, devices: int) -> int:
    """The distance between splitters, in logits of a shard, with the fewest comparisons."""

    def comparisons(step: int) -> int:
        # Finds its own by 32 halvings, weighs all, picks between two, and compares these pairwise.
        count = math.ceil(local / step) + 1
        return local * (32 * count + 2 * devices * count + step) + (devices * step) ** 2

    return min(range(1, local + 1), key=comparisons)


def _weight_above(
    values: Float32[Array, "*lead some"], logits: _Shard, weights: _Shard
) -> Float32[Array, "*lead some"]:
    """The weight of the logits strictly above each value."""
    is_above = logits[..., None, :] > values[..., None]
    return vocab_sum(jnp.where(is_above, weights[..., None, :], 0))


def _compacted(
    values: _Shard, which: Bool[Array, "*lead local"], size: int
) -> Float32[Array, "*lead {size}"]:
    """The marked values, at most `size` of them, and then -inf."""
    place = jnp.cumsum(which, axis=-1, dtype=jnp.int32) - 1
    is_here = which[..., None, :] & (place[..., None, :] == jnp.arange(size)[:, None])
    return jnp.max(jnp.where(is_here, values[..., None, :], -jnp.inf), axis=-1)
