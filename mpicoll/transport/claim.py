"""The claim of a rank by one process, where a rank has started other processes.

Those inherit the launcher's variables and appear to be the rank: MPI then fails in one of them, hangs, or runs the job
twice. So the first process of a rank that initialises MPI claims the rank for its lifetime.
"""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import struct
from collections.abc import Mapping

_claims: list[int] = []
"""The descriptor that holds the claim of this process. A socket object would warn at exit that it was not closed."""


def claim(environ: Mapping[str, str]) -> int | None:
    """Claim the rank that the launcher's variables specify.

    Returns None, or the id of the process that has claimed the rank before.

    Nothing is claimed where the variables don't distinguish jobs: those of MPICH don't, whose connection to the
    launcher is not inherited by other processes anyway. No claim is refused where sockets are forbidden, or where a
    process of another user, or one that has ended meanwhile, has the name: a failing claim must not keep a rank
    from starting.
    """
    # The server's address has a port, so no other job in this network namespace has the same.
    server = next((value for name, value in sorted(environ.items()) if name.startswith("PMIX_SERVER_URI")), None)
    if server is None or "PMIX_RANK" not in environ or _claims:
        return None
    job = f"{server} {environ.get('PMIX_NAMESPACE')} {environ['PMIX_RANK']}"
    # Linux removes an abstract name with its process. The name is visible in the network namespace only.
    name = f"\0mpicoll-{os.getuid()}-{hashlib.sha256(job.encode()).hexdigest()[:32]}"
    try:
        with socket.socket(socket.AF_UNIX) as held:
            held.bind(name)
            held.listen()
            _claims.append(held.detach())
    except OSError as error:
        return _find_owner(name) if error.errno == errno.EADDRINUSE else None
    return None


def _find_owner(name: str) -> int | None:
    """Return the id of the process of this user that listens at `name`, or None."""
    try:
        with socket.socket(socket.AF_UNIX) as client:
            client.setblocking(False)
            client.connect(name)
            credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    except OSError:
        return None
    pid, user, _ = struct.unpack("3i", credentials)
    return int(pid) if user == os.getuid() else None
