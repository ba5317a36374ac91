"""The short way of repeated calls in the extension: which calls take it, and which are left to Python."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import mpicoll
from mpicoll.engine.core.communicator import core_of
from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.engine.diagnostics.flight_recorder import Call, recorder
from mpicoll.engine.dispatch import bind_repeated

pytestmark = [pytest.mark.mpi, pytest.mark.extension]


@pytest.fixture
def comm() -> Iterator[mpicoll.Communicator]:
    if mpicoll.world().size < 2:
        pytest.skip("needs two ranks")
    with mpicoll.world().duplicate() as made:
        yield made


def is_last_short(core: CommunicatorCore) -> bool:
    """Return True if the extension alone has carried out the last collective."""
    records = recorder.list_records(True)
    return bool(records) and records[-1][0][0] is core.queue.group and records[-1][0][1] == core.queue.number


def repeat(core: CommunicatorCore, call: Callable[[], Any], times: int = 4) -> Any:
    """Return the result of the last of some calls, the last of which has to take the short way."""
    for _ in range(times - 1):
        call()
    value = call()
    assert is_last_short(core)
    return value


@pytest.mark.parametrize("algorithm", [None, "native"])
def test_every_collective_takes_it(comm: mpicoll.Communicator, algorithm: str | None) -> None:
    core, rank, size = core_of(comm), comm.rank, comm.size
    how: dict[str, Any] = {"comm": comm, "algorithm": algorithm}
    x, every = np.arange(4.0) + rank, np.arange(4.0 * size).reshape(size, 4)
    total = size * np.arange(4.0) + sum(range(size))
    root = size - 1
    only = rank == root
    wholes = np.stack([np.arange(4.0) + peer for peer in range(size)])
    cases: list[tuple[Callable[[Any], Any], Any, bool]] = [
        (lambda out: mpicoll.allreduce(x, out=out, **how), total, True),
        (lambda out: mpicoll.scan(x, out=out, **how), wholes[: rank + 1].sum(0), True),
        (lambda out: mpicoll.exscan(x, out=out, **how), wholes[:rank].sum(0), True),
        (lambda out: mpicoll.bcast(x, root, out=out, **how), wholes[root], True),
        (lambda out: mpicoll.allgather(x[None], out=out, **how), wholes, True),
        (lambda out: mpicoll.allgather(x, counts=[4] * size, out=out, **how), wholes.reshape(-1), True),
        (lambda out: mpicoll.reduce_scatter(every, out=out, **how), every[rank][None] * size, True),
        (lambda out: mpicoll.alltoall(every, out=out, **how), np.stack([every[rank]] * size), True),
        (lambda out: mpicoll.scatter(every if only else None, root, out=out, **how), every[rank][None], False),
        (lambda out: mpicoll.scatter(every if only else x[None], root, out=out, **how), every[rank][None], True),
        (lambda out: mpicoll.bcast(x if only else None, root, out=out, **how), wholes[root], False),
    ]
    for call, want, makes in cases:
        out = np.empty_like(want)
        assert repeat(core, lambda call=call, out=out: call(out)) is out
        np.testing.assert_array_equal(out, want)
        if makes:
            np.testing.assert_array_equal(repeat(core, lambda call=call: call(None)), want)
    for reduce, want in ((mpicoll.reduce, total), (mpicoll.gather, wholes)):
        given = x if reduce is mpicoll.reduce else x[None]
        got = repeat(core, lambda reduce=reduce, given=given: reduce(given, root=root, **how))
        if only:
            np.testing.assert_array_equal(got, want)
        else:
            assert got is None
    assert repeat(core, lambda: mpicoll.barrier(**how)) is None


def test_counts_may_be_lists_and_differ_from_call_to_call(comm: mpicoll.Communicator) -> None:
    core, rank, size = core_of(comm), comm.rank, comm.size
    for rows in (0, 1, 5, 300):
        send = [rows + (rank + dest) % 2 for dest in range(size)]
        x = np.repeat(100.0 * rank + np.arange(size), send)
        want = np.repeat(100.0 * np.arange(size) + rank, send)
        for counts in ((send, send), (tuple(send), send), [tuple(send)] * 2):
            out = np.empty_like(want)
            assert repeat(core, partial(mpicoll.alltoall, x, counts=counts, out=out, comm=comm)) is out
            np.testing.assert_array_equal(out, want)
        wrong = [*send]
        wrong[rank] += 1
        with pytest.raises(mpicoll.ShapeError):
            mpicoll.alltoall(x, counts=(send, wrong), comm=comm)


@pytest.mark.parametrize("elements", [4, 40_000])
def test_every_collective_of_one_rank_takes_it(elements: int) -> None:
    with mpicoll.world().split(mpicoll.world().rank) as comm:
        core, x = core_of(comm), np.arange(float(elements))
        how: dict[str, Any] = {"comm": comm, "algorithm": "ring"}
        forms: list[tuple[Callable[[Any], Any], Any]] = [
            (lambda out: mpicoll.allreduce(x, out=out, comm=comm), x),
            (lambda out: mpicoll.allreduce(x, "max", out=out, **how), x),
            (lambda out: mpicoll.reduce(x, out=out, comm=comm), x),
            (lambda out: mpicoll.scan(x, out=out, comm=comm), x),
            (lambda out: mpicoll.bcast(x, out=out, comm=comm), x),
            (lambda out: mpicoll.allgather(x[None], out=out, comm=comm), x[None]),
            (lambda out: mpicoll.gather(x[None], out=out, comm=comm), x[None]),
            (lambda out: mpicoll.reduce_scatter(x[None], out=out, comm=comm), x[None]),
            (lambda out: mpicoll.alltoall(x[None], out=out, comm=comm), x[None]),
            (lambda out: mpicoll.scatter(x[None], out=out, comm=comm), x[None]),
        ]
        for call, want in forms:
            out = np.empty_like(want)
            assert repeat(core, lambda call=call, out=out: call(out)) is out
            np.testing.assert_array_equal(out, want)
            np.testing.assert_array_equal(repeat(core, lambda call=call: call(None)), want)
        assert repeat(core, lambda: mpicoll.barrier(comm=comm)) is None
        own = x.copy()
        assert repeat(core, lambda: mpicoll.allreduce(own, out=own, comm=comm)) is own
        np.testing.assert_array_equal(own, x)
        for op, want in (("avg", x), (mpicoll.premul_sum(2), 2 * x), ("lor", np.ones(elements, int))):
            given = np.full(elements, 7) if op == "lor" else x
            for _ in range(4):
                np.testing.assert_array_equal(mpicoll.allreduce(given, op, comm=comm), want)
        for _ in range(4):
            np.testing.assert_array_equal(mpicoll.exscan(x, comm=comm), 0 * x)


@pytest.mark.parametrize("dtype", [np.float64, np.int32])
def test_mpi_is_called_in_place(comm: mpicoll.Communicator, dtype: type) -> None:
    """By the same bound call as calls that have an output of their own."""
    core, rank, size = core_of(comm), comm.rank, comm.size
    want = np.full(3, sum(range(size)), dtype)
    for call, result in (
        (lambda x, out: mpicoll.allreduce(x, out=out, comm=comm, algorithm="native"), want),
        (lambda x, out: mpicoll.bcast(x, size - 1, out=out, comm=comm, algorithm="native"), want * 0 + size - 1),
        (lambda x, out: mpicoll.exscan(x, out=out, comm=comm, algorithm="native"), want * 0 + sum(range(rank))),
        (lambda x, out: mpicoll.scan(x, out=out, comm=comm, algorithm="native"), want * 0 + sum(range(rank + 1))),
    ):
        x, out = np.full(3, rank, dtype), np.empty(3, dtype)
        repeat(core, lambda call=call, x=x, out=out: call(x, out))
        np.testing.assert_array_equal(out, result)
        call(x, x)
        assert is_last_short(core)
        np.testing.assert_array_equal(x, result)
        # Input and output that overlap are left to Python.
        memory = np.full(4, rank, dtype)
        call(memory[1:], memory[:-1])
        assert not is_last_short(core)
        np.testing.assert_array_equal(memory[:-1], result)


def test_calls_of_mpi_are_compared(comm: mpicoll.Communicator) -> None:
    core, x = core_of(comm), np.ones(4)
    repeat(core, lambda: mpicoll.allreduce(x, comm=comm, algorithm="native"))
    repeat(core, lambda: mpicoll.allreduce(x[:3], comm=comm, algorithm="native"))
    with pytest.raises(mpicoll.MismatchError, match=r"float64\[3\]"):
        mpicoll.allreduce(x[: 3 + comm.rank % 2], comm=comm, algorithm="native")
    assert core.queue.current is None
    assert recorder.list_records(False)[-1][2].startswith("MismatchError")
    repeat(core, lambda: mpicoll.allreduce(x, comm=comm, algorithm="native"), times=1)


def test_a_call_of_mpi_is_shown_while_it_runs(comm: mpicoll.Communicator) -> None:
    core, x, shown = core_of(comm), np.ones(4), []
    repeat(core, lambda: mpicoll.allreduce(x, comm=comm, algorithm="native"))
    number = core.queue.number + 1

    def watch() -> None:
        end = time.monotonic() + 30
        while core.queue.current is None and time.monotonic() < end:
            time.sleep(0.001)
        shown.append((core.queue.current, core.queue.thread))
        mpicoll.send(x, 1)

    if comm.rank == 0:
        watcher = threading.Thread(target=watch)
        watcher.start()
    elif comm.rank == 1:
        mpicoll.recv(x, 0)
    mpicoll.allreduce(x, comm=comm, algorithm="native")
    assert is_last_short(core)
    if comm.rank == 0:
        watcher.join(30)
        (_, begun, call, _, _), thread = shown[0]
        assert (begun, call.algorithm, thread) == (number, "native", threading.get_ident())
    assert core.queue.current is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_tensors_take_it(comm: mpicoll.Communicator, dtype: torch.dtype) -> None:
    core = core_of(comm)
    x = torch.full((3, 2), comm.rank + 1, dtype=dtype)
    want = torch.full((3, 2), sum(range(comm.size + 1)), dtype=dtype)
    got = repeat(core, lambda: mpicoll.allreduce(x, comm=comm))
    assert type(got) is torch.Tensor
    assert got.dtype is dtype
    assert torch.equal(got, want)
    out = torch.empty_like(x)
    assert repeat(core, lambda: mpicoll.allreduce(x, out=out, comm=comm)) is out
    assert torch.equal(out, want)
    own = torch.ones(2, dtype=dtype)
    assert repeat(core, lambda: mpicoll.allreduce(own, "max", out=own, comm=comm)) is own


def list_python_calls(call: Callable[[], Any]) -> list[str]:
    """Return the names of the functions in Python that `call` has called."""
    names: list[str] = []
    sys.setprofile(lambda frame, event, argument: names.append(frame.f_code.co_name) if event == "call" else None)
    try:
        call()
    finally:
        sys.setprofile(None)
    return names[1:]


def test_it_begins_before_any_python_code(comm: mpicoll.Communicator) -> None:
    core, x, out, counts = core_of(comm), np.ones((comm.size, 2)), np.empty((comm.size, 2)), (1,) * comm.size
    keywords: dict[str, Any] = {"out": out, "comm": comm}
    for call in (
        lambda: mpicoll.barrier(comm=comm),
        lambda: mpicoll.allreduce(x, "max", out=out, comm=comm),
        lambda: mpicoll.allreduce(x, op="max", comm=comm, out=out, algorithm=None, timeout=None),
        lambda: mpicoll.bcast(x, 1, comm=comm, out=out),
        lambda: mpicoll.reduce_scatter(x, counts=counts, out=out[:1], comm=comm),
        lambda: mpicoll.allreduce(*(x,), **keywords),
    ):
        repeat(core, call)
        assert not {"barrier", "allreduce", "bcast", "reduce_scatter"}.intersection(list_python_calls(call))
        assert is_last_short(core)


def test_times_are_those_of_the_monotonic_clock(comm: mpicoll.Communicator) -> None:
    """While the extension finds out how fast the processor's counter runs, and afterwards."""
    core, end = core_of(comm), time.monotonic() + 0.3
    repeat(core, lambda: mpicoll.barrier(comm=comm))
    go = np.ones(1)
    while mpicoll.allreduce(go, "min", comm=comm)[0]:
        before = time.monotonic()
        mpicoll.barrier(comm=comm)
        after = time.monotonic()
        (_, _, _, begun, _), ended, _ = recorder.list_records(True)[-1]
        assert before - 1e-4 < begun <= ended < after + 1e-4
        go[0] = after < end


