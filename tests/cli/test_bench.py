"""mpicoll bench: what it measures is right, what it says is what it measured, and wrong results are found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.launch import ROOT, mpirun
from support.scripts import run_scripts

import mpicoll
from mpicoll import schedules
from mpicoll.cli import main, start_ranks
from mpicoll.cli.bench import job, messages, peers, report
from mpicoll.cli.bench.cases import (
    COLLECTIVES,
    DTYPES,
    MESSAGES,
    OPS,
    REDUCTIONS,
    RING_CASES,
    ArrayKind,
    Case,
    Workload,
    bus_factor,
    wide,
)
from mpicoll.cli.bench.measure import Point, Result, Wrong, prepare_verified
from mpicoll.cli.bench.overlap import Overlap
from mpicoll.engine.selection.catalogue import algorithms_of
from mpicoll.errors import ArgumentError, SetupError

RANKS = 3

# --- what is measured


@pytest.mark.parametrize(
    ("collective", "factor"),
    [
        ("allreduce", 1.5),
        ("allgather", 0.75),
        ("reduce_scatter", 0.75),
        ("alltoall", 0.75),
        ("gather", 0.75),
        ("scatter", 0.75),
        ("bcast", 1),
        ("reduce", 1),
    ],
)
def test_bus_factor_of_four_ranks(collective: str, factor: float) -> None:
    assert bus_factor(collective, 4) == factor
    assert Workload(collective, 4000, "float32", "sum", 4).busbw(2e-6) == pytest.approx(factor * 2e9)


@pytest.mark.parametrize(
    ("collective", "given", "got"),
    [
        ("allreduce", [9, 9, 9], [9, 9, 9]),
        ("reduce", [9, 9, 9], [9, 0, 0]),
        ("bcast", [9, 9, 9], [9, 9, 9]),
        ("allgather", [3, 3, 3], [9, 9, 9]),
        ("reduce_scatter", [9, 9, 9], [3, 3, 3]),
        ("gather", [3, 3, 3], [9, 0, 0]),
        ("scatter", [9, 3, 3], [3, 3, 3]),
        ("alltoall", [9, 9, 9], [9, 9, 9]),
        ("scan", [9, 9, 9], [9, 9, 9]),
    ],
)
def test_extents(collective: str, given: list[int], got: list[int]) -> None:
    workload = Workload(collective, 36, "float32", "sum", RANKS)
    assert workload.nbytes == 36
    assert [workload.operand_size(rank) for rank in range(RANKS)] == given
    assert [workload.result_size(rank) for rank in range(RANKS)] == got


def test_names_of_algorithms() -> None:
    assert job._algorithms("slots,pieces/64k,ring", ["allreduce"], None) == ("shm_flat", "shm_pipelined/64k", "ring")
    assert job._algorithms("all", ["barrier", "scan"], "torch") == (
        *("native", "shm_flat", *schedules.algorithms_of("barrier"), "shm_pipelined", "cma", "shm_or_cma"),
        *schedules.algorithms_of("scan"),
    )
    for_devices = set(job._algorithms("all", ["bcast"], "cupy")) - set(job._algorithms("all", ["bcast"], None))
    assert for_devices == {"nccl", "ipc"}


def test_sizes_are_rounded_to_elements_and_equal_blocks() -> None:
    assert Workload("allreduce", 11, "float32", "sum", 3).nbytes == 8
    assert Workload("allreduce", 1, "float64", "sum", 3).nbytes == 8
    assert Workload("allgather", 8, "float32", "sum", 3).nbytes == 12
    assert Workload("allgather", 1 << 20, "bfloat16", "sum", 3).nbytes == (1 << 20) - 4
    assert Workload("barrier", 8, "float32", "sum", 3).nbytes == 0


def results(workload: Workload, kind: ArrayKind, form: str = "", out: bool = True) -> list[tuple[Case, Any]]:
    """Each rank's case and result, with the library's own algorithms on ranks that are threads."""

    def rank() -> tuple[Case, Any]:
        case = Case(workload, mpicoll.world().rank, kind)
        ready = peers.candidate("mpicoll", kind=kind, form=form, out=out).prepare(case)
        value = ready.call()
        if form == "i":
            value = value.wait()
        return case, ready.result if value is None else value

    return mpicoll.run_local(rank, workload.ranks)


@pytest.mark.parametrize(
    "collective",
    [
        *(one for one in COLLECTIVES if one != "barrier"),
        *(pytest.param(one, marks=pytest.mark.extension) for one in RING_CASES),
    ],
)
def test_the_oracle_agrees_with_right_results_and_no_others(collective: str) -> None:
    for size in (8, 300_000):  # the random pattern in inputs repeats in the latter
        found = results(Workload(collective, size, "float32", "sum", RANKS), "numpy")
        for rank, (case, value) in enumerate(found):
            if not case.workload.result_size(rank):
                assert value is None
                continue
            assert case.workload.check(rank, value) is None
            for place in {0, value.size // 2, value.size - 1}:
                spoiled = value.copy()
                spoiled[place] += 1
                fault = case.workload.check(rank, spoiled)
                assert fault is not None
                assert fault.startswith(f"1 of {value.size} elements are wrong; element {place} is ")
                assert "off by 1," in fault


def test_blocks_in_a_wrong_place_are_found() -> None:
    for collective in ("allgather", "alltoall", "gather"):
        case, value = results(Workload(collective, 1_000_000, "float32", "sum", RANKS), "numpy")[0]
        assert case.workload.check(0, np.roll(value, case.workload.rows)) is not None


def test_a_changed_input_is_found() -> None:
    for rank, (case, _) in enumerate(results(Workload("reduce_scatter", 600, "float32", "sum", RANKS), "numpy")):
        assert case.workload.check_operand(rank, case.x) is None
        case.x[7] -= 2
        assert "its input has changed: 1 of 150 elements are wrong; element 7 is" in str(
            case.workload.check_operand(rank, case.x)
        )


@pytest.mark.parametrize(("name", "factor"), [("send", 2), ("isend", 2), ("sendrecv", 1)])
def test_messages_between_pairs_of_ranks(name: str, factor: int) -> None:
    workload = Workload(name, 4000, "float32", "sum", RANKS)

    def rank() -> tuple[Case, Any]:
        comm = mpicoll.world()
        case = Case(workload, comm.rank, "numpy")
        (contestant,) = messages.Messages(comm, (name,), (), "numpy").contestants
        ready = contestant.prepare(case)
        ready.call()
        return case, ready.result

    assert [workload.find_partner(one) for one in range(RANKS)] == [1, 0, None]
    found = mpicoll.run_local(rank, RANKS)
    for one, (case, result) in enumerate(found):
        assert (result is None) == (one == 2)
        assert case.out is result
        assert result is None or workload.check(one, result) is None
        assert workload.check_operand(one, case.x) is None
    assert workload.check(0, found[0][0].x) is not None  # what it has sent itself
    assert workload.busbw(2e-6) == factor * 2e9


def test_no_number_is_wrong() -> None:
    case, value = results(Workload("allreduce", 64, "float32", "sum", RANKS), "numpy")[0]
    value[3] = np.nan
    assert "element 3 is nan" in str(case.workload.check(0, value))


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(kind: ArrayKind, dtype: str) -> None:
    for op in OPS:
        if (op == "avg" and "int" in dtype) or (op in ("min", "max") and "complex" in dtype):
            continue
        for collective in REDUCTIONS if dtype in ("float32", "int8") else ("allreduce",):
            if op == "avg" and "scan" in collective:
                continue
            for rank, (case, value) in enumerate(results(Workload(collective, 600, dtype, op, RANKS), kind)):
                if value is not None:
                    assert case.workload.check(rank, value) is None, (collective, op)
    for rank, (case, value) in enumerate(results(Workload("alltoall", 600, dtype, "sum", RANKS), kind)):
        assert case.workload.check(rank, value) is None


@pytest.mark.parametrize(("form", "out"), [("", False), ("i", True)])
def test_forms_of_the_call(form: str, out: bool) -> None:
    for rank, (case, value) in enumerate(
        results(Workload("allreduce", 600, "float32", "sum", RANKS), "numpy", form, out)
    ):
        assert case.workload.check(rank, value) is None
        assert (value is case.out) is out


def test_inputs_differ_from_rank_to_rank_and_come_again() -> None:
    workload = Workload("allreduce", 4000, "float32", "sum", 2)
    first, second = (wide(Case(workload, rank, "numpy").x) for rank in (0, 1))
    assert (first != second).all()
    case = Case(workload, 0, "numpy")
    case.x[:] = 0
    case.reset()
    np.testing.assert_array_equal(wide(case.x), first)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_inputs_are_written_in_place_before_each_call(kind: ArrayKind) -> None:
    if kind == "torch":
        pytest.importorskip("torch")
    for collective, ranks in (("allgather", {0, 1}), ("bcast", {0}), ("scatter", {0})):
        workload = Workload(collective, 4000, "float32", "sum", 2)
        cases = [Case(workload, rank, kind) for rank in (0, 1)]
        assert {case.rank for case in cases if case._input is not None} == ranks
        for case in cases:
            before = wide(case.x)
            if case._input is not None:
                case._input[0] ^= 1
                assert not np.array_equal(wide(case.x), before)  # the memory of the input
                case._input[0] ^= 1
            case.rewrite()
            np.testing.assert_array_equal(wide(case.x), before)
    order: list[str] = []
    case_: Any = SimpleNamespace(
        rewrite=lambda: order.append("write"), workload=SimpleNamespace(collective="allgather")
    )
    one = peers.Contestant("one", lambda case: peers.Ready(lambda: order.append("call")))
    ready = peers.write_before(one).prepare(case_)
    ready.call()
    ready.call()
    assert order == ["write", "call", "write", "call"]
    case_.workload.collective = "barrier"
    peers.write_before(one).prepare(case_).call()
    assert order[4:] == ["call"]


def test_an_input_that_a_call_has_changed_is_an_error_of_mpicoll() -> None:
    team: Any = SimpleNamespace(size=1, barrier=lambda: None, all=lambda value: [value])

    def spoil(case: Case) -> np.ndarray:
        result = case.x.copy()
        case.x[3] += 1
        return result

    ours = peers.Contestant("mpicoll", lambda case: peers.Ready(lambda: spoil(case)), ours=True)
    case = Case(Workload("allreduce", 4000, "float32", "sum", 1), 0, "numpy")
    with pytest.raises(Wrong, match="its input has changed: 1 of 1000 elements"):
        prepare_verified(team, ours, case)


# --- what is said about it


def timed(*blocks: float, takes: str = "") -> Result:
    return Result("timed", phase="mpi", calls=3, blocks=list(blocks), takes=takes)


def points() -> list[Point]:
    made = []
    for size in (1024, 1 << 20):
        workload = Workload("allreduce", size, "float32", "sum", 2)
        wrong = Result("wrong", "theirs is wrong: by far")
        ours, peer = timed(3e-6, 1e-6, 2e-6, takes="ring"), timed(4e-6)
        others = {"theirs": wrong, "none": Result("absent", "why"), "write": timed(0.5e-6)}
        made.append(Point(workload, {"mpicoll": ours, "peer": peer, **others}))
    return made


def test_statistics() -> None:
    result = timed(*(number * 1e-6 for number in range(101)))
    assert result.median == pytest.approx(50e-6)
    assert result.p99 == pytest.approx(99e-6)


def test_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from mpicoll.cli import formatting

    monkeypatch.setenv("COLUMNS", "1000")
    formatting.console().print(report.table(points(), first_peer="peer", settings="float32 sum"))
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines() if line.strip()]
    title, header, _, first, second, *notes = lines
    assert title.startswith("allreduce, 2 ranks, float32 sum: median time per call")
    assert header == "size mpicoll / peer GB/s takes peer GB/s theirs / peer GB/s write"
    assert first == "1 KiB 2.00 µs 0.50 0.51 ring 4.00 µs 0.26 wrong 500 ns"
    assert second.startswith("1 MiB 2.00 µs 0.50 524 ring")
    assert notes == ["theirs is wrong: by far", "none: why"]


def test_json() -> None:
    first, _ = json.loads(json.dumps(report.as_json(points())))
    assert first["nbytes"] == 1024
    ours = first["contestants"]["mpicoll"]
    assert ours["verified"]
    assert ours["takes"] == "ring"
    assert ours["median"] == 2e-6
    assert ours["blocks"] == [3e-6, 1e-6, 2e-6]
    assert ours["algbw"] == ours["busbw"] == pytest.approx(1024 / 2e-6)
    assert first["contestants"]["write"]["median"] == 0.5e-6
    assert not {"algbw", "busbw"} & set(first["contestants"]["write"])
    assert first["contestants"]["theirs"] == {"state": "wrong", "verified": False, "note": "theirs is wrong: by far"}


@pytest.mark.parametrize("against", ["time", "busbw"])
def test_plot(tmp_path: Path, against: str) -> None:
    from matplotlib.image import imread

    report.plot(tmp_path / "one.png", points(), against=against, title="title")
    picture = imread(tmp_path / "one.png")
    assert min(picture.shape[:2]) > 400
    assert picture.std() > 0.01  # something is drawn


def test_overlap_is_what_osu_iallreduce_means_by_it() -> None:
    workload = Workload("allreduce", 8, "float32", "sum", 2)
    assert Overlap(workload, pure=4.0, compute=4.0, total=8.0, rounds=1).percent == 0
    assert Overlap(workload, pure=4.0, compute=4.0, total=4.0, rounds=1).percent == 100
    assert Overlap(workload, pure=4.0, compute=4.5, total=5.5, rounds=1).percent == 75
    assert Overlap(workload, pure=4.0, compute=4.0, total=9.0, rounds=1).percent == 0


# --- what can't be measured


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("allredcue", "no collective 'allredcue'"),
        ("--against openmpi", "no peer 'openmpi'; there are mpi4py, gloo, nccl, copy"),
        ("--dtype float8", "no dtype 'float8'"),
        ("--op xor", "no op 'xor'"),
        ("--op avg --dtype int32", "op 'avg' has no meaning for dtype int32"),
        ("--sizes 64k-4k", "'64k-4k' is an empty range"),
        ("--compute sleep", "bench sweep: --compute is for overlap only"),
        ("--computing 1", "bench sweep: --computing is for overlap only"),
        ("overlap --plot x.png", "bench overlap: --plot is for sweep only"),
        ("send allreduce", "no message 'allreduce'; there are send, isend"),
        ("send --against copy", "no peer of messages 'copy'; there are mpi4py, gloo"),
        ("send --plan", "bench messages: --plan is for sweep only"),
        ("overlap barrier", "a barrier has nothing to hide"),
        ("overlap put", "put is measured on the host, and not by bench overhead or overlap"),
        ("overlap scan --like torch", "torch.distributed has no scan"),
        ("--json no/such/place.json", "--json no/such/place.json: there is no directory"),
        ("--json .", "--json .: it is a directory"),
        ("--plot picture.gif", "--plot picture.gif: must end in .png"),
        ("--plot tests", "--plot tests: it is a directory"),
        ("--algorithms ring,foo", "bench: --algorithms foo: allreduce has no algorithm 'foo'; there are native, shm_f"),
        ("--algorithms ring/2", "allreduce algorithm 'ring/2': ring has no segments"),
        ("scan gather --algorithms tree", "scan has no algorithm 'tree'; there are native, shm_pipelined"),
        ("put --algorithms ring", "--algorithms ring: none of what is measured has algorithms"),
        ("-np 0", "-np must be at least 1"),
    ],
)
def test_arguments_that_make_no_sense(arguments: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("mpicoll: ")
    assert err.count("\n") == 1
    assert text in err


def test_an_algorithm_of_some_collectives_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[job.Settings] = []

    def start(main: Any, arguments: tuple[job.Settings], ranks: int, limit: float) -> list[int]:
        asked.extend(arguments)
        return [0]

    monkeypatch.setattr(start_ranks, "start", start)
    monkeypatch.setattr("mpicoll.transport.launch_env.is_launched", lambda environ: False)
    assert main(["bench", "gather", "allreduce", "put", "--algorithms", "linear,double_tree/3,slots,native"]) == 0
    assert asked[0].algorithms == ("linear", "double_tree/3", "shm_flat", "native")


@pytest.mark.parametrize("arguments", ["--seconds 0", "--blocks 1", "--factor 1", "--like cupy"])
def test_arguments_out_of_range(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", *arguments.split()])
    assert caught.value.code == 2
    assert arguments.partition(" ")[0] in capsys.readouterr().err


def test_more_ranks_that_compute_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpicoll.transport.launch_env.is_launched", lambda environ: True)
    with pytest.raises(ArgumentError, match=r"bench overlap: --computing 2, but the job has 1 rank$"):
        main(["bench", "overlap", "--computing", "2"])


def test_help_loads_nothing_heavy() -> None:
    program = (
        "import sys\nfrom mpicoll.cli import main\n"
        "try:\n    main(['bench', '--help'])\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert not {'numpy', 'torch', 'rich', 'matplotlib', 'mpi4py'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "mpicoll bench overlap" in done.stdout


def test_nccl_with_too_few_devices() -> None:
    class Comm:
        local_size = 1000
        mpi = SimpleNamespace(allgather=lambda value: [False, value])

    with pytest.raises(SetupError, match="needs a CUDA device for each rank of a node"):
        peers.of_torch("nccl", Comm(), kind="torch")  # type: ignore[arg-type]


# --- jobs


def bench(size: int, file: Path, *arguments: str | Path) -> tuple[str, dict[str, Any]]:
    """What a bench of `size` ranks has printed, and what it has written to `file`."""
    done = mpirun(size, "-m", "mpicoll", "bench", "--seconds", "0.01", "--json", file, *arguments)
    assert done.returncode == 0, done.stdout
    return done.stdout, json.loads(file.read_text())


def check_timed(one: dict[str, Any]) -> None:
    assert one["verified"]
    assert min(one["blocks"]) > 0
    assert one["blocks"].count(one["blocks"][0]) < len(one["blocks"])
    assert 0 < one["median"] <= one["p99"]


OF_TWO = {
    "sweep": "all --sizes 4k --against mpi4py,copy --algorithms ring --plot PICTURE --blocks 2",
    "overlap of numpy": "overlap allreduce allgather --sizes 64k --computing 1 --like numpy",
    "overlap of torch": "overlap allreduce allgather --sizes 64k --compute sleep --like torch",
    "overhead": "overhead scatter barrier --sizes 8",
    "messages": f"{' '.join(MESSAGES)} --sizes 4k --blocks 2",
    "written inputs": "alltoall barrier --sizes 4k --against mpi4py --rewrite --blocks 2",
    "ring": f"{' '.join(RING_CASES)} --sizes 4k --dtype int32 --blocks 2",
    "all algorithms": "reduce --sizes 8 --against none --algorithms all --blocks 2",
}


class OfTwo:
    """What several benches have printed and written, one after the other in the same two ranks."""

    def __init__(self, folder: Path) -> None:
        script = folder / "bench.py"
        script.write_text("import sys\nfrom mpicoll.cli import main\nsys.exit(main(['bench', *sys.argv[1:]]))\n")
        self.picture = folder / "picture.png"
        files = {name: folder / f"{name}.json" for name in OF_TWO}
        commands = [
            (script, "--seconds", "0.01", "--json", files[name], *text.replace("PICTURE", str(self.picture)).split())
            for name, text in OF_TWO.items()
        ]
        ends = run_scripts(2, folder, *commands, seconds=220, strict=False)
        assert not any(status for end in ends for status in end.statuses), ends
        self.printed = {name: "".join(end.printed) for name, end in zip(OF_TWO, ends, strict=True)}
        self.found = {name: json.loads(path.read_text()) for name, path in files.items()}


waits_for_all = pytest.mark.timeout(240)  # the first test that asks for `of_two`


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> OfTwo:
    return OfTwo(tmp_path_factory.mktemp("of-two"))


@waits_for_all
@pytest.mark.slow
def test_sweep_of_two_ranks(of_two: OfTwo) -> None:
    text, found = of_two.printed["sweep"], of_two.found["sweep"]
    assert of_two.picture.read_bytes().startswith(b"\x89PNG")
    assert found["ranks"] == 2
    assert found["mpi"]
    # Ranks of the tests may be forked from a process that has imported torch.
    assert set(found["versions"]) - {"torch"} == {"python", "mpicoll", "numpy", "mpi4py"}
    assert [(one["collective"], one["nbytes"]) for one in found["points"]] == [
        (collective, 0 if collective == "barrier" else 4096) for collective in COLLECTIVES
    ]
    absent = set()
    for point in found["points"]:
        assert list(point["contestants"]) == ["mpicoll", "ring", "mpi4py", "copy"]
        for name, one in point["contestants"].items():
            if one["state"] == "timed":
                check_timed(one)
            else:
                assert one["state"] == "absent"
                absent.add((name, point["collective"]))
        assert point["contestants"]["mpicoll"]["takes"]
    with_ring = {"allreduce", "allgather", "reduce_scatter"}
    assert absent == {
        *(("ring", collective) for collective in set(COLLECTIVES) - with_ring),
        ("copy", "barrier"),
    }
    for collective in COLLECTIVES:
        assert f"{collective}, 2 ranks, float32 sum numpy" in text


@waits_for_all
@pytest.mark.slow
def test_messages_of_two_ranks(of_two: OfTwo) -> None:
    points = of_two.found["messages"]["points"]
    assert [point["collective"] for point in points] == list(MESSAGES)
    for point in points:
        assert list(point["contestants"]) == ["mpicoll", "mpi4py", "gloo"]
        for name, one in point["contestants"].items():
            if (point["collective"], name) == ("sendrecv", "gloo"):
                assert one["note"] == "it has no sendrecv"
            else:
                check_timed(one)
        assert not point["contestants"]["mpicoll"].get("takes")
    assert "torch_send, 2 ranks, float32 torch: median time" in of_two.printed["messages"]


@waits_for_all
@pytest.mark.slow
def test_cases_of_a_ring(of_two: OfTwo) -> None:
    points = of_two.found["ring"]["points"]
    assert [(one["collective"], one["nbytes"]) for one in points] == [(name, 4096) for name in RING_CASES]
    for point in points:
        assert list(point["contestants"]) == ["mpicoll", "mpi4py"]
        for one in point["contestants"].values():
            check_timed(one)


@waits_for_all
@pytest.mark.slow
def test_written_inputs(of_two: OfTwo) -> None:
    points = of_two.found["written inputs"]["points"]
    for one in points[0]["contestants"].values():
        check_timed(one)
    assert list(points[0]["contestants"]) == ["mpicoll", "mpi4py", "write"]
    assert points[1]["contestants"]["write"]["state"] == "absent"
    check_timed(points[1]["contestants"]["mpicoll"])
    assert of_two.found["written inputs"]["settings"]["rewrite"]
    assert "alltoall, 2 ranks, float32 sum numpy rewrite" in of_two.printed["written inputs"]
    assert "barrier, 2 ranks, float32 sum numpy: " in of_two.printed["written inputs"]


@waits_for_all
@pytest.mark.slow
@pytest.mark.extension
def test_all_algorithms_of_two_ranks(of_two: OfTwo) -> None:
    contestants = of_two.found["all algorithms"]["points"][0]["contestants"]
    host = [name for name in algorithms_of("reduce") if name not in ("nccl", "ipc")]
    assert list(contestants) == ["mpicoll", *host]
    absent = {name for name, one in contestants.items() if one["state"] == "absent"}
    assert {"hierarchical"} <= absent <= {"hierarchical", "cma"}  # some kernels deny cma
    for name in set(contestants) - absent:
        check_timed(contestants[name])


@pytest.mark.long
def test_tensors_and_plans_of_three_ranks(tmp_path: Path) -> None:
    text, found = bench(
        *(3, tmp_path / "found.json", "allreduce", "bcast", "scan", "--sizes", "1k", "--blocks", "13"),
        *("--like", "torch", "--plan", "--dtype", "bfloat16", "--against", "mpi4py,gloo"),
    )
    assert found["settings"]["plan"]
    for point in found["points"]:
        check_timed(point["contestants"]["mpicoll"])
        assert len(point["contestants"]["mpicoll"]["blocks"]) == 13
    # mpi4py takes torch's bfloat16 for bytes where MPI doesn't know it, and adds those.
    theirs = found["points"][0]["contestants"]["mpi4py"]
    assert theirs["state"] == "wrong"
    assert "allreduce of 1024 B, bfloat16, sum, on rank 0 of 3: " in theirs["note"]
    assert "mpi4py is wrong" in text
    check_timed(found["points"][1]["contestants"]["mpi4py"])
    for point in found["points"][:2]:
        check_timed(point["contestants"]["gloo"])
        assert point["contestants"]["gloo"]["phase"] == "gloo"
    assert found["points"][2]["contestants"]["gloo"]["note"] == "torch.distributed has no scan"
    assert "gloo is timed apart from the others" in text


WRONG = """
import sys
import mpicoll
from mpicoll.cli import main

