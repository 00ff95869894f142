"""The loosened rules, by name, and as text: "fly", "fly & margin", "(fly | csd) & margin"."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar, get_args

from fly_jax.errors import FlyJaxError
from fly_jax.parameters import MOST_TOKENS, parameter
from fly_jax.verification.data import Count, Number, data_tree, log
from fly_jax.verification.evidence import Entropy, EntropyMeasure
from fly_jax.verification.rules import conditions
from fly_jax.verification.rules.conditions import Clause, Window, WindowKind
from fly_jax.verification.rules.rule import Loose, check_size


@data_tree
class Fly(Loose):
    """FLy: keeps a mismatch that an undecided target then goes along with (arXiv 2511.22972).

    The mismatch at position j (from 1) of a block of K draft tokens is rescued iff
      - the gate is open: the target's entropy at j is at least `entropy_threshold`;
      - its deferred window is clean: the lossless rule accepts j+1 .. j+W (W = `window_size`), each
        considered on its own, so that a second mismatch in the window refuses the first one even
        where it would itself be rescued;
      - the window fits into the block: j + W <= K;
      - the target gives the draft token a probability above 0 (in float32; with sampling, also
        after top-k and top-p), and neither it nor the target's argmax is protected.

    With sampling the emitted distribution is moved towards the draft's, at undecided positions, by
    the probability that the draft token is refused and its window clean. The gate always sees
    untempered logits.

    Attributes:
      entropy_threshold: in the unit of `entropy`; `GATE_OFF` or less switches the gate off.
      window_size: W; 0 rescues every mismatch that passes the gate.
      entropy: an `Entropy.measure`. The published results come from "top_k" with 0.3; with
        "normalized", the formula printed in the paper, 0.3 rescues almost nothing.
      window: "paper", or "reference" for FLy's reference code, which looks at j+1 .. j+W-1 only and
        yet demands j + W <= K.
    """

    entropy_threshold: Number = parameter(
        0.3,
        "fly: least entropy of the target for a mismatch to be kept; 0.01 or less for no gate",
        low=0.0,
    )
    window_size: Count = parameter(
        6, "fly: draft tokens after a mismatch that must match for it to be kept",
        low=0, high=MOST_TOKENS,
    )  # fmt: skip
    entropy: EntropyMeasure = parameter(
        "top_k", "fly: what the threshold is compared with",
        choices=get_args(EntropyMeasure), static=True,
    )  # fmt: skip
    entropy_top_k: int = parameter(
        3, "fly: tokens that the entropy top_k looks at", low=1, high=MOST_TOKENS, static=True
    )
    window: WindowKind = parameter(
        "paper",
        "fly: the window of the paper, or that of the reference code, which is one shorter",
        choices=get_args(WindowKind), flag=False, static=True,
    )  # fmt: skip

    def clauses(self) -> tuple[Clause, ...]:
        """The gate and the deferred window."""
        entropy = Entropy(self.entropy, self.entropy_top_k)
        gate = conditions.Undecided(self.entropy_threshold, entropy)
        return (Clause((gate,), (Window(self.window_size, self.window),)),)


@data_tree
class Csd(Loose):
    """CSD, calibrated speculative decoding: rescues frequent corrections of little consequence.

    Zhou et al., arXiv 2604.13634, for greedy decoding. The mismatch of draft token x is rescued iff
      - the memory has seen the target's choice take the place of x more than lambda times (lambda
        is the memory's `min_count`);
      - z(x) - max z >= ln(`consistency`), in raw logits: x is at least so probable, relative to the
        target's choice.

    Attributes:
      consistency: tau; 0 demands nothing, and None leaves this half out of the program.
      memory: False leaves the other half out; FlyJaxError for both left out.
    """

    consistency: Number | None = parameter(
        0.01,
        "csd: least probability of the draft's token, as a share of that of the target's choice; "
        "0 for no such demand",
        name="csd_consistency", low=0.0, high=1.0,
    )  # fmt: skip
    memory: bool = parameter(
        True, "csd: keep only what the memory knows to be corrected often",
        name="csd_memory", static=True,
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        # The content of an array is data.
        given = self.consistency if isinstance(self.consistency, int | float) else None
        if not self.memory and (self.consistency is None or given == 0):
            raise FlyJaxError(
                "The rule csd was given neither its memory nor its consistency gate; leave at "
                "least one of them on."
            )

    def clauses(self) -> tuple[Clause, ...]:
        """The halves that are on, in one clause."""
        near = () if self.consistency is None else (conditions.Near(-log(self.consistency)),)
        return (Clause((*near, *((conditions.Remembered(),) if self.memory else ()))),)


@data_tree
class Lossy(Loose):
    """Rescues a token of at least a fixed probability in the plain softmax: p(x) >= `threshold`.

    In greedy decoding a threshold above 0.5 rescues nothing: a token that probable is the target's
    own choice.
    """

    threshold: Number = parameter(
        0.3, "lossy: least probability of the draft's token",
        name="lossy_threshold", above=0.0, high=1.0,
    )  # fmt: skip

    def clauses(self) -> tuple[Clause, ...]:
        """The least probability of the draft token, as one clause."""
        return (Clause((conditions.Probable(self.threshold),)),)


@data_tree
class Lenience(Loose):
    """A rule of sampling that asks less of the draft, by l (appendix of arXiv 2211.17192).

    When sampling, a draft token x ~ q is kept with probability min(1, p(x) / (l q(x))), by the draw
    of the lossless rule, which is l = 1; a token that is not kept is replaced as by that rule. No
    token is then emitted with more than 1/l times its probability. What l = 1 would refuse counts
    as rescued. Greedy decoding is the limit of temperature 0 with the plain softmax on both sides:
    x is kept iff p(x) >= l max p.
    """

    lenience: Number = parameter(
        0.5, "lenience: by how much less the draft's token has to be probable",
        above=0.0, high=1.0,
    )  # fmt: skip

    def clauses(self) -> tuple[Clause, ...]:
        """The lenient draw, or the ratio."""
        return (Clause((conditions.Lenient(self.lenience),)),)


@data_tree
class Typical(Loose):
    """Medusa's typical acceptance (arXiv 2401.10774): p(x) > min(`epsilon`, `delta` exp(-H)).

    H is the entropy of the target's plain softmax, in nats: the flatter it is, the less is asked.
    """

    epsilon: Number = parameter(
        0.09, "typical: probability that is enough anywhere",
        name="typical_epsilon", above=0.0, high=1.0,
    )  # fmt: skip
    delta: Number = parameter(
        0.3, "typical: probability that is enough where the target is sure",
        name="typical_delta", above=0.0, high=1.0,
    )  # fmt: skip

    def clauses(self) -> tuple[Clause, ...]:
        """The threshold that moves with the entropy."""
        return (Clause((conditions.TypicalEnough(self.epsilon, self.delta),)),)


@data_tree
class Margin(Loose):
    """Rescues a token that is nearly the target's choice: max ln p - ln p(x) <= `gap`, in nats."""

    gap: Number = parameter(
        0.3,
        "margin: most nats that the draft's token may be less probable than the target's choice",
        name="margin_gap", low=0.0,
    )  # fmt: skip

    def clauses(self) -> tuple[Clause, ...]:
        """The margin between the logits, as one clause."""
        return (Clause((conditions.Near(self.gap),)),)


