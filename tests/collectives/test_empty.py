"""empty: arrays that collectives work in without copies, how they are made, and when their memory goes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from support.ranks import Ranks

import mpicoll
from mpicoll.engine.selection.catalogue import SHARED_MEMORY
from mpicoll.transport import shm


def _mappings() -> int:
    """Pieces of shared memory that this process has mapped."""
    return len(re.findall(r"(?:/memfd:|/dev/shm/)mpicoll", Path("/proc/self/maps").read_text()))


def _is_reading_refused() -> bool:
    """Return True if no process may read the memory of another one, not even its own: so in some containers."""
    try:
        shm.ProcessReader(shm.describe_memory()).check()
    except PermissionError:
        return True
    return False


def _segments(comm: mpicoll.Communicator | None = None) -> int:
    arena = (comm or mpicoll.world())._core.arena()
    return 0 if arena is None else len(arena.segments.by_number)


READING = pytest.mark.skipif(_is_reading_refused(), reason="reading the memory of other processes is refused")


# --- what is made


SHAPES: tuple[Any, ...] = (0, 1, 7, (), (0,), (3, 4), (2, 0, 3), [5, 2], np.int64(4), (np.int32(2), 3))


def test_shape_and_dtype(some: Ranks) -> None:
    def body() -> None:
        for shape in SHAPES:
            for dtype in ("float32", "f8", np.int8, ">i4", "complex64", bool, ml_dtypes.bfloat16, "M8[s]"):
                made = mpicoll.empty(shape, dtype)
                assert type(made) is np.ndarray
                assert made.dtype == np.dtype(dtype)
                assert made.shape == np.empty(shape).shape
                assert made.flags.c_contiguous
                assert made.flags.writeable
                assert made.flags.aligned
                made[...] = np.zeros((), dtype)

    some(body)


@pytest.mark.parametrize("shape", [0, 7, (), (3, 4), (2, 0)])
def test_tensors(some: Ranks, shape: Any) -> None:
    def body() -> None:
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, "float16"):
            made = mpicoll.empty(shape, dtype, like="torch")
            assert type(made) is torch.Tensor
            assert made.dtype is (getattr(torch, dtype) if isinstance(dtype, str) else dtype)
            assert made.shape == torch.empty(shape).shape
            assert made.is_contiguous()
            made.zero_()
            if made.dtype.is_floating_point:
                made.requires_grad_()

    some(body)


def test_defaults(some: Ranks) -> None:
    def body() -> None:
        assert mpicoll.empty(3).dtype == np.float32
        assert mpicoll.empty(3, like="torch").dtype is torch.float32

    some(body)


def test_what_can_not_be_made(some: Ranks) -> None:
    def body() -> None:
        rank = mpicoll.world().rank
        for shape in (-1, (2, -3), 2.5, (1, 2.5), "3", None, (None,)):
            with pytest.raises(mpicoll.ShapeError, match=rf"empty: shape.*rank {rank} of"):
                mpicoll.empty(shape)
        for dtype in (object, "nonsense", "O", [("a", object)]):
            with pytest.raises(mpicoll.DTypeError, match=rf"empty: .*rank {rank} of"):
                mpicoll.empty(3, dtype)
        for dtype in (np.float32, "nonsense", "nn", 3, None):
            with pytest.raises(mpicoll.DTypeError, match=r"empty: .*not a dtype of torch"):
                mpicoll.empty(3, dtype, like="torch")
        with pytest.raises(mpicoll.DTypeError, match="like must be 'numpy' or 'torch', got 'jax'"):
            mpicoll.empty(3, like="jax")  # type: ignore[arg-type]
        assert mpicoll.allreduce(np.ones(1))[0] == mpicoll.world().size

    some(body)


def test_dtypes_of_no_bytes_and_of_no_tensor(some: Ranks) -> None:
    """They are refused before memory is asked for, or made."""

    def body() -> None:
        segments = _segments()
        for dtype, like in (("S", "numpy"), ("U0", "numpy"), (torch.qint8, "torch"), (torch.quint4x2, "torch")):
            try:
                made = mpicoll.empty(3, dtype, like=like)
            except mpicoll.DTypeError:
                assert _segments() == segments
            else:
                assert tuple(made.shape) == (3,)

    some(body)


@pytest.mark.extension
def test_ranks_may_ask_for_different_arrays(several: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        kind = world.rank % 3
        made = mpicoll.empty(
            (world.rank, 5), [np.int8, torch.float64, np.complex64][kind], like=["numpy", "torch", "numpy"][kind]
        )
        assert tuple(made.shape) == (world.rank, 5)
        if kind != 1:
            made[...] = 1
        assert mpicoll.allreduce(np.ones(3), algorithm="shm_pipelined")[0] == world.size

    several(body)


@pytest.mark.extension
def test_more_than_there_is(several: Ranks) -> None:
    """On one rank or on all: all are told the same."""

    def body() -> None:
        world = mpicoll.world()
        for shape in ((2**62,), (2**40, 2**40)):
            for asks in (True, world.rank == world.size - 1):
                with pytest.raises(mpicoll.CommunicationError, match="can't allocate"):
                    mpicoll.empty(shape if asks else 3, "int8")
        assert mpicoll.allreduce(np.ones(3), algorithm="shm_pipelined")[0] == world.size

    several(body)


@pytest.mark.mpi
@pytest.mark.extension
def test_more_than_the_node_has() -> None:
    """Not when it is first touched, which would be the end of the process."""
    if mpicoll.world().size == 1:
        pytest.skip("a single rank shares nothing")
    total = int(re.search(r"MemTotal: *(\d+)", Path("/proc/meminfo").read_text())[1]) * 1024  # type: ignore[index]
    with pytest.raises(mpicoll.CommunicationError, match=r"allocate|memory"):
        mpicoll.empty(4 * total, "int8")
    assert mpicoll.allreduce(np.ones(3))[0] == mpicoll.world().size


def test_a_world_of_one() -> None:
    made = mpicoll.empty((2, 3))
    made[...] = 2
    assert (mpicoll.allreduce(made) == 2).all()


# --- collectives on them


def _everything(comm: mpicoll.Communicator, x: Any, out: Any, algorithm: str) -> None:
    """Collectives on `x`, whose values are rank + 1, with results in `out` or elsewhere."""
    size, rank = comm.size, comm.rank
    total = size * (size + 1) / 2
    n = len(x) // size
    options: dict[str, Any] = {"comm": comm, "algorithm": algorithm}
    assert (mpicoll.allreduce(x, out=out, **options) == total).all()
    assert (mpicoll.reduce_scatter(x[: n * size], out=None if out is None else out[:n], **options) == total).all()
    reduced = mpicoll.reduce(x, root=size - 1, out=out if rank == size - 1 else None, **options)
    assert (reduced is None) == (rank != size - 1)
    assert reduced is None or (reduced == total).all()
    want = np.repeat(np.arange(size) + 1, n)
    got = mpicoll.allgather(x[:n], out=None if out is None else out[: n * size], **options)
    np.testing.assert_array_equal(np.asarray(got), want)
    got = mpicoll.alltoall(x[: n * size], out=None if out is None else out[: n * size], **options)
    np.testing.assert_array_equal(np.asarray(got), want)
    gathered = mpicoll.gather(x[:n], root=0, out=out[: n * size] if out is not None and rank == 0 else None, **options)
    assert rank or (np.asarray(gathered) == want).all()
    block = x[: n * size] if rank == 1 else x[:n]
    assert (mpicoll.scatter(block, 1, out=None if out is None else out[:n], **options) == 2).all()
    assert (mpicoll.bcast(x, 1, out=out, **options) == 2).all()
    assert (x == rank + 1).all()


@pytest.mark.parametrize("like", ["numpy", "torch"])
@pytest.mark.extension
def test_each_collective(several: Ranks, like: str) -> None:
    """Input, output, both or neither of them in memory for all, and in pieces of it; on some ranks or on all."""

    def body() -> None:
        world = mpicoll.world()
        ordinary: Any = np.empty if like == "numpy" else lambda n, dtype: torch.empty(n, dtype=getattr(torch, dtype))
        memory = mpicoll.empty(5000, "float64", like=like)
        other = mpicoll.empty(3000, "float64", like=like)
        for number, (x, out) in enumerate(
            (
                (memory[:2000], memory[2000:4000]),
                (memory[:2000], other[100:2100]),
                (memory[:2000], None),
                (memory[7:2007], ordinary(2000, "float64")),
                (ordinary(2000, "float64"), memory[:2000]),
                (memory[:2000] if world.rank else ordinary(2000, "float64"), other[:2000]),
                (memory[:2000] if world.rank else other[:2000], memory[2000:4000]),
                (memory[: 2 * 2000 : 2], memory[4000:4000]),
                (memory[100 * world.rank :][:2000], memory[3000:5000]),
            )
        ):
            x[...] = world.rank + 1
            target = None if out is None or len(out) != len(x) else out
            for algorithm in ("shm_pipelined", "shm_pipelined/4k", "cma"):
                if algorithm == "cma":
                    # There is no such way for reduce.
                    if number == 0 and not _is_reading_refused():
                        assert (
                            mpicoll.allreduce(x, out=target, algorithm="cma") == world.size * (world.size + 1) / 2
                        ).all()
                    continue
                _everything(world, x, target, algorithm)

    several(body)


@pytest.mark.parametrize(
    "collective", [name for name in SHARED_MEMORY if "cma" in SHARED_MEMORY[name] and name != "reduce"]
)
@pytest.mark.extension
@READING
def test_cross_memory_attach(several: Ranks, collective: str) -> None:
    """The copies are skipped by it, too."""

    def body() -> None:
        world = mpicoll.world()
        memory = mpicoll.empty(4 * world.size * 300, "int64")
        x, out = memory[: world.size * 300], memory[2 * world.size * 300 : 4 * world.size * 300]
        x[...] = np.arange(world.size * 300) + world.rank
        private = x.copy()
        options = {"algorithm": "cma"} | ({"root": 1} if collective in ("bcast", "gather", "scatter") else {})
        call = getattr(mpicoll, collective)
        sent = slice(None) if collective != "scatter" or world.rank == 1 else slice(300)
        want = call(private[sent], **options)
        assert (want is None) == (collective == "gather" and world.rank != 1)
        if want is not None:
            if want.size > out.size:
                out = mpicoll_free(want.size)
            got = call(x[sent], out=out[: want.size].reshape(want.shape), **options)
            np.testing.assert_array_equal(got, want)
        else:
            assert call(x[sent], **options) is None
        np.testing.assert_array_equal(x, private)

    def mpicoll_free(size: int) -> np.ndarray:
        return np.empty(size, np.int64)

    several(body)


@pytest.mark.extension
def test_results_are_the_same_with_any_buffers(several: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        rng = np.random.default_rng(world.rank)
        for dtype in ("float32", "float16"):
            private = rng.standard_normal(20_000).astype(dtype)
            x, out = mpicoll.empty(20_000, dtype), mpicoll.empty(20_000, dtype)
            x[...] = private
            want = mpicoll.allreduce(private, algorithm="shm_pipelined").tobytes()
            assert mpicoll.allreduce(x, algorithm="shm_pipelined").tobytes() == want
            assert mpicoll.allreduce(x, out=out, algorithm="shm_pipelined").tobytes() == want
            plan = mpicoll.allreduce_init(x, out=out, algorithm="shm_pipelined")
            out[...] = 0
            assert plan().tobytes() == want
            out[...] = 0
            assert mpicoll.iallreduce(x, out=out, algorithm="shm_pipelined").wait().tobytes() == want
            assert mpicoll.allreduce(x, out=x, algorithm="shm_pipelined").tobytes() == want

    several(body)


@pytest.mark.extension
def test_arrays_on_several_communicators(several: Ranks) -> None:
    """Memory belongs to the communicator that it was made with; on others it is memory like any other."""

    def body() -> None:
        world = mpicoll.world()
        turned = world.split(0, -world.rank)
        assert turned is not None
        one, two = mpicoll.empty(3000, "float64"), mpicoll.empty(3000, "float64", comm=turned)
        for comm in (world, turned):
            for x in (one, two):
                for out in (None, one, two):
                    x[...] = comm.rank + 1
                    got = mpicoll.allreduce(x, out=out, comm=comm, algorithm="shm_pipelined")
                    assert (got == comm.size * (comm.size + 1) / 2).all()
        turned.free()
        two[...] = world.rank
        assert (mpicoll.allreduce(two, algorithm="shm_pipelined") == sum(range(world.size))).all()
        with pytest.raises(mpicoll.CommunicatorError):
            mpicoll.empty(3, comm=turned)

    several(body)


# --- when the memory goes


@pytest.mark.extension
def test_memory_goes_with_the_last_array(several: Ranks) -> None:
    def body() -> None:
        before = _segments()
        for _ in range(3):
            made = mpicoll.empty(1000)
            part = made[10:20].reshape(2, 5).T
            tensor = mpicoll.empty(100, like="torch")
            view = tensor[5:].view(19, 5)
            mpicoll.barrier()
            assert _segments() == before + 2
            del made, tensor
            mpicoll.barrier()
            assert _segments() == before + 2
            part[...] = 1
            view[...] = 1
            del part, view
            mpicoll.barrier()
            assert _segments() == before

    several(body)


@pytest.mark.mpi
@pytest.mark.extension
def test_mappings_go_with_the_last_array() -> None:
    size = mpicoll.world().size
    if size == 1:
        pytest.skip("a single rank shares nothing")
    mpicoll.allreduce(np.ones(3), algorithm="shm_flat")
    before = _mappings()
    for _ in range(5):
        made = mpicoll.empty(100_000)
        assert _mappings() == before + size
        part = made[5:6]
        del made
        assert _mappings() == before + size
        mpicoll.barrier()
        del part
        assert _mappings() == before
    with mpicoll.world().split(0) as comm:
        kept = mpicoll.empty(1000, comm=comm)
        # Its flags and slots lie in memory of rank 0.
        assert _mappings() == before + 1 + size
    # The communicator's own memory goes with it, that of the array stays.
    assert _mappings() == before + size
    kept[...] = 1
    del kept
    assert _mappings() == before


@pytest.mark.parametrize("algorithm", ["shm_flat", "shm_pipelined/4k", pytest.param("cma", marks=READING)])
@pytest.mark.extension
def test_arrays_die_at_different_times(several: Ranks, algorithm: str) -> None:
    """What a rank has dropped another may keep: operations must not depend on it."""

    def body() -> None:
        world = mpicoll.world()
        kept: dict[int, np.ndarray] = {}
        x = np.arange(3000.0)
        for turn in range(3 * world.size):
            kept[turn] = mpicoll.empty(3000, "float64")
            kept.pop(turn - 1 - world.rank, None)
            got = mpicoll.allreduce(x + world.rank, algorithm=algorithm)
            np.testing.assert_array_equal(got, x * world.size + sum(range(world.size)))
            mine = kept[turn]
            mine[...] = x + world.rank
            got = mpicoll.allreduce(mine, out=mine, algorithm=algorithm)
            np.testing.assert_array_equal(got, x * world.size + sum(range(world.size)))
            if world.rank == turn % world.size:
                kept.clear()
                del mine, got
            for root in range(world.size):
                assert (mpicoll.bcast(np.full(2000, world.rank), root, algorithm="shm_pipelined/4k") == root).all()

    several(body)


@pytest.mark.extension
def test_arrays_die_while_operations_run(several: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        kept = [mpicoll.empty(10) for _ in range(30)]
        requests = []
        for turn in range(30):
            requests.append(mpicoll.iallreduce(np.full(2000, turn), algorithm="shm_pipelined/4k"))
            if turn % (world.rank + 1) == 0:
                kept.pop()
        for turn, request in enumerate(requests):
            assert (request.wait() == turn * world.size).all()

    several(body)


@pytest.mark.extension
def test_an_operation_keeps_what_it_works_on(several: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        x = mpicoll.empty(3000, "float64")
        x[...] = 1
        request = mpicoll.iallreduce(x, out=x, algorithm="shm_pipelined")
        del x
        assert (request.wait() == world.size).all()

    several(body)


@pytest.mark.mpi
@pytest.mark.parametrize("algorithm", ["shm_flat", "shm_pipelined"])
@pytest.mark.extension
def test_results_of_which_one_lies_elsewhere(algorithm: str) -> None:
    """All inputs lie in one segment, and all results but one in another."""
    world = mpicoll.world()
    if world.size < 2:
        pytest.skip("needs two ranks")
    x, out = mpicoll.empty(3000, "float64"), mpicoll.empty(3000, "float64")
    x[:] = world.rank + 1
    other = np.zeros_like(x) if world.rank == world.size - 1 else out
    for _ in range(3):
        other[:] = 0
        mpicoll.allreduce(x, out=other, algorithm=algorithm)
        assert (other == sum(range(world.size + 1))).all()
