"""Jobs on two hosts of ci/hosts.py: right results over slow links, and the behaviour after a loss of the connection.
For ci/partition.py and tests/engine/test_hosts.py. As a program, this is run by each rank of such a job.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
_MARK = "MPICOLL_APART_MARK"
_RANKS = 4

BOUND = 16.0
"""Seconds after the cut within which the ranks of both sides have ended."""

LAUNCHER = 3.0
"""More seconds for the launcher."""

LOOPS = ("native", "schedule", "hierarchical", "background", "recv")
"""Operations that the ranks repeat while the hosts lose their connection."""

SIDES = ((0, 1), (2, 3))


@dataclass
class Outcome:
    """The behaviour of a job after the cut."""

    loop: str
    gone: dict[int, float] = field(default_factory=dict)
    """By rank: seconds from the cut to its end."""
    launcher: float | None = None
    """Seconds from the cut to the end of the last process, which is the launcher's; None if one was left."""
    said: list[str] = field(default_factory=list)
    """By rank: its output."""
    lines: list[str] = field(default_factory=list)
    """By rank: the first line of mpicoll's output, or an empty one."""
    problems: list[str] = field(default_factory=list)


def hosts(*arguments: str | Path, rate: str = "10mbit") -> list[str]:
    """Return the command for a program on hosts joined by links of `rate`; see ci/hosts.py."""
    return [sys.executable, str(_ROOT / "ci" / "hosts.py"), "--rate", rate, *map(str, arguments)]


def possible() -> str:
    """Return the reason why this machine can't emulate hosts; empty if it can."""
    command = ["unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "sh", "-c"]
    link = "ip link add port0 type veth peer name port1"
    shape = "tc qdisc add dev port0 root tbf rate 1mbit burst 9k latency 9ms"
    try:
        done = subprocess.run([*command, f"{link} && {shape}"], capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        return f"no {error.filename}"
    return f"no right to make network namespaces: {done.stderr.strip()}" if done.returncode else ""


def job_environ(mark: str, variables: dict[str, str]) -> dict[str, str]:
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("PMIX_", "PMI_", "OMPI_COMM_"))}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_ROOT), environ.get("PYTHONPATH")]))
    return environ | {_MARK: mark, "MPICOLL_TUNED": "off", "MPICOLL_REPORT": "off"} | variables


