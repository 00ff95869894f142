"""What is to be planned, and what can be said of it without a compiler."""

from __future__ import annotations

import dataclasses

from jax.sharding import AbstractMesh, Mesh

from fly_jax.decoding.capacity import CAPACITY_STEP, capacity_for
from fly_jax.decoding.programs import prefill_piece
from fly_jax.decoding.spec import RoundSpec
from fly_jax.errors import FlyJaxError
from fly_jax.models.architectures import LlamaConfig, shared_vocabulary
from fly_jax.models.layouts import Layouts, Workload, choose_layouts
from fly_jax.models.specs import INT8, MatrixType, check_self_draft
from fly_jax.planning.estimate import Estimate, EstimatedStep, estimate
from fly_jax.planning.speed import PUBLISHED_K, acceptance_from
from fly_jax.planning.topology import abstract_mesh, slice_of
from fly_jax.sharding.chips import Chip
from fly_jax.sharding.mesh import MeshSpec
from fly_jax.verification.rules import Exact, Fly


def default_round(num_speculative_tokens: int) -> RoundSpec:
    """FLy's round, or a lossless one where K is too small for its window."""
    rule = Fly() if num_speculative_tokens > Fly().window_size else Exact()
    return RoundSpec(rule, num_speculative_tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be planned.

    Attributes:
      target: shape of the model whose text is wanted.
      draft: shape of the model that proposes.
      chip: the accelerator.
      mesh: of how many, and how they are used.
      int8: matrices are int8, not bfloat16.
      self_draft: the draft is the target itself, its matrices rounded to this type.
      context: prompt and new tokens of a row.
      prompt_length: tokens taken in at once; None for all of the context but one.
      rows: decoded together.
      spec: the round that is decoded with; see `default_round`.
      mean_accepted_tokens: settled by a round; None for what FLy's authors publish.
      compiles: ask the compiler; False counts from shapes, as always where there is none.
    """

    target: LlamaConfig
    draft: LlamaConfig
    chip: Chip
    mesh: MeshSpec
    int8: bool = False
    self_draft: MatrixType | None = None
    context: int = 8192
    prompt_length: int | None = None
    rows: int = 1
    spec: RoundSpec = dataclasses.field(default_factory=lambda: default_round(PUBLISHED_K))
    mean_accepted_tokens: float | None = None
    compiles: bool = True

    @property
    def num_speculative_tokens(self) -> int:
        """K."""
        return self.spec.num_speculative_tokens

    @property
    def workload(self) -> Workload:
        """The decoder's rows and cache positions for this context."""
        k = self.num_speculative_tokens
        capacity = capacity_for(self.spec, [range(self.prefilled)], 1, self.target.max_context)
        needed = -(-(self.context + self.spec.room) // CAPACITY_STEP) * CAPACITY_STEP
        return Workload(
            rows=self.rows,
            capacity=max(capacity, needed),
            num_speculative_tokens=k,
            matrices=INT8 if self.int8 else None,
        )

    @property
    def draft_workload(self) -> Workload:
        """The same for the draft model, with the type of its matrices."""
        workload = self.workload
        return dataclasses.replace(workload, matrices=self.self_draft or workload.matrices)

    @property
    def prefilled(self) -> int:
        """Tokens of the prompt."""
        return self.context - 1 if self.prompt_length is None else self.prompt_length

    @property
    def prefill_pieces(self) -> tuple[int, ...]:
        """Tokens of each pass in which the prompt is taken in."""
        piece = prefill_piece(self.rows)
        whole, rest = divmod(self.prefilled, piece)
        return (piece,) * whole + (rest,) * (rest > 0)

    def check(self) -> None:
        """Raises FlyJaxError where this cannot be planned, whatever the memory."""
        shared_vocabulary(self.target, self.draft)
        check_self_draft(self.self_draft, int8=self.int8)
        most = min(self.target.max_context, self.draft.max_context)
        if not 2 <= self.context <= most:
            raise FlyJaxError(
                f"The context is {self.context}; these models take 2 to {most} tokens: give one "
                "in that range."
            )
        if not 1 <= self.prefilled < self.context:
            raise FlyJaxError(
                f"The prompt has {self.prefilled} tokens in a context of {self.context}; it needs "
                "at least one, and one less than the context: correct prompt_length."
            )
        slice_of(self.chip, self.mesh)
        if self.mean_accepted_tokens is not None:
            acceptance_from(self.mean_accepted_tokens, self.num_speculative_tokens)

    def without_padding(self) -> Request:
        """The same with one vocabulary, without what pads the larger of both."""
        size = shared_vocabulary(self.target, self.draft)
        target, draft = (one.with_vocabulary(size) for one in (self.target, self.draft))
        return dataclasses.replace(self, target=target, draft=draft)

    def layouts(self, mesh: Mesh | AbstractMesh | None = None) -> Layouts:
        """How both models lie: on this mesh, or on an abstract one."""
        mesh = abstract_mesh(self.mesh) if mesh is None else mesh
        return choose_layouts(
            mesh, self.target, self.draft, self.workload, self.chip, self.self_draft
        )

    def estimate(self, layouts: Layouts) -> list[EstimatedStep]:
        """Every step, counted from shapes."""
        return estimate(
            Estimate(
                self.target,
                self.draft,
                layouts.target,
                layouts.draft,
                self.workload,
                self.draft_workload,
                self.prefilled,
            )
        )
