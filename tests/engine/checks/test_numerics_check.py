"""NaN and infinity that go into collectives and come out of them, and results that differ."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from support.ranks import Ranks

import mpicoll
from mpicoll.engine import dispatch
from mpicoll.engine.checks import numerics_check
from mpicoll.engine.core.communicator import Communicator
from mpicoll.engine.core.operation import Operation

NAN, INF = float("nan"), float("inf")

HERE = Path(__file__).name

DTYPES = {
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "float16": np.dtype(np.float16),
    "complex64": np.dtype(np.complex64),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "torch bfloat16": torch.bfloat16,
    "torch float16": torch.float16,
    "torch float32": torch.float32,
}


def _array(dtype: str, values: Any) -> Any:
    made = DTYPES[dtype]
    return torch.tensor(values, dtype=made) if dtype.startswith("torch") else np.array(values).astype(made)


def _last() -> int:
    return mpicoll.world().size - 1


def _flawed(call: Callable[[], object]) -> mpicoll.NumericsError:
    with pytest.raises(mpicoll.NumericsError) as caught:
        call()
    assert f"{HERE}:" in str(caught.value)
    return caught.value


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_of_every_dtype(ranks: Ranks, dtype: str) -> None:
    """On the last rank alone; the call is refused on all of them, and nothing has changed."""

    def body() -> None:
        world = mpicoll.world()
        values = [[1.0, 2.0, -3.0], [4.0, 0.5, 6.0]]
        fine = _array(dtype, values)
        if world.rank == _last():
            values = [[1.0, 2.0, NAN], [-INF, 0.5, NAN]]
        x = _array(dtype, values)
        with mpicoll.debug(numerics=True):
            error = _flawed(lambda: mpicoll.allreduce(x))
            what = "2 NaN and 1 infinite of 6 elements, the first at [0, 2]"
            assert f"rank {_last()} passes {what}, to allreduce({dtype.removeprefix('torch ')}[2, 3], op=sum)" in str(
                error
            )
            assert error.ranks == (_last(),)
            _flawed(lambda: mpicoll.allreduce(x, out=x))
            got = mpicoll.allreduce(fine)
        assert complex(got[1][0]) == 4 * world.size
        again = np.array(x.tolist() if isinstance(x, torch.Tensor) else x.astype(np.complex128))
        np.testing.assert_array_equal(np.isnan(again), np.isnan(np.array(values)))

    ranks(body)


CALLS: dict[str, Callable[[Any], object]] = {
    "allgather": mpicoll.allgather,
    "allreduce of max": lambda x: mpicoll.allreduce(x, "max"),
    "alltoall": mpicoll.alltoall,
    "exscan": mpicoll.exscan,
    "gather": mpicoll.gather,
    "reduce": mpicoll.reduce,
    "reduce_scatter": mpicoll.reduce_scatter,
    "scan": mpicoll.scan,
    "scatter": lambda x: mpicoll.scatter(x if mpicoll.world().rank == _last() else x[:2], _last()),
    "bcast": lambda x: mpicoll.bcast(x, _last()),
    "bcast in place": lambda x: mpicoll.bcast(x, _last(), out=x),
    "bcast out of place": lambda x: mpicoll.bcast(x, _last(), out=np.empty_like(x)),
    "iallreduce": lambda x: mpicoll.iallreduce(x).wait(),
    "plan": lambda x: mpicoll.allreduce_init(x)(),
    "strided": lambda x: mpicoll.allreduce(np.repeat(x, 2)[::2]),
    "strided bcast": lambda x: mpicoll.bcast(np.repeat(x, 2)[::2], _last()),
    "location": lambda x: mpicoll.allreduce((x, np.arange(x.size)), "maxloc"),
}


@pytest.mark.parametrize("name", CALLS)
def test_inputs_of_every_collective(ranks: Ranks, name: str) -> None:
    def body() -> None:
        world = mpicoll.world()
        fine = np.ones(world.size * 2)
        x = fine.copy()
        if world.rank == _last():
            x[1] = INF
        with mpicoll.debug(numerics=True):
            error = _flawed(lambda: CALLS[name](x))
            assert f"rank {_last()} passes 1 infinite of {x.size} elements, the first at [1]" in str(error)
            CALLS[name](fine)
        CALLS[name](x)  # nobody looks

    ranks(body)


def test_only_the_root_of_a_bcast_passes_numbers(several: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        out = np.full(4, NAN)
        with mpicoll.debug(numerics=True):
            mpicoll.bcast(np.ones(4) if world.rank == 0 else out, 0, out=out)
            assert (out == 1).all()
            part = np.full(2, NAN)
            mpicoll.scatter(np.ones(2 * world.size) if world.rank == 0 else None, 0, out=part)
            assert (part == 1).all()

    several(body)


def test_all_ranks_pass_the_same(ranks: Ranks) -> None:
    """Alike everywhere, so that nobody differs; and more than one rank."""

    def body() -> None:
        world = mpicoll.world()
        with mpicoll.debug(numerics=True):
            error = _flawed(lambda: mpicoll.allreduce(np.array([1.0, NAN])))
            assert error.ranks == tuple(range(world.size))
            assert "1 NaN of 2 elements, the first at [1]" in str(error)
            mpicoll.barrier()

    ranks(body)


def test_numbers_that_can_be_neither() -> None:
    def body() -> None:
        with mpicoll.debug(numerics=True):
            assert mpicoll.allreduce(np.full(3, -1)).tolist() == [-2] * 3
            assert mpicoll.allreduce(np.full(3, 2**31 - 1, np.int32)).tolist() == [-2] * 3
            assert mpicoll.allreduce(True, "lor") is True
            mpicoll.bcast(np.zeros(3, [("a", np.float32), ("b", np.int8)]))
            mpicoll.bcast(np.full(3, 0x7F80, np.uint16))
            assert mpicoll.allreduce(np.empty(0)).size == 0

    mpicoll.run_local(body, 2)


def test_large_numbers_are_none(several: Ranks) -> None:
    """Though their sum, by which they are looked through, is infinite."""

    def body() -> None:
        with mpicoll.debug(numerics=True):
            large = np.array([1.7e308, 1.7e308])
            assert mpicoll.allreduce(large, "max")[0] == 1.7e308
            assert mpicoll.allgather(large).size == 2 * mpicoll.world().size
            half = np.full(100, 60000, np.float16)
            assert mpicoll.allreduce(half, "min")[0] == 60000

    several(body)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("name", ["allreduce", "reduce", "reduce_scatter", "scan", "exscan"])
def test_results_that_overflow(several: Ranks, name: str) -> None:
    """All ranks learn of it, whoever has the result."""

    def body() -> None:
        world = mpicoll.world()
        if name == "exscan" and world.size == 2:
            return  # the last rank gets the operand of the first
        x = np.ones(world.size, np.float32)
        x[0] = 3e38
        with mpicoll.debug(numerics=True):
            error = _flawed(lambda: getattr(mpicoll, name)(x))
            assert "though all operands are finite: the result overflows" in str(error)
            who = {
                "allreduce": tuple(range(world.size)),
                "reduce": (0,),
                "reduce_scatter": (0,),
                "scan": tuple(range(1, world.size)),
                "exscan": tuple(range(2, world.size)),
            }
            assert error.ranks == who[name]
            assert mpicoll.allreduce(1.0) == world.size

    several(body)


def test_results_that_are_infinite_by_right(ranks: Ranks) -> None:
    """The first rank's exclusive prefix of a maximum is that of nothing."""

    def body() -> None:
        with mpicoll.debug(numerics=True):
            got = mpicoll.exscan(np.ones(2), "max")
            if mpicoll.world().rank == 0:
                assert got is None or (got == -INF).all()

    ranks(body)


