"""Verifiers that run in the trainer: normalisation, numbers, weighted sums, verifiers of the user's own."""

from __future__ import annotations

import time
from typing import Any

import pytest

from coterie.errors import CoterieError, UserError
from coterie.tasks import Scorer
from coterie.tasks.composite import parts, verifier_name
from coterie.tasks.verifiers import BadReference, exact, numeric, parse_number
from coterie.types import Problem


def problem(verifier: str, reference: str | None = "3") -> Problem:
    return Problem("jsonl/000000000000#1", "t", "p", reference, verifier)


@pytest.mark.parametrize(
    ("answer", "reference", "right"),
    [
        (" 3 ", "3", 1),
        ("3.", "3", 1),
        ("13", "3", 0),
        ("5000", "500", 0),
        ("-3", "3", 0),
        ("\u22123", "-3", 1),
        ("**73**", "73", 1),
        ("$1,234", "1234", 1),
        ("$x$", "x", 1),
        ("a, b", "a,b", 1),
        ("a  b", "a b", 1),
        ("Yes", "yes", 0),
        ("A or B", "A", 0),
        ("", "3", 0),
    ],
)
def test_rw03_exact_is_right_or_wrong_after_normalisation(answer: str, reference: str, right: int) -> None:
    assert exact(answer, reference) == right


@pytest.mark.parametrize(
    ("answer", "reference", "right"),
    [
        ("3.0", "3", 1),
        ("6/2", "3", 1),
        (r"\frac{6}{2}", "3", 1),
        ("3e0", "3", 1),
        ("$1,234.00", "1234", 1),  # RW-22
        ("1234568", "1234567", 0),
        ("0.30000000000000004", "0.3", 1),
        ("0.3001", "0.3", 0),
        ("2.9999999999", "3", 0),  # an integer asks for the exact value
        ("0.0000001", "0.0000002", 0),  # RW-12
        ("1e-30", "2e-30", 0),
        ("28%", "0.28", 1),  # RW-14: one convention
        ("28%", "28", 0),
        ("28%", "28%", 1),
        (r"28\%", "0.28", 1),
        ("7 or 8", "7", 0),
        ("1/0", "0", 0),
        ("nan", "3", 0),
        ("inf", "3", 0),
        ("٣", "3", 0),
        ("1_0", "10", 0),
    ],
)
def test_numeric(answer: str, reference: str, right: int) -> None:
    assert numeric(answer, reference) == right


def test_numbers_cannot_be_made_expensive() -> None:
    start = time.perf_counter()
    assert parse_number("1e999999999") is None
    assert parse_number("9" * 100_000) is None
    assert time.perf_counter() - start < 1


def test_rw25_a_reference_that_is_no_number_is_skipped_and_counted() -> None:
    with pytest.raises(BadReference):
        numeric("3", "three")
    with Scorer() as scorer:
        score = scorer.score([(problem("numeric", "three"), "<answer>3</answer>")])[0]
    assert score.reward is None and score.outcome == "bad_reference"
    assert scorer.counts == {"bad_reference": 1}


def test_no_answer_is_wrong_and_counted() -> None:
    with Scorer() as scorer:
        assert scorer.score([(problem("exact"), "no idea")])[0].reward == 0.0
        assert scorer.counts == {"no_answer": 1}


def test_weighted_sum_and_its_spelling() -> None:
    name = verifier_name({"numeric": 0.9, "format": 0.1}, "x")
    assert parts(name) == (("format", 0.1), ("numeric", 0.9))
    with Scorer() as scorer:
        full, bare, wrong = scorer.score(
            [
                (problem(name), "<think>a</think><answer>3</answer>"),
                (problem(name), "<answer>3</answer>"),
                (problem(name), "<think>a</think><answer>4</answer>"),
            ]
        )
    assert (full.reward, bare.reward, wrong.reward) == (pytest.approx(1.0), pytest.approx(0.9), pytest.approx(0.1))
    with pytest.raises(UserError, match="positive weights"):
        verifier_name({"numeric": -1}, "x")


def test_unknown_verifier_gets_a_suggestion() -> None:
    with Scorer() as scorer, pytest.raises(UserError, match="did you mean 'numeric'"):
        scorer.submit(problem("numerik"), "3")


def test_own_verifier_scores_abstains_and_nan_is_counted() -> None:
    values: dict[str, float | None] = {"1": 0.5, "2": None, "3": float("nan"), "4": float("inf")}
    with Scorer(verifiers={"mine": lambda p, answer: values[answer]}) as scorer:
        scores = scorer.score([(problem("mine"), f"<answer>{k}</answer>") for k in values])
    assert [s.reward for s in scores] == [0.5, None, None, None]
    assert scorer.counts == {"ok": 1, "abstained": 1, "invalid": 2}


def test_a_part_that_abstains_makes_the_sum_abstain() -> None:
    with Scorer(verifiers={"mine": lambda p, answer: None}) as scorer:
        assert scorer.score([(problem("exact+mine"), "<answer>3</answer>")])[0].reward is None


@pytest.mark.parametrize("value", [[1.0], "1", True, {}])
def test_rw24_own_verifier_must_return_one_number(value: Any) -> None:
    with (
        Scorer(verifiers={"mine": lambda p, answer: value}) as scorer,
        pytest.raises(CoterieError, match="one number or None"),
    ):
        scorer.submit(problem("mine"), "<answer>3</answer>")


def test_own_verifier_that_raises_is_named() -> None:
    def broken(p: Problem, answer: str) -> float:
        return 1 / 0

    with (
        Scorer(verifiers={"mine": broken}) as scorer,
        pytest.raises(CoterieError, match="'mine' raised ZeroDivisionError"),
    ):
        scorer.submit(problem("mine"), "<answer>3</answer>")


def test_own_verifier_cannot_take_a_built_in_name() -> None:
    with pytest.raises(CoterieError, match="built in"):
        Scorer(verifiers={"exact": lambda p, answer: 1.0})
