"""Some of the generated mismatches; ``ci/mismatches.py`` has more, also those that leave ranks waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from support import mismatches
from support.launch import ROOT, mpirun
from support.ranks import Ranks

import mpicoll
from mpicoll.engine import dispatch
from mpicoll.engine.core.queue import OperationQueue
from mpicoll.engine.selection import selector
from mpicoll.engine.selection.query import SelectionQuery
from mpicoll.engine.selection.selector import Choice
from mpicoll.transport.local import LocalTransport


@pytest.mark.parametrize("number", range(2 * len(mismatches.KINDS)))
def test_generated_mismatches(several: Ranks, number: int) -> None:
    wanted = mismatches.case("tests", number, several.size, "native")

    def body() -> str:
        world = mpicoll.world()
        with mpicoll.debug():
            return mismatches.check(wanted, world, lambda spec, form: mismatches.native(spec, world, form))

    for failure in several(body):
        assert failure == ""


@pytest.mark.extension
def test_mismatches_are_noticed_by_default(several: Ranks) -> None:
    """Each on a communicator of its own, on which no rank repeats a call: ranks that do may be ahead."""

    def body() -> list[str]:
        world, failures = mpicoll.world(), []
        for one in mismatches.by_default("native", several.size):
            comm = world.duplicate()
            call = partial(_call_native, comm)
            failures.append(mismatches.check(one, comm, call, checked=False))
            comm.free()
        return failures

    for failures in several(body):
        assert [one for one in failures if one] == []


def _call_native(comm: mpicoll.Communicator, spec: mismatches.Spec, form: str) -> None:
    mismatches.native(spec, comm, form)


@pytest.mark.parametrize("size", [2, 3])
def test_mismatches_between_nodes(size: int) -> None:
    for failures in mpicoll.run_local(mismatches.between_nodes, size, ranks_per_node=1):
        assert failures == []


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_mismatches_between_processes(size: int, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(f"""
import sys
sys.path.insert(0, {str(ROOT / "tests")!r})
from support import mismatches
import mpicoll
failures = mismatches.between_nodes()
if mpicoll.world().rank == 0:
    print("failures:", *failures, sep="\\n")
""")
    done = mpirun(size, script, cwd=tmp_path, MPICOLL_SHARED_MEMORY="off", MPICOLL_TIMEOUT="20")
    assert (done.returncode, done.stdout) == (0, "failures:\n")


@pytest.mark.usefixtures("uncompared")
def test_nothing_is_compared_between_nodes_where_a_rank_says_so() -> None:
    def body() -> int:
        world = mpicoll.world()
        mpicoll.allreduce(np.ones(2), op="max" if world.rank else "sum", algorithm="ring")
        return world._core.queue.number

    assert mpicoll.run_local(body, 2, ranks_per_node=1) == [1, 1]


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks have no memory to share, which they find out at the first use."""

    def share(transport: LocalTransport, nbytes: int) -> NoReturn:
        raise mpicoll.CommunicationError("there is no memory")

    monkeypatch.setattr(LocalTransport, "share", share)


@pytest.mark.usefixtures("no_memory")
@pytest.mark.extension
def test_where_shared_memory_turns_out_to_be_lost() -> None:
    def body() -> str:
        world = mpicoll.world()
        with pytest.raises(mpicoll.MismatchError, match="they differ in root"):
            mpicoll.bcast(_x(), root=world.rank)
        assert mpicoll.allreduce(1) == world.size
        return str(world._core.shm_failed_reason)

    assert mpicoll.run_local(body, 2) == ["there is no memory"] * 2


@pytest.mark.usefixtures("no_memory")
@pytest.mark.extension
def test_a_plan_that_was_made_before_shared_memory_was_lost() -> None:
    """Each of its runs is compared with the calls of other ranks."""

    def body() -> str:
        world = mpicoll.world()
        plan = mpicoll.allreduce_init(_x())
        mpicoll.allreduce(_x())
        for _ in range(2):
            with pytest.raises(mpicoll.MismatchError, match="they differ in operation"):
                mpicoll.barrier() if world.rank else plan()
            assert plan()[0] == world.size
        return str(world._core.shm_failed_reason)

    assert mpicoll.run_local(body, 2, timeout=20) == ["there is no memory"] * 2


