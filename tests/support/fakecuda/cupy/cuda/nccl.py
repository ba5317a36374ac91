# ruff: noqa: N802
"""``cupy.cuda.nccl`` among threads and processes of one node, which meet in files in shared memory.

An operation is work of the stream that it is given; it reads its input when it runs, and is done when all ranks are
there. A rank that does not come within ``FAKECUDA_NCCL_TIMEOUT`` seconds (20), or comes with another call, is an error,
where NCCL would wait for ever or do whatever it likes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from fakecuda import errors, memory, streams
from fakecuda.errors import CUDARuntimeError

available = True

NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN, NCCL_AVG = range(5)
NCCL_INT8 = NCCL_CHAR = 0
NCCL_UINT8 = 1
NCCL_INT32 = NCCL_INT = 2
NCCL_UINT32 = 3
NCCL_INT64 = 4
NCCL_UINT64 = 5
NCCL_FLOAT16 = NCCL_HALF = 6
NCCL_FLOAT32 = NCCL_FLOAT = 7
NCCL_FLOAT64 = NCCL_DOUBLE = 8
NCCL_BFLOAT16 = 9

_DTYPES = ("i1", "u1", "i4", "u4", "i8", "u8", "f2", "f4", "f8")
_UFUNCS = {NCCL_SUM: np.add, NCCL_PROD: np.multiply, NCCL_MAX: np.maximum, NCCL_MIN: np.minimum, NCCL_AVG: np.add}
_ID_BYTES = 128
_ROOM = Path("/dev/shm")
_LOOK = 2e-4

_SYSTEM, _INVALID_ARGUMENT, _INVALID_USAGE = 2, 4, 5
_WORDS = {
    _SYSTEM: "NCCL_ERROR_SYSTEM_ERROR: unhandled system error",
    _INVALID_ARGUMENT: "NCCL_ERROR_INVALID_ARGUMENT: invalid argument",
    _INVALID_USAGE: "NCCL_ERROR_INVALID_USAGE: invalid usage",
}


class NcclError(RuntimeError):
    """As cupy raises it. What went wrong in the fake is told behind NCCL's words."""

    def __init__(self, status: int, detail: str = "") -> None:
        self.status = status
        self.detail = detail
        super().__init__(_WORDS[status] + (f" ({detail})" if detail else ""))

    def __reduce__(self) -> Any:
        return type(self), (self.status, self.detail)


def get_build_version() -> int:
    return 22703


def get_version() -> int:
    return 22703


def get_unique_id() -> bytes:
    _tidy()
    return f"fakenccl-{os.getpid()}-{os.urandom(8).hex()}".encode().ljust(_ID_BYTES, b"\0")


def _tidy() -> None:
    """Remove what ranks have left behind that died."""
    for folder in _ROOM.glob("fakenccl-*"):
        with contextlib.suppress(OSError):
            old = time.time() - folder.stat().st_mtime > 60
            if old and not Path("/proc", folder.name.split("-")[1]).exists():
                shutil.rmtree(folder, ignore_errors=True)


def _timeout() -> float:
    return float(os.environ.get("FAKECUDA_NCCL_TIMEOUT", "20"))


def _dtype(datatype: int) -> np.dtype[Any]:
    if datatype == NCCL_BFLOAT16:
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(_DTYPES[datatype])


