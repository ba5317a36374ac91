"""Framed messages on a socket, with flow control."""

from __future__ import annotations

import errno
import json
import secrets
import socket
import struct
from collections import deque
from collections.abc import Iterator
from typing import Any

MESSAGE_LIMIT = 16 << 20
WORDS_LIMIT = 64 << 10

_WINDOW = 32 << 10
_FRAGMENT = 8 << 10
_ACK_EVERY = 8 << 10
_STRANGER_LIMIT = 1 << 10

# Magic, bytes that follow, last fragment, source, destination, kind. In this order no header that text has cut passes
# for one, wherever it was cut.
_HEADER = struct.Struct("!8sIBiic")
_MAGIC = b"\0mpicoll"
_FATAL = b"Fatal Python error"

_CHALLENGE, _HELLO, _WELCOME, _JOINED, _REJECTED = b"C", b"H", b"W", b"J", b"R"
_MESSAGE, _LEAVE, _HEARD, _GONE, _TOLD, _ACK = b"M", b"L", b"B", b"G", b"T", b"A"
_KINDS = {_CHALLENGE, _HELLO, _WELCOME, _JOINED, _REJECTED, _MESSAGE, _LEAVE, _HEARD, _GONE, _TOLD, _ACK}
_ALL = -1


class _Violation(Exception):
    """The peer has violated the protocol."""


_Outgoing = tuple[bytes, int, int, bytes]  # kind, source, destination, payload


