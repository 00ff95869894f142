"""Regular expressions that pick tokens by their text, such as those never to be rescued."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fly_jax.errors import FlyJaxError


def compile_patterns(patterns: Sequence[str]) -> list[re.Pattern[str]]:
    """The regular expressions, as of the module `re`.

    Raises:
      FlyJaxError: one that is none.
    """
    compiled = []
    for pattern in patterns:
        try:
            compiled.append(re.compile(pattern))
        except (re.error, OverflowError, RecursionError) as error:
            reason = " ".join(str(error).split())
            raise FlyJaxError(
                f"protect is {pattern!r}, which is no regular expression ({reason}); correct it, "
                r"or give one such as '\d'."
            ) from error
    return compiled