def test_results_are_new_arrays(comm: mpicoll.Communicator) -> None:
    core = core_of(comm)
    for x in (
        np.array(3.0),
        np.ones((2, 3), np.int16),
        np.zeros(2, "i4,f8"),
        np.array([b"ab", b"c"]),
        np.ones(2, ">i4"),
    ):
        repeat(core, lambda x=x: mpicoll.bcast(x, 1, comm=comm))
        one, other = (mpicoll.bcast(x, 1, comm=comm) for _ in range(2))
        assert type(one) is np.ndarray
        assert one.flags.owndata
        assert one.flags.writeable
        assert (one.shape, one.dtype) == (x.shape, x.dtype)
        np.testing.assert_array_equal(one, x)
        assert not np.shares_memory(one, other)


def test_a_freed_communicator_is_left_to_python() -> None:
    with mpicoll.world().duplicate() as comm:
        repeat(core_of(comm), lambda: mpicoll.barrier(comm=comm))
    with pytest.raises(mpicoll.CommunicatorError, match="freed"):
        mpicoll.barrier(comm=comm)


class _Subclass(np.ndarray[Any, Any]):
    pass


def test_arrays_of_other_kinds_do_not_take_it(comm: mpicoll.Communicator) -> None:
    core, size = core_of(comm), comm.size
    x, out = np.ones(4), np.empty(4)
    repeat(core, lambda: mpicoll.allreduce(x, out=out, comm=comm))
    negated = torch._neg_view(torch.ones(4, dtype=torch.float64))
    assert negated.is_neg()
    tensor = torch.ones(4, dtype=torch.float64)
    repeat(core, lambda: mpicoll.allreduce(tensor, comm=comm))
    buffer = np.ones(8)
    others: list[Any] = [
        np.ones(4, np.float32),
        np.ones(5),
        np.ones((2, 2)),
        np.ones((3, 3)).T,
        np.ones(1 << 19)[::2],
        np.ones(4, ">f8"),
        np.ones(4).view(_Subclass),
        np.frombuffer(b"x" + np.ones(4).tobytes(), np.uint8)[1:].view(np.float64),
        torch.ones(1, dtype=torch.float64).expand(4),
        torch.nn.Parameter(torch.ones(4, dtype=torch.float64)),
        negated,
    ]
    for other in others:
        got = mpicoll.allreduce(other, comm=comm)
        assert not is_last_short(core), other
        assert got.ravel().tolist() == [-size if other is negated else size] * len(got.ravel())
    # Input and output overlap, but are not the same.
    mpicoll.allreduce(buffer[:4], out=buffer[1:5], comm=comm)
    assert not is_last_short(core)
    assert buffer.tolist() == [1] + [size] * 4 + [1] * 3
    frozen = np.empty(4)
    frozen.flags.writeable = False
    for wrong in (frozen, np.empty(4, np.float32), np.empty(5)):
        with pytest.raises((mpicoll.ShapeError, mpicoll.DTypeError, ValueError)):
            mpicoll.allreduce(x, out=wrong, comm=comm)
    with pytest.raises((mpicoll.ShapeError, mpicoll.DTypeError, ValueError)):
        mpicoll.allreduce(frozen, out=frozen, comm=comm)
    assert repeat(core, lambda: mpicoll.allreduce(x, out=out, comm=comm), 1) is out


