from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.traces import ALLREDUCE, BARRIER, message, operations, part, read

from mpicoll.cli import main, trace_summary
from mpicoll.engine.tracing import parts, trace_files

TORCH = {
    **ALLREDUCE,
    "name": "all_reduce",
    "algorithm": "native",
    "text": "all_reduce(float32[256], op=sum) by native",
}


def job(folder: Path, name: str = "job", late: float = 0.030) -> Path:
    """Two all-reduces of 1 KiB and a barrier on 3 ranks, to all of which rank 2 comes late; a message besides."""
    for rank in range(3):
        lag = late if rank == 2 else rank * 0.002
        events = [
            ("0.0", 1, ALLREDUCE, 1000.000 + lag, 1000.050),
            ("0.0", 2, ALLREDUCE, 1000.100 + lag, 1000.150),
            ("0.0", 3, BARRIER, 1000.200 + lag, 1000.250),
        ]
        if rank < 2:
            events.append(("0.0", 0, message("recv" if rank else "send", 1 - rank, 0, 1000), 1000.300, 1000.301))
        part(folder / name, rank, events)
    return folder / name


def summary(folder: Path) -> trace_summary.Summary:
    return trace_summary.summarise(trace_files.load(folder))


def test_kinds_of_operations(tmp_path: Path) -> None:
    reduce, barrier, *messages = summary(job(tmp_path)).kinds
    assert (reduce.operation, reduce.nbytes, reduce.dtype, reduce.algorithm) == ("allreduce", 1024, "float32", "ring")
    assert (reduce.ranks, reduce.calls, reduce.failed) == (3, 2, 0)
    assert reduce.mean == pytest.approx((0.050 + 0.048 + 0.020) / 3)
    assert reduce.median == pytest.approx(0.048)
    assert reduce.max == pytest.approx(0.050)
    assert reduce.total == pytest.approx(2 * reduce.mean)
    assert reduce.waited == pytest.approx((0.030 + 0.028) / 3)
    assert reduce.wait_share == pytest.approx(0.058 / 0.118)
    assert reduce.algbw == pytest.approx(1024 / 0.020)
    assert reduce.busbw == pytest.approx(1024 / 0.020 * 4 / 3)
    assert (reduce.slowest, reduce.slowest_calls) == (2, 2)
    assert reduce.late == pytest.approx(0.030 - 0.001)
    assert (barrier.operation, barrier.calls, barrier.algbw, barrier.busbw) == ("barrier", 1, None, None)
    assert barrier.total == pytest.approx(reduce.total / 2)
    assert [(one.operation, one.nbytes, one.calls, one.waited, one.busbw) for one in messages] == [
        ("send", 1000, 1, None, None),
        ("recv", 1000, 1, None, None),
    ]
    assert messages[0].algbw == pytest.approx(1e6)
    assert sum(one.share for one in (reduce, barrier, *messages)) == pytest.approx(1)
    assert reduce.share == pytest.approx(0.236 / (0.236 + 0.118 + 0.002))


def test_ranks(tmp_path: Path) -> None:
    made = summary(job(tmp_path))
    assert made.seconds == pytest.approx(0.301)
    assert [(one.rank, one.host, one.operations) for one in made.ranks] == [
        (0, "host0", 4),
        (1, "host1", 4),
        (2, "host2", 3),
    ]
    assert [one.communicating for one in made.ranks] == pytest.approx([0.151, 0.145, 0.060])
    assert [one.waiting for one in made.ranks] == pytest.approx([0.090, 0.084, 0])
    assert [one.waited_for for one in made.ranks] == pytest.approx([0, 0, 0.174])


def test_words(tmp_path: Path) -> None:
    share = 0.174 / (0.151 + 0.145)
    assert summary(job(tmp_path)).words == [
        f"Rank 2 makes the others wait {share:.0%} of their time in communication.",
        "allreduce of 1 KiB by ring on 3 ranks takes 66% of the time of all operations.",
        "Ranks spend 39% of the 301 ms in communication, rank 0 the most: 151 ms.",
    ]


def test_no_rank_stands_out(tmp_path: Path) -> None:
    first = summary(job(tmp_path, late=0.002)).words[0]
    assert first == "No rank makes the others wait for long: they wait 1.4% of their time in communication."


