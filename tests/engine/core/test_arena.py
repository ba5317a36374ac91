"""The protocol of shared memory itself: steps, what ranks tell, failures, and pieces of memory that come and go."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
import pytest
from support.data import random
from support.ranks import Ranks

pytest.importorskip("mpicoll._shm", exc_type=ImportError)

import mpicoll
from mpicoll._shm import Collective
from mpicoll.engine.core.arena import Arena
from mpicoll.engine.diagnostics.flight_recorder import Call
from mpicoll.errors import CommunicationError, RankFailed, Timeout
from mpicoll.transport.local import LocalJob, LocalTransport, transports


class _Fault(Exception):
    pass


def _arena() -> Arena:
    arena = mpicoll.world()._core.arena()
    assert arena is not None
    return arena


def _together(size: int, body: Callable[[Arena], Any]) -> list[Any]:
    """Call `body` on the arenas of `size` threads that have nothing but transports."""
    results: list[Any] = [None] * size
    failures: list[BaseException] = []

    def main(transport: LocalTransport) -> None:
        try:
            results[transport.rank] = body(Arena(transport))
        except BaseException as error:  # noqa: BLE001  raised below
            failures.append(error)
            transport.job.mark_dead(transport.rank)

    threads = [
        threading.Thread(target=main, args=(one,), daemon=True) for one in transports(LocalJob(size, timeout=20.0))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if failures:
        raise failures[0]
    return results


# --- steps


@pytest.mark.parametrize("size", [2, 3, 5])
def test_what_was_written_before_a_step_is_there_after_it(size: int) -> None:
    """Each rank writes in every step and reads what the step before has left, with chance alone between them."""

    def body(arena: Arena) -> None:
        rng = random("steps", arena.rank)
        views = [[slot.view(np.int64)[:500] for slot in slots] for slots in arena.slots]
        results = [one.view(np.int64) for one in arena.results]
        for step in range(300):
            w = arena.parity
            views[w][arena.rank][:] = step * 100 + arena.rank
            results[w][arena.rank * 8 : arena.rank * 8 + 8] = step
            arena.post(step, -arena.rank)
            if rng.random() < 0.1:
                time.sleep(rng.random() * 1e-3)
            arena.sync()
            assert arena.parity == 1 - w
            assert arena.read_posted(2) == [(step, -rank) for rank in range(size)]
            for rank, view in enumerate(views[1 - arena.parity]):
                if rng.random() < 0.02:
                    time.sleep(1e-4)
                assert (view == step * 100 + rank).all()
            assert (results[1 - arena.parity][: 8 * size] == step).all()

    _together(size, body)


def test_slots_of_all_ranks_are_apart(several: Ranks) -> None:
    def body() -> None:
        arena = _arena()
        for w in (0, 1):
            for slot in (arena.slots[w][arena.rank], *([arena.results[w]] if arena.rank == 0 else [])):
                slot[...] = 17 * arena.rank + w + 1
        mpicoll.barrier()
        for w in (0, 1):
            assert len(arena.slots[w]) == arena.size
            for rank, slot in enumerate(arena.slots[w]):
                assert (slot == 17 * rank + w + 1).all()
                assert slot.ctypes.data % 64 == 0 or mpicoll.world()._core.transport.native is None
            assert (arena.results[w] == w + 1).all()
        mpicoll.barrier()
        arena.run(lambda source, target: arena.sync(), 1)  # the header is where none of them is

    several(body)


def test_reported_numbers_are_integers(several: Ranks) -> None:
    def body() -> None:
        arena = _arena()
        values = (0, 2**63 - 1, -(2**63), arena.rank, 1, 2, 3, 4)

        def tell(source: Any, target: Any) -> None:
            arena.post(*values)
            arena.sync()
            assert arena.read_posted(8) == [(*values[:3], rank, *values[4:]) for rank in range(arena.size)]

        for _ in range(3):
            arena.run(tell, 1)

    several(body)


# --- run


def _operation(
    arena: Arena, turn: int, steps: int, failing: dict[int, int], own: np.random.Generator
) -> Callable[..., None]:
    """`steps` steps, in the one of its number in `failing` a rank fails; after the last one, too."""

    def operate(source: Any, target: Any) -> None:
        for step in range(steps):
            if failing.get(arena.rank) == step:
                raise _Fault
            arena.post(turn, step)
            if own.random() < 0.1:
                time.sleep(own.random() * 1e-3)
            arena.sync()
            assert arena.read_posted(2) == [(turn, step)] * arena.size
        if failing.get(arena.rank) == steps:
            raise _Fault

    return operate


def _outcome(arena: Arena, operation: Callable[..., None], steps: int) -> str:
    try:
        arena.run(operation, steps)
    except _Fault:
        return "own"
    except CommunicationError as error:
        return str(error)
    return ""


def test_a_failure_ends_one_operation() -> None:
    """At any step of any rank: it gets its own error, the others CommunicationError or nothing, and all are in step."""

    def body(arena: Arena) -> None:
        plan, own = random("plan"), random("own", arena.rank)
        for turn in range(200):
            steps = int(plan.integers(1, 5))
            failing = {rank: int(plan.integers(0, steps + 1)) for rank in range(arena.size) if plan.random() < 0.3}
            seen = _outcome(arena, _operation(arena, turn, steps, failing, own), steps)
            early = [where for where in failing.values() if where < steps]
            if seen == "own":
                assert arena.rank in failing
            elif seen:
                assert failing, (turn, seen)
                assert f"rank {arena.rank} of {arena.size}" in seen
            else:
                # Only a failure after the last step can have escaped this rank.
                assert not early

    for size in (2, 3, 4):
        _together(size, body)


def test_failing_at_once_after_a_failure() -> None:
    """Who has ended one operation may fail in the next one while others still see to the end of the first."""

    def body(arena: Arena) -> None:
        own = random("at once", arena.rank)

        def refuse(source: Any, target: Any) -> None:
            raise _Fault

        for turn in range(500):
            if own.random() < 0.1:
                time.sleep(own.random() * 1e-4)
            with pytest.raises(_Fault):
                arena.run(refuse, 1)
            if turn % 10 == 0:
                arena.run(lambda source, target: arena.sync(), 1)

    for size in (2, 3):
        _together(size, body)


def test_a_failure_is_one_of_its_own_operation() -> None:
    """Who is still in the last step of an operation has what it needs, though another fails in the next one by now."""

    def body(arena: Arena) -> None:
        own = random("own operation", arena.rank)

        def refuse(source: Any, target: Any) -> None:
            if arena.rank == 1:
                raise _Fault
            arena.sync()

        for _ in range(300):
            arena.run(lambda source, target: arena.sync(), 1)
            if own.random() < 0.1:
                time.sleep(own.random() * 1e-4)
            with pytest.raises(_Fault if arena.rank == 1 else CommunicationError):
                arena.run(refuse, 1)

    for size in (2, 3):
        _together(size, body)


def test_nothing_of_a_failed_step_is_used() -> None:
    """What a rank has told before is not what it would have told now."""

    def body(arena: Arena) -> None:
        used: list[object] = []

        def operate(turn: int) -> Callable[[Any, Any], None]:
            def once(source: Any, target: Any) -> None:
                if turn == 2 and arena.rank == 1:
                    raise _Fault
                arena.post(turn)
                arena.sync()
                used.append(arena.read_posted(1))

            return once

        for turn in range(4):
            if turn == 2:
                with pytest.raises(_Fault if arena.rank == 1 else CommunicationError):
                    arena.run(operate(turn), 1)
            else:
                arena.run(operate(turn), 1)
        assert used == [[(turn,)] * arena.size for turn in (0, 1, 3)]

    _together(3, body)


def test_an_interrupt_is_a_failure_like_any_other() -> None:
    def body(arena: Arena) -> None:
        def interrupted(source: Any, target: Any) -> None:
            arena.sync()
            if arena.rank == 0:
                raise KeyboardInterrupt
            arena.sync()

        with pytest.raises(KeyboardInterrupt if arena.rank == 0 else CommunicationError):
            arena.run(interrupted, 2)
        arena.run(lambda source, target: arena.sync(), 1)

    _together(2, body)


def test_the_number_of_steps_wraps() -> None:
    """Operations and failures go on when the number of the step has reached its maximum."""

    def body(arena: Arena) -> None:
        def operate(source: Any, target: Any) -> None:
            arena.sync()
            if arena.number % 3 == arena.rank:
                raise _Fault
            arena.sync()

        # As many steps as take the number there, through all words, which begin with number 0.
        arena.number = 2**32 - 300
        for _ in range(120):
            with suppress(_Fault, CommunicationError):
                arena.run(operate, 2)
            arena.run(lambda source, target: arena.sync(), 1)
        assert arena.number < 300

    _together(2, body)


# --- operations without steps


def _signed(signature: int) -> Call:
    call = Call("test")
    call.signature = signature
    return call


def test_different_operations_are_noticed_with_and_without_steps() -> None:
    """Of operations that begin by comparing, and such that compare within their steps: all ranks learn of it where one
    has begun another than the others, and are in step afterwards."""

    def body(arena: Arena) -> None:
        plan = random("match")
        for turn in range(300):
            # Odd signatures have no steps.
            usual, odd = (int(one) for one in plan.integers(1, 8, 2))
            mine = odd if arena.rank == turn % arena.size else usual

            def operate(source: Any, target: Any, steps: int = mine // 2) -> None:
                for _ in range(steps):
                    arena.sync()

            with pytest.raises(CommunicationError) if usual != odd else nullcontext():
                if mine % 2:
                    arena.match(_signed(mine))
                else:
                    arena.run(operate, mine // 2, signature=mine)

    for size in (2, 3, 4):
        _together(size, body)


def test_ranks_that_disagree_about_the_number_of_steps_raise() -> None:
    """Otherwise they would take each other's data of one operation for those of the next one."""

    def body(arena: Arena) -> None:
        def operate(source: Any, target: Any) -> None:
            for _ in range(1 + arena.rank):
                arena.sync()

        def repeat() -> None:
            for _ in range(2):
                arena.run(operate, 1 + arena.rank, signature=7)

        with pytest.raises(CommunicationError):
            repeat()
        arena.run(lambda source, target: arena.sync(), 1)

    _together(2, body)


