"""Processes and MPI jobs that this program starts: their launcher, their environment and their time limit."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from mpicoll.named_tuple import NamedTuple
from mpicoll.proc_files import read_file
from mpicoll.transport import launch_env

if TYPE_CHECKING:
    from pathlib import Path

_NAMES = ("mpirun", "mpiexec")

_PARENTS = frozenset(
    (*_NAMES, "prterun", "prte", "prted", "orterun", "orted", "mpiexec.hydra", "hydra_pmi_proxy", "hydra_bstrap_proxy")
)
"""Programs that start ranks."""

_JOB_PREFIXES = ("OMPI_", "PMIX_", "PMI_", "PMI2_", "PRTE_", "MPI_LOCAL", "MV2_COMM_WORLD_")
"""Prefixes of variables by which a launcher passes a process its rank and its job."""

_SETTING_PREFIXES = ("OMPI_MCA_", "OMPI_ALLOW_RUN_AS_ROOT", "PMIX_MCA_", "PRTE_MCA_")
"""Prefixes of variables that are a user's settings, although they begin with ``_JOB_PREFIXES``."""

_JOB_MCA_PREFIXES = (
    *("OMPI_MCA_num_procs", "OMPI_MCA_initial_wdir", "OMPI_MCA_ess", "OMPI_MCA_orte_"),
    *("OMPI_MCA_PREFIXES", "OMPI_MCA_cpu_type"),
)
"""Prefixes of variables that look like settings, but are set by Open MPI's launcher within a job."""

_TORCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables set by torchrun, or for a process group of this program: its ranks are not those of the new job."""

_PLACEMENT_VARIABLES = (
    r"(SLURM|PBS|LSB|SGE|FLUX|COBALT)_|(PE_HOSTFILE|HYDRA_HOST_FILE)$"
    r"|(OMPI|PRTE)_MCA_(rmaps_|ras_|hwloc_(base|default)_(binding|cpu)|\w*host_?file)"
)
"""Variables by which a batch system or a user determines the hosts and cores of a job's ranks."""

_LIBRARIES = ("/usr/lib", "/usr/lib64", "/usr/local/lib")
"""Directories of the system's libraries."""

_GRACE = 1.0
"""Seconds between terminating a process and killing it."""

_TERMINATION_TIME = 15.0
"""Seconds in which a process that was terminated has ended with all its children."""

_OUTPUT_LIMIT = 1 << 20
"""Bytes that are kept of the stdout, and of the stderr, of a process."""

