"""From logits to tokens: greedy, or sampled after temperature, top-k and top-p."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, Key

from fly_jax.errors import FlyJaxError
from fly_jax.parameters import check_parameters, parameter
from fly_jax.sharding.rules import Layout
from fly_jax.verification.data import Count, Number, data_tree
from fly_jax.verification.reductions import AxisNames, vocab_argmax, vocab_split
from fly_jax.verification.truncation import truncate


@data_tree
@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a distribution is made of logits: all numbers are data, scalars or one for each row.

    Applied in this order: temperature, top-k, then top-p on what top-k left, renormalised.
    Tokens that tie with the last one kept are kept too. A step that is None is not in the program.

    Attributes:
      temperature: divides the logits. A row of temperature 0 is decoded greedily, so that one
        program serves greedy and sampled rows together.
      top_k: keeps so many of the most probable tokens; 0 keeps all.
      top_p: keeps the fewest most probable tokens with at least this probability together; 1 keeps
        all.

    Raises:
      FlyJaxError: if a value is outside its range.
    """

    temperature: Number = parameter(1.0, "0 is greedy", low=0.0)
    top_k: Count | None = parameter(
        None, "sample from so many most probable tokens; 0 for all", kind=int, low=0
    )
    top_p: Number | None = parameter(
        None,
        "sample from the most probable tokens of this probability",
        kind=float, above=0.0, high=1.0,
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_parameters(self)

    def of_rows(self, num_rows: int) -> Sampling:
        """The same, with an array of one number for each row everywhere."""

        def each(number: Number | Count, dtype: type) -> Array:
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

    return Sampling(
        np.array([one.temperature for one in of_rows], np.float32),
        stacked("top_k", 0, np.int32),
        stacked("top_p", 1.0, np.float32),
    )


def is_greedy(sampling: Sampling, num_lead: int) -> Bool[Array, "*#lead"]:
    """True for the rows whose temperature is 0, in a shape that meets `num_lead` dimensions."""
    return _lead(sampling.temperature, num_lead) == 0


def processed_log_probs(
    logits: Float[Array, "*lead local"], sampling: Sampling, axis_names: AxisNames = ()
) -> Float32[Array, "*lead local"]:
    """Log-probabilities, in nats, of the distribution that is sampled from.

    Args:
      logits: raw logits, of rows first; inside `jax.shard_map`, this device's shard of them.
      sampling: temperature, top-k and top-p; temperature 0 is taken as 1 here.
      axis_names: mesh axes over which the last dimension is sharded.

    Returns:
      The logits' shape, -inf for a token that is not kept.
    """
    weights, log_mass = _processed(logits, sampling, axis_names)
    return weights - log_mass[..., None]


def sample(
    logits: Float[Array, "*lead vocab"],
    sampling: Sampling | None = None,
    keys: Key[Array, "*lead"] | None = None,
    layout: Layout | None = None,
) -> Int32[Array, "*lead"]:
    """One token per position: the most probable one, or a draw from the processed distribution.

    A position's draw depends on its own key and nothing else: neither on other positions nor on
    the mesh.

    Args:
      logits: raw logits of the whole vocabulary, of rows first.
      sampling: what to draw from; None for the most probable token, the lowest id of equal ones.
      keys: a PRNG key for each position, needed with `sampling`.
      layout: where the logits are sharded, as in `evidence`; None on one device.

    Raises:
      FlyJaxError: if `sampling` is given without keys.
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
    split, axis_names = vocab_split(layout, logits.shape)
    whole = PartitionSpec(*split[:-1])
    if noise is not None:
        noise = jax.lax.with_sharding_constraint(noise, NamedSharding(layout.mesh, split))
    return jax.shard_map(
        functools.partial(_drawn, axis_names=axis_names),
        mesh=layout.mesh,
        in_specs=(split, split, PartitionSpec(*split[: min(len(lead), 1)])),
        out_specs=whole,
        check_vma=False,  # it cannot see that merged numbers are the same everywhere
    )(logits, noise, sampling)


def sample_at(
    logits: Float[Array, "rows time vocab"],
    sampling: Sampling | None,
    row_keys: Key[Array, " rows"] | None,
    positions: Int[Array, "rows time"],
    layout: Layout | None = None,
) -> Int32[Array, "rows time"]:
    """`sample`, where the draw of a text position has noise of its own: that of its row and place.

    Whichever model draws the token at a position, and in whatever pass, draws it with the same
    noise, so that draft models in a chain agree as often as they can.

    Args:
      row_keys: a PRNG key for each row, needed with `sampling`; it may be the one that the row's
        `evidence` is given.
      positions: of the tokens to draw, in their rows' texts.
    """
    keys = None
    if sampling is not None and row_keys is not None:
        keys = position_keys(row_keys, positions)
    return sample(logits, sampling, keys, layout)


def keys_of_rows(key: Key[Array, "*#rows"] | None, num_rows: int) -> Key[Array, " rows"]:
    """A key for each row: those given, or the row's own of one key; it knows no other row.

    Raises:
      FlyJaxError: no key, or keys of another number of rows.
    """
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


def position_keys(
    row_keys: Key[Array, " rows"], positions: Int[Array, "rows time"]
) -> Key[Array, "rows time"]:
    """A key for each position of each row."""
    return jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(row_keys, positions)


def gumbel_noise(keys: Key[Array, "*lead"], vocab_size: int) -> Float32[Array, "*lead vocab"]:
    """Standard Gumbel noise; on a mesh it is made outside `jax.shard_map`, in its full shape.

    Only then is it the same for every layout; each device still makes its own shard alone.
    """

    def make(key: Key[Array, ""]) -> Float32[Array, " vocab"]:
        return jax.random.gumbel(key, (vocab_size,), jnp.float32)

    for _ in keys.shape:
        make = jax.vmap(make)
    return make(keys)


def gumbel_argmax(
    log_weights: Float[Array, "*lead local"],
    noise: Float[Array, "*lead local"],
    logits: Float[Array, "*lead local"],
    is_greedy: Bool[Array, "*#lead"],
    axis_names: AxisNames = (),
) -> Int32[Array, "*lead"]:
    """A draw with probability proportional to exp(log_weights); of greedy rows the argmax."""
    return vocab_argmax(
        jnp.where(is_greedy[..., None], logits.astype(jnp.float32), log_weights + noise), axis_names
    )


def _drawn(
    logits: Float[Array, "*lead local"],
    noise: Float32[Array, "*lead local"] | None,
    sampling: Sampling | None,
    *,
    axis_names: AxisNames,
) -> Int32[Array, "*lead"]:
    if sampling is None or noise is None:
        return vocab_argmax(logits, axis_names)
    weights, _ = _processed(logits, sampling, axis_names)  # a draw needs no normaliser
    greedy = is_greedy(sampling, logits.ndim - 1)
    return gumbel_argmax(weights, noise, logits, greedy, axis_names)


def _processed(
    logits: Float[Array, "*lead local"], sampling: Sampling, axis_names: AxisNames
) -> tuple[Float32[Array, "*lead local"], Float32[Array, "*lead"]]:
    """Logits less the largest, over the temperature, -inf where not kept; their log-sum-exp."""
    logits = logits.astype(jnp.float32)
    num_lead = logits.ndim - 1
    temperature = _lead(sampling.temperature, num_lead)
    temperature = jnp.where(temperature == 0, 1, temperature)
    truncation = truncate(
        logits,
        temperature,
        None if sampling.top_k is None else _lead(sampling.top_k, num_lead),
        None if sampling.top_p is None else _lead(sampling.top_p, num_lead),
        axis_names,
    )
    # Subtracting the maximum first keeps a small temperature from overflowing.
    scaled = (logits - truncation.largest[..., None]) / temperature[..., None]
    if truncation.last is not None:
        scaled = jnp.where(logits >= truncation.last[..., None], scaled, -jnp.inf)
    return scaled, jnp.log(truncation.mass)


def _lead(number: Number | Count, num_lead: int) -> Array:
    """A number as an array that meets logits of so many dimensions before the vocabulary's."""
    number = jnp.asarray(number)
    return number.reshape(number.shape + (1,) * (num_lead - number.ndim))
