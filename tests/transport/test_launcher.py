"""Processes and jobs that a program starts."""

from __future__ import annotations

import os
import pwd
import sys
import time
from pathlib import Path

import pytest
from support.launch import mpirun

from mpicoll.transport import launcher


def script(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["#!/bin/sh", *lines]) + "\n")
    path.chmod(0o755)
    return path


def running(word: str) -> list[int]:
    """The processes that have `word` in their command line."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes().split(b"\0")
        except OSError:
            continue
        if word.encode() in words:
            found.append(int(file.parent.name))
    return found


def test_what_a_process_says_and_how_it_ends() -> None:
    code = "import sys; print('out', sys.stdin.read()); sys.stderr.write('err'); sys.exit(7)"
    assert launcher.run_bounded([sys.executable, "-c", code], os.environ, 20) == launcher.RunResult(7, "out \n", "err")


def test_a_process_that_is_killed() -> None:
    ended = launcher.run_bounded([sys.executable, "-c", "import os; os.kill(os.getpid(), 11)"], os.environ, 20)
    assert ended.status == 128 + 11


def test_nothing_is_left_of_what_takes_too_long(tmp_path: Path) -> None:
    # A process that does not listen, with a child in a session of its own.
    long = f"1000.{os.getpid()}"
    program = script(tmp_path / "stubborn", "trap '' TERM", "echo here", f"setsid sleep {long} &", f"sleep {long}")
    begin = time.monotonic()
    ended = launcher.run_bounded([str(program)], os.environ, 0.5)
    assert ended == launcher.RunResult(None, "here\n", "")
    assert time.monotonic() - begin < 60
    assert running(long) == []


def test_only_the_end_of_much_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_OUTPUT_LIMIT", 100)
    ended = launcher.run_bounded([sys.executable, "-c", "print('x' * 1000 + 'end')"], os.environ, 20)
    assert len(ended.output) == 100
    assert ended.output.endswith("end\n")


def test_a_module_runs_with_the_same_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fromhere.py").write_text("import sys\nprint(__name__, sys.argv[1:])\n")
    monkeypatch.syspath_prepend(tmp_path)
    ended = launcher.run_bounded(launcher.module_command("fromhere", "a b", '"'), os.environ, 20)
    assert ended.output == "__main__ ['a b', '\"']\n"


def test_the_library_that_python_would_load() -> None:
    library = launcher.find_library()
    assert not isinstance(library, str)
    assert library.name.split()[0] in ("Open", "MPICH", "Intel(R)", "MVAPICH")
    assert Path(library.path).exists()
    assert library.mpi4py


def test_a_library_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mpi4py.py").write_text("raise RuntimeError('cannot load MPI library')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    launcher.find_library.cache_clear()
    try:
        assert launcher.find_library() == "RuntimeError: cannot load MPI library"
    finally:
        launcher.find_library.cache_clear()


def test_which_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python, library, path = tmp_path / "a" / "bin", tmp_path / "b" / "lib" / "libmpi.so.40", tmp_path / "c"
    monkeypatch.setattr(sys, "executable", str(python / "python"))
    monkeypatch.setattr(launcher, "find_mapped_library", lambda: str(library))
    monkeypatch.setattr(launcher.launch_env, "is_launched", lambda environ: False)
    monkeypatch.setenv("PATH", str(path))
    assert launcher.find_launcher() is None
    for place, name in ((path, "mpirun"), (tmp_path / "b" / "bin", "mpiexec"), (python, "mpirun")):
        made = script(place / name)
        assert launcher.find_launcher() == str(made)


def test_the_launcher_of_this_job(tmp_path: Path) -> None:
    # A copy of this Python, with no launcher beside it, and none in PATH.
    program = (
        "import os, sys; from mpicoll.transport import launcher; sys.executable = '/nowhere/python';"
        " launcher.find_mapped_library = lambda: ''; os.environ['PATH'] = '/nowhere'; print(launcher.find_launcher())"
    )
    done = mpirun(1, "-c", program)
    found = Path(done.stdout.split()[-1])
    assert done.returncode == 0
    assert found.name in ("mpirun", "mpiexec")
    assert found.exists()


def test_the_environment_of_a_job_on_this_machine() -> None:
    job = {"PMIX_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_MCA_PREFIXES": "mca,opal", "MPICOLL_TRANSPORT": "local"}
    elsewhere = {"SLURM_JOB_NODELIST": "n[1-9]", "PBS_NODEFILE": "f", "OMPI_MCA_orte_default_hostfile": "h"}
    elsewhere |= {"PRTE_MCA_rmaps_default_mapping_policy": "ppr:1:node", "PRTE_MCA_prte_default_hostfile": "h"}
    own = {"HOME": "/home", "OMPI_MCA_pml": "ucx", "UCX_TLS": "sm,cuda", "OMPI_MCA_osc": "rdma", "SLURMY": "1"}
    made = launcher.local_job_environment(job | elsewhere | own, root=False)
    assert own.items() <= made.items()
    assert set(made) & {*job, *elsewhere} == {"PRTE_MCA_rmaps_default_mapping_policy"}
    assert made["PRTE_MCA_rmaps_default_mapping_policy"] == ":oversubscribe"
    assert made["PRTE_MCA_hwloc_default_binding_policy"] == "none"
    assert "OMPI_ALLOW_RUN_AS_ROOT" not in made
    assert launcher.local_job_environment({}, root=True)["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] == "1"


def test_a_job_has_a_home_directory() -> None:
    """Open MPI's programs end without one, as services and containers may start them."""
    assert launcher.job_environment({}, root=False)["HOME"] == pwd.getpwuid(os.geteuid()).pw_dir
    assert launcher.job_environment({"HOME": "/mine"}, root=False)["HOME"] == "/mine"


