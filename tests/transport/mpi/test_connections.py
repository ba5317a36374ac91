"""Connections by TCP between ranks, for the messages of schedules: who connects, and what MPI carries if that fails."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

import mpicoll

pytestmark = [pytest.mark.extension, pytest.mark.mpi]

LENGTH = 200_000
"""Elements of vectors of which schedules cut the messages, with 4 ranks too."""


@pytest.fixture
def comm() -> Iterator[mpicoll.Communicator]:
    """A communicator whose ranks connect, as if each were on its own host."""
    from mpicoll.transport.mpi import connections  # not before, since it initialises MPI

    made = mpicoll.world().split(0)
    transport: Any = made._core.transport
    transport.nodes = tuple(range(made.size))
    connections.allow_connections("127.0.0.1")
    yield made
    connections._address.clear()
    if not made._core.freed:
        made.free()


def _reduce(comm: mpicoll.Communicator, start: int) -> None:
    x = np.arange(LENGTH, dtype=np.float64) + start
    total = mpicoll.allreduce(x + comm.rank, algorithm="ring", comm=comm)
    np.testing.assert_array_equal(total, comm.size * x + sum(range(comm.size)))


def _list_connected(comm: mpicoll.Communicator) -> list[int]:
    made: dict[int, Any] = comm._core.transport._connections._made  # type: ignore[attr-defined]
    return sorted(rank for rank, connection in made.items() if connection is not None)


def test_neighbours_of_a_ring_connect_once(comm: mpicoll.Communicator) -> None:
    rank, size = comm.rank, comm.size
    for start in range(3):
        _reduce(comm, start)
        if size > 1:
            assert _list_connected(comm) == sorted({(rank - 1) % size, (rank + 1) % size})
    transport: Any = comm._core.transport
    comm.free()
    assert size == 1 or not any(transport._connections._made.values())


@pytest.mark.parametrize("what", ["listens", "connects", "has the secret"])
def test_mpi_carries_the_messages_of_a_rank_that_can_not_connect(
    comm: mpicoll.Communicator, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    from mpicoll.transport.mpi import connections

    rank, size = comm.rank, comm.size
    apart = {"listens": 0}.get(what, size - 1)  # ranks connect to those of lower ranks
    if rank == apart and what == "listens":
        monkeypatch.setattr(connections, "_listen", lambda *_: None)
    elif rank == apart and what == "connects":
        monkeypatch.setattr(connections, "connecting_error", lambda _: 111)
    elif rank == apart:
        dial = connections._dial
        wrong = bytes(connections._SECRET)
        monkeypatch.setattr(
            connections, "_dial", lambda ends, opened: dial({k: (*v[:2], wrong) for k, v in ends.items()}, opened)
        )
    monkeypatch.setattr(connections.timing, "CONNECT_WITHIN", 0.5)
    _reduce(comm, 5)
    if size > 1:
        neighbours = {(rank - 1) % size, (rank + 1) % size}
        assert _list_connected(comm) == ([] if rank == apart else sorted(neighbours - {apart}))
    _reduce(comm, 6)


def test_strangers_are_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    from mpicoll.transport.mpi import connections

    monkeypatch.setattr(connections.timing, "CONNECT_WITHIN", 0.5)
    secret = bytes(range(connections._SECRET))
    with ExitStack() as opened:
        listener = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        listener.setblocking(False)
        place = listener.getsockname()
        silent, wrong, brief, right = (opened.enter_context(socket.create_connection(place)) for _ in range(4))
        wrong.sendall(secret[::-1])
        brief.sendall(secret[:5])
        brief.shutdown(socket.SHUT_WR)
        right.sendall(secret[:7])

        def send_the_rest() -> None:
            time.sleep(0.1)
            right.sendall(secret[7:])

        thread = threading.Thread(target=send_the_rest)
        thread.start()
        begin = time.monotonic()
        made = connections._accept(listener, {secret: 3, bytes(len(secret)): 4}, opened)
        assert time.monotonic() - begin < 10
        thread.join()
        assert list(made) == [3]
        # The kernel waits for a rank that is stopped, as long as its host answers.
        assert made[3].getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
        right.sendall(b"!")
        made[3].setblocking(True)
        assert made[3].recv(10) == b"!"
        silent.close()


def test_a_lost_connection(comm: mpicoll.Communicator) -> None:
    if comm.size != 2:
        return  # with more, those that are no neighbours of rank 0 would wait for those that fail
    _reduce(comm, 7)
    if comm.rank == 0:
        for connection in comm._core.transport._connections._made.values():  # type: ignore[attr-defined]
            connection.close()
    with pytest.raises(mpicoll.CommunicationError, match=r"connection with rank \d was lost .*MPICOLL_SOCKETS=off"):
        _reduce(comm, 8)


@pytest.mark.slow
@pytest.mark.long
def test_an_exception_in_the_last_step_of_connecting(
    comm: mpicoll.Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only rank 0 has no connection then: the next call fails at both ends, and none waits."""
    from mpicoll.transport.mpi import connections

    if comm.size != 2:
        return
    exchange, calls = connections._exchange, []

    def exchange_and_fail(*arguments: Any) -> Any:
        calls.append(exchange(*arguments))
        if len(calls) == 3 and comm.rank == 0:
            raise KeyboardInterrupt
        return calls[-1]

    monkeypatch.setattr(connections, "_exchange", exchange_and_fail)
    for _ in range(2):
        with pytest.raises((KeyboardInterrupt, mpicoll.CommunicationError)):
            _reduce(comm, 9)
    assert len(calls) == 3
