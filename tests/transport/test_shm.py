"""Memory that processes share: private to the user, without a name, and gone with them however they end."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import re
import secrets
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.descriptors import count_descriptors
from support.launch import ROOT, mpirun
from support.patches import patch_within

from mpicoll.transport import shm
from mpicoll.transport.shm import MemoryHandle, ProcessReader, SharedBlock, attach, describe_memory, share

SHM = Path("/dev/shm")


def _ours() -> set[str]:
    return {path.name for path in SHM.iterdir() if path.name.startswith("mpicoll")}


def _left(before: set[str]) -> set[str]:
    """What has come to /dev/shm and stays: other jobs may pass through."""
    deadline = time.monotonic() + 5
    while (left := _ours() - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


MAPPED = r"(?:/memfd:|/dev/shm/)mpicoll"


def _mappings(pid: int | str = "self") -> int:
    """How many pieces of shared memory of this library a process has mapped."""
    return len(re.findall(MAPPED, Path(f"/proc/{pid}/maps").read_text()))


def _descriptors() -> int:
    """How many descriptors of shared memory of this library this process has."""
    gc.collect()  # so that what earlier tests have left behind goes before, not meanwhile
    return count_descriptors(MAPPED)


# --- one process


@pytest.mark.parametrize("named", [False, True])
def test_both_see_the_same_memory(named: bool) -> None:
    own = SharedBlock(1000, named=named)
    other = attach(own.handle)
    own.seal()
    assert own.memory.size == other.size == 1000
    assert not other.any()
    own.memory[:] = 7
    assert (other == 7).all()
    other[999] = 9
    assert own.memory[999] == 9


@pytest.mark.parametrize("named", [False, True])
def test_it_is_private_to_the_user(named: bool) -> None:
    own = SharedBlock(10, named=named)
    try:
        status = Path(own.handle.path).stat()
        assert status.st_uid == os.getuid()
        assert stat.S_IMODE(status.st_mode) == 0o600
    finally:
        own.seal()


def test_a_name_lasts_until_all_have_it() -> None:
    own = SharedBlock(10, named=True)
    assert Path(own.handle.path).name in _ours()
    own.seal()
    assert not Path(own.handle.path).exists()
    with pytest.raises(FileNotFoundError):
        attach(own.handle)


def test_memory_without_a_name_is_nowhere_to_be_found() -> None:
    before = _ours()
    own = SharedBlock(10)
    assert not _left(before)
    assert Path(own.handle.path).stat().st_nlink == 0
    own.seal()
    with pytest.raises(OSError):  # noqa: PT011  which error depends on whose descriptor has that number by now
        attach(own.handle)


@pytest.mark.slow
@pytest.mark.parametrize("named", [False, True])
def test_it_goes_with_the_last_array(named: bool) -> None:
    mappings, descriptors = _mappings(), _descriptors()
    own = SharedBlock(100_000, named=named)
    other = attach(own.handle)
    own.seal()
    assert _descriptors() == descriptors
    assert _mappings() == mappings + 2
    part = own.memory[50:60].view(np.int16)[1:]
    del own
    assert _mappings() == mappings + 2
    part[...] = 5
    assert other[52] == 5
    del part
    assert _mappings() == mappings + 1
    del other
    assert _mappings() == mappings


def test_memory_of_no_bytes() -> None:
    own = SharedBlock(0)
    other = attach(own.handle)
    own.seal()
    assert own.memory.size == other.size == 0


def test_another_file_is_not_taken_for_the_memory(tmp_path: Path) -> None:
    """Processes with namespaces of their own may have the same numbers."""
    own = SharedBlock(1000)
    try:
        with pytest.raises(OSError, match="belongs to another process") as caught:
            attach(own.handle._replace(cookie=own.handle.cookie ^ 1))
        assert caught.value.errno == errno.ESRCH
        mappings = _mappings()
        assert mappings >= 1
        with pytest.raises((OSError, ValueError)):
            attach(own.handle._replace(nbytes=10**9))  # a smaller file
        short = tmp_path / "short"
        short.write_bytes(b"")
        with pytest.raises((OSError, ValueError)):
            attach(own.handle._replace(path=str(short)))
        with pytest.raises(OSError):  # noqa: PT011  a directory, or nothing at all
            attach(own.handle._replace(path=str(tmp_path)))
        assert _mappings() == mappings
    finally:
        own.seal()


@pytest.mark.slow
def test_an_allocation_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before, descriptors = _ours(), _descriptors()
    patch_within(monkeypatch, shm, os, posix_fallocate=full)
    with pytest.raises(OSError, match="No space left"):
        SharedBlock(1000, named=True)
    assert not _left(before)
    assert _descriptors() == descriptors


# --- share, with an exchange in which one process plays all ranks


def _exchange(*others: object) -> Callable[[object], list[object]]:
    return lambda value: [value, *others]


def test_share_gives_the_memory_of_all() -> None:
    peer = SharedBlock(50)
    answers = iter([[peer.handle], [""]])
    memories, failure = share(100, lambda value: [value, *next(answers)], 0, named=False)
    peer.seal()
    assert failure == ""
    assert memories is not None
    assert [one.size for one in memories] == [100, 50]
    peer.memory[3] = 4
    assert memories[1][3] == 4


def test_only_ranks_that_share_memory_look_for_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(nbytes: int) -> None:
        raise MemoryError(f"{nbytes} bytes are not free")

    monkeypatch.setattr(shm, "_check_free", refuse)
    peer = SharedBlock(2 << 20)
    failures = []
    for nbytes in (0, 8):
        answers = iter([[peer.handle], [""]])
        failures.append(share(nbytes, lambda value, answers=answers: [value, *next(answers)], 0, named=False)[1])
    peer.seal()
    assert failures[0] == ""
    assert "2097160 bytes are not free" in failures[1]


@pytest.mark.slow
def test_share_fails_alike_where_one_can_not_allocate() -> None:
    why = "rank 1 can't allocate 5 bytes of shared memory: No space left on device"
    descriptors = _descriptors()
    assert share(100, _exchange(why), 0, named=False) == (None, why)
    assert _descriptors() == descriptors


def test_share_fails_alike_where_one_can_not_map() -> None:
    gone = MemoryHandle(path="/proc/self/fd/987654", nbytes=10, cookie=1)
    answers = iter([[gone], [""]])
    memories, failure = share(100, lambda value: [value, *next(answers)], 0, named=False)
    assert memories is None
    assert re.search(r"rank 0 can't map the memory of all ranks: .*No such file", failure)
    told: list[object] = []

    def exchange(value: object) -> list[object]:
        told.append(value)
        return [value, "rank 1 can't map the memory"] if len(told) > 1 else [value]

    memories, failure = share(100, exchange, 0, named=False)
    assert (memories, failure) == (None, "rank 1 can't map the memory")
    assert told[1] == ""


@pytest.mark.parametrize("nbytes", [2**62, 2**63, 2**64, 10**30])
@pytest.mark.parametrize("named", [False, True])
def test_huge_sizes_are_reported_to_the_other_ranks(nbytes: int, named: bool) -> None:
    """They wait for an answer, so whatever is raised here has to be one."""
    told: list[object] = []

    def exchange(value: object) -> list[object]:
        told.append(value)
        return [value]

    before = _ours()
    memories, failure = share(nbytes, exchange, 3, named=named)
    assert memories is None
    assert f"rank 3 can't allocate {nbytes} bytes of shared memory" in failure
    assert told
    assert not _left(before)


@pytest.mark.slow
def test_an_exchange_that_fails_leaves_nothing() -> None:
    def exchange(value: object) -> list[object]:
        raise KeyError("lost")

    before, descriptors = _ours(), _descriptors()
    for named in (False, True):
        with pytest.raises(KeyError):
            share(100, exchange, 0, named=named)
    assert not _left(before)
    assert _descriptors() == descriptors


# --- private memory of others


def test_reading_a_process() -> None:
    source, target = np.arange(100_000), np.zeros(100_000, int)
    reader = ProcessReader(describe_memory())
    reader.check()
    reader.read(source.ctypes.data, target.ctypes.data, source.nbytes)
    np.testing.assert_array_equal(source, target)
    reader.read(source.ctypes.data, target.ctypes.data + 8, 0)
    with pytest.raises(OSError, match="Bad address") as caught:
        reader.read(8, target.ctypes.data, 8)
    assert caught.value.errno == errno.EFAULT


def test_a_process_with_the_number_of_another_one_is_not_read() -> None:
    process = describe_memory()
    with pytest.raises(OSError, match="another PID namespace"):
        ProcessReader(process._replace(cookie=process.cookie ^ 1)).check()


def test_reading_what_ends_too_early_is_an_error() -> None:
    """The kernel copies what is there; what is missing must not be taken for read."""
    whole = np.zeros(1 << 16, np.uint8)
    end = 4096
    libc = ctypes.CDLL(None, use_errno=True)
    at = whole.ctypes.data
    area = mmap.mmap(-1, 3 * mmap.PAGESIZE)
    base = np.frombuffer(area, np.uint8)
    last = base.ctypes.data + 2 * mmap.PAGESIZE
    assert libc.mprotect(ctypes.c_void_p(last), mmap.PAGESIZE, 0) == 0
    try:
        with pytest.raises(OSError, match="Bad address"):
            ProcessReader(describe_memory()).read(last - end, at, 2 * end)
    finally:
        libc.mprotect(ctypes.c_void_p(last), mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE)


def test_reading_a_process_that_is_gone() -> None:
    child = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    with pytest.raises(OSError, match="No such process"):
        ProcessReader(describe_memory()._replace(pid=int(child.stdout))).check()


# --- jobs

STEADY = """
import sys, time
import numpy as np, mpicoll
world = mpicoll.world()
keep = [mpicoll.empty(100_000) for _ in range(3)]
print("ready", flush=True)
begin = time.monotonic()
while time.monotonic() - begin < 20:
    for algorithm in ("shm_flat", "shm_pipelined", "cma"):
        mpicoll.allreduce(np.ones(10_000), algorithm=algorithm)
    with world.split(0) as part:
        mpicoll.empty(1000, comm=part)
        mpicoll.allreduce(np.ones(10_000), comm=part, algorithm="shm_pipelined")
