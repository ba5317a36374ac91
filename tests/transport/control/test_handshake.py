"""Proofs of the job's token. Both ends are objects of this test: nothing is sent."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from mpicoll.transport.control.connection import HELLO, REJECTED, WELCOME, Connection, ProtocolViolation
from mpicoll.transport.control.handshake import Handshake

TOKEN = b"token"
CLIENT, SERVER, SIZE = 2, 0, 4


@pytest.fixture
def ends() -> Iterator[tuple[Connection, Connection]]:
    """The attempt of the client, and the connection that the server has accepted."""
    with socket.socket() as one, socket.socket() as other:
        yield Connection(one, "attempt", SERVER), Connection(other, "stranger")


def sent(by: Connection) -> tuple[bytes, dict[str, Any]]:
    kind, _, _, payload = by.queue.popleft()
    return kind, json.loads(payload)


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
    client.answer(attempt, sent(accepted)[1])
    kind, hello = sent(attempt)
    assert kind == HELLO
    server.welcome(accepted, hello, dead.__contains__)
    kind, answer = sent(accepted)
    if kind == WELCOME:
        client.verify_welcome(attempt, answer)
    return kind


def test_both_ends_prove_the_token(ends: tuple[Connection, Connection]) -> None:
    assert shake(ends) == WELCOME
    assert ends[1].rank == CLIENT
    assert ends[1].deadline == float("inf")


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
    with pytest.raises(ProtocolViolation, match="wrong proof"):
        shake(ends, **fault)
    assert ends[1].rank == -1


def test_a_server_without_proof(ends: tuple[Connection, Connection]) -> None:
    """It may return what the client has sent, or replay the welcome of another connection."""
    attempt, accepted = ends
    client, server = Handshake(CLIENT, SIZE, TOKEN), Handshake(SERVER, SIZE, TOKEN)
    server.challenge(accepted)
    challenge = sent(accepted)[1]
    client.answer(attempt, challenge)
    hello = sent(attempt)[1]
    server.welcome(accepted, hello, lambda _: False)
    welcome = sent(accepted)[1]
    with pytest.raises(ProtocolViolation, match="wrong proof"):
        client.verify_welcome(attempt, {"proof": hello["proof"]})
    later = Connection(attempt.sock, "attempt", SERVER)
    client.answer(later, challenge)
    with pytest.raises(ProtocolViolation, match="wrong proof"):
        client.verify_welcome(later, welcome)
    client.verify_welcome(attempt, welcome)


@pytest.mark.parametrize("hello", [{}, {"rank": [], "nonce": {}, "proof": 3}, {"rank": 1, "nonce": "1", "proof": "ä"}])
def test_a_hello_of_another_form(ends: tuple[Connection, Connection], hello: dict[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        Handshake(SERVER, SIZE, TOKEN).welcome(ends[1], hello, lambda _: False)
