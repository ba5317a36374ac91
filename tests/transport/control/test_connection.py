"""Frames on a socket: packets, their tags, and crash output between and within them."""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import threading
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpicoll.transport.control.connection import (
    ALL,
    CRASH_OUTPUT_LIMIT,
    MESSAGE,
    REJECTED,
    WELCOME,
    WINDOW,
    Connection,
    Packet,
    ProtocolViolation,
)

KEYS = b"of one direction", b"of the other one"
WORDS = b'Fatal Python error: Segmentation fault\n\nThread 0x1 (most recent call first):\n  File "a.py", line 1\n'
EXAMPLES = [50, pytest.param(50_000, marks=[pytest.mark.long, pytest.mark.timeout(3600)])]


def pair(role: str = "client", keys: tuple[bytes, bytes] = KEYS) -> tuple[Connection, Connection]:
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    writer, reader = Connection(ends[0], role), Connection(ends[1], role)
    writer.set_keys(*KEYS)
    reader.set_keys(*reversed(keys))
    return writer, reader


def packet(text: str, kind: bytes = MESSAGE) -> Packet:
    return kind, 1, ALL, json.dumps({"text": text}).encode()


def frames(packets: Iterable[Packet]) -> bytes:
    """What a connection with KEYS sends of `packets`, which are less than its window."""
    writer, reader = pair()
    with writer.sock, reader.sock:
        writer.enqueue(packets)
        writer.write()
        assert writer.idle
        return reader.sock.recv(WINDOW * 2)


def receive(wire: bytes, reader: Connection, writer: Connection, cuts: Iterable[int] = ()) -> list[Packet]:
    """All packets that come out of `wire`, sent in parts that begin at `cuts`, before the end of the stream."""
    places = [0, *sorted(cuts), len(wire)]
    got: list[Packet] = []
    with writer.sock, reader.sock:
        for start, end in itertools.pairwise(places):
            writer.sock.sendall(wire[start:end])
            got += reader.read()
        writer.sock.close()
        with pytest.raises(EOFError):
            got += reader.read()
    return got


def outcome(wire: bytes, role: str = "client", keys: tuple[bytes, bytes] = KEYS) -> tuple[list[Packet], Connection]:
    writer, reader = pair(role, keys)
    return receive(wire, reader, writer), reader


# --- tags


@pytest.mark.parametrize("role", ["client", "hub"])
@pytest.mark.parametrize("change", ["forged", "replayed", "reordered", "dropped"])
def test_a_frame_with_a_wrong_tag_ends_the_packets(role: str, change: str) -> None:
    packets = [packet(f"number {number}") for number in range(4)]
    whole = frames(packets)
    size = len(whole) // 4
    parts = [whole[at : at + size] for at in range(0, len(whole), size)]
    changed = {
        "forged": [parts[0], parts[1].replace(b"number 1", b"number 7"), *parts[2:]],
        "replayed": [parts[0], parts[0], *parts[1:]],
        "reordered": [parts[0], parts[2], parts[1], parts[3]],
        "dropped": [parts[0], *parts[2:]],
    }
    got, reader = outcome(b"".join(changed[change]), role)
    assert got == packets[:1]
    assert reader.corrupt


def test_a_tag_of_another_connection_or_direction() -> None:
    wire = frames([packet("one")])
    assert outcome(wire)[0] == [packet("one")]
    for keys in ((b"another", KEYS[1]), (KEYS[1], KEYS[0])):
        got, reader = outcome(wire, keys=keys)
        assert (got, reader.corrupt) == ([], True)


@pytest.mark.parametrize("kind", [WELCOME, REJECTED, MESSAGE])
@pytest.mark.parametrize("role", ["attempt", "stranger"])
def test_an_unproven_peer_without_a_right_tag_is_refused(kind: bytes, role: str) -> None:
    wire = frames([packet("one", kind)])
    for keys in (KEYS, (b"another", b"")):
        writer, reader = pair(role, keys)
        with writer.sock, reader.sock:
            writer.sock.sendall(wire)
            if keys is KEYS:
                assert list(reader.read()) == [packet("one", kind)]
            else:
                with pytest.raises(ProtocolViolation, match="wrong tag"):
                    list(reader.read())


@pytest.mark.parametrize("genuine", [True, False])
def test_only_an_acknowledgement_with_the_right_tag_opens_the_window(genuine: bool) -> None:
    writer, reader = pair(keys=KEYS if genuine else (KEYS[0], b"another"))
    with writer.sock, reader.sock:
        writer.enqueue([packet("x" * 3 * WINDOW)])
        writer.write()
        assert list(reader.read()) == []
        reader.write()
        assert list(writer.read()) == []
        writer.write()
        if genuine:
            assert reader.sock.recv(1)
        else:
            with pytest.raises(BlockingIOError):
                reader.sock.recv(1)
        assert writer.corrupt is not genuine


