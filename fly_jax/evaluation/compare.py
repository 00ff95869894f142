"""Rules side by side on the same prompts in one run: their speed and quality."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from tqdm import tqdm

from fly_jax.decoding.config import DecodingConfig
from fly_jax.decoding.drafters.drafter import PLAIN, Draft, Drafter, Terms
from fly_jax.decoding.pair import Pair
from fly_jax.decoding.state import RoundOutput
from fly_jax.engine.engine import Engine
from fly_jax.engine.request import RequestState
from fly_jax.engine.slots import EarlierAnswers
from fly_jax.errors import FlyJaxError
from fly_jax.evaluation.audit_summary import aligned, or_dash
from fly_jax.verification.correction_memory import CorrectionMemory

_Check = Callable[[int, str], bool | None]

# Prompts for each slot (of several) that a rule decodes before the next one's turn.
_GROUPS = 4
_COUNTS = ("num_rounds", "num_draft_tokens", "num_accepted_tokens", "num_rescued_tokens")
_DERIVED = ("tokens_per_second", "whole_tokens_per_second", "deviation", "mean_accepted_tokens",
            "rescued_per_100_tokens")  # fmt: skip
# Tokens of each prompt in the timing of rounds without draft models.
_FEW_TOKENS = 16


@dataclasses.dataclass(frozen=True)
class RuleResult:
    """The figures of one rule on all prompts, in all turns."""

    name: str
    num_tokens: int = 0
    seconds: float = 0.0  # of decoding
    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_rescued_tokens: int = 0
    num_checked: int = 0
    num_correct: int = 0
    speeds: tuple[float, ...] = ()
    prefill_seconds: float = 0.0  # of prompts; what a round takes in later is in `seconds`
    first_token_seconds: float | None = None  # the median prompt's, from when it was handed in
    inter_token_seconds: float | None = None  # of decoding, for each token, the median prompt's
    accepted_by_position: tuple[float, ...] = ()  # the share of drafts whose token there was kept
    draft_share: float | None = None  # of a round's seconds, where it was measured and models draft
    by_category: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    texts: tuple[str, ...] = ()

    @property
    def tokens_per_second(self) -> float:
        """The tokens of all turns over the seconds of decoding them."""
        return self.num_tokens / self.seconds if self.seconds else 0.0

    @property
    def whole_tokens_per_second(self) -> float:
        """The same over all seconds, those of prompts too."""
        seconds = self.seconds + self.prefill_seconds
        return self.num_tokens / seconds if seconds else 0.0

    @property
    def deviation(self) -> float | None:
        """The standard deviation of the turns' tokens per second; None for a single turn."""
        return statistics.stdev(self.speeds) if len(self.speeds) > 1 else None

    @property
    def mean_accepted_tokens(self) -> float:
        """The settled tokens per target pass, bonus included."""
        return self.num_tokens / max(self.num_rounds, 1)

    @property
    def rescued_per_100_tokens(self) -> float:
        """The rescued mismatches in a hundred settled tokens."""
        return 100 * self.num_rescued_tokens / max(self.num_tokens, 1)

    @property
    def accuracy(self) -> float | None:
        """Share of the checkable prompts that were answered correctly; None without any."""
        return self.num_correct / self.num_checked if self.num_checked else None


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The rules' results; the first is what the others are compared with."""

    results: tuple[RuleResult, ...]

    def speed_up(self, result: RuleResult) -> float:
        """Tokens per second over those of the first rule."""
        base = self.results[0].tokens_per_second
        return result.tokens_per_second / base if base else 0.0

    def retention(self, result: RuleResult) -> float | None:
        """Accuracy over that of the first rule; None where that is 0 or nothing was checked."""
        base, accuracy = self.results[0].accuracy, result.accuracy
        return accuracy / base if base and accuracy is not None else None

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """The figures by rule."""
        figures = {}
        for result in self.results:
            counted = dataclasses.asdict(result)
            del counted["texts"]
            counted |= {name: getattr(result, name) for name in _DERIVED}
            counted |= {"speed_up": self.speed_up(result), "retention": self.retention(result)}
            figures[counted.pop("name")] = counted
        return figures

    def table(self) -> str:
        """An aligned text table with a line for every rule; empty columns are left out."""
        rows = [self._cells(result) for result in self.results]
        shown = [name for name in rows[0] if any(row[name] != "-" for row in rows)]
        lines = aligned([shown, *([row[name] for name in shown] for row in rows)])
        lines.insert(1, "-" * len(lines[0]))
        return "\n".join(lines)

    def _cells(self, result: RuleResult) -> dict[str, str]:
        several = "" if result.deviation is None else f" ± {result.deviation:.1f}"
        drafts = result.accepted_by_position
        positions = sorted({1, 2, 4, 8, len(drafts)} & set(range(1, len(drafts) + 1)))
        return {
            "decoding": result.name, "tokens/s": f"{result.tokens_per_second:.1f}{several}",
            "speed-up": f"{self.speed_up(result):.2f}x",
            "with prompts": f"{result.whole_tokens_per_second:.1f}",
            "first token": or_dash(result.first_token_seconds, "{:.2f} s"),
            "per token": or_dash(result.inter_token_seconds, "{:.4f} s"),
            "mean accepted": f"{result.mean_accepted_tokens:.2f}",
            "kept at": " ".join(f"{at}:{drafts[at - 1]:.0%}" for at in positions) or "-",
            "draft": or_dash(result.draft_share, "{:.0%}"),
            "rescued": str(result.num_rescued_tokens),
            "per 100 tokens": f"{result.rescued_per_100_tokens:.1f}",
            "correct": f"{result.num_correct}/{result.num_checked}" if result.num_checked else "-",
            "retention": or_dash(self.retention(result), "{:.1%}"),
        }  # fmt: skip


