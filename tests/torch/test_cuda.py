"""CUDA tensors in the torch face, on the fake device.

Its work waits until somebody waits for it, so whoever forgets to wait has old values, always. Each rank computes on a
stream of its own, since the default stream is one for all ranks that are threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support import cuda_tensors, fake_cuda, tiers
from support import device_bodies as bodies
from support.cuda_tensors import CudaTensor, Tensors, cuda, cuda_torch, late, now
from support.ranks import Ranks
from support.torch_cases import NAMES, Case, numbers, room
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import AllreduceOptions

import mpicoll
from mpicoll.buffers.torch import TorchCudaLibrary
from mpicoll.config import config
from mpicoll.torch import autograd
from mpicoll.torch import current_device as own_devices
from mpicoll.torch import tensors as own_tensors
from mpicoll.torch.ddp_buckets import _Buckets
from mpicoll.torch.legacy.process_group import ProcessGroupMpicoll

__all__ = ["cuda_torch"]

pytestmark = [
    pytest.mark.usefixtures("cuda_torch"),
    # torch 2.13 has new names for some collectives
    pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning"),
]


class Played:
    """How the cases get tensors."""

    late = staticmethod(late)
    now = staticmethod(now)


@contextmanager
def group_of_all() -> Iterator[ProcessGroupMpicoll]:
    """A process group of all ranks, and a stream of this rank's own."""
    comm = mpicoll.world().duplicate()
    group = ProcessGroupMpicoll(comm, dist.HashStore(), timedelta(seconds=60))
    group.setGroupName("all")
    with torch.cuda.stream(torch.cuda.Stream()):
        yield group
    group.shutdown()


@pytest.fixture
def ordered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Streams order what ranks do in each other's memory."""
    monkeypatch.setenv("MPICOLL_CUDA_ORDER", "stream")
    config.cache_clear()
    yield
    monkeypatch.delenv("MPICOLL_CUDA_ORDER")
    config.cache_clear()


# --- the collectives


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("async_op", [False, True])
def test_collectives(ranks: Ranks, async_op: bool, layout: str) -> None:
    """What was given late is waited for, and what comes is there for all streams when the call, or wait, returns."""

    def body() -> None:
        with group_of_all() as group:
            for name in NAMES:
                case = Case(group, Played(), layout)
                work = case(name, async_op)
                assert (work is not None) == async_op, name
                if work is not None:
                    assert work.wait()
                try:
                    case.check()
                except AssertionError as error:
                    raise AssertionError(f"{name}: {error}") from error

    ranks(body)


@pytest.mark.slow
def test_several_asynchronous_ones_at_once(ranks: Ranks) -> None:
    def body() -> None:
        with group_of_all() as group:
            cases = [Case(group, Played(), layout) for _ in NAMES for layout in ("contiguous", "transposed")]
            works = [
                case(name, True) for case, name in zip(cases, [one for one in NAMES for _ in range(2)], strict=True)
            ]
            for case, work in zip(cases, works, strict=True):
                assert work is not None
                work.wait()
                case.check()

    ranks(body)


class OnThisStream(Played):
    """Values are there for the current stream."""

    @staticmethod
    def now(tensor: Any) -> torch.Tensor:
        cuda_tensors.current_stream().synchronize()
        return now(tensor)


@pytest.mark.extension
@pytest.mark.usefixtures("ordered")
@pytest.mark.parametrize("async_op", [False, True])
def test_collectives_in_the_order_of_streams(several: Ranks, async_op: bool) -> None:
    def body() -> None:
        with group_of_all() as group:
            cases = []
            for name in [*NAMES, *NAMES]:
                for layout in ("contiguous", "transposed"):
                    case = Case(group, OnThisStream(), layout)
                    cases.append((name, case, case(name, async_op)))
            for name, case, work in cases:
                if work is not None:
                    assert work.wait(), name
                case.check()
            devices = group.comm._core.devices
            assert devices._order is not None, devices._no_order

    several(body, timeout=100)


