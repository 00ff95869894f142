"""The choice of layouts for a target and its draft model on a mesh, by figures, in one place."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Sequence

import ml_dtypes
from jax.sharding import AbstractMesh, Mesh

from fly_jax.models.architectures import LlamaConfig, MatrixType, ParameterSpec, parameter_specs
from fly_jax.models.attention import query_axes
from fly_jax.models.cache import CACHE_AXES, cache_shape, held_caches
from fly_jax.models.head_config import Block
from fly_jax.sharding.chips import Chip, group_of
from fly_jax.sharding.rules import RULES, Layout, axes_in

# The share of a chip's memory for parameters and caches; the rest is for running programs.
_FILLED = 0.95
_TARGETS = ("tensor_whole", "tensor", "tensor_long")
_DRAFTS = ("replicated", "narrow_whole", "narrow", "narrow_long", *_TARGETS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """The figures that decide how models best lie on a mesh."""

    rows: int = 1
    capacity: int = 8192  # cache positions of each row
    num_speculative_tokens: int = 15
    matrices: MatrixType | None = None  # None for bfloat16


@dataclasses.dataclass(frozen=True)
class Layouts:
    """The layouts chosen, and the names that they have in `RULES`."""

    target: Layout
    draft: Layout
    target_rules: str
    draft_rules: str


def choose_layouts(
    mesh: Mesh | AbstractMesh, target: LlamaConfig, draft: LlamaConfig | None, workload: Workload,
    chip: Chip | None, draft_matrices: MatrixType | None = None,
    below: Sequence[LlamaConfig] = (),
) -> Layouts:  # fmt: skip
    """The layouts with which a round takes the least time, of those that fit into memory.

    The time is that of `pass_seconds`. Where none fits, the smallest are chosen. On a CPU, and on
    chips whose figures are not known, memory decides alone: the cache is split by rows if they
    suffice and by positions if not, and the draft model is whole on every device if it takes no
    more of it than the target does.

    `draft_matrices` are those of the draft, where they are not of the target's type. A target's own
    draft, which shares parameters with it, lies as it does; models `below` a draft as that does.
    """
    drafting = dataclasses.replace(workload, matrices=draft_matrices or workload.matrices)
    shares = draft_matrices is not None and not draft_matrices.outer
    if chip is None:
        groups = mesh.shape.get("data", 1) * mesh.shape.get("y", 1)
        wide = "tensor" if workload.rows % groups == 0 else "tensor_long"
        found = _named(mesh, wide, "replicated")
        most = parameter_bytes(found.target, target)
        is_small = draft is None or parameter_bytes(found.draft, draft) <= most
        return found if is_small and not shares else _named(mesh, wide, wide)
    drafts = _DRAFTS if draft is not None else ("replicated",)
    ranked: list[tuple[bool, float, tuple[str, str]]] = []
    for names in itertools.product(_TARGETS, drafts):
        if shares and names[0] != names[1]:
            continue
        layouts = [Layout(mesh, RULES[name]) for name in names]
        held = resident_bytes(layouts[0], target, workload)
        seconds = pass_seconds(layouts[0], target, workload, chip)
        if draft is not None:
            held += resident_bytes(layouts[1], draft, drafting)
            held += sum(resident_bytes(layouts[1], one, drafting) for one in below)
            at_once = draft.pard_token is not None or isinstance(draft.head, Block)
            passes = 1 if at_once else workload.num_speculative_tokens
            seconds += passes * pass_seconds(layouts[1], draft, drafting, chip)
        fits = held <= _FILLED * chip.memory_bytes
        ranked.append((not fits, seconds if fits else held, names))
    return _named(mesh, *min(ranked, key=lambda entry: entry[:2])[2])


def resident_bytes(layout: Layout, config: LlamaConfig, workload: Workload) -> int:
    """Bytes that one device holds of a model, all rows' caches, and that of a prompt being run."""
    one = dataclasses.replace(workload, rows=1)
    caches = sum(held_cache_bytes(layout, config, each) for each in (workload, one))
    return held_bytes(layout, config, workload.matrices) + caches


