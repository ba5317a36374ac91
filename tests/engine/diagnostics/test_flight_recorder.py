"""The numbers by which ranks compare the rows that they send and receive."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product

import pytest

from mpicoll.engine.diagnostics.flight_recorder import ROW_MODULUS, number_rows


def add_up(sent: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> int:
    """Return the sum for ranks that send ``sent[source][dest]`` rows, where ``expected[source][dest]`` are expected."""
    numbers = (number_rows(rank, row, [one[rank] for one in expected]) for rank, row in enumerate(sent))
    return sum(numbers) % ROW_MODULUS


@pytest.mark.parametrize(("one", "other"), [pair for pair in product(range(12), repeat=2) if pair[0] < pair[1]])
def test_two_ranks_that_both_expect_what_they_send(one: int, other: int) -> None:
    assert add_up([[0, one], [other, 0]], [[0, other], [one, 0]])


def test_errors_that_could_cancel_out() -> None:
    chosen = random.Random(5)
    for _ in range(500):
        sent = [[chosen.randrange(4) for _ in range(4)] for _ in range(4)]
        assert not add_up(sent, sent)
        expected = [row.copy() for row in sent]
        (a, b), (c, d) = chosen.sample(range(4), 2), chosen.sample(range(4), 2)
        for source, dest, more in ((a, c, 1), (a, d, -1), (b, c, -1), (b, d, 1)):
            expected[source][dest] += more
        assert add_up(sent, expected)