def test_what_else_is_said(tmp_path: Path) -> None:
    part(tmp_path / "job", 0, [("0.0", 1, ALLREDUCE, 1000.0, 1001.0)], errors={0: "Timeout: late"})
    parts.write_job_file(tmp_path / "job", {"job": "job", "nodes": {"0": 0, "1": 0, "4": 0}, "clocks": {}})
    made = summary(tmp_path / "job")
    assert made.words == [
        "There is no trace of ranks 1 and 4.",
        "Ranks spend 100% of the 1.00 s in communication, rank 0 the most: 1.00 s.",
        "1 call of allreduce of 1 KiB by ring on 3 ranks failed.",
    ]
    assert (made.kinds[0].failed, made.kinds[0].algbw) == (1, None)


def test_operations_at_once_count_once(tmp_path: Path) -> None:
    spans = [(1000.0, 1000.4), (1000.1, 1000.2), (1000.3, 1000.5), (1000.7, 1000.8)]
    events = [("0.0", 0, message("irecv", 1, 0), *span) for span in spans]
    part(tmp_path, 0, [*events, ("0.0", 0, message("isend", 1, 0), 1000.9, None)])
    (rank,) = summary(tmp_path).ranks
    assert rank.communicating == pytest.approx(0.6)
    assert rank.operations == 5


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("all_reduce", 1.5),
        ("all_reduce_coalesced", 1.5),
        ("all_gather_single", 0.75),
        ("reduce_scatter_single_coalesced", 0.75),
        ("all_to_all_single", 0.75),
        ("broadcast", 1.0),
        ("allreduce", 1.5),
        ("alltoall", 0.75),
        ("gather", 0.75),
        ("reduce", 1.0),
        ("scan", 1.0),
    ],
)
def test_bus_bandwidth(tmp_path: Path, name: str, factor: float) -> None:
    for rank in range(4):
        part(tmp_path, rank, [("0.0", 1, {**ALLREDUCE, "name": name}, 1000.0, 1001.0)], comms={"0.0": [0, 1, 2, 3]})
    (kind,) = summary(tmp_path).kinds
    assert kind.algbw == pytest.approx(1024)
    assert kind.busbw == pytest.approx(1024 * factor)


def test_messages_in_the_background(tmp_path: Path) -> None:
    """They are started, and some of them are waited for."""
    call = message("isend", 1, 0, 1000)
    ends = [None, 1000.3, None, 1000.6, None]
    part(tmp_path, 0, [("0.0", 0, call, 1000.0 + place / 10, end) for place, end in enumerate(ends)])
    (kind,) = summary(tmp_path).kinds
    assert (kind.calls, kind.algbw) == (3, None)
    assert (kind.total, kind.mean, kind.max) == pytest.approx((0.5, 0.25, 0.3))


def test_messages_that_no_rank_has_waited_for(tmp_path: Path) -> None:
    part(tmp_path, 0, [("0.0", 0, message("isend", 1, 0), 1000.0, None)])
    made = summary(tmp_path)
    assert (made.kinds[0].calls, made.kinds[0].total, made.ranks[0].communicating) == (1, 0, 0)


def test_a_world_of_one(tmp_path: Path) -> None:
    part(tmp_path, 0, [("0.0", 1, ALLREDUCE, 1000.0, 1001.0)], comms={"0.0": [0]})
    made = summary(tmp_path)
    (kind,) = made.kinds
    assert (kind.slowest, kind.late, kind.waited, kind.busbw) == (None, None, 0, 0)
    assert made.words == ["Ranks spend 100% of the 1.00 s in communication, rank 0 the most: 1.00 s."]


def test_groups_of_other_sizes_are_other_kinds(tmp_path: Path) -> None:
    comms = {"0.0": [0], "0.1": [0], "0.2": [0, 1]}
    events = [(key, 1, TORCH, 1000.0 + place, 1000.5 + place) for place, key in enumerate(comms)]
    part(tmp_path, 0, events, comms=comms)
    assert sorted((one.ranks, one.calls) for one in summary(tmp_path).kinds) == [(1, 2), (2, 1)]


# --- the command


def printed(capsys: pytest.CaptureFixture[str], *words: Any) -> str:
    assert main(["trace", *map(str, words)]) == 0
    return capsys.readouterr().out