@functools.cache  # many sizes of one pair are compared
def held_bytes(layout: Layout, config: LlamaConfig, matrices: MatrixType | None = None) -> int:
    """Bytes that one device holds of a model's own parameters: a target's own draft shares some."""
    specs = parameter_specs(config, matrices).values()
    shares = matrices is not None and not matrices.outer
    own = [spec for spec in specs if not shares or (spec.axes[0] == "layers" and spec.dtype)]
    return _bytes(layout, own)


@functools.cache
def parameter_bytes(layout: Layout, config: LlamaConfig, matrices: MatrixType | None = None) -> int:
    """Bytes that one device reads of a model's parameters: bfloat16, or integers with scales."""
    return _bytes(layout, parameter_specs(config, matrices).values())


def cache_bytes(layout: Layout, config: LlamaConfig, workload: Workload) -> int:
    """Bytes that one device reads of the caches of all rows, in bfloat16."""
    shape = cache_shape(config, workload.rows, workload.capacity)
    return 2 * layout.shard_bytes(CACHE_AXES, shape, 2)


def held_cache_bytes(layout: Layout, config: LlamaConfig, workload: Workload) -> int:
    """Bytes that it holds of them: of an EAGLE-3 head with the features, of which few are read."""
    return sum(cache_bytes(layout, one, workload) for one in held_caches(config))


def pass_seconds(layout: Layout, config: LlamaConfig, workload: Workload, chip: Chip) -> float:
    """The roofline time of a token: reading all parameters and the cache, then the network."""
    read = parameter_bytes(layout, config, workload.matrices)
    read += cache_bytes(layout, config, workload)
    sums = ("ffw", config.ffw_size), ("q_heads", config.num_heads)
    num_bytes = workload.rows * config.embed_size * 2 // layout.devices(("data",))
    exchanged = [("all-reduce", num_bytes, layout.axes_of(*one)) for one in sums]
    own = cache_exchanges(layout, config, workload, num_bytes)
    exchanged += [(kind, some, ("y",)) for kind, some in own]
    network = sum(
        chip.exchange_seconds(kind, some, *group_of(layout.mesh.shape, names))
        for kind, some, names in exchanged
    )
    return read / chip.memory_bandwidth + config.num_layers * network


def cache_exchanges(
    layout: Layout, config: LlamaConfig, workload: Workload, num_bytes: int
) -> list[tuple[str, int]]:
    """The exchanges over y that attention over the cache needs: see `attend_cached`.

    Each is a kind and the bytes of its result on one device, of so many of the rows' activations.
    """
    shape, kinds = cache_shape(config, workload.rows, workload.capacity), list[str]()
    _, rows, _, length, _ = layout.spec(CACHE_AXES, shape)
    is_split = "y" in query_axes(layout, config.num_heads, config.queries_per_kv_head)
    if length is not None:
        kinds = ["all-gather"] * is_split + ["all-reduce"] * 2
    elif "y" in axes_in(rows):
        kinds = ["all-to-all"] * 2 if is_split else ["all-gather"]
    own = {"all-to-all": num_bytes // layout.devices(("x", "y"))}
    return [(kind, own.get(kind, num_bytes // layout.devices(("x",)))) for kind in kinds]


def _named(mesh: Mesh | AbstractMesh, target: str, draft: str) -> Layouts:
    return Layouts(Layout(mesh, RULES[target]), Layout(mesh, RULES[draft]), target, draft)


def _bytes(layout: Layout, specs: Iterable[ParameterSpec]) -> int:
    found = 0
    for spec in specs:
        # Two of int4 share a byte on accelerators, and take one each in NumPy.
        bits = 16 if spec.dtype is None else 8 * spec.dtype.itemsize
        bits = 4 if spec.dtype == ml_dtypes.int4 else bits
        found += layout.shard_bytes(spec.axes, spec.shape, 1) * bits // 8
    return found
