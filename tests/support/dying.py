"""Jobs in which one rank dies: the expected behaviour and the observed one.

For ci/deaths.py and tests/engine/diagnostics/test_deaths.py.

A case is a kind of death, its moment, the number of ranks and the victim among them. As a program, this is run by each
rank of such a job.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

_ROOT = Path(__file__).resolve().parents[2]
_MARK = "MPICOLL_DEATHS_MARK"
_TEXT = "died on purpose"

BOUND = 10.0
"""Seconds after the death within which the job is over, with every process of it."""

KINDS = {
    "exception": rf"ValueError: {_TEXT}",
    "exit3": r"status 3\b",
    "_exit3": r"status 3\b",
    "_exit0": r"status 0\b",
    "TERM": "SIGTERM",
    "INT": "SIGINT|KeyboardInterrupt|interrupted",
    "KILL": "SIGKILL",
    "SEGV": "SIGSEGV",
    "ABRT": "SIGABRT",
}
"""Names of the kinds of death in the first line of the output."""

_FAR = r"ended without notice: killed, or ended by os\._exit"
"""The same of a process whose status no other rank can read: it was the only one on its host."""

OUTSIDE = ("import", "before", "native", "schedule", "shared", "background", "p2p")
"""The victim dies while the others wait for it: in making the world, in their first collective, in …"""

INSIDE = ("in native", "in schedule", "in shared", "in background", "in p2p")
"""The victim waits in the operation itself, as another rank keeps away from it."""

MOMENTS = OUTSIDE + INSIDE

_SIGNALS = {"TERM": signal.SIGTERM, "INT": signal.SIGINT, "KILL": signal.SIGKILL, "ABRT": signal.SIGABRT}


@dataclass(frozen=True)
class Case:
    """The death of `victim`."""

    kind: str
    moment: str
    size: int
    victim: int

    def __str__(self) -> str:
        return f"{self.kind} {self.moment.replace(' ', '-')} {self.victim}/{self.size}"


def matrix() -> Iterator[Case]:
    """Every case: first all of 3 ranks, then all of 4."""
    for size in (3, 4):
        for moment in MOMENTS:
            for kind in KINDS:
                if kind not in _impossible(moment):
                    for victim in (0, size // 2, size - 1):
                        yield Case(kind, moment, size, victim)


def _impossible(moment: str) -> tuple[str, ...]:
    if moment in INSIDE:  # the main thread can't raise anything while it waits in an operation
        return ("exception", "exit3")
    # Open MPI may take a program that ends well before it uses MPI for one that has no need of it.
    return ("_exit0",) if moment == "import" else ()


@dataclass
class Outcome:
    """The observed behaviour of a job."""

    case: Case
    status: int = 0
    """mpirun's."""
    seconds: float = 0.0
    """From the death to the end of mpirun."""
    gone: float = 0.0
    """From the death to the end of the last process."""
    line: str = ""
    """The first that mpicoll wrote."""
    out: str = ""
    err: str = ""
    problems: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    """Files that Open MPI left behind in /dev/shm or the temporary folder."""


def run(case: Case, hosts: Sequence[int] = (), **variables: str) -> Outcome:
    """Run the job of this case, for at most 80 s, and return its behaviour with the problems found.

    With `hosts` the job runs on hosts of ci/hosts.py with so many ranks on each, which take their processes and files
    with them: what a job leaves behind is found without them only.
    """
    outcome = Outcome(case)
    with (
        tempfile.TemporaryDirectory(prefix="mpicoll-deaths-") as name,
        tempfile.TemporaryDirectory(prefix="deaths-", dir="/dev/shm") as shared,
    ):
        folder = Path(name)
        (folder / "tmp").mkdir()
        (folder / "shared").symlink_to(shared)
        _watch_job(case, folder, hosts, outcome, variables)
        outcome.out = (folder / "out").read_text(errors="replace")
        outcome.err = (folder / "err").read_text(errors="replace")
        left = sorted((folder / "tmp").rglob("*"))
        left += [path for text in folder.glob("shm.*") for path in map(Path, text.read_text().split()) if path.exists()]
        left += Path(shared).iterdir()
        # Files left by Open MPI are reported, but are not failures of mpicoll: its folder with all that is in it, too.
        theirs = {str(path) for path in left if "mpicoll-" not in path.name or "/tmp/ompi." in str(path)}
        outcome.left = sorted(path.removeprefix(f"{folder}/") for path in theirs)
        outcome.problems += [f"left behind: {path}" for path in {str(path) for path in left} - theirs]
        for path in theirs:
            if path.startswith("/dev/shm/"):
                Path(path).unlink(missing_ok=True)
    _judge_text(outcome, hosts)
    return outcome


