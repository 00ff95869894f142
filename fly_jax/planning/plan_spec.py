"""The task of a plan: a pair and its sizes, on a slice of chips that need not be there."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import os
from collections.abc import Sequence

import jax.numpy as jnp
from jax import ShapeDtypeStruct
from jax.experimental import topologies
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.typing import DTypeLike

from fly_jax.decoding.config import RoundSpec, RoundStatic
from fly_jax.decoding.pair import check_chain, checked_drafter
from fly_jax.decoding.programs import Programs, attention_steps, cache_capacity
from fly_jax.engine.engine import Engine
from fly_jax.engine.prefill import OFFLINE_TOKENS, ChunkPlan
from fly_jax.errors import FlyJaxError
from fly_jax.models import architectures
from fly_jax.models.architectures import INT8, LlamaConfig, MatrixType
from fly_jax.models.head_config import Block
from fly_jax.models.layouts import Layouts, Workload, choose_layouts
from fly_jax.models.llama import Llama, parameter_sharding
from fly_jax.models.presets import published_acceptance
from fly_jax.models.quantise import check_self_draft
from fly_jax.planning.roofline import PUBLISHED_K, acceptance_from, draft_passes, mean_accepted
from fly_jax.sharding.chips import Chip
from fly_jax.sharding.mesh import MeshSpec, mesh_over, parse_mesh
from fly_jax.sharding.rules import RULES, Layout
from fly_jax.verification.correction_memory import CorrectionMemory
from fly_jax.verification.rules import Exact, Fly, Rule

# Tells libtpu of a TPU host, for which it looks otherwise; it decides nothing about the programs.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    # Without this it lets one process in at a time, as if there were chips to share.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
}


def slice_of(chip: Chip, spec: MeshSpec) -> str:
    """The slice of as many chips, such as "8x8"; raises FlyJaxError where there is none."""
    if not chip.slices:
        return str(spec.num_devices)
    slices = {math.prod(map(int, shape.split("x"))): shape for shape in chip.slices}
    if spec.num_devices not in slices:
        raise FlyJaxError(
            f"The mesh {spec} needs {spec.num_devices} chips, and slices of {chip.name} have "
            f"{', '.join(map(str, slices))}: ask for a mesh whose sizes multiply to one of these."
        )
    return slices[spec.num_devices]


def slice_mesh(chip: Chip, spec: MeshSpec) -> Mesh:
    """The mesh of a slice that need not be there; raises FlyJaxError without libtpu."""
    shape = slice_of(chip, spec)
    if importlib.util.find_spec("libtpu") is None:
        raise FlyJaxError(
            f"Planning for {chip.name} compiles with libtpu, which is not installed; install it "
            'with pip install "fly_jax[tpu]", or plan from shapes alone with --nocompile.'
        )
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    bounds = {"chips_per_host_bounds": (1, 1, 1)} if spec.num_devices == 1 else {}
    name = f"{chip.name}:{shape}"
    topology = topologies.get_topology_desc(platform="tpu", topology_name=name, **bounds)
    return mesh_over(topology.devices, spec)


def abstract_mesh(spec: MeshSpec) -> AbstractMesh:
    """The mesh over no devices: enough to tell how much each would hold."""
    return AbstractMesh(spec.sizes, spec.names, axis_types=(AxisType.Auto,) * len(spec.axes))


def abstract_model(
    config: LlamaConfig, layout: Layout, matrices: MatrixType | None = None,
    dtype: DTypeLike = jnp.bfloat16,
) -> Llama:  # fmt: skip
    """A model with shapes for parameters, on devices that need not be there."""
    parameters = {}
    for name, one in architectures.parameter_specs(config, matrices).items():
        where = parameter_sharding(layout, one)
        parameters[name] = ShapeDtypeStruct(one.shape, one.dtype or dtype, sharding=where)
    return Llama(config, parameters, layout)


@functools.cache  # many sizes of one pair are compared
def _room(configs: tuple[LlamaConfig, ...], static: RoundStatic) -> int:
    """`Programs.room` of the target and its drafts, wherever they lie."""
    layout = Layout(abstract_mesh(parse_mesh("1")), RULES["replicated"])
    target, *drafts = (abstract_model(config, layout) for config in configs)
    return Programs(target, checked_drafter(target, drafts, static), static).room


def default_round(num_speculative_tokens: int) -> RoundSpec:
    """FLy's round, or a lossless one where K is too small for its window."""
    rule = Fly() if num_speculative_tokens > Fly().window_size else Exact()
    return RoundSpec(rule, RoundStatic(num_speculative_tokens))


