"""The handshake by which both ends of a new connection prove that they belong to the job.

The side that accepts sends a challenge, the other answers with a hello, which proves that it has the job's token, and
receives a welcome or a rejection. From then on, beginning with the welcome, every frame has a tag under a key that both
derive from the token and from the nonces that they have drawn for this connection: so the tag of the welcome is the
other side's proof, and a relayed proof allows no other process to send a frame.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from mpicoll.transport.control.connection import (
    CHALLENGE,
    HELLO,
    REJECTED,
    WELCOME,
    Connection,
    ProtocolViolation,
    encode,
)
from mpicoll.transport.hashes import blake2b, compare_digest


class Handshake:
    """The handshakes of rank `rank` of `size` in the job with the secret `token`.

    What the peer has sent is passed as `content`. Raises ProtocolViolation if that is not what a rank of this job
    sends, or KeyError, TypeError or ValueError if it does not have the right form.
    """

    def __init__(self, rank: int, size: int, token: bytes) -> None:
        self._rank = rank
        self._size = size
        self._token = token

    def challenge(self, accepted: Connection) -> None:
        """Send a challenge on a connection that this rank has accepted."""
        content = {"nonce": accepted.nonce, "rank": self._rank}
        accepted.enqueue([(CHALLENGE, self._rank, -1, encode(content))])

    def answer(self, attempt: Connection, content: dict[str, Any]) -> None:
        """Answer a challenge with a proof."""
        challenge = _nonce(content)
        if content["rank"] != attempt.rank:
            raise ProtocolViolation("the port belongs to another rank")
        text = f"{challenge} {attempt.nonce} {self._rank} {attempt.rank}"
        hello = {"rank": self._rank, "nonce": attempt.nonce, "proof": self._mac("proof", text).hex()}
        attempt.enqueue([(HELLO, self._rank, attempt.rank, encode(hello))])
        attempt.set_keys(send=self._mac("client-frames", text), receive=self._mac("server-frames", text))

    def welcome(
        self, accepted: Connection, content: dict[str, Any], is_dead: Callable[[int], bool], greeting: dict[str, Any]
    ) -> None:
        """Verify the answer to a challenge, and send a welcome with `greeting`, or a rejection if the rank counts as
        dead."""
        rank = int(content["rank"])
        text = f"{accepted.nonce} {_nonce(content)} {rank} {self._rank}"
        proof = self._mac("proof", text).hex()
        if not 0 <= rank < self._size or rank == self._rank or not compare_digest(proof, str(content["proof"])):
            raise ProtocolViolation("wrong proof of the job token")
        accepted.rank = rank
        accepted.set_keys(send=self._mac("server-frames", text), receive=self._mac("client-frames", text))
        rejected = is_dead(rank)
        accepted.enqueue(
            [(REJECTED, self._rank, rank, b"{}") if rejected else (WELCOME, self._rank, rank, encode(greeting))]
        )

    def _mac(self, use: str, connection: str) -> bytes:
        """Return what only a rank of this job can compute for `connection`: a proof, or the key of one direction."""
        return blake2b(f"{use} {connection} {self._size}".encode(), key=self._token, digest_size=32).digest()


def _nonce(content: dict[str, Any]) -> str:
    """Return the nonce of the peer, of the one form that leaves the text around it unambiguous."""
    nonce = content["nonce"]
    if not re.fullmatch("[0-9a-f]{32}", nonce):
        raise ValueError("not a nonce")
    return str(nonce)