def test_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    out = printed(capsys, "summary", job(tmp_path))
    assert out.startswith("trace job: 3 ranks, 301 ms\n")
    assert out.splitlines()[2].split() == [
        *("operation", "bytes", "dtype", "algorithm", "ranks", "calls", "total", "mean", "median", "max"),
        *("GB/s", "busbw", "waiting", "slowest", "rank"),
    ]
    (line,) = (line for line in out.splitlines() if line.strip().startswith("allreduce") and "takes" not in line)
    assert " ".join(line.split()) == (
        "allreduce 1 KiB float32 ring 3 2 78.7 ms 66% 39.3 ms 48.0 ms 50.0 ms 0.00 0.00 19.3 ms 49%"
        " 2 (+29.0 ms, 2 of 2)"
    )
    assert out.endswith("Ranks spend 39% of the 301 ms in communication, rank 0 the most: 151 ms.\n")


def test_summary_is_the_same_before_and_after_merging(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = printed(capsys, "summary", job(tmp_path))
    path = trace_files.merge(tmp_path / "job")
    assert printed(capsys, "summary", path) == printed(capsys, "summary", tmp_path) == before


def test_some_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "summary", job(tmp_path), "--rows", 2)
    assert "and 2 kinds of operation that take 0.6% of the time" in out
    assert "send" not in out


def test_summary_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = job(tmp_path)
    content = json.loads(printed(capsys, "summary", folder, "--json"))
    assert set(content) == {"job", "seconds", "kinds", "ranks", "missing", "words"}
    assert [one["operation"] for one in content["kinds"]] == ["allreduce", "barrier", "send", "recv"]
    assert content["kinds"][0]["slowest"] == 2
    assert "trace job" in printed(capsys, "summary", folder, "--json", tmp_path / "file.json")
    assert json.loads((tmp_path / "file.json").read_text()) == content


def test_summary_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part(tmp_path / "job", 0, [])
    assert "There are no operations.\n" in printed(capsys, "summary", tmp_path)


def test_several_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for age, name in enumerate(("new", "old")):
        os.utime(job(tmp_path, name), (1e9 - age, 1e9 - age))
    out = printed(capsys, "summary", tmp_path)
    assert out.startswith("trace new:")
    assert out.endswith(f"Older traces there: {tmp_path / 'old'}\n")


def test_merge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job(tmp_path, "one")
    job(tmp_path, "two")
    assert sorted(printed(capsys, "merge", tmp_path).splitlines()) == [
        str(tmp_path / "one.json"),
        str(tmp_path / "two.json"),
    ]
    for name in ("one", "two"):
        assert len(operations(read(tmp_path / f"{name}.json"))) == 11
    # Those of which there is a file are made again only if they are named.
    assert main(["trace", "merge", str(tmp_path)]) == 2
    assert "there is no trace that has still to be merged" in capsys.readouterr().err
    assert printed(capsys, "merge", tmp_path / "one") == f"{tmp_path / 'one.json'}\n"
    again = json.loads(printed(capsys, "merge", tmp_path / "one", "--json"))
    assert again == {"traces": [str(tmp_path / "one.json")]}


@pytest.mark.parametrize("action", ["summary", "merge"])
def test_nothing_there(tmp_path: Path, capsys: pytest.CaptureFixture[str], action: str) -> None:
    assert main(["trace", action, str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"mpicoll: {tmp_path}: there ")


def test_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from mpicoll.engine.diagnostics import report_file

    monkeypatch.setattr(report_file, "summarize", lambda path: f"what {path.name} says")
    assert printed(capsys, "report", tmp_path / "some.json") == "what some.json says\n"
    monkeypatch.setattr(report_file, "read_analysis", lambda path: {"words": [path.name]})
    assert json.loads(printed(capsys, "report", tmp_path / "some.json", "--json")) == {"words": ["some.json"]}


def test_what_is_no_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "report", str(tmp_path / "none.json")]) == 2
    assert "none.json is not an mpicoll report" in capsys.readouterr().err


def test_brackets_are_no_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part(tmp_path, 0, [("0.0", 1, {**ALLREDUCE, "algorithm": "[red]"}, 1000.0, 1001.0)])
    assert "[red]" in printed(capsys, "summary", tmp_path)