def test_a_call_that_cannot_be_described_is_compared() -> None:
    def fail() -> str:
        raise ValueError("a description")

    def body(arena: Arena) -> None:
        arena._descriptions._describe_call = fail
        with pytest.raises(CommunicationError, match="different collectives"):
            arena.match(_signed(1 + arena.rank))
        arena.run(lambda source, target: arena.sync(), 1)

    _together(2, body)


def _interrupt_wait(arena: Arena, waits: threading.Event) -> None:
    """Raise KeyboardInterrupt in the next wait of rank 0, during which the other ranks are late."""
    transport: Any = arena._transport
    if arena.rank > 0:
        waits.wait(10)
        return

    def interrupted(*arguments: Any) -> None:
        del transport.check_peers
        waits.set()
        raise KeyboardInterrupt

    transport.check_peers = interrupted


def test_an_interrupt_of_a_wait_is_raised_after_the_operation() -> None:
    """The other ranks have seen that this rank has begun it."""
    matching, running = threading.Event(), threading.Event()

    def body(arena: Arena) -> None:
        _interrupt_wait(arena, matching)
        interrupt = arena.match(_signed(1))
        assert isinstance(interrupt, KeyboardInterrupt if arena.rank == 0 else type(None))
        assert arena.match(_signed(2)) is None
        _interrupt_wait(arena, running)
        seen = []
        with pytest.raises(KeyboardInterrupt) if arena.rank == 0 else nullcontext():
            arena.run(lambda source, target: seen.extend((arena.sync(), arena.sync())), 2)
        assert len(seen) == 2
        arena.run(lambda source, target: arena.sync(), 1)

    _together(3, body)