@pytest.mark.extension
@pytest.mark.usefixtures("ordered")
def test_a_work_that_the_device_has_yet_to_complete() -> None:
    """wait() lets the current stream wait, is_completed() asks the device; futures are complete for the host."""

    def body() -> None:
        with group_of_all() as group:
            first = late(torch.ones(10))
            dist.all_reduce(first, group=group)
            assert torch.equal(OnThisStream.now(first), torch.full((10,), 2.0))
            mpicoll.barrier()
            word = np.frombuffer(fake_cuda.install().cuda.alloc_pinned_memory(64), np.uint32, 1)
            word[0] = group.rank() == 0
            stream = cuda_tensors.current_stream()
            fake_cuda.fakecuda.words.wait(stream._kept, word.ctypes.data, 1, 0)
            x, y = cuda(torch.ones(10)), cuda(torch.full((10,), 3.0))
            works = [dist.all_reduce(one, group=group, async_op=True) for one in (x, y)]
            for work in works:
                assert work.wait()
                work.block_current_stream()
                assert not work.is_completed()
                assert not work.is_success()
            dist.all_reduce(x, group=group)
            future = works[1].get_future()
            seen = future.then(lambda done: now(done.value()[0]).clone())
            mpicoll.barrier()
            assert not future.done()
            mpicoll.barrier()  # the word of rank 1 completes the future of rank 0
            word[0] = 1
            assert torch.equal(OnThisStream.now(x), torch.full((10,), 4.0))
            assert torch.equal(seen.wait(), torch.full((10,), 6.0))
            for work in works:
                assert work.is_completed()
                assert work.is_success()
            assert works[0].result()[0] is x

    mpicoll.run_local(body, 2, timeout=60)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(ranks: Ranks, dtype: torch.dtype) -> None:
    """Sums are accumulated in float32 and rounded once."""

    def body() -> None:
        with group_of_all() as group:
            big, small = (2048.0, 1.0) if dtype is torch.float16 else (256.0, 1.0)
            terms = [big] + [small] * (group.size() - 1)
            for async_op in (False, True):
                x = late(torch.full((1000,), terms[group.rank()], dtype=dtype))
                work = dist.all_reduce(x, group=group, async_op=async_op)
                if work is not None:
                    work.wait()
                assert torch.equal(now(x), torch.full((1000,), sum(terms), dtype=torch.float32).to(dtype))

    ranks(body)


MOVED = (torch.bool, torch.uint8, torch.int64, torch.float64, torch.float8_e4m3fn, torch.complex64)


@pytest.mark.parametrize("dtype", MOVED)
def test_dtypes_that_move(several: Ranks, dtype: torch.dtype) -> None:
    def body() -> None:
        with group_of_all() as group:
            mine = (numbers(group.rank(), 7) % 3).to(dtype)
            whole = late(torch.zeros(7 * group.size(), dtype=torch.float32).to(dtype))
            dist.all_gather_into_tensor(whole, late_of(mine), group=group)
            want = torch.cat([(numbers(r, 7) % 3).to(dtype) for r in range(group.size())])
            assert torch.equal(now(whole).view(torch.uint8), want.view(torch.uint8))

    def late_of(values: torch.Tensor) -> Any:
        return late(values.float()).to(dtype) if dtype is torch.float8_e4m3fn else late(values)

    several(body)


def test_lazily_conjugated_and_negated(several: Ranks) -> None:
    """In place too, where the memory holds the conjugates, or the negatives."""

    def body() -> None:
        with group_of_all() as group:
            total = sum(range(1, group.size() + 1))
            for async_op in (False, True):
                options = AllreduceOptions()
                options.asyncOp = async_op
                conjugated = late(torch.full((5,), 1 + (group.rank() + 1) * 1j))
                negated = late(torch.full((5,), 3 + (group.rank() + 1) * 1j))
                for lazy in (conjugated.conj(), negated.conj().imag):
                    assert lazy.is_conj() != lazy.is_neg()
                    work = group.allreduce([lazy], options)  # torch's own all_reduce takes no conjugates
                    if work is not None:
                        work.wait()
                assert torch.equal(now(conjugated), torch.full((5,), group.size() + total * 1j))
                assert torch.equal(now(negated), torch.full((5,), 3 + total * 1j))

    several(body)


def test_premultiplied_by_a_factor_on_the_device(several: Ranks) -> None:
    def body() -> None:
        with group_of_all() as group:
            x = late(torch.ones(3))
            dist.all_reduce(x, dist._make_nccl_premul_sum(late(torch.tensor(group.rank() + 2.0))), group=group)
            assert now(x).tolist() == [sum(rank + 2.0 for rank in range(group.size()))] * 3

    several(body)


# --- messages