@pytest.mark.parametrize("dtype", ["uint8", "int16", "float32", "float64", "complex128"])
def test_arrays_that_are_not_contiguous_take_it(comm: mpicoll.Communicator, dtype: str) -> None:
    core, size = core_of(comm), comm.size
    # Elements that all differ, in three dimensions, and what lies between them.
    x = np.arange(2 * 3 * 4).reshape(2, 3, 4).astype(dtype)
    want = x * np.array(size).astype(dtype)
    places: list[tuple[tuple[int, ...], Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]], bool]] = [
        ((4, 5, 4), lambda whole: whole[::2, 1:4, ::-1], False),
        ((4, 6, 4), lambda whole: whole[1:3, ::-2, :], False),
        ((4, 5, 4), lambda whole: whole.transpose(2, 1, 0)[2:, :3, :], False),
        ((4, 5, 4), lambda whole: whole.transpose(2, 1, 0)[2:, :3, :], dtype != "complex128"),
    ]
    for shape, place, tensors in places:
        whole, given = np.zeros(shape, dtype), np.zeros(shape, dtype)
        out, passed = place(whole), place(given)
        passed[...] = x
        arrays: list[Any] = [x, passed, out]
        if tensors:
            arrays = [torch.from_numpy(one) for one in arrays]
        contiguous, strided, into = arrays
        for one in (contiguous, strided):
            into[...] = 0
            assert repeat(core, partial(mpicoll.allreduce, one, out=into, comm=comm)) is into
            np.testing.assert_array_equal(out, want)
        assert np.count_nonzero(whole) == np.count_nonzero(want)
        got = repeat(core, partial(mpicoll.allreduce, strided, comm=comm))
        np.testing.assert_array_equal(np.asarray(got), want)
        np.testing.assert_array_equal(passed, x)
        # In place, once for each call.
        for _ in range(2):
            assert repeat(core, partial(mpicoll.allreduce, strided, out=strided, comm=comm), 1) is strided
        np.testing.assert_array_equal(passed, want * np.array(size).astype(dtype))


