"""All-reduce with messages between nodes that are compressed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import mpicoll
from mpicoll.buffers.compression import BLOCK, NAMES
from mpicoll.engine.executors import compressed
from mpicoll.errors import CommunicationError
from mpicoll.transport.local import Drop

WORLDS = ((1, 1), (2, 1), (3, 1), (4, 1), (4, 2), (3, 2), (5, 2))
"""Ranks, and ranks per node; the last node may have fewer."""

SHAPES = ((), (0,), (1,), (7,), (3, 100), (BLOCK,), (2, BLOCK + 1), (9001,))


def _inputs(shape: tuple[int, ...], size: int) -> list[Any]:
    generator = np.random.default_rng(7)
    spread = 10.0 ** generator.integers(-3, 4, shape)
    return [(generator.standard_normal(shape) * spread).astype(np.float32) for _ in range(size)]


def _bounds(name: str, inputs: Sequence[Any], per_node: int) -> Any:
    """Return the stated bound of the error of a sum, as docs/operations.md has it."""
    nodes = range(0, len(inputs), per_node)
    sums = [np.abs(sum(one.astype(np.float64) for one in inputs[at : at + per_node])) for at in nodes]
    if name == "int8":
        sums = [_largest_of_blocks(one) for one in sums]
    relative = {"bf16": 2.0**-7, "int8": 1 / 127}[name] * (1 + 2.0**-7)
    rounding = len(inputs) * 2.0**-23 * sum(np.abs(one.astype(np.float64)) for one in inputs)
    return (relative * sum(sums) if len(sums) > 1 else 0) + rounding


def _largest_of_blocks(array: Any) -> Any:
    padded = np.zeros(-(-array.size // BLOCK) * BLOCK)
    padded[: array.size] = array.reshape(-1)
    return np.repeat(padded.reshape(-1, BLOCK).max(axis=1), BLOCK)[: array.size].reshape(array.shape)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("size", "per_node"), WORLDS)
def test_errors_are_within_the_bounds(name: str, size: int, per_node: int) -> None:
    cases = [(shape, op, _inputs(shape, size)) for shape, op in itertools.product(SHAPES, ("sum", "avg"))]

    def body() -> list[Any]:
        rank = mpicoll.world().rank
        results = []
        for _, op, inputs in cases:
            before = inputs[rank].copy()
            results.append(mpicoll.allreduce(inputs[rank], op, compression=name))
            np.testing.assert_array_equal(inputs[rank], before)
        return results

    everywhere = mpicoll.run_local(body, size, ranks_per_node=per_node)
    for results in everywhere[1:]:
        assert [np.asarray(one).tobytes() for one in results] == [np.asarray(one).tobytes() for one in everywhere[0]]
    for (shape, op, inputs), result in zip(cases, everywhere[0], strict=True):
        assert np.shape(result) == shape
        divisor = size if op == "avg" else 1
        exact = sum(one.astype(np.float64) for one in inputs) / divisor
        assert (np.abs(result - exact) <= _bounds(name, inputs, per_node) / divisor).all()


@pytest.mark.parametrize(
    "form", ["call", "out", "in place", "strided", "timeout", "request", "plan", "started", "torch"]
)
@pytest.mark.parametrize(("size", "per_node"), [(3, 1), (4, 2)])
def test_every_form_has_the_same_bits(form: str, size: int, per_node: int) -> None:
    inputs = _inputs((40, 30), size)

    def body() -> None:
        x = inputs[mpicoll.world().rank]
        wanted = mpicoll.allreduce(x, "avg", compression="int8")
        np.testing.assert_array_equal(_call(form, x), wanted)

    mpicoll.run_local(body, size, ranks_per_node=per_node)


def _call(form: str, x: Any) -> Any:
    given: dict[str, Any] = {"op": "avg", "compression": "int8"}
    if form == "call":
        return mpicoll.allreduce(x, **given)
    if form == "out":
        out = np.empty_like(x)
        assert mpicoll.allreduce(x, out=out, **given) is out
        return out
    if form == "in place":
        x = x.copy()
        assert mpicoll.allreduce(x, out=x, **given) is x
        return x
    if form == "strided":
        wide, out = np.repeat(x, 2, axis=1), np.empty((*x.shape, 3), x.dtype)[..., 1]
        return mpicoll.allreduce(wide[:, ::2], out=out, **given)
    if form == "timeout":
        return mpicoll.allreduce(x, timeout=50, **given)
    if form == "request":
        return mpicoll.iallreduce(x, **given).wait()
    if form == "torch":
        torch = pytest.importorskip("torch")
        return mpicoll.allreduce(torch.from_numpy(x), **given).numpy()
    plan = mpicoll.allreduce_init(x, **given)
    if form == "plan":
        return plan()
    plan.start()
    return plan.wait()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("size", "per_node"), [(2, 1), (3, 1), (4, 2)])
def test_mean_of_a_plan_converges_and_that_of_calls_does_not(name: str, size: int, per_node: int) -> None:
    inputs, runs = _inputs((3000,), size), 200

    def body() -> tuple[Any, Any]:
        x = inputs[mpicoll.world().rank]
        plan = mpicoll.allreduce_init(x, compression=name)
        of_plan = sum(plan().astype(np.float64) for _ in range(runs)) / runs
        of_calls = sum(mpicoll.allreduce(x, compression=name).astype(np.float64) for _ in range(5)) / 5
        return of_plan, of_calls

    of_plan, of_calls = mpicoll.run_local(body, size, ranks_per_node=per_node)[0]
    exact = sum(one.astype(np.float64) for one in inputs)
    bounds = _bounds(name, inputs, per_node)
    assert (np.abs(of_plan - exact) <= 2 / runs * bounds + 1e-5 * bounds.max()).all()
    assert np.abs(of_calls - exact).mean() > 20 * np.abs(of_plan - exact).mean()


def test_plan_reads_its_input_anew() -> None:
    def body() -> None:
        world = mpicoll.world()
        x = np.zeros(1000, np.float32)
        plan = mpicoll.allreduce_init(x, out=x, compression="bf16")
        for number in range(5):
            x[:] = number + world.rank
            plan()
            np.testing.assert_array_equal(x, 3 * number + 3)

    mpicoll.run_local(body, 3, ranks_per_node=1)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", NAMES)
def test_values_that_are_not_finite(name: str, value: float) -> None:
    """They do not stay in the memory of a plan."""

    def body() -> tuple[Any, Any]:
        x = np.linspace(1, 2, 4 * BLOCK, dtype=np.float32)
        plan = mpicoll.allreduce_init(x, compression=name)
        if mpicoll.world().rank == 1:
            x[BLOCK + 9] = value
        first = plan().copy()
        x[BLOCK + 9] = 1
        return first, plan().copy()

    (first, second), *others = mpicoll.run_local(body, 4, ranks_per_node=2)
    for other in others:
        np.testing.assert_array_equal(other[0], first)
    place = np.arange(first.size)
    affected = place == BLOCK + 9 if name == "bf16" else place // BLOCK == 1
    np.testing.assert_array_equal(~np.isfinite(first), affected)
    assert name == "int8" or np.array_equal(first[BLOCK + 9], value, equal_nan=True)
    assert np.isfinite(second).all()


def test_chunks_of_several_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressed, "_PIECE", 2 * BLOCK)
    test_errors_are_within_the_bounds("int8", 3, 1)
    test_mean_of_a_plan_converges_and_that_of_calls_does_not("int8", 4, 2)


def test_only_messages_between_nodes_are_compressed() -> None:
    inputs = _inputs((5000,), 4)

    def body() -> list[Any]:
        x = inputs[mpicoll.world().rank]
        plain = mpicoll.allreduce(x)
        for _ in range(3):  # from the third call on without Python code
            np.testing.assert_array_equal(mpicoll.allreduce(x, compression="int8"), plain)
        plan = mpicoll.allreduce_init(x, compression="int8")
        np.testing.assert_array_equal(plan(), plain)
        return [mpicoll.explain("allreduce", x.nbytes).name == plan.choice.name]

    assert mpicoll.run_local(body, 4) == [[True]] * 4


@pytest.mark.parametrize("per_node", [1, 2])
@pytest.mark.parametrize("other", [None, "bf16"])
def test_ranks_that_pass_different_compressions(per_node: int, other: str | None) -> None:
    def body() -> None:
        world = mpicoll.world()
        x = np.ones(10, np.float32)
        with pytest.raises(mpicoll.MismatchError, match=r"compression=int8.*they differ in compression") as caught:
            mpicoll.allreduce(x, compression=other if world.rank == 1 else "int8")
        assert caught.value.fields == ("compression",)
        assert mpicoll.allreduce(x, compression="int8")[0] == pytest.approx(2, rel=1e-2)  # it stays usable

    mpicoll.run_local(body, 2, ranks_per_node=per_node)


def test_arguments_that_are_not_served() -> None:
    def body() -> None:
        x = np.ones(10, np.float32)
        for compression in ("zip", "", 8, True):
            with pytest.raises(mpicoll.ArgumentError, match=r"compression must be 'bf16' or 'int8'.*\(rank . of 2\)"):
                mpicoll.allreduce(x, compression=compression)  # type: ignore[arg-type]
        ops = ["max", "prod", mpicoll.premul_sum(2), mpicoll.Op(np.add), np.add]
        for op in ops:
            with pytest.raises(mpicoll.ArgumentError, match="compression='int8' serves op sum and avg, got"):
                mpicoll.allreduce_init(x, op, compression="int8")  # type: ignore[arg-type]
        for dtype in ("float64", "float16", "int32", "complex64"):
            with pytest.raises(mpicoll.DTypeError, match=f"serves float32 arrays, got {dtype}; convert"):
                mpicoll.iallreduce(x.astype(dtype), compression="bf16")
        with pytest.raises(mpicoll.ArgumentError, match="has an algorithm of its own, got algorithm='ring'"):
            mpicoll.allreduce(x, compression="bf16", algorithm="ring")

    mpicoll.run_local(body, 2, ranks_per_node=1)


def test_failure_forgets_what_was_left_out() -> None:
    """A message that is lost ends the wait for it, on a rank that names it."""

    def body() -> None:
        world = mpicoll.world()
        x = np.linspace(0, 1, 1000, dtype=np.float32)
        plan = mpicoll.allreduce_init(x, compression="int8")
        if world.rank == 0:
            with pytest.raises(CommunicationError):
                plan()
            assert not plan._operation.compression._arrays  # type: ignore[union-attr]
        else:
            plan()

    with pytest.raises(CommunicationError):
        mpicoll.run_local(body, 2, ranks_per_node=1, faults=[Drop(1, 0)], timeout=1)
