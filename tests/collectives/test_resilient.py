"""Arguments of resilient; tests/examples/test_resilient.py has jobs in which ranks die."""

from __future__ import annotations

from typing import Any

import pytest

import mpicoll


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, 0, 4), "step must be a function, got 3"),
        ((lambda state, number, comm: state, 0, 4, 3), "setup must be a function, got 3"),
        ((lambda state, number, comm: state, 0, -1), "steps must be at least 0"),
    ],
)
def test_wrong_arguments(arguments: Any, message: str) -> None:
    step, state, steps, *setup = arguments
    with pytest.raises(mpicoll.ArgumentError, match=f"resilient: {message}"):
        mpicoll.resilient(step, state, steps, setup=setup[0] if setup else None)
