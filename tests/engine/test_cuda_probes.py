"""The probes of device memory notice wrong data."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpicoll.engine import cuda_probes
from mpicoll.transport import reductions
from mpicoll.transport.probes import WrongResult, merge_reports


@pytest.fixture
def pair(cuda: Any) -> Any:
    """A pair of ranks of which the other one is missing."""
    from mpicoll.buffers.cuda.device import cuda_device

    made = cuda_probes._Pair.__new__(cuda_probes._Pair)
    made.device, made.rank, made._serial = cuda_device(0), 0, 0
    return made


def test_right_data(pair: Any, capsys: pytest.CaptureFixture[str]) -> None:
    mine, other = pair.data(64, "int32")
    pair.check("Copy", lambda source, target: np.copyto(target, source), mine, mine)
    assert merge_reports(capsys.readouterr().out) == {"step": "Copy of 64 bytes"}
    pair.check("Nothing", lambda source, target: None, mine, None)
    assert mine.tolist() != other.tolist()


def _one_less(source: Any, target: Any) -> None:
    np.copyto(target[:-1], source[:-1])


@pytest.mark.parametrize("call", [lambda source, target: None, _one_less], ids=["nothing", "one-less"])
def test_wrong_data(pair: Any, call: Callable[..., None]) -> None:
    given = np.arange(100, 110)
    with pytest.raises(WrongResult, match="Copy of 80 bytes of device memory gives wrong data on rank 0"):
        pair.check("Copy", call, given, given)


def test_data_where_there_should_be_none(pair: Any) -> None:
    given = np.arange(10)
    with pytest.raises(WrongResult, match="wrong data"):
        pair.check("Gather", lambda source, target: np.copyto(target, source), given, None)


def test_ranks_know_what_the_others_have() -> None:
    one, other = (cuda_probes._Pair.__new__(cuda_probes._Pair) for _ in range(2))
    one._serial = other._serial = 0
    for _ in range(2):
        for mine, theirs in zip(one.data(800), other.data(800), strict=True):
            assert mine.tolist() == theirs.tolist()
    assert one.data(800)[0].tolist() != one.data(800)[0].tolist()


def test_reductions_of_device_memory(pair: Any) -> None:
    """Of all dtypes that are right on the host."""
    wrong = {"max L", "max Q"}

    class Native:
        def allreduce(self, source: Any, target: Any, op: str) -> None:
            both = reductions.make_operands(op, source.dtype, source.size)
            tried.add(reductions.format_pair(op, source.dtype))
            total = reductions.combine(op, *both)
            np.copyto(target, both[0] if reductions.format_pair(op, source.dtype) == spoiled else total)

    pair.native = Native()
    pair.transport = SimpleNamespace(
        find_native_defect=lambda collective, op, dtype: reductions.find_defect(dict.fromkeys(wrong, ""), op, dtype)
    )
    tried: set[str] = set()
    spoiled = ""
    cuda_probes._on_all_dtypes(pair)
    assert tried == {reductions.format_pair(*one) for one in reductions.PAIRS} - wrong
    spoiled = "min B"
    with pytest.raises(
        WrongResult, match=r"Allreduce \(min of uint8\) of 65536 bytes of device memory gives wrong data"
    ):
        cuda_probes._on_all_dtypes(pair)
