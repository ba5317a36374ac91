"""Ranks that call different things: all of them are told the same, and go on."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest
from support.ranks import Ranks

import mpicoll
from mpicoll.config import Config
from mpicoll.engine.core.call_mismatch import MAX_TEXT, decode_mismatch_error, encode_call, hash_fields, mismatch_error
from mpicoll.engine.core.registry import Options
from mpicoll.engine.diagnostics.flight_recorder import Call, CallSite, Group
from mpicoll.errors import SetupError
from mpicoll.wording import ranks_and_verb

HERE = Path(__file__).name


def _last() -> int:
    return mpicoll.world().size - 1


def _is_last() -> bool:
    return mpicoll.world().rank == _last()


def _text(call: Callable[[], object]) -> str:
    """What goes wrong with `call`, which must be a mismatch, named, with a line of this file for each rank."""
    world = mpicoll.world()
    with pytest.raises(mpicoll.MismatchError) as caught:
        call()
    error = caught.value
    assert len(error.calls) == world.size
    assert all(one is not None and HERE in one["site"] and one["text"] for one in error.calls)
    assert error.fields
    assert str(error).startswith("the ranks of world disagree about collective ")
    return str(error)


def _alike(texts: list[str], world: Ranks) -> None:
    """All ranks have raised the same error."""
    if world.local:
        assert len(set(texts)) == 1
        return
    mine = np.zeros(4096, np.uint8)
    encoded = np.frombuffer(texts[0].encode(), np.uint8)[:4096]
    mine[: encoded.size] = encoded
    assert (mpicoll.bcast(mine) == mine).all()


def _x(*shape: int, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    return np.ones(shape or (4,), dtype)


MISMATCHES: dict[str, tuple[str, Callable[[], object]]] = {
    "operation": ("operation", lambda: mpicoll.bcast(_x()) if _is_last() else mpicoll.allreduce(_x())),
    "barrier": ("operation", lambda: mpicoll.barrier() if _is_last() else mpicoll.allreduce(_x())),
    "dtype": ("dtype", lambda: mpicoll.allreduce(_x(dtype=np.int32 if _is_last() else np.float32))),
    "dtype of moved data": ("dtype", lambda: mpicoll.bcast(_x(dtype=np.int32 if _is_last() else np.float32))),
    "shape": ("shape", lambda: mpicoll.allreduce(_x(5 if _is_last() else 4))),
    "shape of as many elements": ("shape", lambda: mpicoll.allreduce(_x(2, 3) if _is_last() else _x(3, 2))),
    "empty": ("shape", lambda: mpicoll.allgather(_x(0) if _is_last() else _x(1))),
    "op": ("op", lambda: mpicoll.allreduce(_x(), "max" if _is_last() else "sum")),
    "root": ("root", lambda: mpicoll.bcast(_x(), 0 if _is_last() else 1)),
    "root of a reduction": ("root", lambda: mpicoll.reduce(_x(), root=0 if _is_last() else 1)),
    "algorithm": ("algorithm", lambda: mpicoll.allreduce(_x(), algorithm="ring" if _is_last() else "tree")),
    "rows": ("shape", lambda: mpicoll.gather(_x(2, 3) if _is_last() else _x(2, 2))),
    "several": ("root and dtype", lambda: mpicoll.bcast(_x(dtype=int) if _is_last() else _x(), int(_is_last()))),
    "scan": ("operation", lambda: mpicoll.scan(_x()) if _is_last() else mpicoll.exscan(_x())),
    "split": ("operation", lambda: mpicoll.world().split(0) if _is_last() else mpicoll.barrier()),
    "empty array": ("operation", lambda: mpicoll.empty(4) if _is_last() else mpicoll.barrier()),
    "plan": ("operation", lambda: mpicoll.allreduce_init(_x()) if _is_last() else mpicoll.allreduce(_x())),
    "plan's op": ("op", lambda: mpicoll.allreduce_init(_x(), "max" if _is_last() else "sum")),
    "background": (
        "operation",
        lambda: mpicoll.ibcast(_x()).wait() if _is_last() else mpicoll.iallreduce(_x()).wait(),
    ),
    "one in the background": (
        "dtype",
        lambda: mpicoll.iallreduce(_x(dtype=int)).wait() if _is_last() else mpicoll.allreduce(_x()),
    ),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_mismatches_are_named_on_all_ranks_which_go_on(several: Ranks, name: str) -> None:
    fields, call = MISMATCHES[name]

    def body() -> str:
        world = mpicoll.world()
        with mpicoll.debug():
            assert mpicoll.allreduce(1) == world.size
            text = _text(call)
            for field in fields.split(" and "):
                assert field in text.splitlines()[0].rpartition("they differ in ")[2]
            assert f"rank {_last()} calls" in text or world.size == 2
            np.testing.assert_array_equal(mpicoll.allreduce(_x(3)), np.full(3, world.size))
        assert mpicoll.allgather(_x(1)).size == world.size
        return text

    _alike(several(body), several)


def test_the_text(several: Ranks) -> None:
    def call() -> None:
        if _is_last():
            mpicoll.bcast(_x(2, 3), 1, algorithm="binomial")
        else:
            mpicoll.allreduce(_x(2, 3), algorithm="ring")

    def body() -> str:
        world = mpicoll.world()
        with mpicoll.debug():
            mpicoll.barrier()
            with pytest.raises(mpicoll.MismatchError) as caught:
                call()
        error = caught.value
        usual = list(range(world.size - 1))
        first, *lines = str(error).splitlines()
        reduce, bcast = "allreduce(float32[2, 3], op=sum) by ring", "bcast(float32[2, 3], root=1) by binomial"
        others = f"{ranks_and_verb(usual, 'calls', 'call')} {reduce}"
        # Of two parties of the same size that of the lowest rank comes first.
        assert first == (
            f"the ranks of world disagree about collective {error.number}: rank {world.size - 1} calls {bcast} where"
            f" {others}; they differ in operation"
        )
        assert lines[0] == f"  {others.partition(' call')[0]}: {reduce}"
        assert lines[1].startswith(f"    {others.partition(' call')[0]} at {__file__}:")
        assert lines[1].endswith(" in call")
        assert lines[2] == f"  rank {_last()}: {bcast}"
        assert error.ranks == (_last(),)
        assert error.fields == ("operation",)
        assert [one["operation"] for one in error.calls if one] == ["allreduce"] * len(usual) + ["bcast"]
        assert error.calls[0] is not None
        assert (error.calls[0]["dtype"], error.calls[0]["shape"]) == ("float32", [2, 3])
        return str(error)

    _alike(several(body), several)


def test_three_ways_to_call(several: Ranks) -> None:
    if several.size < 3:
        pytest.skip("needs three ranks")

    def body() -> str:
        rank = mpicoll.world().rank
        with mpicoll.debug():
            text = _text(lambda: mpicoll.allreduce(_x(), ("sum", "max", "min", "sum")[rank]))
        first = text.splitlines()[0]
        assert "rank 1 calls allreduce(float32[4], op=max)" in first
        assert "rank 2 calls allreduce(float32[4], op=min)" in first
        assert first.endswith("they differ in op")
        return text

    _alike(several(body), several)


def test_counts(several: Ranks) -> None:
    def body() -> str:
        world = mpicoll.world()
        size = world.size
        rows = [1] * size
        with mpicoll.debug():
            wrong = [2, *rows[1:]] if _is_last() else rows
            text = _text(lambda: mpicoll.allgather(_x(wrong[world.rank]), counts=wrong))
            assert text.splitlines()[0].endswith("they differ in counts")
            _text(lambda: mpicoll.gather(_x(1), counts=rows) if _is_last() else mpicoll.gather(_x(1)))
            # What is right may differ in shape.
            right = list(range(1, size + 1))
            assert mpicoll.allgather(_x(right[world.rank], 2), counts=right).shape == (sum(right), 2)
        return text

    _alike(several(body), several)


def test_alltoall_whose_blocks_do_not_fit(several: Ranks) -> None:
    def body() -> str:
        world = mpicoll.world()
        rank, size = world.rank, world.size
        # Rank i sends i + j + 1 rows to rank j, which is right, also under way; then the last sends rank 0 one more.
        counts = [rank + other + 1 for other in range(size)]
        with mpicoll.debug():
            assert mpicoll.alltoall(_x(sum(counts)), counts=(counts, counts)).size == sum(counts)
            more = [counts[0] + 1, *counts[1:]] if _is_last() else counts
            text = _text(lambda: mpicoll.alltoall(_x(sum(more)), counts=(more, counts)))
            first = text.splitlines()[0]
            assert f"rank {size - 1} sends {size + 1} rows to rank 0, which expects {size}; they differ in" in first
            with pytest.raises(mpicoll.MismatchError) as caught:
                mpicoll.ialltoall(_x(sum(more)), counts=(more, counts)).wait()
            assert caught.value.ranks == (0, size - 1)
            assert caught.value.fields == ("counts",)
            even = None if _is_last() else ([1] * size, [1] * size)
            _text(lambda: mpicoll.alltoall(_x(size), counts=even))
            assert mpicoll.alltoall(_x(sum(counts)), counts=(counts, counts)).size == sum(counts)
        return text

    _alike(several(body), several)


def test_plans_that_run_out_of_step(several: Ranks) -> None:
    def body() -> None:
        with mpicoll.debug():
            first, second = mpicoll.allreduce_init(_x()), mpicoll.allreduce_init(_x(), "max")
            text = _text(second if _is_last() else first)
            assert "they differ in op" in text
            text = _text(lambda: (second.start(), second.wait()) if _is_last() else (first.start(), first.wait()))
            assert first()[0] == mpicoll.world().size
            assert second()[0] == 1

    several(body)


def test_collectives_that_were_started_before(several: Ranks) -> None:
    """The site of one in the background is where it was started, and those after it are not disturbed."""

    def body() -> None:
        world = mpicoll.world()
        before = mpicoll.iallreduce(_x())
        with mpicoll.debug():
            requests = [mpicoll.iallreduce(np.full(3, number)) for number in range(3)]
            wrong = mpicoll.ibcast(_x()) if _is_last() else mpicoll.iallreduce(_x())
            after = mpicoll.iallreduce(_x())
            with pytest.raises(mpicoll.MismatchError) as caught:
                wrong.wait()
            assert [one.wait()[0] for one in requests] == [number * world.size for number in range(3)]
            assert after.wait()[0] == world.size
        assert before.wait()[0] == world.size
        assert all(one is not None and f"{HERE}:" in one["site"] for one in caught.value.calls)

    several(body)


def test_parts_of_the_world(several: Ranks) -> None:
    """Each communicator counts for itself; ranks are those of the part, and those of the job are told, too."""

    def body() -> None:
        world = mpicoll.world()
        part = world.split(0 if world.rank else 1)
        assert part is not None
        with mpicoll.debug():
            late = world.split(0, -world.rank)
            assert late is not None
            if part.size > 1:
                with pytest.raises(mpicoll.MismatchError) as caught:
                    mpicoll.bcast(_x(), 1 if part.rank == 1 else 0, comm=part)
                assert "the ranks of world/split(0) disagree" in str(caught.value)
                assert "1 is 2" in str(caught.value).splitlines()[0]
            with pytest.raises(mpicoll.MismatchError, match=r"the ranks of world/split\(0\) disagree"):
                mpicoll.bcast(_x(), late.rank % 2, comm=late)
            assert mpicoll.allreduce(1, comm=part) == part.size
            assert mpicoll.allreduce(1, comm=late) == late.size
            late.free()
        assert mpicoll.allreduce(1, comm=part) == part.size
        part.free()

    several(body)


def test_levels_of_a_hierarchy_are_not_compared_apart() -> None:
    def body() -> None:
        with mpicoll.debug(numerics=True, checksum=True):
            for count in (1, 7, 100):
                got = mpicoll.allreduce(np.arange(float(count)), algorithm="hierarchical")
                np.testing.assert_array_equal(got, 4 * np.arange(count))
            text = _text(lambda: mpicoll.allreduce(_x(), "max" if _is_last() else "sum", algorithm="hierarchical"))
            assert "they differ in op" in text
            assert mpicoll.allreduce(1) == 4

    mpicoll.run_local(body, 4, ranks_per_node=2)


def test_what_debug_changes(ranks: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        asked = world._core.checks
        part = world.split(0)
        assert part is not None
        with mpicoll.debug(numerics=True):
            assert world._core.checks == Options(True, True, asked.checksum)
            assert part._core.checks == world._core.checks
            with mpicoll.debug(checksum=True):
                assert world._core.checks == Options(True, True, True)
                with mpicoll.debug(check=False):
                    assert world._core.checks == Options()
                    assert world._core.queue.observer is None
                    mpicoll.barrier()
                assert world._core.checks == Options(True, True, True)
            with mpicoll.debug(numerics=False):
                assert world._core.checks == Options(True, False, asked.checksum)
            made = world.split(0)
            assert made is not None
            assert made._core.checks == Options(True, True, asked.checksum)
        assert made._core.checks == part._core.checks == world._core.checks == asked
        assert (world._core.queue.observer is None) == (not asked.calls)
        part.free()
        made.free()

    ranks(body)


def test_debug_is_left_by_an_error(several: Ranks) -> None:
    def body() -> None:
        asked = mpicoll.world()._core.checks
        with pytest.raises(mpicoll.MismatchError), mpicoll.debug():
            mpicoll.allreduce(_x(), "max" if _is_last() else "sum")
        assert mpicoll.world()._core.checks == asked
        assert mpicoll.allreduce(1) == mpicoll.world().size

    several(body)


def test_call_without_with() -> None:
    def body() -> None:
        mpicoll.debug()
        assert mpicoll.world()._core.checks.calls
        _text(lambda: mpicoll.allreduce(_x(), "max" if _is_last() else "sum"))

    mpicoll.run_local(body, 2)


def test_ranks_that_do_not_come() -> None:
    """Whoever waits is told for whom, and where."""
    told: list[str] = []

    def gone() -> None:
        with mpicoll.debug():
            mpicoll.barrier()
            if not _is_last():
                with pytest.raises(mpicoll.RankFailed) as caught:
                    mpicoll.allreduce(_x())
                assert caught.value.ranks == (_last(),)
                told.append(str(caught.value))

    mpicoll.run_local(gone, 3)
    assert len(told) == 2
    for text in told:
        assert re.match(
            rf"allreduce\(float32\[4\], op=sum\) by \w+, collective 2 of world, at {re.escape(__file__)}:", text
        )
        assert text.endswith("rank 2 has exited")

    def late() -> None:
        with mpicoll.debug():
            if _is_last():
                mpicoll.probe(timeout=30)
            else:
                mpicoll.barrier()

    with pytest.raises(mpicoll.Timeout, match=r"^barrier\(\) by .* on world.*nothing within 0.2 s from rank 1"):
        mpicoll.run_local(late, 2, timeout=0.2)


# --- without checks


@pytest.mark.parametrize("algorithm", ["shm_pipelined", "shm_flat"])
@pytest.mark.extension
def test_shared_memory_notices_by_itself(several: Ranks, algorithm: str) -> None:
    def body() -> str:
        world = mpicoll.world()
        assert mpicoll.allreduce(1, algorithm=algorithm) == world.size
        with mpicoll.debug(check=False):
            texts = [
                _text(lambda: mpicoll.allreduce(_x(5 if _is_last() else 4), algorithm=algorithm)),
                _text(lambda: mpicoll.allreduce(_x(), "max" if _is_last() else "sum", algorithm=algorithm)),
                _text(lambda: mpicoll.allreduce(_x(dtype=int if _is_last() else np.float32), algorithm=algorithm)),
                _text(
                    lambda: (
                        mpicoll.bcast(_x(), algorithm="shm_pipelined")
                        if _is_last()
                        else mpicoll.allreduce(_x(), algorithm=algorithm)
                    )
                ),
                _text(lambda: mpicoll.allreduce(_x(), algorithm="shm_pipelined" if _is_last() else "shm_flat")),
            ]
            for text, field in zip(texts, ("shape", "op", "dtype", "operation", "algorithm"), strict=True):
                assert text.splitlines()[0].endswith(f"they differ in {field}")
            np.testing.assert_array_equal(mpicoll.allreduce(_x(3), algorithm=algorithm), np.full(3, world.size))
        return "\n".join(texts)

    _alike(several(body), several)


@pytest.mark.extension
def test_shared_memory_that_takes_another_number_of_steps(several: Ranks) -> None:
    """A rank that is through when others are still waiting for it."""

    def body() -> str:
        count = 3_000_000 if _is_last() else 10
        with mpicoll.debug(check=False):
            text = _text(lambda: mpicoll.allreduce(_x(count), algorithm="shm_pipelined"))
            assert mpicoll.allreduce(_x(10), algorithm="shm_pipelined")[0] == mpicoll.world().size
        return text

    _alike(several(body), several)


@pytest.mark.extension
def test_shared_memory_in_the_background(several: Ranks) -> None:
    """Nobody has taken down where it was started."""

    def body() -> None:
        with mpicoll.debug(check=False):
            request = mpicoll.iallreduce(_x(), "max" if _is_last() else "sum", algorithm="shm_flat")
            with pytest.raises(mpicoll.MismatchError, match="they differ in op"):
                request.wait()
            assert mpicoll.allreduce(1, algorithm="shm_flat") == mpicoll.world().size

    several(body)


# --- words and bounds


def test_a_rank_whose_call_is_not_known() -> None:
    group = Group("k", "world", (0, 1, 2), 0, 10.0)
    calls = [Call("allreduce", 4, "float32", (1,), op=op) for op in ("sum", "max")]
    known = [encode_call((group, 3, call, 0.0, CallSite("a.py", 7, "f"))) for call in calls]
    error = decode_mismatch_error(group, [known[0], "", known[1]])
    assert error is not None
    assert "  rank 1: not known" in str(error).splitlines()
    assert error.calls[1] is None
    assert error.fields == ("op",)
    assert decode_mismatch_error(group, [known[0], known[0], ""]) is None
    assert encode_call(None) == ""


def test_texts_have_a_bound() -> None:
    group = Group("k", "world", tuple(range(500)), 0, 10.0)
    site = CallSite("/é" * 900 + "/x.py", 7, "f")
    many = tuple(range(500))
    calls = [Call("allgather", 10**9, dtype, (5, 7), counts=many) for dtype in ("float32", "int8")]
    texts = [encode_call((group, 1, call, 0.0, site)) for call in calls]
    assert all(len(text.encode()) <= MAX_TEXT for text in texts)
    error = decode_mismatch_error(group, texts)
    assert error is not None
    assert error.fields == ("dtype",)
    assert str(error).count("x.py:7 in f") == 2


def test_hashes_fit_into_62_bits() -> None:
    words = {hash_fields({"operation": name}) for name in map(str, range(1000))}
    assert len(words) == 1000
    assert all(0 <= word < 2**62 for word in words)


def test_same_calls_are_no_mismatch() -> None:
    group = Group("k", "world", (0, 1), 0, 10.0)
    told = {"text": "barrier()", "site": None, "fields": {"operation": "barrier", "number": 1}, "flows": []}
    assert mismatch_error(group, [told, told]) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ()),
        ("0", ("off",)),
        ("off", ("off",)),
        ("1", ("calls",)),
        ("calls", ("calls",)),
        ("numerics", ("calls", "numerics")),
        ("checksum, 1", ("calls", "checksum")),
        ("checksum,numerics,calls", ("calls", "numerics", "checksum")),
    ],
)
def test_words_of_the_variable(text: str, words: tuple[str, ...]) -> None:
    assert Config.read({"MPICOLL_CHECK": text}).check == words
    options = Options("calls" in words, "numerics" in words, "checksum" in words, batched="off" not in words)
    assert Options.parse(words) == options


@pytest.mark.parametrize("text", ["yes", "1,2", "calls;numerics", ","])
def test_malformed_variable(text: str) -> None:
    with pytest.raises(SetupError) as caught:
        Config.read({"MPICOLL_CHECK": text})
    assert str(caught.value) == f"MPICOLL_CHECK={text!r}: must be 0, 1, or some of calls, numerics, checksum"


# --- whole programs

_ON_ONE_RANK = """
import os
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    os.environ["MPICOLL_CHECK"] = "numerics"
import mpicoll
world = mpicoll.world()
assert world._core.checks == mpicoll.engine.core.registry.Options(True, True, False), world._core.checks
from mpi4py import MPI
own = MPI.COMM_WORLD.Split(world.rank // 2)
pair = mpicoll.allreduce(1, comm=own)
assert mpicoll.allreduce(1, comm=MPI.COMM_WORLD) == 3
try:
    mpicoll.allreduce(np.ones(3), "max" if world.rank else "sum")
except mpicoll.MismatchError as error:
    if world.rank == 0:
        print(error)
mpicoll.barrier()
"""


@pytest.mark.slow
def test_what_one_rank_asks_for_counts_for_all(job: Callable[..., CompletedProcess[str]]) -> None:
    done = job(3, _ON_ONE_RANK)
    assert done.returncode == 0, done.stdout
    assert "rank 0 calls allreduce(float64[3], op=sum)" in done.stdout
    assert "where ranks 1 and 2 call allreduce(float64[3], op=max)" in done.stdout
    assert done.stdout.count("program.py:15 in <module>") == 2


_LEFT_BEHIND = """
world = mpicoll.world()
if world.rank == 0:
    for number in range({count}):
        mpicoll.send(np.full(3, number), 1, 5)
else:
    mpicoll.irecv(np.empty(3), 0, 9)
"""


@pytest.mark.slow
@pytest.mark.parametrize("checked", [False, True])
def test_messages_that_no_rank_receives(job: Callable[..., CompletedProcess[str]], checked: bool) -> None:
    done = job(2, _LEFT_BEHIND.format(count=2), **({"MPICOLL_CHECK": "1"} if checked else {}))
    assert done.returncode == 0, done.stdout
    lines = [line for line in done.stdout.splitlines() if "warning" in line]
    what = ": send(int64[3], peer=1, tag=5) at " if checked else ""
    start = "mpicoll: warning: rank 1 of 2 (world): "
    assert lines[0] == f"{start}no message arrived for a receive from rank 0, tag 9"
    assert len(lines) == 3
    for line in lines[1:]:
        assert line.startswith(f"{start}a message of 24 bytes from rank 0, tag 5, was never received{what}")
        assert ("program.py:7 in <module>" in line) is checked


@pytest.mark.slow
def test_many_messages_that_no_rank_receives(job: Callable[..., CompletedProcess[str]]) -> None:
    done = job(2, _LEFT_BEHIND.format(count=50))
    assert done.returncode == 0, done.stdout
    lines = [line for line in done.stdout.splitlines() if "warning" in line]
    assert len(lines) == 11
    assert lines[-1] == "mpicoll: warning: there are more of them"


_EARLY = """
import time
world = mpicoll.world()
mpicoll.barrier()
if world.rank:
    time.sleep(2.5)
    print("late")
"""


@pytest.mark.slow
def test_a_rank_that_ends_before_the_others(job: Callable[..., CompletedProcess[str]]) -> None:
    done = job(2, _EARLY)
    assert (done.returncode, done.stdout.split()) == (0, ["late"])