def _raise_once(arena: Arena, name: str, raised: threading.Event) -> None:
    """Have a method of `arena` raise KeyboardInterrupt at its next call, as a signal handler may, and only then."""

    def interrupted() -> None:
        delattr(arena, name)
        raised.set()
        raise KeyboardInterrupt

    setattr(arena, name, interrupted)


@pytest.mark.parametrize("name", ["wait_for_late_ranks", "publish_description"])
def test_an_interrupt_at_any_instruction_keeps_the_ranks_synchronised(name: str) -> None:
    """Of what Python does within a step, even outside of all handlers of exceptions."""

    raised = [threading.Event() for _ in range(20)]

    def body(arena: Arena) -> None:
        for turn in range(20):
            own = arena.rank == 0
            if own:
                _raise_once(arena, name, raised[turn])
            elif name == "wait_for_late_ranks":
                assert raised[turn].wait(30)
            differs = name == "publish_description"
            with pytest.raises(KeyboardInterrupt if own else CommunicationError) if own or differs else nullcontext():
                arena.run(lambda source, target: arena.sync(), 1, signature=1 + arena.rank if differs else 1)
            arena.post(turn)
            arena.run(lambda source, target: arena.sync(), 1)
            assert arena.read_posted(1) == [(turn,)] * arena.size

    _together(2, body)


