"""Recording the operations of one rank."""

from __future__ import annotations

import itertools
import os
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mpicoll.engine.diagnostics.flight_recorder import Call, CallSite, Group, sinks
from mpicoll.engine.tracing import chrome_format, parts, trace_files
from mpicoll.engine.tracing import recorder as recorder_module
from mpicoll.engine.tracing.recorder import Recorder
from mpicoll.engine.tracing.table import TracedComm

GROUP = Group("0.0", "world", (0, 1), 0, 60.0)


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    folder = tmp_path / "job"
    folder.mkdir()
    made = Recorder(folder / parts.part_name(0), "job", 0, "0.0")
    yield made
    made.stop()


def keep(call: Call, *, number: int = 1, group: Group = GROUP, site: CallSite | None = None, error: str = "") -> None:
    now = time.monotonic()
    sinks.emit(((group, number, call, now, site), time.monotonic(), error))


def test_a_link_in_place_of_a_part_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("data")
    part = tmp_path / parts.part_name(0)
    part.symlink_to(precious)
    with pytest.raises(FileExistsError):
        Recorder(part, "job", 0, "0.0")
    assert precious.read_text() == "data"


def test_everything_is_taken_down(tmp_path: Path, recorder: Recorder) -> None:
    call = Call("allreduce", 1024, "float32", (256,), op="sum", algorithm="ring")
    site = CallSite("train.py", 7, "step")
    begin = time.monotonic()
    for number in (1, 2):
        keep(call, number=number)
    keep(Call("bcast", 8, root=1, algorithm="native"), number=3, site=site, error="Timeout: late")
    sinks.emit(((GROUP, 0, Call("isend", 8, peer=1, tag=4, collective=False), begin, None), None, ""))
    recorder.flush()
    table = parts.load_parts(tmp_path / "job")
    (process,) = table.ranks
    assert (process.rank, process.pid) == (0, os.getpid())
    assert table.comms == [TracedComm("0.0", "world", [0, 1])]
    assert table.number.tolist() == [1, 2, 3, 0]
    assert [table.calls[one]["name"] for one in table.call] == ["allreduce", "allreduce", "bcast", "isend"]
    assert table.calls[table.call[0]] == {
        "name": "allreduce",
        "nbytes": 1024,
        "dtype": "float32",
        "shape": [256],
        "op": "sum",
        "algorithm": "ring",
        "text": "allreduce(float32[256], op=sum) by ring",
    }
    assert (table.end[:3] >= table.begin[:3]).all()
    assert (table.begin[1:3] >= table.end[:2]).all()
    assert np.isnan(table.end).tolist() == [False, False, False, True]
    assert [table.texts[table.site[2]], table.texts[table.error[2]]] == ["train.py:7 in step", "Timeout: late"]
    assert table.site.tolist().count(-1) == table.error.tolist().count(-1) == 3


def test_calls_are_known_by_what_they_say(tmp_path: Path, recorder: Recorder) -> None:
    for nbytes in (8, 8, 16, 8):
        inside = Call("allreduce", nbytes, "float32", (nbytes // 4,), op="sum")
        keep(Call("all_reduce_coalesced", parts=(inside, inside)))
    recorder.flush()
    table = parts.load_parts(tmp_path / "job")
    first, second, third, fourth = table.call.tolist()
    assert first == second == fourth != third
    assert len(table.calls) == 2
    for number, nbytes in ((first, 8), (third, 16)):
        assert [one["nbytes"] for one in table.calls[number]["parts"]] == [nbytes] * 2


def test_what_is_known_is_bounded(tmp_path: Path, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "_CACHE_SIZE", 10)
    monkeypatch.setattr(recorder_module, "_BATCH", 20)
    sizes = [8 * (number % 37) for number in range(1000)]
    for size in sizes:
        keep(Call("bcast", size), error=f"of {size}")
    recorder.flush()
    for known in (recorder._calls, recorder._contents, recorder._texts):
        assert len(known) <= 30
    table = parts.load_parts(tmp_path / "job")
    assert len(table.calls) == len(table.texts) == 37
    assert [table.calls[one]["nbytes"] for one in table.call] == sizes
    assert [table.texts[one] for one in table.error] == [f"of {size}" for size in sizes]


def test_operations_of_other_ranks_are_left_out(tmp_path: Path, recorder: Recorder) -> None:
    keep(Call("barrier"), group=Group("0.0", "world", (0, 1), 1, 60.0))  # another rank
    keep(Call("barrier"), group=Group("-1:0,1", "world", (0, 1), 0, 60.0))  # one of threads
    keep(Call("bcast"), group=Group("1.4", "part", (2, 0), 1, 60.0))
    recorder.flush()
    table = parts.load_parts(tmp_path / "job")
    assert [one.key for one in table.comms] == ["1.4"]
    assert [table.calls[one]["name"] for one in table.call] == ["bcast"]


def test_written_as_time_goes_by(tmp_path: Path, recorder: Recorder) -> None:
    keep(Call("barrier"))
    deadline = time.monotonic() + 20
    while not len(parts.load_parts(tmp_path / "job")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert recorder._new == []


def test_a_disk_that_is_full(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The program goes on, and what it does is not kept in memory either."""
    before = sinks.emit
    with Path("/dev/full").open("wb") as full:
        made = Recorder(tmp_path / "part", "job", 0, "0.0")
        made._file, null = full, made._file
        keep(Call("barrier"))
        made.flush()
        keep(Call("barrier"))
        assert made._new == []
        assert sinks.emit == before
        made.stop()
        null.close()
    text = capfd.readouterr().err
    assert text.startswith("mpicoll: rank 0 is no longer traced: /dev/full can't be written: ")
    assert text.count("\n") == 1


def test_nothing_is_taken_down_after_the_end(tmp_path: Path) -> None:
    before = sinks.emit
    made = Recorder(tmp_path / parts.part_name(0), "job", 0, "0.0")
    assert sinks.emit is not before
    made.stop()
    keep(Call("barrier"))
    made.flush()
    assert len(parts.load_parts(tmp_path)) == 0
    assert sinks.emit is before or sinks.emit == before
    assert not any(thread.name == "mpicoll-trace" and thread is made._thread for thread in threading.enumerate())


@pytest.mark.slow
def test_many_operations_in_little_memory(tmp_path: Path, recorder: Recorder) -> None:
    calls = [Call("allreduce", 8 * size, "float64", (size,), op="sum", algorithm="ring") for size in range(50)]
    for number in range(100_000):
        keep(calls[number % 50], number=number + 1)
        if number % 10_000 == 0:
            recorder.flush()
    recorder.flush()
    assert recorder._new == []
    size = (tmp_path / "job" / parts.part_name(0)).stat().st_size
    assert size < 60 * 100_000
    tracemalloc.start()
    try:
        table = parts.load_parts(tmp_path / "job")
        for _ in itertools.islice(chrome_format.format_events(table), 100):
            pass  # what comes after is made one by one
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 70e6
    path = trace_files.merge(tmp_path / "job")
    with path.open() as file:
        assert sum('"cat":"collective"' in text for text in file) == 100_000
