"""Calls that come again: what was kept for the first one serves the others, and nothing else."""

from __future__ import annotations

from threading import get_ident
from typing import Any

import numpy as np
import pytest
import torch
from support.ranks import Ranks

import mpicoll
from mpicoll.engine.core.operation import Operation

SIZES = (1, 1000, 3000, 20000, 300000)


def values(count: int, rank: int, turn: int) -> Any:
    return np.random.default_rng([count, rank, turn]).standard_normal(count).astype(np.float32)


@pytest.mark.parametrize("count", SIZES)
def test_results_are_those_of_the_call(several: Ranks, count: int) -> None:
    """New arrays, out, in place, slices and strided arrays by turns, with different contents each time."""

    def body() -> None:
        world = mpicoll.world()
        kept = []
        for turn in range(8):
            x = values(count, world.rank, turn)
            want = np.sum([values(count, rank, turn) for rank in range(world.size)], axis=0, dtype=np.float64)
            if turn % 4 == 0:
                got = mpicoll.allreduce(x)
                assert not np.may_share_memory(got, x)
            elif turn % 4 == 1:
                out = np.empty_like(x)
                got = mpicoll.allreduce(x, out=out)
                assert got is out
            elif turn % 4 == 2:
                got = mpicoll.allreduce(x, out=x)
                assert got is x
            else:
                got = mpicoll.allreduce(np.repeat(x, 2)[::2])
            if turn % 4 != 2:
                np.testing.assert_array_equal(x, values(count, world.rank, turn))
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
            kept.append((got, want))
        for got, want in kept:
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)

    several(body)


@pytest.mark.parametrize("count", SIZES)
def test_tensors_come_back_as_tensors(several: Ranks, count: int) -> None:
    def body() -> None:
        world = mpicoll.world()
        total = sum(range(world.size))
        for turn in range(4):
            x = torch.full((count,), float(world.rank), requires_grad=turn == 3)
            got = mpicoll.allreduce(x)
            assert type(got) is torch.Tensor
            assert got.dtype is torch.float32
            assert torch.equal(got, torch.full((count,), float(total)))
            out = torch.empty(count)
            assert mpicoll.allreduce(x.detach(), out=out) is out
            assert torch.equal(out, got)
            assert mpicoll.allreduce(out, "max", out=out) is out
            assert torch.equal(out, got)
            assert torch.equal(x.detach(), torch.full((count,), float(world.rank)))
            gathered = mpicoll.gather(x.detach(), 0)
            assert (gathered is None) == (world.rank != 0)
            if gathered is not None:
                assert torch.equal(gathered, torch.arange(world.size).repeat_interleave(count).float())

    several(body)


def test_what_only_looks_alike_is_kept_apart(several: Ranks) -> None:
    """Calls that differ in the shape, the dtype, the op, the root or the algorithm alone."""

    def body() -> None:
        world = mpicoll.world()
        size = world.size
        for _ in range(3):
            assert mpicoll.allreduce(np.ones((2, 3))).shape == (2, 3)
            assert mpicoll.allreduce(np.ones((3, 2))).shape == (3, 2)
            assert mpicoll.allreduce(np.ones(6, np.int64)).dtype == np.int64
            assert mpicoll.allreduce(np.ones(6, np.int32)).dtype == np.int32
            assert mpicoll.allreduce(np.full(6, 2.0), "prod")[0] == 2.0**size
            assert mpicoll.allreduce(np.full(6, 2.0), "avg")[0] == 2.0
            for root in range(size):
                assert (mpicoll.reduce(np.ones(6), root=root) is None) == (world.rank != root)
                assert mpicoll.bcast(np.full(6, world.rank), root)[0] == root
            assert mpicoll.allreduce(np.ones(6), algorithm="ring")[0] == size

    several(body)


def test_memory_that_is_made_later_changes_the_choice(several: Ranks) -> None:
    def body() -> None:
        x = np.ones(20000)
        before = mpicoll.explain("bcast", x.nbytes).name
        for _ in range(2):
            mpicoll.bcast(x)
        buffer = mpicoll.empty(20000, "float64")
        buffer[:] = mpicoll.world().rank
        after = mpicoll.explain("bcast", x.nbytes)
        if mpicoll.world()._core.no_shm_reason is None:
            assert after.name == "shm_pipelined"
            assert "mpicoll.empty" in after.reason
        else:
            assert after.name == before
        assert mpicoll.bcast(buffer, 0, out=buffer)[-1] == 0
        assert mpicoll.bcast(x)[-1] == 1

    several(body)