def test_an_exception_after_a_compiled_collective_is_no_failure_of_it() -> None:
    """The other ranks have what they need, and begin the next operation."""

    def body(arena: Arena) -> None:
        x, out = np.ones(1000), np.empty(1000)
        collective = Collective(arena, "allreduce", "sum", "float64", 8, (1000,), 0, 4096, False, 7)

        def operate(source: Any, target: Any) -> None:
            collective.run(source, target)
            if arena.rank == 0:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt) if arena.rank == 0 else nullcontext():
            arena.run(operate, collective.step_count + 5, x, out)
        assert (out == arena.size).all()
        arena.run(lambda source, target: arena.sync(), 1)

    _together(3, body)


def test_a_second_interrupt_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted = threading.Event()
    waits: list[int] = []
    wait = Arena.wait_for_late_ranks

    def count(arena: Arena) -> None:
        waits.append(arena.rank)
        wait(arena)

    monkeypatch.setattr(Arena, "wait_for_late_ranks", count)

    def body(arena: Arena) -> None:
        transport: Any = arena._transport
        if arena.rank == 0:

            def interrupt(*arguments: Any) -> None:
                raise KeyboardInterrupt

            transport.check_peers = interrupt
            with pytest.raises(KeyboardInterrupt):
                arena.match(_signed(1))
            interrupted.set()
        else:
            interrupted.wait(10)
            with pytest.raises(CommunicationError, match="has abandoned this operation"):
                arena.match(_signed(1))

    _together(2, body)
    # No third time, with an exception that is not yet raised.
    assert waits.count(0) == 2


def test_who_does_not_come_in_time_finds_it_given_up() -> None:
    late = threading.Event()

    def body(arena: Arena) -> None:
        arena.match(_signed(1))
        if arena.rank == 0:
            late.wait(20)
            with pytest.raises(CommunicationError, match="abandoned"):
                arena.match(_signed(1))
        else:
            arena._transport.timeout = 0.2
            with pytest.raises(Timeout, match=r"rank 0 did not arrive within 0\.2 s"):
                arena.match(_signed(1))
            late.set()
        for _ in range(3):
            with pytest.raises(CommunicationError, match="an operation was abandoned"):
                arena.match(_signed(1))
            with pytest.raises(CommunicationError, match="an operation was abandoned"):
                arena.run(lambda source, target: arena.sync(), 1)

    _together(2, body)


# --- those who are gone


