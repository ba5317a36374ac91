"""Collectives in private memory of other ranks: the choice between that and the slots, and the end of writes."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from support.ranks import Ranks

import mpicoll
from mpicoll.engine.selection.catalogue import SHARED_MEMORY

pytestmark = pytest.mark.extension

LATE, TRIES = 8, 8  # calls: as in mpicoll/csrc/path_trials.c
PIECE = 4096


@pytest.mark.parametrize("collective", [name for name, methods in SHARED_MEMORY.items() if "shm_or_cma" in methods])
def test_both_paths_give_the_same_bits(several: Ranks, collective: str) -> None:
    """In as many calls as it takes to try both and to choose, with an input that differs in each."""

    def body() -> None:
        world = mpicoll.world()
        call = getattr(mpicoll, collective)
        rng = np.random.default_rng(world.rank)
        x = np.empty(world.size * 3001)
        options: dict[str, Any] = {"root": world.size - 1} if collective in ("bcast", "gather", "reduce") else {}
        passed = x[:3001] if collective == "scatter" and world.rank > 0 else x
        for _ in range(LATE + 2 * TRIES + 4):
            x[:] = rng.standard_normal(x.size)
            got, want = (call(passed.copy(), algorithm=one, **options) for one in ("shm_or_cma/4k", "shm_pipelined/4k"))
            assert (got is None) is (want is None)
            assert got is None or got.tobytes() == want.tobytes()

    several(body)


@pytest.mark.parametrize("collective", ["bcast", "gather", "scatter", "allgather", "alltoall", "exscan"])
def test_large_blocks(several: Ranks, collective: str) -> None:
    """Of which ranks read and write parts, and of allgather several pieces."""

    def body() -> None:
        world = mpicoll.world()
        rng = np.random.default_rng(world.rank)
        whole = collective == "alltoall" or (collective == "scatter" and world.rank == 0)
        x = rng.integers(0, 256, (world.size if whole else 1) * 600_001).astype(np.uint8)
        given = x.copy()
        call = getattr(mpicoll, collective)
        got, want = (call(x.copy() if collective == "bcast" else x, algorithm=one) for one in ("cma", "shm_pipelined"))
        np.testing.assert_array_equal(x, given)
        assert (got is None) is (want is None)
        if got is not None:
            np.testing.assert_array_equal(got, want)

    several(body)


@pytest.mark.parametrize("collective", ["allreduce", "bcast", "gather", "scatter", "allgather", "alltoall"])
def test_addresses_that_collide(several: Ranks, collective: str) -> None:
    """The destination is up to a line more than a multiple of a page behind the source, on each rank another.

    Some processors are slow at string instructions then, so other instructions copy."""

    def body() -> None:
        world = mpicoll.world()
        size, rank = world.size, world.rank
        rngs = [np.random.default_rng(one) for one in range(size)]
        # Once of just the bytes that are read with one detour.
        for nbytes, behind in ((5_001, 1), (70_001, 16), (256 * 1024 + 64, 31), (600_007, 63), (600_007, 0)):
            inputs = [rng.integers(0, 50, (size, nbytes)).astype(np.uint8) for rng in rngs]
            want = {
                "allreduce": sum(one[0] for one in inputs),
                "bcast": inputs[0][0],
                "gather": np.concatenate([one[0] for one in inputs]) if rank == 0 else None,
                "scatter": inputs[0][rank : rank + 1],
                "allgather": np.concatenate([one[0] for one in inputs]),
                "alltoall": np.stack([one[rank] for one in inputs]),
            }[collective]
            x = _place(inputs[rank] if collective in ("scatter", "alltoall") else inputs[rank][0], 1024)
            for algorithm in ("shm_pipelined/4k", "cma"):
                y = None if want is None else _place(np.zeros_like(want), 1024 + behind + rank)
                given = None if rank > 0 and collective in ("bcast", "scatter") else x
                getattr(mpicoll, collective)(given, out=y, algorithm=algorithm)
                assert y is None or np.array_equal(y, want)

    several(body)


def _place(x: np.ndarray[Any, Any], offset: int) -> np.ndarray[Any, Any]:
    """Return a copy that begins so many bytes behind a multiple of a page."""
    memory = np.empty(x.nbytes + 2 * 4096, np.uint8)
    begin = -memory.ctypes.data % 4096 + offset
    placed = memory[begin : begin + x.nbytes].reshape(x.shape)
    placed[...] = x
    return placed


def test_a_block_that_is_in_its_place() -> None:
    def body() -> None:
        from mpicoll._shm import Collective

        world = mpicoll.world()
        mpicoll.barrier()
        arena = world._core.arena()
        assert arena is not None
        out = np.zeros((world.size, 600_001), np.uint8)
        out[world.rank] = world.rank + 1
        counts = (600_001,) * world.size
        made = Collective(arena, "allgather", "", "", 1, counts, 0, 1 << 17, False, 9, reads=True)
        made.carry_out(out[world.rank], out)
        np.testing.assert_array_equal(out, np.broadcast_to(np.arange(1, world.size + 1)[:, None], out.shape))

    mpicoll.run_local(body, 3)


def test_ranks_choose_alike() -> None:
    """Rank 0's number of the call counts, and a rank that has forgotten its times has none.

    Where all ranks expect the slots, the step in which they choose is also that of the first piece.
    """

    def body() -> list[bool]:
        from mpicoll._shm import Collective

        world = mpicoll.world()
        mpicoll.barrier()
        arena = world._core.arena()
        assert arena is not None
        x = np.full(4 * PIECE, world.rank + 1, np.uint8)
        y = np.zeros((world.size, x.size), np.uint8)
        reads, made = [], None
        forgets = {0: (40,), 1: (3, 12)}
        for call in range(LATE + 2 * TRIES + 50):
            if made is None or call in forgets.get(world.rank, ()):
                counts = (x.size,) * world.size
                made = Collective(arena, "allgather", "", "", 1, counts, 0, PIECE, False, 9, tries=True)
            y[:] = 0
            before = arena.number
            made.carry_out(x, y)
            assert (y == np.arange(1, world.size + 1)[:, None]).all()
            # One to choose, and one at the end; or one for each piece.
            steps = arena.number - before
            reads.append(steps == 2)
            assert steps in (2, 4, 5)
            if call > 0 and not reads[-2] and not any(call in calls for calls in forgets.values()):
                assert steps != 5
        return reads

    first, *others = mpicoll.run_local(body, 3)
    assert others == [first] * 2
    trials = [False] * TRIES + [True] * TRIES
    assert first[: LATE + 2 * TRIES] == [False] * LATE + trials
    assert len(set(first[LATE + 2 * TRIES : 40])) == 1
    assert first[40 + LATE : 40 + LATE + 2 * TRIES] == trials


def test_no_rank_writes_to_memory_of_one_that_has_left() -> None:
    nbytes = 64 << 20
    ended = threading.Event()

    def body() -> None:
        from mpicoll._shm import Collective

        world = mpicoll.world()
        mpicoll.barrier()
        arena = world._core.arena()
        assert arena is not None
        x = np.full(nbytes, world.rank, np.uint8)
        made = Collective(arena, "bcast", "", "", 1, (nbytes,), 1, 1 << 20, False, 9, reads=True)
        if world.rank == 1:
            try:
                with pytest.raises(mpicoll.CommunicationError):
                    made.carry_out(x, x)
            finally:
                ended.set()
            return
        # As far as rank 1 begins to write.
        arena.post(0, 0, 0, 0, 0, x.ctypes.data, 0, 0)
        arena.step_signature(9)
        arena.abandon()
        left = x.copy()
        assert ended.wait(20)
        np.testing.assert_array_equal(x, left)

    mpicoll.run_local(body, 2)


@pytest.mark.parametrize("collective", ["scan", "exscan"])
def test_a_prefix_that_replaces_its_input(several: Ranks, collective: str) -> None:
    """Where one rank does that, no rank may read its input while it writes."""

    def body() -> None:
        world = mpicoll.world()
        x = np.full(3001, world.rank + 1.0)
        out = x if world.rank == 0 else np.empty_like(x)
        got = getattr(mpicoll, collective)(x, out=out, algorithm="cma")
        last = world.rank + 1 if collective == "scan" else world.rank
        np.testing.assert_array_equal(got, last * (last + 1) / 2)

    several(body)