def right(what: str, seconds: float = 100, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run dozens of "operations", or a "training" by DDP. Each rank without an error prints "all right"."""
    return _run(hosts(2, 2, rate="100mbit"), __file__, what, seconds=seconds, **variables)


def start(**variables: str) -> subprocess.CompletedProcess[str]:
    """Run a rank on each of two hosts that does nothing."""
    return _run(hosts(2, 1), "-c", "from mpi4py import MPI", seconds=60, **variables)


_LISTEN = """
from mpicoll.cli.listening import list_sockets
from mpi4py import MPI
before = set(list_sockets())
import mpicoll
rank = mpicoll.world().rank
new = sorted(one.rpartition(":")[0] for one in set(list_sockets()) - before if not one.startswith("unix:"))
print(f"rank {rank}:", *new, flush=True)
mpicoll.barrier()
"""


def listen(setup: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a rank on each of two hosts that prints at which addresses mpicoll listens, such as "rank 0: 127.0.0.1".

    `setup` are commands that are run on each host before."""
    return _run(hosts("--setup", setup, 2, 1), "-c", _LISTEN, seconds=60, **variables)


def survive(ranks: Sequence[int], *program: str, seconds: float, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a fault-tolerant job on hosts with so many `ranks` on each."""
    launch = hosts("--mpirun", "--with-ft ulfm", str(len(ranks)), ",".join(map(str, ranks)), rate="1gbit")
    return _run(launch, *program, seconds=seconds, **variables)


def _run(launch: list[str], *program: str, seconds: float, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["timeout", "--kill-after=5", str(seconds), *launch, sys.executable, *program],
        env=job_environ(uuid.uuid4().hex, variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def part(loop: str, **variables: str) -> Outcome:
    """Cut the hosts apart in the middle of a loop, and observe the end of the ranks, for at most 80 s."""
    outcome, mark = Outcome(loop), uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="mpicoll-apart-") as name:
        folder = Path(name)
        said = [folder / f"said.{rank}" for rank in range(_RANKS)]
        environ = job_environ(mark, {"MPICOLL_REPORT": name, "TMPDIR": name} | variables)
        command = [*hosts("--cut", "1", folder / "cut", 2, 2), sys.executable, __file__, loop, name]
        with (folder / "launcher").open("wb") as out:
            job = subprocess.Popen(
                command, cwd=folder, env=environ, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
            )
        try:
            _follow(outcome, job, folder / "cut", mark)
            if job.poll() == 0:
                outcome.problems.append("exit status 0")
        finally:
            # unshare(1) handles no other signal; all other processes are in its namespaces, which end with it.
            job.kill()
            job.wait()
            for pid in _marked(mark):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        outcome.said = [path.read_text(errors="replace") if path.exists() else "" for path in said]
        if not any(outcome.said):
            outcome.said = [(folder / "launcher").read_text(errors="replace")]
    _judge(outcome)
    return outcome


def blink(seconds: float = 6.5, **variables: str) -> subprocess.CompletedProcess[str]:
    """Cut the hosts apart for less time than declares them lost: each rank must continue, and print so."""
    with tempfile.TemporaryDirectory(prefix="mpicoll-apart-") as name:
        cut, heal = Path(name) / "cut", Path(name) / "heal"
        link = hosts("--cut", "1", cut, "--heal", heal, 2, 2)
        command = ["timeout", "--kill-after=5", "100", *link, sys.executable, __file__, "blink", name]
        with subprocess.Popen(
            command,
            env=job_environ(uuid.uuid4().hex, variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as job:
            while not cut.exists() and job.poll() is None:
                time.sleep(0.02)
            time.sleep(seconds)
            heal.touch()
            text, _ = job.communicate()
        return subprocess.CompletedProcess(command, job.returncode, text)


def freeze(**variables: str) -> tuple[str, float | None]:
    """Stop all processes of a host, ranks and launcher, while its kernel still responds. Return the job's output, and
    the seconds until it has ended; None if it has not after 40."""
    with tempfile.TemporaryDirectory(prefix="mpicoll-apart-") as name:
        begin, end = Path(name) / "frozen", 40.0
        environ = job_environ(uuid.uuid4().hex, {"MPICOLL_TIMEOUT": "2", "TMPDIR": name} | variables)
        command = [*hosts(2, 2), sys.executable, __file__, "freeze", name]
        with (Path(name) / "said").open("w+") as said:
            job = subprocess.Popen(
                command, env=environ, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT
            )
            try:
                started = time.monotonic()
                while not begin.exists() and job.poll() is None and time.monotonic() - started < 60:
                    time.sleep(0.02)
                frozen = time.monotonic()
                with suppress(subprocess.TimeoutExpired):
                    job.wait(end)
                seconds = None if job.poll() is None or not begin.exists() else time.monotonic() - frozen
            finally:
                job.kill()  # and with it all in its namespaces
                job.wait()
            said.seek(0)
            return said.read(), seconds


def _follow(outcome: Outcome, job: subprocess.Popen[bytes], cut: Path, mark: str) -> None:
    begin = time.monotonic()
    while not cut.exists():
        time.sleep(0.02)
        if job.poll() is not None or time.monotonic() - begin > 60:
            outcome.problems.append("the job ended, or was stuck, before the cut")
            return
    begin = time.monotonic()
    left = set(range(_RANKS))
    while time.monotonic() - begin < BOUND + LAUNCHER:
        alive = list(_marked(mark).values())
        now = time.monotonic() - begin
        for rank in left - set(alive):
            outcome.gone[rank] = now
        left &= set(alive)
        if not alive:
            outcome.launcher = now
            return
        time.sleep(0.05)


def _marked(mark: str) -> dict[int, int | None]:
    """Return the rank of each living process of the job; None for the launcher's processes."""
    found: dict[int, int | None] = {}
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            variables = path.read_bytes().split(b"\0")
            if f"{_MARK}={mark}".encode() in variables:
                rank = [one.partition(b"=")[2] for one in variables if one.startswith(b"OMPI_COMM_WORLD_RANK=")]
                found[int(path.parent.name)] = int(rank[0]) if rank else None
    return found


def _judge(outcome: Outcome) -> None:
    if len(outcome.said) != _RANKS:
        return
    for rank in range(_RANKS):
        if rank not in outcome.gone:
            outcome.problems.append(f"rank {rank} goes on {BOUND + LAUNCHER:g} s after the cut")
        elif outcome.gone[rank] > BOUND:
            outcome.problems.append(f"rank {rank} took {outcome.gone[rank]:.1f} s")
    if outcome.launcher is None:
        outcome.problems.append(f"a process of the launcher goes on {BOUND + LAUNCHER:g} s after the cut")
    outcome.lines = [
        next((line for line in said.splitlines() if line.startswith("mpicoll: ")), "") for said in outcome.said
    ]
    for here, there in (SIDES, SIDES[::-1]):
        if not any(
            all(re.search(rf"\b{rank}\b", outcome.lines[one].partition(" of ")[0]) for rank in there) for one in here
        ):
            outcome.problems.append(f"the ranks {here} don't say that they lost the ranks {there}")


# --- what a rank does


class _Oracle:
    """The data of all ranks, new at each call, and the comparison of results with the expected ones."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._number = 0

    def inputs(self, count: int, dtype: Any) -> list[Any]:
        """Return small integers: their sums are exact in every dtype and order."""
        import numpy as np

        self._number += 1
        every = []
        for rank in range(_RANKS):
            generator = np.random.default_rng((self._number, rank))
            values = generator.integers(-4, 5, count)
            every.append(
                (values + 1j * generator.integers(-4, 5, count) if np.dtype(dtype).kind == "c" else values).astype(
                    dtype
                )
            )
        return every

    def same(self, result: Any, expected: Any, what: str) -> None:
        if (result.dtype, result.shape) != (expected.dtype, expected.shape):
            found, wanted = (f"{one.dtype}{one.shape}" for one in (result, expected))
            raise AssertionError(f"rank {self.rank}: {what} is {found} instead of {wanted}")
        wrong = (result != expected).nonzero()[0]
        if wrong.size:
            at = wrong[0]
            raise AssertionError(
                f"rank {self.rank}: {what} is wrong in {wrong.size} of {result.size} elements: [{at}] is {result[at]}"
                f" instead of {expected[at]}"
            )


def _right(what: str) -> None:
    import mpicoll

    world = mpicoll.world()
    assert (world.size, world.num_nodes) == (_RANKS, 2)
    if what == "training":
        train(world.rank, _RANKS)
    else:
        oracle = _Oracle(world.rank)
        _reductions(oracle)
        _movements(oracle)
        _at_once(oracle, world.split(world.rank % 2))
        _messages(oracle)
    mpicoll.barrier()
    print(f"rank {world.rank}: all right", flush=True)


def _reductions(oracle: _Oracle) -> None:
    import numpy as np

    import mpicoll

    rank, inputs, same = oracle.rank, oracle.inputs, oracle.same
    shapes = [(np.float32, 1), (np.float64, 1001), (np.int32, 20_000), (np.float16, 333), (np.complex64, 0)]
    for algorithm in (None, "native", "ring", "hierarchical", "halving_doubling", "double_tree"):
        for dtype, count in shapes:
            if algorithm == "native" and dtype is np.float16:
                continue  # MPI libraries do not support it
            every = inputs(count, dtype)
            what = f"allreduce of {count} {np.dtype(dtype)} by {algorithm}"
            same(mpicoll.allreduce(every[rank], algorithm=algorithm), sum(every[1:], every[0]), what)
        every = inputs(3001, np.int64)
        same(mpicoll.allreduce(every[rank], "max", algorithm=algorithm), np.max(every, axis=0), f"max by {algorithm}")
    for algorithm in (None, "native", "ring", "hierarchical"):
        every = inputs(4000, np.float64)
        mine = sum(every[1:], every[0]).reshape(_RANKS, -1)[rank]
        same(mpicoll.reduce_scatter(every[rank], algorithm=algorithm), mine, f"reduce_scatter by {algorithm}")
    for algorithm in (None, "native", "binomial", "hierarchical"):
        every = inputs(777, np.int32)
        result = mpicoll.reduce(every[rank], root=2, algorithm=algorithm)
        if rank == 2:
            same(result, sum(every[1:], every[0]), f"reduce by {algorithm}")
    every = inputs(901, np.int64)
    same(mpicoll.scan(every[rank]), np.sum(every[: rank + 1], axis=0), "scan")


def _movements(oracle: _Oracle) -> None:
    import numpy as np

    import mpicoll

    rank, inputs, same = oracle.rank, oracle.inputs, oracle.same
    for algorithm in (None, "native", "binomial", "hierarchical"):
        every = inputs(5001, np.float32)
        same(mpicoll.bcast(every[rank], root=3, algorithm=algorithm), every[3], f"bcast by {algorithm}")
        result = mpicoll.gather(every[rank], root=1, algorithm=algorithm)
        if rank == 1:
            same(result, np.concatenate(every), f"gather by {algorithm}")
        every = inputs(2000, np.float32)
        mine = every[2].reshape(_RANKS, -1)[rank]
        given = every[2] if rank == 2 else np.empty_like(mine)
        same(mpicoll.scatter(given, root=2, algorithm=algorithm), mine, f"scatter by {algorithm}")
    for algorithm in (None, "native", "ring", "hierarchical"):
        counts = [5, 0, 2100, 33]
        whole = inputs(sum(counts), np.int16)[0]
        mine = np.split(whole, np.cumsum(counts)[:-1])[rank]
        same(mpicoll.allgather(mine, counts=counts, algorithm=algorithm), whole, f"allgather by {algorithm}")
    for algorithm in (None, "native", "pairwise", "hierarchical"):
        every = inputs(_RANKS * 701, np.int16)
        mine = np.concatenate([one.reshape(_RANKS, -1)[rank] for one in every])
        same(mpicoll.alltoall(every[rank], algorithm=algorithm), mine, f"alltoall by {algorithm}")


def _at_once(oracle: _Oracle, across: Any) -> None:
    """Run several nonblocking collectives, in a group with one rank of each host and in the world; wait in reverse."""
    import numpy as np

    import mpicoll

    pending = []
    for algorithm in ("native", "ring", "hierarchical", None):
        every = oracle.inputs(6000, np.float32)
        request = mpicoll.iallreduce(every[oracle.rank], algorithm=algorithm)
        pending.append((request, sum(every[1:], every[0]), f"iallreduce by {algorithm}"))
        pair = oracle.inputs(2500, np.float32)[oracle.rank % 2 :: 2]
        request = mpicoll.iallreduce(pair[oracle.rank // 2], comm=across)
        pending.append((request, pair[0] + pair[1], "iallreduce across"))
    for request, expected, what in reversed(pending):
        oracle.same(request.wait(), expected, what)


def _messages(oracle: _Oracle) -> None:
    import numpy as np

    import mpicoll

    rank, far = oracle.rank, (oracle.rank + 2) % _RANKS
    for count in (0, 1, 40_000):
        every = oracle.inputs(count, np.float32)
        result = mpicoll.sendrecv(every[rank], (rank + 1) % _RANKS, (rank - 1) % _RANKS)
        oracle.same(result, every[rank - 1], f"sendrecv of {count}")
    every = oracle.inputs(10_000, np.int64)
    sending, receiving = mpicoll.isend(every[rank], far, tag=7), mpicoll.irecv(every[rank], far, tag=7)
    oracle.same(receiving.wait(), every[far], "irecv from the other host")
    sending.wait()


def train(rank: int, size: int) -> None:
    """Compare DDP with the training of one process on the whole batch."""
    import torch
    import torch.distributed as dist

    import mpicoll.torch

    assert mpicoll.torch.is_available()
    dist.init_process_group("mpicoll")
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        layers = torch.nn.Sequential(torch.nn.Linear(20, 50), torch.nn.Tanh(), torch.nn.Linear(50, 3))
        models.append(layers.double())
    alone, together = models[0], torch.nn.parallel.DistributedDataParallel(models[1])
    generator = torch.Generator().manual_seed(1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for _ in range(4):
        x = torch.randn(8 * size, 20, generator=generator, dtype=torch.float64)
        for model, part, optimizer in zip((alone, together), (x, x[rank::size]), optimizers, strict=True):
            optimizer.zero_grad()
            model(part).square().mean().backward()
            optimizer.step()
    for ours, theirs in zip(models[1].parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    dist.destroy_process_group()


def _step(loop: str, rank: int) -> Callable[[], Any]:
    import numpy as np

    import mpicoll

    x = np.ones(2000)
    if loop == "native":
        return lambda: mpicoll.allreduce(x, algorithm="native")
    if loop == "schedule":
        return lambda: mpicoll.allreduce(x, algorithm="ring")
    if loop == "hierarchical":
        return lambda: mpicoll.allreduce(x, algorithm="hierarchical")
    if loop == "background":
        return lambda: mpicoll.iallreduce(x).wait()
    far = (rank + 2) % _RANKS

    def back_and_forth() -> None:
        if rank < far:
            mpicoll.send(x, far)
        mpicoll.recv(x, far)
        if rank > far:
            mpicoll.send(x, far)

    return back_and_forth


def _blink(folder: Path) -> None:
    import numpy as np

    import mpicoll

    rank = mpicoll.world().rank
    for number in range(60):
        algorithm = ("native", "ring", "hierarchical")[number % 3]
        total = mpicoll.allreduce(np.arange(500.0) + rank * number, algorithm=algorithm)
        assert (total == 4 * np.arange(500.0) + 6 * number).all()
        if number == 30 and rank == 0:
            (folder / "cut").touch()
    print(f"rank {rank}: all right", flush=True)


def _freeze(folder: Path) -> None:
    import numpy as np

    import mpicoll

    rank = mpicoll.world().rank
    pids = mpicoll.allgather(np.array([os.getpid()]))
    mpicoll.barrier()
    if rank == SIDES[1][1]:
        (folder / "frozen").touch()
        for pid in (os.getppid(), int(pids[SIDES[1][0]]), os.getpid()):
            os.kill(pid, signal.SIGSTOP)
    while True:
        mpicoll.allreduce(np.ones(2000))


def _loop(loop: str, folder: Path) -> None:
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    # Output of the far side would not reach mpirun any more.
    said = os.open(folder / f"said.{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(said, 1)
    os.dup2(said, 2)
    step = _step(loop, rank)
    count = 0
    while True:
        step()
        count += 1
        if count == 30 and rank == 0:
            (folder / "cut").touch()


if __name__ == "__main__":
    if sys.argv[1] in ("operations", "training"):
        _right(sys.argv[1])
    elif sys.argv[1] == "blink":
        _blink(Path(sys.argv[2]))
    elif sys.argv[1] == "freeze":
        _freeze(Path(sys.argv[2]))
    else:
        _loop(sys.argv[1], Path(sys.argv[2]))