def test_last_lines() -> None:
    assert launcher.tail("a\n b \n-----\n\nc\n====\n[1] *** End ***\n", 2) == "b c"
    assert launcher.tail("\n---\n", 2) == "no output"


_SLOTS = """\
There are not enough slots available in the system to satisfy the 4
slots that were requested by the application:

Alternatively, you can use the {} option to ignore the
number of available slots when deciding the number of processes to
launch.
"""


@pytest.mark.parametrize(
    ("said", "why", "remedies"),
    [
        (
            "prterun has detected an attempt to run as root.\n",
            "as root",
            ("--allow-run-as-root", "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"),
        ),
        (
            _SLOTS.format("--map-by :OVERSUBSCRIBE"),
            "slots",
            ("--map-by :OVERSUBSCRIBE", "PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe"),
        ),
        (_SLOTS.format("--oversubscribe"), "slots", ("--oversubscribe", "OMPI_MCA_rmaps_base_oversubscribe=1")),
    ],
    ids=["root", "slots-of-5", "slots-of-4"],
)
def test_why_mpirun_starts_nothing(said: str, why: str, remedies: tuple[str, str]) -> None:
    assert launcher.classify_refusal(said) == why
    assert launcher.suggest_remedies(why, said) == remedies
    assert launcher.classify_refusal("prterun could not access the executable") is None


def test_the_names_of_debian(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its libraries are in one directory, and `mpirun` belongs to one of them."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "a" / "python"))
    monkeypatch.setattr(launcher.launch_env, "is_launched", lambda environ: False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    made = [script(tmp_path / "bin" / name) for name in ("mpirun.mpich", "mpirun.openmpi", "mpirun")]
    names = ("libmpich.so.12.2.2", "libmpi.so.40.30.4", "libmpi_cray.so.12")
    for library, expected in zip(names, made, strict=True):
        file = tmp_path / "lib" / "x86_64-linux-gnu" / library
        monkeypatch.setattr(launcher, "find_mapped_library", lambda file=file: str(file))
        assert launcher.find_launcher() == str(expected)


def test_mpich_by_the_name_of_debian(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = "ImportError: libmpi.so.12: cannot open shared object file: No such file or directory"
    monkeypatch.setattr(launcher, "_LIBRARIES", (tmp_path,))
    assert launcher.find_unlinked_mpich(error) is None
    file = tmp_path / "x86_64-linux-gnu" / "libmpich.so.12"
    file.parent.mkdir()
    file.touch()
    assert launcher.find_unlinked_mpich(error) == str(file)
    assert launcher.find_unlinked_mpich("RuntimeError: cannot load MPI library") == str(file)
    assert launcher.find_unlinked_mpich("ModuleNotFoundError: No module named 'mpi4py'") is None