"""


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "program.py"
        path.write_text(text)
        return path

    return write


def _children(parent: int) -> Iterator[int]:
    for one in Path("/proc").iterdir():
        if one.name.isdigit():
            try:
                fields = (one / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == parent:
                yield int(one.name)
                yield from _children(int(one.name))


def _ranks(parent: int, path: Path) -> list[int]:
    """The processes below `parent` that run the program at `path` themselves."""
    found = []
    for pid in _children(parent):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if str(path).encode() in words and b"python" in words[0]:
            found.append(pid)
    return found


def _start(path: Path, size: int, **variables: str) -> subprocess.Popen[str]:
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("PMIX_", "PMI_", "OMPI_COMM_"))}
    environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"
    command = ["timeout", "--kill-after=5", "30", "bash", "-c", 'source "$0" && exec mpirun "$@"']
    command += [str(ROOT / "ci" / "env.sh"), "-np", str(size), sys.executable, str(path)]
    return subprocess.Popen(
        command, cwd=ROOT, env=environ | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["auto", "named"])
@pytest.mark.parametrize("who", ["one", "all"])
@pytest.mark.extension
def test_nothing_is_left_of_a_killed_job(program: Callable[[str], Path], who: str, kind: str) -> None:
    """Killed at any moment: without a name there is nothing that could stay; with one, once it is sealed."""
    before = _ours()
    text = STEADY if kind == "auto" else STEADY.partition("    with world")[0]  # which names nothing any more
    path = program(text)
    job = _start(path, 2, MPICOLL_SHARED_MEMORY=kind)
    try:
        assert job.stdout is not None
        ready = [job.stdout.readline() for _ in range(2)]
        assert ready == ["ready\n"] * 2
        time.sleep(secrets.randbelow(400) / 1000)
        ranks = _ranks(job.pid, path)
        assert len(ranks) == 2
        assert all(_mappings(pid) for pid in ranks)
        for pid in ranks[: 1 if who == "one" else 2]:
            os.kill(pid, signal.SIGKILL)
        job.communicate(timeout=20)
    finally:
        job.kill()
        job.wait()
    assert job.returncode != 0
    assert not [pid for pid in ranks if Path(f"/proc/{pid}/maps").exists() and _mappings(pid)]
    assert not _left(before)


SWEEP = """
import os, re
from pathlib import Path
import numpy as np, mpicoll
world = mpicoll.world()
x = np.arange(5000.0) + world.rank
want = np.arange(5000.0) * world.size + sum(range(world.size))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["auto", "named"])
@pytest.mark.extension
def test_a_job_leaves_nothing(program: Callable[[str], Path], kind: str) -> None:
    before = _ours()
    text = f"""{SWEEP}
memory = mpicoll.empty(5000, "float64")
memory[:] = x
for y in (x, memory):
    for algorithm in ("shm_flat", "shm_pipelined", "cma"):
        np.testing.assert_array_equal(mpicoll.allreduce(y, algorithm=algorithm), want)
names = [line for line in Path("/proc/self/maps").read_text().splitlines() if re.search({MAPPED!r}, line)]
assert len(names) == 2 + world.size, names  # records, flags and slots, and what was asked for
assert all(("/dev/shm" in line) == ({kind!r} == "named") and "(deleted)" in line for line in names), names
"""
    done = mpirun(2, "-W", "error", program(text), MPICOLL_SHARED_MEMORY=kind)
    assert done.returncode == 0, done.stdout
    assert not _left(before)