def _watch_job(case: Case, folder: Path, hosts: Sequence[int], outcome: Outcome, variables: dict[str, str]) -> None:
    mark = uuid.uuid4().hex
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("PMIX_", "PMI_", "OMPI_COMM_"))}
    environ |= {_MARK: mark, "TMPDIR": str(folder / "tmp"), "MPICOLL_REPORT": str(folder), "MPICOLL_TUNED": "off"}
    environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_ROOT), environ.get("PYTHONPATH")]))
    if hosts:
        from support import apart  # not for a rank, which has no such path

        command = apart.hosts(str(len(hosts)), ",".join(map(str, hosts)), rate="1gbit")
    else:
        command = ["bash", "-c", 'source "$0" && exec mpirun "$@"', str(_ROOT / "ci" / "env.sh")]
        command += ["-np", str(case.size)]
    command += [sys.executable, __file__, case.kind, case.moment, str(case.victim), str(folder)]
    begin = time.monotonic()
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        job = subprocess.Popen(
            command, cwd=folder, env=environ | variables, stdin=subprocess.DEVNULL, stdout=out, stderr=err
        )
    status, died, alive = None, None, [job.pid]
    # A job starts slowly on a busy machine; the bound holds from the death on.
    while alive and time.monotonic() < (begin + 60 if died is None else died + BOUND):
        time.sleep(0.02)
        if died is None:
            with suppress(FileNotFoundError, ValueError):
                died = float((folder / "died").read_text())
        if status is None:
            status = job.poll()
            outcome.seconds = time.monotonic() - (died or begin)
        else:
            alive = _marked(mark)
            outcome.gone = time.monotonic() - (died or begin)
    if died is None:
        outcome.problems.append("nobody died")
    elif status is None:
        outcome.problems.append(f"the job goes on {BOUND:g} s after the death")
    elif alive:
        names = [_command(pid) for pid in alive]
        outcome.problems.append(f"processes are left: {names}")
    _end(job, mark)
    outcome.status = job.returncode
    if status == 0:
        outcome.problems.append("exit status 0")


def _end(job: subprocess.Popen[bytes], mark: str) -> None:
    job.terminate()
    with suppress(subprocess.TimeoutExpired):
        job.wait(3)
    for _ in range(100):
        left = _marked(mark)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not left:
            break
        time.sleep(0.02)
    job.wait()


