"""The host loop: admits prompts, dispatches rounds and hands out tokens as they settle."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, UInt32

from fly_jax.decoding.round import RoundSpec, decode_rounds
from fly_jax.decoding.rules import Why
from fly_jax.decoding.state import DecodeState, RoundOutput
from fly_jax.errors import FlyJaxError
from fly_jax.models.cache import KVCache, empty_cache
from fly_jax.models.config import LlamaConfig
from fly_jax.models.llama import Llama
from fly_jax.sharding.processes import decide
from fly_jax.sharding.rules import Layout

_SMALLEST_BUCKET = 16
_CAPACITY_STEP = 64


@dataclasses.dataclass(frozen=True)
class Settled:
    """Tokens of one row that will not change any more.

    Attributes:
      row: index of the prompt.
      token_ids: the new tokens.
      why: why each of them stands there.
      finish_reason: "stop" (an end of text), "length" (the limit), or None while the row goes on.
    """

    row: int
    token_ids: tuple[int, ...]
    why: tuple[Why, ...]
    finish_reason: str | None


@dataclasses.dataclass
class Generation:
    """What one prompt became, and what it took.

    Attributes:
      prompt_token_ids: the prompt.
      token_ids: what followed, the end-of-text token included.
      why: why each token stands there.
      finish_reason: "stop" or "length".
      num_rounds: target passes.
      num_draft_tokens: draft tokens that the target saw.
      num_accepted_tokens: those it kept, rescued ones included.
      num_rescued_tokens: mismatches kept.
      num_draft_passes: passes of the draft model while the row was live.
      seconds: from the first round's dispatch to the arrival of the row's last token.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: list[int] = dataclasses.field(default_factory=list)
    why: list[Why] = dataclasses.field(default_factory=list)
    finish_reason: str = "length"
    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_rescued_tokens: int = 0
    num_draft_passes: int = 0
    seconds: float = 0.0

    @property
    def mean_accepted_tokens(self) -> float:
        """Settled tokens per target pass, bonus included."""
        return len(self.token_ids) / max(self.num_rounds, 1)

    @property
    def tokens_per_second(self) -> float:
        """Settled tokens per second of decoding; the prefill is not counted."""
        return len(self.token_ids) / self.seconds if self.seconds else 0.0


