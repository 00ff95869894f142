"""Attacks at random, on servers and on files, and whether a reply to one is in order."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import math
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests" / "helpers"))
from attacks import CHAT, FOREIGN_HOSTS, JSON, NUMBERS, TEXT, Attack, asking

RULES = [  # of 139 to 256 characters, which multiplied out have up to 2^40 alternatives
    Attack(TEXT, asking(fly={"rule": rule}), "rule is")
    for rule in ("&".join(["(fly|fly)"] * 14), "&".join(["(fly|margin)"] * 19), "(" * 256,
                 "&".join(["(a|b)"] * 42), "fly|" * 63, "!" * 256)
]  # fmt: skip

FOREIGN = [
    Attack(path, asking(), "--allowed_hosts", JSON | {"Host": name})
    for name, path in itertools.product(FOREIGN_HOSTS, (TEXT, CHAT, "/health"))
]


def fault(status: int, content: bytes) -> str | None:
    """What is wrong with a reply, which is a success or a refusal in one sentence."""
    if 200 <= status < 300 and b'"server_error"' not in content:
        return None
    message = ""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        message = json.loads(content)["error"]["message"]
    is_sentence = message.endswith((".", "…")) and len(message.splitlines()) == 1
    return None if 400 <= status < 500 and is_sentence else f"HTTP {status}: {content[:500]!r}"


_DIGITS = (b"-1", b"0", b"1e999", b"99999999999999999999", b"4294967296", b"null", b"[]", b'"x"')


def altered(content: bytes, chance: random.Random) -> bytes:
    """The content with one to three faults."""
    for _ in range(chance.randint(1, 3)):
        # Mostly near the beginning, where what describes the rest is.
        size = len(content)
        at = chance.randrange(min(size, 4096) if chance.random() < 0.7 else size) if size else 0
        kind, put, end = chance.randrange(6), b"", size  # what is put in place of content[at:end]
        if kind == 1:
            put, end = bytes([chance.randrange(256)]), at + 1
        elif kind == 2:
            put, end = chance.randbytes(8), at + 8
        elif kind == 3:
            end = min(at + chance.randrange(1, 64), size)
            put = content[at:end] * (1 + chance.randint(1, 50))
        elif kind == 4:
            value = chance.choice((2**31, 2**32 - 1, 2**63, 2**64 - 1, 400_000))
            put, end = value.to_bytes(8, "little"), at + 8
        elif kind == 5:
            end = at
            digits = [i for i, byte in enumerate(content[:20_000]) if chr(byte).isdigit()]
            if digits:
                at = chance.choice(digits)
                put, end = chance.choice(_DIGITS), at + 1
        content = content[:at] + put + content[end:]
    return content


_COMMON = {
    "model": None, "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "n": 2, "seed": 1,
    "stop": ["\n\n", "x"], "stream": False, "stream_options": {"include_usage": True},
    "ignore_eos": False, "cache_salt": "a", "user": "b", "frequency_penalty": 0,
    "fly": {"rule": "fly | margin", "margin_gap": 1.0, "window_size": 4, "entropy_threshold": 0.3,
            "risk_budget": 2.0, "protect": ["\\d"], "audit": True, "stream_why": True},
}  # fmt: skip
_PROMPTS = ("Ada has 3 apples.", [5, 6, 7, 8], ["Ada", "Boris"], [[5, 6], [7]])
_PARTS = [{"type": "text", "text": "and eats 2."}]
_MESSAGES = [{"role": "user", "content": "Ada has 3 apples"}, {"role": "user", "content": _PARTS}]
_DEEP = "a value many levels deep"
_VALUES = (
    *NUMBERS, 0, 2, 0.5, True, None, math.nan, math.inf, "", "x", "\ud800", "\0", "\u202e\ufeff",
    "é" * 300, "fly & " * 40, "(" * 200, [], {}, [[]], [None], [0] * 300, ["a", 1], {"": {}}, _DEEP,
)  # fmt: skip
_NAMES = ("", "prompt", "messages", "max_token", "rule", "echo", "\ud800", "é" * 99, "n\nn", "fly")
_TYPES = ("text/plain", "application/json; charset=utf-16", "multipart/form-data", "", "a/b+json")


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container within a value, with each of its keys."""
    for key in range(len(value)) if isinstance(value, list) else list(value):
        yield value, key
        if isinstance(value[key], (list, dict)):
            yield from _places(value[key])


def random_request(chance: random.Random) -> Attack:
    """A valid request to which something may have happened, be it to values, keys or bytes."""
    if chance.random() < 0.5:
        path, body, logprobs = (
            CHAT,
            {"messages": _MESSAGES},
            {"logprobs": True, "top_logprobs": 1},
        )
    else:
        path, body, logprobs = TEXT, {"prompt": chance.choice(_PROMPTS)}, {"logprobs": 1}
    optional = {key: value for key, value in _COMMON.items() if chance.random() < 0.4}
    if chance.random() < 0.3:
        optional |= logprobs
    body = copy.deepcopy({"max_tokens": 2, "stream": chance.random() < 0.2} | body | optional)
    for _ in range(chance.randrange(3)):
        holder, key = chance.choice(list(_places(body)))
        kind = chance.randrange(6)
        if kind == 0:
            del holder[key]
        elif kind == 1 and isinstance(holder, dict):
            holder[chance.choice(_NAMES)] = holder.pop(key)
        else:
            holder[key] = copy.deepcopy(chance.choice(_VALUES))
    text = json.dumps(body)
    levels = chance.choice((3, 300, 300_000))
    text = text.replace(f'"{_DEEP}"', "[" * levels + "]" * levels)
    if chance.random() < 0.1:  # the second of two equal keys counts
        text = text[:-1] + f', "{chance.choice(list(_COMMON))}": {chance.choice(NUMBERS)}}}'
    content = text.encode(chance.choice(("utf-8",) * 8 + ("utf-8-sig", "utf-16")))
    if chance.random() < 0.25:
        content = altered(content, chance) if chance.random() < 0.9 else chance.randbytes(200)
    kind = "application/json" if chance.random() < 0.9 else chance.choice(_TYPES)
    return Attack(path, content, headers={"Content-Type": kind})
