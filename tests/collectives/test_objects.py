"""Collectives of Python objects."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.ranks import Ranks

import mpicoll


class Unpicklable:
    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ZeroDivisionError("of this object")


class Poisoned:
    """What can be pickled, but not unpickled."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _explode, ()


def _explode() -> None:
    raise ZeroDivisionError("of what has come")


def thing(rank: int) -> dict[str, Any]:
    """Another object, of another size, for each rank."""
    return {
        "text": "é" * rank,
        "numbers": [rank] * 3**rank,
        "array": np.arange(1000.0 * rank).reshape(-1, 10),
        "column order": np.asfortranarray(np.arange(6 * (rank + 1)).reshape(2, -1)),
        "strided": np.arange(20)[::3] + rank,
        "half": np.ones(rank, np.float16),
        "tensor": torch.full((rank + 1,), float(rank)),
        "bytes": pickle.PickleBuffer(bytearray(range(rank))),
        "none": None,
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, (memoryview, pickle.PickleBuffer)):
        return bytes(memoryview(one)) == bytes(memoryview(other))
    return bool(one == other)


def both(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """The value of `call`, without a timeout and with one."""
    one, other = call(*args, **options), call(*args, timeout=20.0, **options)
    assert same(one, other)
    return one


def check_all(comm: mpicoll.Communicator) -> None:
    rank, size = comm.rank, comm.size
    for root in range(size):
        got = both(mpicoll.bcast_object, thing(rank) if rank == root else None, root, comm=comm)
        assert same(got, thing(root))
        every = both(mpicoll.gather_object, thing(rank), root, comm=comm) if rank == root else None
        if rank != root:
            assert mpicoll.gather_object(thing(rank), root, comm=comm) is None
            assert mpicoll.gather_object(thing(rank), root, comm=comm, timeout=20.0) is None
        else:
            assert same(every, list(map(thing, range(size))))
        objs = [thing(other) for other in range(size)] if rank == root else None
        assert same(both(mpicoll.scatter_object, objs, root, comm=comm), thing(rank))
    every = both(mpicoll.allgather_object, thing(rank), comm=comm)
    assert same(every, list(map(thing, range(size))))
    # Small ones, and some that do not fit in a block.
    for make in (str, thing):
        sent = [make(size * rank + other) if other != rank else None for other in range(size)]
        want = [make(size * other + rank) if other != rank else None for other in range(size)]
        assert same(both(mpicoll.alltoall_object, sent, comm=comm), want)


def test_objects_of_all_kinds(ranks: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        check_all(world)
        part = world.split(world.rank % 2, -world.rank)
        assert part is not None
        check_all(part)
        part.free()

    ranks(body)


@pytest.mark.slow
@pytest.mark.parametrize("count", [0, 1, 5_000_000])
def test_arrays_go_past_the_pickle(several: Ranks, count: int) -> None:
    """They arrive aligned, writable and apart from what was sent."""

    def body() -> None:
        world = mpicoll.world()
        x = np.full(count, float(world.rank))
        got = [mpicoll.bcast_object((7, x), world.size - 1)[1], *mpicoll.allgather_object(x)]
        for source, one in zip([world.size - 1, *range(world.size)], got, strict=True):
            assert one.flags.aligned
            assert one.flags.writeable
            assert one.shape == (count,)
            assert not count or one[0] == one[-1] == source
        got[1 + world.rank][:] = -1
        assert not count or x[0] == world.rank
        pickled = len(pickle.dumps((7, x), 5, buffer_callback=lambda memory: None))
        assert pickled < 500

    several(body)


CALLS: dict[str, Callable[[Any, int, int], Any]] = {
    "bcast_object": lambda obj, rank, size: mpicoll.bcast_object(obj, size - 1),
    "gather_object": lambda obj, rank, size: mpicoll.gather_object(obj, 0),
    "allgather_object": lambda obj, rank, size: mpicoll.allgather_object(obj),
    "scatter_object": lambda obj, rank, size: mpicoll.scatter_object([obj] * size, size - 1),
    "alltoall_object": lambda obj, rank, size: mpicoll.alltoall_object([obj] * size),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_cannot_be_pickled_is_an_error_everywhere(ranks: Ranks, name: str) -> None:
    def body() -> None:
        rank, size = mpicoll.world().rank, mpicoll.world().size
        last = size - 1
        for _ in range(2):
            wrong = rank == last
            kind, text = (
                (mpicoll.DTypeError, "Unpicklable can't be pickled: of this object")
                if wrong
                else (mpicoll.ArgumentError, f"rank {last} passed an object that can't be sent")
            )
            with pytest.raises(kind, match=f"{name}: .*{text}.*rank {rank} of {size}") as caught:
                CALLS[name](Unpicklable() if wrong else 1, rank, size)
            assert not wrong or isinstance(caught.value.__cause__, ZeroDivisionError)
        assert mpicoll.allreduce(1) == size

    ranks(body)


@pytest.mark.parametrize("name", CALLS)
def test_what_cannot_be_unpickled_leaves_the_communicator_usable(several: Ranks, name: str) -> None:
    def body() -> None:
        rank, size = mpicoll.world().rank, mpicoll.world().size
        last = size - 1
        receives = {"bcast_object": rank != last, "gather_object": rank == 0}.get(name, True)
        obj = Poisoned() if rank == last else 1
        if receives:
            with pytest.raises(
                mpicoll.CommunicationError, match=f"{name}: the object of rank {last} .*of what has come"
            ):
                CALLS[name](obj, rank, size)
        else:
            CALLS[name](obj, rank, size)
        assert mpicoll.allreduce(1) == size

    several(body)


def test_wrong_arguments(some_more: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        rank, size = world.rank, world.size
        for call in (mpicoll.bcast_object, mpicoll.gather_object, mpicoll.scatter_object):
            for root in (size, -1, None, 0.5):
                with pytest.raises(mpicoll.RankError, match=f"{call.__name__}: root.*rank {rank} of {size}"):
                    call([1] * size, root)  # type: ignore[arg-type]
        for wrong in ([1] * (size + 1), [], None, 7):
            kind = mpicoll.ShapeError if rank == 1 else mpicoll.ArgumentError
            with pytest.raises(kind, match="scatter_object"):
                mpicoll.scatter_object(wrong, 1)  # type: ignore[arg-type]
            with pytest.raises(kind, match="alltoall_object"):
                mpicoll.alltoall_object(wrong if rank == 1 else [1] * size)  # type: ignore[arg-type]
        with pytest.raises(mpicoll.ArgumentError, match="timeout"):
            mpicoll.allgather_object(1, timeout=-1.0)
        with pytest.raises(mpicoll.ArgumentError):
            mpicoll.bcast_object(world if rank == 0 else None)
        assert mpicoll.allreduce(1) == size

    some_more(body)


def test_a_timeout_leaves_it_pending(several: Ranks) -> None:
    def body() -> None:
        rank, size = mpicoll.world().rank, mpicoll.world().size
        if rank == 0:
            for other in range(1, size):
                mpicoll.recv(0, other)
            assert mpicoll.allgather_object(rank) == list(range(size))
        else:
            with pytest.raises(mpicoll.Timeout, match=r"allgather_object.*0\.05 s"):
                mpicoll.allgather_object(rank, timeout=0.05)
            mpicoll.send(0, 0)
        assert mpicoll.allreduce(1) == size

    several(body)


def test_they_take_their_turn_among_other_collectives(several: Ranks) -> None:
    """Started in the background before and after, and from a thread."""

    def body() -> None:
        world = mpicoll.world()
        before = mpicoll.iallreduce(np.ones(3))
        assert mpicoll.bcast_object(thing(1) if world.rank == 0 else None)["text"] == "é"
        after = mpicoll.iallreduce(np.ones(3))
        values: list[Any] = []
        thread = threading.Thread(target=lambda: values.append(mpicoll.allgather_object(world.rank, comm=world)))
        thread.start()
        thread.join()
        assert values == [list(range(world.size))]
        assert before.wait().tolist() == after.wait().tolist() == [world.size] * 3

    several(body)


def test_disagreement(several: Ranks) -> None:
    """With or without MPICOLL_CHECK, which lets equal calls be."""

    def body() -> None:
        world = mpicoll.world()
        # Without shared memory only the first calls on a communicator are compared.
        comm = world.duplicate()
        with mpicoll.debug(numerics=True, checksum=True):
            check_all(world)
            with pytest.raises(mpicoll.MismatchError, match="bcast_object"):
                mpicoll.bcast_object(1, world.rank)
        with pytest.raises(mpicoll.MismatchError, match="rank 0 calls allgather_object"):
            (mpicoll.gather_object if world.rank else mpicoll.allgather_object)(1, comm=comm)
        with pytest.raises(mpicoll.MismatchError, match=r"rank 1 calls gather_object.*root.1"):
            mpicoll.gather_object(1, world.rank, comm=comm)
        assert mpicoll.allgather_object(1, comm=comm) == [1] * world.size
        comm.free()

    several(body)
