"""Messages like earlier ones, which are not checked and described again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.ranks import Ranks

import mpicoll
from mpicoll.engine.core.communicator import core_of
from mpicoll.engine.diagnostics.flight_recorder import list_history

_DTYPES = ("int8", "uint16", "int64", "float16", "float32", "complex128", "bool", "datetime64[s]", ">i4")


def _neighbours() -> tuple[int, int, int]:
    me, size = mpicoll.world().rank, mpicoll.world().size
    return me, (me + 1) % size, (me - 1) % size


def _pass_on(x: Any, into: Any = None, tag: int = 3) -> Any:
    """Pass `x` to the next rank and return what the previous one has passed: even ranks send first."""
    me, right, left = _neighbours()
    if me % 2 == 0:
        mpicoll.send(x, right, tag)
    received = mpicoll.recv(x if into is None else None, left, tag, out=into)
    if me % 2:
        mpicoll.send(x, right, tag)
    return received


@pytest.mark.parametrize("shape", [(), (0,), (7,), (2, 3)])
def test_values(several: Ranks, shape: tuple[int, ...]) -> None:
    def body() -> None:
        me, _, left = _neighbours()
        for dtype in _DTYPES:
            for turn in range(3):
                x = np.full(shape, me + turn).astype(dtype)
                expected = np.full(shape, left + turn).astype(dtype)
                got = _pass_on(x)
                assert got.dtype == x.dtype
                assert got.shape == shape
                np.testing.assert_array_equal(got, expected)
                out = np.zeros(shape, dtype)
                assert _pass_on(x, out) is out
                np.testing.assert_array_equal(out, expected)
                np.testing.assert_array_equal(x, np.full(shape, me + turn).astype(dtype))

    several(body)


def test_a_description_serves_later_messages() -> None:
    def body() -> None:
        for _ in range(4):
            _pass_on(np.ones((1, 17)), tag=5)
        mpicoll.barrier()
        for name in ("send", "recv"):
            calls = [entry[2] for entry, _, _ in list_history() if entry[2].name == name and entry[2].shape == (1, 17)]
            assert len(calls) == 8  # of two ranks
            assert len({id(call) for call in calls}) == 2

    mpicoll.run_local(body, 2)


def test_arrays_that_are_not_contiguous(several: Ranks) -> None:
    def body() -> None:
        me, _, left = _neighbours()
        for turn in range(3):
            _pass_on(np.full((3, 4), float(me)), np.empty((3, 4)))
            whole = np.zeros((4, 6))
            x = np.arange(12.0).reshape(4, 3).T + me + turn
            out = whole.T[:3, :]
            assert _pass_on(x, out) is out
            np.testing.assert_array_equal(out, np.arange(12.0).reshape(4, 3).T + left + turn)
            np.testing.assert_array_equal(whole[:, 3:], 0)

    several(body)


def test_arguments_that_equal_valid_ones_are_checked(several: Ranks) -> None:
    def body() -> None:
        _, right, left = _neighbours()
        x = np.ones(2)
        for _ in range(2):
            _pass_on(x, np.empty(2), tag=1)
        with pytest.raises(mpicoll.RankError):
            mpicoll.send(x, float(right), 1)  # type: ignore[arg-type]
        with pytest.raises(mpicoll.RankError):
            mpicoll.send(x, right, 1.0)  # type: ignore[arg-type]
        with pytest.raises(mpicoll.RankError):
            mpicoll.recv(x, left, 1.0)  # type: ignore[arg-type]
        readonly = np.empty(2)
        readonly.flags.writeable = False
        with pytest.raises(mpicoll.ArgumentError):
            mpicoll.recv(out=readonly, source=left, tag=1)
        with pytest.raises(mpicoll.ShapeError):
            mpicoll.recv(np.empty(2), left, 1, out=np.empty(3))

    several(body)


@pytest.mark.parametrize("sent", [1, 9])
def test_another_size_than_expected(several: Ranks, sent: int) -> None:
    def body() -> None:
        me, right, left = _neighbours()
        for _ in range(2):
            _pass_on(np.ones(4))
        guarded = np.zeros(6)
        sending = mpicoll.isend(np.full(sent, float(me)), right, 3)
        with pytest.raises(mpicoll.TruncationError, match=r"float64"):
            mpicoll.recv(out=guarded[:4], source=left, tag=3)
        sending.wait()
        np.testing.assert_array_equal(guarded[4:], 0)
        np.testing.assert_array_equal(_pass_on(np.full(4, float(me))), float(left))

    several(body)


def test_any_source_and_status(several: Ranks) -> None:
    def body() -> None:
        me, right, left = _neighbours()
        for turn in range(3):
            sending = mpicoll.isend(np.full(2, me), right, turn)
            status = mpicoll.Status()
            got = mpicoll.recv(np.empty(2, int), status=status)
            sending.wait()
            assert (status.source, status.tag, status.nbytes) == (left, turn, 16)
            np.testing.assert_array_equal(got, left)
            mpicoll.barrier()

    several(body)


def test_a_timeout_does_not_rename_later_messages() -> None:
    def body() -> None:
        _, right, left = _neighbours()
        x = np.ones(5)
        for timeout in (None, 20, None):
            sending = mpicoll.isend(x, right, 11)
            mpicoll.recv(x, left, 11, timeout=timeout)
            sending.wait()
            receiving = mpicoll.irecv(x, left, 12)
            mpicoll.send(x, right, 12, timeout=timeout)
            receiving.wait()
        for name in ("send", "recv", "isend", "irecv"):
            calls = [entry[2] for entry, _, _ in list_history() if entry[2].shape == (5,) and entry[2].name == name]
            tags = {"send": {12}, "recv": {11}, "isend": {11, 12}, "irecv": {11, 12}}[name]
            assert {call.tag for call in calls} == tags

    mpicoll.run_local(body, 2)


def test_checks_that_are_switched_on_later() -> None:
    def body() -> None:
        me, right, left = _neighbours()
        for _ in range(2):
            _pass_on(np.full(2, float(me)))
        core = core_of(mpicoll.world())
        core.checks = core.checks._replace(calls=True)
        np.testing.assert_array_equal(_pass_on(np.full(2, float(me))), float(left))
        sending = mpicoll.isend(np.ones(2, np.int64), right, 3)
        with pytest.raises(mpicoll.MismatchError, match="dtype"):
            mpicoll.recv(np.empty(2), left, 3)
        sending.wait()

    mpicoll.run_local(body, 2)