@pytest.mark.extension
def test_ranks_that_disagree_are_reported(several: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        with pytest.raises(mpicoll.MismatchError, match=r"ranks? .* calls? allreduce.*they differ in shape"):
            mpicoll.allreduce(np.ones(5000 + 100 * world.rank), algorithm="shm_pipelined")
        with pytest.raises(mpicoll.MismatchError, match=r"ranks? .* calls? allreduce.*they differ in op"):
            mpicoll.allreduce(np.ones(5000), "max" if world.rank else "sum", algorithm="shm_flat")
        assert mpicoll.allreduce(np.ones(5000), algorithm="shm_flat")[0] == world.size

    several(body)


@pytest.mark.parametrize("dtype", [">f4", "f2", "i2"])
def test_dtypes_that_are_reduced_in_another_one(several: Ranks, dtype: str) -> None:
    def body() -> None:
        world = mpicoll.world()
        size = world.size
        for count in (100 * size, 20000 * size):
            x = np.full(count, 1 + world.rank, dtype)
            want = size * (size + 1) / 2
            for algorithm in (None, "native" if dtype != "i2" and world.mpi else None):
                for _ in range(3):
                    for got in (
                        mpicoll.allreduce(x, algorithm=algorithm),
                        mpicoll.reduce_scatter(x, algorithm=algorithm),
                    ):
                        assert got.dtype == x.dtype
                        assert (got == want).all()

    several(body)


BF16 = torch.bfloat16


class Turn:
    """One rank's arrays of one turn, with other contents in each, and what MPI's definition makes of all ranks'."""

    def __init__(self, count: int, turn: int) -> None:
        self.world = mpicoll.world()
        self.rank, self.size, self.count, self.turn = self.world.rank, self.world.size, count, turn
        self.root = self.size - 1
        self.at_root = self.rank == self.root
        self.rows = tuple(count + (rank == 0) for rank in range(self.size))

    def x(self, rank: int, rows: int) -> Any:
        """Whole numbers, so that every dtype holds them and their sums."""
        return np.random.default_rng([self.turn, rank]).integers(-9, 9, rows).astype(np.float64)

    def mine(self, dtype: Any = np.float32, rows: int | None = None) -> Any:
        return made(self.x(self.rank, self.count if rows is None else rows), dtype)

    def out(self, dtype: Any = np.float32, rows: int | None = None) -> Any:
        return made(np.full(self.count if rows is None else rows, np.pi), dtype)

    def all(self, rows: int | None = None) -> Any:
        return np.array([self.x(rank, self.count if rows is None else rows) for rank in range(self.size)])

    def block(self, whole: Any) -> Any:
        """This rank's, by ``rows``."""
        start = sum(self.rows[: self.rank])
        return whole[start : start + self.rows[self.rank]]

    @property
    def ragged(self) -> Any:
        """All ranks' blocks of ``rows``, joined."""
        return np.concatenate([self.x(rank, rows) for rank, rows in enumerate(self.rows)])


def made(numbers: Any, dtype: Any) -> Any:
    return torch.from_numpy(numbers).to(dtype) if isinstance(dtype, torch.dtype) else numbers.astype(dtype)


def wide(got: Any) -> Any:
    return got.detach().double().numpy() if isinstance(got, torch.Tensor) else np.asarray(got, np.float64)


def in_place(t: Turn, dtype: Any, call: Any, *args: Any) -> Any:
    x = t.mine(dtype)
    assert call(x, *args, out=x) is x
    return x


def into(out: Any, got: Any) -> Any:
    """What was written to `out`, which the call returned."""
    assert got is out
    return out


def strided(t: Turn) -> Any:
    return np.repeat(t.out(), 2)[::2]


def scatter_from_root(t: Turn, dtype: Any) -> Any:
    out = t.out(dtype)
    return into(out, mpicoll.scatter(t.mine(dtype, t.count * t.size) if t.at_root else None, t.root, out=out))


def bcast_from_root(t: Turn, dtype: Any) -> Any:
    out = t.out(dtype)
    return into(out, mpicoll.bcast(t.mine(dtype) if t.at_root else None, t.root, out=out))


def bcast_in_place_at_root(t: Turn) -> Any:
    out = t.mine() if t.at_root else t.out()
    return into(out, mpicoll.bcast(out if t.at_root else None, t.root, out=out))


def bcast_of_out_alone(t: Turn) -> Any:
    out = t.mine() if t.at_root else t.out()
    return into(out, mpicoll.bcast(None, t.root, out=out))


def some_pass_out(t: Turn) -> Any:
    return mpicoll.allreduce(t.mine(), out=t.out() if (t.rank + t.turn) % 2 else None)


def overlapping(t: Turn) -> Any:
    memory = np.concatenate([t.mine(), t.out()[:1]])
    return into(out := memory[1:], mpicoll.allreduce(memory[:-1], out=out))


def own_block_in_out(t: Turn) -> Any:
    out = t.out(rows=t.count * t.size)
    mine = out[t.rank * t.count : (t.rank + 1) * t.count]
    mine[:] = t.mine()
    return into(out, mpicoll.allgather(mine, out=out))


def alltoall_with_counts(t: Turn) -> Any:
    send = [t.count + (rank == t.rank) for rank in range(t.size)]
    return mpicoll.alltoall(t.mine(rows=sum(send)), counts=(send, send))


def given_by_all(t: Turn) -> Any:
    """What alltoall_with_counts gives."""
    parts = []
    for rank in range(t.size):
        send = [t.count + (one == rank) for one in range(t.size)]
        start = sum(send[: t.rank])
        parts.append(t.x(rank, sum(send))[start : start + send[t.rank]])
    return np.concatenate(parts)


def total(t: Turn) -> Any:
    return t.all().sum(0)


def of_root(t: Turn) -> Any:
    return t.x(t.root, t.count)


def scattered(t: Turn) -> Any:
    return t.x(t.root, t.count * t.size)[t.rank * t.count : (t.rank + 1) * t.count]


def before(t: Turn) -> Any:
    return t.all()[: t.rank].sum(0)


def joined(t: Turn) -> Any:
    return t.all().reshape(-1)


FORMS: dict[str, tuple[Any, Any]] = {
    "strided x": (lambda t: mpicoll.allreduce(np.repeat(t.mine(), 2)[::2]), total),
    "strided out": (lambda t: into(out := strided(t), mpicoll.allreduce(t.mine(), out=out)), total),
    "x overlaps out": (overlapping, total),
    "allgather of a reversed x": (lambda t: mpicoll.allgather(t.mine()[::-1].copy()[::-1]), joined),
    "scan of a strided x": (
        lambda t: mpicoll.scan(np.repeat(t.mine(), 2)[::2]),
        lambda t: t.all()[: t.rank + 1].sum(0),
    ),
    "bcast of a strided x": (lambda t: mpicoll.bcast(np.repeat(t.mine(), 2)[::2], t.root), of_root),
    "some pass out": (some_pass_out, total),
    "float16": (lambda t: mpicoll.allreduce(t.mine(np.float16)), total),
    "tensor, float16": (lambda t: mpicoll.allreduce(t.mine(torch.float16)), total),
    "tensor, bfloat16": (lambda t: mpicoll.allreduce(t.mine(BF16)), total),
    "tensor, bfloat16, out": (lambda t: into(out := t.out(BF16), mpicoll.allreduce(t.mine(BF16), out=out)), total),
    "tensor, bfloat16, in place": (lambda t: in_place(t, BF16, mpicoll.allreduce), total),
    "tensor, requires_grad": (lambda t: mpicoll.allreduce(t.mine(torch.float32).requires_grad_()), total),
    "parameter": (lambda t: mpicoll.allreduce(torch.nn.Parameter(t.mine(torch.float32))), total),
    "bool": (lambda t: mpicoll.allreduce(t.mine(bool), "lor"), lambda t: t.all().any(0)),
    "land": (lambda t: mpicoll.allreduce(t.mine(np.int32), "land"), lambda t: t.all().all(0)),
    "bcast in place": (
        lambda t: in_place(t, np.float32, mpicoll.bcast, t.root),
        of_root,
    ),
    "bcast, None elsewhere": (lambda t: bcast_from_root(t, np.float32), of_root),
    "bcast of a tensor, None elsewhere": (lambda t: bcast_from_root(t, BF16), of_root),
    "bcast, in place at the root, None elsewhere": (bcast_in_place_at_root, of_root),
    "bcast, None everywhere": (bcast_of_out_alone, of_root),
    "scatter, None elsewhere": (lambda t: scatter_from_root(t, np.float32), scattered),
    "scatter of a tensor, None elsewhere": (lambda t: scatter_from_root(t, torch.float32), scattered),
    "gather with counts": (
        lambda t: mpicoll.gather(t.mine(rows=t.rows[t.rank]), t.root, counts=t.rows),
        lambda t: t.ragged if t.at_root else None,
    ),
    "scatter with counts": (
        lambda t: mpicoll.scatter(
            t.mine(rows=sum(t.rows)) if t.at_root else None, t.root, counts=t.rows, out=t.out(rows=t.rows[t.rank])
        ),
        lambda t: t.block(t.x(t.root, sum(t.rows))),
    ),
    "allgather with counts": (
        lambda t: mpicoll.allgather(t.mine(rows=t.rows[t.rank]), counts=t.rows),
        lambda t: t.ragged,
    ),
    "allgather within out": (own_block_in_out, joined),
    "reduce_scatter with counts": (
        lambda t: mpicoll.reduce_scatter(t.mine(rows=sum(t.rows)), counts=np.array(t.rows)),
        lambda t: t.block(t.all(sum(t.rows)).sum(0)),
    ),
    "alltoall with counts": (alltoall_with_counts, given_by_all),
    "scan": (lambda t: mpicoll.scan(t.mine()), lambda t: t.all()[: t.rank + 1].sum(0)),
    "scan in place": (lambda t: in_place(t, np.float32, mpicoll.scan), lambda t: t.all()[: t.rank + 1].sum(0)),
    "exscan": (lambda t: mpicoll.exscan(t.mine()), before),
    "exscan to out": (lambda t: into(out := t.out(), mpicoll.exscan(t.mine(), out=out)), before),
    "exscan to strided out": (lambda t: into(out := strided(t), mpicoll.exscan(t.mine(), out=out)), before),
    "exscan in place": (lambda t: in_place(t, np.float32, mpicoll.exscan), before),
    "exscan of float16": (lambda t: mpicoll.exscan(t.mine(np.float16)), before),
}
"""Forms of calls, and what they give."""

NUMBERS: dict[str, tuple[Any, Any]] = {
    "a float": (lambda t: mpicoll.allreduce(float(t.mine(rows=1)[0])), lambda t: t.all(1).sum()),
    "an int": (lambda t: mpicoll.allreduce(int(t.mine(rows=1)[0])), lambda t: t.all(1).sum()),
    "a scalar of numpy": (lambda t: mpicoll.allreduce(t.mine(rows=1)[0]), lambda t: t.all(1).sum()),
    "gathered numbers": (lambda t: mpicoll.allgather(float(t.mine(rows=1)[0])), lambda t: t.all(1).reshape(-1)),
    "to out": (
        lambda t: into(out := t.out(np.float64, 1).reshape(()), mpicoll.allreduce(float(t.mine(rows=1)[0]), out=out)),
        lambda t: t.all(1).sum(),
    ),
}


def check_forms(forms: dict[str, tuple[Any, Any]], count: int, prepared: list[int], *, kept: bool) -> None:
    """Each in some turns; if calls are `kept`, none is prepared any more from the third on."""
    mpicoll.allreduce(torch.ones(1))  # with the first tensor the library gets to know torch
    for name, (call, want) in forms.items():
        earlier = []
        for turn in range(5):
            if turn == 2:
                before = prepared.count(get_ident())
            t = Turn(count, turn)
            got, expected = call(t), want(t)
            assert (got is None) == (expected is None), name
            if got is not None:
                earlier.append((got, expected, type(got)))
            for one, wanted, kind in earlier:
                np.testing.assert_array_equal(wide(one), wanted, err_msg=f"{name}, turn {turn}")
                assert kind is earlier[0][2], name
        assert not kept or prepared.count(get_ident()) == before, f"{name} was prepared anew"


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The threads on which operations were prepared, an entry for each."""
    threads: list[int] = []
    prepare = Operation.__init__

    def count(operation: Operation, *args: Any, **options: Any) -> None:
        threads.append(get_ident())
        prepare(operation, *args, **options)

    monkeypatch.setattr(Operation, "__init__", count)
    return threads


@pytest.mark.parametrize("count", [3, 1000])
def test_all_forms_of_small_calls_are_kept(several: Ranks, count: int, prepared: list[int]) -> None:
    several(lambda: check_forms(FORMS | NUMBERS, count, prepared, kept=True))


@pytest.mark.parametrize("count", [5000, 30_000])
def test_all_forms_of_large_calls(several: Ranks, count: int) -> None:
    several(lambda: check_forms(FORMS, count, [], kept=False))


def test_arguments_are_still_checked(several: Ranks) -> None:
    """Calls that differ from a kept one in what makes them wrong; and the kept one serves again afterwards."""

    def body() -> None:
        world = mpicoll.world()
        size = world.size
        rows = (3,) * size
        frozen = np.ones(3)
        frozen.flags.writeable = False
        expanded = np.broadcast_to(np.ones(1), (3,))
        wrong: list[tuple[Any, type[Exception]]] = [
            (lambda: mpicoll.allreduce(np.ones(3), out=frozen), mpicoll.ShapeError),
            (lambda: mpicoll.allreduce(np.ones(3), out=expanded), mpicoll.ShapeError),
            (lambda: mpicoll.allreduce(np.ones(3), out=np.ones(4)), mpicoll.ShapeError),
            (lambda: mpicoll.allreduce(np.ones(3), out=np.ones(3, "f4")), mpicoll.DTypeError),
            (lambda: mpicoll.allreduce(1.0, out=2.0), mpicoll.MpicollError),
            (lambda: mpicoll.allreduce(2**63), mpicoll.DTypeError),
            (lambda: mpicoll.allgather(np.ones(3), counts=(3.0,) * size), mpicoll.ShapeError),
            (lambda: mpicoll.allgather(np.ones(3), counts=(3,) * (size + 1)), mpicoll.ShapeError),
            (lambda: mpicoll.allgather(np.ones(3), counts="abc"), mpicoll.ShapeError),
            (lambda: mpicoll.scatter(None, world.rank), mpicoll.DTypeError),
            (lambda: mpicoll.bcast(None, out=None), mpicoll.DTypeError),
            (lambda: mpicoll.gather(np.ones(3), (world.rank + 1) % size, out=np.ones(3 * size)), mpicoll.ShapeError),
        ]
        for _ in range(4):
            assert mpicoll.allreduce(np.ones(3), out=np.empty(3))[0] == size
            assert mpicoll.allreduce(1.0) == size
            assert type(mpicoll.allreduce(np.float32(1))) is np.float32
            assert type(mpicoll.allreduce(True, "lor")) is bool
            assert mpicoll.allgather(np.ones(3), counts=rows).shape == (3 * size,)
            with mpicoll.algorithms(allreduce="ring"):
                assert mpicoll.allreduce(np.ones(3))[0] == size
            for call, error in wrong:
                with pytest.raises(error):
                    call()

    several(body)


def test_calls_with_other_counts_are_other_calls(several: Ranks) -> None:
    """Arrays of the same shapes, of which the ranks get other parts."""

    def body() -> None:
        world = mpicoll.world()
        rank, size = world.rank, world.size
        ones = (1,) * (size - 1)
        x = np.arange(size + 2)
        for _ in range(4):
            for rows in ((3, *ones), (*ones, 3)):
                mine, begin = rows[rank], sum(rows[:rank])
                part, block = x[begin : begin + mine], np.full(mine, rank)
                np.testing.assert_array_equal(mpicoll.reduce_scatter(x, counts=rows), size * part)
                np.testing.assert_array_equal(mpicoll.scatter(x if rank == 0 else block, counts=rows), part)
                np.testing.assert_array_equal(mpicoll.allgather(block, counts=rows), np.repeat(range(size), rows))
                whole = mpicoll.gather(block, counts=rows)
                np.testing.assert_array_equal(whole, np.repeat(range(size), rows) if rank == 0 else None)
                every = mpicoll.alltoall(x, counts=(rows, (mine,) * size))
                np.testing.assert_array_equal(every, np.tile(part, size))

    several(body)


def test_words_are_no_bfloat16(several: Ranks) -> None:
    """numpy sees both as words of 16 bits."""

    def body() -> None:
        size = mpicoll.world().size
        for _ in range(3):
            assert mpicoll.allreduce(torch.ones(3, dtype=BF16)).tolist() == [size] * 3
            assert mpicoll.allreduce(np.full(3, 0x3F80, np.uint16))[0] == 0x3F80 * size % 2**16
            assert mpicoll.allreduce(torch.full((3,), 0x3F80, dtype=torch.uint16))[0].item() == 0x3F80 * size % 2**16

    several(body)


def test_calls_of_ever_new_sizes_are_not_prepared_twice(several: Ranks, prepared: list[int]) -> None:
    def body() -> None:
        for count in range(40, 60):
            mpicoll.allreduce(np.ones(count))

    several(body)
    assert len(prepared) == 20 * (several.local or 1)


@pytest.mark.extension
def test_a_kept_call_that_fails_serves_again(several: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        for turn in range(6):
            for op in ("sum", "max"):
                got = mpicoll.allreduce(np.full(5000, turn + world.rank), op, algorithm="shm_flat")
                every = [turn + rank for rank in range(world.size)]
                assert (got == (sum(every) if op == "sum" else max(every))).all()
            if turn > 2:
                with pytest.raises(mpicoll.MismatchError, match="they differ in op"):
                    mpicoll.allreduce(np.ones(5000), "max" if world.rank else "sum", algorithm="shm_flat")

    several(body)