@pytest.mark.slow
def test_without_shared_memory(program: Callable[[str], Path]) -> None:
    text = f"""{SWEEP}
for algorithm in ("shm_flat", "shm_pipelined", "cma"):
    try:
        mpicoll.allreduce(x, algorithm=algorithm)
    except mpicoll.AlgorithmError as error:
        assert "MPICOLL_SHARED_MEMORY=off" in str(error)
    else:
        raise AssertionError
    with mpicoll.algorithms(allreduce=algorithm):
        assert "MPICOLL_SHARED_MEMORY=off" in mpicoll.explain("allreduce", x.nbytes).reason
        np.testing.assert_array_equal(mpicoll.allreduce(x), want)
memory = mpicoll.empty((5, 1000), "float64")
memory[...] = x.reshape(5, 1000)
np.testing.assert_array_equal(mpicoll.allreduce(memory).reshape(-1), want)
assert not re.search({MAPPED!r}, Path("/proc/self/maps").read_text())
"""
    done = mpirun(2, "-W", "error", program(text), MPICOLL_SHARED_MEMORY="off")
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
@pytest.mark.extension
def test_a_small_dev_shm_is_reported(program: Callable[[str], Path]) -> None:
    """Named memory needs room there: without it the ranks go another way, and say why."""
    if os.getuid() or shutil.which("unshare") is None:
        pytest.skip("only root can mount a file system, with unshare(1)")
    allowed = subprocess.run(
        ["unshare", "-m", "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(SHM)], capture_output=True, check=False
    )
    if allowed.returncode:
        pytest.skip(f"a file system can't be mounted here: {allowed.stderr.decode().strip()}")
    path = program(f"""{SWEEP}
with mpicoll.algorithms(allreduce="shm_pipelined"):
    for _ in range(2):
        np.testing.assert_array_equal(mpicoll.allreduce(x), want)
    reason = mpicoll.explain("allreduce", x.nbytes).reason
assert "can't allocate" in reason and "No space left on device" in reason, reason
assert "MPICOLL_SHARED_MEMORY" in reason, reason
memory = mpicoll.empty(5000, "float64")
memory[:] = x
np.testing.assert_array_equal(mpicoll.allreduce(memory), want)
assert not [name for name in os.listdir("/dev/shm") if name.startswith("mpicoll")]
""")
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("PMIX_", "PMI_", "OMPI_COMM_"))}
    environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"
    # The MPI library wants room of its own, elsewhere.
    environ |= {"MPICOLL_SHARED_MEMORY": "named", "OMPI_MCA_btl_sm_backing_directory": str(path.parent)}
    script = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && source "$0" && exec mpirun "$@"'
    command = ["timeout", "--kill-after=5", "60", "unshare", "-m", "bash", "-c", script, str(ROOT / "ci" / "env.sh")]
    command += ["-np", "2", sys.executable, str(path)]
    done = subprocess.run(
        command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
@pytest.mark.extension
def test_a_process_of_another_namespace_is_not_taken_for_a_rank(program: Callable[[str], Path]) -> None:
    """One rank finds under the path of the other what does not belong to it: all do without, and say why."""
    text = f"""
from mpicoll.transport import shm
original, made = shm.attach, shm.SharedBlock(100)
def attach(handle, *kept):
    return original(handle._replace(path=made.handle.path, nbytes=min(handle.nbytes, 100)), *kept)
if int(os.environ["OMPI_COMM_WORLD_RANK"]) == 1:
    shm.attach = attach
{SWEEP}
with mpicoll.algorithms(allreduce="shm_pipelined"):
    reason = mpicoll.explain("allreduce", x.nbytes).reason
    assert "rank 1 can't map the memory of all ranks" in reason, reason
    assert "belongs to another process" in reason, reason
    np.testing.assert_array_equal(mpicoll.allreduce(x), want)
"""
    done = mpirun(2, "-W", "error", program(f"import os\n{text}"))
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
@pytest.mark.extension
def test_ranks_that_may_not_read_each_other(program: Callable[[str], Path]) -> None:
    text = f"""
from mpicoll.transport import shm
import errno, os
if int(os.environ["OMPI_COMM_WORLD_RANK"]) == 1:
    def read(*arguments):
        raise OSError(errno.EPERM, "Operation not permitted")
    shm.ProcessReader.read = read
{SWEEP}
try:
    mpicoll.allreduce(x, algorithm="cma")
except mpicoll.AlgorithmError as error:
    assert "rank 1 can't read the memory of its peers: Operation not permitted" in str(error), error
else:
    raise AssertionError
np.testing.assert_array_equal(mpicoll.allreduce(x, algorithm="shm_pipelined"), want)
"""
    done = mpirun(2, "-W", "error", program(text))
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
@pytest.mark.extension
def test_reading_that_becomes_forbidden(program: Callable[[str], Path]) -> None:
    """A library that protects its secrets makes the process unreadable after the start of the job."""
    text = f"""
import ctypes
{SWEEP}
libc = ctypes.CDLL(None, use_errno=True)
CAP_SYS_PTRACE, PR_SET_DUMPABLE = 19, 4
if os.geteuid() == 0:
    # Like the ranks of an ordinary user.
    header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, sets) == 0
    sets[0] &= ~(1 << CAP_SYS_PTRACE)
    sets[1] &= ~(1 << CAP_SYS_PTRACE)
    assert libc.capset(header, sets) == 0
request = mpicoll.iallreduce(x, algorithm="cma")
np.testing.assert_array_equal(request.wait(), want)
with mpicoll.algorithms(allreduce="cma"):
    plan = mpicoll.allreduce_init(x)
    for state in (1, 0, 1):
        if world.rank == 1:
            assert libc.prctl(PR_SET_DUMPABLE, state, 0, 0, 0) == 0
        mpicoll.barrier()
        y = x.copy()
        for result in (mpicoll.allreduce(x), mpicoll.allreduce(y, out=y), mpicoll.iallreduce(x).wait(), plan()):
            np.testing.assert_array_equal(result, want)
        block = np.split(want, world.size)[world.rank]
        np.testing.assert_array_equal(mpicoll.reduce_scatter(x, algorithm="cma"), block)
        assert (mpicoll.bcast(x, 1, algorithm="cma") == mpicoll.bcast(x, 1, algorithm="native")).all()
        reason = mpicoll.explain("allreduce", x.nbytes).reason
        why = "path of shm_pipelined, because rank 1 forbids others to read its memory (PR_SET_DUMPABLE)"
        assert (why in reason) == (state == 0), reason
        mpicoll.barrier()
"""
    done = mpirun(2, "-W", "error", program(text))
    assert done.returncode == 0, done.stdout
