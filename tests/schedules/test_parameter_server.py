"""The schedule of a parameter server: correct for any number of servers, with the bytes that it states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

import pytest

from mpicoll.errors import ScheduleError
from mpicoll.schedules import PARAMETER_SERVER, Round, closed_form, collectives, cost, price, traffic, verify


@pytest.mark.parametrize("servers", [1, 2, 3, 5])
def test_it_is_correct_and_costs_what_it_states(servers: int) -> None:
    for size in range(1, 13):
        verify(PARAMETER_SERVER, size, segments=servers)
        counted = cost(PARAMETER_SERVER, size, segments=servers)
        assert (counted.rounds, counted.sent) == closed_form(PARAMETER_SERVER, size, servers)
        links = traffic(PARAMETER_SERVER, size, segments=servers)
        assert max(sent for sent, _ in links) == counted.sent
        assert sum(sent for sent, _ in links) == sum(received for _, received in links) == counted.total_sent


def test_a_step_without_a_worker_is_found() -> None:
    def forget(rank: int, size: int, *, segments: int) -> Iterator[Round]:
        """Leave the gradient of the last worker out."""
        for number, now in enumerate(PARAMETER_SERVER.generate(rank, size, segments=segments)):
            sends = () if (number, rank) == (0, size - 1) else now.sends
            recvs = tuple(recv for recv in now.recvs if number or recv.source < size - 1)
            yield Round(sends, recvs)

    with pytest.raises(ScheduleError, match="rank 0, round 1, chunk 0: lacks the contribution of rank 4 in the end"):
        verify(replace(PARAMETER_SERVER, generate=forget), 5, segments=2)


def test_workers_push_to_different_servers_at_the_same_time() -> None:
    """Two servers halve the time of one if the workers are as many."""
    times = [price(PARAMETER_SERVER, 8 + servers, 1, alpha=0, beta=1, segments=servers) for servers in (1, 2, 8)]
    assert times == [16, 8, 2]


def test_it_is_no_collective() -> None:
    assert "parameter_server" not in collectives()


def test_traffic_of_an_allreduce() -> None:
    assert traffic("allreduce/master_worker", 4) == [(Fraction(3), Fraction(3)), *[(Fraction(1), Fraction(1))] * 3]
    assert traffic("allreduce/ring", 4) == [(Fraction(3, 2), Fraction(3, 2))] * 4
