"""What an MPI library's own reductions compute: here, libraries that are wrong in the ways of those in use."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpicoll
from mpicoll.engine.checks.call_check import CallCheck
from mpicoll.engine.core.communicator import Communicator
from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.engine.core.registry import Options, Registry
from mpicoll.errors import CommunicationError
from mpicoll.transport import launcher, probes, reduction_probes, reductions

Change = Callable[[str, np.ndarray, np.ndarray, np.ndarray], Any]


def library(change: Change = lambda op, left, right, out: None) -> reductions.Reduce:
    """A library whose right results `change` spoils."""

    def reduce(op: str, source: np.ndarray, target: np.ndarray) -> None:
        before = target.copy()
        target[:] = reductions.combine(op, source, before)
        change(op, source, before, target)

    return reduce


def signed(op: str, left: np.ndarray, right: np.ndarray, out: np.ndarray) -> None:
    """As Debian's MPICH 4.0.2 does."""
    if op in ("min", "max") and out.dtype.kind == "u":
        as_signed = np.dtype(f"i{out.dtype.itemsize}")
        out[:] = reductions.combine(op, left.view(as_signed), right.view(as_signed)).view(out.dtype)


def saturating(op: str, left: np.ndarray, right: np.ndarray, out: np.ndarray) -> None:
    """As Open MPI does, in whole vectors only."""
    if op == "sum" and out.dtype == np.int8:
        whole = out.size // 64 * 64
        exact = left[:whole].astype(int) + right[:whole]
        out[:whole] = exact.clip(-128, 127)


def losing(op: str, left: np.ndarray, right: np.ndarray, out: np.ndarray) -> None:
    if op == "max" and out.dtype == np.float64:
        out[:] = np.where(left > right, left, right)


def flushing(op: str, left: np.ndarray, right: np.ndarray, out: np.ndarray) -> None:
    if op == "sum" and out.dtype == np.float32:
        out[np.abs(out) < np.finfo(np.float32).tiny] = 0


def careless_at_the_end(op: str, left: np.ndarray, right: np.ndarray, out: np.ndarray) -> None:
    if op == "bxor" and out.dtype == np.int32 and out.size % 16 == 15:
        out[-1] = right[-1]


def too_long(op: str, left: np.ndarray, right: np.ndarray, out: np.ndarray) -> None:
    if op == "prod" and out.dtype == np.int64 and out.size == 3:
        np.lib.stride_tricks.as_strided(out, (4,))[3] += 1


def missing(op: str, left: np.ndarray, right: np.ndarray, out: np.ndarray) -> None:
    if op == "lxor" and out.dtype == bool:
        raise CommunicationError("MPI_ERR_OP: invalid reduce operation")


def _both(op: str, chars: str) -> set[str]:
    return {f"{op} {char}" for char in chars}


@pytest.mark.parametrize(
    ("change", "wrong", "why"),
    [
        (
            signed,
            _both("min", "BHILQ") | _both("max", "BHILQ"),
            "the MPI library computes min of uint8 wrongly: 0 and 128 give 128, not 0",
        ),
        (saturating, {"sum b"}, "the MPI library computes sum of int8 wrongly: 1 and 127 give 127, not -128"),
        (losing, {"max d"}, "not nan"),
        (flushing, {"sum f"}, "the MPI library computes sum of float32 wrongly: "),
        (careless_at_the_end, {"bxor i"}, "the MPI library computes bxor of int32 wrongly: "),
        (too_long, {"prod l", "prod q"}, "the MPI library computes prod of int64 wrongly: "),
        (missing, {"lxor ?"}, "the MPI library has no lxor of bool: MPI_ERR_OP: invalid reduce operation"),
        (lambda *_: None, set(), ""),
    ],
    ids=["signed", "saturating", "losing", "flushing", "tail", "too-long", "missing", "right"],
)
def test_what_is_wrong_is_found(change: Change, wrong: set[str], why: str) -> None:
    found = reductions.try_all(library(change))
    assert set(found) == wrong
    assert why in "".join(found.values())


def test_what_may_be_left_to_it() -> None:
    wrong = {"max L": "it is wrong"}
    assert reductions.find_defect(wrong, "max", np.dtype(np.uint64)) == "it is wrong"
    assert reductions.find_defect(wrong, "max", np.dtype(np.int64)) is None
    untried = reductions.find_defect(wrong, "sum", np.dtype(np.float16))
    assert untried == "sum of float16 was not tested with the MPI library"
    assert reductions.find_defect(wrong, "band", np.dtype(np.float32)) is not None


# --- the file


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where it is kept what was found, of a library that nobody has tried."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(launcher, "find_library", lambda: launcher.MpiLibrary("Some MPI v1", "/lib/libmpi.so", "4"))
    return tmp_path / "mpicoll" / "mpi-reductions.json"


