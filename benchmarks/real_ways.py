"""What decodes in the benchmark on a real model: fly_jax's decoders, and Hugging Face's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
from hugging_face import WAYS, HuggingFace
from real_decodings import decoding, draft_of
from tqdm import tqdm

from fly_jax.decoding.pair import Pair, load_pair
from fly_jax.models.checkpoints.load import save_hf


@dataclasses.dataclass
class Job:
    """One way on all prompts in one turn: by prompt, or by group of prompts decoded together.

    Attributes:
      tokens: of each prompt's answer.
      seconds: of each group, without what the prompts took.
      rounds: of each prompt; none from Hugging Face.
      rescued: of each prompt; none from Hugging Face.
    """

    tokens: list[list[int]] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)
    rounds: list[int] = dataclasses.field(default_factory=list)
    rescued: list[int] = dataclasses.field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """Of all prompts together."""
        return sum(map(len, self.tokens)) / sum(self.seconds)


# Decodes a group of prompts into a job.
Way = Callable[[Job, Sequence[Sequence[int]]], None]


class Ways:
    """All that can decode, one at a time: each is made when it is asked for.

    Nothing is kept but the models. Linux lets a process map some 65,000 pieces of memory, and the
    compiled programs of all ways together are more; the next turn reads them from JAX's cache.
    """

    def __init__(
        self,
        target: str,
        drafter: str | None,
        python: str | None,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        folder: Path,
    ) -> None:
        """Makes nothing yet.

        Args:
          target: a folder or a GGUF file.
          drafter: made for the target; None if no way needs one.
          python: an interpreter that has PyTorch and transformers; None if no way needs it.
          prompts: all that will be decoded.
          max_new_tokens: of an answer.
          folder: where Hugging Face's copies of the models may lie for the time being.
        """
        self._target, self._drafter, self._python = target, drafter, python
        self._prompts, self._limit, self._folder = prompts, max_new_tokens, folder
        self._pairs: dict[str | None, Pair] = {}
        self._hugging_face: HuggingFace | None = None

    def __call__(self, batch: int, name: str) -> Way:
        """How a group of prompts is decoded, with everything that has to be compiled."""
        jax.clear_caches()
        make = self._of_hugging_face if name in WAYS else self._of_ours
        return make(batch, name)

    def pair(self, draft: str | None) -> Pair:
        """The target, and what drafts for it."""
        if draft not in self._pairs:
            self._pairs[draft] = load_pair(self._target, draft, dtype="float32")
        return self._pairs[draft]

    def _of_ours(self, batch: int, name: str) -> Way:
        one = decoding(name)
        pair = self.pair(draft_of(one, self._drafter))
        decoder = pair.decoder(pair.spec(**one.values), batch_size=batch)
        decoder.warm_up(self._prompts, self._limit)

        def way(job: Job, group: Sequence[Sequence[int]]) -> None:
            rows = decoder.decode(group, self._limit, seed=0)
            job.tokens += [row.token_ids for row in rows]
            job.rounds += [row.num_rounds for row in rows]
            job.rescued += [row.num_rescued_tokens for row in rows]
            job.seconds.append(max(row.seconds for row in rows))

        return way

    def _of_hugging_face(self, batch: int, name: str) -> Way:
        process = self._hugging_face = self._hugging_face or self._started()

        def way(job: Job, group: Sequence[Sequence[int]]) -> None:
            rows, seconds = process.decode(name, group, self._limit)
            job.tokens += rows
            job.seconds.append(seconds)

        way(Job(), self._prompts[:batch])  # warms it up
        return way

    def _started(self) -> HuggingFace:
        pair = self.pair("self:int4")
        assert pair.draft is not None
        assert self._python is not None
        for name, model in {"target": pair.target, "assistant": pair.draft}.items():
            save_hf(model, self._folder / name, jnp.float32)
        return HuggingFace(
            self._python, str(self._folder / "target"), str(self._folder / "assistant")
        )


def decoded(way: Way, prompts: Sequence[Sequence[int]], batch: int, said: str) -> Job:
    """All prompts, `batch` at a time, under a progress bar that says what they are."""
    job = Job()
    for start in tqdm(range(0, len(prompts), batch), desc=said, leave=False):
        way(job, prompts[start : start + batch])
    return job
