"""``mpicoll run``: the words of its command line, the launcher that it takes, and the end of its jobs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from io import BytesIO
from pathlib import Path
from threading import Event, Timer
from typing import Any

import pytest
from support.launch import ROOT

from mpicoll.cli import main, run
from mpicoll.cli.run import Words, split_words
from mpicoll.errors import ArgumentError, SetupError
from mpicoll.launch import job_command
from mpicoll.launch.job_command import find_matching_launcher, make_job_command
from mpicoll.transport import launcher
from mpicoll.transport.launcher import MpiLibrary

OPEN_MPI_5 = "Open MPI v5.0.11, package: Open MPI, ident: 5.0.11"
OPEN_MPI_4 = "Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4"
MPICH = "MPICH Version:      4.0.2\nMPICH Release date: Thu Apr  7"
INTEL = "Intel(R) MPI Library 2021.14 for Linux* OS\n"
ANSWERS = {
    OPEN_MPI_5: "mpirun (Open MPI) 5.0.11\n",
    OPEN_MPI_4: "mpirun (Open MPI) 4.1.4\n",
    MPICH: "HYDRA build details:\n    Version:                                 4.0.2\n",
    INTEL: "Intel(R) MPI Library for Linux* OS, Version 2021.14 Build 20241121 (id: e7829d6)\n",
}


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("-np 4 a.py -np 5", ("-np 4", "", "a.py -np 5")),
        ("a.py", ("", "", "a.py")),
        ("--np=3 --no-tag -m mod x", ("--np=3 --no-tag", "", "-m mod x")),
        ("-n 2 prog --dry-run", ("-n 2", "", "prog --dry-run")),
        ("--mca btl tcp,self -np 2 a.py b.py", ("-np 2", "--mca btl tcp,self", "a.py b.py")),
        ("--map-by node --dry-run python3.12 x", ("--dry-run", "--map-by node", "python3.12 x")),
        ("--hostfile hosts -- prog --mca", ("", "--hostfile hosts", "prog --mca")),
        ("--map-by node ./prog", ("", "--map-by node ./prog", "")),
        ("-np 2", ("-np 2", "", "")),
    ],
)
def test_words_are_separated(line: str, parts: tuple[str, str, str]) -> None:
    assert split_words(line.split()) == Words(*(part.split() for part in parts))


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process belongs to no job and no batch job, whatever earlier tests have done."""
    monkeypatch.setattr(run.launch_env, "is_launched", lambda environ: False)
    for name in job_command._BATCH_HOSTS:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def launchers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outside: None) -> dict[str, str]:
    """One launcher of each MPI library, in directories by the library's version string."""
    paths = {}
    for number, (library, answer) in enumerate(ANSWERS.items()):
        path = tmp_path / str(number) / "mpirun"
        path.parent.mkdir()
        path.write_text(f"#!/bin/sh\ncat <<'END'\n{answer}END\n")
        path.chmod(0o755)
        paths[library] = str(path)
    monkeypatch.setattr(launcher, "list_launchers", lambda: iter(paths.values()))
    return paths


@pytest.mark.parametrize(
    ("library", "options"),
    [
        (OPEN_MPI_5, "--output rank"),
        (OPEN_MPI_4, "--tag-output"),
        (MPICH, "-prepend-rank"),
        (INTEL, "-l"),
    ],
)
def test_the_launcher_is_that_of_the_library(
    library: str, options: str, launchers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "find_library", lambda: MpiLibrary(library, "/lib/libmpi.so", "4.1"))
    command = make_job_command({}, ["prog", "x"], 3)
    assert command.words == [launchers[library], "-np", "3", *options.split(), "prog", "x"]
    assert make_job_command({}, ["prog"], 3, tag=False).words == [launchers[library], "-np", "3", "prog"]


