"""How collectives and messages on device memory are carried out, on a device that does its work as late as it may."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from support.ranks import Ranks

import mpicoll
from mpicoll.buffers.device import Device, DeviceArray
from mpicoll.buffers.recognise import recognise
from mpicoll.buffers.streams import record_events
from mpicoll.collectives.arguments import recognise_operand
from mpicoll.engine import dispatch
from mpicoll.engine.executors import device as devices
from mpicoll.engine.executors import staging
from mpicoll.engine.executors.staging import PIECE
from mpicoll.engine.selection.layout import NodeLayout
from mpicoll.engine.selection.query import TunedTable, selection_context
from mpicoll.engine.selection.rules import parse_rules
from mpicoll.engine.selection.selector import Choice
from mpicoll.transport import cuda_awareness

SIZES = (0, 1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 3 * PIECE + 5)
"""Bytes of messages around those that pass at a time."""


def memory(cuda: ModuleType, values: Any) -> tuple[Any, DeviceArray]:
    """An array on the device, which is to be kept, and its memory as bytes."""
    array = cuda.asarray(values)
    found = recognise("test", array).array
    assert isinstance(found, DeviceArray)
    return array, found.reshape(-1).view(np.uint8)


def pattern(size: int, *seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng([size, *seed]).integers(0, 256, size, np.uint8)


def after(cuda: ModuleType, *arrays: Any) -> tuple[Any, ...]:
    return record_events(*(recognise("test", array) for array in arrays))


# --- messages of schedules


@pytest.mark.parametrize("sizes", [SIZES, SIZES[::-1], (2 * PIECE + 3, 0, 7)], ids=["growing", "shrinking", "mixed"])
def test_messages_pass_in_pieces(cuda: ModuleType, sizes: tuple[int, ...]) -> None:
    """To both neighbours at once, in rounds on the same page-locked memory, with another size to each of them."""

    def main() -> None:
        world = mpicoll.world()
        rank, size = world.rank, world.size
        wire = staging.StagedExchanger(world._core.transport, memory(cuda, [0])[1].on)
        left, right = (rank - 1) % size, (rank + 1) % size
        got = []
        for number, (first, second) in enumerate(zip(sizes, (*sizes[1:], sizes[0]), strict=True)):
            up, up_memory = memory(cuda, pattern(first, rank, number, 0))
            down, down_memory = memory(cuda, pattern(second, rank, number, 1))
            into = [memory(cuda, np.zeros(count, np.uint8)) for count in (first, second)]
            with up_memory.on.working(after(cuda, up, down, *(one for one, _ in into))):
                wire.exchange(
                    [(right, up_memory), (left, down_memory)], [(left, into[0][1]), (right, into[1][1])], number
                )
                # More work of the device before it is synchronised, as schedules have it.
                np.add(into[0][1], 1, out=into[0][1])
            got.append((into, first, second))
        for number, (into, first, second) in enumerate(got):
            np.testing.assert_array_equal(cuda.asnumpy(into[0][0]), pattern(first, left, number, 0) + np.uint8(1))
            np.testing.assert_array_equal(cuda.asnumpy(into[1][0]), pattern(second, right, number, 1))

    mpicoll.run_local(main, 3, timeout=60)


def test_memory_of_the_host_passes_as_it_is(cuda: ModuleType) -> None:
    """Beside device memory: schedules have messages without bytes."""

    def main() -> None:
        world = mpicoll.world()
        other = 1 - world.rank
        x, source = memory(cuda, pattern(PIECE + 9, world.rank))
        y, target = memory(cuda, np.zeros(PIECE + 9, np.uint8))
        token, small = np.empty(0, np.uint8), np.full(3, world.rank, np.uint8)
        arrived = np.zeros(3, np.uint8)
        with source.on.working(after(cuda, x, y)):
            staging.StagedExchanger(world._core.transport, source.on).exchange(
                [(other, token), (other, small), (other, source)],
                [(other, token), (other, arrived), (other, target)],
                1,
            )
        assert arrived.tolist() == [other] * 3
        np.testing.assert_array_equal(cuda.asnumpy(y), pattern(PIECE + 9, other))

    mpicoll.run_local(main, 2, timeout=60)


@contextmanager
def without(name: str) -> Iterator[None]:
    """Leave a synchronisation of the device out."""
    from mpicoll.buffers.cuda.device import CudaDevice

    kind: Any = CudaDevice
    kept = getattr(kind, name)
    setattr(kind, name, lambda self: None)
    try:
        yield
    finally:
        setattr(kind, name, kept)


def wrong(body: Callable[[], None]) -> bool:
    """Whether what `body` asserts does not hold."""
    try:
        mpicoll.run_local(body, 2, timeout=20)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("algorithm", ["shm_pipelined", "shm_flat", "ipc"])
@pytest.mark.extension
def test_a_missing_synchronization_is_seen(cuda: ModuleType, algorithm: str) -> None:
    """The tests would notice if one were forgotten."""

    def main() -> None:
        world = mpicoll.world()
        # The other rank's work may happen to be done in time.
        for number in range(20):
            x = cuda.asarray(np.arange(5000.0) * number + world.rank)
            found = cuda.asnumpy(mpicoll.allreduce(x, algorithm=algorithm))
            np.testing.assert_array_equal(found, 2 * np.arange(5000.0) * number + 1)

    assert not wrong(main)
    with without("synchronize"):
        assert wrong(main)


def test_a_stream_that_no_rank_waits_for_shows(cuda: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def main() -> None:
        world = mpicoll.world()
        x = cuda.asarray(np.arange(5000.0))
        x += world.rank  # by work of the caller's stream, which waits until somebody waits for it
        found = cuda.asnumpy(mpicoll.allreduce(x, algorithm="ring"))
        np.testing.assert_array_equal(found, 2 * np.arange(5000.0) + 1)

    assert not wrong(main)
    monkeypatch.setattr("mpicoll.engine.core.operation.record_events", lambda *buffers: ())
    assert wrong(main)


# --- what there is


@pytest.mark.extension
def test_a_device_without_a_compiler(cuda: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Collectives are carried out by the host, and it is said why."""
    from mpicoll.buffers.cuda import folds

    def refuse(*arguments: Any) -> Any:
        raise RuntimeError("libnvrtc can't be found\nin three folders")

    def main() -> None:
        world = mpicoll.world()
        x = cuda.asarray(np.arange(1000.0))
        np.testing.assert_array_equal(cuda.asnumpy(mpicoll.allreduce(x)), world.size * np.arange(1000.0))
        told = str(mpicoll.explain("allreduce", 8000, like=x))
        assert "not ipc: rank 0 of 2: no kernel can be compiled for cuda:0, or none runs there" in told, told
        assert "can't read memory" not in told

    monkeypatch.setattr(folds, "_kernel", refuse)
    with pytest.warns(UserWarning, match="no kernel can be compiled .*: RuntimeError: libnvrtc can't be found; coll"):
        mpicoll.run_local(main, 2, timeout=60)