def test_arrays_that_are_not_contiguous_and_overlap(comm: mpicoll.Communicator) -> None:
    core, size = core_of(comm), comm.size
    whole = np.arange(10.0)
    repeat(core, partial(mpicoll.allreduce, whole[::2], out=np.empty(5), comm=comm))
    mpicoll.allreduce(whole[:5], out=whole[::2], comm=comm)
    assert not is_last_short(core)
    assert whole.tolist() == [0, 1, size, 3, 2 * size, 5, 3 * size, 7, 4 * size, 9]


def test_arguments_that_are_equal_but_not_alike_do_not_take_it(comm: mpicoll.Communicator) -> None:
    core, x = core_of(comm), np.ones(4)
    repeat(core, lambda: mpicoll.bcast(x, 1, comm=comm))
    with pytest.raises(mpicoll.MpicollError):
        mpicoll.bcast(x, 1.0, comm=comm)  # type: ignore[arg-type]
    mpicoll.bcast(x, np.int64(1), comm=comm)  # type: ignore[arg-type]
    assert not is_last_short(core)


class _Observer:
    needs_every_operation = needs_call_sites = compares_calls = False

    def __init__(self) -> None:
        self.calls: list[str] = []

    def before(self, entry: Any, function: Any, interrupts: Any) -> None:
        self.calls.append(entry[2].name)

    def after(self, entry: Any, function: Any, interrupts: Any) -> None:
        pass


