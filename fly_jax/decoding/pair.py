"""A target, its draft model and their tokenizer: loaded in one call, decoded with in another."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp

from fly_jax.decoding.decoder import Decoder, Generation, capacity_for
from fly_jax.decoding.lookup import Lookup
from fly_jax.decoding.round import RoundSpec
from fly_jax.decoding.rules import Exact, Fly, Rule
from fly_jax.errors import FlyJaxError
from fly_jax.models.checkpoint import check_checkpoint, load_llama
from fly_jax.models.config import LlamaConfig
from fly_jax.models.llama import Llama, parameter_specs
from fly_jax.models.loading import check_pair, embedded_pair, resolve
from fly_jax.models.tokenizer import Tokenizer, check_same_vocabulary, load_tokenizer
from fly_jax.sharding.mesh import MeshSpec, create_mesh, parse_mesh, prepare_devices
from fly_jax.sharding.processes import together
from fly_jax.sharding.rules import RULES, Layout

DEFAULT_SPECULATIVE_TOKENS = 15


@dataclasses.dataclass(frozen=True)
class Pair:
    """What decoding needs.

    Attributes:
      target: the model whose text is wanted.
      draft: the model that proposes; None to decode with the target alone.
      tokenizer: of both.
      replicated: one line for each parameter axis of the target that the mesh could not divide.
    """

    target: Llama
    draft: Llama | None
    tokenizer: Tokenizer
    replicated: tuple[str, ...] = ()

    def spec(
        self,
        rule: Rule | None = None,
        num_speculative_tokens: int = DEFAULT_SPECULATIVE_TOKENS,
        lookup: Lookup | None = None,
        rounds_per_dispatch: int | None = None,
    ) -> RoundSpec:
        """The static part of decoding with this pair.

        Args:
          rule: None for plain FLy.
          num_speculative_tokens: K; 0 decodes one token at a time.
          lookup: the drafting level below the draft model.
          rounds_per_dispatch: rounds before tokens leave the device; None takes 1 where the host
            has its own processor, and 4 on a CPU, where dispatching takes time from the round.

        Raises:
          FlyJaxError: K leaves no room for FLy's window.
        """
        rule = Fly() if rule is None else rule
        if num_speculative_tokens and isinstance(rule, Fly):
            rule.check(num_speculative_tokens)
        return RoundSpec(
            rule=rule,
            num_speculative_tokens=num_speculative_tokens,
            lookup=lookup,
            eos_token_ids=self.tokenizer.eos_token_ids,
            rounds_per_dispatch=rounds_per_dispatch or _default_rounds(),
        )

    def decoder(self, spec: RoundSpec, *, capacity: int, batch_size: int = 1) -> Decoder:
        """A decoder of this pair; see `Decoder`."""
        return Decoder(
            self.target,
            self.draft,
            spec,
            capacity=capacity,
            batch_size=batch_size,
            protected_token_ids=self.tokenizer.control_token_ids,
        )


def load_pair(
    target: str | Path | None = None,
    draft: str | Path | None = None,
    *,
    mesh: str | MeshSpec = "1x1",
    dtype: Literal["float32", "bfloat16"] | None = None,
) -> Pair:
    """Loads a target and its draft model straight into a mesh.

    Args:
      target: folder of a Hugging Face Llama checkpoint, or a hub id; None for the embedded pair.
      draft: the same for the draft model; None decodes with the target alone (unless the embedded
        pair is meant).
      mesh: such as "8x8" or "data=2,x=8,y=8".
      dtype: of the weights and the caches; None takes float32 for the embedded pair and bfloat16
        for other models.

    Raises:
      FlyJaxError: a checkpoint that is missing or broken, two vocabularies, or a mesh that does
        not fit the devices. All but broken values are found before any weight is read.
    """
    spec = parse_mesh(mesh) if isinstance(mesh, str) else mesh
    dtype = dtype or ("float32" if target is None else "bfloat16")
    target_folder, draft_folder, target_config, tokenizer = together(lambda: _check(target, draft))
    if spec.num_devices > 1:
        prepare_devices(spec)  # has no effect once something else has started JAX's backend
    devices = create_mesh(spec)
    width = jnp.dtype(dtype)
    target_layout = draft_layout = None
    replicated: tuple[str, ...] = ()
    if spec.num_devices > 1:
        target_layout = Layout(devices, RULES["tensor"])
        draft_layout = Layout(devices, RULES["replicated"])
        replicated = tuple(target_layout.fallbacks(parameter_specs(target_config)))
    return Pair(
        target=load_llama(target_folder, layout=target_layout, dtype=width),
        draft=None
        if draft_folder is None
        else load_llama(draft_folder, layout=draft_layout, dtype=width),
        tokenizer=tokenizer,
        replicated=replicated,
    )


def _check(
    target: str | Path | None, draft: str | Path | None
) -> tuple[Path, Path | None, LlamaConfig, Tokenizer]:
    """Where the models are, after all checks that read no weight."""
    target_folder, draft_folder = _folders(target, draft)
    config = check_checkpoint(target_folder)
    tokenizer = load_tokenizer(target_folder)
    if draft_folder is not None:
        check_pair(config, check_checkpoint(draft_folder))
        check_same_vocabulary(tokenizer, load_tokenizer(draft_folder))
    return target_folder, draft_folder, config, tokenizer


def _default_rounds() -> int:
    return 4 if jax.default_backend() == "cpu" else 1


def _folders(target: str | Path | None, draft: str | Path | None) -> tuple[Path, Path | None]:
    embedded_target, embedded_draft = embedded_pair()
    if target is None:
        return embedded_target, embedded_draft if draft is None else resolve(str(draft))
    return resolve(str(target)), None if draft is None else resolve(str(draft))


def generate(
    pair: Pair,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    *,
    rule: Rule | None = None,
    num_speculative_tokens: int = DEFAULT_SPECULATIVE_TOKENS,
    lookup: Lookup | None = None,
    max_new_tokens: int = 128,
    batch_size: int = 1,
    seed: int = 0,
) -> list[Generation]:
    """Decodes prompts, given as text or as token ids.

    Args:
      pair: from `load_pair`.
      prompts: what to continue.
      rule: which draft tokens are kept; None for plain FLy, and for exact greedy decoding where
        the pair has no draft model.
      num_speculative_tokens: K; 0 decodes one token at a time.
      lookup: the drafting level below the draft model.
      max_new_tokens: limit of each prompt's continuation.
      batch_size: prompts decoded together.
      seed: of the draws, where the rule samples.

    Raises:
      FlyJaxError: no prompt, an empty one, one longer than the context, a batch of no rows, or K
        that leaves no room for FLy's window.
    """
    if isinstance(prompts, str) or not prompts or batch_size < 1:
        raise FlyJaxError(
            "generate needs a list of at least one prompt and a batch_size of at least 1; give "
            "[text] for a single text."
        )
    if pair.draft is None:
        num_speculative_tokens = 0
        rule = Exact() if rule is None else rule
    spec = pair.spec(rule, num_speculative_tokens, lookup)
    ids = [
        pair.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        for prompt in prompts
    ]
    capacity = capacity_for(spec, ids, max_new_tokens, pair.target.config.max_context)
    decoder = pair.decoder(spec, capacity=capacity, batch_size=min(batch_size, len(ids)))
    return decoder.generate(ids, max_new_tokens, seed=seed)