RULES: dict[str, type[Loose]] = {
    rule.__name__.lower(): rule for rule in (Fly, Csd, Lossy, Lenience, Typical, Margin)
}
# vLLM's words for FLy, and ours.
VLLM_NAMES = {
    "rejection_sample_method": "rule", "fly_window_size": "window_size",
    "fly_entropy_threshold": "entropy_threshold", "fly_entropy_top_k": "entropy_top_k",
}  # fmt: skip


def from_vllm_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters by our names, of ours and vLLM's; FlyJaxError for one given two values."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        ours = VLLM_NAMES.get(name, name)
        if found.setdefault(ours, value) != value:
            raise FlyJaxError(
                f"{ours} is {found[ours]!r} and {value!r}, once by vLLM's name; give it once."
            )
    return found


LOSSLESS_RULES = ("autoregressive", "exact", "sampled")

_OPERATORS: dict[type, Callable[..., Any]] = {ast.BitAnd: operator.and_, ast.BitOr: operator.or_}
_Rule = TypeVar("_Rule")
_LONGEST_TEXT = 256  # so that none is nested too deeply to be read


def rule_names(text: str, parameter: str = "rule") -> tuple[str, ...]:
    """The rules that an expression, the value of this parameter, is made of, in its order.

    FlyJaxError: no such expression, an unknown or too many rules, or a lossless one among others.
    """
    names, num_alternatives = combined(text, lambda name: _Size((name,), 1), parameter)
    for name in names:
        if name not in (*LOSSLESS_RULES, *RULES):
            raise FlyJaxError(
                f"{parameter} is {text!r} and there is no rule {name!r}; the rules are "
                f"{', '.join((*LOSSLESS_RULES, *RULES))}."
            )
        if name in LOSSLESS_RULES and len(names) > 1:
            raise FlyJaxError(
                f"{parameter} is {text!r}, and {name} is lossless, which nothing can be added to "
                f"or taken from; combine only {', '.join(RULES)}."
            )
    if len(names) > 1:
        check_size(f"{parameter} is {text!r}, which", len(names), num_alternatives)
    return names


class _Size(NamedTuple):
    """The names in an expression, and the number of alternatives that its rule would have."""

    names: tuple[str, ...]
    num_alternatives: int

    def __and__(self, other: _Size) -> _Size:
        return _Size(self.names + other.names, self.num_alternatives * other.num_alternatives)

    def __or__(self, other: _Size) -> _Size:
        return _Size(self.names + other.names, self.num_alternatives + other.num_alternatives)


def combined(text: str, of_name: Callable[[str], _Rule], parameter: str = "rule") -> _Rule:
    """The value of an expression, whose operators join the values of its names."""
    no_expression = FlyJaxError(
        f"{parameter} is {text[:_LONGEST_TEXT]!r}; it must be the name of a rule, or names joined "
        "by & (what both would keep), | (what either would keep) and parentheses, such as "
        f"'fly & margin', in at most {_LONGEST_TEXT} characters."
    )
    if len(text) > _LONGEST_TEXT:
        raise no_expression
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise no_expression from error

    def value(node: ast.expr) -> _Rule:
        if isinstance(node, ast.Name):
            return of_name(node.id)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            joined: _Rule = _OPERATORS[type(node.op)](value(node.left), value(node.right))
            return joined
        raise no_expression

    return value(tree)
