"""What executors publish while they carry out an operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mpicoll.engine.core.arrays import Region
from mpicoll.engine.diagnostics.position import Executing, Position
from mpicoll.engine.executors.bound_schedule import bind
from mpicoll.schedules import Recv, Round, Schedule, Send
from mpicoll.transport.base import Message

MEMBERS = (4, 7, 9)


class Wire:
    """Exchanges nothing, but looks around while it would."""

    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message], tag: int) -> None:
        self._look()


def test_the_executor_is_asked() -> None:
    executing, place = Executing(), Position("the making of shared memory")
    assert executing.position(MEMBERS) == Position()
    executing.executor = place
    assert executing.position(MEMBERS) == place


def test_rounds_of_a_schedule() -> None:
    """Ranks are those of the job; what has no bytes is not exchanged."""
    rounds = (
        Round((Send(1, (0, 1)),), (Recv(2, (3,), reduce=True),)),
        Round((), (Recv(1, ()), Recv(2, (2,)))),
        Round((Send(2, (2,)),), ()),
    )
    schedule = Schedule("allreduce", "made_up", 0, 3, 0, 4, 0, rounds)
    memory = Region(np.arange(3), [0, 1, 2, 2, 3])
    program = bind(schedule, [memory], lambda left, right, out: None)
    seen: list[Position] = []
    program.run(Wire(lambda: seen.append(program.position(MEMBERS))), 5)
    assert [one.waits_for for one in seen] == [(9,), (7,)]
    assert not any(one.polls for one in seen)
    assert [one.where for one in seen] == [
        "round 1 of 3 of allreduce/made_up: sends chunks 0 and 1 to rank 7, waits for chunk 3 from rank 9 (reduce)",
        "round 2 of 3 of allreduce/made_up: waits for a token from rank 7",
    ]