def test_rules_observers_and_pending_operations_disable_it(comm: mpicoll.Communicator) -> None:
    core, x, out = core_of(comm), np.ones(4), np.empty(4)

    def call() -> Any:
        return mpicoll.allreduce(x, out=out, comm=comm)

    repeat(core, call)
    with mpicoll.algorithms(allreduce="ring"):
        call()
        assert not is_last_short(core)
    repeat(core, call, 1)
    observer = _Observer()
    core.queue.observer = observer
    call()
    assert not is_last_short(core)
    assert observer.calls == ["allreduce"]
    core.queue.observer = None
    repeat(core, call, 1)
    mpicoll.allreduce(x, comm=comm, timeout=20)
    assert not is_last_short(core)
    request = mpicoll.iallreduce(np.ones(4), comm=comm)
    number = core.queue.number
    call()
    assert request.wait().tolist() == [comm.size] * 4
    assert core.queue.number in (number + 1, number + 2)
    repeat(core, call, 1)


def test_plans_take_it(comm: mpicoll.Communicator) -> None:
    core, size = core_of(comm), comm.size
    x, out = np.ones(4), np.empty(4)
    plans = [
        mpicoll.allreduce_init(x, out=out, comm=comm),
        mpicoll.allreduce_init(x, comm=comm),
        mpicoll.allreduce_init(torch.from_numpy(x), comm=comm),
        mpicoll.bcast_init(x, comm=comm),
        mpicoll.barrier_init(comm=comm),
        mpicoll.reduce_init(x, root=1, comm=comm),
    ]
    factors = (size, size, size, 1, None, size if comm.rank == 1 else None)
    for turn in range(4):
        x[:] = turn + 1
        for plan, factor in zip(plans, factors, strict=True):
            got = plan()
            assert turn == 0 or is_last_short(core)
            assert (got is None) == (factor is None)
            if factor is not None:
                assert got.tolist() == [factor * (turn + 1)] * 4
    plans[0].start()
    with pytest.raises(mpicoll.ArgumentError, match="pending"):
        plans[0]()
    assert plans[0].wait() is out
    observer = _Observer()
    core.queue.observer = observer
    plans[0]()
    assert not is_last_short(core)
    assert observer.calls == ["allreduce"]
    core.queue.observer = None
    with pytest.raises(mpicoll.MismatchError):
        plans[1 if comm.rank else 4]()
    assert plans[0]().tolist() == [4 * size] * 4
    assert is_last_short(core)
    comm.free()
    with pytest.raises(mpicoll.CommunicatorError):
        plans[0]()


