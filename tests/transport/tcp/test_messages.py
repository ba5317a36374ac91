"""The messages of a group over the connections of a mesh, the other ends of which are in this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import numpy as np
import pytest

from mpicoll import RankFailed
from mpicoll.transport.tcp.mesh import Mesh, Peer
from mpicoll.transport.tcp.messages import MessagePassing


def make_mesh(rank: int, size: int, connections: dict[int, Connection]) -> Mesh:
    return Mesh(rank, [Peer(one, 4710 + one, "node7") for one in range(size)], size, connections, 5.0)


@pytest.mark.parametrize("operation", ["exchange", "send"])
@pytest.mark.timeout(20)
def test_a_death_is_the_cause_of_a_departure(operation: str) -> None:
    """Rank 0 waits for rank 2, which leaves because of the death of rank 1; of these ends, rank 0 sees the later one
    first."""
    (first, of_first), (second, of_second) = Pipe(), Pipe()
    mesh = make_mesh(0, 3, {1: first, 2: second})
    other = make_mesh(2, 3, {0: of_second})
    messages = MessagePassing(mesh, range(3), "all")
    data = np.zeros(4, np.uint8)
    calls: dict[str, Callable[[], None]] = {
        "exchange": lambda: messages.exchange([], [(2, data)], 0),
        "send": lambda: messages.send(data, 2, 0),
    }
    other.leave()
    while 2 not in mesh.ends:
        time.sleep(0.001)
    death = threading.Timer(0.05, of_first.close)
    death.start()
    with pytest.raises(RankFailed) as caught:
        calls[operation]()
    death.join()
    mesh.leave()
    assert caught.value.ranks == (1, 2)
    assert "rank 1 (process 4711 on node7) has died" in str(caught.value)
    assert "rank 2 (process 4712 on node7) has left" in str(caught.value)
