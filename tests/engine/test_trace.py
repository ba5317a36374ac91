"""Traces: what is taken down, how the ranks' parts become one, and the file of it."""

from __future__ import annotations

import itertools
import os
import re
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest
from support.ranks import Ranks
from support.traces import ALLREDUCE, BARRIER, message, names, operations, part, read

import mpicoll
from mpicoll.cli.trace import summarise
from mpicoll.engine import timeline
from mpicoll.engine import trace as tracing
from mpicoll.engine.diagnostics import process_exit
from mpicoll.engine.diagnostics.flight_recorder import Call, Group, Site, keepers
from mpicoll.engine.trace import Recorder, Tracing, trace
from mpicoll.errors import SetupError

Job = Callable[..., "CompletedProcess[str]"]

# --- one clock, and who waits for whom


def test_who_waits_for_whom(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    for rank, begin in enumerate((1000.000, 1000.030, 1000.010)):
        part(
            folder, rank, [("0.0", 1, ALLREDUCE, begin, 1000.040), ("0.0", 2, BARRIER, 1000.050, 1000.060 + begin % 1)]
        )
    line = timeline.load_parts(folder)
    assert line.job == "job"
    assert line.missing == []
    assert line.rank.tolist() == [0, 0, 1, 1, 2, 2]
    np.testing.assert_allclose(line.begin, [0, 50e3, 30e3, 50e3, 10e3, 50e3], atol=1e-3)
    np.testing.assert_allclose(line.wait, [30e3, 0, 0, 0, 20e3, 0], atol=1e-3)
    assert line.last[[0, 2, 4]].tolist() == [1, 1, 1]


def test_collectives_are_told_apart_by_communicator_and_number(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    comms = {"0.0": [0, 1], "0.1": [1, 0]}
    part(folder, 0, [("0.0", 1, ALLREDUCE, 1001.0, 1003.0), ("0.1", 1, ALLREDUCE, 1004.0, 1009.0)], comms=comms)
    part(folder, 1, [("0.1", 1, ALLREDUCE, 1008.0, 1009.0), ("0.0", 1, ALLREDUCE, 1002.0, 1003.0)], comms=comms)
    line = timeline.load_parts(folder)
    np.testing.assert_allclose(line.wait, [1e6, 4e6, 0, 0], atol=1e-3)


def test_who_is_done_before_the_last_one_comes_has_not_waited_for_it(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    for rank, (begin, end) in enumerate(((1000.0, 1000.001), (1002.0, 1002.5), (1001.0, 1003.0))):
        part(folder, rank, [("0.0", 1, ALLREDUCE, begin, end)])
    np.testing.assert_allclose(timeline.load_parts(folder).wait, [1e3, 0, 1e6], atol=1e-3)


def test_messages_wait_for_nobody(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    part(folder, 0, [("0.0", 0, message("send", 1, 0), 1000.0, 1000.1)])
    part(folder, 1, [("0.0", 0, message("recv", 0, 0), 1000.2, 1000.3)])
    line = timeline.load_parts(folder)
    assert np.isnan(line.wait).all()
    assert line.last.tolist() == [-1, -1]


def test_clocks_of_other_nodes(tmp_path: Path) -> None:
    """Rank 1's clock is 500 s ahead at first, and gains 1 ms in 10 s."""
    folder = tmp_path / "job"

    def other(moment: float) -> float:
        return moment + 500.0 + 1e-4 * (moment - 1000.0)

    spans = [(1000.0 + number, 1000.5 + number) for number in range(1, 11)]
    part(folder, 0, [("0.0", number, ALLREDUCE, *span) for number, span in enumerate(spans)])
    part(
        folder,
        1,
        [("0.0", number, ALLREDUCE, other(begin), other(end)) for number, (begin, end) in enumerate(spans)],
        base=1500.0,
    )
    clocks = {1: [(other(moment), other(moment) - moment) for moment in (1000.0, 1011.0)]}
    timeline.write_about(folder, {"job": "job", "nodes": {"0": 0, "1": 1}, "clocks": clocks})
    line = timeline.load_parts(folder)
    np.testing.assert_allclose(line.begin[:10], line.begin[10:], atol=0.1)
    np.testing.assert_allclose(line.end[:10], line.end[10:], atol=0.1)


def test_a_clock_that_was_asked_once(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    part(folder, 0, [("0.0", 1, ALLREDUCE, 1000.0, 1000.5)])
    part(folder, 1, [("0.0", 1, ALLREDUCE, 993.25, 993.5)], base=990.0)
    timeline.write_about(folder, {"job": "job", "nodes": {"0": 0, "1": 1}, "clocks": {1: [(990.0, -7.0)]}})
    np.testing.assert_allclose(timeline.load_parts(folder).begin, [0, 0.25e6], atol=1e-3)


# --- parts that are lost or damaged


def test_a_rank_without_a_part(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    for rank in (0, 2):
        part(folder, rank, [("0.0", 1, ALLREDUCE, 1000.0 + rank, 1003.0)])
    timeline.write_about(folder, {"job": "job", "nodes": {"0": 0, "1": 0, "2": 0}, "clocks": {}})
    line = timeline.load_parts(folder)
    assert line.missing == [1]
    np.testing.assert_allclose(line.wait, [2e6, 0], atol=1e-3)
    events = read(timeline.merge(folder))
    assert {one["pid"] for one in events} == {0, 2}
    assert timeline.load(tmp_path).missing == [1]


def test_what_a_killed_rank_was_writing(tmp_path: Path) -> None:
    path = part(tmp_path / "job", 0, [("0.0", 1, ALLREDUCE, 1000.0, 1001.0)])
    whole = path.read_bytes()
    path.write_bytes(whole + whole.splitlines(keepends=True)[-1][:20])
    assert len(timeline.load_parts(tmp_path / "job")) == 1
    path.write_bytes(whole[: whole.index(b"\n") // 2])  # not even its first line
    with pytest.raises(SetupError, match="holds no part of a trace"):
        timeline.load_parts(tmp_path / "job")


def test_a_damaged_part(tmp_path: Path) -> None:
    path = part(tmp_path / "job", 0, [("0.0", 1, ALLREDUCE, 1000.0, 1001.0)])
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], '{"group": \n', *lines[1:]]))
    with pytest.raises(SetupError, match=r"rank-0.jsonl, line 2, is damaged: "):
        timeline.merge(tmp_path / "job")


def test_a_part_of_another_version(tmp_path: Path) -> None:
    path = part(tmp_path / "job", 0, [])
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(SetupError, match="no part of a trace that this version of mpicoll can read"):
        timeline.load_parts(tmp_path / "job")


# --- the file


def test_nothing_has_happened(tmp_path: Path) -> None:
    part(tmp_path / "job", 0, [])
    path = timeline.merge(tmp_path / "job")
    assert path == tmp_path / "job.json"
    events = read(path)
    assert operations(events) == []
    assert names(events, "process") == {0: "rank 0 (host0)"}
    assert len(timeline.load(path)) == 0


def test_what_the_file_says(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    part(folder, 0, [("0.0", 3, ALLREDUCE, 1000.0, 1000.5)], sites={0: "train.py:7 in step"})
    part(folder, 1, [("0.0", 3, ALLREDUCE, 1000.25, 1000.5)], errors={0: "Timeout: late"})
    events = read(timeline.merge(folder))
    first, second = operations(events)
    assert first["name"] == second["name"] == "allreduce"
    assert first["cat"] == "collective"
    assert (first["ts"], first["dur"], second["ts"], second["dur"]) == (0, 500e3, 250e3, 250e3)
    assert first["args"] == {
        "bytes": 1024,
        "dtype": "float32",
        "shape": "[256]",
        "op": "sum",
        "algorithm": "ring",
        "call": 0,
        "communicator": "comm 0.0",
        "key": "0.0",
        "number": 3,
        "wait_us": 250e3,
        "last_rank": 1,
        "site": "train.py:7 in step",
    }
    assert second["args"]["error"] == "Timeout: late"
    assert [(one["name"], one["pid"], one["ts"], one["dur"]) for one in events if one.get("cat") == "wait"] == [
        ("waits for rank 1", 0, 0, 250e3)
    ]
    assert names(events, "process") == {0: "rank 0 (host0)", 1: "rank 1 (host1)"}
    assert names(events, "thread") == {(0, 1): "comm 0.0", (1, 1): "comm 0.0"}


def test_messages_side_by_side_are_on_several_tracks(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    spans = [(1000.0, 1000.5), (1000.1, 1000.3), (1000.2, 1000.6), (1000.4, 1000.7), (1000.6, 1000.8)]
    part(folder, 0, [("0.0", 0, message("irecv", 1, None), *span) for span in spans])
    events = read(timeline.merge(folder))
    assert [one["tid"] for one in operations(events)] == [1, 2, 3, 2, 1]
    name = "comm 0.0: messages"
    assert names(events, "thread") == {(0, 1): name, (0, 2): f"{name} (2)", (0, 3): f"{name} (3)"}


def test_what_one_collective_ends_with_another_begins(tmp_path: Path) -> None:
    """To the nanosecond, with a clock that drifts: rounding must not let them overlap."""
    folder = tmp_path / "job"
    times = 1000.0 + np.cumsum(np.random.default_rng(5).integers(1, 9999, 2000)) * 1e-9
    part(
        folder,
        0,
        [("0.0", place + 1, BARRIER, *times[place : place + 2].tolist()) for place in range(1999)],
    )
    clocks = {1: [(999.0, 0.123456789), (1001.0, 0.123654321)]}
    timeline.write_about(folder, {"job": "job", "nodes": {"0": 1}, "clocks": clocks})
    events = read(timeline.merge(folder))
    assert {one["tid"] for one in operations(events)} == {1}


def test_communicators_of_one_name_are_told_apart(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    events = [("0.1", 1, BARRIER, 1000.0, 1000.1), ("0.2", 1, BARRIER, 1000.1, 1000.2)]
    path = part(folder, 0, events, comms={"0.1": [0], "0.2": [0]})
    path.write_text(path.read_text().replace("comm 0.2", "comm 0.1"))
    assert set(names(read(timeline.merge(folder)), "thread").values()) == {"comm 0.1 [0.1]", "comm 0.1 [0.2]"}


def arrows(events: list[dict[str, Any]]) -> list[tuple[int, float, int, float]]:
    found = {one["id"]: [] for one in events if one["ph"] == "s"}  # type: dict[int, list[Any]]
    for one in events:
        if one["ph"] in "sf":
            found[one["id"]] += [one["pid"], one["ts"] / 1e6]
    return sorted(tuple(one) for one in found.values())


def test_arrows_between_messages(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    comms = {"0.0": [0, 1, 2], "0.1": [2, 1]}
    both = {"name": "sendrecv", "parts": [message("send", 0, 0), message("recv", 0, 5)], "text": "sendrecv(...)"}
    part(
        folder,
        0,
        [
            ("0.0", 0, message("send", 1, 5), 1000.0, 1000.1),
            ("0.0", 0, message("irecv", 1, 0), 1000.2, None),
            ("0.0", 0, message("irecv", 1, 0), 1000.5, 1000.7),
        ],
        comms=comms,
    )
    part(folder, 1, [("0.0", 0, both, 1000.3, 1000.6), ("0.1", 0, message("isend", 0, 1), 1001.0, None)], comms=comms)
    part(folder, 2, [("0.1", 0, message("recv", 1, 1), 1000.8, 1001.5)], comms=comms)
    events = read(timeline.merge(folder))
    assert arrows(events) == [(0, 0.0, 1, 0.6), (1, 0.3, 0, 0.7), (1, 1.0, 2, 1.5)]
    started = [one for one in operations(events) if one["args"].get("started")]
    assert [(one["name"], one["dur"]) for one in started] == [("irecv", 0), ("isend", 0)]


@pytest.mark.parametrize("receive", [message("recv", None, 5), message("recv", 0, None), message("recv", 0, 6)])
def test_no_arrow_where_it_is_not_clear(tmp_path: Path, receive: dict[str, Any]) -> None:
    folder = tmp_path / "job"
    part(folder, 0, [("0.0", 0, message("send", 1, 5), 1000.0, 1000.1)])
    part(folder, 1, [("0.0", 0, message("recv", 0, 5), 1000.0, 1000.2), ("0.0", 0, receive, 1000.2, 1000.3)])
    # One more receive than messages, or one that may have got it.
    part(folder, 2, [("0.0", 0, message("send", 1, 6), 1000.0, 1000.1)])
    found = arrows(read(timeline.merge(folder)))
    assert found == ([(0, 0.0, 1, 0.2)] if receive.get("tag") == 6 else [])


def test_the_file_can_be_read_again(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    events = [
        ("0.0", 1, ALLREDUCE, 1000.125, 1000.5),
        ("0.0", 0, message("isend", 1, 0), 1000.625, None),
        ("0.0", 2, BARRIER, 1001.0, 1001.5),
    ]
    part(folder, 0, events, errors={2: "CommunicationError: ☠"}, sites={0: "a.py:1 in f"})
    part(folder, 2, events[:1])
    timeline.write_about(folder, {"job": "job", "nodes": {"0": 0, "1": 0, "2": 1}, "clocks": {}})
    before = timeline.load_parts(folder)
    after = timeline.load_file(timeline.merge(folder))
    for name in ("rank", "comm", "number", "begin", "end", "wait", "last"):
        np.testing.assert_array_equal(getattr(before, name), getattr(after, name), err_msg=name)
    for name in ("job", "processes", "missing", "comms"):
        assert getattr(before, name) == getattr(after, name)
    for one, other in ((before, after), (after, before)):
        for kind in ("site", "error"):
            texts = [[(*of.texts, "")[index] for index in getattr(of, kind)] for of in (one, other)]
            assert texts[0] == texts[1]
    assert [before.calls[one] for one in before.call] == [after.calls[one] for one in after.call]


@pytest.mark.parametrize("text", ["", "{}", '{"traceEvents": []}\n', "[1, 2"])
def test_a_file_of_somebody_else(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(SetupError, match=r"other.json is no trace that `mpicoll trace` has made"):
        timeline.load(path)


def test_no_trace(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="there is no trace"):
        timeline.load(tmp_path)
    with pytest.raises(SetupError, match=r"nothing\.json: No such file"):
        timeline.load(tmp_path / "nothing.json")


def test_the_newest_of_several(tmp_path: Path) -> None:
    for age, name in enumerate(("third", "first", "second")):
        part(tmp_path / name, 0, [("0.0", 1, BARRIER, 1000.0, 1001.0)])
        if name == "first":
            timeline.merge(tmp_path / name)
        for path in (tmp_path / name, tmp_path / f"{name}.json"):
            if path.exists():
                os.utime(path, (1e9 - age, 1e9 - age))
    assert [one.name for one in timeline.jobs(tmp_path)] == ["second", "first.json", "third"]
    assert timeline.load(tmp_path).job == "third"


# --- what is taken down

GROUP = Group("0.0", "world", (0, 1), 0, 60.0)


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    folder = tmp_path / "job"
    folder.mkdir()
    made = Recorder(folder / timeline.part_name(0), "job", 0, "0.0")
    yield made
    made.stop()


def keep(call: Call, *, number: int = 1, group: Group = GROUP, site: Site | None = None, error: str = "") -> None:
    now = time.monotonic()
    keepers.keep(((group, number, call, now, site), time.monotonic(), error))


def test_everything_is_taken_down(tmp_path: Path, recorder: Recorder) -> None:
    call = Call("allreduce", 1024, "float32", (256,), op="sum", algorithm="ring")
    site = Site("train.py", 7, "step")
    begin = time.monotonic()
    for number in (1, 2):
        keep(call, number=number)
    keep(Call("bcast", 8, root=1, algorithm="native"), number=3, site=site, error="Timeout: late")
    keepers.keep(((GROUP, 0, Call("isend", 8, peer=1, tag=4, collective=False), begin, None), None, ""))
    recorder.flush()
    line = timeline.load_parts(tmp_path / "job")
    (process,) = line.processes
    assert (process.rank, process.pid) == (0, os.getpid())
    assert line.comms == [timeline.Comm("0.0", "world", [0, 1])]
    assert line.number.tolist() == [1, 2, 3, 0]
    assert [line.calls[one]["name"] for one in line.call] == ["allreduce", "allreduce", "bcast", "isend"]
    assert line.calls[line.call[0]] == {
        "name": "allreduce",
        "nbytes": 1024,
        "dtype": "float32",
        "shape": [256],
        "op": "sum",
        "algorithm": "ring",
        "text": "allreduce(float32[256], op=sum) by ring",
    }
    assert (line.end[:3] >= line.begin[:3]).all()
    assert (line.begin[1:3] >= line.end[:2]).all()
    assert np.isnan(line.end).tolist() == [False, False, False, True]
    assert [line.texts[line.site[2]], line.texts[line.error[2]]] == ["train.py:7 in step", "Timeout: late"]
    assert line.site.tolist().count(-1) == line.error.tolist().count(-1) == 3


def test_calls_are_known_by_what_they_say(tmp_path: Path, recorder: Recorder) -> None:
    for nbytes in (8, 8, 16, 8):
        inside = Call("allreduce", nbytes, "float32", (nbytes // 4,), op="sum")
        keep(Call("all_reduce_coalesced", parts=(inside, inside)))
    recorder.flush()
    line = timeline.load_parts(tmp_path / "job")
    first, second, third, fourth = line.call.tolist()
    assert first == second == fourth != third
    assert len(line.calls) == 2
    for number, nbytes in ((first, 8), (third, 16)):
        assert [one["nbytes"] for one in line.calls[number]["parts"]] == [nbytes] * 2


def test_what_is_known_is_bounded(tmp_path: Path, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_KEPT", 10)
    monkeypatch.setattr(tracing, "_BATCH", 20)
    sizes = [8 * (number % 37) for number in range(1000)]
    for size in sizes:
        keep(Call("bcast", size), error=f"of {size}")
    recorder.flush()
    for known in (recorder._calls, recorder._contents, recorder._texts):
        assert len(known) <= 30
    line = timeline.load_parts(tmp_path / "job")
    assert len(line.calls) == len(line.texts) == 37
    assert [line.calls[one]["nbytes"] for one in line.call] == sizes
    assert [line.texts[one] for one in line.error] == [f"of {size}" for size in sizes]


def test_operations_of_other_ranks_are_left_out(tmp_path: Path, recorder: Recorder) -> None:
    keep(Call("barrier"), group=Group("0.0", "world", (0, 1), 1, 60.0))  # another rank
    keep(Call("barrier"), group=Group("-1:0,1", "world", (0, 1), 0, 60.0))  # one of threads
    keep(Call("bcast"), group=Group("1.4", "part", (2, 0), 1, 60.0))
    recorder.flush()
    line = timeline.load_parts(tmp_path / "job")
    assert [one.key for one in line.comms] == ["1.4"]
    assert [line.calls[one]["name"] for one in line.call] == ["bcast"]


def test_written_as_time_goes_by(tmp_path: Path, recorder: Recorder) -> None:
    keep(Call("barrier"))
    deadline = time.monotonic() + 20
    while not len(timeline.load_parts(tmp_path / "job")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert recorder._new == []


def test_written_before_the_end(tmp_path: Path) -> None:
    """For who ends the process."""

    def body() -> Path:
        under_way = Tracing(tmp_path, mpicoll.world().transport, 10.0)
        mpicoll.barrier()
        process_exit.last_acts[-1]()
        assert len(timeline.load_parts(under_way._parts)) == 1
        under_way.stop()
        return under_way._parts

    before = process_exit.last_acts.copy()
    (folder,) = mpicoll.run_local(body, 1)
    assert len(timeline.load_parts(folder)) == 1
    assert process_exit.last_acts == before


def test_a_disk_that_is_full(capfd: pytest.CaptureFixture[str]) -> None:
    """The program goes on, and what it does is not kept in memory either."""
    before = keepers.keep
    with Path("/dev/full").open("wb") as full:
        made = Recorder(Path(os.devnull), "job", 0, "0.0")
        made._file, null = full, made._file
        keep(Call("barrier"))
        made.flush()
        keep(Call("barrier"))
        assert made._new == []
        assert keepers.keep == before
        made.stop()
        null.close()
    text = capfd.readouterr().err
    assert text.startswith("mpicoll: rank 0 is not traced any more, since /dev/full can't be written: ")
    assert text.count("\n") == 1


def test_nothing_is_taken_down_after_the_end(tmp_path: Path) -> None:
    before = keepers.keep
    made = Recorder(tmp_path / timeline.part_name(0), "job", 0, "0.0")
    assert keepers.keep is not before
    made.stop()
    keep(Call("barrier"))
    made.flush()
    assert len(timeline.load_parts(tmp_path)) == 0
    assert keepers.keep is before or keepers.keep == before
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
    size = (tmp_path / "job" / timeline.part_name(0)).stat().st_size
    assert size < 60 * 100_000
    tracemalloc.start()
    try:
        line = timeline.load_parts(tmp_path / "job")
        for _ in itertools.islice(timeline.chrome(line), 100):
            pass  # what comes after is made one by one
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 70e6
    path = timeline.merge(tmp_path / "job")
    with path.open() as file:
        assert sum('"cat":"collective"' in text for text in file) == 100_000


# --- ranks that trace


def traced(folder: Path) -> tuple[Path, int]:
    """What the ranks do in the test below: rank 1 comes late to the second of three all-reduces."""
    world = mpicoll.world()
    mpicoll.allreduce(np.ones(2))
    half = world.split(world.rank % 2)
    assert half is not None
    with trace(folder) as path:
        for number in range(3):
            if world.rank == 1 and number == 1:
                time.sleep(LATE)
            mpicoll.allreduce(np.ones(256, np.float32), algorithm="ring")
            mpicoll.bcast(np.ones(100 + number), root=1)
        mpicoll.barrier(comm=half)
        mpicoll.iallreduce(np.ones(4), op="max").wait()
        if world.rank == 0:
            mpicoll.send(np.ones(3), 1, 7)
        elif world.rank == 1:
            mpicoll.recv(np.ones(3), 0, 7)
    mpicoll.barrier()
    half.free()
    return path, len(half.members)


def test_a_trace_of_ranks(several: Ranks, tmp_path: Path) -> None:
    path = shared(several, tmp_path)
    size = several.size
    several(traced, path)
    mpicoll.barrier()
    (file,) = path.glob("*.json")
    assert list(path.iterdir()) == [file]
    events = read(file)
    assert {one["pid"] for one in events} == set(range(size))
    for rank in range(size):
        own = operations(events, rank)
        collectives = [one for one in own if one["cat"] == "collective"]
        assert sorted(one["name"] for one in collectives) == ["allreduce"] * 4 + ["barrier"] + ["bcast"] * 3
        reduced = [one for one in collectives if one["args"].get("algorithm") == "ring"]
        assert [one["args"]["bytes"] for one in reduced] == [1024] * 3
        assert {one["args"]["dtype"] for one in reduced} == {"float32"}
        assert {one["args"]["op"] for one in reduced} == {"sum"}
        sent = [one for one in collectives if one["name"] == "bcast"]
        assert [one["args"]["bytes"] for one in sent] == [800, 808, 816]
        assert {one["args"]["root"] for one in sent} == {1}
        # Some came before: allreduce, split, and other tests.
        in_world = [one["args"]["number"] for one in collectives if one["args"]["communicator"] == "world"]
        assert in_world == list(range(in_world[0], in_world[0] + 7))
        messages = [one for one in own if one["cat"] == "message"]
        assert [one["name"] for one in messages] == {0: ["send"], 1: ["recv"]}.get(rank, [])
    assert [(one["pid"], one["ph"]) for one in events if one["ph"] in "sf"] == [(0, "s"), (1, "f")]
    line = timeline.load(file)
    ring = np.array([line.calls[one].get("algorithm") == "ring" for one in line.call])
    second = ring & (line.number == sorted(one["args"]["number"] for one in reduced)[1])
    assert line.last[second].tolist() == [1] * size
    late_by_rank(line.wait[second].tolist())


LATE = 0.6
"""Seconds: long beside what a busy machine delays ranks."""


def late_by_rank(waits: list[float]) -> None:
    """Assert that all have waited for rank 1."""
    assert all(wait < LATE / 2 * 1e6 if rank == 1 else wait > LATE / 2 * 1e6 for rank, wait in enumerate(waits)), waits


def shared(ranks: Ranks, path: Path) -> Path:
    """A folder that all ranks know."""
    return path if ranks.local else Path(mpicoll.world().transport.texts(str(path))[0])


def test_a_rank_that_fails_leaves_its_part(tmp_path: Path) -> None:
    def body() -> None:
        with trace(tmp_path):
            mpicoll.barrier()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        mpicoll.run_local(body, 2)
    (folder,) = tmp_path.iterdir()
    events = read(timeline.merge(folder))
    assert [one["name"] for one in operations(events)] == ["barrier"] * 2


def test_a_rank_that_is_gone_at_the_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def body() -> None:
        under_way = Tracing(tmp_path, mpicoll.world().transport, 10.0)
        mpicoll.barrier()
        if mpicoll.world().rank == 1:
            under_way.stop()
            under_way._part.unlink()
        else:
            under_way.finish()

    mpicoll.run_local(body, 3)
    (file,) = tmp_path.glob("*.json")
    assert {one["pid"] for one in operations(read(file))} == {0, 2}
    assert timeline.load(file).missing == [1]
    assert "rank 1 is gone" in capfd.readouterr().err


def test_parts_that_rank_0_does_not_see(several: Ranks, tmp_path: Path) -> None:
    """On other hosts, their folders are others."""
    where = shared(several, tmp_path)

    def body() -> Path:
        world = mpicoll.world()
        with trace(where / f"host{world.rank}") as path:
            for _ in range(2000):
                mpicoll.barrier()
        mpicoll.barrier()
        return path

    several(body)
    (file,) = (where / "host0").iterdir()
    assert len(operations(read(file))) == 2000 * several.size
    for rank in range(1, several.size):
        assert list((where / f"host{rank}").iterdir()) == []


def test_chunks_of_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_CHUNK", 100)
    test_parts_that_rank_0_does_not_see(Ranks("local-2"), tmp_path)


class Apart:
    """A transport each rank of which is a node of its own."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self.nodes = tuple(range(transport.size))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def test_clocks_that_differ(several: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is 1000 s ahead of the one before, and 1 s more at the end. What is read is a little late, never early."""
    later = threading.local()

    def clock() -> float:
        return time.monotonic() + (1000 + getattr(later, "by", 0)) * mpicoll.world().rank

    monkeypatch.setattr(tracing, "clock", clock)
    where = shared(several, tmp_path)

    def body() -> timeline.Clocks:
        under_way = Tracing(where, Apart(mpicoll.world().transport), 30.0)
        mpicoll.barrier()
        later.by = 1
        under_way.finish()
        return under_way._clocks

    clocks = several(body)[0]
    assert set(clocks) == (set(range(1, several.size)) if several.local or mpicoll.world().rank == 0 else set())
    for node, ((first, before), (second, after)) in clocks.items():
        assert before == pytest.approx(1000 * node, abs=0.2)
        assert after == pytest.approx(1001 * node, abs=0.2)
        assert first - before <= second - after + 0.4
    mpicoll.barrier()
    (file,) = where.iterdir()
    if not several.local:
        return  # who has begun when is shown by clocks that were not changed for that
    line = timeline.load(file)
    barrier = line.begin[[line.calls[one]["name"] == "barrier" for one in line.call]]
    # Their begins were taken from one clock; as though from several, they are as far apart as those.
    np.testing.assert_allclose(barrier[:-1] - barrier[1:], 1000e6, rtol=2e-3)


def test_ranks_of_one_node_have_one_clock(tmp_path: Path) -> None:
    def body() -> timeline.Clocks:
        under_way = Tracing(tmp_path, mpicoll.world().transport, 10.0)
        under_way.finish()
        return under_way._clocks

    clocks, *_ = mpicoll.run_local(body, 4, ranks_per_node=2)
    assert set(clocks) == {1}
    assert len(clocks[1]) == 2


def test_a_part_of_the_ranks(several: Ranks, tmp_path: Path) -> None:
    where = shared(several, tmp_path)

    def body() -> None:
        world = mpicoll.world()
        part = world.group(range(world.size - 1, 0, -1))
        if part is not None:
            with trace(where, comm=part):
                mpicoll.barrier(comm=part)
            part.free()
        mpicoll.barrier()

    several(body)
    (file,) = where.iterdir()
    events = read(file)
    assert sorted(names(events, "process")) == list(range(1, several.size))
    assert {one["name"] for one in operations(events)} == {"barrier"}


def test_one_trace_inside_another(ranks: Ranks, tmp_path: Path) -> None:
    where = shared(ranks, tmp_path)

    def body() -> None:
        with trace(where / "outer"):
            mpicoll.barrier()
            with trace(where / "inner"):
                mpicoll.barrier()
        mpicoll.barrier()

    ranks(body)
    for name, count in (("outer", 2), ("inner", 1)):
        (file,) = (where / name).iterdir()
        # Waiting for what is pending is no operation.
        assert len(operations(read(file))) == count * ranks.size


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def body() -> None:
        with trace(tmp_path / "file" / "folder"):
            raise AssertionError("not reached")

    with pytest.raises(SetupError, match=r"rank 0 can't write its trace to .*; give a folder that it may write to"):
        mpicoll.run_local(body, 1)


# --- jobs


PROGRAM = """
import os, sys, time
world = mpicoll.world()
for number in range(3):
    if world.rank == 1 and number == 1:
        time.sleep(0.6)
    mpicoll.allreduce(np.ones(256, np.float32))
mpicoll.iallreduce(np.ones(100_000))
"""


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_a_job(job: Job, tmp_path: Path, size: int) -> None:
    done = job(size, PROGRAM, MPICOLL_TRACE=str(tmp_path / "traces"))
    assert (done.returncode, done.stdout) == (0, "")
    (file,) = (tmp_path / "traces").iterdir()
    events = read(file)
    waits: list[float] = []
    for rank in range(size):
        own = [one for one in operations(events, rank) if one["name"] == "allreduce"]
        assert [one["args"]["bytes"] for one in own] == [1024] * 3 + [800_000]
        assert [one["args"]["number"] for one in own] == list(
            range(own[0]["args"]["number"], own[0]["args"]["number"] + 4)
        )
        waits.append(own[1]["args"]["wait_us"])
        assert own[1]["args"]["last_rank"] == 1
        assert all(one["args"]["algorithm"] for one in own)
    late_by_rank(waits)
    words = summarise(timeline.load(file)).words
    assert re.fullmatch(r"Rank 1 makes the others wait \d+% of their time in communication\.", words[0])


@pytest.mark.slow
def test_a_job_that_is_killed(job: Job, tmp_path: Path) -> None:
    program = (
        PROGRAM
        + """
time.sleep(1.5)
if world.rank == 1:
    os.kill(os.getpid(), 9)
mpicoll.barrier()
"""
    )
    done = job(2, program, MPICOLL_TRACE=str(tmp_path / "traces"))
    assert done.returncode not in (0, 124)
    (folder,) = (tmp_path / "traces").iterdir()
    assert folder.is_dir()
    events = read(timeline.merge(folder))
    for rank in range(2):
        assert [one["name"] for one in operations(events, rank)].count("allreduce") == 4


@pytest.mark.slow
def test_what_a_rank_has_done_before_it_fails(job: Job, tmp_path: Path) -> None:
    done = job(
        2, PROGRAM + "\nif world.rank == 1:\n    raise ZeroDivisionError\n", MPICOLL_TRACE=str(tmp_path / "traces")
    )
    assert done.returncode not in (0, 124)
    (folder,) = (tmp_path / "traces").iterdir()
    line = timeline.load(folder)
    assert [line.calls[one]["name"] for one in line.call[line.rank == 1]].count("allreduce") >= 3


@pytest.mark.slow
def test_a_program_with_communicators_of_its_own(job: Job, tmp_path: Path) -> None:
    program = "from mpi4py import MPI\nmpicoll.barrier(comm=MPI.COMM_WORLD)"
    done = job(2, program, MPICOLL_TRACE=str(tmp_path / "traces"))
    assert (done.returncode, done.stdout) == (0, "")
    (file,) = (tmp_path / "traces").iterdir()
    assert [one["args"]["communicator"] for one in operations(read(file))] == ["mpi4py"] * 2


@pytest.mark.slow
def test_a_job_that_is_not_traced(job: Job, tmp_path: Path) -> None:
    done = job(1, "mpicoll.barrier()\nimport sys\nprint('mpicoll.engine.trace' in sys.modules)")
    assert done.stdout == "False\n"


@pytest.mark.slow
def test_a_world_of_one_without_mpi(python: Job, tmp_path: Path) -> None:
    program = "import numpy as np, mpicoll\nmpicoll.allreduce(np.ones(4))"
    done = python(program, MPICOLL_TRACE=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "")
    (file,) = tmp_path.iterdir()
    (one,) = operations(read(file))
    assert (one["name"], one["args"]["bytes"]) == ("allreduce", 32)


@pytest.mark.slow
def test_a_variable_on_one_rank_counts_for_all(job: Job, tmp_path: Path) -> None:
    program = f"""
import os
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    os.environ["MPICOLL_TRACE"] = {str(tmp_path / "traces")!r}
mpicoll.barrier()
"""
    done = job(2, program)
    assert (done.returncode, done.stdout) == (0, "")
    (file,) = (tmp_path / "traces").iterdir()
    assert len(operations(read(file))) == 2