@pytest.mark.usefixtures("no_memory")
@pytest.mark.parametrize("differ", [False, True])
def test_a_call_that_was_bound_before_shared_memory_was_lost(differ: bool) -> None:
    """Another rank has bound the same call afterwards, and waits for the comparison."""
    bound = threading.Event()

    def body() -> float:
        world = mpicoll.world()
        if world.rank == 0:
            requests = [mpicoll.iallreduce(_x()), mpicoll.iallreduce(_x(500))]
            bound.set()
            requests[0].wait()
            request = requests[1]
        else:
            assert bound.wait(20)
            mpicoll.iallreduce(_x()).wait()
            request = mpicoll.iallreduce(_x(501 if differ else 500))
        if differ:
            with pytest.raises(mpicoll.MismatchError, match="they differ in shape"):
                request.wait()
            return 2.0
        return float(request.wait()[0])

    assert mpicoll.run_local(body, 2, timeout=20) == [2.0, 2.0]


@pytest.mark.usefixtures("no_memory")
@pytest.mark.parametrize("algorithm", [None, "shm_flat"])
def test_all_arguments_of_a_call_that_was_bound_before_shared_memory_was_lost(algorithm: str | None) -> None:
    """Another rank has chosen the algorithm afterwards: the comparison of all arguments finds the same one."""
    bound = threading.Event()

    def body() -> str:
        with mpicoll.debug():
            if mpicoll.world().rank == 0:
                requests = [mpicoll.iallreduce(_x()), mpicoll.iallreduce(_x(500), algorithm=algorithm)]
                bound.set()
            else:
                assert bound.wait(20)
                requests = [mpicoll.iallreduce(_x())]
                requests[0].wait()
                requests.append(mpicoll.iallreduce(_x(500), algorithm=algorithm))
            assert [float(request.wait()[0]) for request in requests] == [2.0, 2.0]
        return str(mpicoll.world()._core.shm_failed_reason)

    assert mpicoll.run_local(body, 2, timeout=20) == ["there is no memory"] * 2


@pytest.mark.extension
def test_a_call_that_no_algorithm_serves_after_shared_memory_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """It raises that, and not the earlier operation in which shared memory was lost."""
    described = threading.Event()
    everywhere = threading.Barrier(2, described.set, timeout=20)

    def share(transport: LocalTransport, nbytes: int) -> NoReturn:
        assert described.wait(20)
        raise mpicoll.CommunicationError("there is no memory")

    def choose(query: SelectionQuery, argument: str | None) -> Choice:
        if query.shm_failed_reason is not None and query.nbytes == _x(500).nbytes:
            raise mpicoll.AlgorithmError("nothing serves this")
        return selector.choose(query, argument)

    monkeypatch.setattr(LocalTransport, "share", share)
    monkeypatch.setattr(dispatch, "choose", choose)

    def body() -> str:
        requests = [mpicoll.iallreduce(_x(count)) for count in (2, 500, 3)]
        everywhere.wait()
        assert requests[0].wait()[0] == 2.0
        with pytest.raises(mpicoll.AlgorithmError, match="nothing serves this"):
            requests[1].wait()
        assert requests[2].wait()[0] == 2.0
        return str(mpicoll.world()._core.shm_failed_reason)

    assert mpicoll.run_local(body, 2, timeout=20) == ["there is no memory"] * 2


