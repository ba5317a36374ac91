"""The claim of a rank by one process, where a rank has started other processes.

Those inherit the launcher's variables and appear to be the rank: MPI then fails in one of them, hangs, or runs the job
twice. So the first process of a rank that initialises MPI claims the rank for its lifetime.

The claim is a lock of one byte in a file of the launcher's folder for the job, which only this user can enter. The
kernel releases it with the process, and reports the owner by its number in the reader's PID namespace. The launcher
removes the folder.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
from collections.abc import Mapping
from contextlib import suppress

from mpicoll.transport.hashes import blake2b

_claims: list[int] = []
"""The descriptor of the file in which this process holds a lock. Closing any other one of that file would release
it."""

_LOCK = "hhqqi4x"
"""struct flock: l_type, l_whence, l_start, l_len, l_pid."""


def claim(environ: Mapping[str, str]) -> int | None:
    """Claim the rank that the launcher's variables specify.

    Returns None, or the id of the process that has claimed the rank before: 0 if it is in another PID namespace. May
    wait for the file system of temporary files.

    Nothing is claimed where the variables don't distinguish jobs, or name no folder: those of MPICH don't, whose
    connection to the launcher is not inherited by other processes anyway. No claim is refused where the file can't be
    used, belongs to another user, or where the owner has ended meanwhile: a failing claim must not keep a rank from
    starting.
    """
    server = next((value for name, value in sorted(environ.items()) if name.startswith("PMIX_SERVER_URI")), None)
    folder, rank = environ.get("PMIX_SERVER_TMPDIR"), environ.get("PMIX_RANK", "")
    if server is None or not folder or not (rank.isascii() and rank.isdecimal()) or _claims:
        return None
    job = blake2b(f"{server} {environ.get('PMIX_NAMESPACE')}".encode(), digest_size=16).hexdigest()
    try:
        file = _open_private(f"{folder}/mpicoll-ranks-{job}")
    except OSError:
        return None
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, int(rank))
    except (OSError, OverflowError) as error:
        owner = _find_owner(file, int(rank)) if isinstance(error, BlockingIOError) else None
        os.close(file)
        return owner
    _claims.append(file)
    return None


def _open_private(path: str) -> int:
    """Open a file of this user. Raises OSError if the file belongs to another user, or is none."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    found = os.fstat(file)
    if stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid():
        return file
    os.close(file)
    raise PermissionError(errno.EPERM, "not a file of this user", path)


def _find_owner(file: int, rank: int) -> int | None:
    """Return the id of the process that has claimed `rank`, 0 if it is in another PID namespace; None if there is none
    any more."""
    with suppress(OSError):
        kind, _, _, _, owner = struct.unpack(
            _LOCK, fcntl.fcntl(file, fcntl.F_GETLK, struct.pack(_LOCK, fcntl.F_WRLCK, os.SEEK_SET, rank, 1, 0))
        )
        if kind != fcntl.F_UNLCK:
            return max(int(owner), 0)
    return None
