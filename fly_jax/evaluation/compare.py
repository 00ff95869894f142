"""Rules side by side on the same prompts in one run: how fast, and how well."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

from fly_jax.decoding.config import DecodingConfig, Depth, Drafting
from fly_jax.decoding.drafters.lookup import Lookup
from fly_jax.decoding.pair import Pair
from fly_jax.engine.engine import Engine
from fly_jax.engine.request import Generation
from fly_jax.errors import FlyJaxError
from fly_jax.evaluation.audit_summary import aligned
from fly_jax.verification.correction_memory import CorrectionMemory
from fly_jax.verification.rules import Fly

# Prompts that a rule decodes before the next one's turn, for each slot, where there are several.
_TURNS = 4


@dataclasses.dataclass(frozen=True)
class RuleResult:
    """The figures of one rule on all prompts.

    Attributes:
      num_tokens: settled.
      seconds: of decoding; prefill and compilation are not counted.
      num_rounds: target passes, each row's own.
      num_draft_tokens: draft tokens that the target saw.
      num_accepted_tokens: those it kept, rescued ones included.
      num_rescued_tokens: mismatches kept.
      num_checked: prompts whose continuation can be checked.
      texts: every prompt's continuation.
    """

    name: str
    num_tokens: int
    seconds: float
    num_rounds: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_rescued_tokens: int
    num_checked: int
    num_correct: int
    texts: tuple[str, ...]

    @property
    def tokens_per_second(self) -> float:
        """All tokens over all seconds."""
        return self.num_tokens / self.seconds if self.seconds else 0.0

    @property
    def mean_accepted_tokens(self) -> float:
        """Settled tokens per target pass, bonus included."""
        return self.num_tokens / max(self.num_rounds, 1)

    @property
    def rescued_per_100_tokens(self) -> float:
        """Rescued mismatches in a hundred settled tokens."""
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

    def to_dict(self) -> dict[str, dict[str, float | int | None]]:
        """Every figure, by rule."""
        figures = {}
        for result in self.results:
            counted = dataclasses.asdict(result)
            del counted["texts"]
            figures[counted.pop("name")] = counted | {
                "tokens_per_second": result.tokens_per_second,
                "speed_up": self.speed_up(result),
                "mean_accepted_tokens": result.mean_accepted_tokens,
                "rescued_per_100_tokens": result.rescued_per_100_tokens,
                "retention": self.retention(result),
            }
        return figures

    def table(self) -> str:
        """An aligned text table with a line for every rule."""
        cells = [self._cells(result) for result in self.results]
        lines = aligned([tuple(cells[0]), *(tuple(row.values()) for row in cells)])
        lines.insert(1, "-" * len(lines[0]))
        return "\n".join(lines)

    def _cells(self, result: RuleResult) -> dict[str, str]:
        retention = self.retention(result)
        checked = f"{result.num_correct}/{result.num_checked}"
        return {
            "rule": result.name,
            "tokens/s": f"{result.tokens_per_second:.1f}",
            "speed-up": f"{self.speed_up(result):.2f}x",
            "mean accepted": f"{result.mean_accepted_tokens:.2f}",
            "rescued": str(result.num_rescued_tokens),
            "per 100 tokens": f"{result.rescued_per_100_tokens:.1f}",
            "correct": checked if result.num_checked else "-",
            "retention": "-" if retention is None else f"{retention:.1%}",
        }


def three_rules(
    fly: Fly | None = None,
    num_speculative_tokens: Depth = Drafting.num_speculative_tokens,
    lookup: Lookup | None = None,
) -> dict[str, DecodingConfig]:
    """Greedy decoding one token at a time, with exact speculation, and with FLy."""
    config = DecodingConfig(num_speculative_tokens=num_speculative_tokens, lookup=lookup)
    return {
        "autoregressive": config.replace(rule="autoregressive"),
        "exact": config.replace(rule="exact"),
        "fly": config.replace(rule=fly or "fly"),
    }


def compare(
    pair: Pair,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    configs: Mapping[str, DecodingConfig] | None = None,
    *,
    max_new_tokens: int = 128,
    batch_size: int = 1,
    seed: int = 0,
    check: Callable[[int, str], bool | None] | None = None,
    memory: CorrectionMemory | None = None,
) -> Comparison:
    """Decodes the same prompts with every rule, in turns, a few prompts at a time.

    Everything is compiled before the first measurement. The rules have an engine each, of which
    only the one that decodes has its caches.

    Args:
      pair: from `load_pair`, with a draft model.
      configs: the rules by name, the baseline first; `three_rules` if not given.
      check: given a prompt's index and its continuation, whether that is correct; None where that
        cannot be said.
      memory: what every rule that uses one begins with; it is copied.

    Raises:
      FlyJaxError: no prompt, an empty one, one longer than the context, or no draft model.
    """
    if not prompts:
        raise FlyJaxError("No prompt was given; a comparison needs at least one.")
    configs = three_rules() if configs is None else configs
    ids: Sequence[Sequence[int]] = [
        pair.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts
    ]
    engines = {
        name: Engine.of(
            pair,
            config,
            prompts=ids,
            max_new_tokens=max_new_tokens,
            num_slots=batch_size,
            memory=memory.copy() if memory is not None and config.to_rule().uses_memory else None,
            with_texts=False,
        )
        for name, config in configs.items()
    }
    for engine in engines.values():
        engine.warm_up_for(engine.requests(ids, max_new_tokens))
        engine.forget()
    generations: dict[str, list[Generation]] = {name: [] for name in engines}
    seconds = dict.fromkeys(engines, 0.0)
    size = batch_size if batch_size == 1 else _TURNS * batch_size
    for first in range(0, len(ids), size):
        some = ids[first : first + size]
        for name, engine in engines.items():
            start, prefilled = time.perf_counter(), engine.prefill_seconds
            generations[name] += engine.generate(some, max_new_tokens, seed=seed + first)
            taken = time.perf_counter() - start
            seconds[name] += taken - (engine.prefill_seconds - prefilled)
            engine.forget()
    return Comparison(
        tuple(_result(pair, name, generations[name], seconds[name], check) for name in engines)
    )


def _result(
    pair: Pair,
    name: str,
    generations: list[Generation],
    seconds: float,
    check: Callable[[int, str], bool | None] | None,
) -> RuleResult:
    texts = tuple(pair.tokenizer.decode(one.token_ids, continues=True) for one in generations)
    verdicts = [check(index, text) for index, text in enumerate(texts)] if check else []
    return RuleResult(
        name=name,
        num_tokens=sum(len(one.token_ids) for one in generations),
        seconds=seconds,
        num_rounds=sum(one.num_rounds for one in generations),
        num_draft_tokens=sum(one.num_draft_tokens for one in generations),
        num_accepted_tokens=sum(one.num_accepted_tokens for one in generations),
        num_rescued_tokens=sum(one.num_rescued_tokens for one in generations),
        num_checked=sum(verdict is not None for verdict in verdicts),
        num_correct=sum(verdict is True for verdict in verdicts),
        texts=texts,
    )
