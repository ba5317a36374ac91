"""The programs that try what may crash: here, that they notice what is wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpicoll.cli import probes
from mpicoll.cli.probes import Wrong, main
from mpicoll.transport import cuda_awareness, reductions


def told(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for one in cuda_awareness.told_by(capsys.readouterr().out):
        found |= one
    return found


@pytest.fixture
def trial(cuda: Any) -> Any:
    """A trial that no other rank takes part in."""
    from mpicoll.buffers.cuda.device import cuda_device

    made = probes._Trial.__new__(probes._Trial)
    made.device, made.rank, made._serial = cuda_device(0), 0, 0
    return made


def test_right_data(trial: Any, capsys: pytest.CaptureFixture[str]) -> None:
    mine, other = trial.data(64, "int32")
    trial.check("Copy", lambda source, target: np.copyto(target, source), mine, mine)
    assert told(capsys) == {"step": "Copy of 64 bytes"}
    trial.check("Nothing", lambda source, target: None, mine, None)
    assert mine.tolist() != other.tolist()


def _one_less(source: Any, target: Any) -> None:
    np.copyto(target[:-1], source[:-1])


@pytest.mark.parametrize("call", [lambda source, target: None, _one_less], ids=["nothing", "one-less"])
def test_wrong_data(trial: Any, call: Callable[..., None]) -> None:
    given = np.arange(100, 110)
    with pytest.raises(Wrong, match="Copy of 80 bytes of device memory gives wrong data on rank 0"):
        trial.check("Copy", call, given, given)


def test_data_where_there_should_be_none(trial: Any) -> None:
    given = np.arange(10)
    with pytest.raises(Wrong, match="wrong data"):
        trial.check("Gather", lambda source, target: np.copyto(target, source), given, None)


def test_ranks_know_what_the_others_have() -> None:
    one, other = (probes._Trial.__new__(probes._Trial) for _ in range(2))
    one._serial = other._serial = 0
    for _ in range(2):
        for mine, theirs in zip(one.data(800), other.data(800), strict=True):
            assert mine.tolist() == theirs.tolist()
    assert one.data(800)[0].tolist() != one.data(800)[0].tolist()


@pytest.mark.parametrize(
    ("error", "said"),
    [(Wrong("x"), {"wrong": "x"}), (probes.Unable("y"), {"unable": "y"}), (ImportError("z"), {"unable": "z"})],
    ids=["wrong", "unable", "import"],
)
def test_how_trials_end(
    error: Exception, said: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> Any:
        raise error

    monkeypatch.setitem(probes._TRIALS, "job", fails)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    assert main("job") == 1
    assert told(capsys) == said
    monkeypatch.setitem(probes._TRIALS, "job", lambda: {"all": "well"})
    assert main("job") == 0
    assert told(capsys) == {"done": {"all": "well"}}


def test_what_nobody_has_thought_of(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    assert main("no such trial") == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "KeyError: 'no such trial'" in said.err


def test_lines_of_others_are_no_harm() -> None:
    text = (
        f"hello\n{cuda_awareness.MARK}{json.dumps({'a': 1})}\n{cuda_awareness.MARK}{{half\nx{cuda_awareness.MARK}{{}}\n"
    )
    assert list(cuda_awareness.told_by(text)) == [{"a": 1}]


class _Whole:
    """MPI's collectives of two ranks that have what the trial gives them; the one called `spoiled` is wrong in its last
    element."""

    def __init__(self, rank: int, spoiled: str) -> None:
        self._rank = rank
        self._spoiled = spoiled

    def _parts(self, op: str, like: Any) -> tuple[Any, Any, Any]:
        left, right = reductions.operands(op, like.dtype, like.size)
        return left, right, reductions.combine(op, left, right)

    def _give(self, target: Any, value: Any, name: str) -> None:
        target[...] = value
        if name == self._spoiled:
            target[-1:] = target[-1:] == 0

    def allreduce(self, source: Any, target: Any, op: str) -> None:
        self._give(target, self._parts(op, source)[2], "Allreduce in place" if source is target else "Allreduce")

    def reduce(self, source: Any, target: Any, op: str, root: int) -> None:
        name = "Reduce in place" if source is target else f"Reduce to rank {root}"
        if self._rank == root:
            self._give(target, self._parts(op, source)[2], name)

    def scan(self, source: Any, target: Any, op: str) -> None:
        left, _, total = self._parts(op, source)
        self._give(target, (left, total)[self._rank], "Scan in place" if source is target else "Scan")

    def exscan(self, source: Any, target: Any, op: str) -> None:
        if self._rank == 1:
            self._give(target, self._parts(op, source)[0], "Exscan")

    def reduce_scatter(self, source: Any, target: Any, counts: Any, op: str) -> None:
        total = self._parts(op, source)[2]
        name = "Reduce_scatter" if counts else "Reduce_scatter_block"
        self._give(target, np.split(total, 2)[self._rank], name)


@pytest.mark.parametrize("rank", [0, 1])
def test_collectives_that_reduce_wrongly(rank: int) -> None:
    def why(spoiled: str) -> str | None:
        transport: Any = SimpleNamespace(native=_Whole(rank, spoiled), rank=rank)
        return probes._collectives(transport, "max", np.dtype(np.uint16), 33)

    assert why("none of them") is None
    both = ("Allreduce", "Allreduce in place", "Scan", "Scan in place", "Reduce_scatter", "Reduce_scatter_block")
    for name in (*both, *(("Exscan", "Reduce to rank 1") if rank else ("Reduce in place", "Reduce to rank 0"))):
        found = why(name)
        assert found is not None, name
        assert found.startswith("the MPI library computes max of uint16 wrongly: ")
        assert found.endswith(f"(by {name} of 66 elements on rank {rank} of 2)")


def test_reductions_of_device_memory(trial: Any) -> None:
    """Of all dtypes that are right on the host."""
    wrong = {"max L", "max Q"}

    class Native:
        def allreduce(self, source: Any, target: Any, op: str) -> None:
            both = reductions.operands(op, source.dtype, source.size)
            tried.add(reductions.name(op, source.dtype))
            total = reductions.combine(op, *both)
            np.copyto(target, both[0] if reductions.name(op, source.dtype) == spoiled else total)

    trial.native = Native()
    trial.transport = SimpleNamespace(
        misreduces=lambda op, dtype: reductions.refusal(dict.fromkeys(wrong, ""), op, dtype)
    )
    tried: set[str] = set()
    spoiled = ""
    probes._on_all_dtypes(trial)
    assert tried == {reductions.name(*one) for one in reductions.PAIRS} - wrong
    spoiled = "min B"
    with pytest.raises(Wrong, match=r"Allreduce \(min of uint8\) of 65536 bytes of device memory gives wrong data"):
        probes._on_all_dtypes(trial)