_RUN_MODULE = (
    "import json, runpy, sys; sys.path[:] = json.loads(sys.argv[1]); del sys.argv[:2];"
    " runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)

_QUERY = """\
import json, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
from mpicoll.transport.launcher import find_mapped_library
print(json.dumps([MPI.Get_library_version(), find_mapped_library(), mpi4py.__version__]))
"""


class MpiLibrary(NamedTuple):
    """The MPI library that mpi4py loads: its version string, its file, and mpi4py's version."""

    version: str
    path: str
    mpi4py: str

    @property
    def name(self) -> str:
        """The name and version of the library, in short."""
        return " ".join(self.version.split(",")[0].strip().splitlines()[0].split())


class RunResult(NamedTuple):
    """The end of a process.

    `status` is its exit status as a shell would return it, or None if it exceeded its time and was ended. `output`
    and `errors` are its stdout and stderr, or the end of these if they are long.
    """

    status: int | None
    output: str
    errors: str


def find_launcher() -> str | None:
    """Return the launcher of the MPI library that this process would use, as far as known, or None.

    It is the one that has started this process, else the one beside this Python, beside the library, or in PATH.
    """
    return next(list_launchers(), None)


def list_launchers() -> Iterator[str]:
    """Yield the launchers in the order in which :func:`find_launcher` prefers them."""
    # Not at module level: the first call of each rank of a job loads this module, and looks for no launcher.
    import shutil
    from pathlib import Path

    library = _find_library_file()
    places = [
        *(program.parent for _, program in find_parents()),
        Path(sys.executable).parent,
        *_directories_beside(library),
    ]
    for path in (*map(str, places), None, *os.get_exec_path()):
        for name in (*_debian_names(library), *_NAMES):
            if found := shutil.which(name, path=path):
                yield str(Path(found).absolute())


def _find_library_file() -> str:
    """Return the file of the MPI library that this process has loaded, or is known to load; or an empty string."""
    mapped = find_mapped_library()
    if mapped or not find_library.cache_info().currsize:
        return mapped
    known = find_library()
    return "" if isinstance(known, str) else known.path


def _debian_names(library: str) -> list[str]:
    """Return Debian's name of the launcher: Debian has several MPI libraries in one directory."""
    if re.search(r"/libmpich\.so", library):
        return ["mpirun.mpich"]
    return ["mpirun.openmpi"] if re.search(r"/libmpi\.so\.40", library) else []


def find_parents() -> list[tuple[int, Path]]:
    """Return process id and program of the launchers that have started this process as a rank."""
    from pathlib import Path

    found = []
    pid = os.getpid() if launch_env.is_launched(os.environ) else 0
    with suppress(OSError, ValueError, IndexError):  # processes of others, or no /proc
        while pid > 1:
            # PID (NAME) STATE PARENT ..., where the name may contain anything.
            pid = int(read_file(f"/proc/{pid}/stat").rpartition(")")[2].split()[1])
            program = Path(f"/proc/{pid}/exe").readlink()
            if program.name in _PARENTS:
                found.append((pid, program))
    return found


def _directories_beside(library: str) -> list[Path]:
    """Return possible directories of a library's launcher: ``bin`` beside the library's directory ``lib``."""
    from pathlib import Path

    return [one / "bin" for one in list(Path(library).parents)[1:4]] if library else []


def find_mapped_library() -> str:
    """Return the file of the MPI library that this process has loaded, or an empty string."""
    with suppress(OSError):
        for line in read_file("/proc/self/maps").splitlines():
            path = line.partition("/")[2]
            # The first condition is the faster one: hundreds of files are mapped.
            if "libmpi" in path and re.match(r"libmpi(ch|_cray|_ibm)?\.so", path.rpartition("/")[2]):
                return f"/{path}"
    return ""


@lru_cache(maxsize=1)
def find_library() -> MpiLibrary | str:
    """Return the MPI library of this process, or the one that it would load; or the reason why there is none.

    It takes a moment where MPI is not loaded yet: then another process loads it.
    """
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is not None:
        return MpiLibrary(mpi.Get_library_version(), find_mapped_library(), sys.modules["mpi4py"].__version__)
    command = [sys.executable, "-c", f"import json, sys; sys.path[:] = json.loads(sys.argv[1])\n{_QUERY}"]
    ended = run_bounded([*command, json.dumps(sys.path)], job_environment(os.environ, root=os.geteuid() == 0), 20.0)
    if ended.status != 0:
        return "no answer within 20 s" if ended.status is None else tail(ended.errors, 1)
    return MpiLibrary(*json.loads(ended.output.splitlines()[-1]))


def strip_job_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` without the variables by which this process belongs to a job."""
    inside = "OMPI_COMM_WORLD_SIZE" in environ
    return {
        name: value
        for name, value in environ.items()
        if (not name.startswith(_JOB_PREFIXES) or name.startswith(_SETTING_PREFIXES))
        and not (inside and name.startswith(_JOB_MCA_PREFIXES))
        and name != "MPICOLL_TRANSPORT"  # the ranks are MPI's, whatever this program is
        and name not in _TORCH_VARIABLES
    }


def job_environment(environ: Mapping[str, str], *, root: bool) -> dict[str, str]:
    """Return the environment of a new job.

    It is `environ` without the variables by which this process belongs to a job, and with the settings that Open
    MPI needs on a small machine, in a container and as root, where they are not set. `HOME` is among them: services
    and containers may have none, and no program of Open MPI starts without it.
    """
    # The ranks use all cores; a thread pool in each of them would compete for the same cores.
    defaults = {"OMP_NUM_THREADS": "1"}
    # More ranks than cores, for Open MPI 5 and 4. It then also yields while it waits.
    defaults |= {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "OMPI_MCA_rmaps_base_oversubscribe": "1"}
    # Where UCX finds no device, every shared window would print a warning.
    defaults |= {"OMPI_MCA_osc": "^ucx"}
    if "OMPI_MCA_btl_tcp_if_exclude" not in environ:
        # The ranks are on one machine. Open MPI does not accept both settings.
        defaults |= {"OMPI_MCA_btl_tcp_if_include": "lo"}
    if root:
        defaults |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if "HOME" not in environ:
        import pwd

        with suppress(KeyError):  # a user without an entry
            defaults |= {"HOME": pwd.getpwuid(os.geteuid()).pw_dir}
    return defaults | strip_job_variables(environ)


def local_job_environment(environ: Mapping[str, str], *, root: bool) -> dict[str, str]:
    """Return the environment of a small job on this machine and the cores of this process.

    Placement by `environ` and by the batch system is removed.
    """
    placed = {name: value for name, value in environ.items() if not re.match(_PLACEMENT_VARIABLES, name)}
    # A rank that is bound to one core has no second one to bind a rank to.
    unbound = {"PRTE_MCA_hwloc_default_binding_policy": "none", "OMPI_MCA_hwloc_base_binding_policy": "none"}
    return job_environment(placed, root=root) | unbound


def module_command(name: str, *arguments: str) -> list[str]:
    """Return the command that runs a module as ``python -m`` does, with the sys.path of this program."""
    return [sys.executable, "-c", _RUN_MODULE, json.dumps(sys.path), name, *arguments]


def guard_command(grace: float, directory: str) -> list[str]:
    """Return the command before that of a launcher: it ends all processes of the job if this process ends.

    The launcher has `grace` seconds between SIGTERM and SIGKILL. `directory` is removed if this process ends first.
    """
    from pathlib import Path

    guard = Path(__file__).parents[1] / "launch" / "guard.py"
    return [sys.executable, "-I", "-S", str(guard), str(os.getpid()), str(grace), directory]


def run_bounded(command: Sequence[str], environ: Mapping[str, str], seconds: float) -> RunResult:
    """Run `command`, the path of a program and its arguments, for at most `seconds`.

    None of its processes is left on return, nor after the death of this process.
    """
    import subprocess
    import tempfile

    with (
        tempfile.TemporaryDirectory(prefix="mpicoll-attempt-") as directory,
        tempfile.TemporaryFile() as output,
        tempfile.TemporaryFile() as errors,
    ):
        process = subprocess.Popen(
            [*guard_command(_GRACE, directory), *command],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
        status: int | None = None
        try:
            with suppress(subprocess.TimeoutExpired):
                status = process.wait(seconds)
        finally:
            if status is None:
                _terminate(process)
        return RunResult(status, _read_end(output), _read_end(errors))


def _terminate(process: Any) -> None:
    import signal
    import subprocess

    process.terminate()
    try:
        process.wait(_TERMINATION_TIME)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _read_end(file: Any) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - _OUTPUT_LIMIT))
    return str(file.read().decode(errors="replace"))


_REFUSALS = {
    "as root": "attempt to run as root",
    "slots": "not enough slots available",
}


def classify_refusal(errors: str) -> str | None:
    """Return the reason why Open MPI's launcher has started nothing, by its messages.

    It is ``as root``, or ``slots`` (there are fewer cores than ranks); None if it is neither.
    """
    return next((why for why, text in _REFUSALS.items() if text in errors.lower()), None)


def suggest_remedies(why: str, errors: str) -> tuple[str, str]:
    """Return the option of ``mpirun``, and the variables with their values, that avoid the refusal `why`.

    `why` is the result of :func:`classify_refusal` for `errors`.
    """
    if why == "as root":
        return "--allow-run-as-root", "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
    if "--map-by" in errors:  # Open MPI 5
        return "--map-by :OVERSUBSCRIBE", "PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe"
    return "--oversubscribe", "OMPI_MCA_rmaps_base_oversubscribe=1"


def find_unlinked_mpich(error: str) -> str | None:
    """Return the file of Debian's MPICH if mpi4py has failed with `error` since it looks for another name, or None."""
    if "libmpi.so.12" not in error and "MPI library" not in error:
        return None
    from pathlib import Path

    places = (one for place in map(Path, _LIBRARIES) for one in (place, *sorted(place.glob("*-linux-gnu*"))))
    return next((str(file) for place in places if (file := place / "libmpich.so.12").exists()), None)


def suggest_link(mpich: str) -> str:
    """Return the commands after which mpi4py loads Debian's MPICH, the result of :func:`find_unlinked_mpich`."""
    return (
        f"mkdir -p ~/.local/lib/mpich && ln -s {mpich} ~/.local/lib/mpich/libmpi.so.12, and export MPI4PY_MPIABI=mpich"
        " LD_LIBRARY_PATH=~/.local/lib/mpich"
    )


def tail(text: str, count: int) -> str:
    """Return the last lines of a process's output as one line, without lines that only frame them; or the error that
    Open MPI has stated first, of which they list the consequences."""
    stated = re.search(r"^\[\S+:\d+\] (Error: .+)$", text, re.MULTILINE)
    if stated is not None:
        return stated[1].strip()
    lines = [line.strip() for line in text.splitlines()]
    return " ".join([line for line in lines if line.strip("-= ") and "***" not in line][-count:]) or "no output"