def test_messages(several: Ranks) -> None:
    def body() -> None:
        with group_of_all() as group:
            rank, size = group.rank(), group.size()
            right, left = (rank + 1) % size, (rank - 1) % size
            for layout in ("contiguous", "transposed"):
                case = Case(group, Played(), layout)
                target = room(Played(), (4, 6), layout)
                receiving = dist.irecv(target, group=group, group_src=left)
                sending = dist.isend(case.mine(4, 6), group=group, group_dst=right)
                receiving.wait()
                assert torch.equal(now(target), numbers(left, 4, 6))
                sending.wait()
            # Whoever looks first puts it where it belongs: here the thread that looks after transfers.
            target = room(Played(), (4, 6), "transposed")
            receiving = dist.irecv(target, group=group, group_src=left)
            done = receiving.get_future()
            dist.isend(case.mine(4, 6), group=group, group_dst=right).wait()
            assert done.wait() == [target]
            assert torch.equal(now(target), numbers(left, 4, 6))

    several(body)


@pytest.mark.extension
def test_messages_of_a_repeated_kind_from_the_device_to_the_host(several: Ranks) -> None:
    """They may be announced, so the extension must not receive them."""

    def body() -> None:
        with group_of_all() as group:
            rank, size = group.rank(), group.size()
            right, left = (rank + 1) % size, (rank - 1) % size
            dist.all_reduce(late(torch.ones(1)), group=group)
            for turn in range(5):
                target = torch.empty(20_000)
                receiving = dist.irecv(target, group=group, group_src=left)
                sending = dist.isend(late(numbers(rank + turn, 20_000)), group=group, group_dst=right)
                receiving.wait()
                assert torch.equal(target, numbers(left + turn, 20_000))
                sending.wait()

    several(body)


def test_many_messages_at_once(several: Ranks) -> None:
    def body() -> None:
        with group_of_all() as group:
            rank, size = group.rank(), group.size()
            targets = [room(Played(), (1000,), "contiguous") for _ in range(size)]
            others = [r for r in range(size) if r != rank]
            works = [dist.irecv(targets[r], group=group, group_src=r) for r in others]
            works += [dist.isend(late(numbers(10 * rank + r, 1000)), group=group, group_dst=r) for r in others]
            for work in works:
                work.wait()
            for r in others:
                assert torch.equal(now(targets[r]), numbers(10 * r + rank, 1000))

    several(body)


# --- works and their futures


def test_a_future_knows_its_devices_and_its_callbacks_have_streams_of_their_own(several: Ranks) -> None:
    """What a callback computes is done when the future that it returned is."""

    def body() -> None:
        with group_of_all() as group:
            streams = []
            x = late(torch.full((3,), group.rank() + 1.0))

            def halve(future: Any) -> list[Any]:
                streams.append((threading.current_thread(), torch.cuda.current_stream().cuda_stream))
                return [future.value()[0] * 0.5]

            work = dist.all_reduce(x, group=group, async_op=True)
            first = work.get_future()
            second = first.then(halve)
            ended = threading.Event()
            seen: list[Any] = []

            def look(future: Any) -> None:
                streams.append((threading.current_thread(), torch.cuda.current_stream().cuda_stream))
                seen.append(now(future.value()[0]))
                ended.set()

            second.add_done_callback(look)
            total = sum(range(1, group.size() + 1))
            assert now(second.wait()[0]).tolist() == [0.5 * total] * 3
            assert ended.wait(30)
            assert seen[0].tolist() == [0.5 * total] * 3
            assert first.of_devices == second.of_devices == [cuda_tensors.PLACE]
            mine = threading.current_thread(), torch.cuda.current_stream().cuda_stream
            assert all(thread is not mine[0] and stream not in (0, mine[1]) for thread, stream in streams)

    several(body)


def test_a_future_of_host_tensors_has_no_devices(some: Ranks) -> None:
    def body() -> None:
        with group_of_all() as group:
            future = dist.all_reduce(torch.ones(2), group=group, async_op=True).get_future()
            future.wait()
            assert future.of_devices == []

    some(body)


def test_a_stream_cannot_wait_instead_of_the_host(several: Ranks) -> None:
    def body() -> None:
        with group_of_all() as group:
            for name in ("synchronize", "block_current_stream"):
                x = late(torch.ones(3))
                work = dist.all_reduce(x, group=group, async_op=True)
                getattr(work, name)()
                assert work.is_success()
                assert now(x).tolist() == [float(group.size())] * 3

    several(body)


def test_coalesced(several: Ranks) -> None:
    def body() -> None:
        with group_of_all() as group:
            tensors = [late(torch.full((n,), group.rank() + 1.0)) for n in (3, 1000)]
            group._start_coalescing(tensors[0].device)
            for one in tensors:
                dist.all_reduce(one, group=group, async_op=True)
            group._end_coalescing(tensors[0].device).wait()
            for one in tensors:
                assert set(now(one).tolist()) == {sum(range(1, group.size() + 1))}

    several(body)


