"""minloc and maxloc: pairs (values, indices) through every reduction."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from support.data import FLOATS, FOREIGN, HALVES, INTEGERS, dtype_of, laid, random, unwrap, wrap
from support.exercise import REDUCTIONS, algorithm_names
from support.ranks import Ranks

import mpicoll

INDEX = ("int64", "int32", "uint8")


def _inputs(dtype: str, index: str, size: int, shape: tuple[int, ...]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Few different values, so that there are ties, and indices in no order."""
    made = []
    for rank in range(size):
        rng = random(dtype, index, shape, rank)
        values = rng.integers(0, 4, shape).astype(dtype_of(dtype))
        if values.dtype.kind == "f" and dtype != "bfloat16":
            values[rng.random(shape) < 0.1] = np.nan
        made.append((values, rng.integers(0, 100, shape).astype(index)))
    return made


def _best(pairs: list[tuple[np.ndarray, np.ndarray]], op: str) -> tuple[np.ndarray, np.ndarray]:
    """The oracle, element by element: NaN before everything, then the extreme value, then the lowest index."""
    values, indices = (np.stack([pair[part] for pair in pairs]) for part in (0, 1))
    sign = 1 if op == "minloc" else -1
    best_values, best_indices = np.empty_like(values[0]), np.empty_like(indices[0])
    for where in np.ndindex(values[0].shape):
        column = [(values[(r, *where)], indices[(r, *where)]) for r in range(len(pairs))]
        best = min(column, key=lambda pair: _key(float(pair[0]), int(pair[1]), sign))
        best_values[where], best_indices[where] = best
    return best_values, best_indices


def _key(value: float, index: int, sign: int) -> tuple[bool, float, int]:
    return (False, 0.0, index) if np.isnan(value) else (True, sign * value, index)


def _want(collective: str, pairs: list[Any], op: str, rank: int) -> Any:
    if collective == "scan":
        return _best(pairs[: rank + 1], op)
    if collective == "exscan":
        return _best(pairs[:rank], op) if rank else None
    values, indices = _best(pairs, op)
    if collective == "reduce":
        return (values, indices) if rank == len(pairs) - 1 else None
    if collective == "reduce_scatter":
        rows = _counts(len(pairs))
        start, stop = [0, *accumulate(rows)][rank : rank + 2]
        return values[start:stop], indices[start:stop]
    return values, indices


def _counts(size: int) -> list[int]:
    return [(3 * rank) % 4 for rank in range(size)]


def _body(collective: str, dtype: str) -> None:
    world = mpicoll.world()
    shape = (sum(_counts(world.size)), 2) if collective == "reduce_scatter" else (5, 3)
    options: dict[str, Any] = {"root": world.size - 1} if collective == "reduce" else {}
    if collective == "reduce_scatter":
        options["counts"] = _counts(world.size)
    turn = 0
    for op in ("minloc", "maxloc"):
        for algorithm in algorithm_names(collective, native=False):
            turn += 1
            index = INDEX[turn % 3]
            pairs = _inputs(dtype, index, world.size, shape)
            want = _want(collective, pairs, op, world.rank)
            library = "numpy" if dtype in FOREIGN or turn % 2 else "torch"
            layout = ("contiguous", "strided", "fortran")[turn // 2 % 3]
            views = [laid(part, layout) for part in pairs[world.rank]]
            x = tuple(wrap(library, view) for view in views)
            before = [view.tobytes() for view in views]
            if turn % 3 == 0:
                results = [getattr(mpicoll, f"i{collective}")(x, op, algorithm=algorithm, **options).wait()]
            elif turn % 3 == 1:
                plan = getattr(mpicoll, f"{collective}_init")(x, op, algorithm=algorithm, **options)
                results = [plan(), plan()]
            else:
                results = [getattr(mpicoll, collective)(x, op, algorithm=algorithm, **options)]
            assert before == [view.tobytes() for view in views]
            for result in results:
                _check(result, want, library, (dtype, index))
            if collective in ("allreduce", "scan") and layout == "contiguous":
                assert getattr(mpicoll, collective)(x, op, out=x, algorithm=algorithm) is not None
                _check(x, want, library, (dtype, index))


def _check(result: Any, want: Any, library: str, names: tuple[str, str]) -> None:
    if want is None:
        assert result is None
        return
    assert type(result) is tuple
    for got, value, name in zip(result, want, names, strict=True):
        np.testing.assert_array_equal(unwrap(library, got, name, value.shape), value)


@pytest.mark.slow
@pytest.mark.parametrize("collective", REDUCTIONS)
def test_values_and_indices(ranks: Ranks, collective: str) -> None:
    def body() -> None:
        for dtype in (*INTEGERS, *HALVES, *FLOATS, *FOREIGN):
            _body(collective, dtype)

    ranks(body)


def test_out_is_a_pair(ranks: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        values, indices = np.zeros(4)[::2], torch.zeros(2, dtype=torch.int64)
        x = (np.array([float(world.rank), -world.rank]), torch.full((2,), world.rank))
        result = mpicoll.allreduce(x, "maxloc", out=(values, indices))
        assert result[0] is values
        assert result[1] is indices
        assert values.tolist() == [world.size - 1, 0]
        assert indices.tolist() == [world.size - 1, 0]

    ranks(body)


def test_numbers_are_pairs_too(ranks: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        assert mpicoll.allreduce((1.5 + world.rank, world.rank), "maxloc") == (world.size + 0.5, world.size - 1)

    ranks(body)
