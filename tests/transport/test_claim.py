"""One process communicates as a rank, and what it starts is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.launch import mpirun
from support.patches import patch_within

from mpicoll.engine import startup
from mpicoll.transport import claim

CLAIMING = """
import json
import sys
from mpicoll.transport import claim

for line in sys.stdin:
    print(json.dumps(claim.claim(json.loads(line))), flush=True)
"""


class Claimer:
    """A process that claims ranks, and holds the claims until it is killed."""

    def __init__(self, *prefix: str) -> None:
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-c", CLAIMING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def claim(self, launched: dict[str, str], **variables: str) -> object:
        """Return the result of a claim."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(launched | variables) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline() or '"it has ended"')

    def kill(self) -> None:
        """Kill the process, which can release nothing itself."""
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate(timeout=20)


@pytest.fixture
def claimers() -> Iterator[list[Claimer]]:
    both = [Claimer(), Claimer()]
    yield both
    for one in both:
        one.kill()


@pytest.fixture
def launched(tmp_path: Path) -> dict[str, str]:
    """The variables of a launcher."""
    return {
        "PMIX_SERVER_URI41": f"prterun-here-{os.getpid()}@0.0;tcp4://127.0.0.1:1",
        "PMIX_NAMESPACE": "prterun-here@1",
        "PMIX_RANK": "0",
        "PMIX_SERVER_TMPDIR": str(tmp_path),
    }


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The claims of this process, which has none of its own meanwhile."""
    held: list[int] = []
    monkeypatch.setattr(claim, "_claims", held)
    yield held
    for one in held:
        os.close(one)


def test_a_rank_is_claimed_once(claimers: list[Claimer], launched: dict[str, str], held: list[int]) -> None:
    first, second = claimers
    assert first.claim(launched) is None
    assert first.claim(launched) is None
    assert second.claim(launched) == first.process.pid
    assert claim.claim(launched) == first.process.pid
    first.kill()
    assert second.claim(launched) is None
    assert claim.claim(launched) == second.process.pid
    assert not held
    assert claim.claim(launched | {"PMIX_NAMESPACE": "prterun-here@2"}) is None
    assert len(held) == 1


@pytest.mark.parametrize(
    "changed",
    [{"PMIX_RANK": "1"}, {"PMIX_NAMESPACE": "@2"}, {"PMIX_SERVER_URI41": "prterun-here@0.0;tcp4://127.0.0.1:2"}],
    ids=" ".join,
)
def test_ranks_of_other_jobs_are_others(changed: dict[str, str], launched: dict[str, str], held: list[int]) -> None:
    assert claim.claim(launched) is None
    first = held.pop()
    assert claim.claim(launched | changed) is None
    assert len(held) == 1
    os.close(first)


def test_a_process_of_another_pid_namespace_has_claimed(launched: dict[str, str], held: list[int]) -> None:
    """As of a container: its number there is that of another process here."""
    apart = Claimer("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child")
    try:
        if apart.claim(launched) is not None:
            pytest.skip("no PID namespace can be made here")
        here = Claimer("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child")
        try:
            assert here.claim(launched) == 0
        finally:
            here.kill()
    finally:
        apart.kill()


def test_others_can_not_keep_a_rank_from_starting(
    launched: dict[str, str], held: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert claim.claim(launched) is None
    file = Path(f"/proc/self/fd/{held[0]}").readlink()
    assert file.stat().st_mode & 0o777 == 0o600
    os.close(held.pop())
    with monkeypatch.context() as patched:
        patch_within(patched, claim, os, getuid=lambda: os.getuid() + 1)
        assert claim.claim(launched) is None  # the file is another user's
    file.unlink()
    os.mkfifo(file)
    assert claim.claim(launched) is None
    file.unlink()
    file.symlink_to("elsewhere")
    assert claim.claim(launched) is None
    assert not file.with_name("elsewhere").exists()
    assert claim.claim(launched | {"PMIX_SERVER_TMPDIR": str(file.with_name("absent"))}) is None
    assert claim.claim(launched | {"PMIX_RANK": "9" * 30}) is None
    assert not held


def test_a_file_system_that_does_not_respond(monkeypatch: pytest.MonkeyPatch, launched: dict[str, str]) -> None:
    responds = threading.Event()
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(startup, "_CLAIM_TIMEOUT", 0.05)
    monkeypatch.setattr(claim, "claim", lambda environ: 1 if responds.wait(20) else None)
    startup.reject_child_processes(without_mpi=False)
    responds.set()


def test_nothing_is_claimed_where_jobs_look_alike() -> None:
    assert [claim.claim({"PMI_RANK": "0", "PMI_SIZE": "2", "PMI_FD": "9"}) for _ in range(2)] == [None, None]


PROGRAM = """
import os
import subprocess
import sys
import numpy as np
import mpicoll
from mpicoll.cli.listening import list_sockets

if len(sys.argv) > 2:
    with_whom = sys.argv[2]
    try:
        mpicoll.world()
    except mpicoll.CommunicatorError as error:
        assert f"process {with_whom} can't both communicate as rank" in str(error), error
        sys.exit(7)
else:
    total = mpicoll.allreduce(np.ones(1))
    assert not [name for name in list_sockets() if name.startswith("unix:")], list_sockets()
    child = [sys.executable, "-W", "error", "-c", sys.argv[1], sys.argv[1], str(os.getpid())]
    assert subprocess.run(child, timeout=30).returncode == 7
    assert mpicoll.allreduce(total) == 4
    print("done")
"""


@pytest.mark.slow
def test_what_a_rank_starts_does_not_pass_for_it() -> None:
    """Lightning without its plugin for MPI starts more processes from each rank."""
    done = mpirun(2, "-W", "error", "-c", PROGRAM, PROGRAM)
    assert (done.returncode, done.stdout.split()) == (0, ["done"] * 2), done.stdout
