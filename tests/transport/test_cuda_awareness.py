"""Whether MPI takes device memory: tried on a fake device, which a host that touches its memory does not survive."""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import fake_cuda
from support.launch import ROOT, mpirun

from mpicoll.config import Config
from mpicoll.engine.cuda_probes import PROGRAM
from mpicoll.errors import SetupError
from mpicoll.transport import cuda_awareness, launcher, probes
from mpicoll.transport.cuda_awareness import CLASSES, CudaSupport, find_cuda_support

FAKE = ROOT / "tests" / "support" / "fakecuda"

FILE = "mpicoll/cuda-aware.json"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of verdicts, which isn't there yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cuda_awareness, "_cached", None)
    return tmp_path / "cache" / FILE


@pytest.fixture
def no_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be tried."""

    def refuse(*args: Any) -> Any:
        raise AssertionError(args)

    monkeypatch.setattr(cuda_awareness, "_probe_all", refuse)


@pytest.fixture
def pretend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have a script in the place of mpirun."""

    def make(*lines: str) -> None:
        path = tmp_path / "mpirun"
        path.write_text("\n".join(["#!/bin/sh", *lines]) + "\n")
        path.chmod(0o755)
        monkeypatch.setattr(launcher, "find_launcher", lambda: str(path))

    return make


