"""mpicoll bench --device cuda, on a device that is only played."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from support import fake_cuda
from support.launch import ROOT, mpirun

from mpicoll.cli import main
from mpicoll.cli.bench import device_arrays, report
from mpicoll.cli.bench.cases import Case, Workload, wide
from mpicoll.cli.bench.measure import Point, Result


def bench(size: int, file: Path, *arguments: str | Path, **variables: str) -> tuple[str, dict[str, Any]]:
    """What a bench of `size` ranks on the device has printed, and what it has written to `file`."""
    done = mpirun(
        size,
        *("-m", "mpicoll", "bench", "--device", "cuda", "--array", "cupy", "--seconds", "0.01", "--json", file),
        *arguments,
        **fake_cuda.environment(COLUMNS="1000", **variables),
    )
    assert done.returncode == 0, done.stdout
    return done.stdout, json.loads(file.read_text())


@pytest.mark.parametrize("dtype", ["float32", "float16", "complex128", "int8"])
def test_arrays_of_a_case(cuda: ModuleType, dtype: str) -> None:
    """The same values as on the host, on the device; the oracle reads them there."""
    workload = Workload("allreduce", 4000, dtype, "sum", 1)
    on_host, on_device = Case(workload, 0, "numpy"), Case(workload, 0, "cuda cupy")
    assert type(on_device.x) is cuda.ndarray
    np.testing.assert_array_equal(wide(on_device.x), wide(on_host.x))
    assert not wide(on_device.out).any()
    device_arrays.arrays("cupy").copy(on_device.out, on_device.x)
    assert workload.check(0, on_device.out) is None
    assert workload.check_operand(0, on_device.x) is None
    on_device.reset()
    assert "elements are wrong" in str(workload.check(0, on_device.out))


def test_a_copy_is_done_when_the_call_returns(cuda: ModuleType) -> None:
    call, target = device_arrays.copying("cupy", 100)
    call()
    stream = cuda.cuda.Stream(non_blocking=True)
    with stream:
        assert (cuda.asnumpy(target) == 1).all()


@pytest.mark.slow
@pytest.mark.extension
def test_sweep(tmp_path: Path) -> None:
    text, found = bench(
        *(2, tmp_path / "found.json", "allreduce", "bcast", "reduce_scatter", "barrier", "--sizes", "4,100k"),
        *("--blocks", "2"),
    )
    assert found["device"]
    assert found["devices_of_this_node"] == 1
    assert found["settings"]["array"] == "cupy"
    for point in found["points"]:
        assert list(point["contestants"]) == ["mpicoll", "ipc", "nccl", "shm_flat", "shm_pipelined", "ring", "copy"]
        timed = {name for name, one in point["contestants"].items() if one["state"] == "timed"}
        if point["collective"] == "allreduce":
            assert timed == {"mpicoll", "ipc", "shm_flat", "shm_pipelined", "ring", "copy"}
        assert "mpicoll" in timed
        assert ("copy" in timed) is (point["collective"] != "barrier")
        assert all(min(point["contestants"][name]["blocks"]) > 0 for name in timed)
    small, large = (one["contestants"]["mpicoll"]["takes"] for one in found["points"][:2])
    assert (small, large) == ("ipc", "ipc")
    assert "allreduce, 2 ranks, float32 sum cuda cupy" in text
    assert "nccl: allreduce: algorithm 'nccl' can't serve this: ranks 0 and 1 share a device" in text


@pytest.mark.long
def test_plans_of_three_ranks_on_their_own_devices(tmp_path: Path) -> None:
    _, found = bench(
        *(3, tmp_path / "found.json", "allgather", "--sizes", "64k", "--plan", "--blocks", "2", "--dtype", "int16"),
        FAKECUDA_DEVICES="3",
    )
    assert found["devices_of_this_node"] == 3
    assert found["points"][0]["contestants"]["mpicoll"]["verified"]


@pytest.mark.slow
def test_a_wrong_result_ends_it(tmp_path: Path) -> None:
    script = tmp_path / "wrong.py"
    script.write_text(WRONG)
    done = mpirun(2, script, **fake_cuda.environment())
    assert done.returncode == 1, done.stdout
    assert "mpicoll is wrong: allreduce of 4096 B, float32, sum, on rank 1 of 2: 1 of 1024 elements" in done.stdout


WRONG = """
import sys

import cupy
import numpy as np

import mpicoll
from mpicoll.cli import main

right = mpicoll.allreduce


def wrong(x, *args, **keywords):
    result = right(x, *args, **keywords)
    if mpicoll.world().rank == 1 and result.size > 100:
        cupy.copyto(result[77:78], cupy.array(np.array([1e6], np.float32)))
    return result


mpicoll.allreduce = wrong
sys.exit(main("bench --device cuda --array cupy --sizes 4,4k --seconds 0.01".split()))
"""


def test_table_has_the_bound_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from mpicoll.cli import formatting

    monkeypatch.setenv("COLUMNS", "1000")
    results = {
        name: Result("timed", phase="mpi", calls=1, blocks=[time], takes="ipc" if name == "mpicoll" else "")
        for name, time in (("mpicoll", 4e-6), ("ring", 8e-6), ("gloo", 40e-6), ("copy", 2e-6))
    }
    points = [Point(Workload("allreduce", 1 << 20, "float32", "sum", 2), results)]
    formatting.console().print(report.table(points, first_peer="gloo", bound="copy", settings="float32"))
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines[1] == "size mpicoll / gloo / copy GB/s takes ring / gloo GB/s gloo GB/s copy / gloo GB/s"
    assert lines[3] == "1 MiB 4.00 µs 0.10 2.00 262 ipc 8.00 µs 0.20 131 40.0 µs 26.2 2.00 µs 0.05 524"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--array cupy", "--array is for arrays on a device"),
        ("--device cuda --like torch", "--like is for arrays on the host"),
        ("--device cuda --registered", "--registered is for arrays on the host"),
        ("overlap --device cuda", "bench overlap: --device is for sweep only"),
        ("--device cuda --array cupy --against mpi4py", "mpi4py is for arrays on the host"),
        ("--device cuda --array cupy --against gloo", "gloo and nccl work on tensors; add --array torch"),
        ("--device cuda --array cupy --dtype bfloat16", "add --array torch"),
    ],
)
def test_arguments_that_make_no_sense(arguments: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert text in err
    assert err.count("\n") == 1


def test_without_a_device_all_ranks_say_so_once() -> None:
    done = mpirun(
        2,
        *("-m", "mpicoll", "bench", "--device", "cuda", "--array", "cupy", "--sizes", "4"),
        **fake_cuda.environment(FAKECUDA_DEVICES="0"),
    )
    assert done.returncode == 2, done.stdout
    assert done.stdout.count("there is no CUDA device") == 1


def test_the_gpu_script_says_that_nothing_was_verified() -> None:
    import shutil
    import subprocess

    if shutil.which("nvidia-smi"):
        pytest.skip("there is a GPU")
    for stage in ([], ["bench", "4", "x.json"]):
        done = subprocess.run(
            ["bash", "ci/gpu.sh", *stage], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 1
        assert done.stdout == "mpicoll: no NVIDIA GPU here (the driver knows of none), so nothing was verified\n"
    done = subprocess.run(
        ["bash", "ci/gpu.sh", "nonsense"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