def test_plans_take_it_again_after_the_calls_were_discarded(comm: mpicoll.Communicator) -> None:
    core, x = core_of(comm), np.ones(4)
    plan = mpicoll.allreduce_init(x, comm=comm)
    repeat(core, plan)
    mpicoll.empty(4, "float64", comm=comm)
    plan()
    assert repeat(core, plan, 1).tolist() == [comm.size] * 4


def test_equal_names_and_numbers_take_it(comm: mpicoll.Communicator) -> None:
    """Also where they are not the same objects in each call."""
    core, x, letters = core_of(comm), np.ones(4), ["m", "ax"]
    assert repeat(core, lambda: mpicoll.allreduce(x, "".join(letters), comm=comm)).tolist() == [1] * 4


def test_a_disagreement_is_reported_on_every_rank(comm: mpicoll.Communicator) -> None:
    core, x, out = core_of(comm), np.ones(4), np.empty(4)
    for op in ("sum", "max"):
        repeat(core, lambda op=op: mpicoll.allreduce(x, op, out=out, comm=comm))
    for _ in range(2):
        with pytest.raises(mpicoll.MismatchError, match="they differ in op"):
            mpicoll.allreduce(x, "max" if comm.rank else "sum", out=out, comm=comm)
        assert not core.queue.lock.locked()
        assert core.queue.current is None
        repeat(core, lambda: mpicoll.allreduce(x, out=out, comm=comm), 1)


def test_a_call_in_a_signal_handler_is_rejected(comm: mpicoll.Communicator) -> None:
    core, x, out = core_of(comm), np.ones(4), np.empty(4)
    errors: list[BaseException] = []

    def handle(*_: Any) -> None:
        try:
            mpicoll.allreduce(x, out=out, comm=comm)
        except mpicoll.MpicollError as error:
            errors.append(error)

    repeat(core, lambda: mpicoll.allreduce(x, out=out, comm=comm))
    if comm.rank == 0:
        previous = signal.signal(signal.SIGALRM, handle)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        try:
            mpicoll.allreduce(x, out=out, comm=comm)  # the other ranks are late
        finally:
            signal.signal(signal.SIGALRM, previous)
        assert [type(error) for error in errors] == [mpicoll.CommunicatorError]
    else:
        signal.sigtimedwait([], 0.3)
        mpicoll.allreduce(x, out=out, comm=comm)
    assert out.tolist() == [comm.size] * 4
    repeat(core, lambda: mpicoll.allreduce(x, out=out, comm=comm), 1)