def _marked(mark: str) -> list[int]:
    """The living processes of a job."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"{_MARK}={mark}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:80]
    return "gone by now"


def _judge_text(outcome: Outcome, hosts: Sequence[int]) -> None:
    case = outcome.case
    lines = outcome.err.splitlines()
    at = next((number for number, line in enumerate(lines) if line.startswith("mpicoll: ")), None)
    if at is None and case.moment == "import":
        # Nothing of mpicoll's runs yet, and the others are still inside MPI_Init: mpirun has to say it, and does.
        said = " ".join(outcome.err[outcome.err.find("prterun ") :].split())
        outcome.line = said.partition(" There are ")[0].partition(" -----")[0]
        if f"rank {case.victim} with PID" not in outcome.line and f"@1,{case.victim}]" not in outcome.line:
            outcome.problems.append("mpirun does not name the rank")
    elif at is None:
        outcome.problems.append("no line of mpicoll")
    else:
        outcome.line = lines[at]
        if not re.search(rf"rank {case.victim} of {case.size}\b", outcome.line):
            outcome.problems.append("the first line does not name the rank")
        expected = KINDS[case.kind]
        if hosts and case.kind not in ("exception", "exit3"):
            expected = f"{expected}|{_FAR}|Fatal Python error: (Segmentation fault|Aborted)"
        if not re.search(expected, outcome.line):
            outcome.problems.append("the first line does not name the death")
        rest = "\n".join(lines[at:])
        if case.kind == "exception" and not ("Traceback" in rest and "in _raise" in rest):
            outcome.problems.append("the first line is not followed by the traceback")
    if "went on" in outcome.out:
        outcome.problems.append("the operation returned on another rank")


# --- what a rank does


def _raise() -> NoReturn:
    raise ValueError(_TEXT)


def _die(kind: str, folder: Path) -> None:
    _stamp(folder)
    if kind == "exception":
        _raise()
    elif kind == "exit3":
        sys.exit(3)
    elif kind in ("_exit3", "_exit0"):
        os._exit(int(kind[-1]))
    elif kind == "SEGV":
        ctypes.string_at(0)
    else:
        os.kill(os.getpid(), _SIGNALS[kind])
        threading.Event().wait()  # a handler may want to run


def _stamp(folder: Path) -> None:
    (folder / "died.new").write_text(str(time.monotonic()))
    (folder / "died.new").rename(folder / "died")


def _shared_memory() -> set[str]:
    """The files in /dev/shm that this process has mapped."""
    return set(re.findall(r"(/dev/shm/\S+)$", Path("/proc/self/maps").read_text(), re.MULTILINE))


def _operation(name: str, rank: int, size: int, victim: int) -> Callable[[], Any]:
    """The operation, which needs all ranks; point to point, the others receive from the victim and it from the next."""
    import numpy as np

    import mpicoll

    small, large = np.ones(5), np.ones(1 << 20)
    if name == "native":
        return lambda: mpicoll.allreduce(small, algorithm="native")
    if name == "schedule":
        return lambda: mpicoll.allreduce(np.ones(100_000), algorithm="ring")
    if name == "shared":
        return lambda: mpicoll.allreduce(large, algorithm="shm_pipelined")
    if name == "background":
        return lambda: mpicoll.iallreduce(large).wait()
    if name == "p2p":
        return lambda: mpicoll.recv(small, (victim + 1) % size if rank == victim else victim)
    return lambda: mpicoll.allreduce(small)


def _rank(kind: str, moment: str, victim: int, folder: Path) -> None:
    rank, size = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])
    import numpy as np

    import mpicoll
    from mpicoll.transport import shm

    # Other jobs have files in /dev/shm itself.
    shared = (folder / "shared").resolve()
    shared.mkdir(exist_ok=True)  # a host of ci/hosts.py has its own /dev/shm
    shm._DIRECTORY = str(shared)
    inside, name = moment.startswith("in "), moment.removeprefix("in ")
    operation = _operation(name, rank, size, victim)
    helper = (victim + 1) % size
    if moment != "import":
        mpicoll.world()
    pids = None
    if name not in ("import", "before"):
        if name != "p2p":
            for _ in range(3):
                operation()
        pids = mpicoll.allgather(np.array([os.getpid()]))
        (folder / f"shm.{rank}").write_text("\n".join(_shared_memory()))
        mpicoll.barrier()
    if rank == victim:
        if inside:
            if kind not in _SIGNALS:
                threading.Timer(0.5, _die, (kind, folder)).start()
            operation()
        else:
            time.sleep(0.5)
            _die(kind, folder)
    elif inside and rank == helper:
        if kind in _SIGNALS:
            assert pids is not None
            time.sleep(0.5)
            _stamp(folder)
            os.kill(int(pids[victim]), _SIGNALS[kind])
        while True:  # busy with something else
            time.sleep(0.01)
    else:
        operation()
    print(f"rank {rank} went on", flush=True)


if __name__ == "__main__":
    _rank(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
