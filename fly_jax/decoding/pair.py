"""A target, its draft model and their tokenizer: loaded in one call, decoded with in another."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp

from fly_jax.decoding.config import AUTO_DEPTHS, DEFAULT_LEVEL_TOKENS, DecodeConfig
from fly_jax.decoding.decoder import Decoder
from fly_jax.decoding.drafters.lookup import Lookup
from fly_jax.decoding.drafters.stopping import EntropyStop
from fly_jax.decoding.generation import Generation
from fly_jax.decoding.protection import matching_tokens
from fly_jax.decoding.spec import Boundary, RoundSpec
from fly_jax.errors import FlyJaxError
from fly_jax.models.checkpoints.load import check_checkpoint, load_llama, open_checkpoint
from fly_jax.models.checkpoints.locate import check_pair, embedded_pair, resolve
from fly_jax.models.config import LlamaConfig
from fly_jax.models.layouts import Workload, choose_layouts
from fly_jax.models.llama import Llama, parameter_specs
from fly_jax.models.tokenizers.tokenizer import Tokenizer, check_same_vocabulary, load_tokenizer
from fly_jax.sharding.chips import chip_of
from fly_jax.sharding.mesh import MeshSpec, create_mesh, parse_mesh, prepare_devices
from fly_jax.sharding.processes import together
from fly_jax.sharding.rules import Layout
from fly_jax.verification.correction_memory import CorrectionMemory
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
    """

    target: Llama
    drafts: tuple[Llama, ...]
    tokenizer: Tokenizer
    replicated: tuple[str, ...] = ()

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


def default_dtype(target: str | Path | None) -> Dtype:
    """Type of the weights where none is asked for: small for all but the embedded pair."""
    return "float32" if target is None else "bfloat16"


def load_pair(
    target: str | Path | None = None,
    draft: str | Path | Sequence[str | Path] | None = None,
    *,
    mesh: str | MeshSpec = "1x1",
    dtype: Dtype | None = None,
    workload: Workload | None = None,
) -> Pair:
    """Loads a target and its draft model straight into a mesh.

    Args:
      target: folder of a Hugging Face Llama checkpoint or of a converted one, or a hub id; None
        for the embedded pair.
      draft: the same for the draft model, or for several, of which the first proposes to the target
        and each other one to the one before it; None decodes with the target alone (unless the
        embedded pair is meant).
      mesh: such as "8x8" or "data=2,x=8,y=8".
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
    dtype = dtype or default_dtype(target)
    target_folder, draft_folders, target_config, tokenizer = together(
        lambda: _check(target, _listed(draft))
    )
    if spec.num_devices > 1:
        prepare_devices(spec)  # has no effect once something else has started JAX's backend
    devices = create_mesh(spec)
    int8 = dtype == "int8"
    width = jnp.dtype("bfloat16" if int8 else dtype)
    target_layout: Layout | None = None
    draft_layout: Layout | None = None
    replicated: tuple[str, ...] = ()
    if spec.num_devices > 1:
        draft_config = check_checkpoint(draft_folders[0]) if draft_folders else None
        chip = chip_of(jax.devices()[0].device_kind)
        stored_int8 = open_checkpoint(target_folder).int8
        wanted = dataclasses.replace(workload or Workload(), int8=int8 or stored_int8)
        layouts = choose_layouts(devices, target_config, draft_config, wanted, chip)
        target_layout, draft_layout = layouts.target, layouts.draft
        replicated = tuple(target_layout.fallbacks(parameter_specs(target_config)))
    return Pair(
        target=load_llama(target_folder, layout=target_layout, dtype=width, int8=int8),
        drafts=tuple(
            load_llama(folder, layout=draft_layout, dtype=width, int8=int8)
            for folder in draft_folders
        ),
        tokenizer=tokenizer,
        replicated=replicated,
    )


def _listed(draft: str | Path | Sequence[str | Path] | None) -> tuple[str | Path, ...]:
    return (draft,) if isinstance(draft, str | Path) else tuple(draft or ())


def _check(
    target: str | Path | None, drafts: tuple[str | Path, ...]
) -> tuple[Path, list[Path], LlamaConfig, Tokenizer]:
    """Where the models are, after all checks that read no weight."""
    target_folder, draft_folders = _folders(target, drafts)
    config = check_checkpoint(target_folder)
    tokenizer = load_tokenizer(target_folder)
    for folder in draft_folders:
        check_pair(config, check_checkpoint(folder))
        check_same_vocabulary(tokenizer, load_tokenizer(folder))
    return target_folder, draft_folders, config, tokenizer


def _default_rounds() -> int:
    return 4 if jax.default_backend() == "cpu" else 1


def _folders(target: str | Path | None, drafts: tuple[str | Path, ...]) -> tuple[Path, list[Path]]:
    embedded_target, embedded_draft = embedded_pair()
    given = [resolve(str(draft)) for draft in drafts]
    if target is None:
        return embedded_target, given or [embedded_draft]
    return resolve(str(target)), given


def generate(
    pair: Pair,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    *,
    rule: Rule | None = None,
    num_speculative_tokens: int | Literal["auto"] = DEFAULT_SPECULATIVE_TOKENS,
    lookup: Lookup | None = None,
    max_new_tokens: int = 128,
    batch_size: int = 1,
    seed: int = 0,
    protect: Sequence[str] = (),
    memory: CorrectionMemory | None = None,
    boundary: Boundary = "reject",
    level_speculative_tokens: int = DEFAULT_LEVEL_TOKENS,
    draft_stop: EntropyStop | None = None,
    audits: bool = False,
    sampling: Sampling | None = None,
) -> list[Generation]:
    """Decodes prompts, given as text or as token ids.

    Args:
      pair: from `load_pair`.
      prompts: what to continue.
      rule: which draft tokens are kept; None for plain FLy, and for exact greedy decoding where
        the pair has no draft model.
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
    if not pair.drafts and lookup is None:
        num_speculative_tokens = 0
        rule = Exact() if rule is None else rule
    spec = pair.spec(
        rule,
        num_speculative_tokens,
        lookup,
        audits=audits,
        boundary=boundary,
        level_speculative_tokens=level_speculative_tokens,
        draft_stop=draft_stop,
        sampling=sampling,
    )
    ids = [
        pair.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        for prompt in prompts
    ]
    decoder = pair.decoder(
        spec,
        batch_size=min(batch_size, len(ids)),
        protect=protect,
        memory=memory,
    )
    return decoder.generate(ids, max_new_tokens, seed=seed)
