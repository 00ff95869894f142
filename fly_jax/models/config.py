"""The shape of a model: Llama, and what the families that are run have beyond it."""

from __future__ import annotations

import dataclasses

from fly_jax.errors import FlyJaxError


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3.1's stretching of the rotary frequencies (`rope_type: "llama3"`).

    Wavelengths longer than `original_context / low_frequency_factor` are stretched by `factor`,
    shorter ones than `original_context / high_frequency_factor` are kept, those between are
    blended (Llama 3.1 model card and reference code).
    """

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_context: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN's stretching of the rotary frequencies (`rope_type: "yarn"`, arXiv 2309.00071).

    Pairs of features that turn fewer than `slow_turns` times within `original_context` are
    stretched by `factor`, those that turn more than `fast_turns` times are kept, those between are
    blended, from one pair to the next in equal steps.

    Attributes:
      factor: of the context.
      original_context: positions that the model was trained for before.
      attention_factor: that queries and keys are multiplied with.
      fast_turns: `beta_fast`.
      slow_turns: `beta_slow`.
      truncate: the band of blended pairs is widened to whole pairs.
    """

    factor: float
    original_context: int
    attention_factor: float
    fast_turns: float = 32.0
    slow_turns: float = 1.0
    truncate: bool = True


_SIZES = (
    "vocab_size", "embed_size", "ffw_size", "num_layers", "num_heads", "num_kv_heads", "head_size",
    "max_context",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Everything about a Llama, or a model like it, that is static under `jit`; hashable.

    Attributes:
      vocab_size: tokens that it takes; each has a row of the embedding, unless there is a
        `draft_vocab_size`.
      embed_size: width of the residual stream.
      ffw_size: width of the gated MLP.
      num_layers: decoder layers.
      num_heads: query heads.
      num_kv_heads: key/value heads; divides `num_heads`.
      head_size: width of one head.
      max_context: positions the model was trained for.
      rope_theta: base of the rotary frequencies.
      rope_scaling: Llama 3.1's scaling or YaRN's, if any.
      norm_epsilon: added to the mean square in RMSNorm.
      tied_embeddings: the unembedding is the embedding (Llama 3.2).
      bos_token_id: token that begins a text, which the tokenizer may put before a prompt, if any.
      eos_token_ids: every id that ends a text.
      architecture: the family, one of `fly_jax.models.architectures`.
      attention_biases: queries, keys and values have biases (Qwen 2).
      head_norms: each head's queries and keys are normalised before they are rotated (Qwen 3).
      sliding_window: tokens that a layer with a window sees, the token itself among them.
      windowed_layers: the layers that have it (Mistral 0.1: all), in ascending order.
      unrotated_layers: layers without rotary positions (SmolLM3), in ascending order.
      draft_vocab_size: rows of the embedding of a drafter that knows only the most frequent of its
        target's tokens; the last row stands for all others, which it never proposes. None where
        each token has a row.
    """

    vocab_size: int
    embed_size: int
    ffw_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_context: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | YarnScaling | None = None
    norm_epsilon: float = 1e-5
    tied_embeddings: bool = False
    bos_token_id: int | None = 1
    eos_token_ids: tuple[int, ...] = (2,)
    architecture: str = "llama"
    attention_biases: bool = False
    head_norms: bool = False
    sliding_window: int | None = None
    windowed_layers: tuple[int, ...] = ()
    unrotated_layers: tuple[int, ...] = ()
    draft_vocab_size: int | None = None

    def __post_init__(self) -> None:
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise FlyJaxError(
                    f"The configuration has {name}={getattr(self, name)}; it must be at least 1: "
                    "correct config.json."
                )
        begin = () if self.bos_token_id is None else (self.bos_token_id,)
        if not all(isinstance(token, int) and token >= 0 for token in begin + self.eos_token_ids):
            raise FlyJaxError(
                f"The configuration has bos_token_id={self.bos_token_id} and eos_token_ids="
                f"{self.eos_token_ids}; token ids are numbers of at least 0: correct config.json."
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            raise FlyJaxError(
                f"The configuration has sliding_window={self.sliding_window}; it must be at least "
                "1, or null: correct config.json."
            )
        if self.draft_vocab_size is not None and not 2 <= self.draft_vocab_size <= self.vocab_size:
            raise FlyJaxError(
                f"The configuration has draft_vocab_size={self.draft_vocab_size} and vocab_size="
                f"{self.vocab_size}; the first must be at least 2 and at most the second: correct "
                "config.json."
            )
        if self.num_heads % self.num_kv_heads:
            raise FlyJaxError(
                f"The configuration has {self.num_heads} query heads and {self.num_kv_heads} "
                "key/value heads; the first must be a multiple of the second: correct config.json."
            )

    def with_vocabulary(self, size: int) -> LlamaConfig:
        """The same model without the rows that pad its vocabulary beyond so many tokens."""
        return dataclasses.replace(self, vocab_size=size)

    @property
    def queries_per_kv_head(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads


# A family's models pad one vocabulary to sizes of their own: Qwen 2.5 to 151,936 and 152,064.
_MOST_PADDING = 0.01


def shared_vocabulary(target: LlamaConfig, draft: LlamaConfig, named: int = 0) -> int:
    """Tokens that both models number, without what pads the larger of them.

    Args:
      target: the one model.
      draft: the other.
      named: tokens that their tokenizer has, if that is known: no padding.

    Raises:
      FlyJaxError: they differ by more than padding.
    """
    fewest, most = sorted((target.vocab_size, draft.vocab_size))
    if most - fewest > _MOST_PADDING * most or fewest < min(named, most):
        raise FlyJaxError(
            f"The target has a vocabulary of {target.vocab_size} tokens and the draft one of "
            f"{draft.vocab_size}; they must share one: take a draft of the target's family."
        )
    return fewest
