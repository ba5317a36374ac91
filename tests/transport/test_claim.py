"""One process communicates as a rank, and what it starts is refused."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys

import pytest
from support.launch import mpirun
from support.patches import patch_within

from mpicoll.transport import claim

LAUNCHED = {
    "PMIX_SERVER_URI41": f"prterun-here-{os.getpid()}@0.0;tcp4://127.0.0.1:1",
    "PMIX_NAMESPACE": "prterun-here@1",
    "PMIX_RANK": "0",
}


def test_a_rank_is_claimed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.ExitStack() as claimed:

        def claim_anew(**variables: str) -> int | None:
            """As a process that has claimed nothing."""
            held: list[int] = []
            monkeypatch.setattr(claim, "_claims", held)
            owner = claim.claim(LAUNCHED | variables)
            assert claim.claim(LAUNCHED | variables) == owner
            assert len(held) == (owner is None)
            for one in held:
                claimed.callback(os.close, one)
            return owner

        assert claim_anew() is None
        assert claim_anew() == os.getpid()
        assert claim_anew(PMIX_RANK="1") is None
        assert claim_anew(PMIX_NAMESPACE="prterun-here@2") is None
        assert claim_anew(PMIX_SERVER_URI41="prterun-here@0.0;tcp4://127.0.0.1:2") is None
        assert claim_anew() == os.getpid()
    assert claim_anew() is None
    os.close(claim._claims.pop())


def test_others_can_not_keep_a_rank_from_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    monkeypatch.setattr(claim, "_claims", held)
    assert claim.claim(LAUNCHED) is None
    user = os.getuid()
    monkeypatch.setattr(claim, "_claims", [])
    other = claim._find_owner.__code__
    monkeypatch.setattr(os, "getuid", lambda: user + 1 if sys._getframe(1).f_code is other else user)
    assert claim.claim(LAUNCHED) is None  # another user has the name
    os.close(held.pop())

    def forbidden(*args: object) -> None:
        raise PermissionError(errno.EPERM, "no sockets here")

    patch_within(monkeypatch, claim, socket, socket=forbidden)
    assert claim.claim(LAUNCHED) is None


def test_nothing_is_claimed_where_jobs_look_alike() -> None:
    assert [claim.claim({"PMI_RANK": "0", "PMI_SIZE": "2", "PMI_FD": "9"}) for _ in range(2)] == [None, None]


PROGRAM = """
import os
import subprocess
import sys
import numpy as np
import mpicoll

if len(sys.argv) > 2:
    with_whom = sys.argv[2]
    try:
        mpicoll.world()
    except mpicoll.CommunicatorError as error:
        assert f"process {with_whom} can't both communicate as rank" in str(error), error
        sys.exit(7)
else:
    total = mpicoll.allreduce(np.ones(1))
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
