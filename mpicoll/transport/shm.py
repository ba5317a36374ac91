"""Memory that the processes of a node share, and their access to each other's private memory. Linux."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from weakref import finalize

import numpy as np

from mpicoll.named_tuple import NamedTuple
from mpicoll.transport.base import Memory
from mpicoll.transport.free_memory import query_free_memory

_PAGE = mmap.PAGESIZE

_DIRECTORY = "/dev/shm"

_NAME = "mpicoll"

_ALWAYS_FREE = 1 << 20
"""Bytes that any machine has free: it takes longer to query the free memory than to share so few."""


class MemoryHandle(NamedTuple):
    """The handle by which another process of this node maps memory.

    It is a file; a page that begins with `cookie` lies before the memory in it, or nothing if `cookie` is None.
    """

    path: str
    nbytes: int
    cookie: int | None


def _draw_cookie() -> int:
    return int.from_bytes(os.urandom(8), "little") >> 1


_NOTHING = MemoryHandle("", 0, None)
"""The handle of no bytes, for which there is no file."""


class SharedBlock:
    """Memory of this process that other processes of the same user can map.

    It has no name that could outlive its processes: it is an anonymous file, or one whose name is removed by
    ``seal``, which is to be called when the other processes have mapped it.
    """

    def __init__(self, nbytes: int, *, named: bool = False, label: str = _NAME) -> None:
        # The first page holds a cookie, by which other processes verify that they mapped the right file.
        total = nbytes + _PAGE
        self._name: str | None = None
        if named:
            self._name = f"{_DIRECTORY}/{label}-{os.urandom(16).hex()}"
            self._fd = os.open(self._name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        else:
            self._fd = os.memfd_create(label)
            os.fchmod(self._fd, 0o600)
        try:
            os.ftruncate(self._fd, total)
            if named:
                # If the file system is full, this raises an error now, instead of SIGBUS at the first access.
                os.posix_fallocate(self._fd, 0, total)
            whole = np.asarray(_Mapping(self._fd, total))
        except BaseException:
            self.seal()
            raise
        cookie = _draw_cookie()
        whole[:8].view(np.int64)[0] = cookie
        path = self._name or f"/proc/{os.getpid()}/fd/{self._fd}"
        self.handle = MemoryHandle(path, nbytes, cookie)
        self.memory: Memory = whole[_PAGE:]

    def duplicate(self) -> int:
        """Return another descriptor of the file, by which other processes can map the memory as long as it is open."""
        return os.dup(self._fd)

    def seal(self) -> None:
        """Close the descriptor and remove the name, so that no other process can map the memory from now on."""
        os.close(self._fd)
        if self._name is not None:
            with suppress(FileNotFoundError):
                os.unlink(self._name)  # noqa: PTH108


class _Mapping:
    """A mapped file, which is unmapped when the last array in it is deleted.

    Python's mmap would keep the file open as well.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        if os.fstat(fd).st_size < nbytes:
            raise OSError(errno.EINVAL, f"the file has less than {nbytes} bytes")
        address = _LIBC.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
        if address == _MAP_FAILED:
            raise OSError(ctypes.get_errno(), f"mapping {nbytes} bytes: {os.strerror(ctypes.get_errno())}")
        self.__array_interface__ = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}
        finalize(self, _LIBC.munmap, address, nbytes).atexit = False


_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FAILED = ctypes.c_void_p(-1).value


def attach(handle: MemoryHandle, kept: list[int] | None = None) -> Memory:
    """Map the memory of another process of this node. Raises OSError if it can't be reached. The descriptor is appended
    to `kept`, if given, and stays open."""
    if handle == _NOTHING:
        return np.empty(0, np.uint8)
    offset = 0 if handle.cookie is None else _PAGE
    fd = os.open(handle.path, os.O_RDWR)
    try:
        whole: Memory = np.asarray(_Mapping(fd, handle.nbytes + offset))
        if kept is not None:
            kept.append(os.dup(fd))
    finally:
        os.close(fd)
    if handle.cookie is not None and whole[:8].view(np.int64)[0] != handle.cookie:
        # In another PID namespace, this process id may be that of another process.
        raise OSError(errno.ESRCH, "it belongs to another process", handle.path)
    return whole[offset:]