def test_it_is_found_out_once(cuda: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    verdict = cuda_awareness.find_cuda_support

    def counted(program: str | None) -> cuda_awareness.CudaSupport:
        asked.append(program is not None)
        return verdict(None)

    monkeypatch.setattr(cuda_awareness, "find_cuda_support", counted)

    def main() -> None:
        world = mpicoll.world()
        x = cuda.asarray(np.ones(3))
        for _ in range(3):
            mpicoll.allreduce(x)
            mpicoll.bcast(x)
        assert world._core.devices.device.name == "cuda:0"

    mpicoll.run_local(main, 2, timeout=60)
    # Messages leave no node, so nothing is tried.
    assert asked == [False] * 2
    asked.clear()
    mpicoll.run_local(main, 4, ranks_per_node=2, timeout=60)
    # One rank of each node tries; communicators of the phases have one rank on each node.
    assert asked.count(True) >= 2


def test_a_rank_that_can_not_tell_stops_all(cuda: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(program: str | None) -> cuda_awareness.CudaSupport:
        if mpicoll.world().rank == 1:
            raise mpicoll.SetupError("no such thing")
        return cuda_awareness.CudaSupport(False, False, False, {}, "test")

    monkeypatch.setattr(cuda_awareness, "find_cuda_support", failing)

    def main() -> None:
        kind = mpicoll.SetupError if mpicoll.world().rank == 1 else mpicoll.DeviceError
        with pytest.raises(kind, match="no such thing"):
            mpicoll.allreduce(cuda.asarray(np.ones(3)))

    mpicoll.run_local(main, 3, timeout=60)


@pytest.mark.extension
def test_reasons(cuda: ModuleType) -> None:
    def main() -> None:
        x = cuda.asarray(np.ones(300_000, np.float32))
        before = mpicoll.explain("allreduce", x.nbytes, like=x)
        assert before.name == "nccl"  # it is hoped for
        mpicoll.allreduce(x)
        choice = mpicoll.explain("allreduce", x.nbytes, like=x)
        assert choice.name == "ipc"
        assert "not nccl (table): ranks 0 and 1 share a device, which NCCL refuses" in choice.reason
        words = str(choice)
        assert "not cma: the data is on a device" in words
        assert "not native: " in words
        with pytest.raises(mpicoll.AlgorithmError, match=r"ipc.*the data is on the host"):
            mpicoll.allreduce(np.ones(3), algorithm="ipc")
        function = mpicoll.Op(lambda a, b: a + b, commutative=True, elementwise=True)
        with pytest.raises(
            mpicoll.AlgorithmError, match=r"shm_pipelined.*op user \(<lambda>\) needs arrays on the device"
        ):
            mpicoll.allreduce(x, function, algorithm="shm_pipelined")

    mpicoll.run_local(main, 2, timeout=60)


@pytest.mark.parametrize(
    ("collective", "dtype", "kind"),
    [
        ("allreduce", "float32", "float"),
        ("reduce", "float16", "half"),
        ("reduce_scatter", "complex64", "complex"),
        ("allreduce", "int8", "integer"),
        ("bcast", "float16", "moved"),
    ],
)
@pytest.mark.extension
def test_what_was_tuned_for_such_devices(
    cuda: ModuleType, collective: str, dtype: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Is taken by calls, by plans and by explain; not what was tuned for the host or for devices of one rank each."""
    took = []
    carry_out = dispatch._run_on_device

    def carried_out(operation: Any, choice: Choice, mine: Any) -> None:
        took.append(choice.name)
        carry_out(operation, choice, mine)

    monkeypatch.setattr(dispatch, "_run_on_device", carried_out)
    models = f"{devices_of(cuda)[0]} shared by 3"
    names = {f"{kind} on {models}": "shm_pipelined", kind: "native", f"{kind} on {devices_of(cuda)[0]}": "ipc"}
    shape = NodeLayout(3, 1, 3)
    rules = {one: parse_rules(f"{collective}:{name}") for one, name in names.items()}

    def main() -> None:
        world = mpicoll.world()
        world._core.context = selection_context(shape, TunedTable("text", "t.json", {shape: rules}))
        x = cuda.asarray(np.ones(30, dtype))
        assert "tuned" not in mpicoll.explain(collective, x.nbytes, dtype=dtype, like=x).reason
        plan = getattr(mpicoll, f"{collective}_init")(x)
        choice = mpicoll.explain(collective, x.nbytes, dtype=dtype, like=x)
        assert choice.reason == f"tuned for {kind} on {models} on 3 ranks on 1 node, t.json"
        assert plan.choice == choice
        getattr(mpicoll, collective)(x)

    mpicoll.run_local(main, 3, timeout=60)
    assert took == ["shm_pipelined"] * 3


def devices_of(cuda: ModuleType) -> list[str]:
    """What their maker calls the devices."""
    runtime = cuda.cuda.runtime
    return [runtime.getDeviceProperties(one)["name"].decode() for one in range(runtime.getDeviceCount())]


def test_devices_are_identified_by_model_and_ranks_that_share_one(
    cuda: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "find_kernel_failure", lambda device: None)
    told = [("A", "1"), ("B", "2"), ("A", "1"), ("A", "3"), ("A", "1")]

    class Some(Elsewhere):
        identity = model = ""

    def main(size: int) -> list[str | None]:
        found = []
        for members in (range(size), range(size - 1, size), range(0, size, 2)):
            comm = mpicoll.world().group(members)
            if comm is not None:
                mine: Any = Some()
                mine.model, mine.identity = told[mpicoll.world().rank]
                one = devices.DeviceContext(comm._core, mine)
                one._ipc = one._nccl = "not here"
                assert one.get_capabilities("allreduce", None).models is None
                one.exchange_capabilities()
                found.append(one.get_capabilities("allreduce", None).models)
        return found

    assert mpicoll.run_local(main, 5, 5, timeout=60)[4] == ["A and B shared by 3", "A", "A shared by 3"]
    assert mpicoll.run_local(main, 2, 2, timeout=60) == [["A and B", "A"], ["A and B", "B"]]


def test_host_and_device_do_not_mix(cuda: ModuleType, several: Ranks) -> None:
    def main() -> None:
        x = cuda.asarray(np.ones(3))
        who = rf"\(rank {mpicoll.world().rank} of "
        with pytest.raises(mpicoll.DeviceError, match=rf"^allreduce: x lies on cuda:0, out on the host; .*{who}"):
            mpicoll.allreduce(x, out=np.ones(3))
        with pytest.raises(mpicoll.DeviceError, match=rf"^allgather: x lies on the host, out on cuda:0; .*{who}"):
            mpicoll.allgather(np.ones(3), out=cuda.asarray(np.ones(3 * mpicoll.world().size)))
        with pytest.raises(mpicoll.DeviceError, match=rf"^allreduce: values are on cuda:0, indices on .*{who}"):
            mpicoll.allreduce((x, np.zeros(3, int)), "minloc")

    several(main)


class Elsewhere:
    """Another device of the same process."""

    name = "cuda:7"


def test_a_communicator_has_one_device(cuda: ModuleType) -> None:
    world = mpicoll.world()
    side = world.duplicate()
    mpicoll.allreduce(cuda.asarray(np.ones(3)), comm=side)
    other: Any = Elsewhere()
    with pytest.raises(mpicoll.DeviceError, match=r"is on cuda:7, but .* uses cuda:0 .*duplicate"):
        devices.get_device_context(side._core, other)
    side.free()
    assert side._core.devices is None


# --- plans, requests, messages


def test_a_plan_reads_what_is_there_by_then(cuda: ModuleType) -> None:
    def main() -> None:
        world = mpicoll.world()
        x = cuda.asarray(np.zeros(100))
        plan = mpicoll.allreduce_init(x, algorithm="ring")
        for number in range(1, 4):
            x += 1  # on the caller's stream: nothing has happened yet
            np.testing.assert_array_equal(cuda.asnumpy(plan()), np.full(100, world.size * number))
        x += 1
        plan.start()
        np.testing.assert_array_equal(cuda.asnumpy(plan.wait()), np.full(100, 4 * world.size))

    mpicoll.run_local(main, 3, timeout=60)


@pytest.mark.extension
def test_the_record_names_the_memory_and_the_way(cuda: ModuleType) -> None:
    def main() -> None:
        task = devices_task(cuda)
        assert str(task.call) == "allreduce(float64[3] on cuda, op=sum)"
        task()
        assert str(task.call) == "allreduce(float64[3] on cuda, op=sum) by ipc"

    mpicoll.run_local(main, 2, timeout=60)


def devices_task(cuda: ModuleType) -> Any:
    from mpicoll.collectives import allreduce
    from mpicoll.engine.dispatch import make_task

    return make_task(allreduce.prepare(mpicoll.world()._core, cuda.asarray(np.ones(3)), "sum", None, None))


def test_a_message_between_host_and_device(cuda: ModuleType) -> None:
    """Who sends need not know where it goes."""

    def main() -> None:
        world = mpicoll.world()
        x = np.arange(300_000.0)
        if world.rank == 0:
            mpicoll.send(cuda.asarray(x), 1)
            mpicoll.send(x + 1, 1)
        else:
            np.testing.assert_array_equal(mpicoll.recv(np.empty_like(x), 0), x)
            into = cuda.asarray(np.zeros_like(x))
            assert mpicoll.recv(out=into, source=0) is into
            np.testing.assert_array_equal(cuda.asnumpy(into), x + 1)

    mpicoll.run_local(main, 2, timeout=60)


def test_a_receive_waits_for_a_rank_that_still_reads(cuda: ModuleType) -> None:
    """Work that the caller gave before the receive sees what was there before."""
    world = mpicoll.world()
    into = cuda.asarray(np.ones(1000))
    before = into * 2
    mpicoll.sendrecv(cuda.asarray(np.full(1000, 5.0)), 0, 0, out=into)
    np.testing.assert_array_equal(cuda.asnumpy(before), np.full(1000, 2.0))
    np.testing.assert_array_equal(cuda.asnumpy(into), np.full(1000, 5.0))
    assert world.size == 1


def test_numbers_are_looked_at_on_the_device(cuda: ModuleType) -> None:
    def main() -> None:
        x = np.ones(10, np.float32)
        x[7] = np.nan
        with mpicoll.debug(numerics=True), pytest.raises(mpicoll.NumericsError, match=r"1 NaN of 10 elements.*\[7\]"):
            mpicoll.allreduce(cuda.asarray(x))

    mpicoll.run_local(main, 2, timeout=60)


def test_threads_have_streams_of_their_own(cuda: ModuleType) -> None:
    """So that work of one is not waited for by another."""
    found: Device = memory(cuda, [0])[1].on
    streams = []

    def look() -> None:
        with found.working():
            streams.append(found.stream)

    look()
    other = threading.Thread(target=look)
    other.start()
    other.join()
    look()
    assert streams[0] == streams[2] != streams[1]


def test_what_the_host_may_not_touch(cuda: ModuleType) -> None:
    x, array = memory(cuda, np.arange(4, dtype=np.uint8))
    assert repr(array).startswith("<uint8[4] on cuda:0 at 0x")
    for touch in (
        lambda: array + 1,
        array.sum,
        lambda: bool(array[0]),
        array.tolist,
        lambda: np.concatenate([array, array]),
        lambda: np.copyto(np.zeros(4, np.uint8), array, where=False),
        lambda: list(array),
    ):
        with pytest.raises(mpicoll.DeviceError, match="the host can't read memory of cuda:0"):
            touch()
    np.testing.assert_array_equal(cuda.asnumpy(x), np.arange(4))


@pytest.mark.parametrize(
    ("op", "dtype", "why"),
    [
        ("min", "float32", "op min: NCCL may lose a NaN"),
        ("max", "float16", "op max: NCCL may lose a NaN"),
        ("sum", "uint8", "op sum: NCCL does not say what happens when a sum of uint8 overflows"),
        ("minloc", None, "op minloc: NCCL has no such reduction"),
        ("max", "int32", None),
    ],
)
def test_what_is_not_left_to_nccl(op: str, dtype: str | None, why: str | None) -> None:
    x = np.zeros(3, dtype)
    reduction = recognise_operand("allreduce", (x, np.zeros(3, int)) if dtype is None else x, op)[1]
    assert devices._find_nccl_obstacle("allreduce", reduction) == why


def test_native_reduce_is_in_place_at_rank_0_only(cuda: ModuleType) -> None:
    """Some MPI libraries fail elsewhere, and can't copy memory of a device themselves."""
    called: list[list[Any]] = []

    class Native:
        def reduce(self, source: Any, target: Any, op: str, root: int) -> None:
            got = np.empty(4, np.uint8)
            np.copyto(got, source)
            target.on.synchronize()
            called.append([source is target, *got.tolist()])
            np.copyto(target, np.array([7, 8, 9, 10], np.uint8))

    kept, data = memory(cuda, np.arange(4, dtype=np.uint8))
    with data.on.working(after(cuda, kept)):
        synchronized: Any = staging.SynchronizedNative(Native(), data.on)
        synchronized.reduce(data, data, "sum", 1)
        synchronized.reduce(data, data, "sum", 0)
    assert called == [[False, 0, 1, 2, 3], [True, 7, 8, 9, 10]]