def test_a_rank_that_has_done_its_part_may_go() -> None:
    """Between a look at a flag and the question who is gone, the last one may have come and others have left."""
    gone = threading.Event()

    def body(arena: Arena) -> str:
        transport: Any = arena._transport
        if arena.rank == 0:
            original, asked = transport.check_peers, False

            def check_peers(*arguments: Any) -> None:
                nonlocal asked
                if not asked:
                    asked = True
                    gone.set()
                    deadline = time.monotonic() + 10
                    while not transport.job.dead and time.monotonic() < deadline:
                        time.sleep(1e-3)
                original(*arguments)

            transport.check_peers = check_peers
        if arena.rank == 2:
            gone.wait(10)
        arena.run(lambda source, target: arena.sync(), 1)
        if arena.rank == 1:
            transport.job.mark_dead(1)
        return "done"

    assert _together(3, body) == ["done"] * 3


def test_a_wait_for_a_rank_that_has_exited_raises() -> None:
    def body(arena: Arena) -> None:
        transport: Any = arena._transport
        arena.run(lambda source, target: arena.sync(), 1)
        if arena.rank == 1:
            transport.job.mark_dead(1)
            return
        for _ in range(3):
            with pytest.raises((RankFailed, CommunicationError)):
                arena.run(lambda source, target: arena.sync(), 1)

    _together(2, body)


def test_a_sleep_ends_when_the_late_rank_comes() -> None:
    sleeping = threading.Event()
    slept: list[float] = []

    def body(arena: Arena) -> None:
        for _ in range(5):
            if arena.rank == 0:
                original = type(arena).sleep

                def sleep(seconds: float, original: Callable[..., None] = original) -> None:
                    begin = time.monotonic()
                    sleeping.set()
                    original(arena, 0.9)
                    slept.append(time.monotonic() - begin)

                arena.sleep = sleep  # type: ignore[method-assign]
            else:
                sleeping.wait(10)
                sleeping.clear()
                time.sleep(0.01)
            arena.run(lambda source, target: arena.sync(), 1)

    _together(2, body)
    # A single one may last longer, where others use the cores.
    assert min(slept) < 0.5


# --- memory


def _segments(arena: Arena) -> int:
    return len(arena.segments.by_number)


def _find(arena: Arena, array: np.ndarray) -> tuple[int, int]:
    return arena.find_segment(array.__array_interface__["data"][0])


def test_memory_is_known_as_long_as_it_lives(several: Ranks) -> None:
    def body() -> None:
        arena = _arena()
        before = _segments(arena)
        one, other = arena.segments.allocate(1000), arena.segments.allocate(0)
        assert _segments(arena) == before + 2
        number, offset = _find(arena, one)
        assert number > 0
        assert offset == 0
        assert _find(arena, one[24:32].view(np.float64)) == (number, 24)
        assert _find(arena, other[:0])[0] in (0, number + 1)
        assert _find(arena, np.zeros(5)) == (0, 0)
        part = one[100:200]
        mpicoll.barrier()
        del one, other
        assert _find(arena, part) == (number, 100)
        assert _segments(arena) == before + 1
        del part
        mpicoll.barrier()
        assert _segments(arena) == before

    several(body)


def test_memory_of_all_ranks_is_reached(several: Ranks) -> None:
    def body() -> None:
        arena = _arena()
        # Of another size on each rank
        own = arena.segments.allocate(100 * (arena.rank + 1))
        own[...] = arena.rank + 1
        mpicoll.barrier()
        segment = arena.segments.by_number[_find(arena, own)[0]]
        assert sorted(segment) == [rank for rank in range(arena.size) if rank != arena.rank]
        for rank, memory in segment.items():
            assert (memory[: 100 * (rank + 1)] == rank + 1).all()
        mpicoll.barrier()

    several(body)


def test_a_failed_allocation_fails_on_all(several: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        arena = _arena()
        for nbytes in (2**62, 2**64):
            with pytest.raises(mpicoll.CommunicationError, match="can't allocate"):
                world._core.queue.run(arena.segments.allocate, Call("test"), nbytes if world.rank == 1 else 10)
        own = arena.segments.allocate(10)
        assert _find(arena, own)[0] in arena.segments.by_number
        assert (mpicoll.allreduce(np.ones(3), algorithm="shm_flat") == world.size).all()

    several(body)
