"""The word problems are right, their splits are disjoint, and their wording is free."""

import itertools
import random
import re
from collections import Counter

from word_problems import Split, generate_problem, problems, split_of

from fly_jax.evaluation.problems import Problem, built_in_problems, extract_answer, is_correct

SPLITS: tuple[Split, ...] = ("train", "development", "held_out")


def take(count: int, seed: int = 0, split: Split = "train") -> list[Problem]:
    return list(itertools.islice(problems(seed, split), count))


def test_every_equation_holds_and_the_answer_is_the_last_thing_computed() -> None:
    for problem in take(3000):
        equations = re.findall(r"\d[\d +*/=-]*=[\d +*/=-]*\d", problem.solution)
        assert equations, problem.solution
        for equation in equations:
            assert len({eval(side) for side in equation.split("=")}) == 1, problem.solution
        ending = f" {problem.answer}.\nAnswer: {problem.answer}"
        assert problem.solution.endswith(ending)
        opening = "the answer to the problem (is|equals|must be|comes to)"
        assert re.search(opening + ending, problem.solution)
        results = re.findall(r"= (\d+) (?:[a-z])", problem.solution)
        assert results[-1] == problem.answer, problem.solution
        assert is_correct(problem, problem.solution)
        assert not is_correct(problem, problem.solution + "0")
        # No number is negative, and no slot is left.
        text = problem.prompt + problem.solution
        assert not re.search(r"[\[\]{}|]", text), text
        assert not re.search(r"-\d|(?<!\d)0|\b1 [a-z]+s\b", text), text


def test_extract_answer() -> None:
    for text in (" So it is 7.\nAnswer: 74", "\nAnswer: 74\nand more", "\nAnswer: 74\nAnswer: 8"):
        assert extract_answer(text) == "74"
    for text in ("\nAnswer: 74 shells", "\nAnswer: ", "the Answer: 74", ""):
        assert extract_answer(text) is None


def test_a_seed_gives_the_same_problems() -> None:
    assert take(50, seed=3) == take(50, seed=3)
    assert take(50, seed=3) != take(50, seed=4)
    assert generate_problem(random.Random(5)) == generate_problem(random.Random(5))


def test_splits_are_disjoint_whatever_the_seed_and_the_process() -> None:
    for seed, split in enumerate(SPLITS):
        assert {split_of(problem.prompt) for problem in take(200, seed, split)} == {split}
    # As it was when the embedded pair was trained: another split would leak its held-out problems.
    assert [split_of(key) for key in ("0", "1", "13")] == ["development", "train", "held_out"]
    assert built_in_problems() == take(8, seed=2511, split="held_out")


def test_openings_of_sentences_are_drawn_evenly() -> None:
    text = " ".join(problem.solution for problem in take(2000))
    openings = Counter(re.findall(r" (\w+)(?: \w+)*, the answer to the problem", text))
    assert len(openings) >= 5
    assert max(openings.values()) < 3 * min(openings.values())


def test_a_taste_prefers_some_wordings_and_changes_no_number() -> None:
    plain = [generate_problem(random.Random(seed)) for seed in range(400)]
    styled = [generate_problem(random.Random(seed), taste=7) for seed in range(400)]
    numbers = [[(one.prompt, one.answer) for one in drawn] for drawn in (plain, styled)]
    assert numbers[0] == numbers[1]

    def favourite_share(drawn: list[Problem]) -> float:
        openings = Counter(one.solution.split(".")[-2].split(",")[0] for one in drawn)
        return openings.most_common(1)[0][1] / len(drawn)

    assert favourite_share(styled) > 0.4 > 0.25 > favourite_share(plain)