# --- any bytes


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("role", ["client", "stranger"])
def test_any_bytes(role: str, examples: int) -> None:
    """They are no packets, and nothing but a violation of the protocol."""
    piece = st.binary(max_size=60) | st.sampled_from(
        [b"\0mpicoll", b"Fatal Python error", frames([packet("one")])[:22], frames([packet("one", REJECTED)])[:40]]
    )

    @settings(max_examples=examples, database=None)
    @given(st.lists(piece, max_size=8).map(b"".join), st.lists(st.integers(0, 400), max_size=4))
    def read(wire: bytes, cuts: list[int]) -> None:
        writer, reader = pair(role)
        try:
            assert receive(wire, reader, writer, [cut for cut in cuts if cut <= len(wire)]) == []
        except ProtocolViolation:
            assert role == "stranger"
        if role == "client":
            assert len(reader.crash_output) <= len(wire)

    read()


PACKETS = [packet("one"), packet("x" * 9000), packet("three", kind=WELCOME), packet(""), packet("y" * 300)]
WHOLE = frames(PACKETS)


@st.composite
def changes(draw: st.DrawFn) -> bytes:
    """What becomes of a valid stream of which parts are changed, removed, repeated or moved, or which ends early."""
    wire = WHOLE
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(wire)))
        end = draw(st.integers(start, min(start + 100, len(wire))) | st.integers(start, len(wire)))
        to = draw(st.integers(0, len(wire)))
        part = wire[start:end]
        wire = draw(
            st.sampled_from(
                [
                    wire[:start],
                    wire[:start] + wire[end:],
                    wire[:to] + part + wire[to:],
                    wire[:start] + bytes(byte ^ 1 for byte in part) + wire[end:],
                    wire[:start] + draw(st.binary(max_size=50)) + wire[end:],
                ]
            )
        )
    return wire


@pytest.mark.parametrize("examples", EXAMPLES)
def test_any_change_of_a_stream(examples: int) -> None:
    """Only packets of the beginning are received, each once; all of them only if all frames have arrived."""

    @settings(max_examples=examples, database=None)
    @given(changes(), st.lists(st.integers(0, len(WHOLE)), max_size=4))
    def read(wire: bytes, cuts: list[int]) -> None:
        writer, reader = pair()
        got = receive(wire, reader, writer, [cut for cut in cuts if cut <= len(wire)])
        assert got == PACKETS[: len(got)]

    read()


# --- crash output


@pytest.mark.parametrize("size", [3, 60, 400, 10_000])
def test_crash_output_that_cuts_a_message_anywhere(size: int) -> None:
    """A signal handler writes when a part of a message has gone, and the process dies."""
    whole = packet("x" * size)
    once = frames([whole])
    wire = frames([whole, whole])[len(once) :]
    cuts = range(len(wire) + 1) if len(wire) < 1000 else range(0, len(wire) + 1, 97)
    for cut in cuts:
        got, reader = outcome(once + wire[:cut] + WORDS)
        assert got == [whole] * (2 if cut == len(wire) else 1)
        assert reader.crash_text() == WORDS.decode(), cut


def test_crash_output_goes_on_behind_the_message_that_it_has_cut() -> None:
    """It is longer than the rest of the message, or another thread sends that rest, and more, before the end."""
    wire = frames([packet("x" * 300), packet("y")])
    for rest in (b"", wire[100:]):
        got, reader = outcome(wire[:100] + WORDS * 10 + rest + WORDS)
        assert got == []
        assert reader.crash_text().startswith(WORDS.decode() * 10)
        assert reader.crash_text().endswith(WORDS.decode())


def test_crash_output_does_not_control_a_terminal() -> None:
    _, reader = outcome(WORDS + b"\x1b[2J\x9b2J \xc2\x9b2J\r\0\ttext \xc3\xa4\n")
    assert reader.crash_text() == WORDS.decode() + "\\x1b[2J\\x9b2J \\x9b2J\\x0d\\x00\ttext ä\n"


def test_crash_output_in_pieces_and_a_message_after_them() -> None:
    """Another thread of the process that dies may still send."""
    writer, reader = pair()
    wire = WORDS + frames([packet("after")]) + b"more words\n"
    assert receive(wire, reader, writer, range(1, len(wire))) == [packet("after")]
    assert not reader.corrupt
    assert reader.crash_text() == WORDS.decode() + "more words\n"


@pytest.mark.parametrize("cut", [0, 100])
def test_crash_output_has_a_bound(cut: int) -> None:
    """Also that which comes behind a frame that it has cut."""
    writer, reader = pair()

    def write() -> None:
        writer.sock.setblocking(True)
        writer.sock.sendall(frames([packet("x" * 300)])[:cut] + WORDS * 10_000)
        writer.sock.close()

    thread = threading.Thread(target=write)
    thread.start()
    got: list[Packet] = []
    with reader.sock, contextlib.suppress(EOFError):
        while True:
            got += reader.read()
    thread.join()
    assert got == []
    assert len(reader.crash_text()) == CRASH_OUTPUT_LIMIT
    assert len(reader.crash_output) <= 2 * CRASH_OUTPUT_LIMIT
