"""A target, its draft model and their tokenizer: loaded in one call, decoded with in another."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from fly_jax.decoding.config import (
    AUTO_DEPTHS,
    DEFAULT_LEVEL_TOKENS,
    DecodeConfig,
    default_config,
)
from fly_jax.decoding.decoder import Decoder
from fly_jax.decoding.drafters.lookup import Lookup
from fly_jax.decoding.drafters.stopping import EntropyStop
from fly_jax.decoding.generation import Generation
from fly_jax.decoding.protection import matching_tokens
from fly_jax.decoding.spec import Boundary, RoundSpec
from fly_jax.errors import FlyJaxError
from fly_jax.models.checkpoints.load import Checkpoint, load_llama, open_checkpoint
from fly_jax.models.checkpoints.locate import check_pair, embedded_pair, resolve
from fly_jax.models.layouts import Workload, choose_layouts
from fly_jax.models.llama import Llama, parameter_specs
from fly_jax.models.tokenizers.tokenizer import Tokenizer, check_same_vocabulary
from fly_jax.sharding.chips import chip_of
from fly_jax.sharding.mesh import MeshSpec, create_mesh, parse_mesh, prepare_devices
from fly_jax.sharding.processes import together
from fly_jax.sharding.rules import Layout
from fly_jax.verification.correction_memory import CorrectionMemory, load_memory
from fly_jax.verification.rules import Exact, Fly, Rule
from fly_jax.verification.sampling import Sampling

DEFAULT_SPECULATIVE_TOKENS = 15


@dataclasses.dataclass(frozen=True)
class Pair:
    """What decoding needs.

    Attributes:
      target: the model whose text is wanted.
      drafts: the models that propose, the first to the target and each other one to the one before
        it; none to decode with the target alone.
      tokenizer: of all.
      replicated: one line for each parameter axis of the target that the mesh could not divide.
      is_embedded: it is the pair that ships with the package.
    """

    target: Llama
    drafts: tuple[Llama, ...]
    tokenizer: Tokenizer
    replicated: tuple[str, ...] = ()
    is_embedded: bool = False

    @property
    def draft(self) -> Llama | None:
        """The model that proposes to the target, if there is one."""
        return self.drafts[0] if self.drafts else None

    def spec(
        self,
        rule: Rule | None = None,
        num_speculative_tokens: int | Literal["auto"] = DEFAULT_SPECULATIVE_TOKENS,
        lookup: Lookup | None = None,
        rounds_per_dispatch: int | None = None,
        *,
        learns: bool = True,
        audits: bool = False,
        boundary: Boundary = "reject",
        level_speculative_tokens: int = DEFAULT_LEVEL_TOKENS,
        draft_stop: EntropyStop | None = None,
        sampling: Sampling | None = None,
    ) -> RoundSpec:
        """The static part of decoding with this pair.

        Args:
          rule: None for plain FLy.
          num_speculative_tokens: K; 0 decodes one token at a time, "auto" chooses one of
            `AUTO_DEPTHS` for each round.
          lookup: the drafting level below the draft models.
          rounds_per_dispatch: rounds before tokens leave the device; None takes 1 where the host
            has its own processor, and 4 on a CPU, where dispatching takes time from the round.
          learns: a rule with a memory adds to it while decoding; False leaves it as it is.
          audits: see `RoundSpec`.
          boundary: see `RoundSpec`.
          level_speculative_tokens: tokens that each draft model but the first proposes at a time.
          draft_stop: see `RoundSpec`.
          sampling: see `RoundSpec`.

        Raises:
          FlyJaxError: K leaves no room for FLy's window, or nothing can be deferred.
        """
        rule = Fly() if rule is None else rule
        depths: tuple[int, ...] = ()
        if num_speculative_tokens == "auto":
            num_speculative_tokens, depths = AUTO_DEPTHS[-1], AUTO_DEPTHS
        if num_speculative_tokens and boundary == "reject":
            rule.check(num_speculative_tokens)
        return RoundSpec(
            rule=rule,
            num_speculative_tokens=num_speculative_tokens,
            depths=depths,
            lookup=lookup,
            eos_token_ids=self.tokenizer.eos_token_ids,
            rounds_per_dispatch=rounds_per_dispatch or _default_rounds(),
            reports_mismatches=learns and rule.uses_memory,
            audits=audits,
            boundary=boundary,
            level_speculative_tokens=(level_speculative_tokens,) * len(self.drafts[1:])
            if num_speculative_tokens
            else (),
            draft_stop=draft_stop if num_speculative_tokens else None,
            sampling=sampling,
        )

    def spec_of(self, config: DecodeConfig, *, audits: bool = False) -> RoundSpec:
        """`spec` with the values of a config.

        Raises:
          FlyJaxError: as `spec`.
        """
        return self.spec(
            config.to_rule(),
            config.num_drafted,
            config.to_lookup(),
            learns=config.csd_online,
            audits=audits,
            boundary=config.round_boundary,
            level_speculative_tokens=config.level_speculative_tokens,
            draft_stop=config.to_draft_stop(),
            sampling=config.to_sampling(),
        )

    def decoder(
        self,
        spec: RoundSpec,
        *,
        capacity: int | None = None,
        batch_size: int = 1,
        protect: Sequence[str] = (),
        memory: CorrectionMemory | None = None,
    ) -> Decoder:
        """A decoder of this pair; see `Decoder`.

        Args:
          spec: from `spec`.
          capacity: see `Decoder`.
          batch_size: rows decoded together.
          protect: regular expressions; tokens in whose text one is found are never rescued, nor
            replaced by a rescue. Control tokens never are.
          memory: of corrections; None for an empty one, if the rule uses one.

        Raises:
          FlyJaxError: a pattern that is no regular expression, or a memory of another vocabulary.
        """
        if memory is not None:
            memory.check_vocabulary(self.tokenizer.digest, "The memory")
        elif spec.rule.uses_memory or spec.reports_mismatches:
            memory = CorrectionMemory(self.tokenizer.digest)
        return Decoder(
            self.target,
            self.drafts,
            spec,
            capacity=capacity,
            batch_size=batch_size,
            protected_token_ids=(
                *self.tokenizer.control_token_ids,
                *matching_tokens(self.tokenizer, protect),
            ),
            memory=memory,
        )


Dtype = Literal["float32", "bfloat16", "int8"]


@dataclasses.dataclass(frozen=True)
class OpenPair:
    """A target and its draft models, opened and checked against each other; no weight is read.

    Attributes:
      target: the model whose text is wanted.
      drafts: see `Pair`.
      default_dtype: of the weights where none is asked for: small for all but the embedded target.
      is_embedded: it is the pair that ships with the package.
    """

    target: Checkpoint
    drafts: tuple[Checkpoint, ...]
    default_dtype: Dtype
    is_embedded: bool


def open_pair(
    target: str | Path | None = None,
    draft: str | Path | Sequence[str | Path] | None = None,
    *,
    revision: str | None = None,
) -> OpenPair:
    """Finds a target and its draft models, and checks all that can be without reading a weight.

    Args:
      target: see `load_pair`.
      draft: see `load_pair`.
      revision: see `load_pair`.

    Raises:
      FlyJaxError: a checkpoint that is missing or broken, or two vocabularies.
    """
    if target is None and revision is not None:
        raise FlyJaxError(
            f"The revision '{revision}' was given without a target; give the hub id that it is of."
        )
    drafts = (draft,) if isinstance(draft, str | Path) else tuple(draft or ())
    is_embedded = target is None and not drafts
    folder, embedded_draft = embedded_pair()
    if target is not None:
        folder = resolve(str(target), revision)
    folders = [embedded_draft] if is_embedded else [resolve(str(one)) for one in drafts]
    opened = open_checkpoint(folder)
    proposing = tuple(open_checkpoint(one) for one in folders)
    for one in proposing:
        check_pair(opened.config, one.config)
        check_same_vocabulary(opened.tokenizer, one.tokenizer)
    return OpenPair(opened, proposing, "float32" if target is None else "bfloat16", is_embedded)


def load_pair(
    target: str | Path | OpenPair | None = None,
    draft: str | Path | Sequence[str | Path] | None = None,
    *,
    revision: str | None = None,
    mesh: str | MeshSpec | Mesh = "1x1",
    dtype: Dtype | None = None,
    workload: Workload | None = None,
) -> Pair:
    """Loads a target and its draft model straight into a mesh.

    Args:
      target: folder of a Hugging Face Llama checkpoint or of a converted one, or a hub id; None
        for the embedded pair. Or what `open_pair` gives, its drafts included.
      draft: the same for the draft model, or for several, of which the first proposes to the target
        and each other one to the one before it; None decodes with the target alone (unless the
        embedded pair is meant).
      revision: branch, tag or commit of the target's hub id. A draft's stands in its id, as in
        "meta-llama/Llama-3.2-1B-Instruct@main", and a target's may.
      mesh: such as "8x8" or "data=2,x=8,y=8", or one that was made by `create_mesh`.
      dtype: of the weights and the caches; None takes float32 for the embedded pair and bfloat16
        for other models. "int8" is for matrices, with bfloat16 for the rest; those of a folder
        converted to int8 are int8 with any of them.
      workload: what will be decoded, or None for one row of some thousand tokens; it decides how
        both models lie on the mesh, not what can be decoded afterwards.

    Raises:
      FlyJaxError: a checkpoint that is missing or broken, two vocabularies, or a mesh that does
        not fit the devices. All but broken values are found before any weight is read.
    """
    spec = parse_mesh(mesh) if isinstance(mesh, str) else mesh
    if isinstance(target, OpenPair):
        if (draft, revision) != (None, None):
            raise FlyJaxError(
                "load_pair was given an opened pair, which has drafts of its own, and a draft or a "
                "revision; give them to open_pair."
            )
        opened = target
    else:
        name = target
        opened = together(lambda: open_pair(name, draft, revision=revision))
    devices = spec if isinstance(spec, Mesh) else _created(spec)
    dtype = dtype or opened.default_dtype
    int8 = dtype == "int8"
    width = jnp.dtype("bfloat16" if int8 else dtype)
    target_layout: Layout | None = None
    draft_layout: Layout | None = None
    replicated: tuple[str, ...] = ()
    if devices.size > 1:
        config = opened.target.config
        draft_config = opened.drafts[0].config if opened.drafts else None
        chip = chip_of(jax.devices()[0].device_kind)
        stored_int8 = opened.target.source.int8
        wanted = dataclasses.replace(workload or Workload(), int8=int8 or stored_int8)
        layouts = choose_layouts(devices, config, draft_config, wanted, chip)
        target_layout, draft_layout = layouts.target, layouts.draft
        replicated = tuple(target_layout.fallbacks(parameter_specs(config)))
    return Pair(
        target=load_llama(opened.target, layout=target_layout, dtype=width, int8=int8),
        drafts=tuple(
            load_llama(one, layout=draft_layout, dtype=width, int8=int8) for one in opened.drafts
        ),
        tokenizer=opened.target.tokenizer,
        replicated=replicated,
        is_embedded=opened.is_embedded,
    )


def _created(spec: MeshSpec) -> Mesh:
    if spec.num_devices > 1:
        prepare_devices(spec)  # has no effect once something else has started JAX's backend
    return create_mesh(spec)


def _default_rounds() -> int:
    return 4 if jax.default_backend() == "cpu" else 1


def generate(
    pair: Pair,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    config: DecodeConfig | None = None,
    *,
    rule: Rule | None = None,
    num_speculative_tokens: int | Literal["auto"] | None = None,
    lookup: Lookup | None = None,
    max_new_tokens: int = 128,
    batch_size: int = 1,
    seed: int = 0,
    protect: Sequence[str] | None = None,
    memory: CorrectionMemory | None = None,
    boundary: Boundary | None = None,
    level_speculative_tokens: int | None = None,
    draft_stop: EntropyStop | None = None,
    audits: bool = False,
    sampling: Sampling | None = None,
) -> list[Generation]:
    """Decodes prompts, given as text or as token ids.

    Args:
      pair: from `load_pair`.
      prompts: what to continue.
      config: how, but for what is given below; None for `default_config`, which the command line
        takes too, and for exact greedy decoding where the pair has no draft model.
      rule: which draft tokens are kept.
      num_speculative_tokens: K; 0 decodes one token at a time, "auto" chooses it round by round.
      lookup: the drafting level below the draft models.
      max_new_tokens: limit of each prompt's continuation.
      batch_size: prompts decoded together.
      seed: of the draws, where the rule samples.
      protect: see `Pair.decoder`.
      memory: see `Pair.decoder`; it learns.
      boundary: see `RoundSpec`.
      level_speculative_tokens: see `Pair.spec`.
      draft_stop: see `RoundSpec`.
      audits: fills `Generation.reports`.
      sampling: how target and draft are drawn from; None for greedy decoding.

    Raises:
      FlyJaxError: no prompt, an empty one, one longer than the context, a batch of no rows, K that
        leaves no room for FLy's window, or what `Pair.decoder` refuses.
    """
    if isinstance(prompts, str) or not prompts or batch_size < 1:
        raise FlyJaxError(
            "generate needs a list of at least one prompt and a batch_size of at least 1; give "
            "[text] for a single text."
        )
    config = config or default_config(is_embedded=pair.is_embedded)
    if rule is None:
        rule = config.to_rule() if pair.drafts or lookup else Exact()
        boundary = boundary or config.round_boundary
        given = config.num_drafted
    else:
        given = config.num_speculative_tokens
        if isinstance(rule, Exact):
            given = config.lossless_speculative_tokens or given
    if num_speculative_tokens is None:
        num_speculative_tokens = given
    if not pair.drafts and not lookup:
        num_speculative_tokens = 0
    spec = pair.spec(
        rule,
        num_speculative_tokens,
        lookup or config.to_lookup(),
        learns=config.csd_online,
        audits=audits,
        boundary=boundary or "reject",
        level_speculative_tokens=level_speculative_tokens or config.level_speculative_tokens,
        draft_stop=draft_stop or config.to_draft_stop(),
        sampling=sampling or config.to_sampling(),
    )
    ids = [
        pair.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        for prompt in prompts
    ]
    if memory is None and config.memory is not None and rule.uses_memory:
        memory = load_memory(
            Path(config.memory), pair.tokenizer.digest, min_count=config.csd_min_count
        )
    decoder = pair.decoder(
        spec,
        batch_size=min(batch_size, len(ids)),
        protect=config.protect if protect is None else protect,
        memory=memory,
    )
    return decoder.generate(ids, max_new_tokens, seed=seed)