@pytest.mark.extension
@pytest.mark.parametrize("checked", [False, True])
def test_a_plan_that_is_made_while_shared_memory_is_lost(checked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank describes the plan before an operation in the background loses shared memory, another one afterwards."""
    described = threading.Event()
    run_behind = OperationQueue._run_behind

    def announce(queue: OperationQueue, *args: Any) -> Any:
        described.set()
        return run_behind(queue, *args)

    def share(transport: LocalTransport, nbytes: int) -> NoReturn:
        assert described.wait(20)
        raise mpicoll.CommunicationError("there is no memory")

    monkeypatch.setattr(OperationQueue, "_run_behind", announce)
    monkeypatch.setattr(LocalTransport, "share", share)

    def body() -> list[str]:
        with mpicoll.debug() if checked else nullcontext():
            request = None
            if mpicoll.world().rank == 0:
                request = mpicoll.iallreduce(_x())
            else:
                assert described.wait(20)
                mpicoll.iallreduce(_x()).wait()
            plan = mpicoll.allreduce_init(_x())
            assert plan()[0] == 2.0
            assert request is None or request.wait()[0] == 2.0
        return [plan.choice.name, plan._call.algorithm]

    first, second = mpicoll.run_local(body, 2, timeout=20)
    assert first == second
    assert "shm" not in first[0]


def _x(count: int = 2, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    return np.ones(count, dtype)


REPEATED: dict[str, tuple[str, Callable[[bool, mpicoll.Communicator], object]]] = {
    "elements": ("shape", lambda odd, comm: mpicoll.allreduce(_x(3 if odd else 2), comm=comm)),
    "dtype of as many bytes": (
        "dtype",
        lambda odd, comm: mpicoll.allreduce(_x(2, np.int32 if odd else np.float32), comm=comm),
    ),
    "rows without counts": ("shape", lambda odd, comm: mpicoll.allgather(_x(3 if odd else 2), comm=comm)),
    "operation": (
        "operation",
        lambda odd, comm: mpicoll.bcast(_x(), comm=comm) if odd else mpicoll.allreduce(_x(), comm=comm),
    ),
    "schedules": (
        "algorithm",
        lambda odd, comm: mpicoll.allreduce(_x(), algorithm="ring" if odd else "tree", comm=comm),
    ),
    "split": ("operation", lambda odd, comm: comm.split(0) if odd else mpicoll.barrier(comm=comm)),
    "allocation": ("operation", lambda odd, comm: mpicoll.empty(2, comm=comm) if odd else mpicoll.barrier(comm=comm)),
}


@pytest.mark.parametrize("name", REPEATED)
def test_calls_that_were_kept_are_compared(several: Ranks, name: str) -> None:
    field, call = REPEATED[name]

    def body() -> str:
        # Without shared memory only the first calls on a communicator are compared.
        with mpicoll.world().duplicate() as comm:
            for _ in range(2):
                call(False, comm)
                call(True, comm)
            with pytest.raises(mpicoll.MismatchError) as caught:
                call(comm.rank == comm.size - 1, comm)
            assert field in caught.value.fields
            assert mpicoll.allreduce(1, comm=comm) == comm.size
        return str(caught.value).partition("\n")[0]

    assert len(set(several(body))) == 1


AHEAD: dict[str, tuple[str, Callable[[mpicoll.Communicator, bool], object]]] = {
    "dtype": ("dtype", lambda comm, odd: mpicoll.bcast(_x(2, np.int32 if odd else np.float32), comm=comm)),
    "root of bcast": ("root", lambda comm, odd: mpicoll.bcast(_x(), int(odd), comm=comm)),
    "root of gather": ("root", lambda comm, odd: mpicoll.gather(_x(), 1 - int(odd), comm=comm)),
    "bcast": (
        "operation",
        lambda comm, odd: mpicoll.allreduce(1, comm=comm) if odd else mpicoll.bcast(_x(), comm=comm),
    ),
    "scatter": ("operation", lambda comm, odd: mpicoll.barrier(comm=comm) if odd else _scatter(comm)),
    "scan": ("operation", lambda comm, odd: mpicoll.exscan(_x(), comm=comm) if odd else mpicoll.scan(_x(), comm=comm)),
}


def _scatter(comm: mpicoll.Communicator) -> object:
    return mpicoll.scatter(_x(comm.size) if comm.rank == 0 else None, out=_x(1), comm=comm)


@pytest.mark.extension
@pytest.mark.parametrize("name", AHEAD)
def test_a_rank_that_is_ahead_raises_in_a_later_call(several: Ranks, name: str) -> None:
    field, call = AHEAD[name]

    def body() -> str:
        world = mpicoll.world()
        comm = world.duplicate()
        for _ in range(3):
            call(comm, False)
            call(comm, True)
        before = comm._core.queue.number

        def go_on() -> None:
            call(comm, comm.rank == comm.size - 1)
            for _ in range(150):  # a rank that is ahead gets here
                mpicoll.bcast(_x(), comm=comm)

        with pytest.raises(mpicoll.MismatchError) as caught:
            go_on()
        assert field in caught.value.fields
        assert f"disagree about collective {before + 1}: " in str(caught.value)
        with pytest.raises(mpicoll.CommunicationError):
            mpicoll.barrier(comm=comm)
        assert mpicoll.allreduce(1) == world.size
        return str(caught.value).partition("\n")[0]

    assert len(set(several(body))) == 1


@pytest.mark.mpi
def test_a_persistent_plan_meets_no_plain_collective() -> None:
    world = mpicoll.world()
    if world.size == 1:
        pytest.skip("needs two ranks")
    x = _x()
    # Without shared memory only the first calls on a communicator are compared.
    with world.duplicate() as comm:
        plan = mpicoll.allreduce_init(x, algorithm="native", comm=comm)
        # Where the library's persistent collectives don't work, a plan makes the same call as the function.
        fails = pytest.raises(mpicoll.MismatchError, match="they differ in algorithm")
        with fails if world._core.transport.native.has_persistent else nullcontext():
            mpicoll.allreduce(x, algorithm="native", comm=comm) if comm.rank else plan()
        assert plan().sum() == comm.size * x.size


def test_plans_are_compared_at_each_start(several: Ranks) -> None:
    def body() -> None:
        # Without shared memory only the first calls on a communicator are compared.
        comm = mpicoll.world().duplicate()
        last = comm.rank == comm.size - 1
        for nbytes in mismatches.NBYTES:
            x = _x(nbytes // 4)
            plans = mpicoll.allreduce_init(x, comm=comm), mpicoll.bcast_init(x, comm=comm)
            for plan in plans:
                plan()
            with pytest.raises(mpicoll.MismatchError, match="they differ in operation"):
                plans[last]()
            plans[last].start()
            with pytest.raises(mpicoll.MismatchError, match="they differ in operation"):
                plans[last].wait()
            assert plans[0]().sum() == comm.size * x.size
        comm.free()

    several(body)


def test_shapes_of_as_many_elements_are_no_mismatch(several: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        for nbytes in mismatches.NBYTES:
            count = nbytes // 4
            x = _x(count).reshape((count // 2, 2) if world.rank else count)
            assert (mpicoll.allreduce(x) == world.size).all()
            assert (mpicoll.bcast(x) == 1).all()

    several(body)


def test_cases_are_all_different_and_mean_something() -> None:
    for face in mismatches.FACES:
        cases = mismatches.cases("tests", 210, (2, 3, 4), face)
        assert {one.kind for one in cases} == set(mismatches.KINDS)
        assert {one.form for one in cases} == set(mismatches.FORMS)
        for one in cases:
            assert one.usual != one.theirs
            assert 0 < len(one.odd) <= one.size // 2
        assert len(set(map(str, cases))) == len(cases)


@pytest.mark.parametrize("rows", [1, 4, 100_000])
@pytest.mark.parametrize("change", [1, -1, None], ids=["more", "less", "none"])
@pytest.mark.extension
def test_rows_of_alltoall_are_compared_by_default(several: Ranks, rows: int, change: int | None) -> None:
    def body() -> str:
        world = mpicoll.world()
        equal = [rows] * world.size
        sent = equal.copy()
        if world.rank == 0:
            sent[1] = 0 if change is None else rows + change
        texts = set()
        for _ in range(4):  # which the other ranks repeat then without Python code
            mpicoll.alltoall(np.ones(sum(equal)), counts=(equal, equal))
        for _ in range(2):  # the second call is a repeated one
            with pytest.raises(mpicoll.MismatchError) as caught:
                mpicoll.alltoall(np.ones(sum(sent)), counts=(sent, equal))
            texts.add(str(caught.value).splitlines()[0].partition("blocks of alltoall: ")[2])
        assert mpicoll.alltoall(np.ones(sum(equal)), counts=(equal, equal)).sum() == sum(equal)
        (text,) = texts
        return text

    count = 0 if change is None else rows + change
    expected = f"rank 0 sends {count} rows to rank 1, which expects {rows}; they differ in counts"
    assert set(several(body)) == {expected}