def test_first_index_and_numbers_against_a_slow_count() -> None:
    rng = np.random.default_rng(5)
    for dtype in ("float32", "float64", "float16", "complex64", "bfloat16"):
        for shape in ((), (1,), (7,), (3, 4, 5), (0,), (2_100_000,)):
            x = np.asarray(rng.standard_normal(shape)).astype(DTYPES[dtype])
            assert numerics_check.describe_nonfinite(x, dtype) == ""
            if not x.size:
                continue
            places = rng.choice(x.size, size=min(3, x.size), replace=False)
            for place, value in zip(places, (NAN, INF, -INF), strict=False):
                x.reshape(-1)[place] = value
            wide = x.astype(np.complex128)
            wrong = np.argwhere(~np.isfinite(wide))
            nans, others = int(np.isnan(wide).sum()), len(wrong)
            kinds = f"{nans} NaN" + (f" and {others - nans} infinite" if others > nans else "")
            expected = f"{kinds} of {x.size} element{'s' * (x.size > 1)}, the first at {wrong[0].tolist()}"
            assert numerics_check.describe_nonfinite(x, dtype) == expected
            if dtype == "bfloat16":
                assert numerics_check.describe_nonfinite(x.view(np.uint16), dtype) == expected


# --- checksums


def _spoiled(monkeypatch: pytest.MonkeyPatch, rank: int, spoil: Callable[[np.ndarray[Any, Any]], None]) -> None:
    """Let the results of `rank` be wrong."""
    right = dispatch.bind

    def bind(made: Operation, *args: Any, **kwargs: Any) -> Callable[[], None]:
        run = right(made, *args, **kwargs)

        def wrong() -> None:
            run()
            if made.comm.rank == rank:
                spoil(made.result())

        return wrong

    monkeypatch.setattr(dispatch, "bind", bind)


