"""Arithmetic word problems whose wording is free and whose numbers are determined.

A solution is written from templates. `[a|b|c]` in a template is a slot where one alternative is
drawn uniformly, and `[so]` draws from the shared list of that name. A model of this text is
therefore undecided exactly at the slots, and at a digit, a name or an object it is not: what
loosely speculative decoding needs in order to be judged by whether the answers stay right. Slots
are kept several tokens apart, so that two solutions that differ in one wording go on alike.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from fly_jax.evaluation.problems import Problem

Split = Literal["train", "development", "held_out"]

# With a word in front, a name is the same token at the start of a prompt as everywhere else.
PROMPT_PREFIX = "Problem: "
PROMPT_SUFFIX = "\nSolution:"

_HELD_OUT_PERCENT = 8
_DEVELOPMENT_PERCENT = 4

NAMES = tuple(
    """Ada Alma Amir Anton Asha Bela Boris Bruno Carla Carmen Cyrus Dana Darius Diego Edith Elena
    Emil Erik Farah Felix Fiona Gita Greta Hana Hector Hugo Ida Igor Ines Ivan Jonas Julia Kamal
    Karin Kenji Lara Leo Lena Lionel Lucia Mara Marco Milo Mina Nadia Nina Noah Nora Olga Omar
    Oscar Petra Priya Quinn Rafael Rosa Ruben Sami Selma Simon Sofia Tariq Tessa Theo Tomas Uma
    Vera Victor Wanda Yusuf Zara""".split()
)

_SINGULARS = tuple(
    """acorn almond apple badge balloon banana bead berry block book bottle bracelet brush button
    cake candle card carrot cherry chestnut coin cookie cork crayon cup daisy dish doll egg feather
    flag fossil glass grape hat jar kite ladle lemon letter magnet map marble medal melon mug
    muffin nut olive onion orange page peach peanut pear pebble pen pencil photo pin plate plum
    poster potato puzzle radish ribbon ring rose ruler shell spoon stamp star sticker stone
    ticket toy tulip whistle""".split()
)

_CONTAINERS = tuple("bag barrel basket bin box bucket case chest crate drawer tin tray".split())

_PLACES = tuple(
    """bakery barn beach camp castle clinic farm fair garden harbor hotel library market museum
    office park school shop station theater zoo""".split()
)


def _plural(singular: str) -> str:
    """The regular English plural, with the exceptions among our nouns."""
    if singular == "potato":
        return "potatoes"
    if singular.endswith(("s", "x", "ch", "sh")):
        return singular + "es"
    if singular.endswith("y") and singular[-2] not in "aeiou":
        return singular[:-1] + "ies"
    return singular + "s"


_PLURALS = {singular: _plural(singular) for singular in _SINGULARS}

# Every word that a solution has to copy from its prompt.
SUBJECTS = frozenset(
    {*NAMES, *_SINGULARS, *_PLURALS.values(), *_CONTAINERS, *_PLACES}
    | {_plural(container) for container in _CONTAINERS}
)

_WORDINGS = {
    "first": "First|Initially|To begin|At first|As a start|Clearly|Here|Originally",
    "next": "Next|Later|After that|Afterwards|Following this|Subsequently|Soon|Eventually",
    "so": "So|Thus|Hence|Then|Now|This means|As a result|Accordingly|Evidently",
    "total": "altogether|in total|in all|overall",
    "come": "come|arrive|follow|are added",
    "given": "given|handed|passed|sent",
    "kept": "kept|stored|held|lying",
    "makes": "makes|gives|is|equals|comes to",
    "ready": "ready|waiting|stored|prepared",
    "is": "is|equals|must be|comes to",
    "final": "Therefore|Finally|In the end|In conclusion|Consequently|To sum up|Overall|Ultimately",
}


@dataclass(frozen=True)
class _Cast:
    """Who and what a problem is about."""

    name: str
    other: str
    thing: str
    things: str
    container: str
    containers: str
    place: str


@dataclass(frozen=True)
class _Draft:
    """A problem before its slots are filled in."""

    question: str
    steps: tuple[str, ...]
    answer: int


def _amount(rng: random.Random, low: int = 12, high: int = 89) -> int:
    """An everyday number, now and then a round one of three digits."""
    return 10 * rng.randint(10, 30) if rng.random() < 0.12 else rng.randint(low, high)


def _part(rng: random.Random, whole: int) -> int:
    """A number that can be taken from `whole` and leaves more than one."""
    return rng.randint(3, min(whole - 2, 89))


def _product(left: int, right: int) -> str:
    """`left * right`, written out by tens and ones where no multiplication table has it."""
    product = f"{left} * {right} = "
    tens, ones = left - left % 10, left % 10
    if left > 12 and ones:
        product += f"{tens} * {right} + {ones} * {right} = {tens * right} + {ones * right} = "
    return product + str(left * right)


def _factors(rng: random.Random) -> tuple[int, int]:
    """A factor of up to two digits and a factor of one digit."""
    return rng.randint(3, 12) if rng.random() < 0.6 else rng.randint(13, 49), rng.randint(2, 9)


def _gain(rng: random.Random, c: _Cast) -> _Draft:
    a, b = _amount(rng), rng.randint(5, 99)
    return _Draft(
        f"{c.name} [has|keeps|stores] {a} {c.things} in a {c.container}. At the {c.place}, {c.name}"
        f" [finds|buys|gets] {b} more. How many {c.things} does {c.name} have [now|[total]]?",
        (
            f"[first], there are {a} {c.things} [kept] in the {c.container} of {c.name}.",
            f"[next], {b} more {c.things} [come] from the {c.place} for {c.name}.",
            f"[so] {c.name} has {a} + {b} = {a + b} {c.things} [total] at the end of the story.",
        ),
        a + b,
    )


def _loss(rng: random.Random, c: _Cast) -> _Draft:
    a = _amount(rng, 20, 99)
    b = _part(rng, a)
    return _Draft(
        f"{c.name} has {a} {c.things} in a {c.container} and [gives|hands|passes|sends]"
        f" {b} of them to {c.other}. How many {c.things} does {c.name} [still have|have left]?",
        (
            f"[first], there are {a} {c.things} [kept] in the {c.container} of {c.name}.",
            f"[next], {b} of the {c.things} are [given] over to {c.other} by {c.name}.",
            f"[so] {c.name} has {a} - {b} = {a - b} {c.things}"
            " [left|now|remaining|still] at the end of the story.",
            f"[Check|Indeed|Note|Proof]: {a - b} + {b} = {a}.",
        ),
        a - b,
    )


def _gain_and_loss(rng: random.Random, c: _Cast) -> _Draft:
    a, b = _amount(rng), rng.randint(5, 79)
    d = _part(rng, a + b)
    return _Draft(
        f"{c.name} [has|owns] {a} {c.things}, [buys|finds|gets] {b} more at the {c.place} and then"
        f" [gives|hands|passes|sends] {d} to {c.other}. How many {c.things} [are left|does"
        f" {c.name} have left]?",
        (
            f"[first], {b} more {c.things} [come] from the {c.place} for {c.name}.",
            f"This [makes] {a} + {b} = {a + b} {c.things} for {c.name}.",
            f"[next], {d} of these {c.things} are [given] over to {c.other} by {c.name}.",
            f"[so] {c.name} has {a + b} - {d} = {a + b - d} {c.things}"
            " [left|now|remaining|still] at the end of the story.",
        ),
        a + b - d,
    )


def _groups(rng: random.Random, c: _Cast) -> _Draft:
    each, n = _factors(rng)
    return _Draft(
        f"{c.name} [fills|packs|has] {n} {c.containers} with {each} {c.things} [each|in each one]"
        f" at the {c.place}. How many {c.things} [are there|does {c.name} have] [total]?",
        (
            f"[Each|Every|One|A single] {c.container} of {c.name} has {each} {c.things} [kept] in"
            f" it for the {c.place}.",
            f"[Now|Here|Today] there are {n} {c.containers} at the {c.place}.",
            f"[so] {c.name} has {_product(each, n)} {c.things} [total] at the end of the story.",
        ),
        each * n,
    )


def _groups_and_gain(rng: random.Random, c: _Cast) -> _Draft:
    (each, n), b = _factors(rng), rng.randint(5, 89)
    return _Draft(
        f"{c.name} has {n} {c.containers} of {each} {c.things} each, and {c.other}"
        f" [gives|hands|sends] {c.name} {b} more {c.things}. How many {c.things} [are there|does"
        f" {c.name} have] [[total]|now]?",
        (
            f"[first], the {n} {c.containers} of {c.name} [hold|contain|have in them]"
            f" {_product(each, n)} {c.things}.",
            f"[next], {b} more {c.things} are [given] over to {c.name} by {c.other}.",
            f"[so] {c.name} has {each * n} + {b} = {each * n + b} {c.things} [total] at the end of"
            " the story.",
        ),
        each * n + b,
    )


def _groups_and_loss(rng: random.Random, c: _Cast) -> _Draft:
    each, n = _factors(rng)
    whole = each * n
    b = _part(rng, whole)
    return _Draft(
        f"{c.name} [takes|brings|carries] {n} {c.containers} of {each} {c.things} each to the"
        f" {c.place} and [sells|loses|uses] {b} of the {c.things}. How many {c.things} [remain|are"
        f" left|does {c.name} still have]?",
        (
            f"[first], {c.name} has {_product(each, n)} {c.things} [ready] at the {c.place} for"
            " this day.",
            f"[Of|From|Among] these {c.things}, {b} are [gone|taken|missing] by the end of the"
            " day.",
            f"[so] {c.name} has {whole} - {b} = {whole - b} {c.things}"
            " [left|now|remaining|still] at the end of the story.",
        ),
        whole - b,
    )


def _change(rng: random.Random, c: _Cast) -> _Draft:
    n, price = rng.randint(2, 9), rng.randint(2, 12)
    cost = n * price
    paid = rng.choice([note for note in range(10, 161, 10) if cost + 2 <= note <= cost + 60])
    return _Draft(
        f"At the {c.place}, [one|each|a] {c.thing} costs ${price}. {c.name} buys {n} {c.things} and"
        f" pays with ${paid}. How [much change|many dollars of change] does {c.name} get?",
        (
            f"[first], {n} {c.things} at ${price} each [cost|amount to|come to|are]"
            f" {n} * {price} = {cost} dollars.",
            f"[next], {c.name} has {paid} dollars [ready|there|in hand] to pay for the {c.things}.",
            f"[so] {c.name} gets {paid} - {cost} = {paid - cost} dollars"
            f" [back|returned|in change|in coins] from the {c.place} on this day.",
        ),
        paid - cost,
    )


def _share(rng: random.Random, c: _Cast) -> _Draft:
    n, each, extra = rng.randint(2, 9), rng.randint(3, 12), rng.randint(3, 60)
    whole = n * each
    return _Draft(
        f"{c.name} has {whole + extra} {c.things}, keeps {extra} [at home|aside] and"
        f" [shares|splits] the rest equally [among|between] {n} {c.containers}. How many {c.things}"
        f" go into each {c.container}?",
        (
            f"[first], {c.name} keeps {extra} of the {whole + extra} {c.things}"
            " [aside|apart|back|away] and leaves the rest for later.",
            f"This leaves {whole + extra} - {extra} = {whole} {c.things} [meant|ready|set aside]"
            f" for the {n} {c.containers} of {c.name}.",
            f"[so] each {c.container} gets {whole} / {n} = {each} {c.things} [total] at the end of"
            " the story.",
        ),
        each,
    )


def _compare(rng: random.Random, c: _Cast) -> _Draft:
    a = _amount(rng, 20, 99)
    b = _part(rng, a)
    more = rng.random() < 0.5
    sign, word, theirs = ("+", "more", a + b) if more else ("-", "fewer", a - b)
    return _Draft(
        f"{c.name} has {a} {c.things}. {c.other} has {b} {word} {c.things} than {c.name}. How many"
        f" {c.things} do they have [[total]|together]?",
        (
            f"[first], {c.other} has {b} {word} than the {a} {c.things} [kept] in the house"
            f" of {c.name}.",
            f"[so] {c.other} has {a} {sign} {b} = {theirs} {c.things} [ready] at the house"
            f" of {c.other}.",
            f"[Together|Combined|Jointly|Counted together], {c.name} and {c.other} have"
            f" {a} + {theirs} = {a + theirs} {c.things} [total] at the end of the story.",
        ),
        a + theirs,
    )


def _times(rng: random.Random, c: _Cast) -> _Draft:
    each, n = _factors(rng)
    theirs = each * n
    return _Draft(
        f"At the {c.place}, {c.name} [finds|collects|sees] {each} {c.things} and {c.other}"
        f" {n} times as many. How many more {c.things} does {c.other} have?",
        (
            f"[first], {c.other} has {n} times the {each} {c.things} [kept] in the house of"
            f" {c.name}.",
            f"[so] {c.other} has {_product(each, n)} {c.things} [ready] at the {c.place} for"
            " this day.",
            f"[Compared with|Relative to|Next to|Against] {c.name}, this is"
            f" {theirs} - {each} = {theirs - each} {c.things} more.",
        ),
        theirs - each,
    )


def _days(rng: random.Random, c: _Cast) -> _Draft:
    a, b, d = (rng.randint(8, 79) for _ in range(3))
    return _Draft(
        f"{c.name} [sells|makes|counts] {a} {c.things} on Monday, {b} on Tuesday and {d} on"
        f" Wednesday at the {c.place}. How many {c.things} is that [total]?",
        (
            f"[first], {c.name} has {a} {c.things} [counted|noted|listed|marked] on Monday at the"
            f" {c.place}.",
            f"With {b} on Tuesday, this [makes] {a} + {b} = {a + b} {c.things}.",
            f"[next], {d} more {c.things} [follow|come|are added] on Wednesday at the {c.place}.",
            f"[so] {c.name} has {a + b} + {d} = {a + b + d} {c.things} [total] at the end of"
            " the story.",
        ),
        a + b + d,
    )


def _rate(rng: random.Random, c: _Cast) -> _Draft:
    (each, n), goal = _factors(rng), rng.randint(5, 80)
    done = each * n
    return _Draft(
        f"{c.name} needs {done + goal} {c.things} for the {c.place} and [makes|finds|gets] {each}"
        f" of them a day. How many {c.things} are [missing|still needed] after {n} days?",
        (
            f"[In|After|Within] {n} days, {c.name} has {_product(each, n)} {c.things}"
            f" [ready] for the {c.place} on this day.",
            f"[Yet|However|Still|But] the {c.place} needs {done + goal} {c.things} from {c.name}.",
            f"[so] {c.name} needs {done + goal} - {done} = {goal} {c.things} [more|still|yet] for"
            f" the {c.place} at the end.",
        ),
        goal,
    )


_FAMILIES: tuple[Callable[[random.Random, _Cast], _Draft], ...] = (
    _gain,
    _loss,
    _gain_and_loss,
    _groups,
    _groups_and_gain,
    _groups_and_loss,
    _change,
    _share,
    _compare,
    _times,
    _days,
    _rate,
)

_SLOT = re.compile(r"\[([^\[\]]+)\]")


def _worded(rng: random.Random, template: str, taste: int | None = None) -> str:
    """`template` with an alternative drawn for every slot, the innermost slots first."""

    def draw(slot: re.Match[str]) -> str:
        alternatives = _WORDINGS.get(slot[1], slot[1]).split("|")
        if taste is None:
            return rng.choice(alternatives)
        ranked = sorted(alternatives, key=lambda each: zlib.crc32(f"{taste}/{each}".encode()))
        return rng.choices(ranked, [0.5**rank for rank in range(len(ranked))])[0]

    filled = template
    while _SLOT.search(filled):
        filled = _SLOT.sub(draw, filled)
    return filled


def generate_problem(rng: random.Random, taste: int | None = None) -> Problem:
    """A problem and one of the many wordings of its solution, of any split.

    `taste` names a style in which some wordings of a solution are preferred to others, each twice
    as likely as the next; without one they are all as likely.
    """
    name, other = rng.sample(NAMES, 2)
    thing = rng.choice(_SINGULARS)
    container = rng.choice(_CONTAINERS)
    cast = _Cast(
        name=name,
        other=other,
        thing=thing,
        things=_PLURALS[thing],
        container=container,
        containers=_plural(container),
        place=rng.choice(_PLACES),
    )
    draft = rng.choice(_FAMILIES)(rng, cast)
    steps = (*draft.steps, f"[final], the answer to the problem [is] {draft.answer}.")
    return Problem(
        prompt=PROMPT_PREFIX + _worded(rng, draft.question) + PROMPT_SUFFIX,
        solution=_worded(rng, "".join(f" {step}" for step in steps), taste)
        + f"\nAnswer: {draft.answer}",
        answer=str(draft.answer),
    )


def split_of(key: str) -> Split:
    """The one split that `key` belongs to, the same in every process and for every seed."""
    bucket = zlib.crc32(key.encode()) % 100
    if bucket < _HELD_OUT_PERCENT:
        return "held_out"
    return "development" if bucket < _HELD_OUT_PERCENT + _DEVELOPMENT_PERCENT else "train"


def draw_problem(rng: random.Random, split: Split, taste: int | None = None) -> Problem:
    """The next problem of `split`: no prompt of one split ever occurs in another."""
    while split_of((problem := generate_problem(rng, taste)).prompt) != split:
        pass
    return problem


def problems(seed: int, split: Split) -> Iterator[Problem]:
    """An endless stream of the problems of `split`."""
    rng = random.Random(seed)
    while True:
        yield draw_problem(rng, split)
