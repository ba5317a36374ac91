"""Which process communicates as a rank, where a rank has started others.

They inherit the launcher's variables and pass for the rank: MPI then fails in one of them, hangs, or runs the job
twice. So the first process of a rank that starts MPI claims it, for as long as that process lives.
"""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import struct
from collections.abc import Mapping

_held: list[int] = []
"""The descriptor that keeps the claim of this process. A socket object would warn, at exit, that nobody closed it."""


def claim(environ: Mapping[str, str]) -> int | None:
    """Claim the rank that the launcher's variables name. Returns None, or the id of the process that has claimed it
    before.

    Nothing is claimed where the variables don't tell jobs apart: those of MPICH don't, whose connection to the launcher
    does not pass to other processes anyway. Nor is anything refused where sockets are forbidden, or where a process of
    another user, or one that has ended meanwhile, has the name: a claim is a help, and must not keep a rank from
    starting.
    """
    # The server's address has a port, so no other job in this network namespace has the same.
    server = next((value for name, value in sorted(environ.items()) if name.startswith("PMIX_SERVER_URI")), None)
    if server is None or "PMIX_RANK" not in environ or _held:
        return None
    job = f"{server} {environ.get('PMIX_NAMESPACE')} {environ['PMIX_RANK']}"
    # Linux's abstract names are gone with the process, and known in the network namespace only.
    name = f"\0mpicoll-{os.getuid()}-{hashlib.sha256(job.encode()).hexdigest()[:32]}"
    try:
        with socket.socket(socket.AF_UNIX) as held:
            held.bind(name)
            held.listen()
            _held.append(held.detach())
    except OSError as error:
        return _owner(name) if error.errno == errno.EADDRINUSE else None
    return None


def _owner(name: str) -> int | None:
    """The process of this user that listens at `name`, if there is one."""
    try:
        with socket.socket(socket.AF_UNIX) as asked:
            asked.setblocking(False)
            asked.connect(name)
            credentials = asked.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    except OSError:
        return None
    pid, user, _ = struct.unpack("3i", credentials)
    return int(pid) if user == os.getuid() else None