def refuse(*args: Any) -> Any:
    raise AssertionError(args)


def test_it_is_tried_once_for_each_library(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = reductions.find_defects(library(signed))
    assert "max L" in found
    assert reductions.find_defects(refuse) == found
    monkeypatch.setattr(launcher, "find_library", lambda: launcher.MpiLibrary("Some MPI v2", "/lib/libmpi.so", "4"))
    assert reductions.find_defects(library()) == {}
    monkeypatch.setenv("OMPI_MCA_op", "^avx")
    assert reductions.find_defects(library(saturating)).keys() == {"sum b"}
    assert len(json.loads(file.read_text())["entries"]) == 3


@pytest.mark.parametrize(
    "change",
    [{"wrong": ["max L"]}, {"wrong": {"max L": 1}}, {"wrong": {"max": "x"}}, {"tried": None}, {"in_place": "no"}],
)
def test_what_is_not_understood_is_tried_again(change: dict[str, Any], file: Path) -> None:
    reductions.find_defects(library())
    content = json.loads(file.read_text())
    content["entries"][0] |= change
    file.write_text(json.dumps(content))
    assert "max L" in reductions.find_defects(library(signed))
    file.write_text("{")
    assert reductions.find_defects(library()) == {}


def test_a_file_that_cannot_be_written_is_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert reductions.find_defects(library()) == {}


# --- the collectives themselves


def told(status: int | None, *what: dict[str, Any], errors: str = "") -> launcher.RunResult:
    return launcher.RunResult(status, "".join(f"{probes.MARK}{json.dumps(one)}\n" for one in what), errors)


@pytest.fixture
def jobs(file: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[list[str]]]:
    """Have jobs end as is said; returns the list of their arguments."""

    def make(*ended: launcher.RunResult) -> list[list[str]]:
        called: list[list[str]] = []
        ends = iter(ended)

        def attempt(command: list[str], environ: Any, seconds: float) -> launcher.RunResult:
            called.append(command[command.index(reduction_probes.PROGRAM) + 1 :])
            return next(ends)

        monkeypatch.setattr(launcher, "find_launcher", lambda: "mpirun")
        monkeypatch.setattr(launcher, "run_bounded", attempt)
        return called

    return make


@pytest.mark.slow
def test_both_ranks_and_the_file_say_what_is_wrong(jobs: Callable[..., list[list[str]]], file: Path) -> None:
    jobs(
        told(0, {"step": "sum i"}, {"done": {"wrong": {"sum i": "a"}}}, {"done": {"wrong": {"max i": "b"}}}),
        told(0, {"done": "works"}),
    )
    entry, source = reduction_probes.probe_reductions()
    assert entry is not None
    assert source == f"stored in {file}"
    assert (entry["wrong"], entry["in_place"], entry["collectives"]) == ({"sum i": "a", "max i": "b"}, True, True)
    # What a job finds in the file it doesn't try.
    assert reductions.find_defects(refuse) == {"sum i": "a", "max i": "b"}


@pytest.mark.slow
def test_what_crashes_is_not_tried_again(jobs: Callable[..., list[list[str]]]) -> None:
    called = jobs(
        told(139, {"step": "sum i"}, {"step": "max d"}, errors="Signal: Segmentation fault (11)"),
        told(None, {"step": "min d"}),
        told(0, {"done": {"wrong": {"sum b": "a"}}}),
        told(139, errors="Signal: Segmentation fault (11)"),
    )
    entry, _ = reduction_probes.probe_reductions()
    assert entry is not None
    assert entry["wrong"] == {
        "sum b": "a",
        "max d": "the MPI library fails in max of float64: Signal: Segmentation fault (11)",
        "min d": "the MPI library fails in min of float64: did not end within 60 s",
    }
    assert entry["in_place"] is False
    assert [one[0] for one in called] == ["reductions"] * 3 + ["in-place"]
    assert json.loads(called[2][1]).keys() == {"max d", "min d"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ended", "why"),
    [
        (told(1, {"unable": "no mpi4py"}), "no mpi4py"),
        (told(1, errors="no slots\n"), "a job of two ranks fails: no slots"),
    ],
    ids=["unable", "not-started"],
)
def test_what_cannot_be_tried(
    ended: launcher.RunResult,
    why: str,
    jobs: Callable[..., list[list[str]]],
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jobs(ended)
    assert reduction_probes.probe_reductions() == (None, why)
    monkeypatch.setattr(launcher, "find_launcher", lambda: None)
    assert reduction_probes.probe_reductions() == (None, "there is neither mpirun nor mpiexec to try it")
    assert not file.exists()


@pytest.mark.parametrize(
    ("version", "in_place", "expected"),
    [
        ("Open MPI v5.0.11, package", None, True),
        ("MPICH Version:      5.0.2\n", None, True),
        ("MPICH Version:\t4.0.2\n", None, False),
        ("MPICH Version:\t4.0.2\n", True, True),
        ("Open MPI v5.0.11, package", False, False),
    ],
)
def test_where_reduce_works_in_place(
    version: str, in_place: bool | None, expected: bool, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "find_library", lambda: launcher.MpiLibrary(version, "/lib/libmpi.so", "4"))
    if in_place is not None:
        entry = reductions.make_entry(reductions.read_conditions(), {})
        reductions.FILE.write(entry | {"in_place": in_place})
    reductions.reduces_in_place.cache_clear()
    try:
        assert reductions.reduces_in_place() is expected
    finally:
        reductions.reduces_in_place.cache_clear()


# --- in a job


@pytest.mark.mpi
def test_what_one_library_computes_wrongly_is_left_to_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the last rank, on a node of its own, has a library that compares unsigned integers as signed ones."""
    from mpi4py import MPI

    from mpicoll.transport import mpi
    from mpicoll.transport.mpi.comm_facts import find_facts

    world = MPI.COMM_WORLD
    wrong = reductions.try_all(library(signed)) if world.rank == world.size - 1 else {}
    monkeypatch.setattr(mpi.ops, "find_defects", lambda: wrong)
    transport = mpi.MpiTransport(world.Dup(), world.Dup(), find_facts(world, [world.rank]))
    core = CommunicatorCore(
        transport, None, name="several", world=False, checks=Options(), registry=Registry(CallCheck)
    )
    with Communicator(core) as comm:
        for one in (comm, comm.duplicate()):
            text = str(mpicoll.explain("allreduce", 8, op="max", dtype="uint64", comm=one))
            assert not text.startswith("native")
            assert "not native" in text
            assert "the MPI library computes max of uint64 wrongly: 0 and 9223372036854775808 give" in text
            assert str(mpicoll.explain("allreduce", 8, op="max", dtype="int64", comm=one)).startswith("native")
            with pytest.raises(mpicoll.AlgorithmError, match="computes min of uint8 wrongly"):
                mpicoll.reduce(np.ones(3, np.uint8), "min", comm=one, algorithm="native")
        x = np.array([2**64 - 1 if comm.rank == 0 else 1], np.uint64)
        assert mpicoll.allreduce(x, "max", comm=comm).tolist() == [2**64 - 1]
        assert mpicoll.scan(x, "min", comm=comm).tolist() == [2**64 - 1 if comm.rank == 0 else 1]


@pytest.mark.mpi
@pytest.mark.parametrize("wrong", [{}, {"min l": "it is wrong", "min q": "it is wrong"}], ids=["right", "wrong"])
def test_words_are_compared_whatever_min_does(wrong: reductions.Defects) -> None:
    from mpi4py import MPI

    from mpicoll.transport import mpi
    from mpicoll.transport.mpi.comm_facts import find_facts

    world = MPI.COMM_WORLD
    end = mpi.MpiTransport(world.Dup(), world.Dup(), find_facts(world, range(world.size))._replace(defects=wrong))
    rank, size = end.rank, end.size
    for word in (0, 2**62 - 1, 5):
        assert end.compare(word, lambda: "unused", lambda: None, []) is None
    if size > 1:
        for odd in range(size):
            texts = end.compare(7 if rank == odd else 2**61, lambda: f"rank {rank}", lambda: None, [])
            assert texts == [f"rank {one}" for one in range(size)]
    end.free()


@pytest.mark.mpi
def test_where_reduce_does_not_work_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operand is copied at a root other than rank 0."""
    from mpi4py import MPI

    from mpicoll.transport import mpi

    class Recorder:
        def Reduce(self, source: Any, *args: Any) -> None:  # noqa: N802  it is called so
            sources.append(source)
            MPI.COMM_WORLD.Reduce(source, *args)

    sources: list[Any] = []
    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    native = mpi.MpiNative(Recorder())  # type: ignore[arg-type]
    for works in (True, False):
        monkeypatch.setattr(reductions, "reduces_in_place", lambda works=works: works)
        for root in range(size):
            data = np.arange(5.0) + rank
            for call in (native.reduce, lambda *args: native.bind(lambda mpi: mpi.reduce(*args), persistent=True)()):
                before = data.copy()
                call(data, data if rank == root else None, "sum", root)
                if rank == root:
                    assert (sources[-1] is MPI.IN_PLACE) == (works or root == 0)
                    assert data.tolist() == (size * np.arange(5.0) + sum(range(size))).tolist()
                    data[:] = before