def _accepted(
    given: float | None, pair: tuple[LlamaConfig, LlamaConfig], rule: str, k: int
) -> tuple[float | None, str | None]:
    """Mean accepted tokens of a pair, given or published and turned into those of K; the source."""
    if given is not None:
        return given, "as given"
    if (found := published_acceptance(*pair, rule)) is None:
        return None, None
    mean, its_k, source = found
    return mean_accepted(acceptance_from(mean, its_k), k), source


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanSpec:
    """A pair, its sizes, and the chips that a plan is made for.

    A server has `rules`, as an `Engine`, and a `prefill_chunk`, the prompt tokens between two
    rounds; None for known prompts, as `generate` has them.
    """

    target: LlamaConfig
    draft: LlamaConfig
    chip: Chip
    mesh: MeshSpec
    int8: bool = False
    self_draft: MatrixType | None = None  # the draft is the target, its matrices rounded to this
    below: tuple[LlamaConfig, ...] = ()  # draft models, each proposing to the one before it
    level_accepted_tokens: float | None = None  # mean of a pass over such a proposal, or published
    context: int = 8192  # prompt and new tokens of a row
    prompt_length: int | None = None  # None for all of the context but one
    rows: int = 1
    rounds: RoundSpec = dataclasses.field(default_factory=lambda: default_round(PUBLISHED_K))
    prefill_chunk: int | None = None
    rules: tuple[Rule, ...] = ()
    mean_accepted_tokens: float | None = None  # None for what is published
    compiles: bool = True  # False counts from shapes, as always where there is no compiler

    @property
    def num_speculative_tokens(self) -> int:
        """Draft tokens of a round: K, the largest where it is chosen."""
        k, head = self.rounds.static.num_speculative_tokens, self.draft.head
        return min(k, head.most_tokens) if isinstance(head, Block) else k

    @property
    def workload(self) -> Workload:
        """The engine's slots, with cache positions for this context."""
        room = _room((self.target, *self.drafts), self.rounds.static)
        return Workload(
            rows=self.rows, capacity=cache_capacity(self.context, room),
            num_speculative_tokens=self.num_speculative_tokens,
            matrices=INT8 if self.int8 else None,
        )  # fmt: skip

    @property
    def drafts(self) -> tuple[LlamaConfig, ...]:
        """The draft, and what is below it."""
        return (self.draft, *self.below)

    @property
    def drafts_by_data(self) -> bool:
        """Tells whether data decides which passes run: the program names all that may."""
        static, draft = self.rounds.static, self.draft
        waits = static.lookup is not None and not isinstance(draft.head, Block)
        return bool(self.below or waits or static.depths or static.draft_confidence)

    @property
    def draft_passes(self) -> tuple[dict[int, float], ...]:
        """The passes of the draft models in a round; see `roofline.draft_passes`."""
        level_tokens = next(iter(self.rounds.static.level_speculative_tokens), 1)
        accepted = self.level_accepted[0] or 1.0
        return draft_passes(self.drafts, self.num_speculative_tokens, level_tokens, accepted)

    @property
    def accepted(self) -> tuple[float | None, str | None]:
        """The mean accepted tokens of a round, None where they are not known, and their source."""
        known = {} if self.rounds.sampling else {"exact": Exact(), "fly": Fly()}
        rule = next((name for name, one in known.items() if one == self.rounds.rule), "none")
        pair, k = (self.target, self.draft), self.num_speculative_tokens
        return _accepted(self.mean_accepted_tokens, pair, rule, k)

    @property
    def level_accepted(self) -> tuple[float | None, str | None]:
        """The same of the draft's passes over what the level below it proposes."""
        if not (self.below and (levels := self.rounds.static.level_speculative_tokens)):
            return None, None
        pair = self.draft, self.below[0]
        return _accepted(self.level_accepted_tokens, pair, "exact", levels[0])

    @property
    def prefilled(self) -> int:
        """Tokens of each prompt."""
        return self.context - 1 if self.prompt_length is None else self.prompt_length

    def chunk_plan(self, target: Layout) -> ChunkPlan:
        """The engine's plan of prompts, with the target in this layout."""
        is_whole = bool(target.rules.cache_length)
        steps = attention_steps(self.workload.capacity, is_whole=is_whole)
        most = self.prefill_chunk or OFFLINE_TOKENS
        return ChunkPlan(steps, tokens=most, num_slots=self.rows, longest=self.context)

    def check(self) -> None:
        """Raises FlyJaxError where this cannot be planned, whatever the memory."""
        if self.target.head is not None:
            raise FlyJaxError(
                "The target is a head, which is no model of its own; give it as the draft, and the "
                "model that it was trained for as the target."
            )
        if not self.num_speculative_tokens:
            raise FlyJaxError(
                "The rule is autoregressive, which every plan shows beside speculation; give the "
                "rule that drafts are to be verified with."
            )
        for draft in self.drafts:
            architectures.shared_vocabulary(self.target, draft)
        static = self.rounds.static
        levels = static.level_speculative_tokens
        check_chain(self.target, self.drafts, static)
        accepted, _ = self.level_accepted
        if self.below and levels and not 1 <= (accepted or 0) <= levels[0] + 1:
            raise FlyJaxError(
                f"level_accepted_tokens is {accepted}, given or published; a pass of a draft with "
                f"a level below it gives 1 to {levels[0] + 1} tokens: give a mean in that range."
            )
        check_self_draft(self.self_draft, int8=self.int8)
        if self.self_draft is not None and self.below:
            raise FlyJaxError(
                "The target's own matrices were given as its draft, and another draft below them; "
                "they propose alone: leave one of the two out."
            )
        most = self.target.max_context  # a draft is not asked
        if not 2 <= self.context <= most:
            raise FlyJaxError(
                f"The context is {self.context}; these models take 2 to {most} tokens: give one in "
                "that range."
            )
        if not 1 <= self.prefilled < self.context:
            raise FlyJaxError(
                f"The prompt has {self.prefilled} tokens in a context of {self.context}; it needs "
                f"1 to {self.context - 1}: correct prompt_length."
            )
        slice_of(self.chip, self.mesh)
        if self.mean_accepted_tokens is not None:
            acceptance_from(self.mean_accepted_tokens, self.num_speculative_tokens)

    def engine(self, models: Sequence[Llama], rounds: RoundSpec) -> Engine:
        """The engine that `serve` or `generate` would run, of abstract models, the target first."""
        learns = rounds.rule.uses_memory or rounds.static.reports_mismatches
        return Engine(
            models[0], models[1:], rounds, num_slots=self.rows, max_length=self.context,
            prefill_chunk=self.prefill_chunk or 1, rules=self.rules,
            memory=CorrectionMemory("") if learns else None, offline=self.prefill_chunk is None,
        )  # fmt: skip

    def without_padding(self) -> PlanSpec:
        """A copy with one vocabulary, without the padding of the larger one."""
        size = min(architectures.shared_vocabulary(self.target, one) for one in self.drafts)
        models = (dataclasses.replace(one, vocab_size=size) for one in (self.target, *self.drafts))
        target, draft, *below = models
        return dataclasses.replace(self, target=target, draft=draft, below=tuple(below))

    def layouts(self, mesh: Mesh | AbstractMesh | None = None) -> Layouts:
        """The layouts of both models: on this mesh, or on an abstract one."""
        mesh = abstract_mesh(self.mesh) if mesh is None else mesh
        task = self.target, self.draft, self.workload, self.chip, self.self_draft, self.below
        return choose_layouts(mesh, *task)
