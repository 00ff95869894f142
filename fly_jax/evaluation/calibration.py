"""Calibration from prompts without answers: a memory of corrections, or a gate within a bound."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from fly_jax.decoding.config import DecodingConfig
from fly_jax.decoding.pair import Pair
from fly_jax.engine.engine import Engine
from fly_jax.errors import FlyJaxError
from fly_jax.evaluation.replay import Rounds, Tally, record, replay, tally
from fly_jax.evaluation.strictness import Bound, strictness_of, windows_of
from fly_jax.sharding.processes import broadcast, joint_errors, process_id
from fly_jax.verification.correction_memory import CorrectionMemory, load_memory
from fly_jax.verification.rules import Budget, Loose, Rule
from fly_jax.verification.rules.loosened import rule_names

_SECONDS_BETWEEN_SAVES = 10.0
# Prompts for each slot of the engine that are counted at a time.
_BATCHES = 4
MIN_PROMPTS = 8
_VALUES = 97
_DRAWS = 10_000
# A measured risk scatters around its promise: to aim at the bound itself would miss it in every
# other try, each of which is compiled.
_AIM = 0.95


def fill_memory(
    pair: Pair, prompts: Sequence[Sequence[int]], path: Path, *, num_speculative_tokens: int,
    models: str, max_new_tokens: int = 128, batch_size: int = 1,
) -> CorrectionMemory:  # fmt: skip
    """Decodes the prompts exactly and counts the corrections (CSD's initialisation).

    The memory is saved now and then and at the end; an interrupted run goes on after the last whole
    batch in the file. Where several processes decode on one mesh, all see the corrections of all
    rows, and the first one has the file; the others return what they counted. `models` tells this
    pair from others, so that a run does not go on with another one. FlyJaxError where the file
    cannot be written, or is no memory of this vocabulary and of this run.
    """
    settings = num_speculative_tokens, max_new_tokens, models
    memory, start = begin_memory(path, pair.tokenizer.digest, prompts, *settings)
    is_first = process_id() == 0
    run = json.loads(memory.note)["run"] if is_first else None
    config = pair.config(rule="exact", num_speculative_tokens=num_speculative_tokens)
    engine = Engine.of(
        pair, config, prompts=prompts, max_new_tokens=max_new_tokens, num_slots=batch_size,
        reports_mismatches=True, with_texts=False,
    )  # fmt: skip
    rows = _BATCHES * batch_size
    saved_at = time.monotonic()
    try:
        with tqdm(total=len(prompts), initial=start, unit="prompt", disable=not is_first) as bar:
            for first in range(start, len(prompts), rows):
                batch = prompts[first : first + rows]
                engine.memory = CorrectionMemory(memory.vocabulary)
                engine.generate(batch, max_new_tokens)
                # Only whole batches are counted, so that none is counted twice.
                memory = engine.memory.merged(memory)
                memory.note = json.dumps({"run": run, "done": first + len(batch)})
                bar.set_postfix(pairs=len(memory), refresh=False)
                bar.update(len(batch))
                if is_first and time.monotonic() - saved_at > _SECONDS_BETWEEN_SAVES:
                    memory.save(path)
                    saved_at = time.monotonic()
    finally:
        if is_first:
            memory.save(path)
    return memory


def begin_memory(
    path: Path, vocabulary: str, prompts: Sequence[Sequence[int]], *settings: int | str
) -> tuple[CorrectionMemory, int]:
    """The memory that `fill_memory` goes on with, and the number of prompts that it has counted.

    Its K, `max_new_tokens` and `models` are the settings. Every process calls it, and process 0
    looks at the file; its FlyJaxError is raised on all.
    """
    run = hashlib.sha256(json.dumps([list(map(list, prompts)), *settings]).encode()).hexdigest()
    memory, found, done = CorrectionMemory(vocabulary), None, 0
    with joint_errors():
        if process_id() == 0 and path.exists():
            memory = load_memory(path, vocabulary)
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                note = json.loads(memory.note)
                found, done = note["run"], int(note.get("done", 0))
            if found != run:
                raise FlyJaxError(
                    f"{path} holds the counts of another run (other prompts, models or sizes); "
                    "give another file to fill, or delete this one."
                )
        elif process_id() == 0:
            memory.note = json.dumps({"run": run})
            memory.save(path)  # a path that cannot be written is found before any work is done
    return memory, broadcast(done)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A setting, and the figures of its replay on exact decoding's rounds; risk is per token."""

    config: DecodingConfig
    rate: float
    mean_accepted_tokens: float


@dataclasses.dataclass(frozen=True)
class Gate:
    """A setting that meets a bound, and its figures on prompts that it was not found on."""

    config: DecodingConfig
    varied: tuple[str, ...]  # the names of what was varied in the config
    bound: Bound
    checked: Tally  # those prompts, decoded with it
    exact: Tally  # and exactly
    num_tried: int  # settings that were decoded with; all but the last missed the bound

    @property
    def rate(self) -> float:
        """The risk per token, on the prompts to check."""
        return self.bound.rate(self.checked)

    @property
    def upper(self) -> float:
        """End of the one-sided 95% interval of `rate`, from prompts that are drawn anew."""
        return upper_bound(self.bound.of(self.checked), self.checked.tokens)

    def summary(self) -> str:
        """A few lines of text for the file and for people."""
        chosen = ", ".join(f"{name} = {self.config.to_dict()[name]}" for name in self.varied)
        checked, bound = self.checked, self.bound
        upper = f"with 95% confidence at most {bound.in_words(self.upper)}"
        other = Bound("regret" if bound.risk == "disagreement" else "disagreement", 1.0)
        return (
            f"The rule {self.config.rule} with {chosen} keeps to at most "
            f"{bound.in_words(bound.limit)}.\n"
            f"On {len(checked.tokens)} prompts that it was not found on "
            f"({int(checked.tokens.sum())} tokens): {bound.in_words(self.rate)},\n"
            f"{upper if self.upper else 'too few to be sure of more'}; "
            f"{other.in_words(other.rate(checked))};\n"
            f"{checked.mean_accepted_tokens:.2f} mean accepted tokens, "
            f"{self.exact.mean_accepted_tokens:.2f} with exact decoding and the same K.\n"
            f"Settings decoded with: {self.num_tried}."
        )


def upper_bound(amounts: np.ndarray, tokens: np.ndarray, *, confidence: float = 0.95) -> float:
    """The upper end of a one-sided bootstrap interval of amounts over tokens, by prompts."""
    draws = np.random.default_rng(0).integers(len(tokens), size=(_DRAWS, len(tokens)))
    rates = amounts[draws].sum(axis=1) / np.maximum(tokens[draws].sum(axis=1), 1)
    return float(np.quantile(rates, confidence))


def find_gate(
    pair: Pair, prompts: Sequence[Sequence[int]], config: DecodingConfig, bound: Bound, *,
    window_size: int | None = None, max_new_tokens: int = 128, batch_size: int = 1,
) -> Gate:  # fmt: skip
    """Finds a rule's strictness, and FLy's window, for a bound; FlyJaxError where none meets it.

    Every other prompt is to search with, and the rest to check. The prompts to search with are
    decoded exactly, and each round is judged with every setting. The setting that promises most
    mean accepted tokens within the bound is decoded with. A rescue changes the text that follows,
    so its risk may exceed the promise: the next promise must then be lower, in proportion. A
    setting that has met the bound must also meet it on the prompts to check. A `window_size` that
    is None tries `WINDOWS`.
    """
    check_prompts(prompts)
    search, check = prompts[0::2], prompts[1::2]
    windows = windows_of(config, window_size)
    rule = config.replace(window_size=windows[0]).to_rule()
    assert isinstance(rule, Loose)
    with tqdm(unit="prompt", disable=process_id() != 0) as bar:

        def decode(engine: Engine, some: Sequence[Sequence[int]]) -> Rounds:
            bar.total = (bar.total or 0) + len(some)
            return record(engine, some, max_new_tokens, bar)

        def engine_of(one: Rule) -> Engine:
            return Engine.of(
                pair, config, rule=one, prompts=prompts, max_new_tokens=max_new_tokens,
                num_slots=batch_size, reports_evidence=True, with_texts=False,
            )  # fmt: skip

        bar.set_description("exact decoding")
        lossless = engine_of(Budget(rule, 0.0))  # which has the rule's evidence
        rounds, exact = decode(lossless, search), tally(decode(lossless, check))
        found = list(candidates(pair, rounds, config, bound, windows))
        allowed = bound.limit
        for num_tried in itertools.count(1):
            if (candidate := best(found, allowed)) is None:
                break
            shown = candidate.config.to_dict()
            bar.set_description(", ".join(f"{name}={shown[name]}" for name in varied(config)))
            engine = engine_of(candidate.config.to_rule())
            for some in (search, check):
                seen = tally(decode(engine, some))
                if (rate := bound.rate(seen)) > bound.limit:
                    allowed = _AIM * min(allowed, candidate.rate) * bound.limit / rate
                    found.remove(candidate)
                    break
            else:
                return Gate(candidate.config, varied(config), bound, seen, exact, num_tried)
    raise FlyJaxError(
        f"No setting of the rule {config.rule} that rescues anything keeps to at most "
        f"{bound.in_words(bound.limit)} on these prompts; allow more, give more prompts, or decode "
        "with the rule exact."
    )


def check_prompts(prompts: Sequence[object]) -> None:
    """Raises FlyJaxError for too few prompts to search and check with."""
    if len(prompts) < MIN_PROMPTS:
        raise FlyJaxError(
            f"There are {len(prompts)} prompts to calibrate with, half of them to search and half "
            f"to check; give at least {MIN_PROMPTS}, better some hundred."
        )


def candidates(
    pair: Pair, rounds: Rounds, config: DecodingConfig, bound: Bound, windows: Sequence[int]
) -> Iterator[Candidate]:
    """Yields the settings that would have rescued something in these rounds."""
    strictness, eos = strictness_of(config), pair.tokenizer.eos_token_ids
    ids = [*pair.protected_token_ids(config.limits.protect), *eos]
    protected = np.isin(np.arange(pair.target.config.vocab_size), ids)
    for value in strictness.values(rounds, _VALUES):
        for size in windows:
            one = config.replace(**{strictness.name: value, "window_size": size})
            seen = tally(replay(rounds, one.to_rule(), protected=protected, eos_token_ids=eos))
            if seen.rescues.any():
                yield Candidate(one, bound.rate(seen), seen.mean_accepted_tokens)


def best(found: Sequence[Candidate], allowed: float) -> Candidate | None:
    """The candidate with most mean accepted tokens within the risk; of equals the least risky."""
    merits = [(one.mean_accepted_tokens, -one.rate, at) for at, one in enumerate(found)]
    best = max((merit for merit in merits if -merit[1] <= allowed), default=None)
    at = broadcast(None if best is None else best[2])  # all processes decode with the same
    return None if at is None else found[at]


def varied(config: DecodingConfig) -> tuple[str, ...]:
    """The names of what is varied in a config."""
    windows = ("window_size",) if "fly" in rule_names(config.rule) else ()
    return (strictness_of(config).name, *windows)