def compare(
    pair: Pair, prompts: Sequence[str] | Sequence[Sequence[int]],
    configs: Mapping[str, DecodingConfig] | None = None, *, max_new_tokens: int = 128,
    batch_size: int = 1, seed: int = 0, turns: int = 1, draft_share: bool = False,
    categories: Sequence[str] = (), check: _Check | None = None,
    memory: CorrectionMemory | None = None,
) -> Comparison:  # fmt: skip
    """Decodes the same prompts with every rule, in turns, a few prompts at a time.

    Everything is compiled before the first measurement. Each rule has an engine of its own; only
    the one that decodes holds its caches. FlyJaxError for no prompt, an empty one, one longer than
    the context, or no draft model.

    Args:
      configs: the rules by name, the baseline first; `DecodingConfig.side_by_side` if not given.
      draft_share: also measures rounds of the same K with a drafter that takes no time, for the
        share of the draft models.
      categories: of each prompt, for figures of each category where prompts are decoded alone.
      check: whether a prompt's continuation is correct; None where that cannot be said.
      memory: what every rule that uses one begins with; it is copied.
    """
    if not prompts:
        raise FlyJaxError("No prompt was given; a comparison needs at least one.")
    configs = configs or {one.rule: one for one in DecodingConfig().side_by_side()}
    asked = [one for one in configs.values() if one.num_speculative_tokens]
    if not all(pair.config(one).num_speculative_tokens for one in asked):
        raise FlyJaxError("Nothing proposes to the target; give a draft model, or a lookup.")
    ids: Sequence[Sequence[int]] = [
        pair.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts
    ]

    def measured(pair: Pair, config: DecodingConfig) -> _Measured:
        uses = memory is not None and config.to_rule().uses_memory
        engine = Engine.of(
            pair, config, prompts=ids, max_new_tokens=max_new_tokens, num_slots=batch_size,
            memory=memory.copy() if memory is not None and uses else None, with_texts=False,
        )  # fmt: skip
        engine.warm_up_for(engine.requests(ids, max_new_tokens))
        engine.forget()
        return _Measured(engine, engine.memory)

    by_name = {name: measured(pair, config) for name, config in configs.items()}
    without_models: dict[int, _Measured] = {}
    if draft_share and pair.drafts:
        alone = dataclasses.replace(pair, drafts=(), drafter=_LastToken())
        depths = {one.fixed_depth: configs[name] for name, one in by_name.items()}
        without_models = {k: measured(alone, one) for k, one in depths.items() if k}
    size = batch_size if batch_size == 1 else _GROUPS * batch_size
    groups = [ids[first : first + size] for first in range(0, len(ids), size)]
    with tqdm(total=turns * len(groups) * len(by_name), disable=None, leave=False) as bar:
        for turn, (index, group) in itertools.product(range(turns), enumerate(groups)):
            for name, one in by_name.items():
                bar.set_description(name)
                one.decode(group, max_new_tokens, seed + index * size, turn)
                bar.update()
            for one in without_models.values() if turn == 0 else ():
                one.decode(group, min(max_new_tokens, _FEW_TOKENS), seed + index * size, turn)
    results = []
    for name, one in by_name.items():
        result = one.result(name, pair, categories if batch_size == 1 else (), check)
        if (beside := without_models.get(one.fixed_depth)) is not None:
            share = 1 - beside.seconds_of_a_round / one.seconds_of_a_round
            result = dataclasses.replace(result, draft_share=max(share, 0.0))
        results.append(result)
    return Comparison(tuple(results))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _LastToken(Drafter):
    """A drafter that repeats each row's last token."""

    num_speculative_tokens = 1
    resumes = True

    def propose(
        self, state: Any, text: Array, length: Array, num_speculative_tokens: int,
        terms: Terms = PLAIN,
    ) -> tuple[Draft, Any]:  # fmt: skip
        """Repeats the last token, as `Drafter.propose`; nothing is drawn."""
        last = jnp.take_along_axis(text, length[:, None] - 1, axis=1)
        drafted = terms.of_each(length, num_speculative_tokens)
        tokens = jnp.broadcast_to(last, (len(length), num_speculative_tokens))
        return Draft(tokens, None, drafted, jnp.zeros(0, jnp.int32)), state