def test_barrier_for_a_device(several: Ranks) -> None:
    def body() -> None:
        with group_of_all() as group:
            dist.barrier(group, device_ids=[0])
            dist.barrier(group, async_op=True, device_ids=[0]).wait()

    several(body)


def test_a_group_serves_both_and_sends_objects_by_the_host(some: Ranks) -> None:
    def body() -> None:
        with group_of_all() as group:
            assert group._device_types == [torch.device("cpu"), torch.device("cuda")]
            assert group._get_backend(torch.device("cuda")) is group
            assert dist.distributed_c10d._get_object_coll_device(group) == "cpu"
            x, y = late(torch.ones(3)), torch.ones(3)
            dist.all_reduce(x, group=group)
            dist.all_reduce(y, group=group)
            assert now(x).tolist() == y.tolist() == [float(group.size())] * 3

    some(body)


# --- gradients


def test_gradients(several: Ranks) -> None:
    """Of a chain of collectives on late tensors, computed in autograd's way."""

    def body() -> None:
        comm = mpicoll.world()
        with torch.cuda.stream(torch.cuda.Stream()):
            results = []
            for make in (late, lambda values, requires_grad: values.clone().requires_grad_(requires_grad)):
                x = make(numbers(comm.rank, 2 * comm.size, 3) / 100, requires_grad=True)
                y = autograd.all_reduce(x * x, group=comm)
                z = autograd.all_gather_single(y.t(), 1, group=comm)
                w = autograd.reduce_scatter_single(z.t().contiguous(), group=comm)
                v = autograd.all_to_all_single(x * 3, group=comm)
                right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
                u = autograd.sendrecv(x, right, left, group=comm)
                b = autograd.broadcast(x * 2, 0, group=comm)
                ((w * w).sum() + (v * x).sum() + (u * u * u).sum() + (b * x).sum()).backward()
                assert type(x.grad) is type(x)
                results.append(x.grad.cpu())
            torch.testing.assert_close(results[0], results[1])

    several(body)


# --- what is refused


def test_devices_are_not_mixed(some: Ranks) -> None:
    def body() -> None:
        with group_of_all() as group:
            size = group.size()
            here, there = torch.ones(3), cuda(torch.ones(3))
            for call in (
                lambda: dist.all_gather([here] * size, there, group=group),
                lambda: dist.all_gather([here] * (size - 1) + [there], here, group=group),
                lambda: dist.all_gather_into_tensor(torch.ones(3 * size), there, group=group),
                lambda: dist.reduce_scatter(there, [here] * size, group=group),
                lambda: dist.all_to_all([there] * size, [here] * size, group=group),
            ):
                with pytest.raises(
                    mpicoll.DeviceError, match=r"one tensor is on (cpu|cuda:0), another on (cpu|cuda:0)"
                ):
                    call()

    some(body)


def test_a_capture_is_refused(some: Ranks) -> None:
    def body() -> None:
        with group_of_all() as group:
            x = cuda(torch.ones(3))
            torch.cuda.current_stream().synchronize()
            with Tensors().capturing():
                for async_op in (False, True):
                    with pytest.raises(mpicoll.DeviceError, match="graph"):
                        dist.all_reduce(x, group=group, async_op=async_op)
                with pytest.raises(mpicoll.DeviceError, match="graph"):
                    group.send([x], 0)
            dist.all_reduce(x, group=group)
            assert now(x).tolist() == [float(group.size())] * 3

    some(body)