class _Extent(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


_READ = getattr(_LIBC, "process_vm_readv", None)
_WRITE = getattr(_LIBC, "process_vm_writev", None)
for _function in (_READ, _WRITE):
    if _function is None:
        continue
    _function.restype = ctypes.c_ssize_t
    _function.argtypes = [
        ctypes.c_int,
        ctypes.POINTER(_Extent),
        ctypes.c_ulong,
        ctypes.POINTER(_Extent),
        ctypes.c_ulong,
        ctypes.c_ulong,
    ]

_cookie = np.array([_draw_cookie()])
"""A word in the private memory of this process, by which other processes verify that they read the right process."""


class ProcessMemory(NamedTuple):
    """The handle by which another process of this node reads the private memory of a process."""

    pid: int
    address: int
    """Address of the cookie."""
    cookie: int


def describe_memory() -> ProcessMemory:
    """Return the handle of the private memory of this process, for the :class:`ProcessReader` of other processes."""
    return ProcessMemory(os.getpid(), _cookie.ctypes.data, int(_cookie[0]))


class ProcessReader:
    """Access to the private memory of another process, as long as the kernel permits it."""

    def __init__(self, process: ProcessMemory) -> None:
        self._process = process

    def read(self, source: int, target: int, nbytes: int) -> None:
        """Copy from an address of that process to an address of this one. Raises OSError if the kernel does not allow
        it."""
        if _READ is None:
            raise OSError(errno.ENOSYS, "the C library has no process_vm_readv")
        pid = self._process.pid
        # Each call has its own extents, since several threads may read at once.
        here, there = _Extent(), _Extent()
        while nbytes > 0:
            here.address, here.nbytes = target, nbytes
            there.address, there.nbytes = source, nbytes
            done = _READ(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
            if done <= 0:
                number = ctypes.get_errno() if done else errno.EFAULT
                raise OSError(number, os.strerror(number))
            # The kernel may read less, and reads at most 2 GiB per call.
            source, target, nbytes = source + done, target + done, nbytes - done

    def check(self) -> None:
        """Raise OSError if the memory of that process can't be read and written, or if another process has its
        number."""
        found = ctypes.c_int64()
        self.read(self._process.address, ctypes.addressof(found), 8)
        if found.value != self._process.cookie:
            raise OSError(errno.ESRCH, "another process has its number: it is in another PID namespace")
        # What is there already: collectives write to it, too.
        here = _Extent(ctypes.addressof(found), 8)
        there = _Extent(self._process.address, 8)
        if _WRITE is None or _WRITE(self._process.pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0) != 8:
            number = errno.ENOSYS if _WRITE is None else ctypes.get_errno()
            raise OSError(number, f"process_vm_writev: {os.strerror(number)}")


def _check_free(nbytes: int) -> None:
    """Raise MemoryError if this machine, or this process's group (cgroup), has less than `nbytes` of free memory.

    A page is allocated when it is first touched, and then no error can be raised any more.
    """
    free = query_free_memory()
    if free is not None and nbytes > free:
        raise MemoryError(f"the ranks need {nbytes} bytes, and {free} are free")


def share(
    nbytes: int,
    exchange: Callable[[object], Sequence[object]],
    rank: int,
    *,
    named: bool,
    label: str = _NAME,
    kept: list[int] | None = None,
) -> tuple[list[Memory] | None, str]:
    """Share memory between processes of one node, and return that of each as this process sees it. Collective.

    `nbytes` is the size of this rank's memory (0: none). ``exchange(value)`` returns the values of all ranks, by
    rank. If it fails on one rank, all get None and the same reason. `label` is the name of the memory in lists of the
    process's files. A descriptor of rank 0's memory is appended to `kept`, if given.
    """
    own: SharedBlock | None = None
    own_handle: MemoryHandle | str = _NOTHING
    try:
        if nbytes:
            own = SharedBlock(nbytes, named=named, label=label)
            own_handle = own.handle
            if kept is not None and rank == 0:
                kept.append(own.duplicate())
    except (OSError, OverflowError, ValueError, MemoryError) as error:
        own_handle = f"rank {rank} can't allocate {nbytes} bytes of shared memory: {error}"
    try:
        # Named memory was already allocated by posix_fallocate.
        return _map_all(own_handle, None if own is None else own.memory, exchange, rank, is_allocated=named, kept=kept)
    finally:
        if own is not None:
            own.seal()


def adopt(
    memory: Memory, fd: int, exchange: Callable[[object], Sequence[object]], rank: int
) -> tuple[list[Memory] | None, str]:
    """Share existing memory, the beginning of the file behind `fd`, as :func:`share` does."""
    own_handle = MemoryHandle(f"/proc/{os.getpid()}/fd/{fd}", memory.nbytes, None)
    return _map_all(own_handle, memory, exchange, rank, is_allocated=True)


def _map_all(
    own_handle: MemoryHandle | str,
    own: Memory | None,
    exchange: Callable[[object], Sequence[object]],
    rank: int,
    *,
    is_allocated: bool,
    kept: list[int] | None = None,
) -> tuple[list[Memory] | None, str]:
    handles = exchange(own_handle)
    memories: list[Memory] = []
    failure = next((one for one in handles if isinstance(one, str)), "")
    if failure:
        return None, failure
    try:
        total = sum(one.nbytes for one in handles if isinstance(one, MemoryHandle))
        # A rank that shares nothing leaves the look to those that do.
        if not is_allocated and own is not None and total > _ALWAYS_FREE:
            _check_free(total)
        memories = [
            own if peer == rank and own is not None else attach(one, None if peer else kept)
            for peer, one in enumerate(handles)
            if isinstance(one, MemoryHandle)
        ]
    except (OSError, OverflowError, ValueError, MemoryError) as error:
        failure = f"rank {rank} can't map the memory of all ranks: {error}"
    failure = next((str(one) for one in exchange(failure) if one), "")
    return (None, failure) if failure else (memories, "")
