"""Framed messages on a socket, with flow control."""

from __future__ import annotations

import errno
import json
import os
import socket
import struct
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

from mpicoll.transport.control.frame_tags import NO_TAG, TAG_SIZE, FrameTags
from mpicoll.transport.hashes import compare_digest

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

# Magic, bytes that follow the tag, last fragment, source, destination, kind. In this order a header that crash output
# has cut is never valid, wherever it was cut. The tag follows.
_HEADER = struct.Struct("!8sIBiic")
_PREFIX = _HEADER.size + TAG_SIZE
_MAGIC = b"\0mpicoll"
_FATAL = b"Fatal Python error"

CHALLENGE, HELLO, WELCOME, JOINED, REJECTED = b"C", b"H", b"W", b"J", b"R"
MESSAGE, FAREWELL, FAREWELLS, FORWARDED, EXITED, REPORTED, ACK = b"M", b"L", b"F", b"B", b"G", b"T", b"A"
_UNTAGGED = {CHALLENGE, HELLO}
_KINDS = {CHALLENGE, HELLO, WELCOME, JOINED, REJECTED, MESSAGE, FAREWELL, FAREWELLS, FORWARDED, EXITED, REPORTED, ACK}

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

    Only the first two frames, the challenge and the hello, come without a tag. Once :meth:`set_keys` was called, every
    frame must have the right one. Crash output has none: a signal handler writes it between two frames or into one. So
    a frame with a wrong tag is not taken for a forgery at once. The connection is then `corrupt`: what follows is
    collected as crash output, and no packet is received any more.

    `role` is "stranger", "waiting" or "client" for an accepted connection, "attempt", "hub" or "probe" for one that
    this rank has made. A connection adds itself to `changed` when there is something that :meth:`write` may send.
    """

    def __init__(
        self,
        sock: socket.socket,
        role: str,
        rank: int = -1,
        address: str = "",
        changed: set[Connection] | None = None,
    ) -> None:
        self.sock = sock
        self.role = role
        self.rank = rank
        self.address = address
        self.connecting = False
        self.has_reported = False  # the peer has reported all exits that it had seen when the connection was made
        self.has_reported_all = False  # and those that all other ranks had seen
        self.known_exits: list[tuple[int, int]] = []  # ranges of ranks whose exits the peer has known before
        self.deferred: list[Packet] = []  # while it waits to be that of a client
        self.nonce = os.urandom(16).hex()
        self.error: int | None = None
        self.events = 0  # for which the selector waits
        self.unacknowledged = False  # the other host's kernel may not have acknowledged everything yet
        self.queue: deque[Packet] = deque()
        self.crash_output = bytearray()
        self.corrupt = False
        self._changed: set[Connection] = set() if changed is None else changed
        self._send_tags: FrameTags | None = None
        self._receive_tags: FrameTags | None = None
        self._sent = 0  # bytes of the first message in the queue
        self._wire = bytearray()
        self._unread = 0  # bytes sent that the other process has not acknowledged
        self._received = bytearray()
        self._message = bytearray()
        self._read = 0  # bytes received that are not yet acknowledged

    def set_keys(self, send: bytes, receive: bytes) -> None:
        """Set the keys of the frames in both directions, when both nonces are known."""
        self._send_tags, self._receive_tags = FrameTags(send), FrameTags(receive)

    def enqueue(self, packets: Iterable[Packet]) -> None:
        """Queue packets, for the next :meth:`write`."""
        self.queue.extend(packets)
        self._changed.add(self)

    def name(self) -> str:
        """Return a name of the peer for messages."""
        return f"rank {self.rank}" if self.rank >= 0 else "an unidentified peer"

    @property
    def idle(self) -> bool:
        """True if everything has been handed to the kernel."""
        return not (self.queue or self._wire or self._owes_ack)

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
        while self._owes_ack:
            count = min(self._read, WINDOW)
            self._wire += self._make_frame(_HEADER.pack(_MAGIC, count, 1, 0, 0, ACK), b"", ACK)
            self._read -= count
        if self.queue:
            kind, source, dest, payload = self.queue[0]
            piece = payload[self._sent : self._sent + _FRAGMENT]
            size = _PREFIX + len(piece)
            if self._unread + size <= WINDOW:
                self._sent += len(piece)
                last = self._sent == len(payload)
                header = _HEADER.pack(_MAGIC, len(piece), last, source, dest, kind)
                self._wire += self._make_frame(header, piece, kind)
                self._unread += size
                if last:
                    self.queue.popleft()
                    self._sent = 0
        return bool(self._wire)

    @property
    def _owes_ack(self) -> bool:
        return self._read >= _ACK_EVERY and self._send_tags is not None

    def _make_frame(self, header: bytes, payload: bytes, kind: bytes) -> bytes:
        if kind in _UNTAGGED:
            tag = NO_TAG
        else:
            assert self._send_tags is not None, "there are no keys yet"
            tag = self._send_tags.next_tag(header + payload)
        return header + tag + payload

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
            if not self.corrupt:
                yield from self._messages()
            if self.corrupt:
                self._add_crash_output(self._received)
                self._received.clear()
        if ended:
            self._add_crash_output(self._received)
            raise EOFError

    def _messages(self) -> Iterator[Packet]:
        while frame := self._next_frame():
            length, last, source, dest, kind, payload = frame
            if kind == ACK:
                if length > self._unread:
                    raise ProtocolViolation("an acknowledgement of more than was sent")
                self._unread -= length
                continue
            self._message += payload
            self._read += _PREFIX + length
            if len(self._message) > (MESSAGE_LIMIT if self._is_proven else _STRANGER_LIMIT):
                raise ProtocolViolation("the message is too long")
            if last:
                whole = bytes(self._message)
                self._message.clear()
                yield kind, source, dest, whole

    def _next_frame(self) -> tuple[int, int, int, int, bytes, bytes] | None:
        """Remove and return the next frame: the fields of its header, and its payload. None if it is not complete."""
        buffer = self._received
        while start := _frame_start(buffer):
            # Bytes that are not a frame were written by a signal handler of a dying process.
            if not self._is_proven:
                raise ProtocolViolation("invalid frame header")
            self._add_crash_output(buffer[:start])
            del buffer[:start]
        header = _header(buffer)
        if header is None:
            return None
        length, _, _, _, kind = header
        size = _PREFIX + (0 if kind == ACK else length)
        if len(buffer) < size:
            return None
        frame = bytes(memoryview(buffer)[:size])
        if not self._has_right_tag(frame, kind):
            if not self._is_proven:
                raise ProtocolViolation("a frame with a wrong tag")
            self.corrupt = True
            return None
        del buffer[:size]
        return *header, frame[_PREFIX:]

    @property
    def _is_proven(self) -> bool:
        return self.role in ("client", "waiting", "hub")

    def _has_right_tag(self, frame: bytes, kind: bytes) -> bool:
        header, tag, payload = frame[: _HEADER.size], frame[_HEADER.size : _PREFIX], frame[_PREFIX:]
        if self._receive_tags is None or kind in _UNTAGGED:
            return self._receive_tags is None and kind in _UNTAGGED and tag == NO_TAG
        return compare_digest(tag, self._receive_tags.next_tag(header + payload))

    def _add_crash_output(self, data: bytes | bytearray) -> None:
        self.crash_output += data[: max(0, 2 * CRASH_OUTPUT_LIMIT - len(self.crash_output))]

    def crash_text(self) -> str:
        """Return the crash output, without the remains of the message that it has cut.

        Control characters are replaced: it has no tag, so other processes may have written it, and it is printed.
        """
        start = self.crash_output.find(_FATAL)
        found = self.crash_output[start : start + CRASH_OUTPUT_LIMIT] if start >= 0 else b""
        text = found.decode("utf-8", "backslashreplace")
        return "".join(char if char.isprintable() or char in "\n\t" else f"\\x{ord(char):02x}" for char in text)


def _frame_start(buffer: bytearray) -> int:
    """Return where the first frame begins, or may begin when more has arrived."""
    start = buffer.find(_MAGIC)
    if start == 0 and (len(buffer) < _HEADER.size or _header(buffer) is not None):
        return 0
    if start == 0:
        start = buffer.find(_MAGIC, 1)  # behind the invalid header
    if start < 0:
        partial = next((n for n in range(len(_MAGIC) - 1, 0, -1) if buffer.endswith(_MAGIC[:n])), 0)
        start = len(buffer) - partial
    return start


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
