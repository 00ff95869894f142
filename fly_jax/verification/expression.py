"""Rules as text: "fly", "fly & margin", "(fly | csd) & margin"."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from fly_jax.errors import FlyJaxError
from fly_jax.verification.rules.registry import RULES

LOSSLESS_RULES = ("autoregressive", "exact", "sampled")

_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
}
_Rule = TypeVar("_Rule")


def rule_names(text: str) -> tuple[str, ...]:
    """The rules that an expression is made of, in its order.

    Raises:
      FlyJaxError: no expression of rules, an unknown rule, or a lossless rule in a combination.
    """
    names = tuple(_names(_parsed(text), text))
    for name in names:
        if name not in (*LOSSLESS_RULES, *RULES):
            raise FlyJaxError(
                f"rule is {text!r} and there is no rule {name!r}; the rules are "
                f"{', '.join((*LOSSLESS_RULES, *RULES))}."
            )
        if name in LOSSLESS_RULES and len(names) > 1:
            raise FlyJaxError(
                f"rule is {text!r}, and {name} is lossless, which nothing can be added to or taken "
                f"from; combine only {', '.join(RULES)}."
            )
    return names


def combined(text: str, rules: Mapping[str, _Rule]) -> _Rule:
    """The rule that a checked expression stands for.

    Args:
      text: has passed `rule_names`.
      rules: those that it names.
    """

    def evaluated(node: ast.expr) -> _Rule:
        if isinstance(node, ast.BinOp):
            joined: _Rule = _OPERATORS[type(node.op)](evaluated(node.left), evaluated(node.right))
            return joined
        assert isinstance(node, ast.Name)
        return rules[node.id]

    return evaluated(_parsed(text))


def _parsed(text: str) -> ast.expr:
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _no_expression(text) from error


def _names(node: ast.expr, text: str) -> Iterator[str]:
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        yield from _names(node.left, text)
        yield from _names(node.right, text)
    else:
        raise _no_expression(text)


def _no_expression(text: str) -> FlyJaxError:
    return FlyJaxError(
        f"rule is {text!r}; it must be the name of a rule, or names joined by & (what both would "
        "keep), | (what either would keep) and parentheses, such as 'fly & margin'."
    )
