"""What is refused, and how: in one sentence."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from fly_jax.errors import FlyJaxError


def sentence(call: Callable[..., object], *given: Any, **named: Any) -> str:
    """What the call complains about, which is one sentence."""
    with pytest.raises(FlyJaxError) as error:
        call(*given, **named)
    text = str(error.value)
    assert text.endswith((".", "…"))
    assert "\n" not in text
    assert ". " not in text
    return text


def assert_refused(words: str, call: Callable[..., object], *given: Any, **named: Any) -> None:
    """The call is refused in a sentence in which this expression is found."""
    text = sentence(call, *given, **named)
    assert re.search(words, text), text