def test_a_call_of_another_thread_is_rejected(comm: mpicoll.Communicator) -> None:
    """Also as long as the extension carries out the first one without the interpreter."""
    core, x = core_of(comm), np.ones(1 << 19)
    out = np.empty_like(x)
    repeat(core, lambda: mpicoll.allreduce(x, out=out, comm=comm))

    def work() -> None:
        for _ in range(200):
            mpicoll.allreduce(x, out=out, comm=comm)

    other = threading.Thread(target=work, name="Other")
    other.start()
    error = None
    while other.is_alive():
        time.sleep(1e-4)
        lock = core.queue.lock
        if error is None and (call := lock.call) is not None and core.queue.current is None:
            assert (call.name, lock.thread or other.ident) == ("allreduce", other.ident)
            core.queue.match = lambda call: None  # if it is not rejected, it concerns no other rank
            try:
                core.queue.run(lambda: None, Call("probe"))
            except mpicoll.CommunicatorError as caught:
                error = caught
    other.join(20)
    assert out[-1] == comm.size
    assert error is not None
    assert "while thread Other is in allreduce(" in str(error) or "while another thread (of" in str(error)
    assert lock.call is None
    assert lock.thread == 0


def test_a_finalizer_may_make_a_collective(comm: mpicoll.Communicator) -> None:
    """The record of a call drops an older one, when the call no longer holds the lock."""
    core, x = core_of(comm), np.ones(4)
    done: list[float] = []

    class Finalized(Call):
        def __del__(self) -> None:
            done.append(mpicoll.allreduce(x, comm=comm)[0])

    plan = mpicoll.allreduce_init(x, comm=comm)
    repeat(core, plan)
    run = bind_repeated(plan._operation, plan.choice, Finalized("allreduce"))
    assert run is not None
    assert run()
    del run
    for _ in range(1100):
        assert not done or done == [comm.size]
        mpicoll.allreduce(x, comm=comm)
    assert done == [comm.size]


def test_calls_are_in_the_history(comm: mpicoll.Communicator) -> None:
    core, x = core_of(comm), np.ones(4)
    repeat(core, lambda: mpicoll.allreduce(x, comm=comm))
    entry, end, error = recorder.list_records(True)[-1]
    assert entry[2].name == "allreduce"
    assert entry[3] <= end
    assert not error


def test_a_freed_communicator_is_refused() -> None:
    if mpicoll.world().size < 2:
        pytest.skip("needs two ranks")
    x = np.ones(4)
    with mpicoll.world().duplicate() as comm:
        repeat(core_of(comm), lambda: mpicoll.allreduce(x, comm=comm))
    with pytest.raises(mpicoll.CommunicatorError):
        mpicoll.allreduce(x, comm=comm)


def test_random_sequences_have_the_results_of_single_calls(comm: mpicoll.Communicator) -> None:
    """The same seed on every rank: kinds, ops, roots and forms by turns, many of them in one place of the table."""
    rng, size = np.random.default_rng(5), comm.size
    short = 0
    for _ in range(200):
        count, dtype = int(rng.integers(1, 6)), [np.float64, np.int32, np.int8][rng.integers(3)]
        op, form, root = ["sum", "max", "min"][rng.integers(3)], rng.integers(3), int(rng.integers(size))
        values = rng.integers(-9, 9, (size, count)).astype(dtype)
        x = values[comm.rank].copy()
        out = (None, np.empty_like(x), x)[form]
        if rng.integers(2):
            want = {"sum": values.sum(0, dtype=dtype), "max": values.max(0), "min": values.min(0)}[op]
            got = mpicoll.allreduce(x, op, out=out, comm=comm)
        else:
            want, got = values[root], mpicoll.bcast(x, root, out=out, comm=comm)
        short += is_last_short(core_of(comm))
        assert got.dtype == dtype
        assert out is None or got is out
        np.testing.assert_array_equal(got, want)
    assert short > 20
