"""Memory that the processes of a node share, and their access to each other's private memory. Linux."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mpicoll.transport.base import Memory, Read

_PAGE = mmap.PAGESIZE

_DIRECTORY = "/dev/shm"

_NAME = "mpicoll"


@dataclass(frozen=True, slots=True)
class Handle:
    """By which another process of this node finds a piece of memory."""

    pid: int
    path: str
    nbytes: int
    cookie: int


class Shared:
    """Memory of this process that others can map.

    It has no name that could outlive its processes: an anonymous file, or one whose name is removed by ``seal``, which
    is to be called when the others have mapped it. Only processes of the same user can.
    """

    def __init__(self, nbytes: int, *, named: bool = False) -> None:
        # A page of its own tells those who map it that they have found the right one.
        total = nbytes + _PAGE
        self._name: str | None = None
        if named:
            self._name = f"{_DIRECTORY}/{_NAME}-{secrets.token_hex(16)}"
            self._fd = os.open(self._name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        else:
            self._fd = os.memfd_create(_NAME)
            os.fchmod(self._fd, 0o600)
        try:
            os.ftruncate(self._fd, total)
            if named:
                # The file system may be small, and says so now, rather than by a signal at the first touch.
                os.posix_fallocate(self._fd, 0, total)
            self._map = mmap.mmap(self._fd, total)
        except OSError:
            self.seal()
            raise
        cookie = secrets.randbits(63)
        self._map[:8] = cookie.to_bytes(8, "little")
        path = self._name or f"/proc/{os.getpid()}/fd/{self._fd}"
        self.handle = Handle(os.getpid(), path, nbytes, cookie)
        self.memory: Memory = np.frombuffer(self._map, np.uint8, nbytes, _PAGE)

    def seal(self) -> None:
        """Nobody else can map it from now on."""
        os.close(self._fd)
        if self._name is not None:
            with suppress(FileNotFoundError):
                Path(self._name).unlink()


def attach(handle: Handle) -> Memory:
    """Map the memory of another process of this node. Raises OSError if it can't be reached."""
    fd = os.open(handle.path, os.O_RDWR)
    try:
        mapped = mmap.mmap(fd, handle.nbytes + _PAGE)
    finally:
        os.close(fd)
    if int.from_bytes(mapped[:8], "little") != handle.cookie:
        # Where processes of a node don't see each other's numbers, another process may have this one.
        raise OSError(errno.ESRCH, "it belongs to another process", handle.path)
    return np.frombuffer(mapped, np.uint8, handle.nbytes, _PAGE)


class _Extent(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def reader(pid: int) -> Read:
    """What copies ``(source, target, nbytes)`` from an address of process `pid` to one of this process.

    Raises OSError, in calls too, if the kernel does not let this process read that one.
    """
    try:
        call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except AttributeError:
        raise OSError(errno.ENOSYS, "the C library has no process_vm_readv") from None
    call.restype = ctypes.c_ssize_t
    call.argtypes = [
        ctypes.c_int,
        ctypes.POINTER(_Extent),
        ctypes.c_ulong,
        ctypes.POINTER(_Extent),
        ctypes.c_ulong,
        ctypes.c_ulong,
    ]

    def read(source: int, target: int, nbytes: int) -> None:
        # Extents of each call's own, since several threads may read at once.
        here, there = _Extent(), _Extent()
        while nbytes > 0:
            here.address, here.nbytes = target, nbytes
            there.address, there.nbytes = source, nbytes
            done = call(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
            if done <= 0:
                number = ctypes.get_errno() if done else errno.EFAULT
                raise OSError(number, f"reading the memory of process {pid}: {os.strerror(number)}")
            # The kernel may stop early, and takes 2 GiB at a time at most.
            source, target, nbytes = source + done, target + done, nbytes - done

    return read


def _yielder() -> Callable[[], object]:
    try:
        # Unlike os.sched_yield of some Python versions it lets other threads of this process run as well.
        return ctypes.CDLL(None).sched_yield
    except AttributeError:
        return os.sched_yield


give_way = _yielder()
"""Let other processes and threads have this core."""


def _check_free(nbytes: int) -> None:
    """Raise MemoryError if the machine has less memory than that: a page is taken when it is first touched, and then it
    is too late for an error."""
    with suppress(OSError, ValueError, IndexError):
        text = Path("/proc/meminfo").read_text()
        free = 1024 * int(text.partition("MemAvailable:")[2].split()[0])
        if nbytes > free:
            raise MemoryError(f"the ranks need {nbytes} bytes, and {free} are free")


def share(
    nbytes: int, exchange: Callable[[object], Sequence[object]], rank: int, *, named: bool
) -> tuple[list[Memory] | None, str]:
    """Collective over processes of one node: memory of `nbytes` of each of them (0: none), as this process sees it.

    ``exchange(value)`` gives the values of all, by rank. All get None and the same reason if it fails for one of them.
    """
    own: Shared | None = None
    told: Handle | str
    try:
        own = Shared(nbytes, named=named)
        told = own.handle
    except (OSError, OverflowError, ValueError, MemoryError) as error:
        told = f"rank {rank} can't allocate {nbytes} bytes of shared memory: {error}"
    memories: list[Memory] = []
    failure = ""
    try:
        handles = exchange(told)
        failure = next((one for one in handles if isinstance(one, str)), "")
        if not failure:
            try:
                _check_free(sum(one.nbytes for one in handles if isinstance(one, Handle)))
                memories = [
                    own.memory if peer == rank and own is not None else attach(one)
                    for peer, one in enumerate(handles)
                    if isinstance(one, Handle)
                ]
            except (OSError, OverflowError, ValueError, MemoryError) as error:
                failure = f"rank {rank} can't map the memory of all ranks: {error}"
            failure = next((str(one) for one in exchange(failure) if one), "")
    finally:
        if own is not None:
            own.seal()
    return (None, failure) if failure else (memories, "")
