"""Framed messages on a socket, with flow control."""

from __future__ import annotations

import errno
import json
import secrets
import socket
import struct
from collections import deque
from collections.abc import Iterator
from typing import Any, TypeAlias

MESSAGE_LIMIT = 16 << 20
"""Maximum bytes of a message."""

CRASH_OUTPUT_LIMIT = 64 << 10
"""Maximum bytes of the crash output of a rank."""

WINDOW = 32 << 10
"""Maximum bytes that are in flight without an acknowledgement by the receiving process."""

_FRAGMENT = 8 << 10
_ACK_EVERY = 8 << 10

_STRANGER_LIMIT = 1 << 10
"""Maximum bytes of a message of a peer that has not proved the token."""

# Magic, bytes that follow, last fragment, source, destination, kind. In this order a header that crash output has cut
# is never valid, wherever it was cut.
_HEADER = struct.Struct("!8sIBiic")
_MAGIC = b"\0mpicoll"
_FATAL = b"Fatal Python error"

CHALLENGE, HELLO, WELCOME, JOINED, REJECTED = b"C", b"H", b"W", b"J", b"R"
MESSAGE, FAREWELL, FORWARDED, EXITED, REPORTED, ACK = b"M", b"L", b"B", b"G", b"T", b"A"
_KINDS = {CHALLENGE, HELLO, WELCOME, JOINED, REJECTED, MESSAGE, FAREWELL, FORWARDED, EXITED, REPORTED, ACK}

ALL = -1
"""The destination of a message to all other ranks."""

Packet: TypeAlias = tuple[bytes, int, int, bytes]
"""Kind, source, destination, and the payload: a JSON object."""


class ProtocolViolation(Exception):
    """The peer has violated the protocol."""