def test_debian_calls_open_mpi_by_another_name(launchers: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where mpirun is that of MPICH, mpirun.openmpi is left, which prints the name under which it was called."""
    path = Path(launchers[OPEN_MPI_4])
    path.write_text(path.read_text().replace("mpirun (Open MPI)", "mpirun.openmpi (OpenRTE)"))
    monkeypatch.setattr(launcher, "find_library", lambda: MpiLibrary(OPEN_MPI_4, "/lib/libmpi.so.40", "4.1"))
    found, family = find_matching_launcher()
    assert found == str(path)
    assert family is not None
    assert family.name == "Open MPI 4"


def test_no_launcher_of_the_library(launchers: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        launcher, "find_library", lambda: MpiLibrary("Open MPI v5.1.0, package", "/lib/libmpi.so", "4.1")
    )
    with pytest.raises(SetupError, match=r"loads Open MPI v5.1.0 \(/lib/libmpi.so\), but no launcher belongs to it"):
        find_matching_launcher()
    monkeypatch.setattr(launcher, "list_launchers", lambda: iter(()))
    with pytest.raises(SetupError, match="neither mpirun nor mpiexec"):
        find_matching_launcher()
    monkeypatch.setattr(launcher, "find_library", lambda: "cannot open shared object file")
    with pytest.raises(SetupError, match="can't load an MPI library"):
        find_matching_launcher()
    monkeypatch.setattr(launcher, "find_unlinked_mpich", lambda error: "/usr/lib/libmpich.so.12")
    with pytest.raises(SetupError, match=r"ln -s /usr/lib/libmpich.so.12 .*MPI4PY_MPIABI=mpich"):
        find_matching_launcher()


def test_a_launcher_that_fails(launchers: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "find_library", lambda: MpiLibrary(OPEN_MPI_5, "/lib/libmpi.so", "4.1"))
    path = Path(launchers[OPEN_MPI_5])
    answer = path.read_text()
    path.write_text("#!/bin/sh\necho 'Error: no such thing' >&2\necho more >&2\nexit 3\n")
    said = r"no launcher is known to belong to it: found .*--version failed with status 3: Error: no such thing\),"
    with pytest.raises(SetupError, match=said):
        find_matching_launcher()
    # As Open MPI does without a home directory.
    path.write_text(answer.replace("\n", '\n[ -n "$HOME" ] || exit 1\n', 1))
    monkeypatch.delenv("HOME")
    assert find_matching_launcher()[0] == str(path)


def test_settings_on_this_machine_and_on_others(launchers: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "find_library", lambda: MpiLibrary(OPEN_MPI_5, "/lib/libmpi.so", "4.1"))
    here = make_job_command({"MPICOLL_TIMEOUT": "5"}, ["prog"], None, root=True)
    assert here.words[1:3] == ["-np", str(len(os.sched_getaffinity(0)))]
    assert "-x" not in here.words
    assert here.variables["OMPI_ALLOW_RUN_AS_ROOT"] == "1"
    assert here.variables["OMPI_MCA_btl_tcp_if_include"] == "lo"
    for environ, options in (({}, ["--host", "a:2,b:2"]), ({"SLURM_JOB_NODELIST": "a,b"}, [])):
        there = make_job_command({"MPICOLL_TIMEOUT": "5"} | environ, ["prog"], None, options)
        assert "OMPI_MCA_btl_tcp_if_include" not in there.variables
        assert there.variables["PRTE_MCA_rmaps_default_mapping_policy"] == "slot:oversubscribe"
        assert there.words == [
            *(launchers[OPEN_MPI_5], "--output", "rank", "-x", "OMP_NUM_THREADS", "-x", "MPICOLL_TIMEOUT"),
            *(*options, "prog"),
        ]
    # A variable that is set already stays.
    assert "OMP_NUM_THREADS" not in make_job_command({"OMP_NUM_THREADS": "3"}, ["prog"], 1).variables


def test_hosts_of_pbs_and_lsf(tmp_path: Path, launchers: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Open MPI gets them as options; MPICH and Intel MPI find them by themselves, in any build."""
    hosts = tmp_path / "hosts"
    hosts.write_text("a\na\nb.site\n")
    pbs = {"PBS_JOBID": "7.server", "PBS_NODEFILE": str(hosts)}
    lsf = {"LSB_JOBID": "7", "LSB_HOSTS": "a a b.site"}
    for library in (OPEN_MPI_5, OPEN_MPI_4, MPICH, INTEL):
        monkeypatch.setattr(launcher, "find_library", lambda named=library: MpiLibrary(named, "/lib/libmpi.so", "4.1"))
        own = ["--host", "a:2,b.site:1"] if library.startswith("Open MPI") else []
        for environ in (pbs, lsf, lsf | {"LSB_MCPU_HOSTS": "a 2 b.site 1"}, lsf | {"LSB_MCPU_HOSTS": "a 2 b.site"}):
            words = make_job_command(environ, ["prog"], None).words
            assert "-np" not in words
            assert [words[at : at + 2] for at, word in enumerate(words) if word == "--host"] == [own] * bool(own)
            options = ["--hostfile", "mine"]
            assert "--host" not in make_job_command(environ, ["prog"], None, options).words
        assert "--host" not in make_job_command(pbs | {"PBS_NODEFILE": "gone"}, ["prog"], None).words


def test_a_small_dev_shm(launchers: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "find_library", lambda: MpiLibrary(OPEN_MPI_5, "/lib/libmpi.so", "4.1"))
    room = os.statvfs("/dev/shm")
    enough = room.f_bavail * room.f_frsize // job_command.SHM_PER_RANK
    name = "OMPI_MCA_btl_sm_backing_directory"
    assert name not in make_job_command({}, ["prog"], max(enough, 1)).variables
    assert name in make_job_command({}, ["prog"], enough + 1).variables
    assert name not in make_job_command({name: "/x"}, ["prog"], enough + 1).variables


def test_errors_before_anything_starts(
    launchers: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launcher, "find_library", lambda: MpiLibrary(OPEN_MPI_5, "/lib/libmpi.so", "4.1"))
    monkeypatch.setattr(run, "_run_job", lambda *_, **__: pytest.fail("a job was started"))
    for line, said in (
        ("-np 2 nothing.py", "there is no file nothing.py in"),
        ("-np 2 -m", "-m needs the name of a module"),
        ("--map-by node ./prog", "there is no program in '--map-by node ./prog': put -- before it"),
    ):
        assert main(["run", *line.split()]) == 2
        assert said in capsys.readouterr().err
    for line in ("", "-np 2", "-np 0 a.py", "-np two a.py"):
        with pytest.raises(SystemExit, match="2"):
            main(["run", *line.split()])
    with pytest.raises(ArgumentError, match="no file"):
        make_job_command({}, ["nothing.py"], 2)
    monkeypatch.setattr(run.launch_env, "is_launched", lambda environ: True)
    with pytest.raises(SetupError, match="a job within a job"):
        main(["run", "-np", "2", "prog"])


def test_help_fits_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        main(["run", "--help"])
    shown = capsys.readouterr().out
    assert "-np N" in shown
    assert max(map(len, shown.splitlines())) <= 80


def start(*words: str, **variables: str) -> subprocess.Popen[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PMIX_", "PMI_", "OMPI_COMM"))}
    return subprocess.Popen(
        [sys.executable, "-m", "mpicoll", "run", *words],
        env=environ | {"PYTHONPATH": str(ROOT)} | variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


PROGRAM = """\
import os, sys, time
from pathlib import Path
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
print("rank", rank, sys.argv[1:], flush=True)
printed = Path(__file__).with_name("printed")
if rank == 0:
    printed.touch()
if sys.argv[1] == "fail" and rank == 1:
    deadline = time.monotonic() + 40
    while not printed.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.3)  # the launcher may forward no output after a failure
    raise ValueError("no")
if sys.argv[1] == "fail" or sys.argv[1] == "wait":
    time.sleep(60)
"""


def test_output_and_failure(tmp_path: Path) -> None:
    """The wrong launcher first in PATH, a rank that fails before MPI starts, and a rank before each line."""
    wrong = tmp_path / "bin"
    wrong.mkdir()
    (wrong / "mpirun").write_text("#!/bin/sh\nexit 77\n")
    (wrong / "mpirun").chmod(0o755)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    before = time.monotonic()
    job = start("-np", "2", str(program), "fail", "-np", PATH=f"{wrong}{os.pathsep}{os.environ['PATH']}")
    output, errors = job.communicate(timeout=60)
    assert time.monotonic() - before < 50
    assert job.returncode == 1, errors
    assert sorted(line for line in output.splitlines() if "rank" in line) == [
        "[0] rank 0 ['fail', '-np']",
        "[1] rank 1 ['fail', '-np']",
    ]
    traced = [line for line in errors.splitlines() if line.startswith("[1]")]
    assert traced[0] == "[1] Traceback (most recent call last):"
    assert "program.py" in traced[1]
    assert str(program) in traced[1]
    assert "[1] ValueError: no" in traced


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_no_rank_is_left(number: signal.Signals, tmp_path: Path) -> None:
    program, mark = tmp_path / "program.py", str(uuid.uuid4())
    program.write_text(PROGRAM)
    job = start("-np", "2", "--no-tag", str(program), "wait", MPICOLL_TEST_MARK=mark)
    assert job.stdout is not None
    assert sorted(job.stdout.readline() for _ in range(2)) == ["rank 0 ['wait']\n", "rank 1 ['wait']\n"]
    job.send_signal(number)
    _, errors = job.communicate(timeout=60)  # until no process of the job holds its output
    assert job.returncode == (128 + number if number == signal.SIGTERM else -number), errors
    deadline = time.monotonic() + 20
    while any(has_mark(path, mark) for path in Path("/proc").glob("[0-9]*/environ")):
        assert time.monotonic() < deadline
        time.sleep(0.05)


STUCK = """\
import sys, time, mpicoll, numpy as np
from mpicoll.engine.diagnostics import abort, late_imports
abort._LONG_WAIT = 0.0
late_imports.load_analysis()
rank = mpicoll.world().rank
mpicoll.barrier()
print("up", flush=True)
if rank == 1:
    time.sleep(60)
mpicoll.allreduce(np.ones(3))
"""


@pytest.mark.slow
def test_ranks_that_the_launcher_ends_report_what_they_wait_for(tmp_path: Path) -> None:
    """Open MPI 5's launcher leaves them a quarter of a second, which may be too little while the machine is busy."""
    program = tmp_path / "program.py"
    program.write_text(STUCK)
    for _ in range(5):
        job = start("-np", "2", "--no-tag", str(program), MPICOLL_REPORT=str(tmp_path))
        assert job.stdout is not None
        assert [job.stdout.readline() for _ in range(2)] == ["up\n"] * 2
        time.sleep(0.2)  # in which rank 0 calls the collective
        job.send_signal(signal.SIGTERM)
        _, errors = job.communicate(timeout=60)
        assert job.returncode == 128 + signal.SIGTERM, errors
        if list(tmp_path.glob("mpicoll-report-*.txt")):
            break
    assert "mpicoll: ranks 0 and 1 of 2 were ended by SIGTERM\n" in errors
    assert "waits for rank 1, which has not called it" in errors
    [report] = tmp_path.glob("mpicoll-report-*.txt")
    assert str(report) in errors


def has_mark(environ: Path, mark: str) -> bool:
    try:
        return mark.encode() in environ.read_bytes()
    except OSError:
        return False


def test_the_rank_before_each_line() -> None:
    receive, send = os.pipe()
    shown = BytesIO()
    with os.fdopen(receive, "rb", buffering=0) as source:
        output = run._Output(source, shown)
        parts = (b"[1]<std", b"out>: a\n[0,3]<stderr>:b\n[2] c", b"[2] \n[2] \n[")
        for part in (*parts, b"0]<stdout>: 1%\r2%", b"\n[1] x[1] \n[1] y\r", b"[1]"):
            os.write(send, part)
            time.sleep(0.01)
        os.close(send)
        output.join()
    assert shown.getvalue() == b"[1] a\n[3] b\n[2] c\n[2] \n[0] 1%\r2%\n[1] x\n[1] y\r"


@pytest.mark.parametrize(("tag", "left"), [(b"[1,0]<stdout>:", b""), (b"[0] ", b"[0] "), (b"[0]<stdout>: ", b"")])
def test_the_rank_before_each_piece(tag: bytes, left: bytes) -> None:
    """Of programs whose output is not buffered; the parts are read as they come."""
    whole = tag + b"  text " + tag + b"[" + tag + b"\n" + tag + b"[0, 1]" + tag + b"\n"
    for size in (1, 2, 3, 5, 7, 11, 100):
        receive, send = os.pipe()
        shown = BytesIO()
        with os.fdopen(receive, "rb", buffering=0) as source:
            output = run._Output(source, shown)
            for at in range(0, len(whole), size):
                os.write(send, whole[at : at + size])
                time.sleep(0.002)
            os.close(send)
            output.join()
        assert shown.getvalue() == b"[0]   text %b[\n[0] [0, 1]\n" % left


def test_output_that_is_read_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a pipe that is held open without output ends the wait for the end of it."""
    monkeypatch.setattr(run, "_GRACE", 0.1)
    monkeypatch.setattr(run, "_JOIN_INTERVAL", 0.01)
    read, goes_on = Event(), Event()

    class Slow(BytesIO):
        def write(self, data: Any) -> int:
            read.set()
            assert goes_on.wait(20)
            return super().write(data)

    shown, (receive, send) = Slow(), os.pipe()
    with os.fdopen(receive, "rb", buffering=0) as source:
        output = run._Output(source, shown)
        os.write(send, b"text\n")
        assert read.wait(20)
        timer = Timer(0.5, goes_on.set)
        timer.start()
        output.join()
        assert shown.getvalue() == b"text\n"
        os.close(send)
