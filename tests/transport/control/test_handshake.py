"""Proofs of the job's token, and keys: what was drawn by both ends of a connection."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from mpicoll.transport.control.connection import CHALLENGE, REJECTED, WELCOME, Connection, Packet, ProtocolViolation
from mpicoll.transport.control.handshake import Handshake

TOKEN = b"token"
CLIENT, SERVER, SIZE = 2, 0, 4
NONCE = "0123456789abcdef" * 2


@pytest.fixture
def ends() -> Iterator[tuple[Connection, Connection]]:
    """The attempt of the client, and the connection that the server has accepted."""
    one, other = socket.socketpair()
    with one, other:
        for end in (one, other):
            end.setblocking(False)
        yield Connection(one, "attempt", SERVER), Connection(other, "stranger")


def pass_on(writer: Connection, reader: Connection) -> Packet:
    """The packet that `writer` has queued, as `reader` receives it."""
    writer.write()
    [packet] = reader.read()
    return packet


def shake(
    ends: tuple[Connection, Connection],
    token: bytes = TOKEN,
    claimed: int = CLIENT,
    server: Handshake | None = None,
    dead: tuple[int, ...] = (),
) -> bytes:
    """A handshake; return the kind of the server's answer."""
    attempt, accepted = ends
    client = Handshake(claimed, SIZE, token)
    server = server or Handshake(SERVER, SIZE, TOKEN)
    server.challenge(accepted)
    client.answer(attempt, json.loads(pass_on(accepted, attempt)[3]))
    server.welcome(accepted, json.loads(pass_on(attempt, accepted)[3]), dead.__contains__, {})
    return pass_on(accepted, attempt)[0]


def test_both_ends_prove_the_token(ends: tuple[Connection, Connection]) -> None:
    assert shake(ends) == WELCOME
    assert ends[1].rank == CLIENT


def test_a_dead_rank_is_rejected(ends: tuple[Connection, Connection]) -> None:
    assert shake(ends, dead=(CLIENT,)) == REJECTED


def test_the_port_of_another_rank(ends: tuple[Connection, Connection]) -> None:
    with pytest.raises(ProtocolViolation, match="belongs to another rank"):
        shake(ends, server=Handshake(1, SIZE, TOKEN))


@pytest.mark.parametrize(
    "fault",
    [{"token": b"other"}, {"claimed": SERVER}, {"claimed": SIZE}, {"claimed": -1}, {"server": Handshake(0, 5, TOKEN)}],
    ids=["another token", "the rank of the server", "no rank", "a negative rank", "another size"],
)
def test_a_client_without_proof(ends: tuple[Connection, Connection], fault: dict[str, Any]) -> None:
    with pytest.raises(ProtocolViolation, match=r"wrong proof|invalid frame header"):
        shake(ends, **fault)
    assert ends[1].rank == -1


def test_a_server_without_proof(ends: tuple[Connection, Connection]) -> None:
    """It may return what the client has sent, or repeat the welcome of another connection."""
    attempt, accepted = ends
    client, server = Handshake(CLIENT, SIZE, TOKEN), Handshake(SERVER, SIZE, TOKEN)
    server.challenge(accepted)
    accepted.write()
    challenge = attempt.sock.recv(4096, socket.MSG_PEEK)
    client.answer(attempt, json.loads(next(attempt.read())[3]))
    hello = json.loads(pass_on(attempt, accepted)[3])
    server.welcome(accepted, hello, lambda _: False, {})
    accepted.write()
    welcome = attempt.sock.recv(4096)
    for sent in (welcome, challenge):
        one, other = socket.socketpair()
        with one, other:
            one.setblocking(False)
            later = Connection(one, "attempt", SERVER)
            other.sendall(challenge)
            client.answer(later, json.loads(next(later.read())[3]))
            later.write()
            other.sendall(sent)
            with pytest.raises(ProtocolViolation, match="wrong tag"):
                list(later.read())


def test_a_rejection_without_proof(ends: tuple[Connection, Connection]) -> None:
    """Of a peer that has the challenge of the server, which anybody may ask for, and not the token."""
    attempt, accepted = ends
    Handshake(SERVER, SIZE, TOKEN).challenge(accepted)
    Handshake(CLIENT, SIZE, TOKEN).answer(attempt, json.loads(pass_on(accepted, attempt)[3]))
    accepted.set_keys(b"", b"")
    accepted.enqueue([(REJECTED, SERVER, CLIENT, b"{}")])
    with pytest.raises(ProtocolViolation, match="wrong tag"):
        pass_on(accepted, attempt)


def test_one_challenge_for_each_connection(ends: tuple[Connection, Connection]) -> None:
    assert shake(ends) == WELCOME
    attempt, accepted = ends
    accepted.enqueue([(CHALLENGE, SERVER, -1, b"{}")])
    with pytest.raises(ProtocolViolation, match="wrong tag"):
        pass_on(accepted, attempt)


@pytest.mark.parametrize(
    "hello",
    [
        {},
        {"rank": [], "nonce": NONCE, "proof": ""},
        {"rank": 1, "nonce": {}, "proof": ""},
        {"rank": 1, "nonce": NONCE + " 1", "proof": ""},
        {"rank": 1, "nonce": NONCE, "proof": "ä"},
    ],
)
def test_a_hello_of_another_form(ends: tuple[Connection, Connection], hello: dict[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        Handshake(SERVER, SIZE, TOKEN).welcome(ends[1], hello, lambda _: False, {})
