"""The files of a report."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support.patches import patch_within
from support.rank_states import WHAT, at_work, crossed, waits

from mpicoll import atomic_files
from mpicoll.engine.diagnostics.analysis import analyse
from mpicoll.engine.diagnostics.deadlock import find_deadlock
from mpicoll.engine.diagnostics.departures import make_departed_state
from mpicoll.engine.diagnostics.report_file import format_report, read_analysis, summarize, write
from mpicoll.errors import ArgumentError


def test_files(tmp_path: Path) -> None:
    states = {0: waits(), 1: at_work(), 2: make_departed_state(2, "died", "killed by SIGKILL"), 3: None}
    found = analyse(states, 4)
    text, data = write(tmp_path / "new", "prterun-host-1@1", "timeout of 30 s", states, found)
    assert (text.name, data.name) == ("mpicoll-report-prterun-host-1_1.txt", "mpicoll-report-prterun-host-1_1.json")
    assert text.read_text() == format_report("timeout of 30 s", states, found)
    content = json.loads(data.read_text())
    assert content["states"]["0"] == json.loads(json.dumps(states[0]))
    assert content["states"]["3"] is None
    assert content["analysis"]["words"] == found.words
    # The next one of the same job, and that of another.
    again, _ = write(tmp_path / "new", "prterun-host-1@1", "asked for", states, found)
    other, _ = write(tmp_path / "new", "prterun-host-2@1", "asked for", states, found)
    assert (again.name, other.name) == ("mpicoll-report-prterun-host-1_1-2.txt", "mpicoll-report-prterun-host-2_1.txt")
    assert "timeout of 30 s" in text.read_text()
    assert len(list((tmp_path / "new").iterdir())) == 6


def test_files_where_there_are_no_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise PermissionError("no links here")

    patch_within(monkeypatch, atomic_files, os, link=refuse)
    names = [write(tmp_path, "job", "asked for", {0: at_work()}, analyse({0: at_work()}, 1))[1].name for _ in range(2)]
    assert names == ["mpicoll-report-job.json", "mpicoll-report-job-2.json"]
    assert len(list(tmp_path.iterdir())) == 4
    assert "Rank 0" in summarize(tmp_path / names[1])


def test_the_text_of_a_report() -> None:
    past = {
        "key": "0.0",
        "group": "world",
        "number": 16,
        "name": "barrier",
        "call": "barrier() by shm_flat",
        "begin": 1.0,
    }
    past |= {"seconds": 0.002, "state": "ok", "error": "", "site": {"file": "/home/a.py", "line": 3, "function": "f"}}
    threads = [{"name": "MainThread", "ident": 1, "program": True, "stack": ["a.py:1 in f\n    f()", "b.py:2 in g"]}]
    process = {"pid": 77, "host": "here", "versions": {"python": "3.11.7", "mpicoll": "0.1"}}
    first = waits(where="the MPI library") | {"process": process, "threads": threads}
    failed = past | {"number": 0, "call": "irecv()", "state": "failed", "error": "Timeout: late", "seconds": None}
    first["past"] = [past, failed | {"site": None}]
    last = at_work(process=process, failed=["others: KeyError: 3"])
    states = {0: first, 1: None, 2: make_departed_state(2, "left"), 3: last}
    lines = format_report("timeout", states, analyse(states, 4)).splitlines()
    assert lines.pop(5).startswith("Written 20")
    assert lines == [
        (
            f"{WHAT} waits for ranks 1-3: rank 1 has not responded, rank 2"
            " has exited, rank 3 runs its own program at train.py:33 in load"
        ),
        f"{WHAT}: rank 0 is in the MPI library",
        "rank 1 does not respond (stopped, frozen or without a core?)",
        "",
        "Reason: timeout",
        "",
        "Rank 0: pid 77 on here (python 3.11.7, mpicoll 0.1)",
        (
            "  in allreduce(float32[1000], op=sum) by ring number 17 on world for 30 s at train.py:10 in step"
            " [MainThread]; the MPI library"
        ),
        "  world: 17 collectives begun, one runs",
        "",
        "  Thread MainThread (most recent call first):",
        "    a.py:1 in f",
        "        f()",
        "    b.py:2 in g",
        "",
        "  Last 2 operations, the last one first:",
        "    irecv() on world: failed: Timeout: late",
        "    barrier() by shm_flat number 16 on world: ok in 2 ms at a.py:3 in f",
        "",
        "Rank 1: no response",
        "",
        "Rank 2: has exited",
        "",
        "Rank 3: pid 77 on here (python 3.11.7, mpicoll 0.1)",
        "  runs its own program at train.py:33 in load",
        "  world: 16 collectives begun",
        "  could not be determined: others: KeyError: 3",
    ]


def test_the_batch_job_is_in_the_report() -> None:
    """As far as a rank knows it: launchers don't pass the variables of PBS and LSF to all hosts."""
    states = {0: at_work(process={"batch": "PBS job 7.server"}), 1: at_work(process={"batch": ""}), 2: None}
    assert "Batch system: PBS job 7.server" in format_report("timeout", states, analyse(states, 3)).splitlines()


def test_words_of_a_report(tmp_path: Path) -> None:
    first, second = crossed()
    states = {0: first, 1: second}
    _, data = write(tmp_path, "job", "asked for", states, analyse(states, 2))
    lines = summarize(data).splitlines()
    assert lines[0] == str(find_deadlock(states, 2))
    assert lines[4].startswith("Job job, 20")
    assert lines[4].endswith(" UTC: asked for")
    assert "Rank 0: pid None on None ()" in lines
    content = json.loads(json.dumps(read_analysis(data)))
    assert content == json.loads(data.read_text())["analysis"] | {
        name: json.loads(data.read_text())[name] for name in ("job", "why", "time", "size")
    }


@pytest.mark.parametrize("content", [None, "", "[]", "{}", '{"format": "another 7"}'])
def test_what_is_no_report(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "some.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ArgumentError, match=r"some\.json is (not an mpicoll report|a report in a format)"):
        summarize(path)