def _flip(result: np.ndarray[Any, Any]) -> None:
    """The least bit of one element."""
    result.view(np.uint8).reshape(-1)[0] ^= 1


@pytest.mark.parametrize("collective", ["allreduce", "bcast", "allgather"])
def test_a_wrong_result_is_found(several: Ranks, monkeypatch: pytest.MonkeyPatch, collective: str) -> None:
    def body() -> str:
        world = mpicoll.world()
        call = getattr(mpicoll, collective)
        x = np.arange(5.0) + world.rank
        with mpicoll.debug(checksum=True):
            for form in (lambda: call(x), lambda: getattr(mpicoll, f"i{collective}")(x).wait()):
                with pytest.raises(mpicoll.MismatchError) as caught:
                    form()
                error = caught.value
                assert error.fields == ("result",)
                assert error.ranks == (world.size - 1,)
                assert f"rank {_last()} gets another result of {collective}(float64[5]" in str(error).splitlines()[0]
                assert f"{HERE}:" in str(error)
            assert mpicoll.reduce(1) == (world.size if world.rank == 0 else None)
        call(x)  # nobody looks
        return str(error)

    size = several.size
    assert size > 1
    _spoiled(monkeypatch, size - 1, lambda result: _flip(result) if isinstance(result, np.ndarray) else None)
    texts = several(body)
    assert len(set(texts)) == 1


def test_results_of_all_algorithms_have_the_same_bits(several: Ranks) -> None:
    """Which is what the checksum takes for granted."""

    def body() -> None:
        rng = np.random.default_rng(mpicoll.world().rank)
        with mpicoll.debug(checksum=True):
            for algorithm in ("native", *mpicoll.schedules.algorithms_of("allreduce"), "shm_flat", "shm_pipelined"):
                for count in (1, 5, 1000):
                    for dtype in (np.float32, np.float16):
                        x = rng.standard_normal(count).astype(dtype)
                        with mpicoll.algorithms(allreduce=algorithm):
                            mpicoll.allreduce(x)

    several(body)


def test_pairs_have_checksums_too(several: Ranks) -> None:
    def body() -> None:
        rank = mpicoll.world().rank
        with mpicoll.debug(checksum=True, numerics=True):
            values, places = mpicoll.allreduce((np.arange(3.0) * rank, np.full(3, rank)), "maxloc")
            assert values.tolist() == [0, rank * 0 + _last(), 2 * _last()]
            assert places.tolist()[1:] == [_last()] * 2

    several(body)


def test_communicators_of_one(ranks: Ranks) -> None:
    """Nobody to compare with, but numbers are looked at."""

    def body() -> None:
        world = mpicoll.world()
        alone: Communicator | None = world.split(world.rank)
        assert alone is not None
        with mpicoll.debug(numerics=True, checksum=True):
            assert mpicoll.allreduce(2.0, comm=alone) == 2
            error = _flawed(lambda: mpicoll.allreduce(NAN, comm=alone))
            assert error.ranks == (0,)
            outside = "" if alone.members == (0,) else f"(as ranks of the job, 0 is {world.rank})"
            assert outside in str(error)
        alone.free()

    ranks(body)


def test_padding_of_records_does_not_count(several: Ranks) -> None:
    def body() -> None:
        inner = np.dtype([("x", "u1"), ("y", "f8")], align=True)
        dtype = np.dtype([("pair", inner, 2), ("z", "u1")], align=True)
        x = np.full(4 * dtype.itemsize, 7 + mpicoll.world().rank, np.uint8).view(dtype)
        x["pair"]["x"], x["pair"]["y"], x["z"] = 1, 2, 3
        with mpicoll.debug(checksum=True):
            mpicoll.bcast(x, out=x if mpicoll.world().rank == 0 else np.zeros(8, dtype)[::2])

    several(body)