class Connection:
    """A socket with the packets that are to be sent on it and the part of the next packet that has arrived.

    Packets are sent in fragments, so that acknowledgements can be sent between them. An acknowledgement contains the
    number of bytes that the other process has read; at most WINDOW bytes are sent ahead of it.

    `role` is "stranger" or "client" for an accepted connection, "attempt", "hub" or "probe" for one that this rank
    has made.
    """

    def __init__(self, sock: socket.socket, role: str, rank: int = -1, address: str = "") -> None:
        self.sock = sock
        self.role = role
        self.rank = rank
        self.address = address
        self.connecting = False
        self.has_reported = False  # the peer has reported all exits that it had seen when the connection was made
        self.deadline = float("inf")
        self.nonce = secrets.token_hex(16)
        self.error: int | None = None
        self.events = 0  # for which the selector waits
        self.unacknowledged = False  # the other host's kernel may not have acknowledged everything yet
        self.queue: deque[Packet] = deque()
        self.crash_output = bytearray()
        self._sent = 0  # bytes of the first message in the queue
        self._wire = bytearray()
        self._unread = 0  # bytes sent that the other process has not acknowledged
        self._acks = bytearray()
        self._received = bytearray()
        self._message = bytearray()
        self._read = 0  # bytes not yet acknowledged

    def name(self) -> str:
        """Return a name of the peer for messages."""
        return f"rank {self.rank}" if self.rank >= 0 else "an unidentified peer"

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
            self.unacknowledged = True

    def _next(self) -> bool:
        if self._acks:
            self._wire += self._acks
            self._acks.clear()
        if self.queue:
            kind, source, dest, payload = self.queue[0]
            piece = memoryview(payload)[self._sent : self._sent + _FRAGMENT]
            size = _HEADER.size + len(piece)
            if self._unread + size <= WINDOW:
                self._sent += len(piece)
                last = self._sent == len(payload)
                self._wire += _HEADER.pack(_MAGIC, len(piece), last, source, dest, kind)
                self._wire += piece
                self._unread += size
                if last:
                    self.queue.popleft()
                    self._sent = 0
        return bool(self._wire)

    def read(self) -> Iterator[Packet]:
        """Yield the packets that have arrived; raise EOFError after the last one of a closed connection."""
        ended = False
        for _ in range(8):  # then other connections are served
            try:
                data = self.sock.recv(WINDOW * 2)
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
            # Crash output that has cut a message may continue behind the apparent end of that message.
            self.crash_output[:0] = _from_fatal(self._message)
            self._add_crash_output(self._received)
            raise EOFError

    def _messages(self) -> Iterator[Packet]:
        buffer = self._received
        while buffer:
            known = self.role in ("client", "hub")
            start = buffer.find(_MAGIC)
            header = _header(buffer) if start == 0 else None
            if header is None:
                if start == 0 and len(buffer) < _HEADER.size:
                    return
                if start <= 0:  # search behind the invalid header, and keep what may become a header
                    start = buffer.find(_MAGIC, 1)
                    partial = next((n for n in range(len(_MAGIC) - 1, 0, -1) if buffer.endswith(_MAGIC[:n])), 0)
                    start = len(buffer) - partial if start < 0 else start
                if start == 0:
                    return
                # Bytes that are not a frame were written by a signal handler of a dying process.
                if not known:
                    raise ProtocolViolation("invalid frame header")
                self._add_crash_output(bytes(buffer[:start]))
                del buffer[:start]
                continue
            length, last, source, dest, kind = header
            if kind == ACK:
                del buffer[: _HEADER.size]
                if length > self._unread:
                    raise ProtocolViolation("an acknowledgement of more than was sent")
                self._unread -= length
                continue
            size = _HEADER.size + length
            if len(buffer) < size:
                return
            self._message += memoryview(buffer)[_HEADER.size : size]
            del buffer[:size]
            self._acknowledge(size)
            if len(self._message) > (MESSAGE_LIMIT if known else _STRANGER_LIMIT):
                raise ProtocolViolation("the message is too long")
            if last:
                payload = bytes(self._message)
                self._message.clear()
                yield kind, source, dest, payload

    def _acknowledge(self, size: int) -> None:
        self._read += size
        if self._read >= _ACK_EVERY:
            self._acks += _HEADER.pack(_MAGIC, self._read, 1, 0, 0, ACK)
            self._read = 0

    def _add_crash_output(self, data: bytes | bytearray) -> None:
        self.crash_output += data[: max(0, 2 * CRASH_OUTPUT_LIMIT - len(self.crash_output))]

    def salvage(self, payload: bytes) -> None:
        """Take the crash output out of a payload that it has cut in the middle."""
        self._add_crash_output(_from_fatal(payload))

    def crash_text(self) -> str:
        """Return the crash output, without the remains of the message that it has cut."""
        start = self.crash_output.find(_FATAL)
        found = self.crash_output[start : start + CRASH_OUTPUT_LIMIT] if start >= 0 else b""
        return found.decode("utf-8", "backslashreplace")


def _from_fatal(data: bytes | bytearray) -> bytes | bytearray:
    """Return the part that may be crash output, which may continue behind it."""
    start = data.find(_FATAL)
    return data[start:] if start >= 0 else data[-len(_FATAL) :]


def _header(buffer: bytearray) -> tuple[int, int, int, int, bytes] | None:
    """Return the fields of the header at the beginning of `buffer`, without the magic; None if it is not valid."""
    if len(buffer) < _HEADER.size:
        return None
    _, length, last, source, dest, kind = _HEADER.unpack_from(buffer)
    if length > (WINDOW if kind == ACK else _FRAGMENT) or last > 1 or source < 0 or dest < ALL or kind not in _KINDS:
        return None
    return length, last, source, dest, kind


def encode(body: dict[str, Any]) -> bytes:
    """Return `body` as a payload. Raises ValueError if it is too long."""
    data = json.dumps(body).encode()
    if len(data) > MESSAGE_LIMIT:
        raise ValueError(f"a message of {len(data)} bytes; the limit is {MESSAGE_LIMIT} bytes")
    return data