def capacity_for(
    spec: RoundSpec, prompts: Sequence[Sequence[int]], max_new_tokens: int, max_context: int
) -> int:
    """Cache positions that these prompts need, in steps that keep the number of programs small."""
    longest = max(len(prompt) for prompt in prompts)
    needed = min(longest + max_new_tokens, max_context) + spec.room
    needed = max(needed, _bucket(longest))
    return -(-needed // _CAPACITY_STEP) * _CAPACITY_STEP


class Decoder:
    """Decodes batches of prompts with one rule on one pair.

    Programs are compiled at the first batch; later batches of the same row count and capacity
    reuse them.
    """

    def __init__(
        self,
        target: Llama,
        draft: Llama | None,
        spec: RoundSpec,
        *,
        capacity: int,
        batch_size: int = 1,
        protected_token_ids: Sequence[int] = (),
        cache_dtype: jnp.dtype | None = None,
    ) -> None:
        """Checks the pair against the rule.

        Args:
          target: the model whose text is wanted.
          draft: the model that proposes; None where `spec.num_speculative_tokens` is 0.
          spec: the rule, K and the lookup.
          capacity: cache positions of a row; see `capacity_for`.
          batch_size: rows decoded together.
          protected_token_ids: control tokens, never rescued; the ends of text are added.
          cache_dtype: type of the caches; that of the parameters if not given.

        Raises:
          FlyJaxError: K without a draft model, or vocabularies of different sizes.
        """
        if draft is None and spec.num_speculative_tokens:
            raise FlyJaxError(
                f"{spec.num_speculative_tokens} speculative tokens were asked for without a draft "
                "model; speculation needs one: give a draft, or num_speculative_tokens=0."
            )
        if draft is not None and draft.config.vocab_size != target.config.vocab_size:
            raise FlyJaxError(
                f"The draft model has {draft.config.vocab_size} tokens and the target "
                f"{target.config.vocab_size}; both need the same vocabulary: choose a draft model "
                "of the target's family."
            )
        self.spec = spec
        self.capacity = capacity
        self.batch_size = batch_size
        speculates = spec.num_speculative_tokens > 0
        self._models = _Models(target, draft if speculates else None, cache_dtype)
        vocab = target.config.vocab_size
        protected = np.zeros(vocab, bool)
        ids = [*protected_token_ids, *spec.eos_token_ids]
        protected[[token for token in ids if token < vocab]] = True
        self._protected = self._models.place(protected, (None,))

    def stream(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, *, seed: int = 0
    ) -> Iterator[tuple[Settled, Generation]]:
        """Decodes one batch, yielding tokens as they settle with the row's running account.

        The device is always one dispatch ahead of what has been read, so nothing waits for the
        host.

        Raises:
          FlyJaxError: no prompt, too many, an empty one, one longer than the context, or no new
            token asked for.
        """
        state = self._admit(prompts, max_new_tokens, seed)
        accounts = [Generation(tuple(prompt)) for prompt in prompts]
        live = set(range(len(prompts)))
        jax.block_until_ready(state.target.keys)
        start = time.perf_counter()
        pending: RoundOutput | None = None
        while self._goes_on(bool(live)):
            state, output = self._models.run(self.spec, state, self._protected)
            for leaf in jax.tree.leaves(output):
                leaf.copy_to_host_async()
            if pending is not None:
                for settled in self._read(jax.device_get(pending), accounts, live):
                    accounts[settled.row].seconds = time.perf_counter() - start
                    yield settled, accounts[settled.row]
            pending = output

    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, *, seed: int = 0
    ) -> list[Generation]:
        """Decodes any number of prompts, `batch_size` at a time."""
        finished: list[Generation] = []
        for first in range(0, len(prompts), self.batch_size):
            batch = prompts[first : first + self.batch_size]
            accounts = [Generation(tuple(prompt)) for prompt in batch]
            for settled, account in self.stream(batch, max_new_tokens, seed=seed + first):
                accounts[settled.row] = account
            finished += accounts
        return finished

    def _admit(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, seed: int
    ) -> DecodeState:
        if not 1 <= len(prompts) <= self.batch_size:
            raise FlyJaxError(
                f"{len(prompts)} prompts were given for {self.batch_size} rows; a batch needs 1 to "
                f"{self.batch_size}: split the prompts or raise batch_size."
            )
        if max_new_tokens < 1:
            raise FlyJaxError(
                f"max_new_tokens is {max_new_tokens}; decoding needs at least 1: raise it."
            )
        context = self._models.config.max_context
        lengths = np.ones(self.batch_size, np.int32)
        limits = np.ones(self.batch_size, np.int32)
        text = np.zeros((self.batch_size, self.capacity), np.int32)
        for row, prompt in enumerate(prompts):
            check_prompt(prompt, self._models.config, name=f"Prompt {row + 1}")
            lengths[row] = len(prompt)
            limits[row] = min(len(prompt) + max_new_tokens, context)
            text[row, : len(prompt)] = prompt
        bucket = _bucket(int(lengths.max()))
        if max(bucket, int(limits.max()) + self.spec.room) > self.capacity:
            raise FlyJaxError(
                f"A row needs {int(limits.max()) + self.spec.room} positions and the decoder has "
                f"{self.capacity}; make it with a larger capacity (see capacity_for)."
            )
        # Rows without a prompt are finished from the start.
        return self._models.admit(text, lengths, limits, bucket, seed)

    def _goes_on(self, is_live: bool) -> bool:
        """Whether there is another dispatch; process 0's word where the mesh is of several."""
        return decide(is_live) if self._models.spans_processes else is_live

    def _read(
        self, output: RoundOutput, accounts: list[Generation], live: set[int]
    ) -> Iterator[Settled]:
        """Books one dispatch's rounds: what settled in each live row."""
        for index in range(output.count.shape[0]):
            for row in sorted(live):
                account, count = accounts[row], int(output.count[index, row])
                if count == 0:
                    continue
                tokens = tuple(output.tokens[index, row, :count].tolist())
                why = tuple(Why(code) for code in output.why[index, row, :count].tolist())
                account.token_ids.extend(tokens)
                account.why.extend(why)
                account.num_rounds += 1
                account.num_draft_tokens += int(output.num_drafted[index, row])
                account.num_accepted_tokens += int(output.num_accepted[index, row])
                account.num_rescued_tokens += int(output.num_rescued[index, row])
                account.num_draft_passes += int(output.num_draft_passes[index])
                reason = None
                if output.finished[index, row]:
                    stopped = tokens[-1] in self.spec.eos_token_ids
                    reason = account.finish_reason = "stop" if stopped else "length"
                    live.discard(row)
                yield Settled(row, tokens, why, reason)


def check_prompt(prompt: Sequence[int], config: LlamaConfig, *, name: str = "The prompt") -> None:
    """Raises FlyJaxError where the model cannot continue a prompt.

    It is empty, leaves no room in the context, or has ids beyond the vocabulary (which an array
    lookup would silently take for other tokens).
    """
    max_context = config.max_context
    if not prompt:
        raise FlyJaxError(f"{name} is empty; decoding needs at least one token: give some text.")
    if len(prompt) >= max_context:
        raise FlyJaxError(
            f"{name} has {len(prompt)} tokens and the model's context is {max_context}; at least "
            "one position must be left for new text: shorten the prompt."
        )

    if not all(0 <= token < config.vocab_size for token in prompt):
        raise FlyJaxError(
            f"{name} has token ids outside the model's vocabulary of {config.vocab_size}; "
            "tokenise it with the model's own tokenizer."
        )