right = mpicoll.allreduce


def wrong(x, *args, **keywords):
    result = right(x, *args, **keywords)
    if mpicoll.world().rank == 1 and result.size > 100:
        result[77] += 1
    return result


mpicoll.allreduce = wrong
sys.exit(main(["bench", "--sizes", "8,4k", "--seconds", "0.01"]))
"""


@pytest.mark.slow
def test_a_wrong_candidate_ends_it(tmp_path: Path) -> None:
    script = tmp_path / "wrong.py"
    script.write_text(WRONG)
    done = mpirun(2, script)
    assert done.returncode == 1, done.stdout
    assert "mpicoll: mpicoll is wrong: allreduce of 4096 B, float32, sum, on rank 1 of 2: 1 of 1024" in done.stdout
    assert "element 77 is" in done.stdout
    assert "off by 1," in done.stdout


@pytest.fixture
def alone() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a bench without a launcher."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        environ = {
            key: value for key, value in os.environ.items() if not key.startswith(("PMIX_", "PMI_", "OMPI_", "PRTE_"))
        }
        command = [sys.executable, "-m", "mpicoll", "bench", "--seconds", "0.01", *arguments]
        return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60, check=False)

    return run


@pytest.mark.slow
def test_it_starts_its_ranks_itself(alone: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    done = alone("-np", "3", "--sizes", "8", "--against", "none", "--json", str(tmp_path / "found.json"))
    assert done.returncode == 0, done.stderr
    assert "allreduce, 3 ranks" in done.stdout
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["command"].startswith("mpicoll bench --seconds 0.01 -np 3")
    only = found["points"][0]["contestants"]
    assert list(only) == ["mpicoll"]
    check_timed(only["mpicoll"])
    assert len(only["mpicoll"]["blocks"]) >= 11


@waits_for_all
@pytest.mark.slow
@pytest.mark.parametrize("like", ["numpy", "torch"])
def test_overlap(like: str, of_two: OfTwo) -> None:
    text, found = of_two.printed[f"overlap of {like}"], of_two.found[f"overlap of {like}"]
    assert [one["collective"] for one in found["overlaps"]] == ["allreduce", "allgather"]
    for one in found["overlaps"]:
        assert min(one["pure"], one["compute"], one["total"]) > 0
        expected = max(0.0, 100 * (1 - (one["total"] - one["compute"]) / one["pure"]))
        assert one["percent"] == pytest.approx(expected)
    assert "hidden" in text
    assert ("compute: numpy on 1 rank" in " ".join(text.split())) == (like == "numpy")


@waits_for_all
@pytest.mark.slow
def test_overhead(of_two: OfTwo) -> None:
    text, found = of_two.printed["overhead"], of_two.found["overhead"]
    assert [one["collective"] for one in found["points"]] == ["scatter", "barrier"]
    absent = {"scatter": 0, "barrier": 5}  # forms with counts, with None, of strided arrays
    for point in found["points"]:
        forms = point["contestants"]
        assert set(forms) >= {
            "mpi4py",
            "call",
            "counts=, out=",
            "plan",
            "i-form, wait",
            "mpi4py, I-form, Wait",
            "tensor",
            "torch, drop-in",
            "torch, async",
        }
        assert sum(one["state"] == "absent" for one in forms.values()) == absent[point["collective"]]
        for one in forms.values():
            if one["state"] != "absent":
                check_timed(one)
    assert "None elsewhere, out=" in text
    assert "the slowest" in text