class _Call:
    """A call of a rank. `number` counts the collectives of a communicator, or the messages between two ranks."""

    def __init__(
        self,
        comm: NcclCommunicator,
        name: str,
        number: int,
        send: int,
        recv: int,
        count: int,
        datatype: int,
        **more: int,
    ) -> None:
        self.comm, self.name, self.number = comm, name, number
        self.send, self.recv, self.count, self.dtype = send, recv, count, _dtype(datatype)
        self.more = more
        self.posted = self.done = False

    def __str__(self) -> str:
        more = "".join(f", {key} {value}" for key, value in self.more.items())
        return f"{self.name} number {self.number} ({self.count} {self.dtype.name}{more}) on rank {self.comm._rank}"

    def memory(self, address: int, count: int) -> Any:
        """Device memory, now."""
        found = memory.find(address)
        if count and (found is None or found.device != self.comm._device):
            raise CUDARuntimeError(errors.ILLEGAL_ADDRESS, f"{self}: {address:#x} of device {self.comm._device}")
        return memory.working_view(address, (count,), self.dtype)

    def post(self) -> None:
        raise NotImplementedError

    def finish(self) -> bool:
        """Return True if the call has completed."""
        raise NotImplementedError


class _Collective(_Call):
    def post(self) -> None:
        size, root, rank = self.comm._size, self.more.get("root"), self.comm._rank
        taken = self.count * (size if self.name == "reduceScatter" else 1)
        if self.name == "broadcast" and rank != root:
            taken = 0
        call = {"name": self.name, "count": self.count, "dtype": self.dtype.name, **self.more, "read": self.comm._read}
        self.comm._put(f"{self.number}-{rank}", call, self.memory(self.send, taken).tobytes())

    def finish(self) -> bool:
        names = [f"{self.number}-{rank}" for rank in range(self.comm._size)]
        if not self.comm._all_there(names):
            return False
        calls, payloads = zip(*map(self.comm._get, names), strict=True)
        read = min(call.pop("read") for call in calls)
        for rank, call in enumerate(calls):
            if call != calls[self.comm._rank]:
                raise NcclError(_INVALID_USAGE, f"{self}: rank {rank} calls {call}")
        parts = [np.frombuffer(one, self.dtype) for one in payloads]
        self.write(parts)
        self.comm._has_read(self.number, read)
        return True

    def write(self, parts: Sequence[Any]) -> None:
        rank, root = self.comm._rank, self.more.get("root")
        if self.name == "broadcast":
            self.memory(self.recv, self.count)[:] = parts[root or 0]
            return
        if self.name == "allGather":
            self.memory(self.recv, self.count * len(parts))[:] = np.concatenate(parts)
            return
        if self.name == "reduce" and rank != root:
            return
        if self.name == "reduceScatter":
            parts = [one[rank * self.count : (rank + 1) * self.count] for one in parts]
        total = parts[0]
        with np.errstate(all="ignore"):
            for one in parts[1:]:
                total = _UFUNCS[self.more["op"]](total, one)
            if self.more["op"] == NCCL_AVG:
                whole = self.dtype.kind in "iu"
                total = (total // len(parts) if whole else total / len(parts)).astype(self.dtype)
        self.memory(self.recv, self.count)[:] = total


class _Send(_Call):
    """Done when it has been received: nothing promises more room than that."""

    def _name(self) -> str:
        return f"message-{self.comm._rank}-{self.more['peer']}-{self.number}"

    def post(self) -> None:
        call = {"count": self.count, "dtype": self.dtype.name}
        self.comm._put(self._name(), call, self.memory(self.send, self.count).tobytes())

    def finish(self) -> bool:
        return not self.comm._all_there([self._name()])


class _Recv(_Call):
    def post(self) -> None:
        """Nothing is to be told."""

    def finish(self) -> bool:
        name = f"message-{self.more['peer']}-{self.comm._rank}-{self.number}"
        if not self.comm._all_there([name]):
            return False
        call, payload = self.comm._get(name)
        if call != {"count": self.count, "dtype": self.dtype.name}:
            raise NcclError(_INVALID_USAGE, f"{self}: the message is {call}")
        self.memory(self.recv, self.count)[:] = np.frombuffer(payload, self.dtype)
        self.comm._drop(name)
        return True


class _Together:
    """Calls that make progress together: the work of a stream."""

    def __init__(self, calls: Sequence[_Call]) -> None:
        self.calls = calls
        self.begin = 0.0

    def __call__(self) -> bool:
        self.begin = self.begin or time.monotonic()
        for one in self.calls:
            if one.comm._over:
                one.done = True
            elif not one.posted:
                one.posted = True
                one.post()
        for one in self.calls:
            one.done = one.done or one.finish()
        late = [one for one in self.calls if not one.done]
        if late and time.monotonic() - self.begin > _timeout():
            late[0].comm._failed = True
            raise NcclError(_SYSTEM, f"{late[0]}: the others did not come within {_timeout():g} s")
        return not late


class _Group(threading.local):
    def __init__(self) -> None:
        self.depth = 0
        self.calls: list[tuple[streams.Stream, _Call]] = []
        self.refused: NcclError | None = None

    def refuse(self, detail: str) -> NcclError:
        """For a call with a wrong argument: then nothing of its group is done."""
        error = NcclError(_INVALID_ARGUMENT, detail)
        if self.depth:
            self.refused = error
        return error


_group = _Group()


def groupStart() -> None:
    _group.depth += 1


def groupEnd() -> None:
    if not _group.depth:
        raise NcclError(_INVALID_USAGE, "groupEnd without groupStart")
    _group.depth -= 1
    if not _group.depth:
        calls, _group.calls = _group.calls, []
        refused, _group.refused = _group.refused, None
        if refused is not None:
            raise refused
        _give(calls)


def _give(calls: Sequence[tuple[streams.Stream, _Call]]) -> None:
    for stream in dict.fromkeys(stream for stream, _ in calls):
        mine = [call for other, call in calls if other is stream]
        comms = dict.fromkeys(call.comm for call in mine)
        # The operations of a communicator are done in the order of the calls, whatever the streams are.
        stream.give(_Together(mine), [comm._last for comm in comms if comm._last is not None])
        for comm in comms:
            comm._last = stream, stream.given


class NcclCommunicator:
    """``NcclCommunicator(ndev, commId, rank)``: returns when all ranks have called it."""

    def __init__(self, ndev: int, commId: bytes, rank: int, config: Any = None) -> None:  # noqa: N803
        if not isinstance(commId, bytes):
            raise TypeError(f"Argument 'commId' has incorrect type (expected bytes, got {type(commId).__name__})")
        if len(commId) != _ID_BYTES:
            raise ValueError(f"commId length {len(commId)} != {_ID_BYTES}.")
        if not 0 <= rank < ndev:
            raise NcclError(_INVALID_ARGUMENT, f"rank {rank} of {ndev}")
        self._size, self._rank, self._device = ndev, rank, streams.device()
        self._folder = _ROOM / commId.rstrip(b"\0").decode()
        self._over = self._failed = False
        self._number = 0
        self._read = 0
        self._read_early: set[int] = set()
        self._kept = 1
        self._messages: dict[tuple[str, int], int] = {}
        self._last: streams.Position | None = None
        self._meet()

    def _meet(self) -> None:
        self._folder.mkdir(exist_ok=True)
        place = [socket.gethostname(), memory.visible()[self._device]]
        self._put(f"rank-{self._rank}", {"size": self._size, "place": place}, b"")
        names = [f"rank-{rank}" for rank in range(self._size)]
        begin = time.monotonic()
        while not self._all_there(names):
            if time.monotonic() - begin > _timeout():
                raise NcclError(_SYSTEM, f"rank {self._rank}: not all ranks came within {_timeout():g} s")
            time.sleep(_LOOK)
        ranks = [self._get(name)[0] for name in names]
        if any(one["size"] != self._size for one in ranks):
            raise NcclError(_INVALID_ARGUMENT, "the ranks name different numbers of ranks")
        places = [tuple(one["place"]) for one in ranks]
        if len(set(places)) < len(places):
            raise NcclError(_INVALID_USAGE, f"Duplicate GPU detected: {places}")

    def _put(self, name: str, call: dict[str, Any], payload: bytes) -> None:
        part = self._folder / f".{name}"
        part.write_bytes(json.dumps(call).encode() + b"\n" + payload)
        part.rename(self._folder / name)

    def _get(self, name: str) -> tuple[dict[str, Any], bytes]:
        call, _, payload = (self._folder / name).read_bytes().partition(b"\n")
        return json.loads(call), payload

    def _all_there(self, names: Sequence[str]) -> bool:
        return all((self._folder / name).exists() for name in names)

    def _drop(self, name: str) -> None:
        (self._folder / name).unlink(missing_ok=True)

    def _has_read(self, number: int, by_all: int) -> None:
        """This rank has read what the others gave to collective `number`, and all ranks that of all up to `by_all`."""
        self._read_early.add(number)
        while self._read + 1 in self._read_early:
            self._read += 1
            self._read_early.discard(self._read)
        for past in range(self._kept, by_all + 1):
            self._drop(f"{past}-{self._rank}")
        self._kept = max(self._kept, by_all + 1)

    @property
    def comm(self) -> int:
        return 0 if self._over else id(self)

    def size(self) -> int:
        return self._size

    def rank_id(self) -> int:
        return self._rank

    def device_id(self) -> int:
        return self._device

    def check_async_error(self) -> None:
        if self._failed:
            raise NcclError(_SYSTEM)

    def destroy(self) -> None:
        if not self._over:
            self._over = True
            (self._folder / f"gone-{self._rank}").touch()
            if self._all_there([f"gone-{rank}" for rank in range(self._size)]):
                shutil.rmtree(self._folder, ignore_errors=True)

    def __del__(self) -> None:
        if "_folder" in vars(self):
            self.destroy()

    abort = destroy  # what is under way ends, either way, and what it leaves is left to chance

    def _call(self, call: _Call, stream: int) -> None:
        if self._over:
            raise _group.refuse("the communicator has been destroyed")
        _group.calls.append((streams.stream_at(stream), call))
        if not _group.depth:
            calls, _group.calls = _group.calls, []
            _give(calls)

    def _collective(self, name: str, send: int, recv: int, count: int, datatype: int, stream: int, **more: int) -> None:
        if not 0 <= more.get("root", 0) < self._size:
            raise _group.refuse(f"{name}: root {more['root']} of {self._size} ranks")
        self._number += 1
        self._call(_Collective(self, name, self._number, send, recv, count, datatype, **more), stream)

    def _message(self, kind: type[_Call], buffer: int, count: int, datatype: int, peer: int, stream: int) -> None:
        if not 0 <= peer < self._size:
            raise _group.refuse(f"peer {peer} of {self._size} ranks")
        key = kind.__name__, peer
        number = self._messages[key] = self._messages.get(key, 0) + 1
        self._call(kind(self, kind.__name__[1:].lower(), number, buffer, buffer, count, datatype, peer=peer), stream)

    def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int) -> None:
        self._collective("allReduce", sendbuf, recvbuf, count, datatype, stream, op=op)

    def reduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, root: int, stream: int) -> None:
        self._collective("reduce", sendbuf, recvbuf, count, datatype, stream, op=op, root=root)

    def broadcast(self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int) -> None:
        self._collective("broadcast", sendbuff, recvbuff, count, datatype, stream, root=root)

    def bcast(self, buff: int, count: int, datatype: int, root: int, stream: int) -> None:
        self._collective("broadcast", buff, buff, count, datatype, stream, root=root)

    def reduceScatter(self, sendbuf: int, recvbuf: int, recvcount: int, datatype: int, op: int, stream: int) -> None:
        self._collective("reduceScatter", sendbuf, recvbuf, recvcount, datatype, stream, op=op)

    def allGather(self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int) -> None:
        self._collective("allGather", sendbuf, recvbuf, count, datatype, stream)

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._message(_Send, sendbuf, count, datatype, peer, stream)

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._message(_Recv, recvbuf, count, datatype, peer, stream)