def test_without_waiting_for_the_callers_stream_values_are_old(several: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above fail if nobody waits: here nobody does."""
    monkeypatch.setattr(TorchCudaLibrary, "record_event", lambda self, buffer: None)

    def body() -> None:
        with group_of_all() as group:
            # What the first collective of a communicator tries waits for all streams.
            dist.all_reduce(cuda(torch.ones(1)), group=group)
            for name in ("all_reduce", "all_gather", "reduce_scatter_single"):
                case = Case(group, Played(), "contiguous")
                case(name, False)
                with pytest.raises(AssertionError, match="not equal"):
                    case.check()
                fake_cuda.fakecuda.synchronize(torch.cuda.current_stream().cuda_stream)

    several(body)


def test_without_a_wait_for_torchs_own_copies_values_are_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for outputs that are moved to their place in the background, by default on a stream that is one for all
    threads: so this is a single rank."""
    monkeypatch.setattr(own_tensors, "on_internal_streams", lambda *devices: nullcontext())

    def body() -> None:
        with group_of_all() as group:
            case = Case(group, Played(), "transposed")
            work = case("all_gather_single", True)
            assert work.wait()
            with pytest.raises(AssertionError, match="not equal"):
                case.check()
            fake_cuda.fakecuda.synchronize(0)

    mpicoll.run_local(body, 1)


# --- the shorter ways of the host


def test_quick_calls_leave_device_tensors_alone(some: Ranks) -> None:
    def body() -> None:
        with group_of_all() as group:
            quick = group.get_fast_path()
            assert quick is not None
            size = group.size()
            x, y = cuda(torch.ones(4)), cuda(torch.ones(4 * size))
            parameter = torch.nn.Parameter(x)
            assert not any(
                [
                    quick.all_reduce(x, ReduceOp.SUM),
                    quick.all_reduce(parameter, ReduceOp.SUM),
                    quick.broadcast(x, 0),
                    quick.all_gather_single(y, x),
                    quick.all_to_all_single(y, y),
                    quick.reduce_scatter_single(x, y, ReduceOp.SUM),
                ]
            )

    some(body)


def test_buckets_on_a_device_are_not_moved(some: Ranks) -> None:
    class Bucket:
        def buffer(self) -> Any:
            return cuda(torch.ones(4))

        def index(self) -> int:
            return 0

    def body() -> None:
        buckets: Any = _Buckets(mpicoll.world()._core)
        buckets.move(Bucket())
        assert not buckets._memory

    some(body)


# --- which device a rank has


@pytest.fixture
def unused(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """CUDA that nobody has used, with three devices: what is to be done when somebody does, and with what outcome."""
    state: dict[str, Any] = {"later": [], "device": 0}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "_lazy_call", state["later"].append)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: state.update(device=index))
    return state


CHOICES = [(0, None, 0), (2, None, 2), (4, None, 1), (2, 1, 1), (1, 0, 0)]


@pytest.mark.parametrize(("local_rank", "device_id", "index"), CHOICES)
def test_the_device_of_a_rank(
    unused: dict[str, Any], monkeypatch: pytest.MonkeyPatch, local_rank: int, device_id: int | None, index: int
) -> None:
    monkeypatch.setattr(own_devices, "world", lambda: type("World", (), {"local_rank": local_rank}))
    for given in {device_id, None if device_id is None else torch.device("cuda", device_id)}:
        unused["later"].clear()
        unused["device"] = 0
        own_devices.select_device(given)
        assert unused["device"] == 0, "CUDA is not used yet"
        for call in unused["later"]:
            call()
        assert unused["device"] == index


def test_a_device_that_is_in_use_is_kept(unused: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    own_devices.select_device(2)
    assert not unused["later"]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    own_devices.select_device(2)
    assert not unused["later"]


# --- the native operations on tensors


# What differs between libraries is how arrays are recognised and made; the bodies run in full on cupy's.
@pytest.mark.slow
@pytest.mark.parametrize(
    "collective",
    ["reduce_scatter", *(pytest.param(one, marks=pytest.mark.long) for one in ("allreduce", "allgather", "scatter"))],
)
def test_native_rows(some_more: Ranks, collective: str) -> None:
    some_more(bodies.run_rows, Tensors(), collective, not tiers.takes_all(), timeout=100)


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype", [*(pytest.param(one, marks=pytest.mark.long) for one in ("bool", "int64")), "bfloat16"]
)
def test_native_ops(some_more: Ranks, dtype: str) -> None:
    some_more(bodies.each_op_in_each_way, Tensors(), dtype, timeout=100)


# The processes of mpirun run them on cupy's arrays, and test_native_rows on tensors.
@pytest.mark.slow
@pytest.mark.parametrize(
    "some_more", ["local-3", pytest.param("mpi", marks=[pytest.mark.mpi, pytest.mark.long])], indirect=True
)
@pytest.mark.parametrize("body", bodies.EVERYWHERE, ids=lambda body: body.__name__)
def test_native(some_more: Ranks, body: Callable[[Any], Any]) -> None:
    some_more(body, Tensors(), timeout=100)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_native_half_precision_is_summed_in_single(some_more: Ranks, dtype: str) -> None:
    some_more(bodies.half_precision_is_summed_in_single, Tensors(), dtype, timeout=100)


def test_results_are_tensors_of_the_device(some: Ranks) -> None:
    def body() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            x = late(torch.ones(3, dtype=torch.bfloat16))
            for got in (mpicoll.allreduce(x), mpicoll.bcast(x), mpicoll.scan(x)):
                assert type(got) is CudaTensor
                assert got.dtype is torch.bfloat16

    some(body)
