"""Closed forms: text that is evaluated exactly, and nothing else."""

from __future__ import annotations

from fractions import Fraction

import pytest

from mpicoll.errors import AlgorithmError
from mpicoll.parallel.pipeline.schedules import register
from mpicoll.schedules import algorithm
from mpicoll.schedules.formula import check_formula, evaluate

QUANTITIES = {"P": Fraction(6), "r": Fraction(2), "lg": 3}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2 * (P - 1) / P", Fraction(5, 3)),
        ("-P // 4 + 7 % 4 + 2**lg", 9),
        ("1 if r else 1 / 0", 1),
        ("1 / 0 if P < 1 else 0", 0),
        ("lg + (r > 0) + (0 < r < 2) + (r == 2) + (r != 2) + (1 <= r) + (r >= 3)", 6),
        ("max(P, lg) + min(1, r - 3)", 5),
        ("sum(min(r, 2**k) for k in range(lg))", 5),
        ("0.5", Fraction(1, 2)),
    ],
)
def test_value(text: str, value: int | Fraction) -> None:
    found = evaluate(text, QUANTITIES)
    assert isinstance(found, Fraction)
    assert found == value


WRONG = {
    "P +": "invalid syntax",
    "P + q": "'q' is not allowed",
    "().__class__": "'().__class__' is not allowed",
    "__import__('os')": "\"__import__('os')\" is not allowed",
    "print(P)": "'print(P)' is not allowed",
    "P @ P": "'P @ P' is not allowed",
    "P in P": "'P in P' is not allowed",
    "'P'": "\"'P'\" is not allowed",
    "sum(k for k in range(3) if k)": "is not allowed",
    "sum(k for k in P)": "is not allowed",
    "max(P, default=1)": "is not allowed",
}


@pytest.mark.parametrize(("text", "message"), WRONG.items())
def test_anything_else_is_refused_when_it_is_registered(text: str, message: str) -> None:
    with pytest.raises(AlgorithmError) as caught:
        check_formula(text, QUANTITIES)
    assert str(caught.value).startswith(f"closed form {text!r}: ")
    assert message in str(caught.value)
    with pytest.raises(AlgorithmError, match="closed form"):
        algorithm("bcast", rounds="1", sent=text)
    with pytest.raises(AlgorithmError, match="closed form"):
        register(peak=text)


def test_a_division_by_zero_for_some_numbers_is_no_error_of_form() -> None:
    check_formula("r / (P - 1)", QUANTITIES)
