"""mpicoll tune: what it measures, how it decides, what it writes; and that later runs go by it."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.launch import mpirun

import mpicoll
from mpicoll.cli import main, tune
from mpicoll.cli.tune import measure, settings, winners
from mpicoll.cli.tune.winners import make_rules
from mpicoll.engine.selection import tuned_table
from mpicoll.engine.selection.layout import NodeLayout
from mpicoll.engine.selection.query import SelectionQuery, selection_context
from mpicoll.engine.selection.rules import format_rules, parse_rules

INF = float("inf")

# --- how it decides


@pytest.mark.parametrize(
    ("medians", "previous", "winner"),
    [
        ({"native": 1.0}, "", "native"),
        ({"native": 1.0, "ring": 0.951}, "", "native"),
        ({"native": 1.0, "ring": 0.949}, "", "ring"),
        ({"native": 1.0, "ring": 2.0}, "ring", "native"),
        ({"native": 1.0, "ring": 0.5, "tree": 0.509}, "tree", "tree"),
        ({"native": 1.0, "ring": 0.5, "tree": 0.511}, "tree", "ring"),
        ({"native": 1.0, "ring": 0.5, "tree": 0.6}, "gone", "ring"),
        ({"native": 1.0, "ring": 0.96, "tree": 0.96}, "ring", "native"),
    ],
)
def test_who_wins(medians: dict[str, float], previous: str, winner: str) -> None:
    """What is taken untuned unless another is 5 % faster; of those as good, the one from the size before."""
    assert winners.choose_winner(medians, "native", previous) == winner
    # What is taken is never more than a margin off the best.
    assert min(medians.values()) / medians[winner] >= 0.95


@pytest.mark.parametrize(
    ("ratios", "hopeless"),
    [
        ((), False),
        ((9,), False),
        ((9, 2.9), False),
        ((2.9, 9), False),
        ((4, 4), True),
        ((3.1, 9), True),
        ((9, 8.2), True),
        ((9, 7), False),  # it catches up
        ((9, 1, 4, 5), True),
        ((1, 1, 9), False),
    ],
)
def test_ranks_that_can_not_continue(ratios: Sequence[float], hopeless: bool) -> None:
    assert winners.is_hopeless(ratios) is hopeless


@pytest.mark.parametrize(
    ("low", "high", "border"),
    [(8, 32, 16), (4096, 16384, 8192), (1, 2, 2), (8, 9, 9), (4096, 8192, 5120), (1 << 20, 1 << 22, 1 << 21)],
)
def test_borders_lie_between_sizes(low: int, high: int, border: int) -> None:
    assert winners._round_between(low, high) == border
    assert low < border <= high


def measured(*winners: tuple[int, str]) -> Any:
    return [SimpleNamespace(workload=SimpleNamespace(nbytes=nbytes), winner=name) for nbytes, name in winners]


@pytest.mark.parametrize(
    ("winners", "rules"),
    [
        ([(0, "native")], "allreduce:0-inf:native"),
        ([(8, "native")], "allreduce:0-16:native"),
        ([(1 << 20, "ring")], "allreduce:1m-2m:ring"),
        ([(16 << 20, "ring")], "allreduce:16m-inf:ring"),
        ([(8, "native"), (32, "native"), (128, "ring")], "allreduce:0-64:native,64-256:ring"),
        ([(1024, "ring"), (4096, "tree"), (64 << 20, "tree")], "allreduce:0-2k:ring,2k-inf:tree"),
        ([(8, "ring"), (32, "tree"), (128, "ring")], "allreduce:0-16:ring,16-64:tree,64-256:ring"),
    ],
)
def test_rules(winners: list[tuple[int, str]], rules: str) -> None:
    found = (("allreduce", tuple(make_rules(measured(*winners)))),)
    assert format_rules(found) == rules
    for nbytes, name in winners:
        assert [one for low, high, one in found[0][1] if low <= nbytes < high] == [name]


@pytest.mark.parametrize("nbytes", [8, 256 << 10, 8 << 20])
def test_candidates(nbytes: int) -> None:
    """All that can serve, and pieces of several sizes, none of which is longer than the vector."""
    problem = SelectionQuery("allreduce", nbytes, selection_context(NodeLayout(2, 1, 2)), "float", no_shm_reason=None)
    point: Any = SimpleNamespace(problem=problem, untuned="shm_pipelined", workload=SimpleNamespace(nbytes=nbytes))
    names = winners.list_candidates(point, 1 << 20)
    assert names[0] == "shm_pipelined"
    assert len(set(names)) == len(names)
    assert {"native", "ring", "tree"} <= set(names)
    assert "cma" not in names
    assert ("shm_flat" in names) is (nbytes <= 256 << 10)
    # Not the default.
    own = {8: [], 256 << 10: ["256k"], 8 << 20: ["256k", "512k", "2m"]}[nbytes]
    assert [name for name in names if "/" in name] == [f"shm_pipelined/{one}" for one in own]
    for name in names:
        assert parse_rules(f"allreduce:{name}")


# --- what is refused


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["allredcue"], "tune: no collective 'allredcue'; there are allreduce, "),
        (["--dtypes", "float12"], "tune: no dtype 'float12'; there are float16, "),
        (["--sizes", "soon"], "--sizes: 'soon' is not a size"),
        (["--factor", "1"], "tune: --factor must be at least 2, got 1"),
        (["--blocks", "-1"], "tune: --blocks must be at least 1, got -1"),
        (["--seconds", "0"], "tune: --seconds must be a positive number of seconds, got 0.0"),
        (["--limit", "nan"], "tune: --limit must be a positive number of seconds, got nan"),
        (["-np", "two"], "tune: -np two: must be numbers of ranks, such as 2 or 2,4"),
        (["-np", "2,0"], "tune: -np 2,0: must be numbers of ranks"),
        (["-np", "1"], "tune: a single rank has nothing to choose; pass -np 2 or more"),
    ],
)
def test_wrong_arguments(words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--output", str(tmp_path / "tuned.json"), *words]) == 2
    assert capsys.readouterr().err.startswith(f"mpicoll: {message}")
    assert not list(tmp_path.iterdir())


def test_a_table_that_can_not_be_read_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is found before anything is measured."""
    path = tmp_path / "tuned.json"
    path.write_text("mine")
    assert main(["tune", "--output", str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"mpicoll: tune: {path} is not JSON: ")
    assert path.read_text() == "mine"


def asked(*words: str) -> Any:
    """The arguments as they are checked."""
    import argparse

    parser = argparse.ArgumentParser()
    tune.add(parser.add_subparsers())
    return settings.parse_settings(parser.parse_args(["tune", *words]))


def test_where_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the place that was asked for, else to where later runs look, with the variables as they are."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for variable in ("off", ""):
        monkeypatch.setenv("MPICOLL_TUNED", variable)
        assert asked().output == tmp_path / "mpicoll" / "tuned.json"
    monkeypatch.setenv("MPICOLL_TUNED", str(tmp_path / "mine"))
    assert asked().output == tmp_path / "mine"
    assert asked("--output", "yours").output == Path.cwd() / "yours"
    assert asked("--dry-run").output is None


def test_by_default_everything_is_tuned() -> None:
    everything = asked("--dry-run")
    assert set(everything.collectives) == set(mpicoll.schedules.collectives())
    assert asked("all", "--dry-run") == everything
    assert (everything.sizes[0], everything.sizes[-1]) == (8, 32 << 20)


def test_the_environment_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPICOLL_ALGORITHMS", "allreduce:ring")
    monkeypatch.setenv("MPICOLL_TUNED", "/mine")
    with tune.disable_tuning():
        assert "MPICOLL_ALGORITHMS" not in os.environ
        assert os.environ["MPICOLL_TUNED"] == "off"
    assert os.environ["MPICOLL_ALGORITHMS"] == "allreduce:ring"
    assert os.environ["MPICOLL_TUNED"] == "/mine"


# --- from measuring to being used


def job(size: int, *words: str | Path, **variables: str) -> str:
    wide = {"COLUMNS": "1000"}  # so that no table is folded
    done = mpirun(size, "-W", "error", "-m", "mpicoll", "tune", "--blocks", "2", *words, seconds=90, **wide | variables)
    assert done.returncode == 0, done.stdout
    return done.stdout


def plain(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


SHOW = """
import mpicoll
choice = mpicoll.explain("allreduce", 4096)
if mpicoll.world().rank == 0:
    print(choice.name, choice.reason, sep="|")
"""


@pytest.mark.slow
def test_a_table_is_measured_written_and_used(tmp_path: Path) -> None:
    path = tmp_path / "new" / "tuned.json"
    # A table that is forced, and a file that is not there yet, are no hindrance.
    variables = {"MPICOLL_TUNED": str(path), "MPICOLL_ALGORITHMS": "allreduce:ring"}
    words = ("allreduce", "bcast", "barrier", "--sizes", "8,4k", "--dtypes", "float32,float16")
    lines = plain(job(2, *words, **variables))
    titles = [line.partition(":")[0] for line in lines if "median time per call" in line]
    assert titles == [
        f"{what}, 2 ranks on 1 node"
        for what in ("allreduce, float32", "allreduce, float16", "bcast, any dtype", "barrier, any dtype")
    ]
    assert f"written to {path}" in lines
    (entry,) = tuned_table.load(path)
    assert entry["machine"] == tuned_table.describe_machine()
    assert (entry["ranks"], entry["nodes"], entry["per_node"]) == (2, 1, 2)
    assert set(entry["rules"]) == {"float", "half", "moved"}
    for kind, text in entry["rules"].items():
        assert [name for name, _ in parse_rules(text)] == (["bcast", "barrier"] if kind == "moved" else ["allreduce"])
        assert f"{kind}: {text}" in lines
    (alpha, beta), gamma = entry["costs"]["node"], entry["costs"]["gamma"]
    assert alpha > 0 <= beta
    assert gamma > 0
    assert entry["costs"]["network"] is None

    # The same row as in the table that was printed.
    ((_, rules),) = parse_rules(entry["rules"]["float"])
    (taken,) = (name for low, high, name in rules if low <= 4096 < high)
    header = next(line for line in lines if line.startswith("size "))
    assert header.endswith("winner untuned good")
    row = next(line for line in lines if line.startswith("4 KiB"))
    assert re.search(rf" {re.escape(taken)} [\w/]+ \d+ %$", row)

    program = tmp_path / "program.py"
    program.write_text(SHOW)
    name, reason = mpirun(2, program, MPICOLL_TUNED=str(path)).stdout.strip().split("|")
    assert name == taken
    assert reason.startswith("tuned for float")
    assert reason.endswith(f" on 2 ranks on 1 node, {path}")
    name, reason = mpirun(2, program, MPICOLL_TUNED="off").stdout.strip().split("|")
    assert "tuned" not in reason
    # On 3 ranks nothing was tuned.
    assert "tuned" not in mpirun(3, program, MPICOLL_TUNED=str(path)).stdout


@pytest.mark.slow
def test_more_is_added_by_jobs_that_it_starts_itself(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tuned.json"
    words = ["--sizes", "8", "--blocks", "1", "--output", str(path)]
    assert main(["tune", "alltoall", "-np", "2,3", *words]) == 0
    assert main(["tune", "scan", "-np", "2", *words]) == 0
    entries = {entry["ranks"]: entry["rules"] for entry in tuned_table.load(path)}
    assert set(entries) == {2, 3}
    assert set(entries[2]) == {"float", "moved"}
    assert set(entries[3]) == {"moved"}
    assert capfd.readouterr().out.count(f"written to {path}") == 3


@pytest.mark.slow
def test_measured_anew_and_nothing_written(tmp_path: Path) -> None:
    lines = plain(
        job(3, "reduce", "allgather", "--sizes", "12,3k", "--check", "--dry-run", XDG_CACHE_HOME=str(tmp_path))
    )
    assert not list(tmp_path.rglob("tuned*.json"))  # what is known of the MPI library may be kept
    start = lines.index("check, 3 ranks on 1 node")
    assert lines[start + 1] == "measured again best tuned good untuned good"
    rows = [line for line in lines[start:] if line.startswith(("reduce ", "allgather "))]
    assert [" ".join(row.split()[:4]) for row in rows] == [
        f"{name} float32 {size}" for name in ("reduce", "allgather") for size in ("12 B", "3 KiB")
    ]
    # Some share of the best each, one of whom is the best.
    for row in rows:
        goods = [int(good) for good in re.findall(r"(\d+) %", row)]
        assert len(goods) == 2
        assert all(0 <= good <= 100 for good in goods)
    assert re.match(r"geometric means: tuned \d+ %, untuned \d+ %; below 95 % tuned: \d of 4; ", lines[-1])


def test_a_launcher_of_another_size_is_refused(tmp_path: Path) -> None:
    done = mpirun(2, "-m", "mpicoll", "tune", "barrier", "-np", "3", "--output", tmp_path / "tuned.json")
    assert done.returncode != 0
    assert "tune: -np 3, but the launcher has started 2 ranks; leave -np out" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.mpi
@pytest.mark.parametrize("apart", [False, True], ids=["node", "nodes"])
def test_costs(apart: bool) -> None:
    """Of the link classes that there are; each rank as if on a node of its own, or all on one."""
    from mpicoll.cli.bench.team import Team

    with mpicoll.world().duplicate() as comm:
        comm.nodes = tuple(range(comm.size)) if apart else (0,) * comm.size
        costs = measure.measure_costs(Team(comm))
    assert costs["gamma"] > 0
    for name, there in (("node", comm.size > 1 and not apart), ("network", comm.size > 1 and apart)):
        if there:
            alpha, beta = costs[name]
            assert alpha > 0 <= beta
        else:
            assert costs[name] is None
    # What is written can be read.
    tuned_table._check_entry(tuned_table.make_entry("Some MPI", NodeLayout(2, 1, 2), {}, costs, ""))