def _bucket(length: int) -> int:
    """The power of two that a prompt of this length is padded to."""
    return max(_SMALLEST_BUCKET, 1 << (length - 1).bit_length())


# Beyond this many layers the compile time of separate layers outweighs what they save on a CPU.
_MOST_UNSTACKED_LAYERS = 16


def _for_backend(model: Llama) -> Llama:
    is_small = model.config.num_layers <= _MOST_UNSTACKED_LAYERS
    on_cpu = jax.default_backend() == "cpu" and model.layout is None
    return model.unstacked() if on_cpu and is_small else model


class _Models:
    """The pair as the jitted programs take it: plain arrays and static shapes."""

    def __init__(self, target: Llama, draft: Llama | None, cache_dtype: jnp.dtype | None) -> None:
        target, draft = _for_backend(target), draft and _for_backend(draft)
        self._parameters = (target.parameters(), draft.parameters() if draft else None)
        self._shapes = _Shapes(
            target.config,
            draft.config if draft else None,
            target.layout,
            draft.layout if draft else None,
            jnp.dtype(cache_dtype or self._parameters[0]["embedding"].dtype),
        )

    @property
    def config(self) -> LlamaConfig:
        return self._shapes.target

    @property
    def spans_processes(self) -> bool:
        layout = self._shapes.target_layout
        return layout is not None and layout.mesh.is_multi_process

    def place(self, value: np.ndarray, axes: tuple[str | None, ...]) -> Array:
        """Puts a host array where the programs expect it: said in words, never implicitly."""
        layout = self._shapes.target_layout
        return layout.place(value, axes) if layout else jax.device_put(value)

    def admit(
        self, text: np.ndarray, lengths: np.ndarray, limits: np.ndarray, bucket: int, seed: int
    ) -> DecodeState:
        return _admit(
            self._shapes,
            bucket,
            self._parameters,
            self.place(text, (None, None)),
            self.place(lengths, (None,)),
            self.place(limits, (None,)),
            self.place(np.asarray(seed % 2**32, np.uint32), ()),
        )

    def run(
        self, spec: RoundSpec, state: DecodeState, protected: Bool[Array, " vocab"]
    ) -> tuple[DecodeState, RoundOutput]:
        return _run(spec, self._shapes, self._parameters, state, protected)


@dataclasses.dataclass(frozen=True)
class _Shapes:
    """What the programs know of the pair when they are compiled."""

    target: LlamaConfig
    draft: LlamaConfig | None
    target_layout: Layout | None
    draft_layout: Layout | None
    cache_dtype: jnp.dtype

    def models(
        self, parameters: tuple[dict[str, Array], dict[str, Array] | None]
    ) -> tuple[Llama, Llama | None]:
        draft = None
        if self.draft is not None and parameters[1] is not None:
            draft = Llama(self.draft, parameters[1], self.draft_layout)
        return Llama(self.target, parameters[0], self.target_layout), draft


@functools.partial(jax.jit, static_argnames=("shapes", "bucket"))
def _admit(
    shapes: _Shapes,
    bucket: int,
    parameters: tuple[dict[str, Array], dict[str, Array] | None],
    text: Int[Array, "rows capacity"],
    lengths: Int[Array, " rows"],
    limits: Int[Array, " rows"],
    seed: UInt32[Array, ""],
) -> DecodeState:
    """Runs the prompts through both models; no logits are needed before the first round."""
    rows, capacity = text.shape

    def prefill(model: Llama | None) -> KVCache | None:
        if model is None:
            return None
        cache = empty_cache(model.config, rows, capacity, shapes.cache_dtype)
        return model.hidden(text[:, :bucket], cache)[1]

    target, draft = (prefill(model) for model in shapes.models(parameters))
    assert target is not None
    key = jax.random.key(seed)
    return DecodeState(text, lengths, limits, lengths >= limits, target, draft, key)


@functools.partial(jax.jit, static_argnames=("spec", "shapes"), donate_argnames=("state",))
def _run(
    spec: RoundSpec,
    shapes: _Shapes,
    parameters: tuple[dict[str, Array], dict[str, Array] | None],
    state: DecodeState,
    protected: Bool[Array, " vocab"],
) -> tuple[DecodeState, RoundOutput]:
    target, draft = shapes.models(parameters)
    state, output = decode_rounds(spec, target, draft, state, protected)
    layout = shapes.target_layout
    if layout is not None:  # whole on every device, so that every process can read it
        output = jax.tree.map(lambda leaf: layout.constrain(leaf, (None,) * leaf.ndim), output)
    return state, output
