"""mpicoll tune --device cuda, on a device that is only played: from measuring to being used."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import fake_cuda
from support.launch import mpirun

import mpicoll
from mpicoll.cli import main
from mpicoll.cli.tune import job as tune_job
from mpicoll.cli.tune import winners
from mpicoll.engine.selection import tuned_table
from mpicoll.engine.selection.rules import parse_rules

MODEL = "Fake CUDA device"


def job(size: int, path: Path, *words: str, **variables: str) -> list[str]:
    """What a tuning of `size` ranks has printed."""
    done = mpirun(
        size,
        *("-W", "error", "-m", "mpicoll", "tune", "--device", "cuda", "--array", "cupy", "--blocks", "2"),
        *("--output", path, *words),
        seconds=120,
        **fake_cuda.environment(COLUMNS="1000", **variables),
    )
    assert done.returncode == 0, done.stdout
    return [" ".join(line.split()) for line in done.stdout.splitlines() if line.strip()]


SHOW = """
import cupy
import mpicoll

world = mpicoll.world()
cupy.cuda.Device(world.rank % cupy.cuda.runtime.getDeviceCount()).use()
x = cupy.zeros(1024, "float32")
mpicoll.allreduce(x)
choices = [mpicoll.explain("allreduce", 4096, like=x), mpicoll.explain("allreduce", 4096)]
if world.rank == 0:
    print(*(f"{choice.name}|{choice.reason}" for choice in choices), sep="\\n")
"""


@pytest.mark.slow
def test_a_table_is_measured_written_and_used(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    lines = job(2, path, "allreduce", "bcast", "scan", "--sizes", "8,4k", "--dtypes", "float32,float16", "--check")
    shared = f"{MODEL} shared by 2"
    titles = [line.partition(":")[0] for line in lines if "median time per call" in line]
    what = ("allreduce, float32", "allreduce, float16", "bcast, any dtype", "scan, float32", "scan, float16")
    assert titles == [f"{one}, {shared}, 2 ranks on 1 node" for one in what]
    assert f"check, {shared}, 2 ranks on 1 node" in lines
    (entry,) = tuned_table.load(path)
    assert {kind: [name for name, _ in parse_rules(text)] for kind, text in entry["rules"].items()} == {
        f"float on {shared}": ["allreduce", "scan"],
        f"half on {shared}": ["allreduce", "scan"],
        f"moved on {shared}": ["bcast"],
    }

    program = tmp_path / "program.py"
    program.write_text(SHOW)

    def choices(**variables: str) -> list[str]:
        done = mpirun(2, program, MPICOLL_TUNED=str(path), **fake_cuda.environment(**variables))
        assert done.returncode == 0, done.stdout
        return done.stdout.splitlines()

    ((_, rules), _) = parse_rules(entry["rules"][f"float on {shared}"])
    (expected,) = (name for low, high, name in rules if low <= 4096 < high)
    on_device, on_host = choices()
    name, _, reason = on_device.partition("|")
    assert name == expected
    assert reason.startswith(f"tuned for float on {shared}")
    # Which one is fastest, a busy machine may decide in another way; of the others streams are not in question.
    assert f" on 2 ranks on 1 node, {path}" in reason
    assert ("; the host waits: " in reason) == (name in ("ipc", "nccl"))
    assert "tuned" not in on_host
    # Each rank with a device of its own.
    assert not any("tuned" in choice for choice in choices(FAKECUDA_DEVICES="2"))


@pytest.mark.long
def test_devices_of_their_own_are_tuned_apart(tmp_path: Path) -> None:
    lines = job(3, tmp_path / "tuned.json", "allgather", "--sizes", "3k", FAKECUDA_DEVICES="3")
    assert any(line.startswith(f"moved on {MODEL}: allgather:") for line in lines)


@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
@pytest.mark.usefixtures("cuda")
@pytest.mark.extension
def test_candidates(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that can serve, when the ranks have found out what that is."""
    monkeypatch.setenv("FAKECUDA_DEVICES", "2" if own else "1")
    asked: Any = SimpleNamespace(
        collectives=("allreduce", "bcast"), dtypes=("float32",), sizes=(4096, 1 << 20), array="cupy"
    )

    def body() -> list[tuple[str, list[str]]]:
        world = mpicoll.world()
        fake_cuda.install().cuda.Device(world.rank if own else 0).use()
        team: Any = SimpleNamespace(comm=world, rank=world.rank, size=world.size)
        points = [point for points in tune_job.plan_points(team, asked) for point in points]
        return [(point.tuned_class, winners.list_candidates(point, 1 << 20)) for point in points]

    first, second = mpicoll.run_local(body, 2, timeout=60)
    assert first == second
    where = MODEL if own else f"{MODEL} shared by 2"
    assert [kind for kind, _ in first] == [f"float on {where}"] * 2 + [f"moved on {where}"] * 2
    for _, names in first:
        assert ("nccl" in names) is own
        assert {"ipc", "shm_pipelined"} <= set(names)
        assert not {"native", "cma"} & set(names)
    small, large, *_ = (names for _, names in first)
    assert {"shm_flat", "ring"} <= set(small)
    assert "shm_flat" not in large
    assert "shm_pipelined/256k" in large


def test_without_a_device_all_ranks_say_so_once(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    done = mpirun(
        2,
        *("-m", "mpicoll", "tune", "--device", "cuda", "--array", "cupy", "--output", path),
        **fake_cuda.environment(FAKECUDA_DEVICES="0"),
    )
    assert done.returncode == 2, done.stdout
    assert done.stdout.count("there is no CUDA device") == 1
    assert not path.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--array cupy", "tune: --array is for arrays on a device; add --device cuda"),
        ("--device cuda --array cupy --dtypes float32,bfloat16", "tune: cupy's arrays of bfloat16 are not measured"),
        ("barrier --device cuda --array cupy", "tune: no collective 'barrier' on a device; there are allreduce, "),
        ("barrel --device cuda --array cupy", "tune: no collective 'barrel'; there are allreduce, "),
    ],
)
def test_arguments_that_make_no_sense(
    words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", "--output", str(tmp_path / "tuned.json"), *words.split()]) == 2
    assert capsys.readouterr().err.startswith(f"mpicoll: {message}")
    assert not list(tmp_path.iterdir())