def says(**what: str) -> str:
    return f"echo '{probes.MARK}{json.dumps(what)}'"


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a new process is."""
    monkeypatch.setattr(cuda_awareness, "_cached", None)


def of(found: CudaSupport) -> list[bool]:
    return [getattr(found, name) for name in CLASSES]


# --- what the user says


@pytest.mark.parametrize(
    ("text", "expected"),
    [("on", [True] * 3), ("off", [False] * 3), ("send", [True, False, False]), ("reduce, move", [False, True, True])],
)
@pytest.mark.usefixtures("no_trials")
def test_what_the_user_says_counts(text: str, expected: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    read = Config.read({"MPICOLL_CUDA_AWARE": text})
    monkeypatch.setattr(cuda_awareness, "config", lambda: read)
    found = find_cuda_support(PROGRAM, fresh=True)
    assert of(found) == expected
    assert found.source.startswith("MPICOLL_CUDA_AWARE=")
    assert set(found.evidence.values()) == {found.source}


def test_what_the_user_must_not_say() -> None:
    for text in ("yes", "", "send,recv", "on,send"):
        with pytest.raises(SetupError, match=r"must be auto, on, off, or some of send, move, reduce"):
            Config.read({"MPICOLL_CUDA_AWARE": text})


@pytest.mark.usefixtures("no_trials")
def test_nothing_is_believed(cache: Path) -> None:
    found = find_cuda_support(None)
    assert of(found) == [False] * 3
    assert found.source == "not probed"
    assert not cache.exists()


# --- trials


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """The children find the fake cupy."""
    monkeypatch.setattr(sys, "path", [str(FAKE), *sys.path])


@pytest.mark.slow
@pytest.mark.usefixtures("fake")
def test_an_mpi_that_takes_device_memory(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKECUDA_AWARE", "1")
    found = find_cuda_support(PROGRAM)
    assert of(found) == [True] * 3, found
    for name, way in zip(CLASSES, ("Sendrecv", "Alltoall", "Reduce_scatter_block"), strict=True):
        assert found.evidence[name].startswith("8 B, 64 KiB and 4 MiB of device memory have arrived")
        assert way in found.evidence[name]
    assert found.source == f"tried now, stored in {cache}"
    # Later runs are told without trying.
    forget(monkeypatch)
    monkeypatch.setattr(launcher, "find_launcher", lambda: None)
    later = find_cuda_support(PROGRAM)
    assert later == replace(found, source=later.source)
    assert later.source.endswith(f", from {cache}")
    assert later.source.startswith(f"tried on {json.loads(cache.read_text())['entries'][0]['tried']}")


@pytest.mark.slow
@pytest.mark.usefixtures("fake")
def test_an_mpi_that_does_not(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FAKECUDA_AWARE", raising=False)
    found = find_cuda_support(PROGRAM)
    assert of(found) == [False] * 3
    for name, step in zip(CLASSES, ("Send and Recv", "Bcast", "Allreduce"), strict=True):
        assert f"in {step} of 8 bytes" in found.evidence[name], found.evidence
        assert "egmentation fault" in found.evidence[name]
    # That, too, is kept; and tried anew where that is asked for.
    forget(monkeypatch)
    assert find_cuda_support(None).evidence == found.evidence
    monkeypatch.setattr(launcher, "find_launcher", lambda: None)
    assert find_cuda_support(PROGRAM).evidence == found.evidence
    assert find_cuda_support(PROGRAM, fresh=True).source == "can't be tried"


@pytest.mark.slow
@pytest.mark.usefixtures("fake")
def test_inside_of_a_job(cache: Path) -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(FAKE)!r}); from mpi4py import MPI;"
        " from mpicoll.transport import cuda_awareness;"
        f" found = cuda_awareness.find_cuda_support({PROGRAM!r});"
        " print(found.send, found.move, found.reduce, found.evidence)"
    )
    done = mpirun(1, "-c", program, FAKECUDA_AWARE="1", seconds=100)
    assert "True True True" in done.stdout, done.stdout
    # A program that no launcher has started goes by the same entry.
    assert of(find_cuda_support(None)) == [True] * 3


@pytest.mark.slow
def test_transfers_that_another_thread_completes() -> None:
    """MPI may take device memory in the threads of the program alone; but the poller has one of its own."""
    program = (
        "import sys, threading; from mpicoll.engine import cuda_probes; from mpicoll.transport import mpi, probes;"
        " test = mpi.MpiPending.test\n"
        "def elsewhere(self):\n"
        "    assert threading.current_thread() is threading.main_thread(), 'no context'\n"
        "    return test(self)\n"
        "mpi.MpiPending.test = elsewhere\n"
        "sys.exit(probes.run(cuda_probes._PROBES, 'send'))"
    )
    done = mpirun(2, "-c", program, **fake_cuda.environment(FAKECUDA_AWARE="1"))
    assert done.returncode != 0
    steps = [one["step"] for one in probes.read_reports(done.stdout) if "step" in one]
    assert steps[-1] == "Isend and Irecv that another thread completes of 8 bytes", done.stdout


def test_without_cupy(cache: Path) -> None:
    pytest.importorskip("mpi4py")
    if any((Path(place) / "cupy").is_dir() for place in sys.path):
        pytest.skip("there is a cupy")
    found = find_cuda_support(PROGRAM)
    assert of(found) == [False] * 3
    assert found.evidence["send"] == "it can't be tried: No module named 'cupy'"
    assert not cache.exists()


def test_without_a_launcher(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "find_launcher", lambda: None)
    found = find_cuda_support(PROGRAM)
    assert of(found) == [False] * 3
    assert found.evidence["move"].startswith("there is neither mpirun nor mpiexec")
    assert "MPICOLL_CUDA_AWARE" in found.evidence["move"]
    assert not cache.exists()


@pytest.mark.usefixtures("fake")
def test_a_launcher_of_another_mpi(pretend: Callable[..., None], cache: Path) -> None:
    pretend('shift; shift; OMPI_COMM_WORLD_SIZE=2 exec "$@"')
    found = find_cuda_support(PROGRAM)
    assert "belong to different MPI installations" in found.evidence["send"]
    pretend('shift; shift; exec "$@"')
    found = find_cuda_support(PROGRAM, fresh=True)
    assert of(found) == [False] * 3
    assert "the MPI library sees a world of 1" in found.evidence["send"]
    assert not cache.exists()


def test_a_launcher_that_fails(pretend: Callable[..., None], cache: Path) -> None:
    pretend("echo no slots >&2", "exit 3")
    found = find_cuda_support(PROGRAM)
    assert found.evidence["reduce"].endswith("mpirun: status 3: no slots")
    assert found.source == "can't be tried"
    assert not cache.exists()


def test_a_trial_that_hangs(pretend: Callable[..., None], cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_awareness, "_SECONDS", 1.5)
    pretend(says(step="Bcast of 8 bytes"), "exec sleep 1000")
    begin = time.monotonic()
    found = find_cuda_support(PROGRAM)
    assert time.monotonic() - begin < 60
    assert of(found) == [False] * 3
    assert found.evidence["move"] == "no end within 1.5 s, in Bcast of 8 bytes: no output"
    assert cache.exists()


def test_each_class_for_itself(pretend: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(
        says(step="Bcast of 8 bytes"),
        'case "$*" in',
        f"*' move') {says(wrong='wrong data')}; exit 1;;",
        f"*' send') {says(done='all right')};;",
        f"*) {says(done='all right')}; kill -9 $$;;",
        "esac",
    )
    found = find_cuda_support(PROGRAM)
    assert of(found) == [True, False, False]
    assert found.evidence["send"] == "all right"
    assert found.evidence["move"] == "wrong data"
    # Who crashes at the end would do so in each job.
    assert found.evidence["reduce"] == "status 137, at its end: no output"


def test_what_mpich_says_of_a_signal(pretend: Callable[..., None]) -> None:
    pretend(says(step="Bcast"), "echo TERMINATED: Segmentation fault '(signal 11)'", "echo see the FAQ", "exit 11")
    assert (
        find_cuda_support(PROGRAM).evidence["move"] == "status 11, in Bcast: TERMINATED: Segmentation fault (signal 11)"
    )


# --- the file


GOOD = {name: name == "send" for name in CLASSES}


def entry(**changes: Any) -> dict[str, Any]:
    depends = cuda_awareness._read_conditions()
    return {**depends, "good": GOOD, "evidence": dict.fromkeys(CLASSES, "seen"), "tried": "yesterday", **changes}


def put(file: Path, *entries: Any, **changes: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(
        json.dumps({"format": cuda_awareness.FORMAT, "version": cuda_awareness.VERSION, "entries": entries, **changes})
    )


@pytest.mark.usefixtures("no_trials")
def test_what_was_found_before(cache: Path) -> None:
    put(cache, "nonsense", entry(driver="another", good=dict.fromkeys(CLASSES, True)), entry())
    found = find_cuda_support(PROGRAM)
    assert of(found) == [True, False, False]
    assert found.source == f"tried on yesterday, from {cache}"


@pytest.mark.parametrize(
    "name", ["machine", "gpus", "driver", "mpi", "library", "mpi4py", "settings"], ids="another-{}".format
)
def test_what_was_found_elsewhere_does_not_count(name: str, cache: Path) -> None:
    assert name in cuda_awareness._read_conditions()
    put(cache, entry(**{name: "another"}))
    assert find_cuda_support(None).source == "not probed"


def test_settings_of_mpi_count(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "sm")
    put(cache, entry())
    assert find_cuda_support(None).send
    forget(monkeypatch)
    monkeypatch.setenv("UCX_TLS", "sm,cuda_copy")
    assert not find_cuda_support(None).send


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[" * 100_000,
        "[]",
        "null",
        '{"format": "mpicoll CUDA-aware MPI"}',
        '{"format": "mpicoll CUDA-aware MPI", "version": 2, "entries": {}}',
        '{"format": "mpicoll CUDA-aware MPI", "version": 2, "entries": [1, null, {"good": 1, "tried": ""}]}',
        '{"format": "mpicoll CUDA-aware MPI", "version": 99, "entries": []}',
        "\xff\xfe",
    ],
    ids=range(10),
)
def test_a_broken_file_is_written_anew(content: str, cache: Path, pretend: Callable[..., None]) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_bytes(content.encode("latin1"))
    assert find_cuda_support(None).source == "not probed"
    pretend(says(step="Bcast"), says(done="all right"))
    assert of(find_cuda_support(PROGRAM)) == [True] * 3
    (kept,) = json.loads(cache.read_text())["entries"]
    assert kept["good"] == dict.fromkeys(CLASSES, True)


def test_the_others_stay_in_the_file(cache: Path, pretend: Callable[..., None]) -> None:
    put(cache, *(entry(driver=str(number)) for number in range(150)), entry())
    pretend(says(step="Bcast"), says(done="all right"))
    find_cuda_support(PROGRAM, fresh=True)
    kept = json.loads(cache.read_text())["entries"]
    assert [one["driver"] for one in kept[:-1]] == [str(number) for number in range(51, 150)]
    assert kept[-1]["good"] == dict.fromkeys(CLASSES, True)
    assert list(cache.parent.iterdir()) == [cache]


def test_a_place_that_can_not_be_written(cache: Path, pretend: Callable[..., None]) -> None:
    cache.parents[1].write_text("a file")
    pretend(says(step="Bcast"), says(done="all right"))
    found = find_cuda_support(PROGRAM)
    assert of(found) == [True] * 3
    assert found.source == f"tried now, but {cache} can't be written: {os.strerror(errno.ENOTDIR)}"


def test_no_home(monkeypatch: pytest.MonkeyPatch, pretend: Callable[..., None]) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user without an entry
    pretend(says(step="Bcast"), says(done="all right"))
    found = find_cuda_support(PROGRAM)
    assert of(found) == [True] * 3
    assert "there is no home directory" in found.source