class _Connection:
    """A socket with what is to be sent on it and what has come of the next message.

    Messages go in fragments, so that acknowledgements find their way between them. An acknowledgement tells how many
    bytes the other process has read; no more than _WINDOW are sent ahead of it.
    """

    def __init__(self, sock: socket.socket, role: str, rank: int = -1, where: str = "") -> None:
        self.sock = sock
        self.role = role  # "stranger" or "client" (they came to us), "attempt", "hub" or "probe" (we went to them)
        self.rank = rank
        self.where = where
        self.connecting = False
        self.told = False  # whether the other has said who was gone when the connection was made
        self.deadline = float("inf")
        self.nonce = secrets.token_hex(16)
        self.error: int | None = None
        self.events = 0  # what the selector watches for
        self.unsettled = False  # whether the other host may not have taken all yet
        self.queue: deque[_Outgoing] = deque()
        self.words = bytearray()
        self._sent = 0  # bytes of the first message in the queue
        self._wire = bytearray()
        self._unread = 0  # bytes sent that the other process has not acknowledged
        self._acks = bytearray()
        self._received = bytearray()
        self._message = bytearray()
        self._read = 0  # bytes not yet acknowledged

    def name(self) -> str:
        """Return a name of the peer for messages."""
        return f"rank {self.rank}" if self.rank >= 0 else "a stranger"

    @property
    def idle(self) -> bool:
        """True if everything has been handed to the kernel."""
        return not (self.queue or self._wire or self._acks)

    @property
    def blocked(self) -> bool:
        """True if the kernel's send buffer is full and bytes wait for it."""
        return bool(self._wire)

    def write(self) -> None:
        """Hand the kernel as much as it accepts. An error is stored until the end of the stream has been read."""
        if self.connecting or self.error is not None:
            return
        while self._wire or self._next():
            try:
                sent = self.sock.send(self._wire)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self.error = error.errno or errno.EPIPE
                return
            del self._wire[:sent]
            self.unsettled = True

    def _next(self) -> bool:
        if self._acks:
            self._wire += self._acks
            self._acks.clear()
        if self.queue:
            kind, source, dest, payload = self.queue[0]
            piece = memoryview(payload)[self._sent : self._sent + _FRAGMENT]
            size = _HEADER.size + len(piece)
            if self._unread + size <= _WINDOW:
                self._sent += len(piece)
                last = self._sent == len(payload)
                self._wire += _HEADER.pack(_MAGIC, len(piece), last, source, dest, kind)
                self._wire += piece
                self._unread += size
                if last:
                    self.queue.popleft()
                    self._sent = 0
        return bool(self._wire)

    def read(self) -> Iterator[_Outgoing]:
        """Yield the messages that have arrived. Raises EOFError at the end of the connection, after all before it."""
        ended = False
        for _ in range(8):  # then others have their turn
            try:
                data = self.sock.recv(_WINDOW * 2)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                self.error = self.error or error.errno or errno.ECONNRESET
                ended = True
                break
            if not data:
                ended = True
                break
            self._received += data
            yield from self._messages()
        if ended:
            # Text that cut a message in the middle; it may go on after what had seemed to be the end of that.
            self.words[:0] = _from_fatal(self._message)
            self._add_words(self._received)
            raise EOFError

    def _messages(self) -> Iterator[_Outgoing]:
        buffer = self._received
        while buffer:
            known = self.role in ("client", "hub")
            start = buffer.find(_MAGIC)
            header = _header(buffer) if start == 0 else None
            if header is None:
                if start == 0 and len(buffer) < _HEADER.size:
                    return
                if start <= 0:  # look behind what looked like a header, and spare what may become one
                    start = buffer.find(_MAGIC, 1)
                    partial = next((n for n in range(len(_MAGIC) - 1, 0, -1) if buffer.endswith(_MAGIC[:n])), 0)
                    start = len(buffer) - partial if start < 0 else start
                if start == 0:
                    return
                # Bytes that are not a frame were written by a signal handler of a dying process.
                if not known:
                    raise _Violation("protocol mismatch: no frame header")
                self._add_words(bytes(buffer[:start]))
                del buffer[:start]
                continue
            length, last, source, dest, kind = header
            if kind == _ACK:
                del buffer[: _HEADER.size]
                self._unread -= length
                continue
            size = _HEADER.size + length
            if len(buffer) < size:
                return
            self._message += memoryview(buffer)[_HEADER.size : size]
            del buffer[:size]
            self._acknowledge(size)
            if len(self._message) > (MESSAGE_LIMIT if known else _STRANGER_LIMIT):
                raise _Violation("a message that is too long")
            if last:
                payload = bytes(self._message)
                self._message.clear()
                yield kind, source, dest, payload

    def _acknowledge(self, size: int) -> None:
        self._read += size
        if self._read >= _ACK_EVERY:
            self._acks += _HEADER.pack(_MAGIC, self._read, 1, 0, 0, _ACK)
            self._read = 0

    def _add_words(self, data: bytes | bytearray) -> None:
        self.words += data[: max(0, 2 * WORDS_LIMIT - len(self.words))]

    def spoilt(self, payload: bytes) -> None:
        """Take the crash output out of a payload that it has cut in the middle."""
        self._add_words(_from_fatal(payload))

    def text(self) -> str:
        """Return the crash output, without the remains of the message that it has cut."""
        start = self.words.find(_FATAL)
        return self.words[start : start + WORDS_LIMIT].decode("utf-8", "backslashreplace") if start >= 0 else ""


def _from_fatal(data: bytes | bytearray) -> bytes | bytearray:
    """The part that may belong to last words, which may go on behind it."""
    start = data.find(_FATAL)
    return data[start:] if start >= 0 else data[-len(_FATAL) :]


def _header(buffer: bytearray) -> tuple[int, int, int, int, bytes] | None:
    """What follows the magic of a header, if this is one."""
    if len(buffer) < _HEADER.size:
        return None
    _, length, last, source, dest, kind = _HEADER.unpack_from(buffer)
    if length > (_WINDOW if kind == _ACK else _FRAGMENT) or last > 1 or source < 0 or dest < _ALL or kind not in _KINDS:
        return None
    return length, last, source, dest, kind


def _encode(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    if len(data) > MESSAGE_LIMIT:
        raise ValueError(f"a message of {len(data)} bytes; at most {MESSAGE_LIMIT} are possible")
    return data
