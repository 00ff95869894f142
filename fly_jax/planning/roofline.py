"""Operations and memory traffic of a pass, counted from shapes.

XLA's cost analysis counts a scanned layer once, so its totals mean nothing here; tests hold these
counts against it on programs without a loop.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterable, Sequence

from fly_jax.errors import FlyJaxError
from fly_jax.models.architectures import LlamaConfig, parameter_specs, scale_of
from fly_jax.models.attention import query_axes
from fly_jax.models.cache import CACHE_AXES, cache_shape
from fly_jax.models.head_config import Block, Eagle3
from fly_jax.models.layouts import Workload, cache_bytes, cache_exchanges, parameter_bytes
from fly_jax.planning.hlo import Exchange
from fly_jax.sharding.chips import Chip, group_of
from fly_jax.sharding.rules import Layout, axes_in

# Tables of which only single rows are read.
_TABLES = ("embedding", "markov_rows")


@dataclasses.dataclass(frozen=True)
class Work:
    """Operations of one chip in a step, and bytes to and from its memory."""

    flops: float
    num_bytes: float
    integer_flops: float = 0.0  # those of `flops` that multiply int8 by int8

    def __add__(self, other: Work) -> Work:
        one, two = dataclasses.astuple(self), dataclasses.astuple(other)
        return Work(*map(operator.add, one, two))

    def __mul__(self, times: float) -> Work:
        return Work(*(times * one for one in dataclasses.astuple(self)))

    def arithmetic_seconds(self, chip: Chip) -> float:
        """How long its operations take."""
        integers = self.integer_flops / (chip.integer_flops or chip.flops)
        return (self.flops - self.integer_flops) / chip.flops + integers


def pass_work(
    layout: Layout, config: LlamaConfig, workload: Workload, tokens: int, *, logits: bool = True,
    vector_memory: float = math.inf,
) -> Work:  # fmt: skip
    """The work of one pass of a model over `tokens` new tokens of every row.

    Operations are the products' multiplications and additions. Bytes are every parameter once (of
    an embedding only the rows looked up), the whole cache once, and what is written to it; also
    attention's scores, twice, where those of a layer, in float32, are more than the chip's vector
    memory holds. Without `logits` the vocabulary is not scored. What a head shares with its target
    it reads as its own, and DSpark's bias is read for every token, one after the other.
    """
    if config.head is not None:
        whole = dataclasses.replace(config.head, has_embedding=True, has_unembedding=True)
        config = dataclasses.replace(config, head=whole)
    rows = workload.rows // layout.devices(layout.axes_of("rows", workload.rows))
    matrices, integers, specs = 0, 0, parameter_specs(config)
    stored = parameter_specs(config, workload.matrices)
    for name, spec in specs.items():
        scores = name == "unembedding" or (name == "embedding" and config.tied_embeddings)
        if spec.inputs and ((scores and logits) or name not in (*_TABLES, "unembedding")):
            own = layout.shard_bytes(spec.axes, spec.shape, 1)
            matrices += own
            scale = stored.get(scale_of(name))
            if scale is not None and len(scale.shape) < len(spec.shape):
                integers += 0 if layout.splits_inputs(spec) else own
    cache = layout.spec(CACHE_AXES, cache_shape(config, workload.rows, workload.capacity))
    # Devices that hold other rows or positions of the cache take all queries of their heads.
    apart = (*axes_in(cache[1]), *axes_in(cache[3]))
    split = query_axes(layout, config.num_heads, config.queries_per_kv_head)
    split = tuple(name for name in split if name not in apart)
    positions = config.num_layers * workload.rows * workload.capacity / layout.devices(apart)
    attended = positions * tokens * config.num_heads / layout.devices(split)
    flops = 2 * rows * tokens * matrices + 4 * attended * config.head_size
    num_bytes: float = parameter_bytes(layout, config, workload.matrices)
    itemsize = 1 if workload.matrices is not None and workload.matrices.outer else 2
    again = {"markov_bias": tokens - 1, **dict.fromkeys(_TABLES, -1)}
    if isinstance(config.head, Eagle3) and tokens == 1:  # the target's features are fused before
        again["fusion"] = -1
    if config.tied_embeddings:
        del again["embedding"]
    for name in again.keys() & specs.keys():
        spec = specs[name]
        num_bytes += again[name] * layout.shard_bytes(spec.axes, spec.shape, itemsize)
    num_bytes += cache_bytes(layout, config, workload) * (1 + tokens / workload.capacity)
    score_bytes = 4 * attended
    if score_bytes / config.num_layers > vector_memory:
        num_bytes += 2 * score_bytes
    return Work(float(flops), num_bytes, 2.0 * rows * tokens * integers)


def draft_passes(
    drafts: Sequence[LlamaConfig], num_speculative_tokens: int, level_tokens: int = 1,
    level_accepted: float = 1.0,
) -> tuple[dict[int, float], ...]:  # fmt: skip
    """The passes of each draft model in a round, by the tokens of a row that they run over.

    The first of them proposes to the target, each other one `level_tokens` at a time to the one
    before it, of which a pass over such a proposal gives `level_accepted` tokens in the mean.
    """
    found, k, calls = list[dict[int, float]](), num_speculative_tokens, 1.0
    for level, config in enumerate(drafts):
        if config.pard_token is not None:
            # The tokens that a round may have settled, and the copies behind them.
            found.append({2 * k: calls})
            continue
        if isinstance(config.head, Block):  # which takes in what was settled with the target's pass
            found.append({k + (not config.head.anchor_predicts): calls})
            continue
        is_last = level == len(drafts) - 1
        later = calls * (k - 1) / (1.0 if is_last else level_accepted)
        # It first feeds what was settled without it, as `DraftModel` does.
        first = 2 if level == 0 else 4
        # A head begins with all that may have been settled since, as `HeadDraft` does.
        if config.head is not None:
            first = k + (1 if level == 0 else 4)
        widths = (first, 1 if is_last else 1 + level_tokens)
        passes = {widths[0]: calls}
        passes[widths[1]] = passes.get(widths[1], 0.0) + later
        found.append(passes)
        k, calls = level_tokens, later
    return tuple(found)


def model_exchanges(
    layout: Layout, config: LlamaConfig, workload: Workload, tokens: int, *, logits: bool = True
) -> list[Exchange]:
    """The exchanges of a pass over `tokens` of every row.

    A layer sums what its products of the MLP and of attention give, each over the axes that split
    its inputs. The embedding is one more sum, and the best token takes two.
    """
    rows = workload.rows // layout.devices(layout.axes_of("rows", workload.rows))
    shape: tuple[int, ...] = (rows, tokens, config.embed_size)
    num_bytes = 2 * math.prod(shape)
    size, layers = layout.devices(("y",)), config.num_layers
    split = {"ffw": config.ffw_size, "q_heads": config.num_heads, "vocab": config.vocab_size}
    axes = {name: layout.axes_of(name, number) for name, number in split.items()}
    sums = [("ffw", shape, layers), ("q_heads", shape, layers), ("vocab", shape, 1)]
    sums += [("vocab", shape[:2], 2)] if logits else []
    found = [
        Exchange("all-reduce", (one,), 2 * math.prod(one), layout.devices(along), count, along)
        for name, one, count in sums
        if layout.devices(along := axes[name]) > 1
    ]
    if size > 1:
        own = cache_exchanges(layout, config, workload, num_bytes)
        found += [Exchange(kind, (shape,), some, size, layers, ("y",)) for kind, some in own]
    return found


def roofline_seconds(
    works: Iterable[Work], found: Iterable[Exchange], chip: Chip, sizes: dict[str, int]
) -> float:
    """The longer of arithmetic and memory of each pass, and the network, which nothing hides."""
    busy = sum(
        max(one.arithmetic_seconds(chip), one.num_bytes / chip.memory_bandwidth) for one in works
    )
    return busy + sum(
        one.count * chip.exchange_seconds(one.kind, one.num_bytes, *group_axes(one, sizes))
        for one in found
    )


def group_axes(exchange: Exchange, sizes: dict[str, int]) -> tuple[list[int], int]:
    """Sizes of the mesh axes along which a group of devices lies, and its stride (`group_of`)."""
    if exchange.axes:
        return group_of(sizes, exchange.axes)
    axes, size = tuple(sizes), exchange.group_size
    parts = (axes[first:last] for first in range(len(axes)) for last in range(len(axes), first, -1))
    found = (group_of(sizes, part) for part in parts)
    return next((one for one in found if math.prod(one[0]) == size), ([size], 1))


PUBLISHED_K = 25  # of FLy on Llama-3.1-405B with an 8B draft (arXiv 2511.22972)
MAX_SPECULATIVE_TOKENS = 64


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """Seconds of each step; a pass of the draft model may draft all tokens at once.

    `verify` is the target's pass over K + 1 tokens; each further one adds `verify_token`.
    """

    draft_pass: float
    verify: float
    autoregressive: float
    verify_token: float = 0.0
    drafts_at_once: bool = False

    def speed_up(self, num_speculative_tokens: int, mean_accepted: float) -> float:
        """Tokens per second of speculation over those of one token at a time."""
        return mean_accepted * self.autoregressive / self.round(num_speculative_tokens)

    def round(self, num_speculative_tokens: int, reference: int | None = None) -> float:
        """Seconds of a round with so many draft tokens, where `verify` is of `reference`."""
        more = 0 if reference is None else num_speculative_tokens - reference
        passes = 1 if self.drafts_at_once else num_speculative_tokens
        least = min(self.verify, self.autoregressive)  # whatever arithmetic is saved
        return passes * self.draft_pass + max(self.verify + more * self.verify_token, least)


def mean_accepted(acceptance: float, num_speculative_tokens: int) -> float:
    """Tokens of a round where each draft token is kept with this probability, on its own.

    (1 - a^(K+1)) / (1 - a): Leviathan et al., arXiv 2211.17192, equation 1. Real acceptance comes
    in streaks, so that for a K much different from the measured one this is a guess.
    """
    if acceptance >= 1:
        return num_speculative_tokens + 1.0
    return (1 - acceptance ** (num_speculative_tokens + 1)) / (1 - acceptance)


def acceptance_from(mean: float, num_speculative_tokens: int) -> float:
    """The probability that gives this mean with this K; raises FlyJaxError where none does."""
    k = num_speculative_tokens
    if not 1 <= mean <= k + 1:
        raise FlyJaxError(
            f"A mean of {mean:g} accepted tokens was given with {k} draft tokens; a round settles "
            f"1 to {k + 1}: give a mean in that range."
        )
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if mean_accepted(middle, k) < mean else (low, middle)
    return (low + high) / 2


def best_num_speculative_tokens(
    times: StepTimes, acceptance: float, reference: int,
    max_speculative_tokens: int = MAX_SPECULATIVE_TOKENS,
) -> tuple[int, float]:  # fmt: skip
    """The K with most tokens per second, and its speed-up; `times.verify` is of `reference`."""
    speeds = {
        k: mean_accepted(acceptance, k) * times.autoregressive / times.round(k, reference)
        for k in range(1, max_speculative_tokens + 1)
    }
    best = max(speeds, key=speeds.__getitem__)
    return best, speeds[best]