@dataclasses.dataclass
class _Measured:
    """A rule's requests in each turn, and the seconds of each group of prompts."""

    engine: Engine
    memory: CorrectionMemory | None  # that each turn begins with
    done: list[list[RequestState]] = dataclasses.field(default_factory=list)
    seconds: list[list[float]] = dataclasses.field(default_factory=list)
    prefill_seconds: float = 0.0
    num_rounds: int = 0

    @property
    def fixed_depth(self) -> int:
        """The K of all rounds; 0 where nothing is drafted, or K is chosen while decoding."""
        static = self.engine.spec.static
        return 0 if static.depths else static.num_speculative_tokens

    def decode(self, group: Sequence[Sequence[int]], limit: int, seed: int, turn: int) -> None:
        """Decodes a group of prompts, with nothing held but the answers of this turn, if kept."""
        engine = self.engine
        if turn == len(self.done):
            self.done.append([])
            self.seconds.append([])
            if engine.earlier is not None:
                engine.earlier = EarlierAnswers(engine.earlier.tokens.size)
            engine.memory = None if self.memory is None else self.memory.copy()
        requests = engine.requests(group, limit, seed=seed)
        engine.warm_up_for(requests)  # prompts of a group may share other beginnings than of all
        engine.listener = self._count
        start, before = time.perf_counter(), engine.prefill_seconds
        done = engine.answer(requests)
        prefilling = engine.prefill_seconds - before
        self.seconds[turn].append(time.perf_counter() - start - prefilling)
        self.prefill_seconds += prefilling
        engine.forget()
        self.done[turn] += done

    def _count(self, output: RoundOutput, _: object) -> None:
        self.num_rounds += int(np.any(output.live, axis=1).sum())

    @property
    def seconds_of_a_round(self) -> float:
        """The mean seconds of a round, whatever slots it had work for."""
        return sum(map(sum, self.seconds)) / self.num_rounds

    def result(
        self, name: str, pair: Pair, categories: Sequence[str], check: _Check | None
    ) -> RuleResult:
        """The figures; the texts are those of the first turn."""
        states = [one for turn in self.done for one in turn]
        all_done = [one.generation for one in states]
        first = [one.generation.token_ids for one in self.done[0]]
        texts = tuple(pair.tokenizer.decode(one, continues=True) for one in first)
        verdicts = [check(index, text) for index, text in enumerate(texts)] if check else []
        kept = [depth for one in all_done for depth in one.kept]
        per_token = (one.seconds / len(one.token_ids) for one in all_done if one.token_ids)
        k = self.engine.spec.static.num_speculative_tokens  # a deferred window may settle more
        return RuleResult(
            name=name,
            num_tokens=sum(len(one.token_ids) for one in all_done),
            seconds=sum(map(sum, self.seconds)),
            prefill_seconds=self.prefill_seconds,
            **{name: sum(getattr(one, name) for one in all_done) for name in _COUNTS},
            num_checked=sum(verdict is not None for verdict in verdicts),
            num_correct=sum(verdict is True for verdict in verdicts),
            speeds=tuple(
                sum(len(one.generation.token_ids) for one in turn) / sum(seconds)
                for turn, seconds in zip(self.done, self.seconds, strict=True)
            ),
            first_token_seconds=_median(one.first_token_seconds for one in states),
            inter_token_seconds=_median(per_token),
            accepted_by_position=tuple(
                sum(depth > at for depth in kept) / len(kept)
                for at in range(min(max(kept, default=0), k))
            ),
            by_category={
                category: self._of([at for at, one in enumerate(categories) if one == category])
                for category in dict.fromkeys(categories)
            },
            texts=texts,
        )

    def _of(self, indices: Sequence[int]) -> dict[str, float]:
        """The figures of some prompts, where each is a group of its own."""
        some = [turn[at].generation for turn in self.done for at in indices]
        tokens = sum(len(one.token_ids) for one in some)
        return {
            "tokens_per_second": tokens / sum(turn[at] for turn in self.seconds for at in indices),
            "mean_accepted_tokens": tokens / sum(one.num_rounds for one in some),
        }


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
